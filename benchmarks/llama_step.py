"""Measures the whole step of examples/train_llama.py: ours, NCCL's collectives, and torch's tensor parallelism.

    torchrun --nproc_per_node 4 benchmarks/llama_step.py --out benchmarks/results

The model of a preset with a few layers, embedding and head included: forward, backward, gradients of micro-batches,
clipping, AdamW on float32 weights; in bfloat16, with sequence parallelism.

ours: by algorithms of the operators, in one CUDA graph, and by the same trainer eagerly. nccl: sequential, with no
kernel of ours in the collectives; else the same. torch compiled, torch async TP: DTensor, every layer compiled
(benchmarks/torch_llama.py), the latter with products fused with collectives. They are not captured, so our eager rows
show what is not due to the graph; gradients of their embedding are dense.

All are in memory at once and take turns in a round; a sample is that of the slowest rank. The loss of the first step is
compared with nccl's. Rows have the time over that at the peak of bfloat16 products (causal attention counted half,
nothing recomputed), the memory that a trainer takes from torch's allocator at its peak, where the time goes, and the
floor, measured in the same rounds: that of the layers (layer.py), the products of the head, and the bytes of the
optimizer at the rate of a copy. The products and attention of all layers and micro-batches are one sample, and those of
the head another. Shorter samples would run at clocks that a GPU at its power limit does not hold for a step. Failures
of torch are listed with the reason. Without a GPU it only checks, on gloo with --tiny, that it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import layer_floor
from gpt.text import Text
from gpt.training import EAGER_STEPS
from llama.training import LlamaTrainer
from torch_llama import TorchTrainer
from train_llama import PEAK, TINY

import torch_overlap as to
from torch_overlap._timing import Samples, in_graph, interleave, ratio_of, slowest_rank, spread_of
from torch_overlap.mesh.models import PRESETS, Transformer
from torch_overlap.tools.bench import result
from torch_overlap.tools.bench.ranks import ENVIRONMENT, Ranks

LEAD_CYCLES = 1_000_000
ALGORITHMS = "auto,p2p"
EAGER = " eager"
TORCH = {"torch compiled": False, "torch async TP": True}  # name -> async_tp
# Bytes that AdamW reads and writes for a parameter: gradient, weight, two moments, and the 16-bit copy of the weight.
OPTIMIZER_BYTES = 4 + 8 + 8 + 8 + 2
TOLERANCE = 2e-2  # of the first loss


class StepVariants:
    """Trainers of the same model and text, each past its capture."""

    def __init__(self, shape: Transformer, ranks: Ranks, nccl: to.TorchComm, args: argparse.Namespace) -> None:
        self.ranks, self.shape, self.args = ranks, shape, args
        self.is_cuda = ranks.device.type == "cuda"
        self.missing: dict[str, str] = {}
        self.trainers: dict[str, LlamaTrainer] = {}
        self.peak_bytes: dict[str, int] = {}
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, min(shape.vocabulary, 256), (1 << 20,), generator=generator, dtype=torch.uint8)
        self.options: dict[str, Any] = {
            "accumulate": args.accumulate, "recompute": False, "batch_size": args.batch, "steps": 100, "rate": 1e-4,
            "seed": 0, "dtype": torch.bfloat16 if self.is_cuda else torch.float32,
        }  # fmt: skip
        text = Text(tokens, tokens, 1)
        self.add("nccl", partial(LlamaTrainer, shape, nccl, text, algorithm="sequential", graph=True, **self.options))
        for name in args.algorithms.split(","):
            self.add(name, partial(LlamaTrainer, shape, ranks.comm, text, algorithm=name, graph=True, **self.options))
        for name, async_tp in TORCH.items():
            make = partial(TorchTrainer, shape, nccl, text, algorithm="sequential", graph=False, async_tp=async_tp,
                           **self.options)  # fmt: skip
            if reason := ranks.try_on_all_ranks(partial(self.add, name, make)):
                self.missing[name] = reason
                self.trainers.pop(name, None)
        batch, dtype = args.batch // args.accumulate, self.options["dtype"]
        self.parts = layer_floor.parts_of(shape, ranks.size, batch, ranks.device, dtype)
        head = (shape.hidden, shape.vocabulary // ranks.size)
        self.head = layer_floor.products_of(shape.sequence * batch, [head], ranks.device, dtype)

    def add(self, name: str, make: Callable[[], LlamaTrainer]) -> None:
        """Makes a trainer and takes it past its capture. The loss of its first step must be nccl's."""
        gc.collect()
        before = self.fresh_memory()
        trainer = make()
        for step in range(EAGER_STEPS + 1):
            trainer.train_step(step)
        self.ranks.synchronize()
        first = trainer.losses[0].item()
        wanted = self.trainers["nccl"].losses[0].item() if self.trainers else first
        if not abs(first - wanted) <= TOLERANCE * abs(wanted):
            raise ValueError(f"llama_step: expected a first loss of {name} as nccl's {wanted:.4f}, got {first:.4f}")
        self.trainers[name] = trainer
        self.peak_bytes[name] = torch.cuda.max_memory_allocated() - before if self.is_cuda else 0

    def fresh_memory(self) -> int:
        """Returns the bytes in use, from which a new peak is counted."""
        if not self.is_cuda:
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def layers(self) -> None:
        """The products and the attention of all layers in a step."""
        for _ in range(self.args.accumulate * self.shape.layers):
            self.parts.products()
            self.parts.attention()

    def heads(self) -> None:
        for _ in range(self.args.accumulate):
            self.head()

    def measure(self) -> Samples:
        run: dict[str, Callable[[], object]] = {}
        for name, trainer in self.trainers.items():
            run[name] = partial(trainer.run_step, EAGER_STEPS + 1)
            if self.is_cuda and name in self.args.algorithms.split(","):
                trainer.compute()
                run[name + EAGER] = trainer.compute
        self.is_captured = {name: self.is_cuda and name not in TORCH and not name.endswith(EAGER) for name in run}
        calls: dict[str, Callable[[], object]] = {"layers": self.layers, "head": self.heads, "copy": self.parts.copy}
        if self.is_cuda:
            for name, call in calls.items():
                call()
                calls[name] = in_graph(call)
        captured = dataclasses.replace(self.ranks.captured, lead_cycles=LEAD_CYCLES)
        watch = {name: captured if self.is_captured.get(name, True) else self.ranks.eager for name in {**run, **calls}}
        samplers = {name: watch[name].sampler(call) for name, call in {**run, **calls}.items()}
        samples = slowest_rank(interleave(samplers, self.args.rounds, warmup=1), self.ranks.comm)
        self.kernels = {name: layer_floor.profile(call) for name, call in run.items()} if self.is_cuda else {}
        return samples

    def floor_of(self, samples: Samples) -> dict[str, float]:
        """Returns the floor of a step, in microseconds, and what it consists of."""
        layers, head, copy = (spread_of(samples[name]).median for name in ("layers", "head", "copy"))
        layers += self.args.accumulate * self.shape.layers * self.parts.elementwise_us(copy)
        held = self.shape.layers * self.shape.layer_parameters + 2 * self.shape.vocabulary * self.shape.hidden
        optimizer = layer_floor.us_of_bytes(OPTIMIZER_BYTES * held / self.ranks.size, copy)
        return {"us": layers + head + optimizer, "layers_us": layers, "head_us": head, "optimizer_us": optimizer}


def rows_of(variants: StepVariants, samples: Samples) -> list[dict[str, Any]]:
    shape, args, size = variants.shape, variants.args, variants.ranks.size
    floor = variants.floor_of(samples)
    peers = [name for name in ("nccl", *TORCH) if name in variants.trainers]
    flops = variants.trainers["nccl"].step_flops()
    rows = []
    for name, is_captured in variants.is_captured.items():
        us, iqr = spread_of(samples[name])
        rows.append({
            "op": "llama_step", "name": shape.name, "shape": [shape.layers, args.batch, args.accumulate],
            "dtype": str(variants.options["dtype"]).removeprefix("torch."), "tp": size,
            "mode": "graph" if is_captured else "eager", "algorithm": name.removesuffix(EAGER),
            "peers": {peer: spread_of(samples[peer]).median for peer in peers if peer != name}, "floor": floor,
            "us": us, "iqr_us": iqr, "ratio_floor": us / floor["us"],
            "tokens_per_second": 1e6 * args.batch * shape.sequence / us,
            "ratio_peak": us * 1e-6 * size * PEAK / flops,
            "peak_gib": variants.peak_bytes[name.removesuffix(EAGER)] / 2**30,
            **{f"over_{peer}": ratio_of(samples, name, peer).median for peer in peers if peer != name},
            "us_by_category": layer_floor.time_by_category(variants.kernels.get(name, [])),
        })  # fmt: skip
    return rows


def report(row: dict[str, Any]) -> str:
    over = "".join(f"  {row['over_' + peer]:.3f} x {peer}" for peer in row["peers"])
    lines = [f"{row['algorithm']:16s}{row['mode']:6s}{row['us'] / 1000:9.2f} ms +- {row['iqr_us'] / 1000:.2f}"
             f"  {row['tokens_per_second']:9.0f} tokens/s  {100 / row['ratio_peak']:5.1f} % of peak"
             f"  {row['peak_gib']:6.2f} GiB  {row['ratio_floor']:.3f} x floor{over}"]  # fmt: skip
    lines += [f"    {category:20s}{us / 1000:9.2f} ms" for category, us in row["us_by_category"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="llama3-8b", help="shape of the model (default: %(default)s)")
    add("--layers", type=int, default=4, help="default: %(default)s")
    add("--batch", type=int, default=8, help="sequences of a step (default: %(default)s)")
    add("--accumulate", type=int, default=8, help="micro-batches of a step (default: %(default)s)")
    add("--algorithms", default=ALGORITHMS, help="of ours (default: %(default)s)")
    add("--rounds", type=int, default=10)
    add("--out", type=Path, help="the folder of the result; default: it is only printed")
    add("--kernels", type=int, default=0, help="also prints this many of the longest kernels (default: none)")
    add("--tiny", action="store_true", help="sizes for a CPU, which measures nothing")
    args = parser.parse_args()
    if args.batch % args.accumulate != 0:
        parser.error(f"expected --batch divisible by --accumulate {args.accumulate}, got {args.batch}")
    ranks = Ranks.start("cuda" if torch.cuda.is_available() else "cpu")
    nccl = to.new_comm(ranks.comm.get_backend(), ranks.device, "step_nccl", hints={"custom_collectives": "off"})
    shape = TINY if args.tiny else dataclasses.replace(PRESETS[args.preset], layers=args.layers)
    variants = StepVariants(shape, ranks, nccl, args)
    rows = rows_of(variants, variants.measure())
    for row in rows:
        ranks.say(report(row))
    floor = rows[0]["floor"]
    ranks.say(f"{'floor':16s}{floor['us'] / 1000:9.2f} ms: layers {floor['layers_us'] / 1000:.2f}, head "
              f"{floor['head_us'] / 1000:.2f}, optimizer {floor['optimizer_us'] / 1000:.2f}")  # fmt: skip
    for name, kernels in variants.kernels.items() if args.kernels else ():
        ranks.say(f"longest kernels of {name}")
        for kernel, launches, us in layer_floor.longest(kernels, args.kernels):
            ranks.say(f"    {us / 1000:9.2f} ms {launches:6d} x {us / launches:9.1f} us  {kernel[:120]}")
    for name, why in variants.missing.items():
        ranks.say(f"  not run: {name}: {why}")
    if args.out is not None and ranks.rank == 0:
        environment = {name: os.environ.get(name, "") for name in ENVIRONMENT}
        found = result.result("llama_step", rows, environment=environment, missing=variants.missing)
        print(result.write(found, ranks.size, args.out))
    for trainer in variants.trainers.values():
        trainer.graph = None  # graphs must be freed before their communicators
    del variants
    gc.collect()
    nccl.finalize()
    ranks.stop()


if __name__ == "__main__":
    main()

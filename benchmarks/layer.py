"""One transformer layer, forward and backward, beside the same layer with NCCL's collectives and beside its prediction.

    torchrun --nproc_per_node 4 benchmarks/layer.py --models llama3-8b,llama3-70b --out benchmarks/results

A ParallelTransformerBlock with sequence parallelism in bf16, its gradients of norms summed at the end. ours: by
algorithms of the operators; nccl: one after the other, with no kernel of ours in the collectives. All of them take
turns in a round, in CUDA graphs; a sample is that of the slowest rank. "predicted": the planner's, with the cost model
of H200s. Every way's result and gradients are compared with those of nccl before anything is timed. Without a GPU it
shows on gloo that it runs, with --tiny.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_overlap as to
from torch_overlap.bench.result import write_result
from torch_overlap.bench.timing import Stopwatch, in_graph, interleave, ratio_of, slowest_rank, spread_of
from torch_overlap.mesh import Mesh
from torch_overlap.mesh.transformer import PRESETS, Transformer, predict_layer

LEAD_CYCLES = 1_000_000
ALGORITHMS = ("auto", "ring", "sequential")


class Layer:
    """A block, its input and the gradient of its output: the same numbers for every way, by a seed."""

    def __init__(self, model: Transformer, comm: to.TorchComm, algorithm: str, batch: int, dtype: torch.dtype) -> None:
        device, size = comm.get_device(), comm.get_size()
        torch.manual_seed(1 + comm.get_rank())
        self.block = to.nn.ParallelTransformerBlock(
            model.hidden, model.heads, model.ffn, comm, kv_heads=model.kv_heads,
            activation="swiglu" if model.gated else "gelu", norm="rms", bias=False, dtype=dtype, algorithm=algorithm,
        )  # fmt: skip
        rows = (model.sequence // size, batch, model.hidden)
        self.x = torch.randn(rows, device=device, dtype=dtype, requires_grad=True)
        self.grad = torch.randn(rows, device=device, dtype=dtype)

    def step(self) -> Tensor:
        self.block.zero_grad(set_to_none=True)
        self.x.grad = None
        y: Tensor = self.block(self.x)
        y.backward(self.grad)
        to.nn.sync_replicated_grads(self.block)
        return y

    def results(self) -> list[Tensor]:
        y = self.step()
        grads = [p.grad for p in (self.x, *self.block.parameters())]
        return [y.detach().clone(), *(g.clone() for g in grads if g is not None)]


def check(name: str, got: list[Tensor], wanted: list[Tensor]) -> None:
    """16-bit sums in other orders differ by some roundings of the largest."""
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        bound = 0.05 * b.float().abs().max()
        worst = (a.float() - b.float()).abs().max()
        if not worst <= bound:
            raise SystemExit(f"layer: expected {name} within {bound:.3g} of nccl's, got {worst:.3g}")


def rows_of(model: Transformer, comms: dict[str, to.TorchComm], args: argparse.Namespace) -> list[dict[str, Any]]:
    ours = comms["ours"]
    is_cuda, size = ours.get_device().type == "cuda", ours.get_size()
    dtype = torch.bfloat16 if is_cuda else torch.float32
    watch = Stopwatch(ours.get_device(), partial(ours.barrier, async_op=False), LEAD_CYCLES if is_cuda else 0)
    layers = {"nccl": Layer(model, comms["nccl"], "sequential", args.batch, dtype)}
    layers |= {name: Layer(model, ours, name, args.batch, dtype) for name in ALGORITHMS}
    wanted = layers["nccl"].results()
    for name, layer in layers.items():
        check(name, layer.results(), wanted)
    calls = {name: in_graph(layer.step) if is_cuda else layer.step for name, layer in layers.items()}
    samples = slowest_rank(interleave({name: watch.sampler(call) for name, call in calls.items()}, args.rounds), ours)
    mesh = Mesh({"tp": size})
    predicted = {
        overlap: 1e6 * predict_layer(model, mesh, batch=args.batch, overlap=overlap) for overlap in (True, False)
    }
    rows = []
    for name in ALGORITHMS:
        us, iqr = spread_of(samples[name])
        rows.append({
            "op": "layer", "name": model.name, "shape": [model.sequence * args.batch, model.ffn, model.hidden],
            "dtype": str(dtype).removeprefix("torch."), "tp": size, "mode": "graph" if is_cuda else "eager",
            "algorithm": name, "us": us, "iqr_us": iqr, "over_nccl": ratio_of(samples, name, "nccl").median,
            "predicted_us": predicted[name != "sequential"], "peers": {"nccl": spread_of(samples["nccl"]).median},
        })  # fmt: skip
        if ours.get_rank() == 0:
            row = rows[-1]
            print(f"{model.name:12s} {name:10s} {us:10.1f} us +- {iqr:.1f}  {row['over_nccl']:.3f} x nccl"
                  f"  predicted {row['predicted_us']:.1f}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama3-8b,llama3-70b", help=f"of {', '.join(sorted(PRESETS))}")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="the folder of the result; default: it is only printed")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, which measures nothing")
    args = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    backend = "nccl" if is_cuda else "gloo"
    comms = {"ours": to.new_comm(backend, device, name="layer")}
    comms["nccl"] = to.new_comm(backend, device, name="layer_nccl", hints={"direct_collectives": "off"})
    rows = []
    for name in args.models.split(","):
        model = PRESETS[name]
        if args.tiny:
            model = replace(model, hidden=64, heads=8, kv_heads=4, ffn=96, sequence=32)
        rows += rows_of(model, comms, args)
    if args.out is not None and comms["ours"].get_rank() == 0:
        print(write_result("layer", comms["ours"].get_size(), rows, args.out))
    for comm in comms.values():
        comm.finalize()


if __name__ == "__main__":
    main()

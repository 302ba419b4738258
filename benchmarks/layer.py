"""Measures one transformer layer, forward and backward: ours, NCCL's collectives, torch's async TP, and the prediction.

    torchrun --nproc_per_node 4 benchmarks/layer.py --models llama3-8b,llama3-70b --out benchmarks/results

A ParallelTransformerBlock with sequence parallelism in bf16, with its gradients of norms summed at the end.

ours: by algorithms of the operators, each also with changes: "p2p+kept" keeps the gathered rows for the backward pass,
"p2p+silu" and "p2p+norms" compute the gated activation, or the norms, by torch's kernels, "p2p+mesh" has
parameters that are DTensors of a DeviceMesh, and with --accumulate, where gradients are added to those of the step
before, "p2p+main_grad" lets the products add them to float32 buffers. nccl: sequential, with no kernel of ours in the
collectives; torch fused: the same as nccl with the products of torch's async tensor parallelism, "joined" with one
weight for all products of a gather (async_tp.py); no communication: the latter with nothing
sent. All but "+silu" and "+norms" have our kernels of these.

All of them take turns in a round, in CUDA graphs, ours also eagerly: several steps in a row, since in a model the host
is ahead after the first layer. A sample is that of the slowest rank. Rows carry
the layer's floor, measured in the same rounds, and where the time of a replay goes
(layer_floor.py). "predicted": the planner's, with the cost model of H200s. The result and
gradients of every variant are compared with those of nccl before anything is timed; failures of other libraries are
listed with the reason. Without a GPU it only checks, on gloo with --tiny, that it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import layer_floor
import torch
import torch.distributed as dist
import torch.nn.functional as F
from async_tp import Products, use_async_tp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import torch_overlap as to
from torch_overlap._timing import Samples, in_graph, interleave, ratio_of, slowest_rank, spread_of
from torch_overlap.mesh import Mesh
from torch_overlap.mesh.models import PRESETS, Transformer
from torch_overlap.mesh.transformer import predict_layer
from torch_overlap.tools.bench import result
from torch_overlap.tools.bench.ranks import ENVIRONMENT, Ranks

LEAD_CYCLES = 1_000_000
EAGER_STEPS = 8  # in a sample of an eager row
ALGORITHMS = "auto,p2p,p2p+mesh,sequential"
NO_COMMUNICATION = "no communication"
EAGER = " eager"
TORCH_FUSED = {"torch fused": False, "torch fused joined": True}  # name -> True if the weights of one gather are joined


def _silu_apart(mlp: to.nn.ParallelMLP, x: Tensor) -> Tensor:
    gate, up = mlp.up(x)
    return F.silu(gate) * up


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


class Layer:
    """A block, its input and the gradient of its output: the same numbers for every variant, by a seed.

    Args:
        variant: an algorithm, and changes: "p2p+kept+silu".
        accumulates: if True, a step adds its gradients to those of the step before.
    """

    def __init__(self, model: Transformer, comm: to.TorchComm, variant: str, batch: int, dtype: torch.dtype,
                 accumulates: bool = False) -> None:  # fmt: skip
        algorithm, *changes = variant.split("+")
        if unknown := set(changes) - {"kept", "silu", "norms", "mesh", "main_grad"}:
            raise ValueError(
                f"layer: expected changes among kept, silu, norms, mesh and main_grad, got {sorted(unknown)}"
            )
        device, size = comm.get_device(), comm.get_size()
        torch.manual_seed(1 + comm.get_rank())
        over = to.device_mesh.init_device_mesh([comm], ["tp"]) if "mesh" in changes else comm
        self.block = to.nn.ParallelTransformerBlock(
            model.hidden, model.heads, model.ffn, over, kv_heads=model.kv_heads,
            activation="swiglu" if model.gated else "gelu", norm="rms", norm_eps=1e-5, bias=False, dtype=dtype,
            algorithm=algorithm, keep_gathered="kept" in changes,
            gradient_accumulation_fusion="main_grad" in changes,
        )  # fmt: skip
        if "silu" in changes and model.gated:
            self.block.mlp._gated = partial(_silu_apart, self.block.mlp)
        for name in ("attention_norm", "mlp_norm") if "norms" in changes else ():
            norm = nn.RMSNorm(model.hidden, eps=1e-5, device=device, dtype=dtype)
            to.nn.mark_replicated(norm, comm)
            setattr(self.block, name, norm)
        self.accumulates, self.buffers = accumulates, []
        if "main_grad" in changes:
            for parameter in (p for p in self.block.parameters() if p.dim() == 2):
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
                self.buffers.append(parameter.main_grad)
        to.nn.defer_replicated_grads(self.block)  # one sum for both norms
        rows = (model.sequence // size, batch, model.hidden)
        self.x = torch.randn(rows, device=device, dtype=dtype, requires_grad=True)
        self.grad = torch.randn(rows, device=device, dtype=dtype)

    def step(self) -> Tensor:
        if not self.accumulates:
            self.clear()
        self.x.grad = None
        y: Tensor = self.block(self.x)
        y.backward(self.grad)
        to.nn.sync_replicated_grads(self.block)
        return y

    def clear(self) -> None:
        self.block.zero_grad(set_to_none=True)
        for buffer in self.buffers:
            buffer.zero_()

    def results(self) -> list[Tensor]:
        self.clear()
        y = self.step()
        grads = [getattr(p, "main_grad", p.grad) for p in (self.x, *self.block.parameters())]
        return [y.detach().clone(), *(_local(g).clone() for g in grads if g is not None)]


def check(name: str, got: list[Tensor], reference: list[Tensor]) -> None:
    """Compares results. 16-bit sums in another order differ by some roundings of the largest value. A joined weight
    consists of its parts in order.

    Raises:
        ValueError: they differ by more.
    """
    parts = torch.cat([t.flatten() for t in got]).split([t.numel() for t in reference])
    for a, b in zip(parts, reference, strict=True):
        bound = 0.05 * b.float().abs().max()
        worst = (a.float() - b.float().flatten()).abs().max()
        if not worst <= bound:
            raise ValueError(f"layer: expected {name} within {bound:.3g} of nccl's, got {worst:.3g}")


class LayerVariants:
    """The same layer in several variants, all of them checked, without those of other libraries that fail."""

    def __init__(self, model: Transformer, ranks: Ranks, nccl: to.TorchComm, args: argparse.Namespace) -> None:
        self.ranks = ranks
        self.is_cuda = ranks.device.type == "cuda"
        dtype = torch.bfloat16 if self.is_cuda else torch.float32
        make = partial(Layer, model, batch=args.batch, dtype=dtype, accumulates=args.accumulate)
        self.layers = {"nccl": make(nccl, "sequential")}
        self.missing: dict[str, str] = {}
        reference = self.layers["nccl"].results()
        for name in args.algorithms.split(","):
            self.layers[name] = make(ranks.comm, name)
            check(name, self.layers[name].results(), reference)
        for name, joined in TORCH_FUSED.items():

            def add(name: str = name, joined: bool = joined) -> None:
                layer = make(nccl, "sequential")
                use_async_tp(layer.block, Products.fused(dist.group.WORLD, ranks.device), joined)
                check(name, layer.results(), reference)
                self.layers[name] = layer

            self.try_on_all_ranks(name, add)
        alone = make(nccl, "sequential")
        use_async_tp(alone.block, layer_floor.without_communication(ranks.size), joined=True)
        alone.results()
        self.layers[NO_COMMUNICATION] = alone
        self.parts = layer_floor.parts_of(model, ranks.size, args.batch, ranks.device, dtype)
        self.eager = [name + EAGER for name in args.algorithms.split(",")] if self.is_cuda else []
        self.by_category: dict[str, dict[str, float]] = {}

    def try_on_all_ranks(self, name: str, action: Callable[[], object]) -> None:
        if reason := self.ranks.try_on_all_ranks(action):
            self.missing[name] = reason
            self.layers.pop(name, None)

    def calls(self) -> dict[str, Callable[[], object]]:
        """Returns the calls to time: on a GPU replays of graphs, ours also eagerly. All layers have run before."""
        calls: dict[str, Callable[[], object]] = {}
        for name, layer in list(self.layers.items()):

            def capture(name: str = name, layer: Layer = layer) -> None:
                calls[name] = in_graph(layer.step) if self.is_cuda else layer.step

            if name in TORCH_FUSED:
                self.try_on_all_ranks(name, capture)
            else:
                capture()
        for name, part in self.parts.calls().items():
            part()
            calls[name] = in_graph(part) if self.is_cuda else part
        if self.is_cuda:
            self.by_category = {name: layer_floor.time_by_category(layer_floor.profile(calls[name]))
                                for name in self.layers}  # fmt: skip
        calls |= {name: self.layers[name.removesuffix(EAGER)].step for name in self.eager}
        return {name: calls[name] for name in (*self.layers, *self.eager, *self.parts.calls())}


def measure(ways: LayerVariants, rounds: int) -> Samples:
    watch = dataclasses.replace(ways.ranks.captured, lead_cycles=LEAD_CYCLES)
    eager = partial(ways.ranks.eager.sampler, repeats=EAGER_STEPS)
    samplers = {name: (eager if name in ways.eager else watch.sampler)(call) for name, call in ways.calls().items()}
    return slowest_rank(interleave(samplers, rounds), ways.ranks.comm)


def rows_of(model: Transformer, ways: LayerVariants, samples: Samples, batch: int) -> list[dict[str, Any]]:
    size = ways.ranks.size
    peers = [name for name in ("nccl", *TORCH_FUSED) if name in samples]
    common = {
        "op": "layer", "name": model.name, "shape": [model.sequence * batch, model.ffn, model.hidden],
        "dtype": str(ways.layers["nccl"].x.dtype).removeprefix("torch."), "tp": size,
        "accumulates": ways.layers["nccl"].accumulates,
        "peers": {peer: spread_of(samples[peer]).median for peer in peers},
    }  # fmt: skip
    parts = {name: spread_of(samples[name]).median for name in ways.parts.calls()}
    floor = ways.parts.floor_us(*parts.values())
    common["floor"] = {
        "us": floor, "products_us": parts["products"], "attention_us": parts["attention"],
        "elementwise_us": ways.parts.elementwise_us(parts["copy"]),
    }  # fmt: skip
    rows = []
    for name in (name for name in samples if name not in (*peers, *parts)):
        us, iqr = spread_of(samples[name])
        over = {f"over_{peer}": ratio_of(samples, name, peer).median for peer in (*peers, NO_COMMUNICATION)}
        by_category = ways.by_category.get(name, {})
        mode = "graph" if ways.is_cuda and name not in ways.eager else "eager"
        rows.append(common | {"mode": mode, "algorithm": name.removesuffix(EAGER), "us": us, "iqr_us": iqr,
                              "ratio_floor": us / floor, **over, "us_by_category": by_category})  # fmt: skip
    return rows


def report(model: Transformer, batch: int, rows: list[dict[str, Any]], missing: dict[str, str]) -> str:
    """Returns the text of the rows, with the planner's prediction, which is not a result and not in the file."""
    lines = []
    for row in rows:
        mesh, overlap = Mesh({"tp": row["tp"]}), row["algorithm"] != "sequential"
        predicted = 1e6 * predict_layer(model, mesh, batch=batch, overlap=overlap)
        over = "".join(f"  {row['over_' + peer]:.3f} x {peer}" for peer in (*row["peers"], NO_COMMUNICATION))
        lines.append(f"{row['name']:12s} {row['algorithm']:18s}{row['mode']:6s}{row['us']:10.1f} us"
                     f" +- {row['iqr_us']:.1f}{over}  {row['ratio_floor']:.3f} x floor"
                     f"  predicted {predicted:.1f}")  # fmt: skip
        lines += [f"    {category:20s}{us:10.1f} us" for category, us in row["us_by_category"].items()]
    floor = rows[0]["floor"]
    lines.append(f"{rows[0]['name']:12s} {'floor':20s}{floor['us']:10.1f} us: products {floor['products_us']:.1f}, "
                 f"attention {floor['attention_us']:.1f}, element-wise {floor['elementwise_us']:.1f}")  # fmt: skip
    lines += [f"{rows[0]['name']:12s} {peer:20s}{us:10.1f} us" for peer, us in rows[0]["peers"].items()]
    return "\n".join(lines + [f"  not run: {name}: {why}" for name, why in missing.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama3-8b,llama3-70b", help=f"of {', '.join(sorted(PRESETS))}")
    parser.add_argument("--algorithms", default=ALGORITHMS, help="of ours, with changes (default: %(default)s)")
    parser.add_argument("--accumulate", action="store_true", help="gradients are added to those of the step before")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="the folder of the result; default: it is only printed")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, which measures nothing")
    args = parser.parse_args()
    ranks = Ranks.start("cuda" if torch.cuda.is_available() else "cpu")
    nccl = to.new_comm(ranks.comm.get_backend(), ranks.device, "layer_nccl", hints={"custom_collectives": "off"})
    rows, missing = [], {}
    for name in args.models.split(","):
        model = PRESETS[name]
        if args.tiny:
            model = dataclasses.replace(model, hidden=64, heads=8, kv_heads=4, ffn=96, sequence=32)
        ways = LayerVariants(model, ranks, nccl, args)
        of_model = rows_of(model, ways, measure(ways, args.rounds), args.batch)
        ranks.say(report(model, args.batch, of_model, ways.missing))
        rows += of_model
        missing[name] = ways.missing
        del ways  # also frees its memory, before the next model's
    if args.out is not None and ranks.rank == 0:
        environment = {name: os.environ.get(name, "") for name in ENVIRONMENT}
        found = result.result("layer", rows, environment=environment, missing=missing)
        print(result.write(found, ranks.size, args.out))
    nccl.finalize()
    ranks.stop()


if __name__ == "__main__":
    main()

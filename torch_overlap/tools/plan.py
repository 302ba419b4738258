"""`python -m torch_overlap plan`: the step time and traffic of a transformer on any number of ranks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_overlap.mesh._core import CostModel, Mesh
from torch_overlap.mesh.cost import load_cost_model
from torch_overlap.mesh.models import PRESETS, Transformer
from torch_overlap.mesh.transformer import Prediction, best, predict

__all__ = ["add_arguments", "run"]

_PARTS = {
    "compute": "#2b6cb0",
    "moving": "#d9822b",
    "gradients": "#2f855a",
    "bubble": "#a0aec0",
    "optimizer": "#805ad5",
}


# A prediction beyond this fraction of the device's memory is marked: it leaves some memory out.
_TIGHT = 0.95

_EPILOG = """\
Examples:
  plan --model llama3-8b --ranks 64                               every dp, tp and pp of 64 ranks, fastest first
  plan --model llama3-70b --mesh dp=8,tp=4 --batch 64             one mesh, with the collectives of a layer
  plan --model llama3-8b --ranks 64 --hidden 5120 --heads 40      shapes of your own, other sizes as in the model
  plan --model llama3-70b --ranks 2048 --batch 2048 --scaling --plot plan.png

Columns of the table, for one step of the slowest rank:
  mesh         sizes of the axes: pp pipeline stages, dp replicas, tp ranks of tensor parallelism
  step ms      the step: the sum of the next five columns
  compute      products, attention and elementwise kernels, forward and backward
  moving       collectives and sends of activations that no product hides
  grads        reduction of gradients that the backward pass does not hide
  bubble       idle time of the pipeline
  optim.       the optimizer (AdamW in float32)
  Mtok/s       millions of tokens a second over all ranks
  TF/rank      model TFLOP/s of a rank: 6 per parameter and token, and attention
  GB           memory of a rank: 18 bytes a parameter (weight, gradient, both moments, 16-bit copy) and 34 bytes per
               token and hidden unit of each layer that waits for its backward pass. Logits, buffers of
               collectives and fragmentation are not counted. "!" marks a mesh within 5 % of --memory, or beyond it
  sent a rank  bytes that a rank sends, by axis
Below the table are the collectives of one layer of the first mesh, forward: operator, collective and axis, bytes
on the wire, time without overlap. --scaling adds the best mesh of each power of two.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("--model", choices=sorted(PRESETS), default="llama3-8b", help="The model's shapes. Default: %(default)s.")
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "sequence"):
        add(f"--{name.replace('_', '-')}", type=int, metavar="N", help="Replaces this size of the model.")
    add("--ranks", type=int, metavar="N", help="Compares every dp, tp and pp of this number of ranks.")
    add("--mesh", metavar="AXES", help="Predicts this mesh alone, such as dp=8,tp=4. The axes are dp, tp and pp.")
    add(
        "--ranks-per-host",
        type=int,
        default=8,
        metavar="N",
        help="Ranks of a host, which NVLink connects; hosts are connected by a network. Default: %(default)s.",
    )
    add("--batch", type=int, metavar="N", help="Sequences of a step over all ranks. Default: one for each rank.")
    add(
        "--micro-batches",
        type=int,
        metavar="N",
        help="With --mesh: how many parts of its batch a replica runs one after the other before it updates.",
    )
    add("--no-overlap", action="store_true", help="With --mesh: lets no product hide a collective.")
    add(
        "--cost",
        type=Path,
        metavar="FILE",
        help="A cost model as JSON. Default: H200, measured, with an assumed network.",
    )
    add(
        "--memory",
        type=float,
        default=141,
        metavar="GB",
        help="Memory of a device in GB. With --ranks, meshes that need more are left out. Default: %(default)s.",
    )
    add("--top", type=int, default=10, metavar="N", help="Number of meshes to show. Default: %(default)s.")
    add(
        "--scaling",
        action="store_true",
        help="Adds the best mesh of 1, 2, 4 ... ranks with the same number of sequences a rank.",
    )
    add("--plot", type=Path, metavar="FILE", help="Writes a PNG file of what is shown. Needs matplotlib.")
    add("--json", type=Path, metavar="FILE", help="Writes all predictions to this file. Times are in seconds.")


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit status.

    Raises:
        ValueError: the request is invalid.
    """
    cost = load_cost_model(args.cost) if args.cost else CostModel.h200()
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "sequence")
    model = replace(PRESETS[args.model], **{n: getattr(args, n) for n in names if getattr(args, n) is not None})
    if (args.mesh is None) == (args.ranks is None):
        raise ValueError("plan: expected --mesh or --ranks, got both or none of them; give one")
    if args.mesh is not None:
        mesh = Mesh.parse(args.mesh, args.ranks_per_host)
        found: Sequence[Prediction] = [
            predict(model, mesh, batch=args.batch or mesh.size, cost=cost, micro_batches=args.micro_batches,
                    overlap=not args.no_overlap)
        ]  # fmt: skip
    else:
        found = best(model, args.ranks, args.batch or args.ranks, args.ranks_per_host, cost, args.memory * 1e9)
        if not found:
            raise ValueError(
                f"plan: expected a mesh of {args.ranks} ranks that divides {model.name} and fits into "
                f"{args.memory} GB, got none; change --ranks, --batch or --memory"
            )
    scaling = _scaling(model, found[0], args, cost) if args.scaling else []
    print(report(model, found[: args.top], cost, args.memory * 1e9))
    if scaling:
        print(_scaling_table(scaling))
    if args.json:
        content = {
            "model": model.name, "cost": cost.name, "device_memory": args.memory * 1e9,
            "rows": [row(p) for p in found], "scaling": [row(p) for p in scaling],
        }  # fmt: skip
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.plot:
        print(draw(model, found[: args.top], scaling, args.plot))
    return 0


def row(p: Prediction) -> dict[str, Any]:
    """Returns one prediction as plain values."""
    return {
        "mesh": p.mesh.axes, "batch": p.batch, "micro_batches": p.micro_batches, "seconds": p.seconds,
        **{part: getattr(p, part) for part in _PARTS}, "tokens_per_second": p.tokens_per_second,
        "tflops_per_rank": p.flops_per_second / 1e12, "memory": p.memory, "traffic": p.traffic,
    }  # fmt: skip


def report(model: Transformer, found: Sequence[Prediction], cost: CostModel, memory: float) -> str:
    """Returns the table, a note on meshes whose memory is tight, and the traffic of one layer of the first mesh.
    `memory`: bytes of a device."""
    first = found[0]
    lines = [
        f"{model.name}: {model.parameters / 1e9:.2f} G parameters, {model.layers} layers of {model.hidden}, "
        f"sequences of {model.sequence}; {first.batch} a step on {first.mesh.size} ranks; costs: {cost.name}",
        "",
        f"{'mesh':24}{'step ms':>9}{'compute':>9}{'moving':>8}{'grads':>8}{'bubble':>8}{'optim.':>8}"
        f"{'Mtok/s':>8}{'TF/rank':>9}{'GB':>6}  sent a rank",
    ]
    for p in found:
        sent = ", ".join(f"{axis} {size / 1e9:.1f} GB" for axis, size in sorted(p.traffic.items()))
        shape = ",".join(f"{name}={size}" for name, size in p.mesh.axes.items())
        lines.append(
            f"{shape:24}{p.seconds * 1e3:9.1f}{p.compute * 1e3:9.1f}{p.moving * 1e3:8.1f}{p.gradients * 1e3:8.1f}"
            f"{p.bubble * 1e3:8.1f}{p.optimizer * 1e3:8.1f}{p.tokens_per_second / 1e6:8.3f}"
            f"{p.flops_per_second / 1e12:9.0f}{p.memory / 1e9:6.0f}{'!' if p.memory > _TIGHT * memory else ' '} "
            f"{sent or 'nothing'}"
        )
    lines += _memory_notes(found, memory)
    if first.collectives:
        lines += ["", "one layer of the first, forward:"]
        lines += [
            f"  {op:12} {what:32} {size / 1e6:8.1f} MB {t * 1e6:8.1f} us" for op, what, size, t in first.collectives
        ]
    return "\n".join(lines)


def _memory_notes(found: Sequence[Prediction], memory: float) -> list[str]:
    """Returns a sentence on the marked meshes, or nothing if none is marked."""
    beyond = sum(p.memory > memory for p in found)
    tight = sum(_TIGHT * memory < p.memory <= memory for p in found)
    lines = []
    if tight:
        lines.append(
            f"! {_meshes(tight)} within 5 % of the device's {memory / 1e9:g} GB (--memory). Logits, buffers of "
            "collectives and fragmentation are not counted, and may not fit."
        )
    if beyond:
        lines.append(f"! {_meshes(beyond)} beyond the device's {memory / 1e9:g} GB (--memory).")
    return ["", *lines] if lines else []


def _meshes(count: int) -> str:
    return "1 mesh is" if count == 1 else f"{count} meshes are"


def _scaling(model: Transformer, first: Prediction, args: argparse.Namespace, cost: CostModel) -> list[Prediction]:
    """Returns the best mesh of each power of two up to the requested size, with constant sequences per rank."""
    size, per_rank = first.mesh.size, first.batch / first.mesh.size
    out, ranks = [], 1
    while ranks <= size:
        batch = max(1, round(per_rank * ranks))
        found = best(model, ranks, batch, args.ranks_per_host, cost, args.memory * 1e9)
        out += list(found[:1])
        ranks *= 2
    return out


def _scaling_table(scaling: Sequence[Prediction]) -> str:
    lines = ["", f"{'ranks':>7}  {'best mesh':24}{'step ms':>9}{'TF/rank':>9}"]
    for p in scaling:
        shape = ",".join(f"{name}={size}" for name, size in p.mesh.axes.items())
        lines.append(f"{p.mesh.size:7}  {shape:24}{p.seconds * 1e3:9.1f}{p.flops_per_second / 1e12:9.0f}")
    return "\n".join(lines)


def draw(model: Transformer, found: Sequence[Prediction], scaling: Sequence[Prediction], path: Path) -> str:
    """Plots stacked bars of the step time and, if requested, the speed over the number of ranks."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    size = (14 if scaling else 9, 1.5 + 0.5 * max(len(found), 5))
    figure = Figure(figsize=size, layout="constrained")
    (panels,) = figure.subplots(1, 2 if scaling else 1, squeeze=False)
    axes = panels[0]
    labels = [",".join(f"{name}={size}" for name, size in p.mesh.axes.items()) for p in found]
    left = [0.0] * len(found)
    for part, color in _PARTS.items():
        values = [getattr(p, part) * 1e3 for p in found]
        axes.barh(labels, values, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds a step", title=f"{model.name} on {found[0].mesh.size} ranks, predicted")
    axes.legend()
    if scaling:
        axes = panels[1]
        speeds = [p.flops_per_second / 1e12 for p in scaling]
        axes.plot([p.mesh.size for p in scaling], speeds, "o-", color="#2b6cb0")
        axes.set_xscale("log", base=2)
        axes.set(
            xlabel="ranks", ylabel="Tflop/s a rank", ylim=(0, 1.1 * max(speeds)), title="best mesh, same work a rank"
        )
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date and no version: the same numbers give the same file.
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return f"wrote {path}"

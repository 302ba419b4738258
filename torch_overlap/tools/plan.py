"""`python -m torch_overlap plan`: the step time and traffic of a transformer on any number of ranks."""

from __future__ import annotations

import argparse
import importlib.util
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add("--model", choices=sorted(PRESETS), default="llama3-8b", help="shapes (default: %(default)s)")
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "sequence"):
        add(f"--{name.replace('_', '-')}", type=int, help="instead of the model's own")
    add("--ranks", type=int, help="compare every dp, tp and pp of this number of ranks")
    add("--mesh", help="only this one: dp=8,tp=4 (axes dp, tp, pp)")
    add("--ranks-per-host", type=int, default=8, help="joined by NVLink; hosts by a network (default: %(default)s)")
    add("--batch", type=int, help="sequences of a step over all ranks (default: one a rank)")
    add("--micro-batches", type=int, help="with --mesh: how often a replica runs before it updates")
    add("--no-overlap", action="store_true", help="with --mesh: no product hides a collective")
    add("--cost", type=Path, help="a cost model as JSON (default: H200, measured; its network is assumed)")
    add("--memory", type=float, default=141, help="GB of a rank; meshes that need more are left out (default: 141)")
    add("--top", type=int, default=10, help="how many meshes to show (default: %(default)s)")
    add("--scaling", action="store_true", help="also the best mesh of 1, 2, 4 ... ranks with the same work a rank")
    add("--plot", type=Path, help="a PNG file of what is shown")
    add("--json", type=Path, help="the numbers as a file")


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
    print(report(model, found[: args.top], cost))
    if scaling:
        print(_scaling_table(scaling))
    if args.json:
        args.json.write_text(json.dumps({"model": model.name, "cost": cost.name, "rows": [row(p) for p in found],
                                         "scaling": [row(p) for p in scaling]}, indent=1) + "\n")  # fmt: skip
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


def report(model: Transformer, found: Sequence[Prediction], cost: CostModel) -> str:
    """Returns the table, and the traffic of one layer of the first mesh."""
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
            f"{p.flops_per_second / 1e12:9.0f}{p.memory / 1e9:6.0f}  {sent or 'nothing'}"
        )
    if first.collectives:
        lines += ["", "one layer of the first, forward:"]
        lines += [
            f"  {op:12} {what:32} {size / 1e6:8.1f} MB {t * 1e6:8.1f} us" for op, what, size, t in first.collectives
        ]
    return "\n".join(lines)


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
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, 2 if scaling else 1, figsize=(14 if scaling else 9, 1.5 + 0.5 * max(len(found), 5)), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    axes = panels[0][0]
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
        axes = panels[0][1]
        speeds = [p.flops_per_second / 1e12 for p in scaling]
        axes.plot([p.mesh.size for p in scaling], speeds, "o-", color="#2b6cb0")
        axes.set_xscale("log", base=2)
        axes.set(
            xlabel="ranks", ylabel="Tflop/s a rank", ylim=(0, 1.1 * max(speeds)), title="best mesh, same work a rank"
        )
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"wrote {path}"

"""Trains a small GPT on Python's own source code, tensor parallel with sequence parallelism through torch_overlap.

    torchrun --standalone --nproc_per_node 2 examples/train_gpt.py

Runs on CPU (gloo) or GPUs (NCCL; the whole step is one CUDA graph). Ends with a sample of generated text, a loss curve,
a timeline of one step, and a check: the first steps again on one rank must give the same losses.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

from gpt.interrupt import Interrupt

INTERRUPT = Interrupt()  # before the slow import of torch, during which Ctrl-C must work too

import torch  # noqa: E402
from gpt import plots, timeline  # noqa: E402
from gpt.check import check_on_one_rank  # noqa: E402
from gpt.model import Config  # noqa: E402
from gpt.plain import MeshTrainer  # noqa: E402
from gpt.progress import Progress  # noqa: E402
from gpt.sample import generate  # noqa: E402
from gpt.text import Text, read  # noqa: E402
from gpt.training import Trainer  # noqa: E402

import torch_overlap as to  # noqa: E402

# Settings by device: sizes that train in about a minute, and the check's tolerance by dtype.
DEFAULTS = {
    "cpu": dict(dtype="float32", dim=128, layers=3, heads=4, sequence=128, batch=8, steps=1200, rate=5e-3),
    "cuda": dict(dtype="bfloat16", dim=1024, layers=8, heads=16, sequence=1024, batch=16, steps=600, rate=1e-3),
}
# --overlap -> the operators' algorithm (torch_overlap.ops).
OVERLAP = {"none": "sequential", "bulk": "bulk", "pipelined": "pipelined", "p2p": "p2p", "auto": "auto"}
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
FP8_TOLERANCE = 0.1  # a last bit in a sum can flip the last bit of an 8-bit value, a sixteenth of it
PROMPT = "class File:\n    def "


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, help="training steps (default: 1200 on cpu, 600 on cuda)")
    add("--check-steps", type=int, default=20, help="steps that the one-rank check repeats; 0: no check (default: 20)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if every rank of this host can have a GPU, else cpu")
    add("--dtype", choices=tuple(TOLERANCE), help="of the matrix products (default: float32 on cpu, bfloat16 on cuda)")
    add("--out", type=Path, default=Path("build/train_gpt"), help="folder for plots and trace (default: %(default)s)")
    add("--no-graph", action="store_true", help="on cuda: run every step eagerly, not as a CUDA graph")
    add("--seed", type=int, default=0, help="of weights, batches and the sample (default: 0)")
    add("--overlap", choices=tuple(OVERLAP), default="auto", help="how communication hides (default: %(default)s)")
    add("--algorithm", choices=sorted(set(OVERLAP.values())), help="of the overlapped operators, in place of --overlap")
    add(
        "--fp8",
        choices=("none", "current", "delayed", "mxfp8", "block"),
        default="none",
        help="products on 8-bit floats, and how they are scaled; --dtype is that of the results (default: %(default)s)",
    )
    add("--keep-gathered", action="store_true", help="more memory for fewer gathers: keep the blocks' gathered inputs")
    add("--mesh", type=mesh_axes, help="dp=..,tp=..: the plain model, sharded so by torch_overlap.mesh")
    for name in ("dim", "layers", "heads", "sequence", "batch"):
        add(f"--{name}", type=int, help="size of the model or batch (default: depends on the device)")
    add("--rate", type=float, help="highest learning rate (default: depends on the device)")
    add("--sample", type=int, default=400, help="bytes of text to generate (default: 400)")
    args = parser.parse_args()
    if args.device is None:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        args.device = "cuda" if torch.cuda.device_count() >= local_ranks else "cpu"
    if args.algorithm is None:
        args.algorithm = OVERLAP[args.overlap]
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def mesh_axes(text: str) -> dict[str, int]:
    """Parses "dp=2,tp=2" to sizes by name."""
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}
    if set(sizes) - {"dp", "tp"} or any(size < 1 for size in sizes.values()):
        raise argparse.ArgumentTypeError(f"expected dp=..,tp=.. with sizes of at least 1, got {text!r}")
    return sizes


def make_trainer(args: argparse.Namespace, comm: to.TorchComm, text: Text) -> Trainer:
    config = Config(args.dim, args.layers, args.heads, args.sequence)
    fp8 = None if args.fp8 == "none" else to.nn.Float8Recipe(args.fp8)
    kind = Trainer if args.mesh is None or comm.get_size() == 1 else MeshTrainer
    return kind(config, comm, text, batch_size=args.batch, steps=args.steps, rate=args.rate, seed=args.seed,
                dtype=getattr(torch, args.dtype), algorithm=args.algorithm, fp8=fp8, graph=not args.no_graph,
                keep_gathered=args.keep_gathered, mesh=args.mesh)  # fmt: skip


def train(args: argparse.Namespace, trainer: Trainer, *, shown: bool) -> list[float]:
    progress = Progress(args.steps, args.batch * args.sequence, shown=shown)
    for step in range(args.steps):
        trainer.train_step(step)
        progress.update(step + 1, trainer.losses[step])
    losses = trainer.losses.tolist()
    if shown:
        print(f"{progress.summary()}, loss {losses[0]:.3f} -> {plots.smoothed(losses)[-1]:.3f}", flush=True)
    return losses


def are_finite(losses: list[float], *, shown: bool) -> bool:
    step = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if step is not None and shown:
        print(f"train_gpt: expected finite losses, got {losses[step]} at step {step}; lower --rate", file=sys.stderr)
    return step is None


def report(args: argparse.Namespace, trainer: Trainer, losses: list[float], *, shown: bool) -> None:
    """Reports the loss on held-out text and a sample, and writes the files. Collective."""
    validation = trainer.validation_loss()
    sample = generate(trainer, PROMPT, args.sample, seed=args.seed)
    trainer.learning_rate.zero_()  # the profiled step changes no weight

    def step() -> None:
        trainer.run_step(args.steps)

    if not shown:
        step()
        return
    print(f"loss on files that were not trained on: {validation:.3f}\n--- sample {'-' * 60}\n{sample}\n{'-' * 71}")
    args.out.mkdir(parents=True, exist_ok=True)
    spans = timeline.record(step, args.out / "trace.json")
    if not plots.available():
        print(plots.NO_MATPLOTLIB)
        return
    plots.draw_losses(losses, validation, args.out / "loss.png")
    plots.draw_timeline(spans, args.out / "timeline.png")
    print(f"wrote {args.out}/loss.png, timeline.png and trace.json", flush=True)


def check(args: argparse.Namespace, comm: to.TorchComm, text: Text, losses: list[float]) -> bool:
    tolerance = TOLERANCE[args.dtype] if args.fp8 == "none" else FP8_TOLERANCE
    what = args.dtype if args.fp8 == "none" else f"{args.dtype} and {args.fp8} fp8"
    return check_on_one_rank(comm, lambda alone: make_trainer(args, alone, text),
                             losses[: args.check_steps], tolerance, what)  # fmt: skip


def main() -> int:
    args = parse_arguments()
    try:
        comm = to.new_comm("nccl" if args.device == "cuda" else "gloo", torch.device(args.device), name="tp")
    except to.InvalidValueError as error:  # the message does not name the rank
        sys.exit(str(error))
    INTERRUPT.protect(comm)
    shown = comm.get_rank() == 0
    text = read(comm)
    trainer = make_trainer(args, comm, text)
    if shown:
        where = f"{comm.get_size()} ranks over {comm.get_backend()}, {args.dtype}"
        print(f"{trainer.num_parameters() / 1e6:.2f} M parameters, {where}; "
              f"{text.train.numel() / 1e6:.1f} MB of text from {text.files} files", flush=True)  # fmt: skip
    losses = train(args, trainer, shown=shown)
    good = are_finite(losses, shown=shown)
    if good:
        report(args, trainer, losses, shown=shown)
        good = args.check_steps == 0 or check(args, comm, text, losses)
    del trainer
    comm.finalize()
    return 0 if good else 1


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        INTERRUPT.hold_if_received()
        raise
    sys.exit(code)

"""Trains a llama-shaped model on Python's own source code, tensor parallel with sequence parallelism.

    torchrun --standalone --nproc_per_node 2 examples/train_llama.py                      # a tiny model, also on CPUs
    torchrun --standalone --nproc_per_node 4 examples/train_llama.py --preset llama3-8b --layers 4

Vocabulary-parallel embedding and cross entropy, gradient accumulation into float32 buffers by the products of the
backward pass, AdamW on float32 weights; on GPUs the whole step is one CUDA graph. Ends with the rate, on GPUs the share
of the peak of bfloat16 products and the memory, and a check: the first steps on one rank must give the same losses.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time

import torch
from gpt.check import check_on_one_rank
from gpt.progress import Progress
from gpt.text import Text, read
from llama.training import LlamaTrainer

import torch_overlap as to
from torch_overlap.mesh.models import PRESETS, Transformer

TINY = Transformer("tiny", layers=2, hidden=64, heads=4, kv_heads=2, ffn=160, vocabulary=256, sequence=64)
SHAPES = {"tiny": TINY, **PRESETS}
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
FP8_TOLERANCE = 0.1
PEAK = 989e12  # of bfloat16 products on an H100 or H200 SXM, in operations a second
WARM_STEPS = 5  # before the rate is measured: the first ones are eager, then the step is captured


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", choices=tuple(SHAPES), default="tiny", help="shape of the model (default: %(default)s)")
    add("--layers", type=int, help="default: those of the preset")
    add("--sequence", type=int, help="tokens of a sequence (default: those of the preset)")
    add("--batch", type=int, default=8, help="sequences of a step (default: %(default)s)")
    add("--accumulate", type=int, default=4, help="micro-batches of a step (default: %(default)s)")
    add("--steps", type=int, default=100, help="training steps (default: %(default)s)")
    add("--rate", type=float, help="highest learning rate (default: 1e-2 for tiny, else 3e-4)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if every rank of this host can have a GPU, else cpu")
    add("--dtype", choices=tuple(TOLERANCE), help="of parameters and products (default: float32 on cpu, else bfloat16)")
    add("--algorithm", default="auto", help="of the operators (default: %(default)s)")
    add("--fp8", choices=("none", "current", "delayed", "mxfp8", "block"), default="none",
        help="products of the blocks on 8-bit floats, and how they are scaled (default: %(default)s)")  # fmt: skip
    add("--recompute", action="store_true", help="run blocks again in the backward pass, for less memory")
    add("--no-graph", action="store_true", help="on cuda: run every step eagerly, not as a CUDA graph")
    add(
        "--check-steps",
        type=int,
        default=20,
        help="steps that the one-rank check repeats; 0: none (default: %(default)s)",
    )
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.device is None:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        args.device = "cuda" if torch.cuda.device_count() >= local_ranks else "cpu"
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.rate is None:
        args.rate = 1e-2 if args.preset == "tiny" else 3e-4
    for name, least in {"batch": 1, "accumulate": 1, "steps": 1, "layers": 1, "sequence": 1, "check_steps": 0}.items():
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"expected --{name.replace('_', '-')} of at least {least}, got {value}")
    if args.batch % args.accumulate != 0:
        parser.error(f"expected --batch divisible by --accumulate {args.accumulate}, got {args.batch}")
    return args


def make_trainer(args: argparse.Namespace, comm: to.TorchComm, text: Text) -> LlamaTrainer:
    shape = SHAPES[args.preset]
    changes = {name: getattr(args, name) for name in ("layers", "sequence") if getattr(args, name) is not None}
    return LlamaTrainer(dataclasses.replace(shape, **changes), comm, text, accumulate=args.accumulate,
                        recompute=args.recompute, batch_size=args.batch, steps=args.steps, rate=args.rate,
                        seed=args.seed, dtype=getattr(torch, args.dtype), algorithm=args.algorithm,
                        fp8=None if args.fp8 == "none" else to.nn.Float8Recipe(args.fp8),
                        graph=not args.no_graph)  # fmt: skip


def wait(comm: to.TorchComm) -> None:
    if comm.get_device().type == "cuda":
        torch.cuda.synchronize()


def train(args: argparse.Namespace, trainer: LlamaTrainer, *, shown: bool) -> list[float]:
    tokens = args.batch * trainer.config.sequence
    progress, comm = Progress(args.steps, tokens, shown=shown), trainer.comm
    warm = min(WARM_STEPS, args.steps - 1)
    start = time.perf_counter()
    for step in range(args.steps):
        if step == warm:
            wait(comm)
            start = time.perf_counter()
        trainer.train_step(step)
        progress.update(step + 1, trainer.losses[step])
    wait(comm)
    seconds = (time.perf_counter() - start) / (args.steps - warm)
    losses = trainer.losses.tolist()
    if shown:
        text = f"{tokens / seconds:,.0f} tokens/s after {warm} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}"
        if args.device == "cuda":
            share = trainer.step_flops() / seconds / comm.get_size() / PEAK
            memory = torch.cuda.max_memory_allocated() / 2**30
            text += f", {100 * share:.1f} % of the products' peak, {memory:.1f} GiB of memory"
        print(text, flush=True)
    return losses


def main() -> int:
    args = parse_arguments()
    try:
        comm = to.new_comm("nccl" if args.device == "cuda" else "gloo", torch.device(args.device), name="tp")
    except to.InvalidValueError as error:  # the message does not name the rank
        sys.exit(str(error))
    shown = comm.get_rank() == 0
    text = read(comm)
    trainer = make_trainer(args, comm, text)
    if shown:
        print(f"{trainer.num_parameters() / 1e6:.2f} M parameters, {comm.get_size()} ranks over {comm.get_backend()}, "
              f"{args.dtype}, {args.accumulate} micro-batches a step", flush=True)  # fmt: skip
    losses = train(args, trainer, shown=shown)
    good = all(loss == loss for loss in losses)
    if not good and shown:
        print("train_llama: expected finite losses, got NaN; lower --rate", file=sys.stderr)
    del trainer
    if good and args.check_steps > 0:
        tolerance = TOLERANCE[args.dtype] if args.fp8 == "none" else FP8_TOLERANCE
        good = check_on_one_rank(comm, lambda alone: make_trainer(args, alone, text),
                                 losses[: args.check_steps], tolerance, args.dtype,
                                 "--algorithm sequential and --no-graph narrow down what differs")  # fmt: skip
    comm.finalize()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

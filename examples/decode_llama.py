"""Generates tokens with a Llama, tensor parallel: prompts in chunks, then one CUDA graph a token.

    torchrun --standalone --nproc_per_node 2 examples/decode_llama.py                     # a tiny model, also on CPUs
    torchrun --standalone --nproc_per_node 4 examples/decode_llama.py --preset llama3-8b --batches 1,32
    torchrun --standalone --nproc_per_node 2 examples/decode_llama.py --model folder-of-a-saved-llama

Prints the rate for each batch size and each form of the sums (llama/decoder.py), in turns, and checks the result: in
float32 the tokens of one rank, in 16 bits or with float8 its logits for the same tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llama.decoder import SEQUENCE_ROWS, Decoder, Sums
from llama.weights import SHAPES, Weights, random_weights, saved_weights
from torch import Tensor

import torch_overlap as to
from torch_overlap.tools.bench import result

LOGITS_TOLERANCE = 2e-2  # of 16-bit models: the error over the norm of the logits
FLOAT8_TOLERANCE = 0.15  # of float8 matrices, to one rank without them
Row = dict[str, Any]
ROUNDS = 5
PART_CALLS = 20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", choices=tuple(SHAPES), default="tiny", help="a model with random weights (default: %(default)s)")
    add("--model", help="a Llama saved by transformers, in place of a preset")
    add("--layers", type=int, help="of the preset, fewer than it has")
    add("--batches", default="1,4", help="numbers of sequences (default: %(default)s)")
    add("--prompt", type=int, default=16, help="tokens of a prompt (default: %(default)s)")
    add("--new", type=int, default=32, help="tokens to generate (default: %(default)s)")
    add("--chunk", type=int, default=512, help="tokens of a sequence that prefill reads at once (default: %(default)s)")
    add("--sequence-rows", type=int,
        help=f"rows from which prompts are read sequence parallel (default: {SEQUENCE_ROWS} / ranks)")  # fmt: skip
    add("--prefill", default="", help="also time prompts of these lengths, without and with sequence parallelism")
    add("--sums", default="fused", help=f"forms of the sums, of {', '.join(Sums.KINDS)} (default: %(default)s)")
    add("--algorithm", default="auto", help="of the fused form (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if every rank of this host can have a GPU, else cpu")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on cpu, else bfloat16")
    add("--float8", action="store_true",
        help="then the same with the matrices of layers as float8_e4m3fn, without the sums of torch")  # fmt: skip
    add("--parts", action="store_true",
        help="also time what a step computes: its products, its attention and its sums, each alone")  # fmt: skip
    add("--no-check", action="store_true", help="do not compare with one rank")
    add("--out", type=Path, help="also write the rates to a file in this folder")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.device is None:
        args.device = "cuda" if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else "cpu"
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    args.batches = [int(batch) for batch in args.batches.split(",")]
    for name in ("prompt", "new", "chunk"):
        if getattr(args, name) < 1:
            parser.error(f"expected --{name} of at least 1, got {getattr(args, name)}")
    if min(args.batches) < 1:
        parser.error(f"expected --batches of at least 1, got {min(args.batches)}")
    for kind in ("torch", "flashinfer"):
        if args.device == "cpu" and kind in args.sums.split(","):
            parser.error(f"expected --sums without {kind} on cpu: its kernels need GPUs")
    if args.float8 and args.sums == "torch":
        parser.error("expected --sums other than torch with --float8: its products have no scales")
    return args


def weights_of(args: argparse.Namespace, device: torch.device) -> Weights:
    if args.model:
        return saved_weights(args.model)
    return random_weights(args.preset, args.layers, args.seed, device)


def wait(comm: to.TorchComm) -> None:
    if comm.get_device().type == "cuda":
        torch.cuda.synchronize()
    comm.barrier(async_op=False)


def seconds_of(decoder: Decoder, prompt: Tensor, new: int, chunk: int) -> tuple[float, float]:
    """Returns the seconds to the first new token, and those of each one after it."""
    times = []
    for count in (1, new):
        wait(decoder.comm)
        began = time.perf_counter()
        decoder.generate(prompt, count, chunk)
        wait(decoder.comm)
        times.append(time.perf_counter() - began)
    return times[0], (times[1] - times[0]) / max(new - 1, 1)


def us_of_parts(decoder: Decoder, batch: int) -> dict[str, float]:
    """Returns the microseconds of all products of a step, of its attention, and of the sums over the ranks."""
    times = {}
    for name, part in decoder.parts(batch).items():
        found = []
        for _ in range(ROUNDS + 1):
            wait(decoder.comm)
            began = time.perf_counter()
            for _ in range(PART_CALLS):
                part()
            wait(decoder.comm)
            found.append((time.perf_counter() - began) * 1e6 / PART_CALLS)
        times[name] = statistics.median(found[1:])
    return times


def prefill_row(decoder: Decoder, count: int) -> dict[str, float]:
    """Returns the microseconds of reading one prompt at once, without ("reduce") and with sequence parallelism."""
    decoder = decoder.with_room(1, count)
    prompt = torch.arange(count, device=decoder.device)[None] % decoder.shape.vocabulary
    times: dict[str, list[float]] = {"reduce": [], "sequence": []}
    for _ in range(ROUNDS + 1):
        for name, rows in (("reduce", count + 1), ("sequence", 1)):
            decoder.sequence_rows = rows
            wait(decoder.comm)
            began = time.perf_counter()
            with torch.inference_mode():
                decoder.prefill(prompt, count)
            wait(decoder.comm)
            times[name].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def check(decoder: Decoder, weights: Weights, prompts: Tensor, args: argparse.Namespace) -> bool:
    """Compares with rank 0 alone, which has no float8, and prints the verdict. Collective; every rank gets it."""
    comm = decoder.comm
    tokens = decoder.generate(prompts, args.new, args.chunk)
    logits = decoder.teacher_forced(tokens)
    alone = comm.split([0] if comm.get_rank() == 0 else [], name="alone")
    good = torch.zeros(1, device=comm.get_device())
    if alone is not None:
        one = Decoder(weights, alone, batch=len(prompts), tokens=decoder.tokens, dtype=decoder.dtype)
        wanted = one.teacher_forced(tokens)
        error = ((logits - wanted).norm() / wanted.norm()).item()
        if decoder.dtype == torch.float32 and not decoder.float8:
            differ = (tokens != one.generate(prompts, args.new, args.chunk)).sum().item()
            good.fill_(differ == 0)
            text = f"{differ} of {tokens.numel()} tokens differ, logits within {error:.1e}"
        else:
            allowed = FLOAT8_TOLERANCE if decoder.float8 else LOGITS_TOLERANCE
            good.fill_(error <= allowed)
            text = f"logits within {error:.1e} (allowed: {allowed:g})"
        name = "float8_e4m3fn" if decoder.float8 else args.dtype
        print(f"check against one rank, {name}: {text}", file=sys.stdout if good else sys.stderr, flush=True)
        del one
        alone.finalize()
    comm.broadcast(good, 0, async_op=False)
    return bool(good.item())


def measure(args: argparse.Namespace, comm: to.TorchComm, weights: Weights, float8: bool) -> tuple[list[Row], bool]:
    """Prints the rates, and returns them as rows of a result, and True if the check succeeds."""
    kinds = args.sums.split(",")
    if float8:
        kinds = [kind for kind in kinds if kind != "torch"]  # its products write to a buffer, without scales
    room = {
        "batch": max(args.batches),
        "tokens": args.prompt + args.new,
        "dtype": getattr(torch, args.dtype),
        "float8": float8,
    }
    first = Decoder(weights, comm, **room, sums=kinds[0], algorithm=args.algorithm, sequence_rows=args.sequence_rows)
    decoders = {kinds[0]: first} | {kind: first.with_sums(kind) for kind in kinds[1:]}
    generator = torch.Generator().manual_seed(args.seed)
    prompts = torch.randint(weights.shape.vocabulary, (max(args.batches), args.prompt), generator=generator)
    prompts = prompts.to(first.device)
    say = print if comm.get_rank() == 0 else lambda *_, **__: None
    common = {"model": weights.shape.name, "layers": weights.shape.layers, "tp": comm.get_size(),
              "dtype": "float8_e4m3fn" if float8 else args.dtype}  # fmt: skip
    rows: list[Row] = []
    say(f"{common['model']}, {common['layers']} layers, {common['dtype']}")
    for batch in args.batches:
        times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS + 1):
            for kind, decoder in decoders.items():
                times[kind].append(seconds_of(decoder, prompts[:batch], args.new, args.chunk))
        medians = {kind: [statistics.median(values) for values in zip(*found[1:], strict=True)]
                   for kind, found in times.items()}  # fmt: skip
        rows.append({**common, "batch": batch, "prompt": args.prompt, "chunk": args.chunk,
                     "sequence_rows": first.sequence_rows,
                     "step_us": {kind: each * 1e6 for kind, (_, each) in medians.items()},
                     "first_token_us": {kind: begin * 1e6 for kind, (begin, _) in medians.items()}})  # fmt: skip
        for kind, (begin, each) in medians.items():
            ratio = medians[kinds[-1]][1] / each
            say(f"batch {batch:3}  {kind:10}  {batch / each:10,.0f} tokens/s  {each * 1e6:9,.0f} us a step  "
                f"{ratio:.2f} x {kinds[-1]}  first token after {begin * 1e3:,.1f} ms", flush=True)  # fmt: skip
        if args.parts:
            rows[-1]["parts_us"] = parts = us_of_parts(first, batch)
            each = ", ".join(f"{name} {us:,.0f} us" for name, us in parts.items())
            say(f"batch {batch:3}  alone: {each}; the step takes "
                f"{medians[kinds[0]][1] * 1e6 / sum(parts.values()):.2f} of their sum", flush=True)  # fmt: skip
    for count in map(int, filter(None, args.prefill.split(","))):
        us = prefill_row(first, count)
        rows.append({**common, "batch": 1, "prefill": count, "us": us})
        say(
            f"prompt of {count} tokens: " + ", ".join(f"{name} {value:,.0f} us" for name, value in us.items()),
            flush=True,
        )
    good = args.no_check or check(first, weights, prompts, args)
    for decoder in decoders.values():
        decoder.graphs.clear()  # their functions keep the decoder, and its weights
    return rows, good


def main() -> int:
    args = parse_arguments()
    try:
        comm = to.new_comm("nccl" if args.device == "cuda" else "gloo", torch.device(args.device), name="tp")
    except to.InvalidValueError as error:  # the message does not name the rank
        sys.exit(str(error))
    device = comm.get_device()
    if args.device == "cuda":
        torch.cuda.set_device(device)
    if {"torch", "flashinfer"} & set(args.sums.split(",")):
        dist.init_process_group("nccl", device_id=device)
    weights = weights_of(args, device)
    rows, good = [], True
    for float8 in (False, True) if args.float8 else (False,):
        found, is_good = measure(args, comm, weights, float8)
        rows += found
        good = good and is_good
    if args.out and comm.get_rank() == 0:
        print(result.write_result("decode_llama", comm.get_size(), rows, args.out), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    comm.finalize()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

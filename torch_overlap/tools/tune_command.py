"""`python -m torch_overlap tune`: measures the algorithms of given shapes and adds the fastest ones to a file."""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_overlap import _C, _tuning
from torch_overlap._C import TorchComm
from torch_overlap._tuning import MODES, Entry, chosen, read, shipped
from torch_overlap.comm import new_comm
from torch_overlap.tools.tune import OPERATORS, Shape, entries_of_results, measure, write

__all__ = ["add_arguments", "run"]

# Appended to the line of a case.
_SHIPPED_NOTE = "; the table that is shipped has it, and comes first"


def _shape(text: str) -> Shape:
    sizes = [int(size) for size in text.split("x")]
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected MxNxK, got {text!r}")
    return sizes[0], sizes[1], sizes[2]


_EPILOG = """\
Examples, each of which starts one process for each of four GPUs:
  torchrun --nproc-per-node 4 -m torch_overlap tune --shapes 8192x28672x4096 8192x4096x14336
  torchrun --nproc-per-node 4 -m torch_overlap tune --shapes 64x8192x28672 --ops matmul_all_reduce --rounds 30
This one takes what was measured before, without a GPU:
  python -m torch_overlap tune --results benchmarks/results/bench_operators-h200-tp4-2026-11-26.json

The file: --cache, else TORCH_OVERLAP_TUNE_CACHE, else torch_overlap/tune.json in $XDG_CACHE_HOME or ~/.cache.
Programs read the file of TORCH_OVERLAP_TUNE_CACHE, or the same default, when they make their first communicator.
With TORCH_OVERLAP_TUNE_CACHE="" they read none.

all_gather_matmul_backward is the backward pass of all_gather_matmul, by the shape of the forward product, which gathers
x again; all_gather_matmul_backward_gathered is the one that has all rows (keep_gathered, regather, transformer blocks).

Output, one line for each operator, shape and mode:
  OPERATOR MxNxK MODE: ALGORITHM TIME us, ALGORITHM TIME us, ...
  mode     eager: calls one by one, with the host's time; graph: the calls of a CUDA graph (GPUs alone)
  us       median over the rounds of the slowest rank's time of one call, fastest algorithm first
The simplest algorithm within 1 % of the fastest is written, in the order sequential, pipelined, p2p, bulk (backward
passes), fused, low_latency. Entries hold for sizes within half a power of two, this dtype, number of ranks, GPU, mode,
torch and torch_overlap. A line that ends with "the table that is shipped has it" has no effect: that table comes first.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("--shapes", type=_shape, nargs="+", default=[], metavar="MxNxK",
        help="Measures these products [m, k] x [k, n], in sizes of the whole layer: all ranks' tokens and "
             "features.")  # fmt: skip
    add("--results", nargs="+", default=[], metavar="FILE",
        help="Measures nothing and takes the entries from result files of bench.")  # fmt: skip
    add("--ops", nargs="+", choices=OPERATORS, metavar="OP",
        default=["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"],
        help=f"The operators: {', '.join(OPERATORS)}. Default: the first three.")  # fmt: skip
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16",
        help="The dtype of inputs and results; for scaled operators of the result. Default: %(default)s.")  # fmt: skip
    add("--rounds", type=int, default=10, metavar="N",
        help="Samples of each algorithm, whose median counts. Default: %(default)s.")  # fmt: skip
    add("--cache", metavar="FILE", help="The file to which entries are added. See below for the default.")


def run(args: argparse.Namespace) -> int:
    """Measures, prints and writes; returns the exit status.

    Raises:
        ValueError: there is nothing to measure, or no file to write.
    """
    cache = args.cache or _C._env.tune_cache()
    if not cache:
        raise ValueError(
            "tune: expected a file in --cache, TORCH_OVERLAP_TUNE_CACHE or the folder of XDG_CACHE_HOME or HOME, "
            "got none; give --cache FILE"
        )
    if bool(args.shapes) == bool(args.results):
        got = "both" if args.shapes else "none"
        raise ValueError(f"tune: expected --shapes to measure, or --results to read, got {got}")
    _check_cache(cache)
    if args.results:
        entries = list(itertools.chain.from_iterable(map(entries_of_results, args.results)))
        write(cache, entries)
        print(_written(cache, len(entries)))
        return 0
    is_cuda = torch.cuda.is_available()
    comm = new_comm("nccl" if is_cuda else "gloo", torch.device("cuda" if is_cuda else "cpu"), name="tune")
    try:
        _measure_all(comm, args, cache)
    finally:
        comm.finalize()
    return 0


def _check_cache(path: str) -> None:
    """Raises ValueError if entries could not be added to the file, before anything is measured for it."""
    try:
        if Path(path).exists():
            read(path)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=Path(path).parent).close()
    except OSError as error:
        raise ValueError(f"tune: expected a file that can be written in --cache, got {path}: {error}") from None


def _written(cache: str, count: int) -> str:
    """Returns what the command wrote, and what a program needs to read it."""
    text = f"wrote {count} {'entry' if count == 1 else 'entries'} to {cache}"
    by_default = _C._env.tune_cache()
    if by_default is None or Path(cache).absolute() != Path(by_default).absolute():
        text += f"; programs read it with TORCH_OVERLAP_TUNE_CACHE={Path(cache).absolute()}"
    return text


def _measure_all(comm: TorchComm, args: argparse.Namespace, cache: str) -> None:
    if comm.get_size() < 2:
        raise ValueError("tune: expected two or more ranks, got one; start it with torchrun --nproc-per-node N")
    entries: list[Entry] = []
    in_table = chosen(shipped())
    modes = MODES if comm.get_device().type == "cuda" else MODES[:1]
    for op, shape, mode in itertools.product(args.ops, args.shapes, modes):
        entries.append(measure(comm, op, shape, getattr(torch, args.dtype), mode=mode, rounds=args.rounds))
        if comm.get_rank() == 0:
            print(_line(entries[-1]) + (_SHIPPED_NOTE if _tuning.key(entries[-1]) in in_table else ""), flush=True)
    if comm.get_rank() == 0:
        write(cache, entries)
        print(_written(cache, len(entries)), flush=True)


def _line(entry: Entry) -> str:
    times: Sequence[tuple[str, float]] = sorted(entry["us"].items(), key=lambda item: item[1])
    shape = "x".join(map(str, entry["shape"]))
    return f"{entry['op']} {shape} {entry['mode']}: " + ", ".join(f"{n} {us} us" for n, us in times)

"""`python -m torch_overlap bench`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch_overlap._gpus import gpu_ranks
from torch_overlap.tools.bench.cases import DTYPES, KNOWN_OPS, MODES, OPS, SETS, Case, cases_of, parse_shape

_EPILOG = """\
Examples:
  bench ag_gemm gemm_rs --set bf16 --tp 2       the shapes of a set on two GPUs; "all" stands for every operation
  bench ag_gemm --shape 8192,10240,8192         M, N, K of the whole layer, or the name of one such as 70b-qkv
  bench ag_gemm_classes bulk_rs                 over buffers of the overlap classes, beside the operators; not in "all"
  bench a2a_gemm gemm_a2a                       an all-to-all and attention whose heads are sharded; not in "all"
  bench all_reduce --shape 64K --mode graph     bytes of the whole tensor

Operations:
  ag_gemm, gemm_rs, gemm_ar     all-gather then product; product then reduce-scatter; product then all-reduce
  gemm_ar_norm                  product, all-reduce, residual and RMSNorm
  gemm                          one rank's product without communication
  a2a_gemm, gemm_a2a            all-to-all then product; product then all-to-all
  ag_gemm_classes, gemm_rs_classes, bulk_ag, bulk_rs
                                the overlap classes; a product beside an independent all-gather or reduce-scatter
  all_reduce, all_gather, reduce_scatter, all_to_all, broadcast
                                collectives alone

Output, one block for each operation, shape and mode:
  gemm alone, COLLECTIVE alone  the rank's product, and the collective, without the other: TFLOP/s, and GB/s that a
                                rank sends
  floor                         the least time that the hardware allows (docs/howto/tuning.md)
  ours NAME (CHOICE)            our operator by the algorithm NAME; for auto, CHOICE is the algorithm that it takes
  peer NAME                     another library, which makes the same result
  us +- us                      median over the rounds of the slowest rank's time of one call, and interquartile range
  x gemm, x floor, x PEER       that time over the product alone, the floor and the fastest peer, within a round
  GB/s                          bytes that a rank has to send, over that time
  not run: NAME: REASON         a variant that cannot run here, or whose result was wrong; it is not timed
  left out                      cases for which --budget had no time
  NOISY                         the product alone spreads by more than 3 %, so ratios of this block are uncertain

The exit status is 1 if no operator or collective of ours was measured.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("what", nargs="*", help=f"The operations: {', '.join(KNOWN_OPS)} or all.")
    add("--shape", action="append", default=[], help="A shape: M,N,K, the name of a layer, or bytes. May be repeated.")
    add("--set", choices=SETS, help="The set of shapes. Default: bf16; tiny on a CPU.")
    add("--dtype", choices=DTYPES, help="The dtype. Default: the set's, else bf16.")
    add("--tp", type=int, help="Number of ranks to start. Default: all GPUs; 2 on a CPU.")
    add("--mode", default=",".join(MODES), help="The modes: graph, eager or both. Default: %(default)s.")
    add("--algorithm", default="", help="Our algorithms, separated by commas. Default: all that can run.")
    add("--rounds", type=int, default=30, help="Samples of each variant. Default: %(default)s.")
    add("--budget", type=float, help="Seconds of the whole run. Cases that do not fit are left out and named.")
    add(
        "--device",
        choices=("cuda", "cpu"),
        help="Default: cuda if there is a GPU. On a CPU the run checks the variants; its times say nothing of a GPU.",
    )
    add("--json", type=Path, metavar="FILE", help="Writes the result to this file.")
    add("--out", type=Path, metavar="FOLDER", help="Writes the result into this folder, named by operation and GPU.")
    add(
        "--timeline",
        action="store_true",
        help="Adds to the result what ran when in one call of each variant with a product.",
    )
    add("--began", type=float, help=argparse.SUPPRESS)
    add("--status", type=Path, help=argparse.SUPPRESS)


def chosen_cases(what: Sequence[str], shapes: Sequence[str], name: str | None, dtype: str | None) -> list[Case]:
    """Returns the cases of a command line.

    Raises:
        ValueError: an operation or shape is unknown, or no case remains.
    """
    ops = list(dict.fromkeys(op for name in what for op in (OPS if name == "all" else (name,))))
    unknown = [op for op in ops if op not in KNOWN_OPS]
    if unknown or not ops:
        raise ValueError(
            f"bench: expected one of {', '.join(KNOWN_OPS)}, or all, got {', '.join(unknown) or 'nothing'}"
        )
    if shapes:
        if name is not None:
            raise ValueError(f"bench: expected --shape or --set, got --set {name} too; give one")
        return [parse_shape(op, text, dtype or "bf16") for op in ops for text in shapes]
    cases = [case for op in ops for case in cases_of(op, name or "bf16", dtype)]
    if not cases:
        raise ValueError(f"bench: expected a set that has {', '.join(ops)}, got {name}")
    return cases


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit status.

    Raises:
        ValueError: the request is invalid.
    """
    import torch

    from torch_overlap.tools.bench import ranks
    from torch_overlap.tools.bench.build import check_algorithms
    from torch_overlap.tools.bench.run import Options
    from torch_overlap.tools.bench.run import run as run_on_ranks

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    of_shapes = args.set or ("bf16" if device == "cuda" else "tiny")
    cases = chosen_cases(args.what, args.shape, None if args.shape and not args.set else of_shapes, args.dtype)
    modes = args.mode.split(",")
    if not set(modes) <= set(MODES):
        raise ValueError(f"bench: expected --mode of {', '.join(MODES)}, got {args.mode!r}")
    if device == "cpu" and "eager" not in modes:
        raise ValueError("bench: expected --mode eager on a CPU, got graph alone, which needs CUDA")
    algorithms = [part for part in args.algorithm.split(",") if part]
    check_algorithms(algorithms, [case.op for case in cases])
    began = args.began or time.time()
    if not ranks.under_torchrun():
        if args.tp is not None and args.tp < 1:
            raise ValueError(f"bench: expected --tp of one or more ranks, got {args.tp}")
        count = args.tp or (torch.cuda.device_count() if device == "cuda" else 2)
        if device == "cuda" and not 1 <= count <= gpu_ranks():
            raise ValueError(f"bench: expected --tp of at most {gpu_ranks()} ranks with a GPU, got {count}")
        for case in cases:
            case.check(count)
        return ranks.launch([*sys.argv[2:], "--began", str(began)], count)
    one = len(args.what) == 1 and args.what != ["all"]
    name = args.what[0] if one else f"bench_{args.set or args.dtype or of_shapes}"
    is_measured = run_on_ranks(
        Options(name, cases, modes, algorithms, args.rounds, args.budget, device, args.json, args.out, args.timeline,
                began)
    )  # fmt: skip
    if args.status is None:
        return 0 if is_measured else 1
    # The command that started the ranks exits with it: a rank that fails makes torchrun report a fault.
    if not is_measured and ranks.is_first():
        args.status.write_text("1")
    return 0

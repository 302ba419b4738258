"""`python -m torch_overlap bench`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch_overlap._gpus import gpu_ranks
from torch_overlap.tools.bench.cases import DTYPES, KNOWN_OPS, MODES, OPS, SETS, Case, cases_of, parse_shape

EPILOG = """
bench ag_gemm gemm_rs --set bf16 --tp 2       the shapes of a set, on two GPUs; "all" stands for every operation
bench ag_gemm --shape 8192,10240,8192         M, N, K of the whole layer; or the name of one, such as 70b-qkv
bench ag_gemm_classes bulk_rs                 over buffers of the overlap classes, beside the operators; not in "all"
bench a2a_gemm gemm_a2a                       with an all-to-all, around attention whose heads are sharded; not in "all"
bench all_reduce --shape 64K --mode graph     bytes of the whole tensor
bench --check GOALS.json RESULT.json          what falls short of the goals; exits with 1 if anything does
bench plot [RESULT.json ...]                  the pictures in --images and the tables of --document, in this order;
                                              without files those that the document has
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("what", nargs="*", help=f"{', '.join(KNOWN_OPS)}, all; or plot and result files")
    add("--shape", action="append", default=[], help="M,N,K, a layer, or bytes; may be repeated")
    add("--set", choices=SETS, help="of shapes (default: bf16; tiny on a CPU)")
    add("--dtype", choices=DTYPES, help="default: the set's, else bf16")
    add("--tp", type=int, help="ranks to start (default: all GPUs; 2 on a CPU)")
    add("--mode", default=",".join(MODES), help="graph, eager or both (default: %(default)s)")
    add("--algorithm", default="", help="of ours, separated by commas (default: all that can run)")
    add("--rounds", type=int, default=30, help="samples of each variant (default: %(default)s)")
    add("--budget", type=float, help="seconds; what does not fit is left out and named")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one; a CPU checks, it measures nothing")
    add("--json", type=Path, help="writes the result to this file")
    add("--out", type=Path, help="writes the result into this folder, under the name of its kind")
    add("--timeline", action="store_true", help="with the result, what ran when in one call of each product's variants")
    add("--check", nargs="+", type=Path, metavar=("GOALS", "RESULT"), help="compares results with goals")
    add(
        "--images",
        type=Path,
        default=Path("docs/images"),
        help="of plot: the folder of the pictures (default: %(default)s)",
    )
    add(
        "--document",
        type=Path,
        default=Path("docs/results.md"),
        help="of plot: where the tables go (default: %(default)s)",
    )
    add("--began", type=float, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit status.

    Raises:
        ValueError: the request is invalid.
    """
    if args.check:
        from torch_overlap.tools.bench import goals

        if len(args.check) < 2 or args.what:
            raise ValueError("bench: expected --check GOALS RESULT ..., and nothing else; see --help")
        return goals.check(args.check[0], args.check[1:])
    if args.what[:1] == ["plot"]:
        from torch_overlap.tools.bench import document

        return document.update([Path(name) for name in args.what[1:]], args.images, args.document)
    return _measure(args)


def chosen_cases(what: Sequence[str], shapes: Sequence[str], name: str | None, dtype: str | None) -> list[Case]:
    """Returns the cases of a command line.

    Raises:
        ValueError: an operation or shape is unknown, or no case remains.
    """
    ops = list(dict.fromkeys(op for name in what for op in (OPS if name == "all" else (name,))))
    unknown = [op for op in ops if op not in KNOWN_OPS]
    if unknown or not ops:
        raise ValueError(
            f"bench: expected one of {', '.join(KNOWN_OPS)}, all or plot, got {', '.join(unknown) or 'nothing'}"
        )
    if shapes:
        if name is not None:
            raise ValueError(f"bench: expected --shape or --set, got --set {name} too; give one")
        return [parse_shape(op, text, dtype or "bf16") for op in ops for text in shapes]
    cases = [case for op in ops for case in cases_of(op, name or "bf16", dtype)]
    if not cases:
        raise ValueError(f"bench: expected a set that has {', '.join(ops)}, got {name}")
    return cases


def _measure(args: argparse.Namespace) -> int:
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
    run_on_ranks(
        Options(name, cases, modes, algorithms, args.rounds, args.budget, device, args.json, args.out, args.timeline,
                began)
    )  # fmt: skip
    return 0

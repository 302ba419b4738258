"""The choice of "auto": a shipped table of measured algorithms, and a cache that this machine measures.

    torchrun --nproc-per-node 4 -m torch_overlap tune --shapes 8192x28672x4096

measures every algorithm that can run and writes the simplest of the fastest ones to the cache: the file of
TORCH_OVERLAP_TUNE_CACHE, or torch_overlap/tune.json in the user's cache folder ($XDG_CACHE_HOME, ~/.cache). A program
reads it when it makes its first communicator. "auto" queries the table, then the
cache, then both for similar sizes, then a rule. All ranks of a communicator use the cache of rank 0, and keep it.
Nothing is measured while a program runs.

The key of an entry is an operator, m, n and k of the whole layer (each to half a power of two), a dtype, a number of
ranks, a device name, and if calls are captured in a CUDA graph or eager: for eager calls the host's launch time counts.
An entry also has the version of the kernels that it was measured with and, in the cache, those of the libraries: an
outdated one is ignored.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torch_overlap import _C, _tuning, objcol, ops
from torch_overlap._C import InvalidValueError, TorchComm, UnsupportedError
from torch_overlap._timing import Stopwatch, in_graph, interleave, slowest_rank
from torch_overlap._tuning import FORMAT, KERNELS, MODES, Entry, current, load, read, shipped
from torch_overlap.ops._arguments import group
from torch_overlap.tools.bench.ranks import LEAD_CYCLES

__all__ = ["KERNELS", "OPERATORS", "current", "entries_of_results", "load", "measure", "read", "shipped", "write"]

Shape = tuple[int, int, int]

_CACHE_BYTES = 128 << 20  # more than the L2 cache of current GPUs
# Maximum relative slowdown of the simplest algorithm that is chosen.
_MAX_SLOWDOWN = 0.01


# --- Problems ---------------------------------------------------------------------------------------------------------


# By operator: which of m, n and k are split over the ranks in x [m, k], and in w [n, k]; which they must divide.
_SPLITS = {
    "all_gather_matmul": ("m", "n", "mn"),
    "matmul_reduce_scatter": ("k", "k", "km"),
    "matmul_all_reduce": ("k", "k", "k"),
    "all_to_all_matmul": ("k", "", "mk"),
    "matmul_all_to_all": ("m", "", "mn"),
}
OPERATORS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "scaled_all_gather_matmul",
    "scaled_matmul_reduce_scatter",
    "scaled_matmul_all_reduce",
    "all_to_all_matmul",
    "matmul_all_to_all",
    "all_gather_matmul_backward",
    "all_gather_matmul_backward_gathered",
)


def _backward_call(op: str, comm: TorchComm, shape: Shape, dtype: torch.dtype) -> Callable[[str], object]:
    """Returns a call of the backward pass of `all_gather_matmul` with one weight, both gradients wanted. "_gathered":
    all rows of x are here, as with return_gathered or regather."""
    (m, n, k), size = shape, comm.get_size()
    draw = partial(torch.randn, device=comm.get_device())
    grad, x, weight = (draw(s).to(dtype) for s in ((m, n // size), (m // size, k), (n // size, k)))
    rows = draw((m, k)).to(dtype) if op.endswith("_gathered") else None
    backward = torch.ops.torch_overlap._all_gather_matmul_backward
    return lambda a: backward([grad], x, [weight], rows, None, True, [0], *group(comm), 0, n // size, a)


def _call(op: str, comm: TorchComm, shape: Shape, dtype: torch.dtype) -> Callable[[str], object]:
    """Returns a call of the operator on new inputs, by the name of an algorithm."""
    is_backward = op.startswith("all_gather_matmul_backward")
    is_scaled, name = op.startswith("scaled_"), "all_gather_matmul" if is_backward else op.removeprefix("scaled_")
    sizes, size = dict(zip("mnk", shape, strict=True)), comm.get_size()
    split_in_x, split_in_w, divisible = _SPLITS[name]
    for what in divisible:
        if sizes[what] % size != 0:
            raise InvalidValueError(f"tune: expected {what} of {op} divisible by the {size} ranks, got {sizes[what]}")
    if is_backward:
        return _backward_call(op, comm, shape, dtype)
    operands: list[Any] = []
    for dims, split in (("mk", split_in_x), ("nk", split_in_w)):
        extents = [sizes[what] // size if what in split else sizes[what] for what in dims]
        operand = torch.randn(extents, device=comm.get_device()).to(dtype)
        parts = ops.quantize(operand)[:2] if is_scaled else [operand]
        takes_list = dims == "nk" and name in ("all_gather_matmul", "matmul_all_to_all")
        operands += [[part] for part in parts] if takes_list else parts
    function, options = getattr(ops, op), {"out_dtype": dtype} if is_scaled else {}
    return lambda a: function(*operands, comm, algorithm=a, **options)


# --- Entries ----------------------------------------------------------------------------------------------------------


# Maximum rows of the fused all-reduce kernel, and the maximum with which it leaves SMs to others. The operator ignores
# an entry if it leaves none.
_FUSED_MAX_ROWS, _SHARED_SMS_MAX_ROWS = 256, 128


def _fastest(op: str, rows: int, mode: str, times: Mapping[str, float]) -> str:
    """Returns the simplest algorithm within _MAX_SLOWDOWN of the fastest of `times`.

    The fused all-reduce kernel may occupy all SMs of a GPU while it waits for those of other ranks. An eager call is
    not ordered before other streams' waiting kernels, so the kernel is not chosen if it does.
    """
    can_occupy_all_sms = (
        mode == "eager" and op.endswith("matmul_all_reduce") and _SHARED_SMS_MAX_ROWS < rows <= _FUSED_MAX_ROWS
    )
    names = [name for name in _C._algorithms() if name in times and not (can_occupy_all_sms and name == "fused")]
    min_us = min(times[name] for name in names)
    return next(name for name in names if times[name] * (1 - _MAX_SLOWDOWN) <= min_us)


def write(path: str | os.PathLike[str], entries: Iterable[Entry]) -> None:
    """Adds entries to a file, replacing older ones with the same key and library. The file is replaced atomically, and
    a lock makes each of several writing processes see the others' entries."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive_lock(path.parent):
        kept = {(_tuning.key(e), e.get("library")): e for e in (read(path) if path.exists() else [])}
        kept |= {(_tuning.key(e), e.get("library")): e for e in entries}
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(_text(list(kept.values())))
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def _text(entries: Sequence[Entry]) -> str:
    """Returns the text of a file, one entry per line. Fields common to all are written once, and measured times are
    omitted."""
    common = {
        key: entries[0][key]
        for key in ("device", "library")
        if len({entry.get(key) for entry in entries}) == 1 and key in entries[0]
    }
    lines = [
        json.dumps({key: value for key, value in entry.items() if key not in (*common, "us")}) for entry in entries
    ]
    head = f'{{"format": {FORMAT}, "common": {json.dumps(common)}, "entries": ['
    return head + "".join(f"\n {line}," for line in lines).removesuffix(",") + "\n]}\n"


@contextlib.contextmanager
def _exclusive_lock(folder: Path) -> Iterator[None]:
    """Holds a lock among the processes that write entries in the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# Names of the operators in result files of `python -m torch_overlap bench`.
_OP_OF_BENCH = {"ag_gemm": "all_gather_matmul", "gemm_rs": "matmul_reduce_scatter", "gemm_ar": "matmul_all_reduce",
            "a2a_gemm": "all_to_all_matmul", "gemm_a2a": "matmul_all_to_all"}  # fmt: skip
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}


def entries_of_results(path: str | os.PathLike[str]) -> list[Entry]:
    """Returns the entries of a result file of `bench`: one for each case and mode.

    A case yields no entry if only some algorithms were measured, without "sequential", which runs everywhere: it is
    then unknown if the measured ones are fast.
    """
    content = json.loads(Path(path).read_text())
    library = _tuning.library(content["torch"], content.get("kernels", 1))
    times: dict[tuple[str, Shape, str, int, str], dict[str, float]] = {}
    for row in content["rows"]:
        if row["op"] not in _OP_OF_BENCH or row["dtype"] not in _DTYPES or row["algorithm"] not in _C._algorithms():
            continue
        op = ("scaled_" if row["dtype"] == "fp8" else "") + _OP_OF_BENCH[row["op"]]
        case = (op, tuple(row["shape"]), _DTYPES[row["dtype"]], row["tp"], row["mode"])
        times.setdefault(case, {})[row["algorithm"]] = round(row["us"], 1)
    return [
        {"op": op, "shape": list(shape), "dtype": dtype, "tp": tp, "mode": mode, "device": content["gpu"],
         "library": library, "algorithm": _fastest(op, shape[0], mode, found), "us": found}
        for (op, shape, dtype, tp, mode), found in times.items() if "sequential" in found and len(found) > 1
    ]  # fmt: skip


# --- Measuring --------------------------------------------------------------------------------------------------------


def _repeated(
    calls: Sequence[Callable[[str], object]], algorithm: str, repeats: int, mode: str
) -> Callable[[], object]:
    """Returns `repeats` calls, which rotate through `calls`."""

    def repeated() -> None:
        for turn in range(repeats):
            calls[turn % len(calls)](algorithm)

    if mode == "eager":
        return repeated
    repeated()  # allocates memory and plans of all inputs
    return in_graph(repeated)


def _num_input_sets(shape: Shape, dtype: torch.dtype, size: int, repeats: int) -> int:
    """Returns the number of input sets to rotate through, so that none is in the L2 cache when it is used again."""
    m, n, k = shape
    return min(repeats, -(-_CACHE_BYTES // max(1, (m + n) * k * dtype.itemsize // size)))


def measure(
    comm: TorchComm, op: str, shape: Shape, dtype: torch.dtype = torch.bfloat16, *, mode: str = "eager",
    rounds: int = 10, repeats: int | None = None,
) -> Entry:  # fmt: skip
    """Measures the fastest algorithm of `op` for m, n and k of the whole layer. Collective; the same entry on all
    ranks.

    Each algorithm that can run has a turn in every round. A sample is the maximum over ranks. The smallest median wins,
    or a simpler algorithm within 1 % of it.

    Args:
        comm: the communicator.
        op: the operator.
        shape: m, n and k.
        dtype: of x, the weight and the result; for scaled operators of the result.
        mode: "eager" calls, or those of a CUDA "graph".
        rounds: number of samples of each algorithm.
        repeats: calls per sample, on rotating inputs. Default: 3; on CUDA 10, and 30 for eager calls, so that the host
            time of the first call, during which the device is idle, has little weight.

    Raises:
        InvalidValueError: the operator cannot be measured, or sizes do not divide by the number of ranks.
    """
    if op not in OPERATORS:
        raise InvalidValueError(f"tune: expected op to be one of {', '.join(OPERATORS)}, got {op!r}")
    if mode not in MODES or (mode == "graph" and comm.get_device().type != "cuda"):
        raise InvalidValueError(f"tune: expected mode to be eager, or graph on CUDA, got {mode!r}")
    if repeats is None:
        repeats = (30 if mode == "eager" else 10) if comm.get_device().type == "cuda" else 3
    sets = _num_input_sets(shape, dtype, comm.get_size(), repeats)
    calls = [_call(op, comm, shape, dtype) for _ in range(sets)]
    names: list[str] = []
    for name in _C._algorithms():
        # An algorithm that cannot run is refused on all ranks alike, before anything is sent. If the first one cannot
        # run, none can.
        with contextlib.suppress(*(() if not names else (UnsupportedError, InvalidValueError))):
            # A forward pass has nothing to overlap for "bulk", a backward pass no kernel for few rows.
            if name != ("low_latency" if "_backward" in op else "bulk"):
                calls[0](name)
                names.append(name)
    # A graph is launched while the ranks are still waiting for each other.
    watch = Stopwatch(comm.get_device(), partial(comm.barrier, False), LEAD_CYCLES if mode == "graph" else 0)
    samplers = {name: watch.sampler(_repeated(calls, name, repeats, mode), repeats) for name in names}
    samples = slowest_rank(interleave(samplers, rounds, warmup=1), comm)
    times = {name: statistics.median(samples[name]) for name in names}
    found = [
        {
            "op": op,
            "shape": list(shape),
            "dtype": str(dtype).removeprefix("torch."),
            "tp": comm.get_size(),
            "mode": mode,
            "device": _device_name(comm),
            "library": _tuning.library(),
            "algorithm": _fastest(op, shape[0], mode, times),
            "us": {name: round(value, 1) for name, value in times.items()},
        }
    ]
    objcol.broadcast_object_list(comm, found, 0)
    return found[0]


def _device_name(comm: TorchComm) -> str:
    device = comm.get_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

"""What is measured: operations, shapes, and the order of a run. Values only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

GEMM_OPS = ("ag_gemm", "gemm_rs", "gemm_ar", "gemm_ar_norm", "gemm")
ALL_REDUCED = ("all_reduce", "gemm_ar", "gemm_ar_norm")  # what sends everything twice
# Around attention whose heads are sharded, and over buffers of the overlap classes, beside the operators: not part of
# "all".
EXCHANGE_OPS = ("a2a_gemm", "gemm_a2a")
CLASS_OPS = ("ag_gemm_classes", "gemm_rs_classes", "bulk_ag", "bulk_rs")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
IN_PLACE = ("all_reduce", "broadcast")  # of collectives
OPS = (*GEMM_OPS, *COLLECTIVES)
KNOWN_OPS = (*OPS, *EXCHANGE_OPS, *CLASS_OPS)
FP8 = ("fp8", "fp8_rows")  # one factor for each operand, or for each of its rows
DTYPES = ("bf16", "fp16", *FP8)
MODES = ("graph", "eager")

KIB, MIB = 1 << 10, 1 << 20
# What a sample touches is larger than the L2 cache of any GPU so far.
CACHE_BYTES = 128 * MIB
SAMPLE_US = 1500.0
EAGER_SAMPLE_US = 10_000.0
MAX_CALLS = 50


@dataclass(frozen=True)
class Case:
    """One operation of one shape.

    shape: (M, N, K) of the whole layer, or (bytes,) of the whole tensor: what all_gather makes, what the others take.
    An all-gather has x [M / tp, K] and w [N / tp, K] on each rank, a reduction x [M, K / tp] and w [N, K / tp], an
    all-to-all w [N, K] and x [M, K / tp] before the product, [M / tp, K] where it comes behind; "gemm" is the product
    of one rank alone, [M, K] by [N, K]. The bulk ones are gradients of the all-gather's layer: dx = dy w
    beside the gather of x, dw = dy^T x beside the reduce-scatter of dx.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str = "bf16"
    name: str = ""

    @property
    def is_gemm(self) -> bool:
        return self.op not in COLLECTIVES

    @property
    def pattern(self) -> str:
        """The operation, whoever does it."""
        return self.op.removesuffix("_classes")

    @property
    def label(self) -> str:
        return self.name or ("x".join(map(str, self.shape)) if self.is_gemm else byte_text(self.shape[0]))

    def element_size(self) -> int:
        return 1 if self.dtype in FP8 else 2

    def local(self, tp: int) -> tuple[int, int, int]:
        """(m, n, k) of one rank's product."""
        m, n, k = self.shape
        return {
            "ag_gemm": (m, n // tp, k), "gemm": (m, n, k), "bulk_ag": (m, k, n // tp), "bulk_rs": (n // tp, k, m),
            "a2a_gemm": (m // tp, n, k), "gemm_a2a": (m // tp, n, k),
        }.get(self.pattern, (m, n, k // tp))  # fmt: skip

    def moved(self, tp: int) -> int:
        """Bytes that a rank must send, and receive; of a broadcast all but the first rank receive them."""
        if self.op == "gemm":
            return 0
        if self.op == "broadcast":
            return self.shape[0] if tp > 1 else 0
        if not self.is_gemm:
            whole = self.shape[0]
        else:
            m, n, k = self.shape
            whole = {
                "ag_gemm": m * k * self.element_size(), "bulk_ag": m * k * self.element_size(), "bulk_rs": m * k * 2,
                "a2a_gemm": m * k * 2 // tp, "gemm_a2a": m * n * 2 // tp,
            }.get(self.pattern, m * n * 2)  # fmt: skip
        return (2 if self.op in ALL_REDUCED else 1) * whole * (tp - 1) // tp

    def set_bytes(self, tp: int) -> int:
        """Bytes of one rank's inputs."""
        if not self.is_gemm:
            return self.shape[0]
        m, n, k = self.local(tp)
        own = m // tp if self.pattern == "ag_gemm" else m
        beside = {"bulk_ag": self.shape[0] // tp, "bulk_rs": self.shape[0]}.get(self.op, 0) * self.shape[2]
        return self.element_size() * (own * k + n * k + beside)

    def sets(self, tp: int) -> int:
        """How many inputs take turns, so that none is in the cache when its turn comes."""
        wanted = max(2, -(-CACHE_BYTES // max(1, self.set_bytes(tp))))
        return min(wanted, MAX_CALLS)

    def estimate_us(self, tp: int) -> float:
        """About what one call takes on an H200: how long a sample and a run will be, nothing else."""
        us = 5.0 + self.moved(tp) / 300e3
        if self.is_gemm:
            m, n, k = self.local(tp)
            us += max(2 * m * n * k / 700e6 / (2 if self.dtype in FP8 else 1), n * k * self.element_size() / 4e6)
        return us

    def calls(self, tp: int) -> int:
        """How many calls one sample has: all inputs take their turn, and starting it costs little beside it."""
        enough = math.ceil(SAMPLE_US / self.estimate_us(tp))
        return max(self.sets(tp) if self.is_gemm else 2, min(enough, MAX_CALLS))

    def repeats(self, tp: int, mode: str) -> int:
        """How often a sample does its calls: an eager one until the host's time for the first call, when the device has
        nothing to do yet, costs little beside the rest."""
        if mode != "eager" or not self.is_gemm:
            return 1
        return math.ceil(EAGER_SAMPLE_US / (self.calls(tp) * self.estimate_us(tp)))

    def check(self, tp: int) -> None:
        """Raises ValueError where tp ranks cannot share the shape."""
        if self.is_gemm:
            m, n, k = self.shape
            shared = {
                "gemm_rs": (m, k), "gemm_ar": (k,), "gemm_ar_norm": (k,), "gemm": (), "a2a_gemm": (m, k)
            }.get(self.pattern, (m, n))  # fmt: skip
            fits = all(size % tp == 0 for size in shared)
        else:
            fits = self.shape[0] % (2 * tp) == 0
        if not fits or min(self.shape) < 1:
            raise ValueError(
                f"bench: expected a shape of {self.op} that {tp} ranks share equally, got {self.shape}; "
                "change --shape or --tp"
            )


def byte_text(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


# The most telling ones first: a run that is cut off has those.
GATHERS = {
    "70b-qkv": (8192, 10240, 8192),
    "8b-up": (8192, 28672, 4096),
    "small-up": (2048, 14336, 4096),
    "70b-up": (8192, 57344, 8192),
    "small": (2048, 4096, 4096),
    "gpt3-fc1": (8192, 49152, 12288),
}
SCATTERS = {
    "70b-o": (8192, 8192, 8192),
    "8b-down": (8192, 4096, 14336),
    "small-down": (2048, 4096, 14336),
    "70b-down": (8192, 8192, 28672),
    "small": (2048, 4096, 4096),
    "gpt3-fc2": (8192, 12288, 49152),
}
HEADS = {"a2a_gemm": {"70b-o": (8192, 8192, 8192), "8b-o": (8192, 4096, 4096), "70b-o-32k": (32768, 8192, 8192)},
         "gemm_a2a": {"70b-qkv": (8192, 10240, 8192), "8b-qkv": (8192, 6144, 4096),
                      "70b-qkv-32k": (32768, 10240, 8192)}}  # fmt: skip
DECODE = {f"70b-{layer} M={m}": (m, 8192, k) for m in (64, 16, 256) for layer, k in (("o", 8192), ("down", 28672))}
DECODE_GATHERS = {
    f"70b-{layer} M={m}": (m, n, 8192) for m in (64, 16, 256) for layer, n in (("qkv", 10240), ("up", 57344))
}
# Few tokens: what "decode" stands for.
FEW_TOKENS = {"ag_gemm": DECODE_GATHERS, **dict.fromkeys(("gemm_rs", "gemm_ar", "gemm_ar_norm"), DECODE)}
SIZES = (64 * KIB, MIB, 16 * MIB, KIB, 256 * KIB, 4 * MIB, 128 * MIB)

LAYERS = {
    **HEADS,
    **dict.fromkeys(("ag_gemm", "ag_gemm_classes", "bulk_ag", "bulk_rs"), GATHERS),
    **dict.fromkeys(("gemm_rs", "gemm_rs_classes"), SCATTERS),
    "gemm_ar": {**{name: SCATTERS[name] for name in ("70b-o", "8b-down")}, **DECODE},
    "gemm_ar_norm": {},  # for decoding alone
    # One rank's products of the layers above at tp 4.
    "gemm": {
        **{f"{name} ag": (m, n // 4, k) for name, (m, n, k) in GATHERS.items()},
        **{f"{name} rs": (m, n, k // 4) for name, (m, n, k) in SCATTERS.items()},
    },
}
TINY = {**dict.fromkeys((*CLASS_OPS, *EXCHANGE_OPS), (64, 96, 64)),
        "ag_gemm": (64, 96, 32), "gemm_rs": (64, 48, 64), "gemm_ar": (64, 48, 64), "gemm_ar_norm": (64, 48, 64),
        "gemm": (64, 48, 32)}  # fmt: skip
SETS = (*DTYPES, "decode", "tiny")


def cases_of(op: str, name: str, dtype: str | None = None) -> list[Case]:
    """The cases of a set, of `dtype` or the set's own. No collective is one of "decode" or 8-bit floats."""
    kind = dtype or (name if name in DTYPES else "bf16")
    if op in EXCHANGE_OPS and kind in FP8:
        return []
    if op in COLLECTIVES:
        if name in ("decode", *FP8):
            return []
        return [Case(op, (size,), kind) for size in ((KIB, 64 * KIB) if name == "tiny" else SIZES)]
    if name == "tiny":
        return [Case(op, TINY[op], kind, "tiny")]
    if name == "decode":
        return [Case(op, shape, kind, layer) for layer, shape in FEW_TOKENS.get(op, {}).items()]
    return [Case(op, shape, kind, layer) for layer, shape in LAYERS[op].items()]


def parse_shape(op: str, text: str, dtype: str) -> Case:
    """ "8192,28672,4096", the name of a layer, or for collectives bytes: "65536", "64K", "16M".

    Raises:
        ValueError: it is none of them.
    """
    if op in COLLECTIVES:
        scale = {"K": KIB, "M": MIB, "G": 1 << 30}.get(text[-1:].upper(), 1)
        digits = text if scale == 1 else text[:-1]
        if digits.isdecimal():
            return Case(op, (int(digits) * scale,), dtype)
        raise ValueError(f"bench: expected --shape of {op} as bytes (65536, 64K, 16M), got {text!r}")
    layers = LAYERS[op] | FEW_TOKENS.get(op, {})
    if text in layers:
        return Case(op, layers[text], dtype, text)
    parts = text.split(",")
    if len(parts) == 3 and all(part.isdecimal() for part in parts):
        shape = (int(parts[0]), int(parts[1]), int(parts[2]))
        return Case(op, shape, dtype, next((name for name, own in layers.items() if own == shape), ""))
    raise ValueError(f"bench: expected --shape of {op} as M,N,K or one of {', '.join(layers)}, got {text!r}")


@dataclass(frozen=True)
class Visit:
    """A case in one mode."""

    case: Case
    mode: str

    def __str__(self) -> str:
        return f"{self.case.op} {self.case.label}, {self.mode}"

    def row(self, tp: int) -> dict[str, Any]:
        """What its rows have in common."""
        op, shape = self.case.op, list(self.case.shape) if self.case.is_gemm else self.case.shape[0]
        return {"op": op, "name": self.case.label, "shape": shape, "dtype": self.case.dtype, "tp": tp,
                "mode": self.mode}  # fmt: skip


def in_order(cases: Iterable[Case], modes: Sequence[str]) -> list[Visit]:
    """A run that may be cut off anywhere: the first mode of all first, and in it the first case of every operation."""
    turns: dict[str, int] = {}
    ranked = []
    for case in cases:
        turns[case.op] = turns.get(case.op, -1) + 1
        ranked.append((turns[case.op], case))
    ranked.sort(key=lambda pair: pair[0])
    return [Visit(case, mode) for mode in modes for _, case in ranked]


def expected_seconds(visit: Visit, tp: int, rounds: int, variants: int = 10) -> float:
    """About how long a visit takes: its samples, and getting ready."""
    case = visit.case
    sample = case.repeats(tp, visit.mode) * case.calls(tp) * case.estimate_us(tp) * 1.4 * 1e-6 + 0.6e-3
    return 1.0 + (rounds + 3) * variants * sample

"""The cases of a benchmark: operations, shapes, and the order of a run. Values only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

GEMM_OPS = ("ag_gemm", "gemm_rs", "gemm_ar", "gemm_ar_norm", "gemm")
ALL_REDUCED = ("all_reduce", "gemm_ar", "gemm_ar_norm")  # operations that send all data twice
# Products around attention with sharded heads, and products over buffers of the overlap classes. Not part of "all".
EXCHANGE_OPS = ("a2a_gemm", "gemm_a2a")
CLASS_OPS = ("ag_gemm_classes", "gemm_rs_classes", "bulk_ag", "bulk_rs")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
IN_PLACE = ("all_reduce", "broadcast")  # collectives only
OPS = (*GEMM_OPS, *COLLECTIVES)
KNOWN_OPS = (*OPS, *EXCHANGE_OPS, *CLASS_OPS)
FP8 = ("fp8", "fp8_rows")  # one scale per operand, or one per row
DTYPES = ("bf16", "fp16", *FP8)
MODES = ("graph", "eager")

KIB, MIB = 1 << 10, 1 << 20
# The data that a sample touches is larger than the L2 cache of current GPUs.
CACHE_BYTES = 128 * MIB
SAMPLE_US = 1500.0
EAGER_SAMPLE_US = 10_000.0
MAX_CALLS = 50


@dataclass(frozen=True)
class Case:
    """One operation of one shape.

    shape: (M, N, K) of the whole layer, or (bytes,) of the whole tensor: the output of all_gather, the input of the
    others. An all-gather has x [M / tp, K] and w [N / tp, K] on each rank, a reduction x [M, K / tp] and w [N, K / tp].
    An all-to-all has w [N, K], and x [M, K / tp] if it precedes the product, [M / tp, K] if it follows. "gemm" is the
    product of one rank without communication, [M, K] by [N, K]. The bulk ones are gradients of the all-gather's layer:
    dx = dy w concurrent with the gather of x, dw = dy^T x concurrent with the reduce-scatter of dx.
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
        """The operation, without the suffix of the overlap classes."""
        return self.op.removesuffix("_classes")

    @property
    def label(self) -> str:
        return self.name or ("x".join(map(str, self.shape)) if self.is_gemm else byte_text(self.shape[0]))

    def element_size(self) -> int:
        return 1 if self.dtype in FP8 else 2

    def local(self, tp: int) -> tuple[int, int, int]:
        """Returns (m, n, k) of one rank's product."""
        m, n, k = self.shape
        return {
            "ag_gemm": (m, n // tp, k), "gemm": (m, n, k), "bulk_ag": (m, k, n // tp), "bulk_rs": (n // tp, k, m),
            "a2a_gemm": (m // tp, n, k), "gemm_a2a": (m // tp, n, k),
        }.get(self.pattern, (m, n, k // tp))  # fmt: skip

    def moved(self, tp: int) -> int:
        """Returns the bytes that a rank must send, and receive. In a broadcast all ranks but the root receive them."""
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
        """Returns the bytes of one rank's inputs."""
        if not self.is_gemm:
            return self.shape[0]
        m, n, k = self.local(tp)
        own = m // tp if self.pattern == "ag_gemm" else m
        beside = {"bulk_ag": self.shape[0] // tp, "bulk_rs": self.shape[0]}.get(self.op, 0) * self.shape[2]
        return self.element_size() * (own * k + n * k + beside)

    def sets(self, tp: int) -> int:
        """Returns the number of input sets to rotate through, so that none is in the cache when it is used again."""
        wanted = max(2, -(-CACHE_BYTES // max(1, self.set_bytes(tp))))
        return min(wanted, MAX_CALLS)

    def estimate_us(self, tp: int) -> float:
        """Returns a rough time of one call on an H200. Used only to size samples and runs."""
        us = 5.0 + self.moved(tp) / 300e3
        if self.is_gemm:
            m, n, k = self.local(tp)
            us += max(2 * m * n * k / 700e6 / (2 if self.dtype in FP8 else 1), n * k * self.element_size() / 4e6)
        return us

    def calls(self, tp: int) -> int:
        """Returns the number of calls per sample: every input set is used, and the cost of starting the sample is
        small."""
        min_calls = math.ceil(SAMPLE_US / self.estimate_us(tp))
        return max(self.sets(tp) if self.is_gemm else 2, min(min_calls, MAX_CALLS))

    def repeats(self, tp: int, mode: str) -> int:
        """Returns how many times a sample repeats its calls. Eager samples repeat them until the host time of the first
        call, during which the device is idle, is small in comparison."""
        if mode != "eager" or not self.is_gemm:
            return 1
        return math.ceil(EAGER_SAMPLE_US / (self.calls(tp) * self.estimate_us(tp)))

    def check(self, tp: int) -> None:
        """Raises ValueError if tp ranks cannot share the shape."""
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


# The most informative ones first: a run that is cut off has those.
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
# Cases with few tokens, for the set "decode".
FEW_TOKENS = {"ag_gemm": DECODE_GATHERS, **dict.fromkeys(("gemm_rs", "gemm_ar", "gemm_ar_norm"), DECODE)}
SIZES = (64 * KIB, MIB, 16 * MIB, KIB, 256 * KIB, 4 * MIB, 128 * MIB)

LAYERS = {
    **HEADS,
    **dict.fromkeys(("ag_gemm", "ag_gemm_classes", "bulk_ag", "bulk_rs"), GATHERS),
    **dict.fromkeys(("gemm_rs", "gemm_rs_classes"), SCATTERS),
    "gemm_ar": {**{name: SCATTERS[name] for name in ("70b-o", "8b-down")}, **DECODE},
    "gemm_ar_norm": {},  # only for decoding
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
    """Returns the cases of a set, of `dtype` or the set's own. Collectives have none in "decode" or 8-bit floats."""
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
    """ "8192,28672,4096", the name of a layer, or a size in bytes for collectives: "65536", "64K", "16M".

    Raises:
        ValueError: the text is none of them.
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
        """Returns the fields that all rows of the visit share."""
        op, shape = self.case.op, list(self.case.shape) if self.case.is_gemm else self.case.shape[0]
        return {"op": op, "name": self.case.label, "shape": shape, "dtype": self.case.dtype, "tp": tp,
                "mode": self.mode}  # fmt: skip


def in_order(cases: Iterable[Case], modes: Sequence[str]) -> list[Visit]:
    """Orders a run that may be cut off anywhere: the first mode of all cases first, and in it the first case of every
    operation."""
    turns: dict[str, int] = {}
    ranked = []
    for case in cases:
        turns[case.op] = turns.get(case.op, -1) + 1
        ranked.append((turns[case.op], case))
    ranked.sort(key=lambda pair: pair[0])
    return [Visit(case, mode) for mode in modes for _, case in ranked]


def expected_seconds(visit: Visit, tp: int, rounds: int) -> float:
    """Returns a rough duration of a visit in seconds: its samples and its setup."""
    case = visit.case
    sample = case.repeats(tp, visit.mode) * case.calls(tp) * case.estimate_us(tp) * 1.4 * 1e-6 + 0.6e-3
    return 1.0 + (rounds + 3) * 10 * sample  # of ten variants

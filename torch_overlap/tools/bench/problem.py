"""The variants of a case to time, and the unavailable ones with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import torch_overlap as to
from torch_overlap.gemm import GemmArgs, GemmOperand, ScalingMode, gemm
from torch_overlap.tools.bench.cases import FP8, Case, byte_text
from torch_overlap.tools.bench.libraries import Arena, Libraries, Library

PERIOD = 8  # period of the row scales
Role = Literal["gemm", "comm", "ours", "peer"]
Call = Callable[[int], Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16} | dict.fromkeys(FP8, torch.float8_e4m3fn)


@dataclass
class Variant:
    """One variant of a case. `call(i)` works on the i-th inputs, modulo their number, and returns its result.

    before: restores the inputs if a call overwrites them; not timed.
    chosen: the algorithm that "auto" selects here, from `choose`, or from `tell` after a call.
    """

    name: str
    role: Role
    call: Call
    before: Callable[[], object] | None = None
    chosen: str = ""
    choose: Callable[[], str] | None = None
    tell: Callable[[], str] | None = None

    def update_chosen(self) -> None:
        """Updates the selected algorithm, which may differ in a capture."""
        if self.choose is not None:
            self.chosen = self.choose()


@dataclass
class Problem:
    """The variants of a case, and the reasons for those that are unavailable. All compute the same from the same
    inputs.

    ends: called when the problem is no longer used.
    """

    case: Case
    variants: list[Variant] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    cleanups: list[Callable[[], object]] = field(default_factory=list)

    def add(self, name: str, role: Role, call: Call, before: Callable[[], object] | None = None,
            chosen: str = "", choose: Callable[[], str] | None = None,
            tell: Callable[[], str] | None = None) -> None:  # fmt: skip
        self.variants.append(Variant(name, role, call, before, chosen, choose, tell))


class Operands:
    """Random matrices of a dtype, and their products by the fastest algorithm of cuBLASLt."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        self.dtype = DTYPES[dtype]
        self.is_fp8 = dtype in FP8
        self.out_dtype = torch.bfloat16 if self.is_fp8 else self.dtype
        self.device = device
        self.mode = ScalingMode.NO_SCALING
        if self.is_fp8:
            self.mode = ScalingMode.ROW_SCALING if dtype == "fp8_rows" else ScalingMode.CURRENT_TENSOR_SCALING
        # The same on all ranks, and for the parts of a matrix.
        generator = torch.Generator().manual_seed(1)
        self._factors = torch.rand(PERIOD, generator=generator).add_(0.5).to(device)
        self._scales: dict[int, Tensor] = {}

    def scale(self, matrix: Tensor) -> Tensor:
        """Returns one factor, or one per row."""
        rows = matrix.shape[0] if self.mode == ScalingMode.ROW_SCALING else 1
        if rows not in self._scales:
            factors = self._factors.repeat(-(-rows // PERIOD))[:rows]
            self._scales[rows] = factors.view(rows, 1) if self.mode == ScalingMode.ROW_SCALING else factors
        return self._scales[rows]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.out_dtype, device=self.device).to(self.dtype)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.out_dtype, device=self.device)

    def _operand(self, x: Tensor, transposed: bool = False) -> GemmOperand:
        if not self.is_fp8:
            return GemmOperand(x, transposed)
        return GemmOperand(x, transposed, scaling=self.mode, scale_inv=self.scale(x))

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """Computes out = x weight^T."""
        gemm(self.arguments(x, weight, out))
        return out

    def arguments(self, x: Tensor, weight: Tensor, out: Tensor) -> GemmArgs:
        return GemmArgs(self._operand(x), self._operand(weight, True), out)

    def torch_mm(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        if not self.is_fp8:
            return torch.mm(x, weight.t(), out=out)
        scale_x, scale_w = self.torch_scales(x, weight)
        return torch._scaled_mm(x, weight.t(), scale_x, scale_w, out_dtype=self.out_dtype, use_fast_accum=True)

    def torch_scales(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scales of x and of the transposed weight in torch's layout."""
        of_weight = self.scale(weight)
        return self.scale(x), of_weight.t() if self.mode == ScalingMode.ROW_SCALING else of_weight


def algorithms(op: str, call: Callable[[str], object]) -> list[str]:
    """Returns the names that an operator accepts, "auto" first, from its error for an unknown name."""
    try:
        call("?")
    except to.InvalidValueError as error:
        listed = re.search(r"algorithm to be one of (.+?),? got ", str(error))
        if listed:
            names = re.split(r"[,\s]+", listed.group(1).strip(", "))
            return sorted(names, key=lambda name: name != "auto")
    raise RuntimeError(f"bench: expected {op} to list its algorithms in the error for an unknown one, got no such list")


def add_ours(problem: Problem, op: str, inputs: Sequence[Sequence[Any]], wanted: Sequence[str],
             take: Callable[[Any], Tensor] | None = None, **options: Any) -> None:  # fmt: skip
    """Adds a variant for each algorithm of the operator that can run here.

    inputs: the positional arguments of each set. take: returns the tensor to compare from a result, by default the
    result itself. options: of the operator.
    """
    function = getattr(to.ops, op)

    def call(i: int, algorithm: str) -> Tensor:
        found = function(*inputs[i % len(inputs)], algorithm=algorithm, **options)
        return found if take is None else take(found)

    names = algorithms(op, lambda name: call(0, name))
    for name in wanted:
        if name not in names:
            problem.missing[name] = f"{op} has no such algorithm: {', '.join(names)}"
    for name in names:
        if wanted and name not in wanted:
            continue

        def explain(name: str = name) -> str:
            return to.explain(op, *inputs[0], algorithm=name, **options).algorithm

        chosen = ""
        try:
            chosen = explain()
        except to.InvalidValueError:
            pass  # explain() does not know the operator: the first call shows if it can run
        except to.UnsupportedError as error:
            problem.missing[name] = str(error)
            continue
        if chosen and name != "auto" and chosen != name:
            continue  # it falls back to another algorithm in a forward pass
        choose = explain if chosen and name == "auto" else None
        problem.add(name, "ours", partial(call_named, call, name), choose=choose)


def add_product(problem: Problem, made: Operands, op: str, xs: Sequence[Tensor], ws: Sequence[Tensor],
                comm: to.TorchComm, wanted: Sequence[str]) -> None:  # fmt: skip
    """Adds our product with a collective; its scaled form for 8-bit floats."""
    gathers = op == "all_gather_matmul"
    inputs: list[tuple[Any, ...]] = []
    for x, w in zip(xs, ws, strict=True):
        weight = (w, made.scale(w)) if made.is_fp8 else (w,)
        of_x = (x, made.scale(x)) if made.is_fp8 else (x,)
        inputs.append((*of_x, *([part] if gathers else part for part in weight), comm))
    options = {"scaling_mode": made.mode} if made.is_fp8 else {}
    take = (lambda result: result[0][0]) if gathers else None
    add_ours(problem, f"scaled_{op}" if made.is_fp8 else op, inputs, wanted, take, **options)


def call_named(call: Callable[[int, str], Tensor], name: str, i: int) -> Tensor:
    return call(i, name)


def libraries_with(problem: Problem, libraries: Libraries, collective: str) -> list[Library]:
    """Returns the libraries that have the collective; the others become missing with their reason."""
    problem.missing.update({name: why for name, why in libraries.missing.items() if name != "torch"})
    for library in libraries.others:
        if collective in library.unsupported_collectives:
            problem.missing[library.name] = library.unsupported_collectives[collective]
    return [library for library in libraries.all if collective not in library.unsupported_collectives]


def add_libraries(
    problem: Problem, libraries: Libraries, collective: str,
    calls: Callable[[Library], tuple[Call, Call, Callable[[], object] | None]],
) -> None:  # fmt: skip
    """Adds the product by each library that has the collective, and the first library's collective alone.

    calls: returns a library's collective alone, with the product, and what restores the input of the former.
    """
    for library in libraries_with(problem, libraries, collective):
        alone, sequential, before = calls(library)
        if library is libraries.plain:
            problem.add(collective, "comm", alone, before)
        problem.add(library.name, "peer", sequential)


def add_torch_fused(problem: Problem, libraries: Libraries, call: Callable[[str, int], Tensor]) -> None:
    """Adds a fused operator of torch, which gets the name of the group."""
    if libraries.torch_symmetric is None:
        problem.missing["torch fused"] = libraries.missing.get("torch", "")
    else:
        problem.add("torch fused", "peer", partial(call, libraries.torch_symmetric.group_name))


def add_torch_all_reduces(problem: Problem, libraries: Libraries, size: int,
                          source: Callable[[Arena], tuple[Call, Callable[[], object] | None]]) -> None:  # fmt: skip
    """Adds torch's all-reduces of `size` bytes. source: returns a call's inputs in an arena, and a function that
    restores them."""
    torch_symmetric = libraries.torch_symmetric
    for name in ("torch one-shot", "torch two-shot"):
        if torch_symmetric is None:
            problem.missing[name] = libraries.missing.get("torch", "")
            continue
        one = name == "torch one-shot"
        max_bytes = torch_symmetric.one_shot_bytes if one else torch_symmetric.two_shot_bytes
        if size > max_bytes:
            problem.missing[name] = f"not meant for more than {byte_text(max_bytes)}"
            continue
        make, before = source(torch_symmetric.arena)
        reduce = torch_symmetric.one_shot_all_reduce if one else torch_symmetric.two_shot_all_reduce
        problem.add(name, "peer", partial(_reduced, reduce, make), before)


def _reduced(reduce: Callable[[Tensor], Tensor], make: Call, i: int) -> Tensor:
    return reduce(make(i))

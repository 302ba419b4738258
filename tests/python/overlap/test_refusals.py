"""Calls that are refused raise before anything is sent, on the rank at fault, and the buffer stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlap_cases import AG, BULK, E4M3, PIPELINE, RING, RS, Bulk, Case, Gather, Scatter, make

import torch_overlap as to
from torch_overlap import CommOverlapType as Type
from torch_overlap.testing import run_ranks

META = torch.device("meta")
Bad = tuple[Callable[[], Any], type[Exception], str]


def t(*shape: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, device=device).to(dtype)


GOOD: dict[str, Any] = {"comm_type": RS, "method": PIPELINE, "buffer_shape": [8, 16], "buffer_dtype": torch.float32}


def config_of(comm: to.TorchComm, **changes: Any) -> to.CommOverlapConfig:
    return to.CommOverlapConfig(**{**GOOD, "tp_size": comm.get_size(), **changes})


def bad_buffer_calls(case: Case) -> dict[str, Bad]:
    b, tokens = case.buffer, case.tokens
    width = b.get_buffer().shape[1]
    value, kind = to.InvalidValueError, to.InvalidTypeError
    return {
        "too many tokens": (
            lambda: b.set_active_tokens(tokens + 1),
            value,
            f"set_active_tokens: expected at most the {tokens} tokens of the buffer, got {tokens + 1}",
        ),
        "negative tokens": (lambda: b.set_active_tokens(-1), value, "set_active_tokens: .*got -1"),
        "chunk": (
            lambda: b.get_buffer_chunk_by_id(case.size),
            value,
            r"get_buffer_chunk_by_id: expected a chunk in \[0, 2\), got 2",
        ),
        "negative chunk": (lambda: b.get_buffer_chunk_by_id(-1), value, "get_buffer_chunk_by_id: .*got -1"),
        "fill dtype": (
            lambda: b.copy_into_buffer(t(tokens, width, dtype=torch.float64)),
            kind,
            "copy_into_buffer: expected elements of 4 bytes, as the buffer's, got torch.float64",
        ),
        "fill shape": (
            lambda: b.copy_into_buffer(t(tokens - 1, width)),
            value,
            rf"copy_into_buffer: expected a tensor of shape \[{tokens}, {width}\] for the whole buffer",
        ),
        "fill chunk": (
            lambda: b.copy_into_buffer(t(tokens, width), local_chunk=True),
            value,
            "for the rows of this rank",
        ),
        "fill device": (
            lambda: b.copy_into_buffer(t(tokens, width, device=META)),
            kind,
            "copy_into_buffer: expected a tensor on cpu, got meta",
        ),
        "factor": (
            lambda: b.set_ubuf_scale_inv(t(1)),
            kind,
            "set_ubuf_scale_inv: expected a buffer of 8-bit elements, got one of torch.float32",
        ),
    }


def bad_gathers(case: Gather) -> dict[str, Bad]:
    rows, tokens, k, n = case.rows, case.active, case.k, case.n
    value, kind, unsupported = to.InvalidValueError, to.InvalidTypeError, to.UnsupportedError

    def call(A: Any = None, transb: bool = False, **changes: Any) -> Callable[[], Any]:
        args = {"B": t(rows, k), "D": t(tokens, n), **changes}
        return lambda: case.buffer.split_overlap_ag(t(n, k) if A is None else A, True, args.pop("B"), transb, **args)

    own = "split_overlap_ag: expected lhs to be this rank's rows, contiguous, "
    copy = "AG->GEMM overlap auxiliary buffer is sized incorrectly: expected "
    return {
        "rows": (call(B=t(rows + 1, k)), value, own),
        "all rows": (call(B=t(tokens, k)), value, own),
        "strides": (call(B=t(rows, 2 * k)[:, :k]), value, own),
        "element size": (call(B=t(rows, k, dtype=torch.bfloat16)), value, own),
        "lhs on another device": (call(B=t(rows, k, device=META)), kind, "lhs.*on cpu, got meta"),
        "transposed": (call(B=t(k, rows), transb=True), unsupported, "expected lhs as it is, .*got it transposed"),
        "blocks": (call(scaling_mode=2, B_scale_inv=t(1)), kind, "expected a buffer of 8-bit elements with MXFP8"),
        "mode": (call(scaling_mode=77), value, "split_overlap_ag: .*77"),
        "copy shape": (call(B_copy=t(tokens - 1, k)), value, copy),
        "copy dtype": (call(B_copy=t(tokens, k, dtype=torch.float64)), value, copy),
        "copy on another device": (call(B_copy=t(tokens, k, device=META)), kind, "B_copy|gathered|auxiliary"),
        "no D": (call(D=None), value, "split_overlap_ag: expected out, got none"),
        "D rows": (call(D=t(rows, n)), value, "split_overlap_ag: expected out of shape"),
        "D dtype": (call(D=t(tokens, n, dtype=torch.float64)), kind, "split_overlap_ag: expected out of"),
        "D device": (call(D=t(tokens, n, device=META)), kind, "split_overlap_ag: expected "),
        "weight": (call(A=t(n, k + 1)), value, "split_overlap_ag: expected op"),
        "weight dtype": (call(A=t(n, k, dtype=torch.float64)), kind, "split_overlap_ag: expected "),
        "weight device": (call(A=t(n, k, device=META)), kind, "split_overlap_ag: expected "),
        "bias": (call(bias=t(n + 1)), value, "split_overlap_ag: expected bias of shape"),
        "aux": (call(pre_gelu_out=t(rows, n)), value, "split_overlap_ag: expected pre_gelu_out of shape"),
        "sum of rows": (
            call(grad=True, bias=t(n + 1), pre_gelu_out=t(tokens, n)),
            value,
            "split_overlap_ag: expected bias_grad of shape",
        ),
    }


def bad_scatters(case: Scatter) -> dict[str, Bad]:
    rows, tokens, k, n = case.rows, case.active, case.k, case.n
    value, kind, unsupported = to.InvalidValueError, to.InvalidTypeError, to.UnsupportedError

    def call(A: Any = None, B: Any = None, **changes: Any) -> Callable[[], Any]:
        args = {"rs_output": t(rows, n), **changes}
        return lambda: case.buffer.split_overlap_rs(
            t(n, k) if A is None else A, True, t(tokens, k) if B is None else B, False, None, **args
        )

    output = f"GEMM->RS overlap output buffer is sized incorrectly: expected \\[{rows}, {n}\\]"
    return {
        "accumulate": (call(accumulate=True), unsupported, "split_overlap_rs: expected accumulate=False"),
        "gelu": (
            call(pre_gelu_out=t(tokens, n)),
            unsupported,
            "split_overlap_rs: expected no GELU and no bias gradient",
        ),
        "dgelu": (call(grad=True, pre_gelu_out=t(tokens, n)), unsupported, "expected no GELU and no bias gradient"),
        "dbias": (call(grad=True, bias=t(n)), unsupported, "expected no GELU and no bias gradient"),
        "tokens": (call(B=t(tokens - 1, k)), value, f"expected a product of the {tokens} tokens that are active"),
        "features": (call(A=t(n - 16, k)), value, f"expected a product of the {n} features of the buffer"),
        "no output": (call(rs_output=None), value, output + ".*got no tensor"),
        "output rows": (call(rs_output=t(tokens, n)), value, output),
        "output strides": (call(rs_output=t(n, rows).t()), value, output + ".*of strides"),
        "output dtype": (
            call(rs_output=t(rows, n, dtype=torch.bfloat16)),
            kind,
            "expected rs_output of torch.float32, got torch.bfloat16",
        ),
        "output device": (call(rs_output=t(rows, n, device=META)), kind, "expected rs_output on cpu, got meta"),
        "weight": (call(A=t(n, k + 1)), value, "split_overlap_rs: expected op"),
        "operand dtype": (call(B=t(tokens, k, dtype=torch.float64)), kind, "split_overlap_rs: expected "),
        "bias length": (call(bias=t(n - 1)), value, "split_overlap_rs: expected bias of shape"),
        "one bias": (call(bias=t(1)), value, "split_overlap_rs: expected bias of shape"),
        "bias dtype": (call(bias=t(n, dtype=torch.float64)), kind, "split_overlap_rs: expected bias"),
        "bias device": (call(bias=t(n, device=META)), kind, "split_overlap_rs: expected .*cpu"),
    }


def bad_bulks(case: Bulk) -> dict[str, Bad]:
    rows, tokens, n = case.rows, case.active, case.n
    value, kind = to.InvalidValueError, to.InvalidTypeError

    def call(D: Any = None, **changes: Any) -> Callable[[], Any]:
        args = {"comm_type": case.kind, **changes}
        return lambda: case.buffer.bulk_overlap(t(8, 8), True, t(8, 8), False, t(8, 8) if D is None else D, **args)

    other = AG if case.kind == RS else RS
    calls: dict[str, Bad] = {
        "no type": (
            call(comm_type=Type.NONE),
            value,
            "bulk_overlap: invalid collective type: expected AG or RS, got NONE",
        ),
        "other type": (
            call(comm_type=other),
            value,
            f"bulk_overlap: invalid collective type: expected that of the buffer, {case.kind.name}, got {other.name}",
        ),
        "product": (call(D=t(8, 9)), value, "bulk_overlap: expected out of shape"),
    }
    if case.kind == AG:
        calls["output"] = (call(rs_output=t(rows, n)), value, "bulk_overlap: expected no rs_output with AG, got one")
    else:
        output = f"bulk RS overlap auxiliary output is sized incorrectly: expected \\[{rows}, {n}\\]"
        calls["output rows"] = (call(rs_output=t(tokens, n)), value, output)
        calls["output dtype"] = (
            call(rs_output=t(rows, n, dtype=torch.float16)),
            kind,
            "expected rs_output of torch.float32",
        )
    return calls


def refuse(comm: to.TorchComm, case: Case, bad: dict[str, Bad], seed: int) -> None:
    """Only the last rank makes each one; then all make a valid call. Had anything been sent, that would be wrong or
    late."""
    for i, (name, (call, error, match)) in enumerate(bad.items()):
        if comm.get_rank() == comm.get_size() - 1:
            try:
                with pytest.raises(error, match=match):
                    call()
            except BaseException as raised:
                raise AssertionError(f"{name}: {raised!r}") from raised
        case.step(seed + i)


def run_refusals(comm: to.TorchComm, seed: int, name: str) -> None:
    case: Any
    if name == "AG":
        case = Gather(comm)
        refuse(comm, case, {**bad_buffer_calls(case), **bad_gathers(case)}, seed)
    elif name.startswith("RS"):
        case = Scatter(comm, PIPELINE if "PIPELINE" in name else RING)
        refuse(comm, case, bad_scatters(case), seed)
    else:
        case = Bulk(comm, AG if "AG" in name else RS)
        refuse(comm, case, bad_bulks(case), seed)


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "unreachable"])
@pytest.mark.parametrize("name", ["AG", "RS RING", "RS PIPELINE", "BULK AG", "BULK RS"])
def test_wrong_calls_are_refused_before_anything_is_sent(name: str, mapped: bool, seed: int) -> None:
    run_ranks(run_refusals if mapped else run_refusals_unreachable, 2, seed, name)


def run_refusals_unreachable(comm: to.TorchComm, seed: int, name: str) -> None:
    pretence = to._C._PretendUnreachable()
    try:
        run_refusals(comm, seed, name)
    finally:
        del pretence


def run_8_bits(comm: to.TorchComm, seed: int) -> None:
    for method in (RING, PIPELINE):
        case = Scatter(comm, method, E4M3)
        x, w, out = t(13, 32, dtype=torch.bfloat16), t(48, 32, dtype=torch.bfloat16), t(case.rows, 48)
        with pytest.raises(to.StateError, match="Missing inverse scaling factor: expected set_ubuf_scale_inv"):
            case.buffer.split_overlap_rs(w, True, x, False, None, rs_output=out, D_scale=torch.ones(1))
        case.step(seed)
        with pytest.raises(to.InvalidValueError, match=r"split_overlap_rs: .*out_scale"):
            case.buffer.split_overlap_rs(w, True, x, False, None, rs_output=out)
        with pytest.raises(
            to.InvalidTypeError, match=r"expected rs_output of float32, float16 or bfloat16, got torch\.float64"
        ):
            case.buffer.split_overlap_rs(w, True, x, False, None, rs_output=out.double(), D_scale=torch.ones(1))
        with pytest.raises(
            to.InvalidTypeError, match=r"expected rs_output of float32, float16 or bfloat16, got torch\.float8"
        ):
            case.buffer.split_overlap_rs(w, True, x, False, None, rs_output=out.to(E4M3), D_scale=torch.ones(1))
        for wrong in (t(2), t(1, dtype=torch.float64), t(1, device=META)):
            with pytest.raises(to.InvalidTypeError, match="set_ubuf_scale_inv: expected one float32 on cpu, got "):
                case.buffer.set_ubuf_scale_inv(wrong)
        case.step(seed + 1)
    bulk = Bulk(comm, RS, E4M3, in_place=False)
    assert bulk.buffer.is_fp8_ubuf()
    product = (t(8, 8), True, t(8, 8), False, t(8, 8))
    with pytest.raises(to.StateError, match="bulk_overlap: Missing inverse scaling factor"):
        bulk.buffer.bulk_overlap(*product, rs_output=t(bulk.rows, 48), comm_type=RS)
    with pytest.raises(
        to.InvalidValueError, match="bulk_overlap: expected rs_output for the sum of an 8-bit buffer, got none"
    ):
        bulk.buffer.bulk_overlap(*product, comm_type=RS)
    bulk.step(seed)
    both = make(comm, Type.NONE, BULK, (8, 16), torch.uint8)
    both.set_ubuf_scale_inv(torch.ones(1))
    with pytest.raises(to.InvalidTypeError, match=r"bulk_overlap: expected .*uint8.*no sums"):
        both.bulk_overlap(*product, rs_output=t(4, 16), comm_type=RS)


def test_buffers_of_8_bits(seed: int) -> None:
    run_ranks(run_8_bits, 2, seed)


def run_blocks(comm: to.TorchComm, seed: int) -> None:
    """Products with block scales need multiples of eight rows, which this rank does not have."""
    case = Scatter(comm, RING, torch.bfloat16)
    x, w = t(13, 128, dtype=E4M3), t(48, 128, dtype=E4M3)
    with pytest.raises(to.InvalidValueError, match=r"^split_overlap_rs: expected m and n to be multiples of 8"):
        case.buffer.split_overlap_rs(
            w,
            True,
            x,
            False,
            None,
            rs_output=t(case.rows, 48, dtype=torch.bfloat16),
            scaling_mode=4,
            A_scale_inv=torch.ones(48, 1),
            B_scale_inv=torch.ones(13, 1),
        )
    case.step(seed)


def test_rows_that_blocks_do_not_take_are_refused_before_anything_is_sent(seed: int) -> None:
    run_ranks(run_blocks, 2, seed)


def run_none(comm: to.TorchComm) -> None:
    bulk = make(comm, AG, BULK, (8, 16), torch.float32)
    with pytest.raises(TypeError):
        bulk.bulk_overlap_external_ag(None)
    with pytest.raises(TypeError):
        to.CommOverlapBase(None, config_of(comm))
    with pytest.raises(TypeError):
        to.create_comm_overlap_buffer(None, RS, PIPELINE, (8, 16), torch.float32, tp_size=2)
    with pytest.raises(TypeError):
        bulk.set_ubuf_scale_inv(None)


def test_none_is_no_object() -> None:
    run_ranks(run_none, 2)

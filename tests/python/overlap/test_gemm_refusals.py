"""gemm over a buffer: a call that is refused changes nothing of the buffer, and nothing has been sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_overlap as to
from torch_overlap import CommOverlapMethod as Method
from torch_overlap import CommOverlapType as Type
from torch_overlap.gemm import ScalingMode
from torch_overlap.testing import run_ranks

SIZE, TOKENS, ROWS, K, N = 2, 8, 3, 16, 32  # a call has 2 * 3 of 8 tokens
E4M3 = torch.float8_e4m3fn
Arguments = dict[str, Any]

# By name: type and method of the buffer, its dtype, the comm_type of a call.
KINDS: dict[str, tuple[Type, Method, torch.dtype, Type]] = {
    "AG": (Type.AG, Method.RING_EXCHANGE, torch.float32, Type.AG),
    "RS RING": (Type.RS, Method.RING_EXCHANGE, torch.float32, Type.RS),
    "RS PIPELINE": (Type.RS, Method.PIPELINE, torch.float32, Type.RS),
    "BULK AG": (Type.AG, Method.BULK, torch.float32, Type.AG),
    "BULK RS": (Type.RS, Method.BULK, torch.float32, Type.RS),
    "BULK NONE AG": (Type.NONE, Method.BULK, torch.float32, Type.AG),
    "BULK NONE RS": (Type.NONE, Method.BULK, torch.float32, Type.RS),
    "BULK RS of 8 bits": (Type.RS, Method.BULK, E4M3, Type.RS),
}


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(*shape, device=device).to(dtype)


def good(kind: str) -> Arguments:
    _, method, dtype, call_type = KINDS[kind]
    is_bulk = method == Method.BULK
    width = K if call_type == Type.AG else N
    rows = ROWS if call_type == Type.AG else SIZE * ROWS
    aux = {"aux_in": t(rows, width, dtype=dtype)} if is_bulk else {}
    return {"lhs": t(5, K) if is_bulk else t(rows, K), "rhs": t(K, N), "comm_type": int(call_type),
            "comm_overlap_method": int(method), **aux}  # fmt: skip


def bad(kind: str) -> dict[str, Arguments]:
    """Returns the replaced arguments of a valid call, by the name of the mistake."""
    created, method, dtype, call_type = KINDS[kind]
    is_bulk, gathers = method == Method.BULK, call_type == Type.AG
    call = good(kind)
    rows = call["lhs"].shape[0]
    wrong: dict[str, Arguments] = {
        "dtype of lhs": {"lhs": t(rows, K, dtype=torch.float64)},
        "shape of rhs": {"rhs": t(K + 1, N)},
        "dtype of rhs": {"rhs": t(K, N, dtype=torch.bfloat16)},
        "device of rhs": {"rhs": t(K, N, device="meta")},
        "bias without fuse_bias": {"bias": t(N)},
        "fuse_bias without bias": {"fuse_bias": True},
        "length of bias": {"fuse_bias": True, "bias": t(N - 1)},
        "dtype of bias": {"fuse_bias": True, "bias": t(N, dtype=torch.float64)},
        "device of bias": {"fuse_bias": True, "bias": t(N, device="meta")},
        "gelu_input forward": {"gelu_input": t(rows, N)},
        "no gelu_input": {"fuse_gelu": True, "grad": True},
        "comm_type": {"comm_type": 5},
        "method": {"comm_overlap_method": 4},
        "scaling mode": {"scaling_mode": 77},
        "scaled operands": {"scaling_mode": 3},
        "scales of no scaling": {"lhs_scale_inv": t(1)},
        "axis boundary": {"lhs_axis_boundary": 9},
        "out_dtype": {"out_dtype": torch.int32},
        "out_scale": {"out_scale": t(1)},
        "out_amax": {"out_amax": t(1)},
        "swizzle": {"lhs_swizzle": t(128, 4, dtype=torch.uint8)},
        "workspace": {"workspace": t(64, 64, dtype=torch.uint8).t()[:, ::2]},
    }
    if created != Type.NONE:
        wrong["other comm_type"] = {"comm_type": 1 if gathers else 2}
    if is_bulk:
        width, most = call["aux_in"].shape[1], TOKENS // SIZE if gathers else TOKENS
        wrong |= {
            "no aux_in": {"aux_in": None},
            "rows of aux_in": {"aux_in": t(most + SIZE, width, dtype=dtype)},
            "features of aux_in": {"aux_in": t(SIZE, width + 1, dtype=dtype)},
            "dtype of aux_in": {"aux_in": t(SIZE, width, dtype=torch.float64)},
            "integers in aux_in": {"aux_in": t(SIZE, width, dtype=torch.int32 if dtype != E4M3 else torch.uint8)},
            "device of aux_in": {"aux_in": t(SIZE, width, dtype=dtype, device="meta"), "rhs": t(K + 1, N)},
            "aux boundary": {"aux_axis_boundary": 0},
        }
        if gathers:
            del wrong["integers in aux_in"]  # any bytes can be gathered
        if dtype == E4M3:
            wrong["no factor"] = {}
            wrong["sum in 8 bits"] = {"out_dtype": E4M3, "out_scale": t(1)}
    else:
        wrong |= {
            "aux_in": {"aux_in": t(ROWS, K)},
            "too many rows": {"lhs": t(TOKENS + 1, K)},
            "features of lhs": {"lhs": t(rows, K + 1), "rhs": t(K + 1, N)} if gathers else {"rhs": t(K, N + 1)},
        }
        wrong |= (
            {"transposed": {"lhs": t(K, ROWS), "lhs_transposed": True}}
            if gathers
            else {
                "GELU of a sum": {"fuse_gelu": True},
                "derivative of a sum": {"fuse_gelu": True, "grad": True, "gelu_input": t(rows, N)},
                "bias gradient": {"fuse_bias": True, "grad": True},
            }
        )
    return wrong


def call_gemm(id: int, arguments: Arguments) -> Any:
    rest = dict(arguments)
    lhs, rhs, scale = rest.pop("lhs"), rest.pop("rhs"), rest.pop("lhs_scale_inv", None)
    return to.ops.gemm(lhs, scale, rhs, None, comm_overlap_id=id, **rest)


def held(buffer: Any) -> torch.Tensor:
    """Returns the whole buffer, including its inactive part, as bytes."""
    active = buffer.active_tokens()
    buffer.set_active_tokens(TOKENS)
    copy = buffer.get_buffer().clone().view(torch.uint8)
    buffer.set_active_tokens(active)
    return copy


def refused(comm: to.TorchComm, kind: str, seed: int) -> None:
    created, method, dtype, _ = KINDS[kind]
    good_call = good(kind)
    width = good_call["aux_in"].shape[1] if method == Method.BULK else (K if created == Type.AG else N)
    id = to.create_comm_overlap_buffer(comm, created, method, (TOKENS, width), dtype)
    buffer = to.comm_overlap_buffer(id)
    fill = torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(seed + comm.get_rank())).to(dtype)
    buffer.copy_into_buffer(fill)
    buffer.set_active_tokens(TOKENS - 3)
    before = held(buffer)
    if comm.get_rank() == SIZE - 1:  # only on one rank: had it sent anything, the call below would be wrong
        for name, changes in bad(kind).items():
            with pytest.raises((to.Error, RuntimeError)) as caught:
                call_gemm(id, {**good_call, **changes})
            assert str(caught.value).startswith(("gemm", "bulk_overlap", "split_overlap", "copy_into_buffer")), (
                name, caught.value)  # fmt: skip
            assert buffer.active_tokens() == TOKENS - 3, name
            assert torch.equal(held(buffer), before), name
    if dtype == E4M3:
        buffer.set_ubuf_scale_inv(torch.ones(1))
    output, _, _, aux = call_gemm(id, good_call)
    summed = K * SIZE if KINDS[kind][3] == Type.RS and method != Method.BULK else K
    assert (output == summed).all()
    if method == Method.BULK:
        assert (aux.float() == (SIZE if KINDS[kind][3] == Type.RS else 1)).all()
    to.destroy_comm_overlap_buffer(id)


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_call_changes_nothing(kind: str, seed: int) -> None:
    run_ranks(refused, SIZE, kind, seed, backend="local")


def make(comm: to.TorchComm, kind: Type, method: Method, **options: Any) -> int:
    return to.create_comm_overlap_buffer(comm, kind, method, (TOKENS, K), torch.float32, **options)


def over(kind: str, **changes: Any) -> Callable[[to.TorchComm], Any]:
    def call(comm: to.TorchComm) -> Any:
        created, method, dtype, _ = KINDS[kind]
        id = to.create_comm_overlap_buffer(comm, created, method, (TOKENS, K if created == Type.AG else N), dtype)
        try:
            return call_gemm(id, {**good(kind), **changes})
        finally:
            to.destroy_comm_overlap_buffer(id)

    return call


def gradient(comm: to.TorchComm) -> None:
    over("AG", lhs=t(ROWS, K).requires_grad_())(comm)[0].sum().backward()


WHY: dict[str, tuple[Callable[[to.TorchComm], Any], type[Exception], str]] = {
    "BULK with atomic_gemm": (
        lambda c: make(c, Type.AG, Method.BULK, atomic_gemm=True),
        to.InvalidValueError,
        "expected PIPELINE or RING_EXCHANGE with atomic_gemm, got BULK. Its collective has nothing to do with the",
    ),
    "PIPELINE AG": (
        lambda c: make(c, Type.AG, Method.PIPELINE),
        to.UnsupportedError,
        "expected RS for PIPELINE, got AG. It reduces one piece .* what is gathered comes before the product",
    ),
    "aggregate_ag with BULK": (
        lambda c: make(c, Type.AG, Method.BULK, aggregate_ag=True),
        to.InvalidValueError,
        "expected RING_EXCHANGE and AG with aggregate_ag, got BULK and AG. It multiplies two ranks' chunks",
    ),
    "an unknown id": (
        lambda c: to.destroy_comm_overlap_buffer(999_999),
        to.InvalidValueError,
        r"the id of a live buffer, got 999999, which no buffer ever had. comm_overlap_buffers\(\) lists",
    ),
    "transposed lhs": (
        over("AG", lhs=t(K, ROWS), lhs_transposed=True),
        to.UnsupportedError,
        "^gemm: expected lhs as it is with comm_type AG, got lhs_transposed. .* sums over the rows of all ranks",
    ),
    "GELU of a sum": (
        over("RS RING", fuse_gelu=True),
        to.UnsupportedError,
        "^gemm: expected no fuse_gelu with comm_type RS, got it. GELU is not linear",
    ),
    "bias gradient of a sum": (
        over("RS RING", fuse_bias=True, grad=True),
        to.UnsupportedError,
        "^gemm: expected no bias gradient with comm_type RS, got it. Each rank has only its part",
    ),
    "gradient": (
        gradient,
        RuntimeError,
        r"^gemm: expected comm_type NONE \(0\) where a gradient is asked, got AG \(2\). .*use all_gather_matmul",
    ),
}


def says_why(comm: to.TorchComm) -> None:
    for name, (call, error, match) in WHY.items():
        try:
            with pytest.raises(error, match=match):
                call(comm)
        except BaseException as raised:
            raise AssertionError(f"{name}: {raised!r}") from raised


def test_what_is_not_there_is_refused_with_its_reason() -> None:
    run_ranks(says_why, SIZE, backend="local")


def test_a_refused_product_leaves_the_buffers_of_scales_alone() -> None:
    mode = ScalingMode.MXFP8_1D_SCALING
    x, x_scale, *_ = to.ops.quantize(torch.ones(8, 64), mode)
    w, w_scale, *_ = to.ops.quantize(torch.ones(16, 64), mode)
    room = [torch.full((128, 4), 7, dtype=torch.uint8) for _ in range(2)]
    call = {"lhs_swizzle": room[0], "rhs_swizzle": room[1], "scaling_mode": mode, "rhs_transposed": True}
    with pytest.raises(to.InvalidTypeError, match=r"^gemm: expected bias of"):  # the last of all checks
        to.ops.gemm(x, x_scale, w, w_scale, t(16, dtype=torch.float64), fuse_bias=True, out_dtype=torch.float32, **call)
    assert all((buffer == 7).all() for buffer in room)
    y, *_ = to.ops.gemm(x, x_scale, w, w_scale, out_dtype=torch.float32, **call)
    assert (y == 64).all()
    assert torch.equal(room[0], to.ops.swizzle_scales(x_scale).view(torch.uint8))

"""Products in pieces: the product supports each piece, and results of which each has only a part are combined."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_overlap as to
from torch_overlap import CommOverlapMethod as Method
from torch_overlap import CommOverlapType as Type
from torch_overlap.gemm import ScalingMode as Mode
from torch_overlap.testing import run_ranks

K, SIZE = 128, 2
MODES = (Mode.CURRENT_TENSOR_SCALING, Mode.ROW_SCALING, Mode.BLOCK_1D_SCALING, Mode.BLOCK_2D_SCALING,
         Mode.MXFP8_1D_SCALING)  # fmt: skip


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pipelined(comm: to.TorchComm, mode: Mode, seed: int) -> None:
    """Any number of features that the whole product supports, in any number of pieces."""
    rank, of_rows = comm.get_rank(), Mode.BLOCK_1D_SCALING if mode == Mode.BLOCK_2D_SCALING else mode
    tokens, failed = 16, []
    for features in (8, 24, 40, 48, 104, 128, 136):
        xs = [to.ops.quantize(draw(tokens, K, seed=seed + r), of_rows) for r in range(SIZE)]
        ws = [to.ops.quantize(draw(features, K, seed=seed + 50 + r), mode) for r in range(SIZE)]
        want = sum(to.ops.dequantize(x[0], x[1], of_rows, torch.float64)
                   @ to.ops.dequantize(w[0], w[1], mode, torch.float64).T
                   for x, w in zip(xs, ws, strict=True)).chunk(SIZE)[rank]  # fmt: skip
        for dtype in (torch.float32, torch.bfloat16):
            for splits in (1, 3, 4, 7):
                id = to.create_comm_overlap_buffer(
                    comm, Type.RS, Method.PIPELINE, (tokens, features), dtype, num_splits=splits
                )
                swizzled = mode == Mode.MXFP8_1D_SCALING and splits == 3
                scales = [to.ops.swizzle_scales(s[rank][1]) if swizzled else s[rank][1] for s in (xs, ws)]
                try:
                    y, *_ = to.ops.gemm(xs[rank][0], scales[0], ws[rank][0], scales[1], rhs_transposed=True,
                                        scaling_mode=mode, out_dtype=dtype, comm_overlap_method=2, comm_type=1,
                                        comm_overlap_id=id, scales_swizzled=swizzled)  # fmt: skip
                    exact = dtype == torch.float32
                    torch.testing.assert_close(
                        y.double(), want, rtol=1e-4 if exact else 2e-2, atol=1e-3 if exact else 0.3
                    )
                except Exception as error:
                    failed.append(f"{features} features of {dtype} in {splits}: {error}")
                to.destroy_comm_overlap_buffer(id)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_pipeline_chooses_pieces_that_are_allowed(mode: Mode, seed: int) -> None:
    run_ranks(pipelined, SIZE, mode, seed, backend="local", timeout=120)


def blocks_of_few_rows(comm: to.TorchComm) -> None:
    """4 ranks share 16 tokens by four: the message names these numbers."""
    size, tokens, features = comm.get_size(), 16, 32
    x, x_scale, *_ = to.ops.quantize(torch.ones(tokens, K), Mode.BLOCK_1D_SCALING)
    w, w_scale, *_ = to.ops.quantize(torch.ones(features, K), Mode.BLOCK_1D_SCALING)
    own, own_scale = x.view(torch.uint8).chunk(size)[0].view(x.dtype), x_scale.chunk(size)[0]
    for kind, method, shape, dtype, a, s in (
        (Type.RS, 3, (tokens, features), torch.float32, x, x_scale),
        (Type.AG, 3, (tokens, K), x.dtype, own, own_scale),
    ):
        id = to.create_comm_overlap_buffer(comm, kind, Method(method), shape, dtype)
        with pytest.raises(
            to.InvalidValueError,
            match="expected a multiple of 8 tokens for each rank with BLOCK_1D_SCALING, got 4 of 16, which 4 ranks",
        ):
            to.ops.gemm(a, s, w, w_scale, rhs_transposed=True, scaling_mode=4, out_dtype=torch.float32,
                        comm_overlap_method=method, comm_type=int(kind), comm_overlap_id=id)  # fmt: skip
        to.destroy_comm_overlap_buffer(id)
    # Products of two ranks' chunks have eight tokens.
    id = to.create_comm_overlap_buffer(comm, Type.AG, Method.RING_EXCHANGE, (tokens, K), x.dtype, aggregate_ag=True)
    y, *_ = to.ops.gemm(own, own_scale, w, w_scale, rhs_transposed=True, scaling_mode=4, out_dtype=torch.float32,
                        comm_overlap_method=3, comm_type=2, comm_overlap_id=id)  # fmt: skip
    assert (y - K).abs().max() < 1e-2
    to.destroy_comm_overlap_buffer(id)


def test_blocks_of_too_few_rows_for_a_rank() -> None:
    run_ranks(blocks_of_few_rows, 4, backend="local")


def gelu_gradient(out: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    leaf = at.double().clone().requires_grad_()
    F.gelu(leaf, approximate="tanh").backward(out)
    assert leaf.grad is not None
    return leaf.grad


def backward_step(comm: to.TorchComm, seed: int, dtype: torch.dtype, tokens: int, options: dict[str, bool]) -> None:
    """AG with grad, fuse_gelu and fuse_bias: the gradient of the bias is the sum over the rows of all ranks."""
    size, rank, n, k = comm.get_size(), comm.get_rank(), 24, 32
    id = to.create_comm_overlap_buffer(comm, Type.AG, Method.RING_EXCHANGE, (tokens, k), dtype, **options)
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    for turn in range(2):
        grad = draw(tokens, k, seed=seed + turn).to(dtype)
        w, pre = draw(k, n, seed=seed + 10 + rank).to(dtype) / k**0.5, draw(tokens, n, seed=seed + 20 + rank).to(dtype)
        want = gelu_gradient(grad.double() @ w.double(), pre)
        call = {"comm_overlap_method": 3, "comm_type": 2, "comm_overlap_id": id}
        out, bias_grad, _, gathered = to.ops.gemm(grad.chunk(size)[rank].contiguous(), None, w, None, None, pre,
                                                  fuse_bias=True, fuse_gelu=True, grad=True, **call)  # fmt: skip
        torch.testing.assert_close(out.double(), want, **tolerance)
        scale = max(1.0, want.sum(0).abs().max().item())
        torch.testing.assert_close(bias_grad.double() / scale, want.sum(0) / scale, **tolerance)
        assert bias_grad.dtype == dtype
        assert torch.equal(gathered, grad)
        # The same by the class, into a bias of float32.
        if dtype != torch.float64:
            given, d = torch.full((n,), 7.0), torch.empty(tokens, n, dtype=dtype)
            method = "atomic_gemm_overlap_ag" if options.get("atomic_gemm") else "split_overlap_ag"
            run = getattr(to.comm_overlap_buffer(id), method)
            run(w, False, grad.chunk(size)[rank].contiguous(), False, d, given, pre, grad=True)
            torch.testing.assert_close(given.double() / scale, want.sum(0) / scale, rtol=1e-2, atol=1e-2)
    to.destroy_comm_overlap_buffer(id)


@pytest.mark.parametrize("options", [{}, {"aggregate_ag": True}, {"relay_ag": True}, {"atomic_gemm": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_gradient_of_a_bias_behind_gelu(dtype: torch.dtype, options: dict[str, bool], seed: int) -> None:
    run_ranks(backward_step, 2, seed, dtype, 12, options, backend="local")
    run_ranks(backward_step, 4, seed, dtype, 8, options, backend="local")


def test_the_gradient_of_a_bias_where_a_rank_has_no_rows(seed: int) -> None:
    def rank(comm: to.TorchComm) -> None:
        buffer = to.create_comm_overlap_buffer(comm, Type.AG, Method.RING_EXCHANGE, (5, 16), torch.float64)
        shared = to.comm_overlap_buffer(buffer)
        grad, w, pre = draw(5, 16, seed=seed), draw(16, 6, seed=seed + 1), draw(5, 6, seed=seed + 2)
        shared.copy_into_buffer(grad)
        d, bias = torch.empty(5, 6, dtype=torch.float64), torch.empty(6, dtype=torch.float64)
        shared.split_overlap_ag(w, False, None, False, d, bias, pre, grad=True)
        want = gelu_gradient(grad @ w, pre)
        torch.testing.assert_close(d, want)
        torch.testing.assert_close(bias, want.sum(0))
        to.destroy_comm_overlap_buffer(buffer)

    run_ranks(rank, 4, backend="local")

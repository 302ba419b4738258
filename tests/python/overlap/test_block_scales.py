"""8-bit rows with scales of blocks: all-gathered with their scales, reduced in parts with any number of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from overlap_cases import AG, BULK, PIPELINE, RING, RS, Draw, interleaving, make, poison, share

import torch_overlap as to
from torch_overlap.quantize import ScalingMode as Mode
from torch_overlap.testing import run_ranks

E4M3 = torch.float8_e4m3fn
K, N = 256, 48
MODES = [Mode.MXFP8_1D_SCALING, Mode.BLOCK_1D_SCALING, Mode.BLOCK_2D_SCALING, Mode.ROW_SCALING]


def of_rows(mode: Mode) -> Mode:
    """Returns the mode of the activations of a product: blocks of 128 x 128 are for weights."""
    return Mode.BLOCK_1D_SCALING if mode == Mode.BLOCK_2D_SCALING else mode


def quantized(x: torch.Tensor, mode: Mode) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns data, scales, and the values."""
    data, scale_inv, *_ = to.ops.quantize(x, mode, E4M3)
    return data, scale_inv, to.ops.dequantize(data, scale_inv, mode).double()


def rows_of(draw: Draw, tokens: int) -> torch.Tensor:
    """Returns rows whose magnitudes differ widely, so that a misplaced scale is detected."""
    return draw(tokens, K) * 2.0 ** torch.randint(-8, 8, (tokens, 1), generator=draw.generator)


def run_gather(comm: to.TorchComm, seed: int, mode: Mode, tokens: int, actives: list[int], options: Any) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    pretence = to._C._PretendUnreachable() if options.pop("unreachable", False) else None
    buffer = make(comm, AG, RING, (tokens, K), E4M3, **options)
    comm.barrier(async_op=False)
    del pretence
    for turn, active in enumerate(actives):
        draw = Draw(seed + turn)
        mine = share(active, size, rank)
        # Each rank quantizes only its own rows.
        parts = [quantized(part, of_rows(mode)) for part in rows_of(draw, active).split(max(-(-active // size), 1))]
        values = torch.cat([value for *_, value in parts])
        weight, weight_scale, weight_value = quantized(Draw(seed + 100 + rank)(N, K), mode)
        if mine.stop > mine.start:
            x, x_scale, _ = parts[rank]
        else:
            x, x_scale, _ = quantized(torch.empty(0, K), of_rows(mode))
        buffer.set_active_tokens(active)
        for fill in (False, True):
            out, copy = poison((active, N), torch.float32), poison((active, K), E4M3)
            if fill:
                buffer.copy_into_buffer(x, local_chunk=True)
            with interleaving(seed + turn):
                buffer.split_overlap_ag(
                    weight, True, None if fill else x, False, out, B_copy=copy,
                    scaling_mode=mode, A_scale_inv=weight_scale, B_scale_inv=x_scale,
                )  # fmt: skip
            want = values @ weight_value.T
            allowed = (values.abs() @ weight_value.T.abs()) * 2.0**-18 + 1e-30
            assert ((out.double() - want).abs() <= allowed).all()
            gathered = torch.cat([data.view(torch.uint8) for data, *_ in parts])
            assert torch.equal(copy.view(torch.uint8), gathered)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize(
    ("backend", "size", "options"),
    [
        ("gloo", 2, {}),
        ("gloo", 4, {"aggregate_ag": True}),
        ("gloo", 3, {"relay_ag": True}),
        ("gloo", 3, {"unreachable": True}),
        ("local", 4, {"num_max_streams": 4}),
    ],
    ids=str,
)
def test_all_gather(mode: Mode, backend: str, size: int, options: dict[str, Any], seed: int) -> None:
    # Blocks need multiples of 8 rows; MXFP8 supports any number, uneven ends too.
    actives = [8 * size, 16 * size] if mode != Mode.MXFP8_1D_SCALING else [8 * size, 5, 16 * size - 1]
    run_ranks(run_gather, size, seed, mode, 16 * size, actives, options, backend=backend, timeout=120)


def run_reduce_scatter(comm: to.TorchComm, seed: int, mode: Mode, part: int) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    draw = Draw(seed)
    tokens = part * size
    buffer = make(comm, RS, RING, (tokens, N), torch.float32)
    xs = [quantized(rows_of(draw, tokens), of_rows(mode)) for _ in range(size)]
    weights = [quantized(draw(N, K), mode) for _ in range(size)]
    out = poison((part, N), torch.float32)
    buffer.split_overlap_rs(
        weights[rank][0], True, xs[rank][0], False, None, rs_output=out,
        scaling_mode=mode, A_scale_inv=weights[rank][1], B_scale_inv=xs[rank][1],
    )  # fmt: skip
    mine = slice(rank * part, (rank + 1) * part)
    want = sum(x[2] @ w[2].T for x, w in zip(xs, weights, strict=True))[mine]
    allowed = sum(x[2].abs() @ w[2].T.abs() for x, w in zip(xs, weights, strict=True))[mine] * 2.0**-18
    assert ((out.double() - want).abs() <= allowed).all()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_reduce_scatter_in_parts_of_few_rows(mode: Mode, seed: int) -> None:
    run_ranks(run_reduce_scatter, 3, seed, mode, 8)


def run_pipeline(comm: to.TorchComm, seed: int, mode: Mode, atomic: bool, mapped: bool, options: Any) -> None:
    """Pieces are sets of features: scales of rows stay whole, those of weights are split with them."""
    rank, size = comm.get_rank(), comm.get_size()
    draw, part, features = Draw(seed), 8, 256
    pretence = None if mapped else to._C._PretendUnreachable()
    buffer = make(
        comm, RS, PIPELINE, (part * size, features), torch.float32, num_splits=4, atomic_gemm=atomic, **options
    )
    comm.barrier(async_op=False)
    del pretence
    xs = [quantized(rows_of(draw, part * size), of_rows(mode)) for _ in range(size)]
    weights = [quantized(draw(features, K), mode) for _ in range(size)]
    out, bias = poison((part, features), torch.float32), draw(features, dtype=torch.float32)
    run = buffer.atomic_gemm_overlap_rs if atomic else buffer.split_overlap_rs
    run(
        weights[rank][0], True, xs[rank][0], False, None, bias, rs_output=out,
        scaling_mode=mode, A_scale_inv=weights[rank][1], B_scale_inv=xs[rank][1],
    )  # fmt: skip
    # Split at the blocks of the weights, if they have any.
    assert ", 2 products on " in buffer.last_path()  # ranks split alike, for all scales
    mine = slice(rank * part, (rank + 1) * part)
    want = sum(x[2] @ w[2].T for x, w in zip(xs, weights, strict=True))[mine] + bias.double()
    allowed = sum(x[2].abs() @ w[2].T.abs() for x, w in zip(xs, weights, strict=True))[mine] * 2.0**-18 + 1e-6
    assert ((out.double() - want).abs() <= allowed).all()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize(
    ("atomic", "mapped", "options"),
    [(False, True, {}), (True, True, {"rs_overlap_first_gemm": True}), (False, False, {})],
    ids=str,
)
def test_reduce_scatter_in_pieces_of_features(
    mode: Mode, atomic: bool, mapped: bool, options: dict[str, Any], seed: int
) -> None:
    run_ranks(run_pipeline, 3, seed, mode, atomic, mapped, options)


def run_bulk(comm: to.TorchComm, seed: int, mode: Mode) -> None:
    """The product of a bulk overlap may have any scaling: the collective is independent of it."""
    rank, size = comm.get_rank(), comm.get_size()
    draw = Draw(seed)
    x, w = quantized(rows_of(draw, 16), of_rows(mode)), quantized(draw(N, K), mode)
    want, allowed = x[2] @ w[2].T, (x[2].abs() @ w[2].T.abs()) * 2.0**-18
    others = [draw(4 * size, 32, dtype=torch.float32) for _ in range(size)]
    for kind in (AG, RS):
        buffer = make(comm, kind, BULK, (4 * size, 32), torch.float32)
        buffer.copy_into_buffer(others[0][4 * rank : 4 * rank + 4] if kind == AG else others[rank], kind == AG)
        out = poison((16, N), torch.float32)
        buffer.bulk_overlap(
            w[0], True, x[0], False, out, comm_type=kind, scaling_mode=mode, A_scale_inv=w[1], B_scale_inv=x[1]
        )
        assert ((out.double() - want).abs() <= allowed).all()
        if kind == AG:
            assert torch.equal(buffer.get_buffer(), others[0])
        else:
            total = sum(o.double() for o in others)[4 * rank : 4 * rank + 4]
            torch.testing.assert_close(buffer.get_buffer(True).double(), total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_products_beside_a_collective(mode: Mode, seed: int) -> None:
    run_ranks(run_bulk, 2, seed, mode)


def run_tiles(comm: to.TorchComm, seed: int) -> None:
    """Swizzled scales that are not declared as such."""
    size, mode = comm.get_size(), Mode.MXFP8_1D_SCALING
    buffer = make(comm, AG, RING, (128 * size, K), E4M3)
    x, x_scale, _ = quantized(Draw(seed)(128, K), mode)
    w, w_scale, _ = quantized(Draw(seed + 1)(N, K), mode)
    out = torch.empty(128 * size, N)

    def call(a_scale: torch.Tensor, b_scale: torch.Tensor) -> None:
        buffer.split_overlap_ag(
            w, True, x, False, out, scaling_mode=mode, A_scale_inv=a_scale, B_scale_inv=b_scale
        )  # fmt: skip

    swizzled = to.ops.swizzle_scales(w_scale)
    with pytest.raises(to.InvalidValueError, match=rf"^split_overlap_ag: .*rhs for MXFP8.*of shape \[{N}, {K // 32}\]"):
        call(swizzled, x_scale)
    with pytest.raises(to.InvalidValueError, match=r"^split_overlap_ag: expected scale_inv of lhs .*Missing inverse"):
        call(w_scale, None)  # type: ignore[arg-type]
    call(to.ops.unswizzle_scales(swizzled, N, K // 32), x_scale)


def test_swizzled_scales_that_are_not_said_to_be(seed: int) -> None:
    run_ranks(run_tiles, 2, seed)


def run_refused(comm: to.TorchComm) -> None:
    size = comm.get_size()
    buffer = make(comm, AG, RING, (8 * size, K), E4M3)
    wide = make(comm, AG, RING, (8 * size, K), torch.bfloat16)
    mode = Mode.BLOCK_1D_SCALING
    x, x_scale, _ = quantized(torch.randn(8, K), mode)
    weight, weight_scale, _ = quantized(torch.randn(N, K), mode)

    def call(scale: torch.Tensor | None, to_buffer: Any = buffer) -> None:
        to_buffer.split_overlap_ag(
            weight, True, x if to_buffer is buffer else None, False, torch.empty(8 * size, N),
            scaling_mode=mode, A_scale_inv=weight_scale, B_scale_inv=scale,
        )  # fmt: skip

    for scale in (None, x_scale[:4], x_scale[:, :1], x_scale.double()):
        with pytest.raises(
            to.InvalidValueError, match=r"^split_overlap_ag: expected scale_inv of lhs of shape \[8, 2\]"
        ):
            call(scale)
    with pytest.raises(
        to.InvalidTypeError, match=r"a buffer of 8-bit elements with BLOCK_1D_SCALING, got torch\.bfloat16"
    ):
        call(x_scale, wide)
    call(x_scale)


def test_scales_that_do_not_fit() -> None:
    run_ranks(run_refused, 2)

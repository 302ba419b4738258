"""Rows and columns of a product, each computed separately, equal those of the whole."""

import pytest
import torch
from gemm_cases import E4M3, LAYOUTS, SCALINGS, make_case

import torch_overlap as to
from torch_overlap.gemm import gemm, grouped_gemm

CUTS = {"rows": 0, "columns": 1}


def pieces(args, axis, at):
    ends = [*at[1:], args.out.size(CUTS[axis])]
    return [getattr(args, axis)(begin, end - begin) for begin, end in zip(at, ends, strict=True)]


@pytest.mark.parametrize("epilogue", ["none", "bias", "bias_gelu_aux", "dgelu", "bgrad"])
@pytest.mark.parametrize("axis", CUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("added", ["accumulate", "residual"])
def test_unscaled(added, dtype, layout, axis, epilogue):
    case = make_case(40, 48, 56, dtype=dtype, layout=layout, epilogue=epilogue, padded=True, **{added: True})
    grouped_gemm(pieces(case.args, axis, [0, 1, 17, 17, 33]))
    case.check()


@pytest.mark.parametrize("axis", CUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", [*SCALINGS, "mxfp8 swizzled"])
def test_scaled(scaling, layout, axis):
    scaling, _, swizzled = scaling.partition(" ")
    case = make_case(
        328, 392, 160, dtype=E4M3, scaling=scaling, layout=layout, epilogue="bias_gelu_aux", swizzled=bool(swizzled)
    )
    for piece in pieces(case.args, axis, [0, 128, 256]):
        gemm(piece)
    case.check()


def test_pieces_of_pieces():
    case = make_case(256, 384, 128, dtype=E4M3, scaling="mxfp8", swizzled=True)
    for rows in pieces(case.args, "rows", [0, 128]):
        for piece in pieces(rows, "columns", [0, 256]):
            gemm(piece)
    case.check()


def test_bias_grad_of_columns():
    case = make_case(24, 40, 32, epilogue="dgelu_bgrad")
    for piece in pieces(case.args, "columns", [0, 7, 20]):
        gemm(piece)
    case.check()


def test_a_cut_shares_memory_with_the_whole():
    case = make_case(24, 40, 32, epilogue="bias")
    piece = case.args.rows(8, 4).columns(16, 8)
    assert piece.out.data_ptr() == case.args.out[8:, 16:].data_ptr()
    assert piece.bias.data_ptr() == case.args.bias[16:].data_ptr()
    assert piece.lhs.data.data_ptr() == case.args.lhs.data[8:].data_ptr()


@pytest.mark.parametrize("axis", CUTS)
@pytest.mark.parametrize(("begin", "length"), [(-1, 2), (0, 9), (8, 1), (2, -1), (3, 2**62)])
def test_cuts_outside(axis, begin, length):
    case = make_case(8, 8, 8)
    with pytest.raises(ValueError, match=f"gemm_{axis}: expected {axis} within .0, 8.*cut inside the result"):
        getattr(case.args, axis)(begin, length)


@pytest.mark.parametrize(
    ("scaling", "lhs", "rhs"),
    [("mxfp8 swizzled", True, True), ("block_1x2", False, True), ("block_2x1", True, False)],
)
def test_cuts_through_blocks(scaling, lhs, rhs):
    scaling, _, swizzled = scaling.partition(" ")
    case = make_case(256, 256, 128, dtype=E4M3, scaling=scaling, swizzled=bool(swizzled))
    if lhs:
        with pytest.raises(ValueError, match=r"expected a cut of lhs at multiples of 128 for .*got \[64, 128\)"):
            case.args.rows(64, 64)
    if rhs:
        with pytest.raises(ValueError, match="expected a cut of rhs at multiples of 128"):
            case.args.columns(0, 8)


@pytest.mark.parametrize("axis", CUTS)
@pytest.mark.parametrize("scaling", ["mxfp8", "block_1x1"])
def test_scales_of_rows_are_cut_anywhere(scaling, axis):
    case = make_case(72, 80, 160, dtype=E4M3, scaling=scaling, epilogue="bias_gelu_aux")
    for piece in pieces(case.args, axis, [0, 8, 40]):
        gemm(piece)
    case.check()


def test_what_pieces_would_overwrite():
    case = make_case(32, 32, 32, epilogue="dgelu_bgrad")
    with pytest.raises(to.UnsupportedError, match="expected no bias_grad with gelu_input in a product that is cut"):
        case.args.rows(0, 16)
    case = make_case(32, 32, 32, dtype=torch.bfloat16, out_dtype=E4M3)
    for axis in CUTS:
        with pytest.raises(to.UnsupportedError, match="expected no out_amax in a product that is cut"):
            getattr(case.args, axis)(0, 16)
    assert case.args.rows(0, 32).out_amax is not None

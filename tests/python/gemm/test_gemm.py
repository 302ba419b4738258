"""Values of the products on the CPU: every dtype, layout, epilogue and scaling."""

import pytest
import torch
from gemm_cases import E4M3, E5M2, EPILOGUES, LAYOUTS, SCALINGS, Case, make_case

from torch_overlap.gemm import GemmArgs, GemmOperand, gemm, gemm_statistics, grouped_gemm, reset_gemm_statistics

PLAIN = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def run(case: Case) -> None:
    gemm(case.args)
    case.check()


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@pytest.mark.parametrize("added", [{}, {"accumulate": True}, {"residual": True}], ids=str)
def test_unscaled(dtype, layout, epilogue, added):
    run(make_case(33, 40, 50, dtype=dtype, layout=layout, epilogue=epilogue, padded=True, **added))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_operands_float32_result(dtype, epilogue):
    run(make_case(17, 24, 64, dtype=dtype, out_dtype=torch.float32, epilogue=epilogue, accumulate=True))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", [*SCALINGS, "mxfp8 swizzled"])
def test_scaled(scaling, layout, epilogue):
    scaling, _, swizzled = scaling.partition(" ")
    run(
        make_case(136, 264, 320, dtype=E4M3, scaling=scaling, layout=layout, epilogue=epilogue, swizzled=bool(swizzled))
    )


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_residual_in_the_place_of_the_result(epilogue):
    """Same meaning as accumulate."""
    case = make_case(33, 40, 50, dtype=torch.bfloat16, epilogue=epilogue, accumulate=True, padded=True)
    args = case.args
    more = {name: getattr(args, name) for name in ("bias", "gelu", "pre_gelu_out", "gelu_input", "bias_grad")}
    gemm(GemmArgs(args.lhs, args.rhs, args.out, residual=args.out, **more))
    case.check()


def test_residuals_of_rows_further_apart_than_those_of_the_result():
    for _ in range(2):
        case = make_case(33, 40, 50, dtype=torch.float16, residual=True, padded=True)
        args = GemmArgs(case.args.lhs, case.args.rhs, torch.empty(33, 40).half(), residual=case.args.residual)
        gemm(args)
        case.args = args
        case.check()


@pytest.mark.parametrize("types", [(E5M2, E4M3), (E4M3, E5M2)], ids=["e5m2-e4m3", "e4m3-e5m2"])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scaled_types(scaling, types, out_dtype):
    lhs, rhs = types
    case = make_case(
        40, 48, 160, dtype=lhs, rhs_dtype=rhs, scaling=scaling, out_dtype=out_dtype, residual=True, padded=True
    )
    run(case)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("out_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scaling", [None, "current", "block_1x2", "mxfp8"])
def test_8_bit_result(scaling, out_dtype, epilogue):
    dtype = E4M3 if scaling else torch.bfloat16
    run(make_case(48, 32, 128, dtype=dtype, scaling=scaling, out_dtype=out_dtype, epilogue=epilogue))


def test_split_accumulator_and_sm_target_change_no_value():
    run(make_case(32, 32, 64, dtype=E4M3, scaling="current", use_split_accumulator=True, sm_target=100))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (1, 1, 1), (1, 8, 3), (8, 1, 3)], ids=str)
def test_small_sizes(sizes, epilogue):
    m, n, _ = sizes
    case = make_case(*sizes, epilogue=epilogue, accumulate=True)
    before = case.args.out.clone()
    gemm(case.args)
    if m and n:
        case.check()
    else:
        assert torch.equal(case.args.out, before)
        if case.args.bias_grad is not None:
            case.check()


@pytest.mark.parametrize("quantized", [False, True])
def test_sums_of_nothing_are_zero(quantized):
    args = make_case(16, 32, 64, dtype=E4M3, scaling="current").args

    def part(operand, rows):
        return GemmOperand(
            operand.data[:rows], operand.transposed, scaling=operand.scaling, scale_inv=operand.scale_inv
        )

    def poison(*shape, dtype=torch.bfloat16):
        return torch.full(shape, float("nan")).to(dtype)

    out_dtype = E4M3 if quantized else torch.bfloat16
    more = {"out_scale": torch.ones(1), "out_amax": torch.full((1,), 5.0)} if quantized else {}
    no_rows = {"gelu_input": poison(0, 32), "bias_grad": poison(32)}
    gemm(GemmArgs(part(args.lhs, 0), args.rhs, poison(0, 32, dtype=out_dtype), **no_rows, **more))
    assert torch.equal(no_rows["bias_grad"], torch.zeros(32, dtype=torch.bfloat16))
    assert not quantized or more["out_amax"].item() == 0
    sums = poison(16, dtype=torch.float32)  # sums of lhs over k
    gemm(GemmArgs(args.lhs, part(args.rhs, 0), poison(16, 0, dtype=out_dtype), bias_grad=sums, **more))
    torch.testing.assert_close(sums, (args.lhs.data.double() * args.lhs.scale_inv.double()).sum(1).float())


def test_an_empty_inner_dimension_of_8_bit_operands():
    case = make_case(16, 16, 16, dtype=E4M3, scaling="current", epilogue="bias")
    lhs, rhs = case.args.lhs, case.args.rhs
    empty = [
        GemmOperand(op.data[:, :0], op.transposed, scaling=op.scaling, scale_inv=op.scale_inv) for op in (lhs, rhs)
    ]
    out = torch.full((16, 16), float("nan"), dtype=torch.bfloat16)
    gemm(GemmArgs(*empty, out, bias=case.args.bias))
    assert torch.equal(out, case.args.bias.expand(16, 16))


@pytest.mark.parametrize("scaling", [None, *SCALINGS])
def test_a_linear_layer_and_its_gradients(scaling):
    """y = x w^T, dx = dy w, dw = dy^T x: the three layouts of the documentation."""
    tokens, features, inner = 128, 144, 160
    dtype = E4M3 if scaling else torch.bfloat16
    for layout, (m, n, k) in {
        "NT": (tokens, features, inner),
        "NN": (tokens, inner, features),
        "TN": (features, inner, tokens),
    }.items():
        if scaling == "mxfp8" and k % 32:
            k += 32 - k % 32
        run(make_case(m, n, k, dtype=dtype, scaling=scaling, layout=layout, epilogue="bgrad"))


def test_groups():
    cases = [
        make_case(8, 16, 24),
        make_case(0, 16, 24),
        make_case(32, 16, 64, dtype=E4M3, scaling="current", epilogue="bias_gelu_aux"),
        make_case(5, 7, 9, dtype=torch.float64, accumulate=True),
        make_case(4, 4, 0, epilogue="bias"),
    ]
    grouped_gemm([case.args for case in cases])
    for case in cases:
        case.check()
    grouped_gemm([])


def test_a_group_is_checked_before_any_is_computed():
    good = make_case(8, 8, 8)
    bad = make_case(8, 8, 8)
    broken = GemmArgs(bad.args.lhs, bad.args.rhs, bad.args.out[:, :4])
    with pytest.raises(ValueError, match="grouped_gemm: expected out of shape"):
        grouped_gemm([good.args, broken])
    assert good.args.out.isnan().all()


def test_statistics():
    reset_gemm_statistics()
    gemm(make_case(4, 4, 4).args)
    gemm(make_case(0, 4, 4).args)
    grouped_gemm([make_case(4, 4, 4).args, make_case(4, 0, 4).args])
    assert gemm_statistics() == {"calls": 2, "plans": 0, "queries": 0, "measured": 0, "composed": 0}


def test_results_have_no_gradient_and_operands_with_one_are_read():
    case = make_case(8, 8, 8)
    lhs = GemmOperand(case.args.lhs.data.requires_grad_(True), case.args.lhs.transposed)
    gemm(GemmArgs(lhs, case.args.rhs, case.args.out))
    case.check()
    assert case.args.out.grad_fn is None

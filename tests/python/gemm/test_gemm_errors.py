"""Every invalid call: the class of its error, and the argument that the message names. Nothing is computed."""

import pytest
import torch
from gemm_cases import BLOCK, E4M3, E5M2, make_case

import torch_overlap as to
from torch_overlap.gemm import GemmArgs, GemmOperand, ScalingMode, gemm, set_gemm_mxfp8, set_gemm_tuning

VALUE, TYPE, UNSUPPORTED = to.InvalidValueError, to.InvalidTypeError, to.UnsupportedError
ARGUMENTS = [
    "bias",
    "gelu",
    "pre_gelu_out",
    "gelu_input",
    "bias_grad",
    "residual",
    "accumulate",
    "use_split_accumulator",
    "out_scale",
    "out_amax",
    "sm_target",
    "workspace",
]
PARTS = ["scaling", "scale_inv", "swizzled", "columnwise_data", "columnwise_scale_inv"]


def changed(args, **changes):
    """Returns `args` with other values; lhs__data=... is the data of lhs."""
    operands = []
    for side in ("lhs", "rhs"):
        operand = getattr(args, side)
        parts = {name: getattr(operand, name) for name in ("data", "transposed", *PARTS)}
        parts |= {name: changes.pop(f"{side}__{name}") for name in list(parts) if f"{side}__{name}" in changes}
        operands.append(GemmOperand(parts.pop("data"), parts.pop("transposed"), **parts))
    values = {name: getattr(args, name) for name in ARGUMENTS} | changes
    return GemmArgs(*operands, values.pop("out", args.out), **values)


def refuses(kind, message, args):
    before = args.out.clone()
    with pytest.raises(kind, match=message) as raised:
        gemm(args)
    text = str(raised.value)
    assert text.startswith("gemm: expected ")
    assert ", got " in text
    assert "; " in text
    assert torch.equal(before.contiguous().view(torch.uint8), args.out.contiguous().view(torch.uint8))


def plain(**more):
    return make_case(16, 32, 48, **more).args


def scaled(scaling="current", **more):
    return make_case(16, 32, 64, dtype=E4M3, scaling=scaling, **more).args


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def test_shapes():
    args = plain()
    refuses(VALUE, r"lhs of 2 dimensions, got shape \[48\]", changed(args, lhs__data=zeros(48)))
    refuses(VALUE, r"op\(rhs\) of 48 rows.*got 40", changed(args, rhs__data=zeros(32, 40)))
    for shape in [(16, 31), (32, 16), (512,), (16, 32, 1)]:
        refuses(VALUE, r"out of shape \[16, 32\].*output buffer size is incorrect", changed(args, out=zeros(*shape)))


def test_out_apart_from_the_operands():
    args = make_case(32, 32, 32).args
    for name in ("lhs", "rhs"):
        operand = getattr(args, name).data
        refuses(VALUE, f"out not to overlap {name}", changed(args, out=operand))
    memory = zeros(48, 32, dtype=args.out.dtype)
    refuses(VALUE, "out not to overlap lhs", changed(args, lhs__data=memory[:32], out=memory[16:]))
    wide = zeros(32, 64, dtype=args.out.dtype)
    gemm(changed(args, lhs__data=wide[:, :32], out=wide[:, 32:]))  # adjacent


def elsewhere(x):
    """Returns the same memory as another storage."""
    return torch.from_dlpack(x)


def test_what_is_written_is_apart_from_all_else():
    args = make_case(32, 32, 32).args
    memory = zeros(48, 32)
    for place in (lambda x: x, elsewhere):
        refuses(VALUE, "out not to overlap lhs", changed(args, lhs__data=place(memory)[:32], out=memory[16:]))
        refuses(VALUE, "out not to overlap rhs", changed(args, rhs__data=place(memory)[16:], out=memory[:32]))
        wide = zeros(40, 64)
        crossing = changed(args, lhs__data=place(wide)[:32, :32], out=wide[8:, 16:48])
        refuses(VALUE, "out not to overlap lhs", crossing)
        refuses(VALUE, "out not to overlap bias", changed(args, bias=place(args.out)[3]))
        gelu = zeros(64, 32)
        refuses(VALUE, "out not to overlap pre_gelu_out",
                changed(args, out=gelu[:32], gelu=True, pre_gelu_out=place(gelu)[31:63]))  # fmt: skip
        refuses(VALUE, "pre_gelu_out not to overlap rhs",
                changed(args, rhs__data=gelu[:32], gelu=True, pre_gelu_out=place(gelu)[31:63]))  # fmt: skip
        refuses(VALUE, "out not to overlap gelu_input", changed(args, gelu_input=place(args.out)))
        refuses(VALUE, "bias_grad not to overlap lhs", changed(args, bias_grad=place(args.lhs.data)[0]))
        work = zeros(4096, dtype=torch.uint8)
        refuses(VALUE, "out not to overlap workspace",
                changed(args, out=work.view(torch.float32).view(32, 32), workspace=place(work)))  # fmt: skip
    eight = make_case(16, 32, 64, dtype=E4M3, scaling="current", out_dtype=E4M3).args
    refuses(VALUE, "out_amax not to overlap out_scale", changed(eight, out_amax=elsewhere(eight.out_scale)))
    refuses(VALUE, "out_amax not to overlap scale_inv of lhs", changed(eight, out_amax=eight.lhs.scale_inv))


@pytest.mark.parametrize("strides", [(64, 64), (64, 96)])
def test_rows_that_interleave_are_found_exactly(seed, strides):
    """Every placement of out and lhs [4, 8] with these row strides in one memory: refused if they have an element in
    common."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.zeros(600)
    args = make_case(4, 8, 8).args
    refused = taken = 0
    for _ in range(400):
        at = torch.randint(0, 200, (2,), generator=generator).tolist()
        lhs, out = (memory.as_strided((4, 8), (stride, 1), begin) for stride, begin in zip(strides, at, strict=True))
        used = [{begin + row * stride + column for row in range(4) for column in range(8)}
                for stride, begin in zip(strides, at, strict=True)]  # fmt: skip
        if used[0] & used[1]:
            refuses(VALUE, "out not to overlap lhs", changed(args, lhs__data=lhs, out=out))
            refused += 1
        else:
            gemm(changed(args, lhs__data=lhs, out=out))
            taken += 1
    assert refused > 10
    assert taken > 10


def test_residuals():
    args = plain()
    refuses(VALUE, "residual or accumulate, got both", changed(args, residual=zeros(16, 32), accumulate=True))
    refuses(VALUE, r"residual of shape \[16, 32\], got \[16, 31\]", changed(args, residual=zeros(16, 31)))
    refuses(VALUE, "residual whose rows are contiguous and do not overlap", changed(args, residual=zeros(32, 16).t()))
    refuses(
        TYPE,
        "residual of the dtype of out, torch.float32, got torch.float16",
        changed(args, residual=zeros(16, 32).half()),
    )
    refuses(
        TYPE,
        "residual of the dtype of out, torch.float64, got torch.float32",
        changed(plain(dtype=torch.float64), residual=args.out),
    )
    wider = plain(dtype=torch.bfloat16, out_dtype=torch.float32)
    refuses(TYPE, "residual of the dtype of out", changed(wider, residual=zeros(16, 32).bfloat16()))
    eight_bits = make_case(16, 32, 64, dtype=E4M3, scaling="current", out_dtype=E4M3).args
    refuses(UNSUPPORTED, "no residual for 8-bit out, got one", changed(eight_bits, residual=zeros(16, 32).bfloat16()))
    with pytest.raises(TYPE, match="gemm: expected residual on cpu, the device of lhs, got meta; move it"):
        gemm(changed(args, residual=zeros(16, 32).to("meta")))
    # The residual is exactly out, or shares no element with it.
    memory = zeros(24, 32)
    refuses(VALUE, "out not to overlap residual", changed(args, out=memory[8:], residual=memory[:16]))
    memory = zeros(16, 64)
    gemm(changed(args, out=memory[:, 32:], residual=memory[:, :32]))
    gemm(changed(args, out=memory[:, 32:], residual=memory[:, 32:]))
    wide = zeros(31, 32)
    refuses(VALUE, "out not to overlap residual", changed(args, out=wide[:16], residual=wide[::2]))
    long = zeros(17, 70)
    for residual in (long[:16, 8:40], long[1:, 8:40], long[:16, 31:63], long[1:, :32]):
        refuses(VALUE, "out not to overlap residual", changed(args, out=long[:16, :32], residual=residual))
    refuses(VALUE, "out not to overlap residual", changed(args, out=long[:16, 30:62], residual=long[1:, :32]))
    for residual in (long[:16, 32:64], long[1:, 32:64], long[:16, 38:]):
        gemm(changed(args, out=long[:16, :32], residual=residual))
    gemm(changed(args, out=long[:16, 38:], residual=long[1:, :32]))
    apart = zeros(33, 32)
    for residual in (apart[1::2], elsewhere(apart)[4:20]):  # other strides, another storage
        refuses(VALUE, "out not to overlap residual", changed(args, out=apart[:16], residual=residual))
    gemm(changed(args, out=apart[:16], residual=zeros(32, 32)[::2]))


def test_products_of_a_group_are_apart():
    one, other = make_case(8, 16, 24).args, make_case(8, 16, 24).args

    def refuses_both(message, first, second):
        for group in ([first, second], [second, first]):
            with pytest.raises(VALUE, match=f"^grouped_gemm: expected {message}") as raised:
                to.gemm.grouped_gemm(group)
            assert "; products of a group run side by side" in str(raised.value)

    both = r"(out of product \d of the group not to overlap {} of product \d)"
    refuses_both(both.format("out"), one, changed(other, out=one.out))
    memory = zeros(15, 16)
    refuses_both(both.format("out"), changed(one, out=memory[:8]), changed(other, out=elsewhere(memory)[7:]))
    chained = zeros(8, 24)
    refuses_both(both.format("lhs"), changed(one, out=chained[:, :16]), changed(other, lhs__data=chained))
    refuses_both(both.format("bias"), one, changed(other, bias=one.out[7]))
    scratch = zeros(1 << 12, dtype=torch.uint8)
    refuses_both("workspace of product", changed(one, workspace=scratch), changed(other, workspace=scratch[64:]))
    to.gemm.grouped_gemm([changed(one, workspace=scratch), changed(other, workspace=scratch)])  # each uses a part of it
    wide, shared = zeros(8, 32), zeros(8, 24)
    to.gemm.grouped_gemm([changed(one, lhs__data=shared, out=wide[:, :16]),
                          changed(other, lhs__data=shared, out=wide[:, 16:])])  # fmt: skip


def test_strides():
    args = plain()
    columns = zeros(48, 16).t()
    refuses(VALUE, "lhs whose rows are contiguous and do not overlap", changed(args, lhs__data=columns))
    refuses(
        VALUE, "rhs whose rows are contiguous and do not overlap", changed(args, rhs__data=zeros(1, 48).expand(32, 48))
    )
    refuses(VALUE, "out whose rows are contiguous and do not overlap", changed(args, out=zeros(32, 16).t()))
    aux = changed(args, gelu=True, pre_gelu_out=zeros(32, 16).t())
    refuses(VALUE, "pre_gelu_out whose rows are contiguous", aux)
    refuses(VALUE, "bias whose rows are contiguous", changed(args, bias=zeros(64)[::2]))
    refuses(VALUE, "contiguous workspace", changed(args, workspace=zeros(64, dtype=torch.uint8)[::2]))


def test_dtypes():
    args = plain()
    refuses(
        TYPE, "lhs of float64, float32, float16 or bfloat16", changed(args, lhs__data=zeros(16, 48, dtype=torch.int32))
    )
    refuses(TYPE, "8-bit operands need a scaling mode", changed(args, lhs__data=zeros(16, 48).to(E4M3)))
    refuses(TYPE, "lhs and rhs of one dtype", changed(args, rhs__data=zeros(32, 48, dtype=torch.float16)))
    refuses(TYPE, "out of the operands' dtype", changed(args, out=zeros(16, 32, dtype=torch.bfloat16)))
    refuses(TYPE, "out of the operands' dtype", changed(plain(dtype=torch.float16), out=zeros(16, 32).bfloat16()))
    refuses(TYPE, "out of the operands' dtype", changed(plain(dtype=torch.float64), out=zeros(16, 32).to(E4M3)))
    refuses(TYPE, "out of the operands' dtype", changed(scaled(), out=zeros(16, 32).double()))
    refuses(TYPE, "bias of float32, float16 or bfloat16", changed(args, bias=zeros(32, dtype=torch.float64)))
    refuses(TYPE, "bias of float64", changed(plain(dtype=torch.float64), bias=zeros(32)))
    refuses(TYPE, "gelu_input of float32, float16 or bfloat16", changed(args, gelu_input=zeros(16, 32).to(E4M3)))


def test_devices():
    args = plain()
    for name, value in {
        "rhs": {"rhs__data": zeros(32, 48).to("meta")},
        "out": {},
        "bias": {"bias": zeros(32).to("meta")},
        "workspace": {"workspace": zeros(32).to("meta")},
    }.items():
        changes = value or {"out": zeros(16, 32).to("meta")}
        with pytest.raises(TYPE, match=f"gemm: expected {name} on cpu, the device of lhs, got meta; move it"):
            gemm(changed(args, **changes))
    with pytest.raises(TYPE, match="scale_inv on cpu, the device of lhs, got meta"):
        gemm(changed(scaled(), lhs__scale_inv=zeros(1).to("meta")))
    meta = GemmArgs(GemmOperand(zeros(4, 4).to("meta")), GemmOperand(zeros(4, 4).to("meta")), zeros(4, 4).to("meta"))
    with pytest.raises(UNSUPPORTED, match="gemm: expected tensors of a CPU or CUDA device, got meta"):
        gemm(meta)


@pytest.mark.parametrize("side", ["lhs", "rhs"])
@pytest.mark.parametrize("scaling", ["current", "mxfp8", "block_1x1"])
def test_missing_scales(scaling, side):
    args = scaled(scaling)
    refuses(
        VALUE, f"scale_inv of {side} .*Missing inverse scaling factor", changed(args, **{f"{side}__scale_inv": None})
    )
    empty = zeros(0) if scaling != "mxfp8" else zeros(0, dtype=torch.uint8)
    refuses(VALUE, "Missing inverse scaling factor", changed(args, **{f"{side}__scale_inv": empty}))


def test_scales():
    refuses(VALUE, "scale_inv of lhs .* of one element", changed(scaled(), lhs__scale_inv=zeros(2)))
    refuses(TYPE, "scale_inv of lhs .* of dtype float32", changed(scaled(), lhs__scale_inv=zeros(1).double()))
    mx = scaled("mxfp8")
    refuses(TYPE, r"scale_inv of rhs .* float8_e8m0fnu \(8-bit\)", changed(mx, rhs__scale_inv=zeros(32, 2)))
    refuses(VALUE, r"of shape \[16, 2\], got \[2, 16\]", changed(mx, lhs__scale_inv=mx.lhs.scale_inv.t()))
    refuses(VALUE, "swizzled scale_inv of lhs of 512 contiguous elements", changed(mx, lhs__swizzled=True))
    block = scaled("block_1x2")
    refuses(VALUE, r"of shape \[16, 1\], got \[1, 1\]", changed(block, lhs__scale_inv=zeros(1, 1)))
    refuses(VALUE, r"of shape \[1, 1\], got \[32, 1\]", changed(block, rhs__scale_inv=zeros(32, 1)))
    refuses(VALUE, "no scale_inv of lhs for NO_SCALING", changed(plain(), lhs__scale_inv=zeros(1)))


def test_scaling_modes():
    assert {int(mode) for mode in BLOCK} == {4, 5}
    with pytest.raises(VALUE, match="GemmOperand: expected a scaling mode, got 9; use one of NO_SCALING = 0, "):
        GemmOperand(zeros(1, 1), scaling=9)
    args = scaled()
    refuses(TYPE, "8-bit operands for a quantized GEMM", changed(args, lhs__data=zeros(16, 64)))
    refuses(TYPE, "float8_e4m3fn on one side, got float8_e5m2 on both", scaled_pair(E5M2, E5M2))
    mx, block = scaled("mxfp8"), scaled("block_1x2")
    mixed = GemmArgs(mx.lhs, args.rhs, args.out)
    refuses(VALUE, "operands of one kind of scaling, got MXFP8_1D_SCALING for lhs and CURRENT_TENSOR_SCALING", mixed)
    both = GemmArgs(scaled("block_2x1").lhs, block.rhs, args.out)
    refuses(UNSUPPORTED, "BLOCK_1D_SCALING on one side, got BLOCK_2D_SCALING on both", both)


def scaled_pair(lhs, rhs):
    return make_case(16, 32, 64, dtype=lhs, rhs_dtype=rhs, scaling="current").args


@pytest.mark.parametrize(("layout", "side"), [("NN", "rhs"), ("TT", "lhs")])
@pytest.mark.parametrize("scaling", ["current", "mxfp8", "block_1x1"])
def test_columnwise(scaling, layout, side):
    args = scaled(scaling, layout=layout)
    missing = changed(args, **{f"{side}__columnwise_data": None})
    refuses(VALUE, f"columnwise_data of {side}.*{side} is missing column-wise usage", missing)
    wrong = getattr(args, side).columnwise_data.t().contiguous()
    refuses(
        VALUE, f"columnwise_data of {side} of 8 bits and shape", changed(args, **{f"{side}__columnwise_data": wrong})
    )
    if scaling != "current":
        no_scale = changed(args, **{f"{side}__columnwise_scale_inv": None})
        refuses(VALUE, "Missing inverse scaling factor", no_scale)


def test_sizes_of_8_bit_operands():
    def odd(m, n, k, scaling="current", out=torch.bfloat16):
        mode = {"current": ScalingMode.CURRENT_TENSOR_SCALING, "block": ScalingMode.BLOCK_1D_SCALING}[scaling]
        mode = ScalingMode.MXFP8_1D_SCALING if scaling == "mxfp8" else mode
        shape = [(m, 1), (n, 1)] if scaling == "block" else [(1,), (1,)]
        lhs = GemmOperand(zeros(m, k).to(E4M3), scaling=mode, scale_inv=zeros(*shape[0]))
        rhs = GemmOperand(zeros(n, k).to(E4M3), True, scaling=mode, scale_inv=zeros(*shape[1]))
        return GemmArgs(lhs, rhs, zeros(m, n).to(out))

    refuses(VALUE, "k to be a multiple of 16 for 8-bit operands, got 40", odd(16, 16, 40))
    refuses(VALUE, "rows of out of a multiple of 16 bytes", odd(16, 12, 32))
    refuses(VALUE, "m and n to be multiples of 8 for block scaling, got 12 and 16", odd(12, 16, 32, "block"))
    refuses(VALUE, "got 16 and 12", odd(16, 12, 32, "block", torch.float32))
    mx = scaled("mxfp8")
    narrow = changed(mx, lhs__data=mx.lhs.data[:, :48], rhs__data=mx.rhs.data[:, :48])
    refuses(VALUE, "k to be a multiple of 32 for MXFP8_1D_SCALING, got 48", narrow)
    args = scaled()
    wide = zeros(16, 72).to(E4M3)
    refuses(VALUE, "8-bit lhs whose rows begin at multiples of 16 bytes", changed(args, lhs__data=wide[:, :64]))
    wide = zeros(16, 96).to(E4M3)
    refuses(VALUE, "8-bit lhs whose rows begin at multiples of 16 bytes", changed(args, lhs__data=wide[:, 1:65]))


def test_8_bit_out():
    args = make_case(16, 32, 64, dtype=E4M3, scaling="current", out_dtype=E4M3).args
    refuses(VALUE, "out_scale for 8-bit out, got none", changed(args, out_scale=None))
    refuses(VALUE, "out_scale of float32 and one element", changed(args, out_scale=zeros(2)))
    refuses(VALUE, "out_amax of float32 and one element", changed(args, out_amax=zeros(1).half()))
    refuses(UNSUPPORTED, "no accumulate for 8-bit out", changed(args, accumulate=True))
    refuses(VALUE, "no out_scale for out of", changed(plain(), out_scale=zeros(1)))
    refuses(VALUE, "no out_amax for out of", changed(plain(), out_amax=zeros(1)))


def test_epilogues():
    args = plain()
    refuses(VALUE, r"bias of shape \[32\], got \[16\]", changed(args, bias=zeros(16)))
    refuses(VALUE, r"bias of shape \[32\], got \[1, 32\]", changed(args, bias=zeros(1, 32)))
    refuses(VALUE, "gelu with pre_gelu_out, got pre_gelu_out alone", changed(args, pre_gelu_out=zeros(16, 32)))
    refuses(VALUE, r"pre_gelu_out of shape \[16, 32\]", changed(args, gelu=True, pre_gelu_out=zeros(32, 16)))
    refuses(VALUE, "gelu or gelu_input, got both", changed(args, gelu=True, gelu_input=zeros(16, 32)))
    refuses(VALUE, "bias or gelu_input, got both", changed(args, bias=zeros(32), gelu_input=zeros(16, 32)))
    refuses(VALUE, r"gelu_input of shape \[16, 32\]", changed(args, gelu_input=zeros(16, 31)))
    refuses(VALUE, r"bias_grad of shape \[16\], got \[32\]", changed(args, bias_grad=zeros(32)))
    dgelu = changed(args, gelu_input=zeros(16, 32), bias_grad=zeros(16))
    refuses(VALUE, r"bias_grad of shape \[32\], got \[16\]", dgelu)
    refuses(VALUE, "sm_target >= 0, got -1", changed(args, sm_target=-1))


def test_options():
    with pytest.raises(VALUE, match='set_gemm_tuning: expected "heuristic", "measured" or "best", got "fast"'):
        set_gemm_tuning("fast")
    with pytest.raises(VALUE, match='set_gemm_mxfp8: expected "dequantize" or "native", got ""'):
        set_gemm_mxfp8("")
    set_gemm_tuning("heuristic")
    set_gemm_mxfp8("dequantize")

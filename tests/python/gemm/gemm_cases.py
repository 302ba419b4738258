"""Problems for the products, with references in float64 made from the dequantized operands. For CPU and GPU tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_overlap.gemm import GemmArgs, GemmOperand, ScalingMode

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# transposition (T) of lhs and rhs
LAYOUTS = {"NN": (False, False), "NT": (False, True), "TN": (True, False), "TT": (True, True)}
BLOCK = {ScalingMode.BLOCK_1D_SCALING, ScalingMode.BLOCK_2D_SCALING}
TENSOR = {ScalingMode.CURRENT_TENSOR_SCALING, ScalingMode.DELAYED_TENSOR_SCALING}
# scaling of lhs and rhs
SCALINGS = {
    "current": (ScalingMode.CURRENT_TENSOR_SCALING,) * 2,
    "delayed": (ScalingMode.DELAYED_TENSOR_SCALING, ScalingMode.CURRENT_TENSOR_SCALING),
    "mxfp8": (ScalingMode.MXFP8_1D_SCALING,) * 2,
    "block_1x1": (ScalingMode.BLOCK_1D_SCALING,) * 2,
    "block_1x2": (ScalingMode.BLOCK_1D_SCALING, ScalingMode.BLOCK_2D_SCALING),
    "block_2x1": (ScalingMode.BLOCK_2D_SCALING, ScalingMode.BLOCK_1D_SCALING),
    "row": (ScalingMode.ROW_SCALING,) * 2,
}
EPILOGUES = ("none", "bias", "gelu", "gelu_aux", "bias_gelu", "bias_gelu_aux", "dgelu", "dgelu_bgrad", "bgrad")


def swizzle(scales: Tensor) -> Tensor:
    """Returns MXFP8 scales in tiles of 128 rows x 4, written element by element as the layout is documented."""
    rows, blocks = scales.shape
    tiles, depth = -(-rows // 128), -(-blocks // 4)
    row, block = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
    at = (row // 128 * depth + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    result = torch.zeros(tiles * 128 * depth * 4, dtype=torch.uint8)
    result[at.flatten()] = scales.view(torch.uint8).cpu().flatten()
    return result.to(scales.device).view(torch.float8_e8m0fnu).view(tiles * 128, depth * 4)


def quantize(x: Tensor, mode: ScalingMode, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x [rows, k] quantized to 8 bits along k: data, scale_inv, and the float64 values that they represent."""
    rows, k = x.shape
    largest = torch.finfo(dtype).max
    if mode in TENSOR:
        scale_inv = (x.abs().amax() / largest).float().reshape(1)
        spread = scale_inv.double().expand(rows, k)
    else:
        height = 128 if mode == ScalingMode.BLOCK_2D_SCALING else 1
        width = {ScalingMode.MXFP8_1D_SCALING: 32, ScalingMode.ROW_SCALING: max(k, 1)}.get(mode, 128)
        padded = x.new_zeros(-(-rows // height) * height, -(-k // width) * width)
        padded[:rows, :k] = x
        tiles = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
        scale_inv = tiles.abs().amax((1, 3)) / largest
        if mode == ScalingMode.MXFP8_1D_SCALING:
            exponent = torch.ceil(torch.log2(scale_inv)) + 127
            scale_inv = exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
            factors = torch.exp2(exponent - 127)
        else:
            scale_inv = scale_inv.float()
            factors = scale_inv.double()
            if mode == ScalingMode.BLOCK_1D_SCALING:
                scale_inv = scale_inv.t().contiguous().t()
        spread = factors.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :k]
    data = (x / spread).clamp(-largest, largest).to(dtype)
    return data, scale_inv, data.double() * spread


def padded_rows(x: Tensor, extra: int = 16) -> Tensor:
    """Returns the same matrix as part of longer rows."""
    wide = torch.full((x.shape[0], x.shape[1] + extra), 7.0, device=x.device).to(x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


@dataclass
class Case:
    """One problem, its poisoned outputs, and their expected values."""

    args: GemmArgs
    expected: dict[str, Tensor] = field(default_factory=dict)
    allowed: dict[str, Tensor] = field(default_factory=dict)

    def output(self, name: str) -> Tensor:
        value = getattr(self.args, name)
        assert value is not None
        return value

    def check(self) -> None:
        """Checks every element of every output."""
        for name, expected in self.expected.items():
            got = self.output(name).double().reshape(expected.shape)
            error = (got - expected).abs()
            over = (~(error <= self.allowed[name])).nonzero()
            if len(over):
                worst = int((error / self.allowed[name]).nan_to_num(float("inf")).argmax())
                index = [int(i) for i in torch.unravel_index(torch.tensor(worst), expected.shape)]
                raise AssertionError(
                    f"{name}: {len(over)} of {expected.numel()} elements are wrong; at {index} expected "
                    f"{expected.flatten()[worst].item():.8g}, got {got.flatten()[worst].item():.8g}, error "
                    f"{error.flatten()[worst].item():.3g}, allowed {self.allowed[name].flatten()[worst].item():.3g}; "
                    f"largest error {error.max().item():.3g}"
                )


def gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def gelu_derivative(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        (grad,) = torch.autograd.grad(gelu(x).sum(), x)
    return grad


def rounding(dtype: torch.dtype) -> float:
    """Returns the relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def make_operand(
    side: str, x: Tensor, transposed: bool, mode: ScalingMode, dtype: torch.dtype, *, swizzled: bool, padded: bool
) -> tuple[GemmOperand, Tensor]:
    """Returns op(X) = x [m, k] or [k, n], and the values that are multiplied."""
    stored = x.t().contiguous() if transposed else x
    if mode == ScalingMode.NO_SCALING:
        data = stored.to(dtype)
        values = data.double()
        data = padded_rows(data) if padded else data
        return GemmOperand(data, transposed), values.t() if transposed else values
    along_k = (x if side == "lhs" else x.t()).contiguous()
    data, scale_inv, values = quantize(along_k, mode, dtype)
    if swizzled:
        scale_inv = swizzle(scale_inv)
    values = values if side == "lhs" else values.t()
    data = padded_rows(data) if padded else data
    if transposed == (side == "rhs"):
        return GemmOperand(data, transposed, scaling=mode, scale_inv=scale_inv, swizzled=swizzled), values
    other = torch.full(stored.shape, float("nan"), device=x.device).to(dtype)  # must not be read
    operand = GemmOperand(
        other,
        transposed,
        scaling=mode,
        scale_inv=scale_inv if mode in TENSOR else None,
        swizzled=swizzled,
        columnwise_data=data,
        columnwise_scale_inv=None if mode in TENSOR else scale_inv,
    )
    return operand, values


def make_case(
    m: int,
    n: int,
    k: int,
    *,
    layout: str = "NT",
    dtype: torch.dtype = torch.float32,
    rhs_dtype: torch.dtype | None = None,
    scaling: str | None = None,
    out_dtype: torch.dtype | None = None,
    extra_dtype: torch.dtype | None = None,
    epilogue: str = "none",
    accumulate: bool = False,
    residual: bool = False,
    swizzled: bool = False,
    padded: bool = False,
    device: torch.device | str = "cpu",
    product_error: float = 0.0,
    gelu_error: float = 2e-6,
    sum_error: float = 0.0,
    rounds_before_accumulate: bool = False,
    rounds_product: bool = False,
    **more: object,
) -> Case:
    """Errors allowed in addition to float32 sums, relative: `product_error` of sum |lhs||rhs|, `sum_error` of a sum
    of rows of out."""
    lhs_t, rhs_t = LAYOUTS[layout]
    lhs_mode, rhs_mode = SCALINGS[scaling] if scaling else (ScalingMode.NO_SCALING,) * 2
    out_dtype = out_dtype or (torch.bfloat16 if scaling else dtype)
    extra = extra_dtype or (out_dtype if out_dtype not in (E4M3, E5M2) else torch.bfloat16)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=device)

    def make(*shape: int, dtype: torch.dtype = extra) -> Tensor:
        wide = torch.full((*shape[:-1], shape[-1] + (16 if padded else 0)), float("nan"), device=device).to(dtype)
        return wide[..., : shape[-1]]

    # Scales of rows and columns differ, so that a misplaced factor is detected.
    lhs, lhs_values = make_operand(
        "lhs", draw(m, k) * torch.exp2(draw(m, 1)), lhs_t, lhs_mode, dtype, swizzled=swizzled, padded=padded
    )
    rhs, rhs_values = make_operand(
        "rhs",
        draw(k, n) * torch.exp2(draw(1, n)),
        rhs_t,
        rhs_mode,
        rhs_dtype or dtype,
        swizzled=swizzled,
        padded=padded,
    )
    sums = lhs_values @ rhs_values
    wide = dtype == torch.float64
    unit = rounding(torch.float64 if wide else torch.float32)
    error = (lhs_values.abs() @ rhs_values.abs()) * (unit * (k + 8) + product_error)
    if rounds_product:
        error = error + sums.abs() * rounding(out_dtype)
    gelu_error = 1e-13 if wide else gelu_error

    tensors: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    allowed: dict[str, Tensor] = {}

    def expect(name: str, value: Tensor, error: Tensor, dtype: torch.dtype) -> None:
        expected[name] = value
        allowed[name] = error + value.abs() * (rounding(dtype) + unit * 8) + torch.finfo(dtype).smallest_normal

    value = sums
    if "bias" in epilogue:
        tensors["bias"] = draw(n).to(extra)
        value = value + tensors["bias"].double()
        error = error + value.abs() * unit * 2
    if epilogue.endswith("aux"):
        tensors["pre_gelu_out"] = make(m, n)
        expect("pre_gelu_out", value, error, extra)
    if epilogue.startswith(("gelu", "bias_gelu")):
        error = error * 1.2 + value.abs() * gelu_error
        value = gelu(value)
    if epilogue.startswith("dgelu"):
        tensors["gelu_input"] = make(m, n).copy_(draw(m, n))
        error = error * 1.2 + value.abs() * gelu_error
        value = value * gelu_derivative(tensors["gelu_input"].double())
    if epilogue == "dgelu_bgrad":
        tensors["bias_grad"] = make(n)
        expect("bias_grad", value.sum(0), error.sum(0) + value.abs().sum(0) * (unit * m + sum_error), extra)
    if epilogue == "bgrad":
        tensors["bias_grad"] = make(m)
        magnitude = lhs_values.abs().sum(1)
        expect("bias_grad", lhs_values.sum(1), magnitude * (unit * (k + 8) + product_error), extra)
    if out_dtype in (E4M3, E5M2):
        scale = torch.tensor([0.7], device=device) / value.abs().amax().float() * torch.finfo(out_dtype).max * 2
        tensors["out_scale"] = scale.reshape(1)  # half of the range saturates
        tensors["out_amax"] = torch.full((1,), float("nan"), device=device)
        amax = value.abs().amax().reshape(1)
        expect("out_amax", amax, error.amax().reshape(1), torch.float32)
        largest = torch.finfo(out_dtype).max
        factor = tensors["out_scale"].double()
        value, error = (value * factor).clamp(-largest, largest), error * factor
        error = error + value.abs() * rounding(out_dtype)  # a value halfway between two may round either way
    out = make(m, n, dtype=out_dtype)
    if accumulate or residual:
        added = out if accumulate else make(m, n, dtype=out_dtype)
        added.copy_(draw(m, n) * value.abs().mean())
        if residual:
            tensors["residual"] = added
        error = error + (added.double().abs() + value.abs()) * unit * 4
        if rounds_before_accumulate:
            error = error + value.abs() * rounding(out_dtype)
        value = value + added.double()
    expect("out", value, error, out_dtype)
    activation = epilogue.startswith(("gelu", "bias_gelu"))
    args = GemmArgs(lhs, rhs, out, gelu=activation, accumulate=accumulate, **tensors, **more)
    return Case(args, expected, allowed)

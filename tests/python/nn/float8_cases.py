"""Rounding to 8-bit floats by hand, in fp64, and its error."""

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def part(tensor, dim, comm):
    return tensor if dim is None else tensor.detach().chunk(comm.get_size(), dim)[comm.get_rank()]


def scale_of(x, dtype, margin=0):
    return torch.finfo(dtype).max / x.abs().max().float() / 2**margin


def rounded(x, dtype, scale=None):
    """Returns x rounded to 8-bit floats, as fp64 values."""
    scale = scale_of(x, dtype) if scale is None else scale
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype).double() / scale.double()


def error(x, dtype):
    """Returns a bound of |rounded(x) - x|: half a last bit, which for subnormals is that of the smallest normal
    number.

    Twice 2^-24 of x is added for the rounding of the scale itself.
    """
    limits = torch.finfo(dtype)
    return x.abs() * (limits.eps / 2 + 2**-23) + limits.smallest_normal * limits.eps / 2 / scale_of(x, dtype).double()


class Matrix:
    """A matrix whose elements have an error of at most `error`, and products of such matrices."""

    def __init__(self, value, error):
        self.value, self.error = value, error

    def __matmul__(self, other):
        size, size_of_other = self.value.abs(), other.value.abs()
        most = (size + self.error) @ (size_of_other + other.error)
        return Matrix(self.value @ other.value, most - size @ size_of_other)

    def flat(self):
        return Matrix(self.value.flatten(0, -2), self.error.flatten(0, -2))

    def t(self):
        return Matrix(self.value.t(), self.error.t())


def forms(x, dtype):
    """Returns x with the error of rounding, and x rounded, with the error of sums in fp32."""
    value = rounded(x, dtype)
    return Matrix(x, error(x, dtype)), Matrix(value, value.abs() * 2**-20)

"""ops.swiglu: values, gradients of any order, layouts, tracing, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

import torch_overlap as to
from torch_overlap import ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Both in one tensor, apart, parts of one product, columns of a transposed matrix.
LAYOUTS = {
    "joined": lambda both: (both,),
    "apart": lambda both: tuple(part.contiguous() for part in both.chunk(2, -1)),
    "views": lambda both: tuple(both.chunk(2, -1)),
    "transposed": lambda both: tuple(part.mT.contiguous().mT for part in both.chunk(2, -1)),
}


def reference(*operands):
    gate, up = operands if len(operands) == 2 else operands[0].chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(7, 10), (3, 5, 64), (1, 2), (2, 0, 6), (4, 0), (9, 1026)], ids=str)
def test_values_and_gradients(seed, dtype, layout, shape):
    generator = torch.Generator().manual_seed(seed)
    both = (4 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    operands = [x.requires_grad_() for x in LAYOUTS[layout](both)]
    exact = [x.detach().double().requires_grad_() for x in operands]
    got, want = ops.swiglu(*operands), reference(*exact)
    grad = torch.randn(want.shape, generator=generator, dtype=torch.float64).to(dtype)
    got.backward(grad)
    want.backward(grad.double())
    # Computed wide, where an exponential of 10 errs by 10 roundings, and rounded once.
    eps = torch.finfo(dtype).eps
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    rtol = 2 * eps + 64 * wide
    assert got.dtype == dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=eps)
    for x, y in zip(operands, exact, strict=True):
        assert x.grad.shape == x.shape
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=rtol, atol=16 * eps)


def test_one_operand_needs_a_gradient(seed):
    generator = torch.Generator().manual_seed(seed)
    for which in range(2):
        operands = [torch.randn(5, 8, generator=generator) for _ in range(2)]
        operands[which].requires_grad_()
        ops.swiglu(*operands).sum().backward()
        other = operands[which].detach().requires_grad_()
        reference(*(other if i == which else x for i, x in enumerate(operands))).sum().backward()
        torch.testing.assert_close(operands[which].grad, other.grad)
        assert operands[1 - which].grad is None


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_of_gradients(seed, apart):
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    operands = [x.clone().requires_grad_() for x in (both.chunk(2, -1) if apart else [both])]
    assert torch.autograd.gradcheck(ops.swiglu, operands)
    assert torch.autograd.gradgradcheck(ops.swiglu, operands)


@pytest.mark.parametrize("apart", [False, True])
def test_forward_mode_and_vmap(seed, apart):
    generator = torch.Generator().manual_seed(seed)
    both, tangent = (torch.randn(3, 4, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    operands, tangents = ([*x.chunk(2, -1)] if apart else [x] for x in (both, tangent))
    with dual_level():
        duals = [make_dual(x, t) for x, t in zip(operands, tangents, strict=True)]
        got, want = (unpack_dual(f(*duals)).tangent for f in (ops.swiglu, reference))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.vmap(ops.swiglu, in_dims=1)(*operands),
                               torch.vmap(reference, in_dims=1)(*operands))  # fmt: skip


def test_tracing(seed):
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(6, 8, generator=generator, requires_grad=True)
    operator = torch.ops.torch_overlap.swiglu.default
    torch.library.opcheck(operator, (both,))
    torch.library.opcheck(operator, (both[:, :4], both[:, 4:]))
    compiled = torch.compile(ops.swiglu, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (6, 3):
        x = both[:rows].detach().requires_grad_()
        (grad,) = torch.autograd.grad(compiled(x).square().sum(), x)
        (expected,) = torch.autograd.grad(reference(x).square().sum(), x)
        torch.testing.assert_close(grad, expected)


def test_refused_arguments():
    x = torch.randn(3, 4)
    for operands, error, match in [
        ((x[:, :3],), ValueError, r"even number of features.*got shape \[3, 3\]"),
        ((x, x[:2]), ValueError, r"up of shape \[3, 4\] as gate, got \[2, 4\]"),
        ((x, x[0]), ValueError, r"up of shape \[3, 4\] as gate, got \[4\]"),
        ((x, x.double()), TypeError, "up of dtype torch.float32 on cpu as gate, got torch.float64"),
        ((x.int(),), TypeError, "dtype float32, float16, bfloat16 or float64, got torch.int32"),
        ((x.to(torch.float8_e4m3fn),), TypeError, "got torch.float8_e4m3fn"),
        ((torch.tensor(1.0),), ValueError, "got a scalar"),
    ]:
        with pytest.raises(error, match=match):
            ops.swiglu(*operands)
    assert issubclass(to.InvalidValueError, ValueError)


def test_saved_input_that_changes_is_found(seed):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    both = x * 1
    y = ops.swiglu(both)
    both.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()

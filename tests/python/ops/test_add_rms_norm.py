"""ops.add_rms_norm: values, gradients of any order, layouts, tracing, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from torch_overlap import ops

EPS = 1e-5
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = {
    "dense": lambda x: x,
    "columns": lambda x: F.pad(x, (1, 2))[..., 1:-2],
    "transposed": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1].expand(x.shape),
}


def reference(x, residual, weight):
    hidden = x + residual
    return F.rms_norm(hidden, weight.shape, weight, EPS), hidden


def run(x, residual, weight):
    return ops.add_rms_norm(x, residual, weight, eps=EPS)


def draw(shape, dtype, generator):
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(7, 10), (3, 5, 64), (1, 1), (0, 6), (3, 0), (9, 1026)], ids=str)
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)], ids=["both", "norm", "hidden"])
def test_values_and_gradients(seed, dtype, layout, shape, used):
    generator = torch.Generator().manual_seed(seed)
    x, residual = (LAYOUTS[layout](draw(shape, dtype, generator)).detach().requires_grad_() for _ in range(2))
    weight = draw(shape[-1:], dtype, generator).requires_grad_()
    operands = (x, residual, weight)
    exact = [t.detach().double().requires_grad_() for t in operands]
    got, want = run(*operands), reference(*exact)
    eps = torch.finfo(dtype).eps
    for mine, other in zip(got, want, strict=True):
        assert mine.dtype == dtype
        assert mine.is_contiguous()
        # h is rounded before the norm is taken.
        torch.testing.assert_close(mine.double(), other, rtol=8 * eps, atol=8 * eps)
    grads = [draw(shape, dtype, generator) for _ in range(2)]
    pairs = [i for i in range(2) if used[i]]
    torch.autograd.backward([got[i] for i in pairs], [grads[i] for i in pairs])
    torch.autograd.backward([want[i] for i in pairs], [grads[i].double() for i in pairs])
    for mine, other in zip(operands, exact, strict=True):
        if not used[0] and mine is weight:
            assert mine.grad is None
            continue
        scale = other.grad.abs().max().clamp(min=1).item() if other.grad.numel() else 1
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=16 * eps, atol=16 * eps * scale)


@pytest.mark.parametrize("index", range(3))
def test_hidden_needs_a_gradient_if_an_operand_of_the_sum_does(seed, index):
    operands = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for shape in ((3, 4), (3, 4), (4,))]
    operands[index].requires_grad_()
    norm, hidden = run(*operands)
    assert norm.requires_grad
    assert hidden.requires_grad == (index < 2)
    norm.sum().backward()
    torch.testing.assert_close(
        operands[index].grad, torch.autograd.grad(reference(*operands)[0].sum(), operands[index])[0]
    )


def test_gradients_of_gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 4), (3, 4), (4,))
    operands = [draw(shape, torch.float64, generator).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(run, operands)
    assert torch.autograd.gradgradcheck(run, operands)


def test_forward_mode_and_vmap(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 4), (3, 4), (4,))
    operands, tangents = ([draw(shape, torch.float64, generator) for shape in shapes] for _ in range(2))
    with dual_level():
        duals = [make_dual(x, t) for x, t in zip(operands, tangents, strict=True)]
        for got, want in zip(run(*duals), reference(*duals), strict=True):
            torch.testing.assert_close(unpack_dual(got).tangent, unpack_dual(want).tangent)
    batched = torch.vmap(run, in_dims=(1, 1, None))(operands[0][:, None], operands[1][:, None], operands[2])
    for got, want in zip(batched, reference(*operands), strict=True):
        torch.testing.assert_close(got[0], want)


def test_tracing(seed):
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(6, 8, generator=generator, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, generator=generator, requires_grad=True)
    torch.library.opcheck(torch.ops.torch_overlap.add_rms_norm.default, (x, residual, weight, EPS))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (6, 3):
        parts = [t[:rows].detach().requires_grad_() for t in (x, residual)]
        grads = []
        for function in (compiled, reference):
            norm, hidden = function(*parts, weight)
            grads.append(torch.autograd.grad(norm.square().sum() + hidden.sin().sum(), (*parts, weight)))
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)


def test_refused_arguments():
    x, weight = torch.randn(3, 4), torch.randn(4)
    for operands, error, match in [
        ((x, x[:2], weight), ValueError, r"residual of shape \[3, 4\] as x, got \[2, 4\]"),
        ((x, x[0], weight), ValueError, r"residual of shape \[3, 4\] as x, got \[4\]"),
        ((x, x.double(), weight), TypeError, "residual.*Double|residual.*float64"),
        ((x, x, weight[:3]), ValueError, "weight"),
        ((x, x, x), ValueError, r"weight \[n\], got shapes \[3, 4\] and \[3, 4\]"),
        ((x.int(), x.int(), weight.int()), TypeError, "float16, bfloat16, float32 or float64, got torch.int32"),
    ]:
        with pytest.raises(error, match=match):
            run(*operands)
    with pytest.raises(ValueError, match="expected eps >= 0, got -1"):
        ops.add_rms_norm(x, x, weight, eps=-1.0)


def test_hidden_that_changes_is_found(seed):
    x, residual = (torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for _ in range(2))
    norm, hidden = run(x.requires_grad_(), residual, torch.ones(4))
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        norm.sum().backward()

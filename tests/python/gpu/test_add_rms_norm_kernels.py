"""ops.add_rms_norm by its kernels: every dtype and width, rows that no vector divides, and in a CUDA graph."""

import pytest
import torch
import torch.nn.functional as F

from torch_overlap import ops

pytestmark = pytest.mark.gpu(1)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
EPS = 1e-5


def draw(shape, dtype, generator):
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64).to(dtype)


def exact(operands, grads):
    """The norm of h, which is rounded first; h; the gradients of h and of the weight."""
    x, residual, weight = (t.detach() for t in operands)
    hidden = (x + residual).double().requires_grad_()
    wide = weight.double().requires_grad_()
    norm = F.rms_norm(hidden, wide.shape, wide, EPS)
    found = torch.autograd.grad([norm, hidden], [hidden, wide], [g.double() for g in grads])
    return norm.detach(), hidden.detach(), *found


def check(got, want, dtype, rows):
    eps = max(torch.finfo(dtype).eps, 0)
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for i, (mine, other) in enumerate(zip(got, want, strict=True)):
        assert mine.dtype == dtype
        # A gradient of the weight is the sum of a product of each row.
        scale = rows**0.5 if i == 3 else 8
        torch.testing.assert_close(mine.double(), other, rtol=eps + 16 * wide, atol=64 * wide * scale + eps / 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", [4, 8, 24, 1000, 1024, 2056, 4096, 5120, 8192, 12288, 16384, 16392, 7])
@pytest.mark.parametrize("rows", [1, 3, 700])
def test_values_and_gradients(seed, dtype, features, rows):
    generator = torch.Generator("cuda").manual_seed(seed)
    x, residual, *grads = (draw((rows, features), dtype, generator) for _ in range(4))
    weight = draw((features,), dtype, generator)
    operands = [t.requires_grad_() for t in (x, residual, weight)]
    norm, hidden = ops.add_rms_norm(*operands, eps=EPS)
    found = torch.autograd.grad([norm, hidden], operands, grads)
    assert torch.equal(found[0], found[1])
    check([norm.detach(), hidden.detach(), *found[1:]], exact(operands, grads), dtype, rows)
    again = torch.autograd.grad(ops.add_rms_norm(*operands, eps=EPS), operands, grads)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "sums are in one order"


@pytest.mark.parametrize("layout", ["offset", "columns", "transposed", "three", "overlapping"])
def test_layouts(seed, layout):
    generator = torch.Generator("cuda").manual_seed(seed)
    rows, features, dtype = 60, 256, torch.bfloat16
    change = {
        "offset": lambda t: F.pad(t.flatten(), (1, 0))[1:].view(rows, features),
        "columns": lambda t: F.pad(t, (8, 8))[:, 8:-8],
        "transposed": lambda t: t.mT.contiguous().mT,
        "three": lambda t: t.view(4, 15, features).transpose(0, 1),
        "overlapping": lambda t: t.flatten()[: rows + features - 1].unfold(0, features, 1),
    }[layout]
    x, residual, *grads = (change(draw((rows, features), dtype, generator)) for _ in range(4))
    operands = [t.detach().requires_grad_() for t in (x, residual, draw((features,), dtype, generator))]
    norm, hidden = ops.add_rms_norm(*operands, eps=EPS)
    found = torch.autograd.grad([norm, hidden], operands[1:], grads)
    check([norm.detach(), hidden.detach(), *found], exact(operands, grads), dtype, rows)


def test_one_result_is_used(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    x, residual, grad = (draw((33, 512), torch.bfloat16, generator) for _ in range(3))
    operands = [t.requires_grad_() for t in (x, residual, draw((512,), torch.bfloat16, generator))]
    zero = torch.zeros_like(grad)
    norm, hidden = ops.add_rms_norm(*operands, eps=EPS)
    found = torch.autograd.grad(norm, operands[1:], grad, retain_graph=True)
    check(found, exact(operands, [grad, zero])[2:], torch.bfloat16, 33)
    assert torch.equal(torch.autograd.grad(hidden, residual, grad)[0], grad)
    plain = torch.ops.torch_overlap.add_rms_norm(x, None, operands[2], EPS)[0]
    torch.testing.assert_close(plain, F.rms_norm(x, (512,), operands[2], EPS), rtol=1e-2, atol=1e-3)


def test_no_rows_infinities_and_nan():
    weight = torch.ones(64, device="cuda", requires_grad=True)
    none = torch.zeros(0, 64, device="cuda", requires_grad=True)
    norm, _ = ops.add_rms_norm(none, none, weight)
    norm.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    x = torch.ones(3, 64, device="cuda")
    x[0, 3], x[1, 5] = torch.inf, torch.nan
    got, _ = ops.add_rms_norm(x, torch.zeros_like(x), weight, eps=EPS)
    torch.testing.assert_close(got, F.rms_norm(x, (64,), weight, EPS), equal_nan=True)


def test_in_a_graph(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    x, residual, *grads = (draw((64, 512), torch.bfloat16, generator) for _ in range(4))
    operands = [t.requires_grad_() for t in (x, residual, draw((512,), torch.bfloat16, generator))]

    def step():
        norm, hidden = ops.add_rms_norm(*operands, eps=EPS)
        return norm, hidden, *torch.autograd.grad([norm, hidden], operands[1:], grads)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(3):
        with torch.no_grad():
            for operand in operands:
                operand.copy_(draw(operand.shape, torch.bfloat16, generator))
        graph.replay()
        check([t.detach() for t in got], exact(operands, grads), torch.bfloat16, 64)

"""ops.swiglu by its kernels: every dtype and alignment, many rows, and in a CUDA graph."""

import pytest
import torch
import torch.nn.functional as F

from torch_overlap import ops

pytestmark = pytest.mark.gpu(1)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def exact(gate, up, grad):
    gate, up = (x.detach().double().requires_grad_() for x in (gate, up))
    result = F.silu(gate) * up
    return result.detach(), *torch.autograd.grad(result, (gate, up), grad.double())


def check(got, want, dtype):
    # A gradient is a sum of products up to 30 in size: some roundings of float32, and one of the dtype. The error of
    # 1 - sigmoid(x), a rounding of 1, is multiplied by x, which is up to 20.
    eps = torch.finfo(dtype).eps
    rtol = 2 * eps if dtype.itemsize == 2 else 32 * eps
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=64 * torch.finfo(torch.float32).eps + eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", [1, 3, 8, 100, 1024, 3584])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("apart", [False, True])
def test_values_and_gradients(seed, dtype, features, offset, apart):
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = 33
    memory = 4 * torch.randn(offset + rows * 2 * features, generator=generator, device="cuda", dtype=torch.float64)
    both = memory.to(dtype)[offset:].view(rows, 2 * features)
    gate, up = both.chunk(2, -1)
    operands = [x.clone() if apart and offset == 0 else x for x in ((gate, up) if apart else (both,))]
    operands = [x.detach().requires_grad_() for x in operands]
    grad = torch.randn(rows, features, generator=generator, device="cuda", dtype=torch.float64).to(dtype)
    want, *grads = exact(gate, up, grad)
    got = ops.swiglu(*operands)
    check(got, want, dtype)
    got.backward(grad)
    check(torch.cat([x.grad for x in operands], -1), torch.cat(grads, -1), dtype)


def test_infinities_and_nan():
    x = torch.tensor([torch.inf, torch.nan, 100.0, -100.0, 1e-3, 0.0, -0.0, -20.0], device="cuda")
    for dtype in DTYPES:
        gate, up = x.to(dtype), torch.ones(8, device="cuda", dtype=dtype)
        torch.testing.assert_close(ops.swiglu(gate, up).double(), F.silu(gate.double()), rtol=2e-2, atol=1e-6,
                                   equal_nan=True)  # fmt: skip


def test_more_rows_than_one_launch(seed):
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB")
    rows, features = (1 << 29) + 7, 3  # vectors of one element; results are compared in pieces
    both = torch.empty(rows, 2 * features, device="cuda", dtype=torch.bfloat16)
    both.normal_(generator=torch.Generator("cuda").manual_seed(seed))
    got = ops.swiglu(both)
    for begin in range(0, rows, 1 << 25):
        gate, up = both[begin : begin + (1 << 25)].float().chunk(2, -1)
        torch.testing.assert_close(got[begin : begin + (1 << 25)].float(), F.silu(gate) * up, rtol=8e-3, atol=1e-2)


def test_in_a_graph(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    both = torch.zeros(64, 512, device="cuda", requires_grad=True)
    grad = torch.randn(64, 256, generator=generator, device="cuda")

    def step():
        y = ops.swiglu(both)
        return y, *torch.autograd.grad(y, both, grad)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, both_grad = step()
    for _ in range(3):
        with torch.no_grad():
            both.normal_(generator=generator)
        graph.replay()
        want, *grads = exact(*both.chunk(2, -1), grad)
        check(y, want, torch.float32)
        check(both_grad, torch.cat(grads, -1), torch.float32)

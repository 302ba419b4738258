"""The cross entropy of split logits by its kernels: every dtype, width and alignment, infinities, and in a graph."""

import pytest
import torch
import torch.nn.functional as F

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def reference(whole, targets, grad, options, wide=torch.float64):
    """Losses and the gradient of the whole logits, in fp64 or as wide as ours."""
    whole = whole.detach().to(wide).requires_grad_()
    losses = F.cross_entropy(whole, targets, reduction="none", **options)
    return losses.detach().double(), torch.autograd.grad(losses, whole, grad.to(wide))[0].double()


def check(comm, logits, losses, gradient, want):
    """The gradient of a logit is at most its weight, 1 or so, here: rounded once to the dtype of the logits."""
    exact, whole_gradient = want
    loss_eps = torch.finfo(torch.float64 if logits.dtype == torch.float64 else torch.float32).eps
    torch.testing.assert_close(losses.double(), exact, rtol=64 * loss_eps, atol=256 * loss_eps, equal_nan=True)
    mine = whole_gradient.chunk(comm.get_size(), -1)[comm.get_rank()]
    eps = torch.finfo(logits.dtype).eps
    assert gradient.dtype == logits.dtype
    smallest = 2 * torch.finfo(logits.dtype).smallest_normal * eps  # float16 rounds to multiples of this
    torch.testing.assert_close(gradient.double(), mine, rtol=max(eps, 256 * loss_eps), atol=64 * loss_eps + smallest,
                               equal_nan=True)  # fmt: skip


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 8, 100, 2056, 64128])
@pytest.mark.parametrize("layout", ["dense", "offset", "columns", "transposed"])
def test_values_and_gradients(comm, seed, smoothing, dtype, width, layout):
    generator = torch.Generator("cuda").manual_seed(seed)
    size, rows = comm.get_size(), 37
    whole = (5 * torch.randn(rows, size * width, generator=generator, device="cuda")).to(dtype)
    targets = torch.randint(size * width, (rows,), generator=generator, device="cuda")
    targets[::5] = -100
    grad = torch.randn(rows, generator=generator, device="cuda")
    mine = whole.chunk(size, -1)[comm.get_rank()]
    if layout == "dense":
        mine = mine.contiguous()
    elif layout == "offset":  # no row begins at a multiple of 16 bytes
        mine = F.pad(mine.flatten(), (1, 0))[1:].view(rows, width)
    elif layout == "transposed":
        mine = mine.mT.contiguous().mT
    logits = mine.detach().requires_grad_()
    options = {"label_smoothing": smoothing}
    losses = to.nn.vocabulary_parallel_cross_entropy(logits, targets, comm, reduction="none", **options)
    (gradient,) = torch.autograd.grad(losses, logits, grad.to(losses.dtype))
    check(comm, logits, losses.detach(), gradient, reference(whole, targets, grad, options))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_and_nan(comm, seed, smoothing, dtype):
    generator = torch.Generator("cuda").manual_seed(seed)
    size, width, inf = comm.get_size(), 1000, torch.inf
    whole = torch.randn(9, size * width, generator=generator, device="cuda").to(dtype)
    whole[0, :width] = whole[1, -width:] = whole[2] = -inf
    whole[3, 700], whole[4, 1], whole[5, -1], whole[6, :-1] = inf, torch.nan, -inf, -inf
    whole[7] = inf
    whole[8, :width] = torch.finfo(dtype).min
    targets = torch.tensor([-1, 0, 1, 2, 3, 5, -1, 0, 5], device="cuda") % (size * width)
    grad = torch.ones(9, device="cuda")
    logits = whole.chunk(size, -1)[comm.get_rank()].contiguous().requires_grad_()
    options = {"label_smoothing": smoothing}
    losses = to.nn.vocabulary_parallel_cross_entropy(logits, targets, comm, reduction="none", **options)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # a sum of the lowest numbers overflows
    check(comm, logits, losses.detach(), gradient, reference(whole, targets, grad, options, wide))


def test_no_rows_and_memory(comm):
    """Besides the gradient no tensor of the size of the logits is made."""
    none = torch.zeros(0, 64, device="cuda", requires_grad=True)
    loss = to.nn.vocabulary_parallel_cross_entropy(none, none.new_zeros(0, dtype=torch.int64), comm, reduction="sum")
    loss.backward()
    assert loss == 0
    assert none.grad.shape == (0, 64)
    logits = torch.randn(512, 32768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(32768, (512,), device="cuda")
    comm.broadcast(targets, 0, async_op=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = to.nn.vocabulary_parallel_cross_entropy(logits, targets, comm)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * gradient.nbytes


def test_in_a_graph(comm, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    size, rows, width = comm.get_size(), 64, 512
    logits = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(rows, device="cuda", dtype=torch.int64)
    grad = torch.randn(rows, generator=generator, device="cuda")

    def step():
        losses = to.nn.vocabulary_parallel_cross_entropy(logits, targets, comm, reduction="none")
        return losses, *torch.autograd.grad(losses, logits, grad)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses, gradient = step()
    for _ in range(3):
        whole = torch.randn(rows, size * width, generator=generator, device="cuda").bfloat16()
        with torch.no_grad():
            logits.copy_(whole.chunk(size, -1)[comm.get_rank()])
            targets.copy_(torch.randint(size * width, (rows,), generator=generator, device="cuda"))
        graph.replay()
        check(comm, logits, losses.detach(), gradient, reference(whole, targets, grad, {}))

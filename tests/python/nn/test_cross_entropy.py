"""Cross entropy of logits that are split by vocabulary, compared with torch's on the whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torch_overlap.nn import vocabulary_parallel_cross_entropy
from torch_overlap.testing import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_values_and_gradients(seed, size, reduction, smoothing, dtype, tolerance):
    generator = torch.Generator().manual_seed(seed)
    logits = (30 * torch.randn(3, 5, 6 * size, generator=generator, dtype=torch.float64)).to(dtype)
    targets = torch.randint(6 * size, (3, 5), generator=generator)
    targets[torch.rand(3, 5, generator=generator) < 0.3] = -7
    targets[0, 0] = 6 * size - 1
    factor = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    whole = logits.double().detach().clone().requires_grad_()
    options = {"ignore_index": -7, "reduction": reduction, "label_smoothing": smoothing}
    want = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), **options)
    want = want.view(3, 5) if reduction == "none" else want
    (want * factor).sum().backward()

    def rank(comm):
        mine = logits.chunk(size, -1)[comm.get_rank()].clone().requires_grad_()
        got = vocabulary_parallel_cross_entropy(mine, targets, comm, **options)
        (got * factor).sum().backward()
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(got.double().detach(), want.detach(), rtol=tolerance, atol=tolerance)
        wanted = whole.grad.chunk(size, -1)[comm.get_rank()]
        torch.testing.assert_close(mine.grad.double(), wanted, rtol=tolerance, atol=tolerance)

    run_ranks(rank, size, backend="local")


def test_extreme_logits_and_rows_without_loss():
    def rank(comm):
        logits = torch.tensor([[-1e30, 1e30], [float("-inf"), 0.0], [3e38, -3e38]])
        targets = torch.tensor([3, 1, -100])
        both = torch.cat([logits, logits], -1)
        got = vocabulary_parallel_cross_entropy(logits, targets, comm, reduction="none")
        torch.testing.assert_close(got, F.cross_entropy(both, targets, reduction="none"))
        assert vocabulary_parallel_cross_entropy(logits, torch.full((3,), -100), comm).isnan()  # as torch's
        assert vocabulary_parallel_cross_entropy(logits[:0], targets[:0], comm, reduction="sum") == 0

    run_ranks(rank, 2, backend="local")


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_infinities_and_nan(seed, smoothing, dtype):
    """A part of -inf on one rank, rows of it, infinities and NaN: losses and gradients as torch's."""
    inf = torch.inf
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    whole[0, :3] = whole[1, 3:] = -inf
    whole[2] = -inf
    whole[3, 4], whole[4, 1], whole[5, 5] = inf, torch.nan, -inf
    whole[6] = inf
    whole[7, :3] = torch.finfo(dtype).min
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # a sum of the lowest numbers overflows
    whole = whole.to(dtype).to(wide).requires_grad_()
    targets = torch.tensor([5, 0, 1, 2, 3, 5, 0, 5])
    want = F.cross_entropy(whole, targets, reduction="none", label_smoothing=smoothing)
    want.sum().backward()
    tolerance = 16 * torch.finfo(dtype).eps

    def rank(comm):
        mine = whole.detach().to(dtype).chunk(2, -1)[comm.get_rank()].clone().requires_grad_()
        got = vocabulary_parallel_cross_entropy(mine, targets, comm, reduction="none", label_smoothing=smoothing)
        got.sum().backward()
        torch.testing.assert_close(got.detach(), want.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
        wanted = whole.grad.chunk(2, -1)[comm.get_rank()]
        torch.testing.assert_close(mine.grad.to(wide), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)

    run_ranks(rank, 2, backend="local")


def test_mistakes_are_errors():
    def rank(comm):
        x, t = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
        for error, message, args, options in [
            (ValueError, r"expected logits \[..., V/n\] and targets \[...\], got shapes \[4, 3\] and", (x, t[:3]), {}),
            (ValueError, "expected floating-point logits and int64 targets, got torch.float32 and", (x, t.int()), {}),
            (ValueError, "expected reduction of mean, sum, none, got 'max'", (x, t), {"reduction": "max"}),
            (ValueError, "expected label_smoothing from 0 to 1, got 2", (x, t), {"label_smoothing": 2}),
            (IndexError, "expected targets from 0 to 5 or -100, got 6 to 6", (x, t + 6), {}),
        ]:  # fmt: skip
            with pytest.raises(error, match=message):
                vocabulary_parallel_cross_entropy(*args, comm, **options)

    run_ranks(rank, 2, backend="local")


def compiled(comm, seed):
    """A target outside of the vocabulary is NaN in compiled code."""
    torch.manual_seed(seed)  # the same on both ranks
    whole = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, -1, 5])
    mine = whole.detach().chunk(2, -1)[comm.get_rank()].clone().requires_grad_()
    run = torch.compile(vocabulary_parallel_cross_entropy, backend="aot_eager", fullgraph=True)
    losses = run(mine, targets, comm, reduction="none")
    assert losses.isnan().tolist() == [False, True, True, False]
    losses[[0, 3]].sum().backward()
    want = F.cross_entropy(whole[[0, 3]], targets[[0, 3]], reduction="none")
    want.sum().backward()
    torch.testing.assert_close(losses.detach()[[0, 3]], want.detach())
    torch.testing.assert_close(mine.grad, whole.grad.chunk(2, -1)[comm.get_rank()])


def test_compiled(seed):
    run_ranks(compiled, 2, seed)

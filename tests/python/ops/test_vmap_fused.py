"""torch.vmap of the overlapped operators equals a loop, and refuses operands that the elements do not share."""

import pytest
import torch

from torch_overlap import UnsupportedError, ops
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
BATCH = 3


def as_list(result):
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def compare(function, x, batch_dim):
    """Compares with one call per element."""
    want = [as_list(function(element)) for element in x.unbind(batch_dim)]
    got = as_list(torch.vmap(function, in_dims=batch_dim)(x))
    for i, result in enumerate(got):
        parts = torch.stack([one[i] for one in want])
        if parts.numel() == 0:
            assert result.numel() == 0
            continue
        torch.testing.assert_close(result.double(), parts.double(), rtol=1e-5, atol=1e-5)


def vmap_rank(comm, algorithm, batch_dim):
    size = comm.get_size()

    def draw(*shape):
        element = torch.randn(BATCH, *shape)
        return element.movedim(0, batch_dim)

    w, v, bias = torch.randn(6, 8), torch.randn(2 * size, 8), torch.randn(6)
    for dim, shape in ((0, (4, 8)), (-2, (4, 8)), (1, (2, 4, 8))):
        for keep in (False, True):
            compare(
                lambda x, dim=dim, keep=keep: ops.all_gather_matmul(
                    x, [w, v], comm, [bias, None], gather_dim=dim, return_gathered=keep, algorithm=algorithm
                ),
                draw(*shape),
                batch_dim,
            )
        rows = [2 * size if i == dim % len(shape) else n for i, n in enumerate(shape)]
        compare(
            lambda x, dim=dim: ops.matmul_reduce_scatter(
                x, w, comm, bias, scatter_dim=dim, op="avg", algorithm=algorithm
            ),
            draw(*rows),
            batch_dim,
        )
    compare(lambda x: ops.matmul_all_reduce(x, w, comm, bias, algorithm=algorithm), draw(4, 8), batch_dim)
    residual, gain = torch.randn(4, 6), torch.randn(6)
    compare(
        lambda x: ops.matmul_all_reduce_rms_norm(x, w, residual, gain, comm, bias, algorithm=algorithm),
        draw(4, 8),
        batch_dim,
    )
    compare(lambda x: ops.all_reduce_rms_norm(residual, x, gain, comm, bias), draw(4, 6), batch_dim)
    compare(lambda x: ops.all_reduce_rms_norm(residual, x, gain, comm, next_weight=w.t()[:6]), draw(4, 6), batch_dim)
    compare(lambda x: ops.all_to_all_matmul(x, torch.ones(3, 8 * size), comm, algorithm=algorithm),
            draw(2 * size, 8), batch_dim)  # fmt: skip
    compare(lambda x: ops.matmul_all_to_all(x, [v, v], comm, algorithm=algorithm), draw(4, 8), batch_dim)
    for collective in ("all_gather", "reduce_scatter"):
        other = torch.randn(2 * size, 3)

        def beside(x, collective=collective, other=other):
            return ops.bulk_overlap_matmul(x, w, other, comm, bias, collective=collective, algorithm=algorithm)

        got = torch.vmap(beside, in_dims=batch_dim, out_dims=(0, None))(draw(4, 8))
        torch.testing.assert_close(got[1], beside(torch.ones(4, 8))[1])
        compare(
            lambda t, collective=collective: ops.bulk_overlap_matmul(
                torch.ones(4, 8), w, t, comm, collective=collective, dim=-1, algorithm=algorithm
            )[1],
            draw(3, 2 * size),
            batch_dim,
        )
    data, scale, *_ = ops.quantize(draw(2 * size, 16))
    weight, weight_scale, *_ = ops.quantize(torch.randn(16, 16))
    compare(lambda x: ops.scaled_all_gather_matmul(x, scale, [weight], [weight_scale], comm, return_gathered=True)[0],
            data, batch_dim)  # fmt: skip
    compare(lambda x: ops.scaled_matmul_reduce_scatter(x, scale, weight, weight_scale, comm), data, batch_dim)
    compare(lambda x: ops.scaled_matmul_all_reduce(x, scale, weight, weight_scale, comm), data, batch_dim)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("algorithm", ["sequential", "pipelined"])
def test_vmap_equals_a_loop(size, algorithm, batch_dim):
    run_ranks(vmap_rank, size, algorithm, batch_dim, backend="local")


def refused_rank(comm):
    x, ws = torch.randn(4, 8), torch.randn(BATCH, 6, 8)
    for call in (
        lambda w: ops.all_gather_matmul(x, [w], comm)[0][0],
        lambda w: ops.matmul_reduce_scatter(x, w, comm),
        lambda w: ops.matmul_all_reduce(x, w, comm),
        lambda w: ops.all_to_all_matmul(x[:, :4], w, comm),
        lambda w: ops.matmul_all_to_all(x, [w], comm)[0],
        lambda w: ops.bulk_overlap_matmul(x, w, x, comm, collective="all_gather")[0],
    ):
        with pytest.raises(UnsupportedError, match=r"^vmap: expected x.* alone to have the batch dimension, got it in"):
            torch.vmap(call)(ws)
    with pytest.raises(ValueError, match=r"examples of two or more dimensions, got shape .8.; use x.unsqueeze"):
        torch.vmap(lambda t: ops.matmul_all_reduce(t, ws[0], comm))(x)


def test_what_elements_do_not_share_is_refused():
    run_ranks(refused_rank, 2, backend="local")

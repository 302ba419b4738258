"""Infinities and nans along sharded dimensions: reductions in parts equal the whole one."""

import math

import pytest
import torch
import torch.nn.functional as F
from spmd_ranks import on_mesh

from torch_overlap.mesh import shard

INF, NAN = math.inf, math.nan
ROWS = torch.tensor(
    [
        [1.0, 2.0, INF, 3.0, -1.0],
        [1.0, -INF, 2.0, 0.5, 3.0],
        [-INF, -INF, -INF, -INF, -INF],
        [INF, 1.0, -INF, 2.0, 4.0],
        [0.5, NAN, 1.0, 2.0, INF],
        [INF, INF, INF, INF, INF],
        [0.0, 0.0, -1.0, 0.0, 0.0],
    ],
    dtype=torch.float64,
)
LAYOUTS = ("[],[x,y]", "[y],[x]", "[x,y],[]", "[],[y]")


TARGETS, WEIGHT = torch.tensor([0, 2, 1, -100, 4, 3, 1]), torch.tensor([INF, 1.0, 2.0, 0.0, 1.5], dtype=torch.float64)


VALUES = {
    "softmax": lambda x: x.softmax(1),
    "softmax of columns": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "logsumexp of all": lambda x: x.logsumexp((0, 1)),
    "softmax in float16": lambda x: x.half().softmax(1),
    "norm": lambda x: torch.linalg.vector_norm(x, 2, 1),
    "norm of all": torch.linalg.vector_norm,
    **{f"norm {p}": lambda x, p=p: torch.linalg.vector_norm(x, p, 1, True) for p in (0, 1, 3, 0.5, -1, -2, INF, -INF)},
    **{f"norm {p} of all": lambda x, p=p: torch.linalg.vector_norm(x, p) for p in (0, 3, -1, -INF)},
    "norm -1 of infinities": lambda x: torch.linalg.vector_norm(x[5:6], -1),
    "var": lambda x: x.var(1),
    "var of all": lambda x: x.var(),
    "var of too few": lambda x: x[:, :2].var(1, correction=2),
    "std": lambda x: x.std(0),
    "var_mean": lambda x: torch.var_mean(x, 1)[0],
    "mean": lambda x: x.mean(1),
    "mean of all": lambda x: x.mean(),
    "sum": lambda x: x.sum(0),
    "sum by a zero": lambda x: x[6:].sum() / 0,
    "sum times infinity": lambda x: x[6:].sum() * INF,
    "nansum": lambda x: x.nansum(1),
    "prod": lambda x: x.prod(1),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(0),
    "max": lambda x: x.max(),
    "max along": lambda x: x.max(1).values,
    "min": lambda x: x.min(),
    "argmax": lambda x: x.argmax(1),
    "argmin of all": lambda x: x.argmin(),
    "aminmax": lambda x: torch.stack(tuple(torch.aminmax(x, dim=1))),
    "any": lambda x: x.any(1),
    "all": lambda x: x.all(),
    "isnan, any": lambda x: x.isnan().any(0),
    "any of uint8": lambda x: (x > 1).to(torch.uint8).any(1),
    "any of all uint8": lambda x: (x > 1).to(torch.uint8).any(),
    "all of uint8": lambda x: (x < INF).to(torch.uint8).all(0, keepdim=True),
    "cumsum": lambda x: x.cumsum(1),
    "topk": lambda x: x.topk(2, 1).values,
    "median": lambda x: x.median(1).values,
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "rms_norm": lambda x: F.rms_norm(x, (5,)),
    "group_norm": lambda x: F.group_norm(x, 1),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "normalize": lambda x: F.normalize(x, dim=1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x + 1, 1),
    "mse_loss": lambda x: F.mse_loss(x, x * 0.5),
    "matmul": lambda x: x @ x.t(),
}


LOSSES = {
    "cross_entropy": lambda x, t, w: F.cross_entropy(x, t),
    "cross_entropy, none": lambda x, t, w: F.cross_entropy(x, t, reduction="none"),
    "cross_entropy, weights": lambda x, t, w: F.cross_entropy(x[1:2], t[1:2], w),
    "nll_loss, weights": lambda x, t, w: F.nll_loss(x[6:], t[6:], w),
    "nll_loss, an ignored class of infinite weight": lambda x, t, w: F.nll_loss(x[5:], t[2:4], w),
    "cross_entropy, smoothed": lambda x, t, w: F.cross_entropy(x, t, label_smoothing=0.1, reduction="none"),
    "nothing but ignored": lambda x, t, w: F.nll_loss(x[3:4], t[3:4]),
}
# var is left out: torch omits the gradient of the mean, which is 0 for finite numbers.
GRADIENTS = ("softmax", "softmax of columns", "log_softmax", "logsumexp", "logsumexp of all", "norm", "norm of all",
             "norm 0", "norm 1", "norm 3", "norm -1", "mean", "sum",
             "layer_norm", "rms_norm")  # fmt: skip


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
def test_values():
    """Every element, with each layout."""

    def body(r):
        targets, weight = shard(TARGETS, r.mesh), shard(WEIGHT, r.mesh)
        for layout in LAYOUTS:
            x = r.place(ROWS, layout)
            for name, function in VALUES.items():
                compare(f"{name} of {layout}", function(x).full(), function(ROWS))
            for name, function in LOSSES.items():
                loss = function(x, targets, weight)
                compare(f"{name} of {layout}", loss.full(), function(ROWS, TARGETS, WEIGHT))

    on_mesh("x=2,y=2", body, 0)


def test_gradients():
    """Gradients of amax, max and norms of infinite order are refused along a sharded dimension."""

    def body(r):
        for name in GRADIENTS:
            leaf = ROWS.clone().requires_grad_()
            VALUES[name](leaf).sum().backward()
            for layout in LAYOUTS:
                x = r.place(ROWS, layout).requires_grad_()
                VALUES[name](x).sum().backward()
                got = None if x.grad is None else x.grad.full()
                zeros = torch.zeros_like(leaf)  # torch has no gradient for the norm 0; it counts as zeros
                compare(f"gradient of {name} of {layout}", zeros if got is None else got,
                        zeros if leaf.grad is None else leaf.grad)  # fmt: skip

    on_mesh("x=2,y=2", body, 0)


def compare(what, got, expected):
    torch.testing.assert_close(got, expected, equal_nan=True, msg=lambda text: f"{what}: {text}")

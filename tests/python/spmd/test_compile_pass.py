"""The compile pass: products and collectives become one operator, each skipped one has a reason; values do not
change."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import torch_overlap as to
from torch_overlap.mesh.compile_pass import OverlapPass, overlap_products
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)


def pass_alone(made):
    """Returns a compiler that runs only the pass: it takes seconds instead of minutes."""

    def compiler(module, _):
        made(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


def feed_forward(comm, x, up, gate, down):
    h = to.ops.all_gather(x, comm, 0)
    h = F.linear(h, up) * F.silu(F.linear(h, gate))
    return to.ops.reduce_scatter(F.linear(h, down), comm, 0)


def check_feed_forward(comm, seed):
    shared = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(seed + 1 + comm.get_rank())
    tensors = [
        torch.randn(4, 3, 8, generator=own, dtype=torch.float64),
        *(torch.randn(*s, generator=shared, dtype=torch.float64) for s in ((6, 8), (6, 8), (8, 6))),
    ]

    def run(function):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = function(*leaves)
        y.square().sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    def function(*leaves):
        return feed_forward(comm, *leaves)

    expected = run(function)
    made = OverlapPass(overlap="always")
    got = run(torch.compile(function, fullgraph=True, backend=pass_alone(made)))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    return [(d.collective, d.fused) for d in made.decisions], made.decisions[-1].why


def test_values_and_gradients_are_those_of_the_plain_graph(seed):
    decisions, why = run_ranks(check_feed_forward, 2, seed, timeout=280)[0]
    # The last one: the gradients of the inputs of up and gate are the sum of two products.
    assert decisions == [("all_gather", True), ("reduce_scatter", True)] * 2
    assert "by the cost model" in why


def check_sums(comm, seed):
    """Products that are added before they are reduced, some of them reshaped, one of them used twice."""
    generator = torch.Generator().manual_seed(seed + comm.get_rank())
    a, b, c = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((4, 2, 5), (4, 2, 3), (8, 7)))
    u, v, w = (torch.randn(6, k, generator=generator, dtype=torch.float64) for k in (5, 3, 7))

    def function(a, b, c):
        twice = F.linear(b, v)
        y = F.linear(a, u) + (twice + twice) + F.linear(c, w).view(4, 2, 6)
        return to.ops.reduce_scatter(y, comm, 0), to.ops.all_reduce(c @ w.t() + (a.flatten(0, 1) @ u.t()), comm, "sum")

    made = OverlapPass(overlap="always")
    with torch.no_grad():
        expected = function(a, b, c)
        got = torch.compile(function, fullgraph=True, backend=pass_alone(made))(a, b, c)
        plain = OverlapPass()
        torch._dynamo.reset()
        torch.compile(function, fullgraph=True, backend=pass_alone(plain))(a, b, c)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    return [(d.collective, d.fused) for d in made.decisions], [d.fused for d in plain.decisions]


def test_a_sum_of_products_is_one_product(seed):
    fused, small = run_ranks(check_sums, 2, seed, timeout=280)[0]
    assert fused == [("reduce_scatter", True), ("all_reduce", True)]
    assert small == [False, False]  # too small for the overlap


def c10d_feed_forward(group, x, up, down):
    import torch.distributed._functional_collectives as funcol

    h = funcol.all_gather_tensor(x, 0, group)
    # Inductor would compile a kernel for an activation between the products.
    return funcol.reduce_scatter_tensor(h @ up @ down, "sum", 0, group)


def check_c10d(rank, size, store, seed):
    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    shared, own = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1 + rank)
    x, up, down = (torch.randn(4, 8, generator=own), torch.randn(8, 6, generator=shared),
                   torch.randn(6, 8, generator=shared))  # fmt: skip

    def function(*tensors):
        return c10d_feed_forward(dist.group.WORLD, *tensors)

    expected = function(x, up, down)
    fresh = torch._inductor.config.patch(force_disable_caches=True)  # a cached graph skips the pass
    with fresh, overlap_products(overlap="always") as made, torch.no_grad():
        got = torch.compile(function)(x, up, down)  # it copies Inductor's settings, including the pass
    torch.testing.assert_close(got, expected)
    dist.destroy_process_group()
    return [(d.collective, d.fused) for d in made.decisions]


def test_the_functional_collectives_of_torch_are_seen(seed):
    found = run_ranks(check_c10d, 2, seed, comm=False, timeout=280)[0]
    assert found == [("all_gather", True), ("reduce_scatter", True)]


def reasons(comm):
    """Reasons for which collectives are skipped; on `fake` ranks, so only graphs are tested."""
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    ops = to.ops
    functions = {
        "columns": lambda: F.linear(ops.all_gather(x, comm, 1), torch.ones(3, 16)),
        "other user": lambda: torch.relu(ops.all_gather(x, comm, 0)),
        "second operand": lambda: w @ ops.all_gather(x, comm, 0).t(),
        "late weight": lambda: (lambda g: F.linear(g, w * g.sum()))(ops.all_gather(x, comm, 0)),
        "not a sum": lambda: ops.all_reduce(F.linear(x, w), comm, "max"),
        "used before": lambda: (lambda y: (ops.all_reduce(y, comm, "sum"), y))(F.linear(x, w)),
        "scattered columns": lambda: ops.reduce_scatter(F.linear(x, w), comm, 1),
        "sum used before": lambda: (lambda y: (ops.all_reduce(y, comm, "sum"), y))(F.linear(x, w) + F.linear(x, w + 1)),
        "added": lambda: ops.all_reduce(F.linear(x, w) + 1, comm, "sum"),
        "added bias": lambda: ops.all_reduce(F.linear(x, w) + w[:, 0], comm, "sum"),
        "twice as much": lambda: ops.all_reduce(torch.add(x @ w.t(), x @ w.t().exp(), alpha=2), comm, "sum"),
        "fused": lambda: ops.all_reduce(F.linear(x, w), comm, "sum"),
    }
    found = {}
    for name, function in functions.items():
        made = OverlapPass(overlap="always")
        with torch.no_grad():
            torch._dynamo.reset()
            torch.compile(function, fullgraph=True, backend=pass_alone(made))()
        found[name] = [(d.fused, d.why) for d in made.decisions]
    with (
        overlap_products(),
        pytest.raises(to.InvalidValueError, match=r"expected no torch\._inductor"),
        overlap_products(),
    ):
        pass
    torch._dynamo.reset()
    with torch.no_grad(), _logged() as lines:
        torch.compile(functions["fused"], fullgraph=True, backend=pass_alone(OverlapPass()))()
    return found, lines


class _logged:
    def __enter__(self):
        self.lines = []
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self.lines.append(record.getMessage())
        logger = logging.getLogger("torch_overlap.compile")
        self.level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self.handler)
        return self.lines

    def __exit__(self, *_):
        logger = logging.getLogger("torch_overlap.compile")
        logger.setLevel(self.level)
        logger.removeHandler(self.handler)


def test_what_is_left_alone_says_why():
    found, lines = run_ranks(reasons, 2, backend="fake")[0]
    expected = {
        "columns": "gathers the dimension that is multiplied",
        "other user": "no product takes the result, but relu",
        "second operand": "no product takes the result",
        "late weight": "the weights are computed after it",
        "not a sum": "it is no sum but max",
        "used before": "needed before it is reduced",
        "scattered columns": "scatters the columns",
        "sum used before": "needed before it is reduced",
        "added": "comes from add, not from a product",
        "added bias": "comes from add, not from a product",
        "twice as much": "comes from add, not from a product",
    }
    for name, why in expected.items():
        assert len(found[name]) == 1, name
        fused, said = found[name][0]
        assert not fused, name
        assert why in said
    assert [fused for fused, _ in found["fused"]] == [True]
    assert len(lines) == 1
    assert "all_reduce of (4, 6)" in lines[0]
    assert "left alone" in lines[0]
    assert "by the cost model" in lines[0]


def test_an_unknown_choice_is_refused():
    with pytest.raises(to.InvalidValueError, match=r"expected overlap of .*, got .quick."):
        OverlapPass(overlap="quick")

"""Convolutions and look-ups on Sharded values: results, gradients, layouts, and the operations sent."""

import pytest
import torch
import torch.nn.functional as F
from spmd_ranks import on_mesh

from torch_overlap.mesh import from_local, shard

CONV2D = ((4, 6, 5, 5), (8, 6, 3, 3), (8,))
GROUPED = ((4, 8, 5, 5), (8, 2, 3, 3), (8,))


def compare(r, function, xs, layouts, expected, kinds):
    """Runs `function` of Sharded values, with the gradients of all of them, and compares with `function` of whole
    ones."""
    whole = [x.clone().requires_grad_() if x.is_floating_point() else x for x in xs]
    mine = [r.place(x, layout) for x, layout in zip(xs, layouts, strict=True)]
    leaves = [(a, b) for a, b in zip(mine, whole, strict=True) if b.requires_grad]
    for value, _ in leaves:
        value.requires_grad_()
    want = function(*whole)
    with r.sends(*kinds):
        got = function(*mine)
        assert got.local.shape == got.spec.local_shape
    r.check(got, want.detach(), expected)
    weights = r.randn(*want.shape)
    (want * weights).sum().backward()
    (got * r.place(weights, None)).sum().backward()
    for value, reference in leaves:
        r.check(value.grad, reference.grad)


@pytest.mark.parametrize(
    ("shapes", "layouts", "groups", "expected", "kinds"),
    [
        pytest.param(CONV2D, ("[x],[],[],[]", None, None), 1, "[x],[],[],[]", [], id="batch"),
        pytest.param(CONV2D, (None, "[x],[],[],[]", "[x]"), 1, "[],[x],[],[]", [], id="channels out"),
        pytest.param(CONV2D[:2], ("[],[x],[],[]", "[],[x],[],[]"), 1, "[],[],[],[] P{x}", [], id="channels in"),
        pytest.param(GROUPED, ("[],[x],[],[]", "[x],[],[],[]", "[x]"), 4, "[],[x],[],[]", [], id="groups"),
        pytest.param(CONV2D[:2], ("[],[],[x],[]", None), 1, "[],[],[],[] I{x}", ["all_gather x"], id="rows"),
    ],
)
def test_convolution(shapes, layouts, groups, expected, kinds, seed):
    def body(r):
        xs = [r.randn(*shape) for shape in shapes]
        compare(r, lambda *a: F.conv2d(*a, padding=1, groups=groups), xs, layouts, expected, kinds)

    on_mesh("x=2", body, seed)


TABLE, INDEX = (6, 8), (4, 8)


@pytest.mark.parametrize(
    ("layouts", "expected", "kinds"),
    [
        pytest.param((None, "[x],[]"), "[x],[]", [], id="rows of the index"),
        pytest.param(("[],[x]", "[],[x]"), "[],[x]", [], id="beside"),
        pytest.param(("[x],[]", None), "[],[] P{x}", [], id="rows of the table"),
    ],
)
def test_gather(layouts, expected, kinds, seed):
    """B15: along a sharded dimension, indices are shifted, and those of other ranks masked."""

    def body(r):
        xs = r.randn(*TABLE), r.randint(TABLE[0], *INDEX)
        compare(r, lambda x, i: torch.gather(x, 0, i), xs, layouts, expected, kinds)

    on_mesh("x=2", body, seed)


@pytest.mark.parametrize(
    ("layouts", "expected", "kinds"),
    [
        pytest.param((None, "[x]"), "[x],[]", [], id="index"),
        pytest.param(("[],[x]", None), "[],[x]", [], id="beside"),
        pytest.param(("[x],[]", None), "[],[] P{x}", [], id="table"),
    ],
)
def test_index_select(layouts, expected, kinds, seed):
    def body(r):
        xs = r.randn(*TABLE), r.randint(TABLE[0], 10)
        compare(r, lambda x, i: torch.index_select(x, 0, i), xs, layouts, expected, kinds)

    on_mesh("x=2", body, seed)


@pytest.mark.parametrize("layout", ["[x],[]", "[],[x]", "[],[] P{x}"])
def test_rows_of_complex_tables_have_a_gradient(layout, seed):
    def body(r):
        table, index = torch.complex(r.randn(*TABLE), r.randn(*TABLE)), r.randint(TABLE[0], 10)
        parts = (table.real, table.imag)
        mine = from_local(torch.complex(*(r.place(part, layout).local for part in parts)), r.mesh, layout, TABLE)
        mine, whole = mine.requires_grad_(), table.clone().requires_grad_()
        got, expected = mine[shard(index, r.mesh)], whole[index]
        torch.testing.assert_close(got.full().detach(), expected.detach())
        c = r.randn(*expected.shape)
        (got.abs().square() * shard(c, r.mesh)).sum().backward()
        (expected.abs().square() * c).sum().backward()
        torch.testing.assert_close(mine.grad.full(), whole.grad)

    on_mesh("x=2", body, seed)


@pytest.mark.parametrize("layout", ["[x],[]", "[],[] P{x}", None])
def test_what_torch_copies_has_a_gradient(layout, seed):
    """`diff` of order 0 calls copy_, whose functional form has no derivative in torch."""

    def body(r):
        compare(r, lambda x: torch.diff(x, 0), [r.randn(4, 4)], [layout], None, [])

    on_mesh("x=2", body, seed)


@pytest.mark.parametrize("layout", ["[x],[]", "[],[x]", None])
def test_bits_are_shifted(layout, seed):
    def body(r):
        x, y = r.randint(8, 4, 6), r.randint(5, 4, 6)
        ours, other = shard(x, r.mesh, layout), shard(y, r.mesh)
        for function in (lambda a, _: a << 3, lambda a, b: a >> b, lambda a, b: b << a, lambda _, b: 8 << b,
                         lambda _, b: 77 >> b):  # fmt: skip
            r.check(function(ours, other), function(x, y))

    on_mesh("x=2", body, seed)


@pytest.mark.parametrize("dim", [0, 1])
def test_products_of_complex_elements(dim, seed):
    """No communicator multiplies complex numbers: the dimension is gathered."""

    def body(r):
        x = torch.complex(r.randn(3, 5), r.randn(3, 5))
        for layout in ("[x],[]", "[],[x]"):
            r.check(shard(x, r.mesh, layout).prod(dim), x.prod(dim))

    on_mesh("x=2", body, seed)


def test_complex_parts_without_elements_have_a_gradient(seed):
    """The backward pass visits every rank, so that all take part in its sums."""

    def body(r):
        xs = [torch.complex(r.randn(*shape), r.randn(*shape)) for shape in ((2, 2, 5), (4, 2, 3))]
        whole = [x.clone().requires_grad_() for x in xs]
        mine = [shard(x, r.mesh, layout).requires_grad_() for x, layout in zip(xs, ("[x],[],[]", None), strict=True)]
        torch.view_as_real(F.conv1d(*whole)).square().sum().backward()
        torch.view_as_real(F.conv1d(*mine)).square().sum().backward()
        for value, reference in zip(mine, whole, strict=True):
            r.check(value.grad, reference.grad)

    on_mesh("x=3", body, seed)


def test_factors_of_integer_products(seed):
    """torch takes their integer part."""

    def body(r):
        x, a, b = r.randint(9, 4, 6), r.randint(9, 4, 3), r.randint(9, 3, 6)
        for beta, alpha in ((0.2, 1.6), (2.5, 0.9), (1, 3.2)):
            operands = [r.place(v, layout) for v, layout in ((x, "[x],[]"), (a, "[],[x]"), (b, "[x],[]"))]
            got = torch.addmm(*operands, beta=beta, alpha=alpha)
            r.check(got, torch.addmm(x, a, b, beta=beta, alpha=alpha))

    on_mesh("x=2", body, seed)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_outer_products(dtype, seed):
    def body(r):
        xs = [(2 * r.randn(*shape)).to(dtype) for shape in ((4, 6), (4,), (6,))]
        for layouts in (("[x],[]", "[x]", None), ("[],[x]", None, "[x]"), (None, "[x]", None)):
            mine = [shard(x, r.mesh, layout) for x, layout in zip(xs, layouts, strict=True)]
            r.check(torch.addr(*mine), torch.addr(*xs))
            r.check(torch.addr(*mine, beta=0, alpha=2), torch.addr(*xs, beta=0, alpha=2))

    on_mesh("x=2", body, seed)


def test_quantiles_at_sharded_places(seed):
    def body(r):
        x, places = r.randn(5), torch.tensor([0.2, 0.6], dtype=torch.float64)
        r.check(torch.quantile(r.place(x, "[x]"), r.place(places, None)), torch.quantile(x, places))

    on_mesh("x=2", body, seed)

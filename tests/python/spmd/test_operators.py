"""Convolutions and look-ups on Sharded values: results, gradients, layouts, and the operations sent."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from spmd_ranks import P, on_mesh

from torch_overlap.mesh import from_local, shard

CONV2D = ((4, 6, 5, 5), (8, 6, 3, 3), (8,))
GROUPED = ((4, 8, 5, 5), (8, 2, 3, 3), (8,))


def compare(r, function, xs, layouts, expected, kinds):
    """Runs `function` of Sharded values, with the gradients of all of them, and compares with `function` of whole
    ones. `kinds`: the operations sent; None for any."""
    whole = [x.clone().requires_grad_() if x.is_floating_point() else x for x in xs]
    mine = [r.place(x, layout) for x, layout in zip(xs, layouts, strict=True)]
    leaves = [(a, b) for a, b in zip(mine, whole, strict=True) if b.requires_grad]
    for value, _ in leaves:
        value.requires_grad_()
    want = function(*whole)
    with nullcontext() if kinds is None else r.sends(*kinds):
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


PRODUCTS_ADDED = {
    "addmm": ((4, 6), (4, 3), (3, 6)),
    "addmv": ((4,), (4, 3), (3,)),
    "addr": ((4, 6), (4,), (6,)),
    "addbmm": ((4, 6), (2, 4, 3), (2, 3, 6)),
    "baddbmm": ((2, 4, 6), (2, 4, 3), (2, 3, 6)),
}


@pytest.mark.parametrize("alpha", [1, 0.5])
@pytest.mark.parametrize("name", PRODUCTS_ADDED)
def test_products_added_to_zero_times_a_value(name, alpha, seed):
    """Values that are multiplied by beta=0 are ignored, also nan and infinity. Their gradient is zeros, not None."""
    shapes = PRODUCTS_ADDED[name]

    def body(r):
        xs = [r.randn(*shape) for shape in shapes]
        xs[0].view(-1)[1], xs[0].view(-1)[2] = float("nan"), float("inf")
        for first, others in ((0, "shard"), (-1, None), (None, "shard"), (0, "last")):
            dims = [first, *[{"shard": 0, "last": -1}.get(others)] * 2]
            layouts = [
                None if dim is None else P(*[None] * (dim % len(shape)), "x")
                for dim, shape in zip(dims, shapes, strict=True)
            ]
            compare(r, lambda *a: getattr(torch, name)(*a, beta=0, alpha=alpha), xs, layouts, None, None)

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


@pytest.mark.parametrize("layout", ["[x],[]", "[],[x]", "[],[] P{x}"])
def test_a_number_before_a_value(layout, seed):
    """torch.mul takes it as the first argument; the product of a partial value stays partial, by infinity it does
    not."""

    def body(r):
        value = r.randn(4, 6).abs()
        x = r.place(value, layout)
        for number in (2, -0.5, 0, True):
            with r.sends():
                r.check(torch.mul(number, x), torch.mul(number, value), layout)
        r.check(torch.multiply(float("inf"), x), torch.multiply(float("inf"), value))

    on_mesh("x=2", body, seed)


@pytest.mark.parametrize("largest", [True, False])
def test_the_largest_of_equal_elements(largest, seed):
    """topk takes those that torch takes, and sends nothing if the dimension is whole."""

    def body(r):
        x = r.randint(4, 5, 40).double()
        x[1, ::3] = float("nan")
        for k in (0, 1, 7, 40):
            for layout, sent in (("[x],[]", []), ("[],[] I{x}", []), ("[],[x]", ["all_gather x"])):
                operand = r.place(x, layout)
                with r.sends(*sent):
                    got = operand.topk(k, 1, largest)
                for mine, whole in zip(got, x.topk(k, 1, largest), strict=True):
                    r.check(mine, whole, layout if layout == "[x],[]" else "[],[] I{x}", equal_nan=True)
            compare(r, lambda x, k=k: x.topk(k, -1, largest, False).values, [r.randn(5, 40)], ["[x],[]"], "[x],[]", [])
        number = r.randn()
        r.check(shard(number, r.mesh).topk(1).values, number.topk(1).values)

    on_mesh("x=2", body, seed)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_squared_errors_of_bools(reduction, seed):
    """mse_loss takes values of two dtypes, also bools, whose difference is an error."""

    def body(r):
        x, y = r.randn(4, 6), r.randn(4, 6) > 0
        for layout in ("[x],[]", "[],[x]", None):
            for first, second in ((x, y), (y, x), (x, y.to(torch.int32)), (x.float(), x)):
                got = F.mse_loss(shard(first, r.mesh, layout), shard(second, r.mesh, layout), reduction=reduction)
                r.check(got, F.mse_loss(first, second, reduction=reduction))

    on_mesh("x=2", body, seed)

"""Elementwise functions, reductions, softmax and look-ups on sharded operands."""

import copy
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from spmd_ranks import MESHES, P, compare, on_mesh
from torch import nn

from torch_overlap import UnsupportedError
from torch_overlap.mesh import CostModel, Layout, assume_partial, capture, from_local, shard, shard_module
from torch_overlap.testing import torch_is_before


def test_rows_and_columns(seed):
    """T36: each operand is cut along the other's axes; nothing is sent."""

    def body(r):
        compare(r, torch.add, [r.randn(8, 6), r.randn(8, 6)], ["[dp],[] I{tp}", "[],[tp] I{dp}"], [], "[dp],[tp]")
        compare(r, torch.mul, [r.randn(7, 5), r.randn(7, 5)], ["[dp],[] I{tp}", "[],[tp] I{dp}"], [], "[dp],[tp]")

    on_mesh("dp=2,tp=2", body, seed)


@pytest.mark.parametrize(
    ("left", "right", "kind"),
    [
        pytest.param("[dp],[] I{tp}", "[tp],[] I{dp}", "permute", id="T37"),
        pytest.param("[dp],[] I{tp}", "[],[dp] I{tp}", "all_to_all", id="T38"),
        pytest.param("[dp,tp],[]", "[tp,dp],[]", "permute", id="T37-two-axes"),
        pytest.param("[dp],[tp]", "[tp],[dp]", "permute", id="T38-two-axes"),
        pytest.param("[dp],[] I{tp}", "[],[] I{dp,tp}", None, id="B13: sharded and whole"),
    ],
)
def test_operands_that_lie_otherwise(left, right, kind, seed):
    """T37, T38, B13: one of them is resharded, once; the same one every time, and gradients flow back."""

    def body(r):
        layouts = set()
        for function in (torch.add, torch.mul, lambda a, b: a / (1 + b * b)):
            values = [r.randn(8, 6), r.randn(8, 6)]
            out = compare(r, function, values, [left, right])
            layouts.add(str(out.layout))
            x, y = (r.place(v, spec) for v, spec in zip(values, (left, right), strict=True))
            r.sent()
            _ = x + y
            sent = r.sent()
            assert [s.split()[0] for s in sent] == ([kind] if kind else [])
            x, y = x * 1, y * 1  # results, whose reshards are cached; the caller's values may change
            r.sent()
            _ = x + y
            assert len(r.sent()) == len(sent)
            _ = x + y
            assert not r.sent()
            compare(r, function, [r.randn(7, 5), r.randn(7, 5)], [left, right])
        assert len(layouts) == 1

    # By bytes: in the H200 model the smallest all_gather is faster than the smallest permute.
    on_mesh("dp=2,tp=2", body, seed, cost=CostModel.bandwidth_only())


def test_operands_that_are_broadcast(seed):
    """T36: rows, columns and numbers combined with a matrix, with any layouts."""

    def body(r):
        for left in ("[x],[] I{y}", "[x],[y]", "[],[y,x]", "[y],[] P{x}"):
            for shape in ((6,), (8, 1), (1, 6), (1, 1), ()):
                for dims in range(len(shape) + 1):
                    spec = [None] * len(shape)
                    if dims < len(shape) and shape[dims] > 1:
                        spec[dims] = "x"
                    value = r.randn(*shape)
                    operand = shard(value, r.mesh, spec)
                    x = r.randn(8, 6)
                    r.check(r.place(x, left) + operand, x + value)
                    r.check(r.place(x, left) * operand, x * value)

    on_mesh("x=2,y=2", body, seed)


REDUCTIONS = {
    "sum over the sharded dimension": (lambda x: x.sum(0), "[] P{x}"),
    "sum over the other one": (lambda x: x.sum(1), "[x]"),
    "sum with keepdim": (lambda x: x.sum(0, keepdim=True), "[],[] P{x}"),
    "sum of all": (lambda x: x.sum(), "scalar P{x}"),
    "mean over the sharded dimension": (lambda x: x.mean(0), "[] P{x}"),
    "mean over the other one": (lambda x: x.mean(1, keepdim=True), "[x],[]"),
    "mean of all": (lambda x: x.mean(), "scalar P{x}"),
    "amax over the sharded dimension": (lambda x: x.amax(0), "[] P{x:max}"),
    "amax over the other one": (lambda x: x.amax(1), "[x]"),
    "amin over the sharded dimension": (lambda x: x.amin(0), "[] P{x:min}"),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("size", [2, 4])
def test_reductions(name, size, seed):
    """T39, B10: partial with its kind; one all_reduce when the value is needed. Uneven too."""
    function, layout = REDUCTIONS[name]

    def body(r):
        for shape in ((8, 6), (7, 5), (3, 2)):
            x = r.randn(*shape)
            with r.sends():
                y = r.check(function(shard(x, r.mesh, P("x"))), function(x), layout)
            with r.sends("all_reduce x" if y.layout.partial else "all_gather x"):
                torch.testing.assert_close(y.full(), function(x))

    on_mesh(f"x={size}", body, seed)


@pytest.mark.parametrize("text", MESHES)
def test_reductions_on_every_mesh(text, seed):
    """T39: each pair of axes, and the gradients."""

    def body(r):
        a, b, *_ = r.mesh.mesh.axes
        for spec in (P(a, b), P((b, a)), P(None, (a, b)), P(b)):
            layout = str(shard(torch.zeros(7, 9), r.mesh, spec).layout)
            for function in (lambda x: x.sum(), lambda x: x.mean(1, keepdim=True), lambda x: x.var(0)):
                compare(r, function, [r.randn(7, 9)], [layout])

    on_mesh(text, body, seed)


def test_a_sharded_dimension_of_size_1(seed):
    """The first rank has it: elementwise functions stay there, copies are cut; a broadcast needs it on all ranks."""

    def body(r):
        x, row, rows = r.randn(1, 6), r.randn(1, 6), r.randn(8, 6)
        sharded, whole = shard(x, r.mesh, P("x")), shard(row, r.mesh)
        assert sharded.local.shape[0] == (r.index == 0)
        with r.sends():
            y = r.check((sharded * 2).relu() + whole, (x * 2).relu() + row, "[x],[]")
            r.check(y - sharded, (x * 2).relu() + row - x, "[x],[]")
        with r.sends("all_gather x"):  # of the row
            r.check(sharded + shard(rows, r.mesh, P("x")), x + rows, "[x],[]")
        compare(r, lambda a, b: (a * b).tanh(), [x, row], ["[x],[]", "[],[] I{x}"])
        compare(r, lambda a, b: (a * b).tanh(), [x, rows], ["[x],[]", "[x],[]"])

    on_mesh("x=4", body, seed)


def along(function, take=lambda y: y, of=lambda x: x, **options):
    return lambda x, d, k: take(function(of(x), d, keepdim=k, **options))


ALONG = {
    **{f.__name__: along(f) for f in (torch.sum, torch.mean, torch.prod, torch.amax, torch.amin, torch.argmax)},
    **{f.__name__: along(f) for f in (torch.argmin, torch.nansum, torch.logsumexp)},
    **{f.__name__: along(f, correction=0) for f in (torch.var, torch.std)},
    **{f.__name__: along(f, lambda y: y[0]) for f in (torch.max, torch.min, torch.median, torch.mode)},
    **{f.__name__: along(f, of=lambda x: x > 0) for f in (torch.all, torch.any)},
    "count_nonzero": lambda x, d, k: torch.count_nonzero(x, d),
    **{f"norm {p}": lambda x, d, k, p=p: x.norm(p, d, k) for p in (0, 1, 2, 3.5, float("inf"), float("-inf"))},
    "vector_norm": lambda x, d, k: torch.linalg.vector_norm(x, 2, d, k, dtype=torch.float64),
    "norm of complex": lambda x, d, k: torch.complex(x, -x).norm(2, d, k),
    "cumsum": lambda x, d, k: x.cumsum(d),
    "softmax": lambda x, d, k: x.softmax(d),
    "squeeze": lambda x, d, k: x.squeeze(d),
    "sort": lambda x, d, k: x.sort(d)[0],
    "topk": lambda x, d, k: x.topk(1, d)[0],
    "kthvalue": lambda x, d, k: x.kthvalue(1, d, k)[0],
    "unbind": lambda x, d, k: x.unbind(d)[0],
    "select": lambda x, d, k: x.select(d, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONG)
def test_along_a_dimension_of_size_1(name, seed):
    """The result has the shape of torch's, whether the dimension is kept or not."""
    function = ALONG[name]

    def body(r):
        for shape, layout in ((4, 1), "[x],[]"), ((4, 1), "[],[] I{x}"), ((1, 4), "[],[x]"), ((4, 1, 3), "[x],[],[]"):
            x, dim = r.randn(*shape), shape.index(1)
            for keepdim in (False, True):
                found = function(r.place(x, layout), dim - len(shape), keepdim)
                r.check(found, function(x, dim, keepdim), equal_nan=True)

    on_mesh("x=2", body, seed)


ROOTS = {
    "std of all": lambda x: x.std(),
    "std": lambda x: x.std(1),
    "std of rows": lambda x: x.std(0, correction=0, keepdim=True),
    "std_mean": lambda x: torch.std_mean(x, 1)[0],
    **{f"norm {p}": lambda x, p=p: torch.linalg.vector_norm(x, p, 1) for p in (0.5, 1, 1.5, 2, 3)},
    **{f"norm {p} of all": lambda x, p=p: torch.linalg.vector_norm(x, p) for p in (0.5, 2)},
    "normalize": lambda x: F.normalize(x, dim=1),
}


@pytest.mark.parametrize("name", ROOTS)
def test_the_gradient_of_a_root_of_zero(name, seed):
    """It is zero, as torch's, also beside elements with other gradients."""

    def body(r):
        x = r.randn(4, 6)
        x[1] = 1.0 if name.startswith("std") else 0.0
        x[2, ::2] = 0.0
        for value in (x, torch.full_like(x, 1.0 if name.startswith("std") else 0.0)):
            for layout in ("[x],[]", "[],[x]", "[],[] I{x}"):
                compare(r, ROOTS[name], [value], [layout])

    on_mesh("x=2", body, seed)


@pytest.mark.skipif(not torch_is_before("2.15"), reason="torch's shape function is right since 2.15")
def test_a_result_of_another_shape_than_torch_says_raises(seed):
    """The norm without the mend of torch's shape function."""

    def body(r):
        with mock.patch.object(capture, "_vector_norm", None):
            x = shard(r.randn(5, 1), r.mesh)
            with pytest.raises(UnsupportedError, match=r"result of shape \(5, 1\) .* by torch's shape .* got \(5,\)"):
                x.norm(dim=-1)

    on_mesh("x=1", body, seed)  # one thread: the patch is global


def test_a_result_of_another_dtype_than_torch_says_raises(seed):
    """Statistics of a norm in half precision, which are float32 for torch's shape function and not on CPUs."""

    def body(r):
        value = r.randn(4, 6, dtype=torch.float16)
        x = shard(value, r.mesh, P("x"))
        r.check(F.layer_norm(x, (6,)), F.layer_norm(value, (6,)))
        assert torch.native_layer_norm(value, (6,), None, None, 1e-5)[1].dtype is torch.float16
        with pytest.raises(UnsupportedError, match=r"shape \(2, 1\) and torch.float32 by torch's .* torch.float16"):
            torch.native_layer_norm(x, (6,), None, None, 1e-5)

    on_mesh("x=2", body, seed)


# name -> (function of x [3, 4] and an empty list of dimensions)
NO_DIMENSIONS = {
    "any": torch.any,
    "all": torch.all,
    "any keepdim": lambda x, dims: x.any(dims, keepdim=True),
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "count_nonzero": torch.count_nonzero,
    "var": lambda x, dims: x.var(dims),
    "std": lambda x, dims: x.std(dims),
    "norm": lambda x, dims: torch.linalg.vector_norm(x, dim=dims),
    "squeeze": torch.squeeze,
    "flip": torch.flip,
}


@pytest.mark.parametrize("name", NO_DIMENSIONS)
def test_an_empty_list_of_dimensions(name, seed):
    """All dimensions for some functions, none for others."""

    def body(r):
        x = r.randn(3, 4) * r.randn(3, 4).gt(0)
        for layout in ("[],[]", "[x],[]", "[],[x]"):
            for dims in ((), []):
                got, want = NO_DIMENSIONS[name](r.place(x, layout), dims), NO_DIMENSIONS[name](x, dims)
                assert got.dtype == want.dtype
                torch.testing.assert_close(got.full(), want)

    on_mesh("x=2", body, seed)


@pytest.mark.parametrize("kind", [float, np.float64, complex])
def test_the_sign_of_a_zero_among_the_arguments(kind, seed):
    """Arguments that are equal, and are not the same."""

    def body(r):
        x = shard(r.randn(4, 3), r.mesh)
        dtype = torch.complex128 if kind is complex else torch.float64
        for zero in (0.0, -0.0, 0.0):
            value = complex(-1, zero) if kind is complex else kind(zero)
            got = torch.full_like(x, value, dtype=dtype).full()
            assert torch.equal(
                (got.imag if kind is complex else got).signbit(), torch.full((4, 3), str(zero) == "-0.0")
            )

    on_mesh("x=2", body, seed)


def test_attributes_that_code_of_models_reads(seed):
    def body(r):
        x = shard(r.randn(4, 3), r.mesh, P("x"))
        assert not any((x.is_nested, x.is_sparse, x.is_quantized, x.is_meta, x.is_cuda))
        assert x.is_cpu
        assert x.nbytes == 4 * 3 * 8
        whole = x.full()
        r.check(reversed(x), whole.flip(0))
        for number in (whole[2, 1].item(), 7.5):
            assert (number in x) == (number in whole)
        assert x.numpy(force=True).tolist() == whole.tolist()
        shallow = copy.copy(x)
        shallow.requires_grad = True
        assert (shallow.requires_grad, shallow.is_leaf, x.requires_grad) == (True, True, False)
        x.local.mul_(2)
        r.check(shallow, 2 * whole, "[x],[]")
        both = x + 2j * x
        torch.testing.assert_close((both.real + both.imag).full(), 3 * x.full())
        with pytest.raises(
            UnsupportedError, match=r"^new_tensor: expected values of a Sharded, got those of every rank"
        ):
            x.new_tensor([1.0])
        attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
        for parameter in attention.parameters():
            parameter.data = r.randn(*parameter.shape)
        y = r.randn(2, 3, 4)
        want = attention(y, y, y)[0].detach()
        rows = shard(y, r.mesh, P("x"))
        torch.testing.assert_close(shard_module(attention, r.mesh, {})(rows, rows, rows)[0].full().detach(), want)

    on_mesh("x=2", body, seed)


def test_maximum_of_a_pending_sum(seed):
    """B10: the sum is reduced first, as a sum; the maximum of it is not a sum."""

    def body(r):
        x = r.randn(6, 4)
        with r.sends("all_reduce x"):
            y = r.place(x, "[],[] P{x}").amax(0)
        r.check(y, x.amax(0), "[] I{x}")
        z = r.place(x, "[y],[] P{x}").amax(0)
        assert set(z.layout.partial.values()) <= {"max"}
        r.check(z, x.amax(0))
        r.check(r.place(x, "[y],[] I{x}").amax(0), x.amax(0), "[] P{y:max} I{x}")
        peak = r.place(x, "[],[] P{x:max} I{y}")
        with r.sends("all_reduce x"):
            r.check(peak + shard(x, r.mesh), x + x)

    on_mesh("x=2,y=2", body, seed)


@pytest.mark.parametrize(
    ("layout", "along_rows", "along_columns"),
    [
        ("[x],[] I{y}", [], ["all_reduce x"] * 2),
        ("[],[x] I{y}", ["all_reduce x"] * 2, []),
        ("[x],[y]", ["all_reduce y"] * 2, ["all_reduce x"] * 2),
        ("[],[x,y]", ["all_reduce x,y"] * 2, []),
        ("[],[] P{x} I{y}", ["all_reduce x"], ["all_reduce x"]),
        ("[x],[] P{y}", ["all_reduce y"], ["all_reduce y"] + ["all_reduce x"] * 2),
    ],
)
def test_softmax(layout, along_rows, along_columns, seed):
    """B16: over whole rows, with any layout, by dimensions from the front and from the end: partial values are
    reduced once, then the maximum and the sum if the dimension is sharded."""

    def body(r):
        for function in (
            lambda x: x.softmax(-1),
            lambda x: x.softmax(0),
            lambda x: F.log_softmax(x, 1),
            lambda x: torch.logsumexp(x, -1),
            lambda x: x.cumsum(1),
            lambda x: F.layer_norm(x, (6,)),
        ):
            compare(r, function, [r.randn(8, 6)], [layout])
        after = layout.replace(" P{x} I{y}", " I{x,y}").replace("P{y}", "I{y}")
        for dim, sent in ((-1, along_rows), (1, along_rows), (0, along_columns), (-2, along_columns)):
            for function in (torch.softmax, torch.log_softmax):
                x = r.randn(8, 6)
                operand = r.place(x, layout)
                with r.sends(*sent):
                    out = function(operand, dim)
                r.check(out, function(x, dim), after)

    on_mesh("x=2,y=2", body, seed)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_a_table(mode, seed):
    def body(r):
        table = r.randn(8, 4)
        tokens, offsets = r.randint(8, 7), torch.tensor([0, 2, 5])
        leaf = table.clone().requires_grad_()
        expected = F.embedding_bag(tokens, leaf, offsets, mode=mode)
        expected.square().sum().backward()
        for layout in ("[x],[]", "[],[x]", "[],[] I{x}"):
            operand = r.place(table, layout).requires_grad_()
            out = F.embedding_bag(shard(tokens, r.mesh), operand, shard(offsets, r.mesh), mode=mode)
            r.check(out, expected)
            out.square().sum().backward()
            r.check(operand.grad, leaf.grad)

    on_mesh("x=2", body, seed)


@pytest.mark.parametrize("text", MESHES)
def test_a_table_sharded_by_its_rows(text, seed):
    """B15: indices are shifted, those of other ranks masked; the result is partial."""

    def body(r):
        a, b, *_ = r.mesh.mesh.axes
        table, index = r.randn(11, 6), r.randint(11, 4, 3)
        for dims in ((a,), (b,), (a, b)):
            others = [n for n in r.mesh.mesh.axes if n not in dims]
            layout = str(Layout(r.mesh.mesh, [dims, None], invariant=others))
            t = table.clone().requires_grad_()
            expected = F.embedding(index, t)
            c = r.randn(*expected.shape)
            expected.backward(c)
            rows = r.place(table, layout).requires_grad_()
            with r.sends():
                y = F.embedding(shard(index, r.mesh), rows)
            r.check(y, expected, str(Layout(r.mesh.mesh, [None] * 3, dims, others)))
            y.backward(shard(c, r.mesh))
            r.check(rows.grad, t.grad)
            r.check(torch.index_select(rows.detach(), 0, shard(index[:, 0].contiguous(), r.mesh)), table[index[:, 0]])
            r.check(rows.detach()[shard(index, r.mesh)], table[index])
        r.check(F.embedding(shard(index, r.mesh), shard(table, r.mesh, P(None, a))), table[index])
        r.check(F.embedding(shard(index, r.mesh, P(b)), shard(table, r.mesh, P(a))), table[index])

    on_mesh(text, body, seed)


@pytest.mark.parametrize("name", ["exp", "pow", "relu", "cast", "concat"])
def test_the_data_shows_a_wrong_order(name, seed):
    """T57: a reduction after the function, or a term counted twice, gives other numbers; so values are reduced
    before."""
    functions = {"exp": torch.exp, "pow": lambda x: x**2, "relu": torch.relu, "cast": lambda x: x.to(torch.float16)}

    def body(r):
        terms = torch.tensor([[2049.0, -1.5, 0.5], [1.0, 2.5, 0.25]]) if name == "cast" else r.randn(2, 3)
        if name == "relu":
            terms[0, 0], terms[1, 0] = 1.0, -0.5
        y = from_local(terms[r.index].clone(), r.mesh, "[] P{x}")
        if name == "concat":
            whole = r.randn(2)
            r.check(torch.cat([y, shard(whole, r.mesh)]), torch.cat([terms.sum(0), whole]))
            assert not torch.allclose(2 * whole, whole)
            return
        function = functions[name]
        with r.sends("all_reduce x"):
            r.check(function(y), function(terms.sum(0)))
        wrong = function(terms[0]) + function(terms[1])
        assert not torch.allclose(wrong, function(terms.sum(0)), rtol=1e-4)

    on_mesh("x=2", body, seed)


def test_copies_and_terms_are_not_mixed_up(seed):
    """A value that is assumed partial is counted once per rank, and only then."""

    def body(r):
        x = r.randn(4, 3)
        y = assume_partial(shard(x, r.mesh), "x")
        r.check(y, 2 * x, "[],[] P{x} I{y}")
        r.check(y + shard(x, r.mesh), 3 * x)
        r.check(torch.relu(y), (2 * x).relu())
        r.check(assume_partial(shard(x, r.mesh), ("x", "y"), "max"), x, "[],[] P{x:max,y:max}")

    on_mesh("x=2,y=2", body, seed)


LISTS = {
    "rows": ([0, 2],),
    "from the end": ([-1, 3, 0],),
    "columns": (slice(None), [4, 1, 1]),
    "elements": ([0, -1], [1, 2]),
    "broadcast": ([[0], [3]], [1, 2, 5]),
    "two dimensions": ([[0, 1], [2, 3]], slice(1, 5)),
    "last": (..., [1]),
    "a row of it": (1, [1, 2]),
    "a new dimension": (None, [1]),
    "a range": (range(1, 3),),
    "a mask": ([True, False, True, True],),
    "a mask of columns": (..., [True] * 2 + [False] * 4),
    "nothing": ([],),
}


@pytest.mark.parametrize("lies", ["[x],[]", "[],[x]", "[x],[y]", "[],[]", "[],[y] P{x}"])
@pytest.mark.parametrize("name", LISTS)
def test_lists_as_an_index(name, lies, seed):
    index = LISTS[name] if len(LISTS[name]) > 1 else LISTS[name][0]

    def body(r):
        value = r.randn(4, 6)
        expected = value.clone().requires_grad_()
        x = r.place(value, lies).requires_grad_()
        y = r.check(x[index], expected[index])
        c = r.randn(*y.shape)
        (expected[index] * c).sum().backward()
        y.backward(shard(c, r.mesh))
        r.check(x.grad, expected.grad)

    on_mesh("x=2,y=2", body, seed)


def test_lists_that_are_no_index(seed):
    def body(r):
        x, few = shard(r.randn(4, 6), r.mesh, P("x")), shard(r.randn(1, 6), r.mesh, P("x"))
        with pytest.raises(IndexError, match=r"in \[-6, 5\] of dimension 1 with size 6, got -7"):
            few[:, [0, -7]]  # on the rank without rows, too
        for index, message in (
            (([True, False],), r"as many bools as dimension 0 of \(4, 6\) has, got 2"),
            ((0, [True] * 5), "dimension 1 .* got 5"),
            ([1, 4], r"in \[-4, 3\] of dimension 0 with size 4, got 4"),
        ):
            with pytest.raises(IndexError):
                torch.zeros(4, 6)[index]
            with pytest.raises(IndexError, match=message):
                x[index]

    on_mesh("x=2", body, seed)


WITH_EMPTY_PARTS = {
    "batch_norm": lambda x: F.batch_norm(x, x.detach().mean((0, 2)), x.detach().var((0, 2)) + 1),
    "batch_norm, training": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, 2),
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "rms_norm": lambda x: F.rms_norm(x, (5,)),
    "softmax": lambda x: x.softmax(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "sort": lambda x: x.sort(-1).values,
    "argmax": lambda x: x.argmax(-1).double() + x.sum(-1),
    "median": lambda x: x.median(-1).values,
    "logsumexp": lambda x: x.logsumexp(-1),
    "var_mean": lambda x: sum(torch.var_mean(x, -1, correction=0)),
    "norm": lambda x: torch.linalg.vector_norm(x, 2, -1),
    "conv1d": lambda x: F.conv1d(x, x.detach()[:1, :, :2]),
    "glu": lambda x: F.glu(x[..., :4], -1),
    "flip": lambda x: x.flip(-1),
    "tril": lambda x: x.tril(),
}


@pytest.mark.parametrize("name", WITH_EMPTY_PARTS)
def test_ranks_without_elements(name, seed):
    """Some ranks have no part of a batch of 3 or of 2 channels, and participate all the same."""
    function = WITH_EMPTY_PARTS[name]

    def body(r):
        for layout in ("[x],[],[]", "[],[x],[]", "[],[],[x]"):
            r.what = layout
            compare(r, function, [r.randn(3, 2, 5)], [layout])

    on_mesh("x=4", body, seed)


def test_sparse_gradients_of_tables(seed):
    """Those of a replicated table stay on their rank; one that a collective would move is refused before it."""

    def body(r):
        weight, index = r.randn(8, 6), r.randint(8, 4, 2)
        for name, function in (
            ("embedding", lambda w, i: F.embedding(i, w, sparse=True)),
            ("embedding_bag", lambda w, i: F.embedding_bag(i, w, sparse=True, mode="sum")),
            ("gather", lambda w, i: torch.gather(w, 0, i, sparse_grad=True)),
        ):
            leaf = weight.clone().requires_grad_()
            function(leaf, index).square().sum().backward()
            for at in ("[],[]", "[tp],[]"):
                table = r.place(weight, "[],[]").requires_grad_()
                function(table, r.place(index, at)).square().sum().backward()
                assert table.grad.local.is_sparse
                torch.testing.assert_close(table.grad.full().to_dense(), leaf.grad.to_dense())
                for layout in ("[tp],[]", "[],[tp]", "[],[] I{dp}", "[],[] P{tp}"):
                    table = r.place(weight, layout)
                    r.check(function(table, r.place(index, at)), function(weight, index))
                    with pytest.raises(UnsupportedError, match=f"{name}: expected a replicated table for sparse"):
                        function(table.requires_grad_(), r.place(index, at))

    on_mesh("dp=2,tp=2", body, seed)

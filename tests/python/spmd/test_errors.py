"""Invalid uses, and their error messages."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from spmd_ranks import P, on_mesh

import torch_overlap as to
from torch_overlap.mesh import (
    CostModel,
    Layout,
    Mesh,
    all_gather,
    all_reduce,
    all_to_all,
    assume_partial,
    broadcast,
    connect,
    from_local,
    pmean,
    ppermute,
    recipe_of,
    reduce_scatter,
    shard,
    shard_module,
    sharded_parameters,
    to_layout,
    vmap,
)
from torch_overlap.testing import run_ranks


def refused(error, match, function, *args, **kwargs):
    with pytest.raises(error, match=match):
        function(*args, **kwargs)


def test_operands(seed):
    """Plain tensors, values of two meshes, functions in place and random ones."""

    def body(r):
        x = shard(r.randn(4, 6), r.mesh, P("x"))
        other = connect("x=2,y=2", r.mesh.comm, name=f"{r.mesh.name}-other")
        y = shard(r.randn(4, 6), other, P("x"))
        empty = shard(r.randn(4, 0), r.mesh, P("x"))
        for function in (torch.max, torch.min, torch.amax, lambda x: x.amin(1)):
            refused(RuntimeError, "(?i)reduc", function, empty)
        with r.sends():
            message = (
                r"a plain tensor of shape \(4, 6\) beside them. Call shard\(x, mesh\) if .* from_local\(x, mesh, spec\)"
            )
            refused(TypeError, message, torch.add, x, torch.ones(4, 6))
            refused(TypeError, r"\(2, 4\) beside them. Call shard\(x, mesh\)", lambda: torch.ones(2, 4) @ x)
            refused(TypeError, "a plain tensor", lambda: x * torch.ones(6))
            refused(TypeError, "a plain tensor", torch.cat, [x, torch.ones(1, 6)])
            refused(TypeError, "a plain tensor", F.linear, x, torch.ones(3, 6))
            refused(ValueError, "expected operands on one mesh", torch.add, x, y)
            refused(ValueError, "expected operands on one mesh", torch.stack, [x, y])
            refused(ValueError, "expected a Sharded on", shard, x, other, P("x"))
            refused(to.UnsupportedError, "changes no Sharded, got one in place", lambda: x.add_(1))
            refused(to.UnsupportedError, "in place", lambda: x.relu_())
            refused(to.UnsupportedError, "in place", F.relu, x, inplace=True)
            refused(to.UnsupportedError, "random", F.dropout, x, 0.5)
            refused(to.UnsupportedError, "random", torch.bernoulli, x)
            refused(to.UnsupportedError, "random", torch.rand_like, x)
            refused(to.UnsupportedError, "normal_", lambda: x.normal_())
            refused(TypeError, "expected a Sharded among the arguments", recipe_of, torch.relu, 3)
            refused(TypeError, "expected a Sharded, got Tensor", all_reduce, torch.ones(3))
            refused(TypeError, "expected a tensor, got list", shard, [1.0], r.mesh)
            unconnected = (
                r"expected a mesh with communicators, got Mesh\(x=2, y=2\) .*; connect\(mesh, comm\) makes one"
            )
            refused(TypeError, f"^shard: {unconnected}", shard, torch.ones(4), r.mesh.mesh)
            refused(TypeError, f"^from_local: {unconnected}", from_local, torch.ones(4), r.mesh.mesh, P("x"))
            refused(TypeError, f"^shard_module: {unconnected}", shard_module, torch.nn.Linear(2, 2), r.mesh.mesh)
            refused(TypeError, "plain tensor for numpy", np.asarray, x)
            refused(TypeError, r"got ndarray; of an array take x.tolist\(\)", lambda: x[np.array([0, 2])])
            refused(TypeError, "must be Tensor, not numpy.ndarray", torch.add, x, np.ones((4, 6)))
            refused(AttributeError, "no attribute 'no_such_method'", lambda: x.no_such_method())
            refused(RuntimeError, r"expected a scalar, got a Sharded of shape \(4, 6\)", x.backward)
            refused(RuntimeError, "reduction dim", torch.matmul, x, x)
        assert F.dropout(x, 0.5, training=False).shape == x.shape
        refused(TypeError, "expected one or more dimensions", len, x.sum())
        r.check(x + x, 2 * x.full())  # the state is clean
        other.close()

    on_mesh("x=2,y=2", body, seed)


# Look-ups in a table of 8 rows, an index that no rank has, and torch's error.
TAKEN = {
    "embedding": (lambda i, w: F.embedding(i, w), (8, 3), [[0, 7], [2, 8]], IndexError, r"\[0, 7\] .* size 8, got 8"),
    "embedding, negative": (lambda i, w: F.embedding(i, w), (8, 3), [-1], IndexError, "got -1"),
    "index_select": (lambda i, w: w.index_select(0, i), (8, 3), [3, -1], IndexError, r"\[0, 7\] .* got -1"),
    "index_select, 1": (lambda i, w: w.index_select(1, i), (3, 8), [3, 20], RuntimeError, "dimension 1 .* got 20"),
    "gather": (lambda i, w: w.gather(0, i), (8, 3), [[1, 2, 3], [0, 9, 7]], RuntimeError, "got 9"),
    "index": (lambda i, w: w[i], (8, 3), [7, 8, -8], IndexError, r"\[-8, 7\] .* got 8"),
    "index, 1": (lambda i, w: w[:, i], (3, 8), [7, -9], IndexError, r"\[-8, 7\] .* got -9"),
    "cross_entropy": (lambda i, w: F.cross_entropy(w, i), (3, 8), [7, -100, 9], IndexError, "got 9"),
    "nll_loss": (lambda i, w: F.nll_loss(w, i), (3, 8), [7, -3, 1], IndexError, "got -3"),
    "one_hot": (lambda i, w: F.one_hot(i, 8), (8, 3), [[7, 0], [1, 8]], RuntimeError, "index 8 is out of"),
    "one_hot, negative": (lambda i, w: F.one_hot(i, 8), (8, 3), [-1, 3], RuntimeError, "index -1 is out of"),
}


@pytest.mark.parametrize("axes", ["x", ("x", "y")])
@pytest.mark.parametrize("name", TAKEN)
def test_an_index_that_no_rank_has(name, axes, seed):
    """Raises on every rank, as torch does on whole tables; indices that some rank has are valid."""
    function, shape, wrong, kind, message = TAKEN[name]
    wrong = torch.tensor(wrong)
    good = wrong if name.startswith("index,") else wrong.clamp(-100 if "cross" in name else 0)
    good = torch.where((good >= 8) | ((good < -8) & (good != -100)), 5, good)

    def body(r):
        value = r.randn(*shape)
        refused(kind, None, function, wrong, value)
        table = shard(value, r.mesh, P(*[axes if n == 8 else None for n in shape])).anchor()
        refused(kind, f"expected indices in {message}" if "[" in message else message,
                lambda: function(shard(wrong, r.mesh), table).full())  # fmt: skip
        r.check(function(shard(good, r.mesh), table).reshard(None), function(good, value))

    on_mesh("x=2,y=3", body, seed)


def test_one_hot_of_what_is_no_class_number(seed):
    """Refused like torch does."""

    def body(r):
        classes = r.randint(5, 4, 3)
        parts = shard(classes, r.mesh, P("x"))
        r.check(F.one_hot(parts, 5), F.one_hot(classes, 5))
        for value in (classes, parts):
            refused(RuntimeError, "smaller than num_classes", F.one_hot, value, 0)
            for dtype in (torch.int32, torch.float64, torch.bool):
                refused(RuntimeError, "one_hot is only applicable to index tensor", F.one_hot, value.to(dtype), 5)

    on_mesh("x=2", body, seed)


def taken_inside(r):
    table = shard(r.randn(8, 3), r.mesh, P("x")).anchor()

    def taken(i):
        return F.embedding(i, table)

    for run in (torch.compile(taken, backend="aot_eager", fullgraph=True), vmap(taken)):
        good, wrong = (shard(torch.tensor([[3, n]]), r.mesh) for n in (7, 8))
        r.check(run(good).reshard(None), table.full()[torch.tensor([[3, 7]])])
        refused((IndexError, RuntimeError), "out of (range|bounds)", lambda run=run, i=wrong: run(i).full())


def test_an_index_that_no_rank_has_inside_compile_and_vmap(seed):
    on_mesh("x=2", taken_inside, seed, backend="gloo")


def test_what_it_says_of_itself(seed):
    """The tensors without data on which functions are traced do not show."""

    def body(r):
        x = shard(r.randn(4, 6), r.mesh, P("x"))
        assert (x.get_device(), x.type()) == (-1, "torch.DoubleTensor")
        r.check(x.type(torch.float32), x.full().float())
        r.check(x.cpu(), x.full(), "[x],[]")
        refused(to.UnsupportedError, "expected the device of the operands, cpu, got cuda", x.cuda)
        for name in ("data_ptr", "untyped_storage", "is_shared"):
            message = f"{name}: expected a tensor with memory of its own, got a Sharded; ask its .local"
            refused(to.UnsupportedError, message, getattr(x, name))
        refused(to.UnsupportedError, "^Parameter: expected a plain tensor, got a Sharded; call shard_module",
                torch.nn.Parameter, x)  # fmt: skip
        classes = shard(torch.tensor([1, 2, 1]), r.mesh)
        for name, function in {
            "equal": lambda: torch.equal(x, x),
            "unique": lambda: torch.unique(x),
            "bincount": lambda: torch.bincount(classes),
            "masked_select": lambda: x.masked_select(x > 0),
        }.items():
            refused(to.UnsupportedError, f"{name}: expected a function .* reads elements .* gathered", function)

    on_mesh("x=2", body, seed)


def test_assignment(seed):
    """x[0] = 1 and x += 1 are refused: one would change only a part, the other would only appear to change x."""

    def body(r):
        value = r.randn(4, 6)
        x = shard(value.clone(), r.mesh, P("x"))
        y = x * 2
        with r.sends():
            for function in (
                lambda: y.detach_(),
                lambda: torch.detach_(y),
                lambda: x.apply_(lambda a: a + 1),
                lambda: x.map_(x, lambda a, b: a * b),
                lambda: x.map2_(x, x, lambda a, b, c: a),
                lambda: x.t_(),
                lambda: x.share_memory_(),
                lambda: torch.nn.init.zeros_(x),
            ):
                refused(to.UnsupportedError, "expected a function that changes no Sharded, got one in place", function)
        with pytest.raises(to.UnsupportedError, match="setitem: expected a function that changes no Sharded"):
            x[0] = 1.0
        with pytest.raises(to.UnsupportedError, match="iadd: expected a function that changes no Sharded"):
            x += 1
        with pytest.raises(to.UnsupportedError, match="irshift: expected a function that changes no Sharded"):
            x >>= 1
        r.check(x, value, "[x],[]")

    on_mesh("x=2", body, seed)


def test_pending_values_leave_only_as_what_they_are(seed):
    """to_local of a partial value."""

    def body(r):
        y = r.place(r.randn(4, 6), "[x],[] P{y}")
        with r.sends():
            refused(to.StateError, r"not partial, got \[x\],\[\] P\{y\}; reshard it, or take .local", y.to_local)
        assert torch.equal(y.reshard(P("x")).to_local(), y.reshard(P("x")).local)

    on_mesh("x=2,y=2", body, seed)


def test_local_shapes(seed):
    """from_local: parts whose shape differs from the layout's."""

    def body(r):
        local = torch.ones(3, 4)
        refused(ValueError, r"from_local: expected \(4, 4\), this rank's part of \(8, 4\) under \[x\],\[\]",
                from_local, local, r.mesh, "[x],[]", (8, 4))  # fmt: skip
        refused(ValueError, r"expected \(2, 4\)", from_local, local, r.mesh, P(("x", "y")), (8, 4))
        refused(ValueError, "at most 2 entries", from_local, local, r.mesh, P("x", None, None))
        assert from_local(local, r.mesh, P("x")).shape == (6, 4)
        refused(ValueError, "layout of 1 dimensions", from_local, torch.ones(3), r.mesh, "[x],[]")
        x = torch.ones(5, 4)
        x = from_local(x[: (r.mesh.coordinate("x") and 2) or 3], r.mesh, P("x"), (5, 4))
        r.check(x, torch.ones(5, 4))

    on_mesh("x=2,y=2", body, seed)


def test_axes_and_dimensions(seed):
    """Unknown axes, axes twice, dimensions out of range, wrong numbers."""

    def body(r):
        x = shard(r.randn(4, 8), r.mesh, P("x"))
        with r.sends():
            for function in (
                lambda: shard(r.randn(4), r.mesh, P("z")),
                lambda: x.reshard(P("z")),
                lambda: all_reduce(x, "sum", "z"),
                lambda: pmean(x, "z"),
                lambda: reduce_scatter(x, 0, "z"),
                lambda: ppermute(x, [(0, 1)], "z"),
                lambda: broadcast(x, 0, "z"),
                lambda: assume_partial(x, "z"),
                lambda: r.mesh.group_comm("z"),
                lambda: r.mesh.coordinate("z"),
            ):
                refused(ValueError, r"one of the axes \[x, y\], got 'z'", function)
            refused(ValueError, "every axis once", x.reshard, P("x", "x"))
            refused(ValueError, "each axis once", all_reduce, x, "sum", ["y", "y"])
            refused(ValueError, "at most 2 entries", x.reshard, P("x", None, "y"))
            refused(ValueError, r"expected axis in \[-2, 1\] for \(4, 8\), got 2", all_gather, x, 2)
            refused(ValueError, r"expected split_axis in", all_to_all, x, -3, 0)
            refused(TypeError, "expected an int as axis, got str", all_gather, x, "x")
            refused(ValueError, "expected two dimensions", all_to_all, x, 1, -1)
            refused(ValueError, "expected a reduce_op of", all_reduce, x, "median", "y")
            refused(ValueError, "expected reduce_axes on", all_reduce, x)
            refused(ValueError, "at most once as a target", ppermute, x, [(0, 1), (1, 1)], "x")
            refused(ValueError, "at most once as a source", ppermute, x, [(0, 1), (0, 0)], "x")
            refused(ValueError, "below 2", ppermute, x, [(0, 2)], "x")
            refused(ValueError, "a source for each of the 4 places", ppermute, x, [(0, 1)])
            refused(ValueError, "a root below 2", broadcast, x, 2, "y")
            refused(ValueError, "along which local tensors are copies", broadcast, x, 0, "x")
            refused(ValueError, "along which the value is whole", assume_partial, x, "x")
            refused(ValueError, "got 'median'", assume_partial, x, "y", "median")
            refused(ValueError, "one of sharded, replicated and partial", shard, r.randn(4), r.mesh, P("x"), ["x"])
            refused(ValueError, "one of sharded, replicated and partial", shard, r.randn(4), r.mesh, None, ["x"], ["x"])
            pending = r.place(r.randn(4, 8), "[x],[] P{y:max}")
            refused(ValueError, "partial as 'max'", all_reduce, pending, "sum", "y")
            refused(ValueError, "not partial over", pmean, pending, "x")
            mixed = Layout(r.mesh.mesh, [None, None], {"x": "sum", "y": "avg"})
            refused(ValueError, "one reduction", reduce_scatter, r.place(r.randn(4, 8), mixed), 0)
            uneven = shard(r.randn(5, 8), r.mesh, P("x"))
            refused(ValueError, "parts of equal size to reduce", all_reduce, uneven, "sum", "x")
            refused(ValueError, "local tensors of one shape", ppermute, uneven, [(0, 1), (1, 0)], "x")
            nested = shard(r.randn(8, 8), r.mesh, P(("x", "y")))
            refused(ValueError, "the last axes of dimension 0", all_reduce, nested, "sum", "x")
            refused(ValueError, "expected a layout on", to_layout, Layout(Mesh({"x": 4}), [None]), r.mesh.mesh, 1)

    on_mesh("x=2,y=2", body, seed)


def test_connect():
    """Meshes of other ranks, names in use, sets of unknown axes."""

    def body(comm):
        refused(ValueError, "expected a mesh of the 4 ranks of .*, got .*split the communicator", connect, "x=2", comm)
        refused(ValueError, "expected a mesh of the 4 ranks", connect, Mesh({"x": 4}, [1, 2, 3, 4]), comm)
        refused(ValueError, "name that is not empty", connect, {"x": 4}, comm, name="")
        refused(ValueError, r"one of the axes \[x\], got 'z'", connect, "x=4", comm, sets=["z"])
        refused(TypeError, None, connect, 4, comm)
        refused(TypeError, None, connect, "x=4", "world")
        mesh = connect("x=2,y=2", comm, name="errors")
        refused(ValueError, "a name that no live mesh has, got 'errors'", connect, "x=4", comm, name="errors")
        second = connect("x=4", comm, name="errors2", cost=CostModel.bandwidth_only())
        assert shard(torch.ones(4), second, P("x")).full().sum() == 4
        second.close()
        mesh.close()
        mesh.close()

    run_ranks(body, 4, backend="local")


def test_use_after_close():
    """A closed mesh raises; the communicator that it was made of stays usable."""

    def body(comm):
        mesh = connect("x=2,y=2", comm, name="closed")
        x = shard(torch.ones(4, 4), mesh, P("x"))
        mesh.close()
        refused(to.StateError, "expected an open mesh, got one that was closed", mesh.group_comm, "x")
        refused(to.StateError, "expected an open mesh", mesh.prepare, "x")
        refused(to.StateError, "expected an open mesh", broadcast, x, 0, "y")
        refused(to.StateError, "expected an open mesh", ppermute, x, [(0, 1), (1, 0)], "x")
        y = torch.ones(2)
        comm.all_reduce(y, to.ReduceOp.SUM, False)  # from here on all meshes of this name are closed
        assert y[0] == 4
        refused(to.Error, "expected (an open mesh|the name of a connected mesh)", x.full)

    run_ranks(body, 4, backend="local")


def test_sets_that_were_not_declared():
    """`sets` lists the communicators to create; others are split off at their first use, or prepared."""

    def body(comm):
        mesh = connect("x=2,y=2,z=2", comm, name="sets", sets=["x", "y,z"])
        assert mesh.group_comm("x").get_size() == 2
        assert mesh.group_comm(("z", "y")).get_size() == 4
        x = shard(torch.ones(8, 2), mesh, P("z"))
        assert x.full().sum() == 16
        assert mesh.group_comm("z").get_size() == 2
        mesh.prepare("x,y", ("x", "z"))
        assert mesh.group_comm(("x", "y")).get_size() == 4
        one = connect("a=1,b=8", comm, name="one")
        assert one.group_comm("a") is None
        assert one.group_comm("b").get_name() == comm.get_name()
        one.close()
        mesh.close()

    run_ranks(body, 8, backend="local")


def test_a_slice_needs_no_communicator():
    """A reshard that sends nothing splits nothing, also over several axes; a gradient that is gathered does."""

    def body(comm):
        mesh = connect("x=2,y=2,z=2", comm, name="slices", sets=["x"])
        split = []
        comm.register_pre_hook(lambda name, *_: split.append(name.name))
        whole = torch.arange(64.0).reshape(8, 8)
        y = shard(whole, mesh, P(("y", "z")))
        assert y.local.tolist() == whole[y.layout.offsets((8, 8), mesh.rank)[0] :][:2].tolist()
        y.local.add_(1)
        assert whole.sum() == 63 * 32  # a part of its own
        assert shard(whole, mesh, Layout.parse(mesh.mesh, "[z],[]")).local.shape == (4, 8)
        layer = shard_module(torch.nn.Linear(8, 8), mesh, {"weight": P("z", "y"), "bias": P(("z", "y"))})
        assert sharded_parameters(layer)["weight"].local.shape == (4, 4)
        assert not split
        x = shard(whole.clone().requires_grad_(), mesh, P("z"))
        assert x.local.shape == (4, 8)
        assert split == ["split"]
        mesh.close()

    run_ranks(body, 8, backend="local")

"""Random meshes, layouts, shapes and types: results agree with slicing, and with the functions of whole tensors.

500 draws per property; `make stress` runs 10,000 (TORCH_OVERLAP_STRESS=20). TEST_SEED repeats a run.
"""

import math
import random
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from spmd_ranks import draws, on_mesh, random_layout

from torch_overlap import UnsupportedError
from torch_overlap.mesh import DimSpec, Layout, Mesh, P, ShardingSpec, from_local, shard, to_layout
from torch_overlap.mesh.dtensor import layout_from_placements, placements_of

PER_MESH = 25  # draws per mesh: its communicators take time to make


def random_mesh(draw: random.Random) -> Mesh:
    while True:
        sizes = [draw.choice((1, 2, 2, 2, 3, 4)) for _ in range(draw.randint(1, 3))]
        if 2 <= math.prod(sizes) <= 8:
            break
    ranks = list(range(math.prod(sizes)))
    draw.shuffle(ranks)
    return Mesh({f"m{i}": size for i, size in enumerate(sizes)}, ranks)


def many(seed, body):
    """Runs `body` on a new mesh for each group of draws, until the number of draws is reached."""
    draw = random.Random(seed)
    for _ in range(draws() // PER_MESH):
        on_mesh(random_mesh(draw), body, draw.randrange(1 << 30))


@contextmanager
def told(what):
    """Adds the case to the message of a failure."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {error}") from error


TYPES = (torch.float64, torch.float32, torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.complex64)


@pytest.mark.stress
def test_reshard_is_slicing(seed):
    """Reshards tensors of every type, even and uneven; integers partial as well."""

    def body(r):
        mesh = r.mesh.mesh
        for _ in range(PER_MESH):
            shape = [r.draw.randint(1, 11) for _ in range(r.draw.randint(1, 3))]
            dtype = r.draw.choice(TYPES)
            kinds = ("sum", "max", "min") if dtype in (torch.float64, torch.int64, torch.int32) else ()
            kinds = r.draw.sample(kinds, min(len(kinds), 1))
            before, after = (random_layout(r.draw, mesh, len(shape), kinds=kinds) for _ in range(2))
            x = r.randint(1000, *shape)
            x = (x % 2 == 0) if dtype is torch.bool else x.to(dtype)
            y = r.place(x, before) if dtype is not torch.float64 or kinds else shard(x, r.mesh, before)
            r.check(y, x, str(before))
            r.check(y.reshard(after), x, str(after))
            if not set(after.partial):
                assert torch.equal(from_local(y.local, r.mesh, before, shape).full(), x) or before.partial

    many(seed, body)


# name -> (the function, shapes of its operands for sizes a, b, c)
OPERATORS = {
    "add": (torch.add, lambda a, b, c: [(a, b), (a, b)]),
    "add, broadcast": (lambda x, y: x + y, lambda a, b, c: [(a, b, c), (b, 1)]),
    "mul": (lambda x, y: x * y, lambda a, b, c: [(a, b), (b,)]),
    "div": (lambda x, y: x / (2 + y * y), lambda a, b, c: [(a, b), (a, 1)]),
    "tanh": (torch.tanh, lambda a, b, c: [(a, b, c)]),
    "gelu": (F.gelu, lambda a, b, c: [(a, b)]),
    "where": (lambda x, y: torch.where(x > 0, x, y), lambda a, b, c: [(a, b), (a, b)]),
    "matmul": (torch.matmul, lambda a, b, c: [(a, b), (b, c)]),
    "matmul, batch": (torch.matmul, lambda a, b, c: [(c, a, b), (c, b, a)]),
    "matmul, vector": (torch.matmul, lambda a, b, c: [(a, b), (b,)]),
    "linear": (F.linear, lambda a, b, c: [(a, b), (c, b), (c,)]),
    "linear of three dimensions": (F.linear, lambda a, b, c: [(a, c, b), (c, b)]),
    "einsum": (lambda x, y: torch.einsum("abc,cb->a", x, y), lambda a, b, c: [(a, b, c), (c, b)]),
    "sum": (lambda x: x.sum(0), lambda a, b, c: [(a, b)]),
    "sum of all": (torch.sum, lambda a, b, c: [(a, b)]),
    "mean": (lambda x: x.mean((0, 2), keepdim=True), lambda a, b, c: [(a, b, c)]),
    "amax": (lambda x: x.amax(-1), lambda a, b, c: [(a, b)]),
    "softmax": (lambda x: x.softmax(-1), lambda a, b, c: [(a, b, c)]),
    "log_softmax": (lambda x: F.log_softmax(x, 0), lambda a, b, c: [(a, b)]),
    "layer_norm": (lambda x, w: F.layer_norm(x, w.shape, w), lambda a, b, c: [(a, b), (b,)]),
    "transpose": (lambda x: x.transpose(0, 2), lambda a, b, c: [(a, b, c)]),
    "reshape": (lambda x: x.reshape(x.shape[0] * x.shape[1], -1), lambda a, b, c: [(a, b, c)]),
    "unflatten": (lambda x: x.unflatten(0, (2, -1)), lambda a, b, c: [(2 * a, b)]),
    "cat": (lambda x, y: torch.cat([x, y], 1), lambda a, b, c: [(a, b), (a, c)]),
    "stack": (lambda x, y: torch.stack([x, y], 1), lambda a, b, c: [(a, b), (a, b)]),
    "slice": (lambda x: x[1:, : max(1, x.shape[1] // 2)], lambda a, b, c: [(a + 1, b)]),
    "flip": (lambda x: x.flip(0), lambda a, b, c: [(a, b)]),
    "cumsum": (lambda x: x.cumsum(1), lambda a, b, c: [(a, b)]),
    "var": (lambda x: x.var(0, correction=0), lambda a, b, c: [(a, b)]),
    "mse_loss": (F.mse_loss, lambda a, b, c: [(a, b), (a, b)]),
    "attention": (
        F.scaled_dot_product_attention,
        lambda a, b, c: [(2, a, 2 * b, 4), (2, a, c, 4), (2, a, c, 4)],
    ),
}


@pytest.mark.stress
def test_functions_of_random_layouts(seed):
    """Value, local shapes and gradients of ordinary functions are those of the whole tensors."""

    def body(r):
        for _ in range(PER_MESH):
            name = r.draw.choice(list(OPERATORS))
            function, shapes = OPERATORS[name]
            sizes = [r.draw.randint(1, 9) for _ in range(3)]
            values = [r.randn(*shape) for shape in shapes(*sizes)]
            layouts = [random_layout(r.draw, r.mesh.mesh, x.dim()) for x in values]
            leaves = [x.clone().requires_grad_() for x in values]
            expected = function(*leaves)
            c = r.randn(*expected.shape)
            expected.backward(c)
            operands = [r.place(x, y).requires_grad_() for x, y in zip(values, layouts, strict=True)]
            r.what = f"{name} of {operands}"
            with told(r.what):
                out = r.check(function(*operands), expected)
                if "max" in out.layout.partial.values():
                    continue  # it has no gradient
                out.backward(r.place(c, random_layout(r.draw, r.mesh.mesh, c.dim())))
                for operand, leaf in zip(operands, leaves, strict=True):
                    r.check(operand.grad, leaf.grad, rtol=1e-6, atol=1e-6)

    many(seed, body)


@pytest.mark.stress
def test_the_text_of_a_layout_is_the_layout(seed):
    """Spec -> text -> spec, and through P, ShardingSpec and the placements of DTensor."""
    draw = random.Random(seed)
    for _ in range(draws()):
        mesh = random_mesh(draw)
        dims = draw.randint(0, 4)
        layout = random_layout(draw, mesh, dims, kinds=("sum", "avg") if draw.random() < 0.5 else ("max",))
        assert Layout.parse(mesh, str(layout)) == layout
        assert str(Layout.parse(mesh, str(layout))) == str(layout)
        assert hash(Layout.parse(mesh, str(layout))) == hash(layout)
        assert to_layout(str(layout), mesh, dims) == layout
        plain = layout.with_partial(None).with_invariant(None)
        assert to_layout(P(*plain.dims), mesh, dims) == plain
        assert to_layout(ShardingSpec(mesh, tuple(map(DimSpec, plain.dims))), mesh, dims) == plain
        replicated = layout.with_invariant(None)
        in_order = Layout(mesh, [sorted(axes, key=list(mesh.axes).index) for axes in replicated.dims], layout.partial)
        assert layout_from_placements(mesh, placements_of(in_order), dims) == in_order
        if in_order != replicated:
            with pytest.raises(UnsupportedError, match="in the order of the mesh"):
                placements_of(replicated)
        parsed = Mesh.parse(",".join(f"{name}={size}" for name, size in mesh.axes.items()))
        assert parsed.axes == mesh.axes

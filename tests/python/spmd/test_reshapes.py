"""Reshapes of sharded dimensions: parts stay in place whenever the result has a layout for it."""

import pytest
import torch
from spmd_ranks import P, on_mesh

from torch_overlap.mesh import Layout, shard

CASES = [
    pytest.param("x=4,y=4", (4, 4), "[x],[y]", (16,), "[x,y]", [], id="T40: merge"),
    pytest.param("x=4,y=4", (16,), "[x,y]", (4, 4), "[x],[y]", [], id="T41: split"),
    pytest.param("x=2,y=2", (8, 6), "[x],[] I{y}", (48,), "[x] I{y}", [], id="T40: merge, major"),
    pytest.param("x=2", (8, 32), "[x],[]", (2, 4, 32), "[x],[],[]", [], id="T42: major"),
    pytest.param("x=2", (8, 32), "[],[x]", (2, 4, 32), "[],[],[x]", [], id="T42: beside"),
    pytest.param("x=2", (8, 32), "[],[x]", (256,), None, ["all_to_all", "all_gather"], id="T42: merge, minor"),
    pytest.param("x=2", (7, 2), "[x],[]", (14,), None, ["all_gather"], id="B19: uneven"),
    pytest.param("x=2", (7, 2, 3), "[x],[],[]", (7, 6), "[x],[]", [], id="B19: uneven, beside"),
    pytest.param("x=2,y=2", (8, 6), "[y],[] P{x}", (48,), "[y] P{x}", [], id="B19: partial"),
    pytest.param("x=2", (6, 4), "[x],[]", (4, 6), "[x],[]", [], id="B19: a common factor"),
    pytest.param("x=2", (1, 8, 1, 3), "[],[x],[],[]", (8, 3), "[x],[]", [], id="squeezed"),
]


@pytest.mark.parametrize(("mesh", "shape", "before", "target", "after", "kinds"), CASES)
def test_reshape(mesh, shape, before, target, after, kinds, seed):
    """T40-T42, B19: nothing is sent if parts can stay, otherwise one collective."""

    def body(r):
        for function in (lambda x: x.reshape(target), lambda x: torch.reshape(x, target), lambda x: x.view(target)):
            x = r.randn(*shape)
            leaf = x.clone().requires_grad_()
            function(leaf).pow(2).sum().backward()
            y = r.place(x, before).requires_grad_()
            r.sent()
            z = r.check(function(y), x.reshape(target), after)
            sent = [kind.split()[0] for kind in r.sent()]
            assert len(sent) == bool(kinds)
            assert set(sent) <= set(kinds)
            z.pow(2).sum().backward()
            r.check(y.grad, leaf.grad)

    on_mesh(mesh, body, seed)


def test_one_axis_over_two_dimensions(seed):
    """T42: 4 parts as 2 x 2: an axis is cut in two."""

    def body(r):
        x = r.randn(4, 3)
        with r.sends():
            y = r.check(shard(x, r.mesh, P("x")).reshape(2, 2, 3), x.view(2, 2, 3), "[x:(1)2],[x:(2)2],[]")
            r.check(torch.relu(y), x.view(2, 2, 3).relu(), "[x:(1)2],[x:(2)2],[]")
            r.check(y.reshape(4, 3), x)
        with r.sends("all_gather x:(2)2"):
            r.check(y.reshard("[x:(1)2],[],[] I{x:(2)2}"), x.view(2, 2, 3))
        r.check(y.sum(1), x.view(2, 2, 3).sum(1), "[x:(1)2],[] P{x:(2)2}")
        torch.testing.assert_close(y.full(), x.view(2, 2, 3), rtol=0, atol=0)

    on_mesh("x=4", body, seed, sub_axes=("x:(1)2", "x:(2)2"))


MOVES = {
    "T": lambda x: x.T,
    "permute": lambda x: x.permute(1, 0),
    "transpose": lambda x: torch.transpose(x, 0, -1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(0, (4, -1)),
    "expand": lambda x: x.unsqueeze(0).expand(3, -1, -1),
    "flip": lambda x: x.flip(1),
    "chunk": lambda x: x.chunk(3, 1)[1],
    "split": lambda x: x.split([2, 4], 1)[1],
    "unbind": lambda x: x.unbind(1)[3],
    "slice": lambda x: x[:, 1:5:2],
    "row": lambda x: x[3],
    "stack": lambda x: torch.stack([x, x + 1], -1),
    "cat": lambda x: torch.cat([x, 2 * x, x[:2]]),
    "where": lambda x: torch.where(x > 0, x, x * x),
    "tril": lambda x: x.tril(),
    "repeat": lambda x: x.repeat(2, 1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
}


@pytest.mark.parametrize("name", MOVES)
def test_functions_that_move_elements(name, seed):
    """T40-T42, B19: the value and the gradient, with any layout of the operand."""

    def body(r):
        function = MOVES[name]
        for before in ("[x],[] I{y}", "[],[y] I{x}", "[x],[y]", "[y,x],[]", "[x],[] P{y}", "[],[] P{x,y}"):
            x = r.randn(8, 6)
            leaf = x.clone().requires_grad_()
            expected = function(leaf)
            c = r.randn(*expected.shape)
            expected.backward(c)
            y = r.place(x, before).requires_grad_()
            z = r.check(function(y), expected)
            z.backward(shard(c, r.mesh))
            r.check(y.grad, leaf.grad, str(Layout.parse(r.mesh.mesh, str(y.grad.layout))))

    on_mesh("x=2,y=2", body, seed)

"""reshard: every pair of layouts by its plan; only the necessary operations are sent."""

import pytest
import torch
from spmd_ranks import MESHES, P, on_mesh

from torch_overlap.mesh import CostModel, Layout, Mesh, reshard, shard

BYTES = CostModel.bandwidth_only()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("mesh", "before", "after", "sent"),
    [
        pytest.param("x=2,y=2", "[x],[] I{y}", "[x],[] I{y}", [], id="T22"),
        pytest.param("x=2,y=4", "[],[] I{x,y}", "[],[] I{x,y}", [], id="T22-whole"),
        pytest.param("x=2,y=2", "[],[] I{x,y}", "[x],[y]", [], id="T23"),
        pytest.param("x=2,y=4", "[],[]", "[x,y],[]", [], id="T23-one-dimension"),
        pytest.param("x=2,y=2", "[x],[y]", "[],[] I{x,y}", ["all_gather", "all_gather"], id="T24"),
        pytest.param("x=2,y=4", "[x,y],[]", "[],[] I{x,y}", ["all_gather"], id="T24-one-dimension"),
        pytest.param("dp=2,tp=2", "[dp],[] I{tp}", "[],[tp] I{dp}", ["all_gather"], id="T25"),
        pytest.param("dp=2,tp=4", "[dp],[] I{tp}", "[],[dp] I{tp}", ["all_to_all"], id="T25-one-axis"),
        pytest.param("x=2,y=2", "[x],[y]", "[y],[x]", ["permute"], id="T26"),
        pytest.param("x=2,y=2", "[x,y],[]", "[y,x],[]", ["permute"], id="B4"),
        pytest.param("x=2,y=4", "[x,y],[]", "[y,x],[]", ["permute"], id="B4-two-sizes"),
        pytest.param("x=2,y=2,z=4", "[y,x],[z]", "[z],[x,y]", ["permute"], id="T26-two-sizes"),
        pytest.param("x=4,y=2,z=2", "[x],[] I{y,z}", "[y,z],[]", ["permute"], id="other axes"),
        pytest.param("x=2,y=2", "[x],[] P{y}", "[],[] I{x,y}", ["reduce_scatter", "all_gather"], id="B8"),
        pytest.param("x=2,y=2", "[],[] P{x,y}", "[],[] I{x,y}", ["all_reduce"], id="B9"),
        pytest.param("x=2,y=2", "[],[] P{x} I{y}", "[x],[] I{y}", ["reduce_scatter"], id="P to S"),
        pytest.param("x=2,y=2", "[],[] P{x:max} I{y}", "[],[] I{x,y}", ["all_reduce"], id="maximum"),
        pytest.param("x=2,y=2", "[],[] I{x,y}", "[],[] P{x} I{y}", [], id="I to P"),
        pytest.param("x=2,y=2", "[],[] I{x,y}", "[],[]", [], id="I to R"),
        pytest.param("x=2,y=2", "[],[]", "[],[] I{x,y}", [], id="R to I"),
    ],
)
def test_a_pair_of_layouts(mesh, before, after, sent, seed):
    """T22-T26, B4, B8, B9: the collectives of the plan are those that run."""

    def body(r):
        x = r.randn(8, 16)
        y = r.check(r.place(x, before), x, before)
        r.sent()
        z = r.check(reshard(y, after), x, after)
        real = r.sent()
        assert [kind.split()[0] for kind in real] == sent
        plan = r.mesh.plan(y.layout, z.layout, x.shape, 8)
        assert [step.kind for step in plan.steps if step.sends] == [kind.split()[0] for kind in real]
        made = y * 1  # the reshards of a result are cached
        first = made.reshard(after)
        r.sent()
        assert made.reshard(after).local is first.local
        assert not r.sent()
        for uneven in ((7, 5), (1, 3), (2, 1)):
            x = r.randn(*uneven)
            r.check(reshard(r.place(x, before), after), x, after)

    on_mesh(mesh, body, seed, cost=BYTES)


HANDED_OUT = {
    "full": lambda y: y.full(),
    "reshard": lambda y: y.reshard(P(None, "x")).local,
    "a part": lambda y: y.full()[1:, :2],
    "detached": lambda y: y.full().detach(),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("before", ["[x],[]", "[],[] P{x}", "[],[x] P{y}"])
@pytest.mark.parametrize("name", HANDED_OUT)
def test_what_was_handed_out_may_be_changed(name, before, grad, seed):
    """The reshards of a result are cached; after a change in place the cache is not used."""

    def body(r):
        x = r.randn(8, 6)
        with torch.set_grad_enabled(grad):
            y = r.place(x, before).requires_grad_(grad) * 1
            moved = HANDED_OUT[name](y)
            moved.zero_()
            r.check(y, x, before)
            torch.testing.assert_close(y.full(), x)
            for after in ("[],[x]", "[x],[]", "[],[]", "[y],[] I{x}"):
                r.check(y.reshard(after), x, after)
            r.check(y.exp(), x.exp())

    on_mesh("x=2,y=2", body, seed)


def test_a_sum_that_was_changed_is_not_moved_on(seed):
    def body(r):
        a, b = r.randn(4, 8), r.randn(8, 6)
        y = r.place(a, "[],[x]") @ r.place(b, "[x],[]")
        y.full().zero_()
        r.check(y.reshard("[x],[]"), a @ b, "[x],[]")
        with r.sends():
            r.check(y.reshard("[x],[]"), a @ b, "[x],[]")

    on_mesh("x=2", body, seed)


def test_exchanged_axes(seed):
    """T26: device 1 has rows 2:4 and columns 0:2."""

    def body(r):
        x = r.randn(4, 4)
        y = shard(x, r.mesh, P("x", "y")).reshard(P("y", "x"))
        if r.index == 1:
            assert torch.equal(y.local, x[2:4, 0:2])
        r.check(y, x, "[y],[x]")

    on_mesh("x=2,y=2", body, seed)


@pytest.mark.parametrize("text", MESHES)
def test_every_mesh_goes_everywhere(text, seed):
    """T22-T26 on all meshes, with ranks in another order, even and uneven."""
    plain = Mesh.parse(text)
    ranks = plain.ranks[::-1]

    def body(r):
        a, b, *_ = r.mesh.mesh.axes
        specs = [None, P(a), P(b), P(a, b), P(b, a), P((a, b)), P((b, a)), P(None, (a, b)), P(None, b)]
        for shape in ((12, 8), (7, 5)):
            x = r.randn(*shape)
            for i, before in enumerate(specs):
                y = shard(x, r.mesh, before)
                for after in [*r.draw.sample(specs, 4), specs[i - 1]]:
                    r.check(y.reshard(after), x)

    on_mesh(Mesh(plain.axes, ranks), body, seed)


def test_the_longer_meshes_have_what_they_need(seed):
    """A mesh of four axes has a communicator for each and for all; others are split off at their first use."""

    def body(r):
        x = r.randn(8, 8)
        y = shard(x, r.mesh, P(("a", "b"), ("c", "d")))
        r.check(y.reshard(P(("c", "d"), ("a", "b"))), x, "[c,d],[a,b]")
        r.check(y.reshard(None), x, "[],[] I{a,b,c,d}")
        r.check(y.reshard("[],[] I{a,b,c,d}"), x)
        assert Layout.parse(r.mesh.mesh, "[a],[]").dims == (("a",), ())

    on_mesh("a=2,b=2,c=2,d=2", body, seed)

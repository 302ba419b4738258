"""Plain modules on a mesh: only their parameters get layouts; values and gradients are those of one rank."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from plain_block import LAYOUTS, Block, loss_of
from torch import Tensor, nn

from torch_overlap import InvalidTypeError, InvalidValueError, UnsupportedError
from torch_overlap.mesh import (
    P,
    Sharded,
    choices,
    choosing,
    clip_grad_norm_,
    connect,
    full_state_dict,
    load_full_state_dict,
    reduce_gradients,
    shard,
    shard_module,
    sharded_parameters,
)
from torch_overlap.mesh.module import named_values
from torch_overlap.testing import run_ranks

DIM, HIDDEN, HEADS, VOCABULARY, BATCH, SEQUENCE = 16, 32, 4, 24, 4, 8
VOCABULARY_PARALLEL = LAYOUTS | {"embedding.weight": P("tp")}


class Model(nn.Module):
    """With a sharded vocabulary, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.Sequential(*(Block(DIM, HIDDEN, HEADS) for _ in range(2)))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens))) * self.scale


def model_of(seed: int) -> tuple[Model, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = Model().double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    tokens, targets = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=generator)
    return model, tokens, targets


def check_step(comm, axes, tokens_at, seed, how, defer):
    mesh = connect(axes, comm)
    reference, tokens, targets = model_of(seed)
    # If the sequence is sharded the table stays whole: a sharded one would gather the tokens.
    layouts = LAYOUTS if "tp" in tokens_at else VOCABULARY_PARALLEL
    model = shard_module(copy.deepcopy(reference), mesh, layouts, defer_gradients=defer)
    placed = [shard(t, mesh, tokens_at) for t in (tokens, targets)]
    expected = loss_of(reference, tokens, targets)
    expected.backward()
    with choosing(how), choices() as log:
        loss = loss_of(model, *placed)
        loss.backward()
    (loss,) = reduce_gradients(model, loss) if defer else (loss,)
    torch.testing.assert_close(loss.full(), expected)
    wanted = dict(reference.named_parameters())
    for name, value in sharded_parameters(model).items():
        grad = value.local.grad
        assert grad is not None, name
        if name == "head.weight":  # tied
            assert value.local is sharded_parameters(model)["embedding.weight"].local
            name = "embedding.weight"
        whole = value.reshard(None)
        torch.testing.assert_close(whole.full(), wanted[name])
        if defer:  # partial values are whole now
            lies = Sharded(grad, value.spec)
            torch.testing.assert_close(lies.full(), wanted[name].grad, msg=lambda text, name=name: f"{name}: {text}")
        else:
            torch.testing.assert_close(value.grad.full(), wanted[name].grad, msg=lambda t, name=name: f"{name}: {t}")
    mesh.close()
    return [choice.op for choice in log if choice.overlapped]


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("how", ["sequential", "auto"])
@pytest.mark.parametrize(
    ("axes", "tokens_at"),
    [("dp=2,tp=2", P("dp", "tp")), ("dp=1,tp=4", P(None, "tp")), ("dp=2,tp=2", P("dp")), ("dp=4,tp=1", P("dp"))],
)
def test_a_plain_model_trains_as_on_one_rank(seed, axes, tokens_at, how, defer):
    fused = run_ranks(check_step, 4, axes, tokens_at, seed, how, defer, backend="local")[0]
    assert bool(fused) == (how == "auto" and "tp=1" not in axes and tokens_at[-1] == "tp")


def check_processes(comm, seed):
    return check_step(comm, {"dp": 2, "tp": 2}, P("dp", "tp"), seed, "auto", True)


def test_a_plain_model_trains_on_processes(seed):
    fused = run_ranks(check_processes, 4, seed)
    assert fused[0].count("matmul_reduce_scatter") == 4  # wo and down of two blocks


def check_clipping(comm, seed):
    mesh = connect({"dp": 2, "tp": 2}, comm)
    reference, tokens, targets = model_of(seed)
    model = shard_module(copy.deepcopy(reference), mesh, VOCABULARY_PARALLEL, defer_gradients=True)
    placed = [shard(t, mesh, P("dp")) for t in (tokens, targets)]
    expected = loss_of(reference, tokens, targets)
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    loss = loss_of(model, *placed)
    loss.backward()
    got, (mean,) = clip_grad_norm_(model, 0.01, loss)
    torch.testing.assert_close(mean.full(), expected)
    torch.testing.assert_close(got.double(), norm.double(), rtol=1e-5, atol=0)
    wanted = dict(reference.named_parameters())
    for name, value in sharded_parameters(model).items():
        if name != "head.weight":
            torch.testing.assert_close(
                Sharded(value.local.grad, value.spec).full(), wanted[name].grad, rtol=1e-5, atol=1e-9
            )
    mesh.close()


def test_gradients_are_clipped_by_their_norm_over_all_ranks(seed):
    run_ranks(check_clipping, 4, seed, backend="local")


def check_state(comm, seed):
    mesh = connect({"dp": 2, "tp": 2}, comm)
    reference, _, _ = model_of(seed)
    model = shard_module(copy.deepcopy(reference), mesh, VOCABULARY_PARALLEL)
    state = full_state_dict(model)
    assert set(state) == set(reference.state_dict())
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    other, _, _ = model_of(seed + 1)
    load_full_state_dict(model, other.state_dict())
    for name, value in other.state_dict().items():
        torch.testing.assert_close(full_state_dict(model)[name], value, rtol=0, atol=0)
    with pytest.raises(InvalidValueError, match=r"lacks \['scale'\], has \['x'\]"):
        load_full_state_dict(model, {("x" if n == "scale" else n): v for n, v in other.state_dict().items()})
    with pytest.raises(InvalidValueError, match=r"expected \(24, 16\) for 'embedding.weight', got \(1,\)"):
        load_full_state_dict(model, other.state_dict() | {"embedding.weight": torch.zeros(1)})
    mesh.close()


def test_whole_states_go_out_and_come_in(seed):
    run_ranks(check_state, 4, seed, backend="local")


def check_mistakes(comm):
    mesh = connect({"tp": 2}, comm)
    with pytest.raises(InvalidValueError, match=r"expected patterns of parameters or buffers, got \['wrong.\*'\]"):
        shard_module(Block(DIM, HIDDEN, HEADS), mesh, {"wrong.*": P("tp")})
    model = shard_module(Block(DIM, HIDDEN, HEADS), mesh)
    with pytest.raises(InvalidValueError, match="expected a module that is not sharded"):
        shard_module(model, mesh)
    with pytest.raises(InvalidValueError, match="scalars that are partial sums"):
        reduce_gradients(model, shard(torch.ones(3), mesh))
    mesh.close()


def test_mistakes_in_sharding_a_module():
    run_ranks(check_mistakes, 2, backend="local")


def check_moved_parameters(comm, seed):
    """Weights that are sharded along the axis of the batch: gathered, or left in place."""
    mesh = connect({"dp": 2}, comm)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for move in (True, False):
        layer = nn.Linear(8, 8, bias=False).double()
        with torch.no_grad():
            layer.weight.copy_(torch.randn(8, 8, generator=generator, dtype=torch.float64))
        x = torch.randn(64, 8, generator=generator, dtype=torch.float64)
        expected = layer(x)
        y = shard_module(layer, mesh, {"weight": P("dp")}, move_parameters=move)(shard(x, mesh, P("dp")))
        torch.testing.assert_close(y.full(), expected)
        found.append(str(y.layout))
    mesh.close()
    return found


def test_parameters_move_only_where_they_may(seed):
    assert run_ranks(check_moved_parameters, 2, seed, backend="local")[0] == ["[dp],[]", "[],[dp]"]


def check_copies(comm, seed):
    mesh = connect({"tp": 2}, comm)
    reference, tokens, targets = model_of(seed)
    model = shard_module(reference, mesh, LAYOUTS)
    placed = [shard(t, mesh, P()) for t in (tokens, targets)]
    average = copy.deepcopy(model)
    before = full_state_dict(average)
    assert average.head.weight.local is average.embedding.weight.local  # tied
    loss = loss_of(model, *placed)
    torch.testing.assert_close(loss_of(average, *placed).full(), loss.full(), rtol=0, atol=0)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    after = full_state_dict(model)
    assert all(p.grad is None for p in average.parameters())
    with torch.no_grad():
        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(p, 0.25)
    for name, value in full_state_dict(average).items():
        torch.testing.assert_close(value, torch.lerp(before[name], after[name], 0.25))

    x = shard(torch.randn(6, 4, dtype=torch.float64), mesh, P("tp")).requires_grad_()
    other = copy.deepcopy(x)
    assert other.spec is x.spec
    assert other.requires_grad
    with torch.no_grad():
        other.local.add_(1)
    torch.testing.assert_close(other.full(), x.full() + 1)
    for value in (x, model):
        with pytest.raises(TypeError, match=r"pickle: expected .* mesh of this process, got .* save full_state_dict"):
            pickle.dumps(value)
    with pytest.raises(InvalidValueError, match=r"got \['h.weight'\], which fit none of weight, bias$"):
        shard_module(nn.Linear(2, 2), mesh, {"h.weight": P("tp")})
    mesh.close()


def test_copies_of_modules_and_values(seed):
    run_ranks(check_copies, 2, seed, backend="local")


def check_recurrent(comm, seed):
    mesh = connect({"tp": comm.get_size()}, comm)
    generator = torch.Generator().manual_seed(seed)
    kinds = [nn.LSTM(4, 6, 2, dropout=0.5).eval(), nn.GRU(4, 6, bidirectional=True), nn.RNN(4, 6, bias=False),
             nn.RNN(4, 6, nonlinearity="relu")]  # fmt: skip
    for plain in kinds:
        whole = copy.deepcopy(plain).double()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
        layouts = {"weight_ih*": P("tp"), "weight_hh*": P(None, "tp")}
        model = shard_module(copy.deepcopy(whole), mesh, layouts)
        depth = whole.num_layers * (2 if whole.bidirectional else 1)
        x = torch.randn(5, 3, 4, generator=generator, dtype=torch.float64)
        start = torch.randn(depth, 3, 6, generator=generator, dtype=torch.float64)
        for at in (P(), P(None, "tp"), P(None, None, "tp")):
            model.zero_grad()
            whole.zero_grad()
            ours, first = shard(x, mesh, at).requires_grad_(), shard(start, mesh)
            leaf = x.clone().requires_grad_()
            is_lstm = isinstance(plain, nn.LSTM)
            y, _ = model(ours, (first, first) if is_lstm else first)
            expected, _ = whole(leaf, (start, start) if is_lstm else start)
            torch.testing.assert_close(y.full(), expected)
            c = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
            (y * shard(c, mesh)).sum().backward()
            (expected * c).sum().backward()
            torch.testing.assert_close(ours.grad.full(), leaf.grad)
            parameters = dict(whole.named_parameters())
            for name, value in sharded_parameters(model).items():
                torch.testing.assert_close(value.grad.full(), parameters[name].grad)
    dropping, zeros = shard_module(nn.LSTM(4, 6, 2, dropout=0.5).double(), mesh), x.new_zeros(2, 3, 6)
    with pytest.raises(UnsupportedError, match=r"expected an operator that draws no random numbers, got aten\.lstm"):
        dropping(ours, (shard(zeros, mesh),) * 2)
    mesh.close()


def test_recurrent_layers_without_dropout_are_those_of_torch(seed):
    run_ranks(check_recurrent, 2, seed, backend="local")


class Average(nn.Module):
    """A running mean over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.count = self.count + 1
        return x - self.mean / self.count


class Cache(nn.Module):
    """The rows of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(2, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.rows = torch.cat([self.rows, x])
        return self.rows.cumsum(0)


class Rolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.arange(8, dtype=torch.float64).reshape(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.rows = self.rows.roll(1, 0) + x
        return self.rows * 1


def check_assigned_buffers(comm, seed):
    mesh = connect({"tp": comm.get_size()}, comm)
    generator = torch.Generator().manual_seed(seed)
    for make, layouts in ((Average, [{}, {"mean": P("tp")}]), (Cache, [{}, {"rows": P("tp")}, {"rows": P(None, "tp")}]),
                          (Rolled, [{}, {"rows": P("tp")}, {"rows": P(None, "tp")}])):  # fmt: skip
        for own in layouts:
            for at in (P(), P("tp"), P(None, "tp")):
                whole, module = make(), shard_module(make(), mesh, own)
                before = {name: v.layout for name, v in named_values(module, "_buffers").items()}
                for _ in range(3):
                    x = torch.randn(2, 4, generator=generator, dtype=torch.float64)
                    torch.testing.assert_close(module(shard(x, mesh, at)).full(), whole(x))
                state = full_state_dict(module)
                assert all(torch.allclose(state[name], value) for name, value in whole.state_dict().items())
                if make is not Cache:
                    after = named_values(module, "_buffers")
                    assert {name: v.layout for name, v in after.items()} == before
    linear = shard_module(nn.Linear(4, 4, bias=False).double(), mesh, {"weight": P("tp")})
    size = mesh.mesh.axis("tp").size
    with pytest.raises(
        InvalidTypeError, match=r"^Linear.weight: expected an nn.Parameter of this rank's part, got a Sha"
    ):
        linear.weight = shard(torch.ones(4, 4).double(), mesh, P("tp"))
    with pytest.raises(
        InvalidValueError, match=r"^Linear.weight: expected a Sharded, or this rank's part of shape \[2, 4"
    ):
        linear.weight = nn.Parameter(torch.ones(4, 4).double())
    linear.weight = nn.Parameter(torch.full((4 // size, 4), 2.0).double())
    torch.testing.assert_close(linear.weight.full(), torch.full((4, 4), 2.0).double())
    module = shard_module(Rolled(), mesh, {"rows": P("tp")})
    with pytest.raises(
        InvalidValueError, match=r"^Rolled.rows: expected a Sharded, or this rank's part of shape \[1, 4\]"
    ):
        module.rows = torch.ones(2, 4).double()
    module.rows = None
    assert module.rows is None
    mesh.close()


def test_a_buffer_that_forward_assigns_keeps_its_layout(seed):
    run_ranks(check_assigned_buffers, 2, seed, backend="local")

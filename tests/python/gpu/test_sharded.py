"""Sharded tensors over NCCL: layouts, values and gradients, fused products, whole steps in CUDA graphs."""

import copy
import itertools
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_overlap import InvalidValueError, StateError
from torch_overlap.mesh import (
    P,
    calibrate,
    choices,
    choosing,
    clip_grad_norm_,
    connect,
    from_local,
    full_state_dict,
    reduce_gradients,
    shard,
    shard_module,
    sharded_parameters,
)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "spmd"))
from plain_block import LAYOUTS, Block, loss_of

pytestmark = pytest.mark.gpu(2)

SIZE = int(os.environ.get("WORLD_SIZE", "1"))
MESHES = {f"dp=1,tp={SIZE}": {"dp": 1, "tp": SIZE}}
if SIZE % 2 == 0 and SIZE > 2:
    MESHES[f"dp=2,tp={SIZE // 2}"] = {"dp": 2, "tp": SIZE // 2}


@pytest.fixture(params=MESHES)
def mesh(comm, request):
    made = connect(MESHES[request.param], comm, name=f"gpu_{request.param}")
    yield made
    torch.cuda.synchronize()
    made.close()


@pytest.fixture
def randn(seed):
    """Returns random numbers, the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape, dtype=torch.float64):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64).to(dtype)

    return draw


PLACES = (P(), P("tp"), P(None, "tp"), P(("dp", "tp")), P("tp", "dp"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32])
def test_every_layout_from_every_layout(mesh, randn, dtype):
    # 13 x 10: uneven parts in both dimensions.
    whole = (8 * randn(13, 10)).to(dtype)
    for source, target in itertools.product(PLACES, PLACES):
        x = shard(whole.clone(), mesh, source).reshard(target)
        expected = shard(whole.clone(), mesh, target)
        assert x.layout == expected.layout
        torch.testing.assert_close(x.local, expected.local, rtol=0, atol=0)
        assert torch.equal(x.full(), whole)


def test_gradients_of_every_move(mesh, randn):
    whole, weight = randn(13, 10), randn(13, 10)
    for source, target in itertools.product(PLACES, PLACES):
        x = shard(whole.clone(), mesh, source).requires_grad_()
        (x.reshard(target) * shard(weight, mesh, target)).sum().backward()
        torch.testing.assert_close(x.grad.full(), weight)


FUNCTIONS = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax over a sharded dimension": lambda x: F.log_softmax(x, 0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "var": lambda x: x.var(0),
    "mean": lambda x: x.mean((0, 1)),
    "cumsum": lambda x: x.cumsum(1),
    "transpose and add": lambda x: x.transpose(0, 1) + x.flatten()[:10].unsqueeze(1),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("place", [P("tp"), P(None, "tp")], ids=["rows", "columns"])
def test_functions_and_their_gradients(mesh, randn, name, place):
    whole = randn(12, 10)
    x, reference = shard(whole.clone(), mesh, place).requires_grad_(), whole.clone().requires_grad_()
    y, expected = FUNCTIONS[name](x), FUNCTIONS[name](reference)
    weight = randn(*expected.shape)
    torch.testing.assert_close(y.full(), expected)
    (y * shard(weight, mesh)).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(x.grad.full(), reference.grad)


@pytest.mark.parametrize("how", ["sequential", "auto"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_column_and_row_products(mesh, randn, how, dtype):
    """Sequence parallel: rows are gathered into the first product, and scattered out of the second."""
    rows, dim, hidden = 256 * mesh.mesh.size, 512, 8192  # moving weights would cost more
    x, up, down = randn(rows, dim), randn(hidden, dim) / dim**0.5, randn(dim, hidden) / hidden**0.5
    x, up, down = (t.to(dtype) for t in (x, up, down))
    placed = [
        shard(t.clone(), mesh, p).requires_grad_() for t, p in ((x, P("tp")), (up, P("tp")), (down, P(None, "tp")))
    ]
    wholes = [t.double().requires_grad_() for t in (x, up, down)]
    weight = randn(rows, dim).to(dtype)
    with choosing(how), choices() as log:
        y = F.linear(F.gelu(F.linear(*placed[:2])), placed[2]).reshard(P("tp"))
        (y * shard(weight, mesh, P("tp"))).sum().backward()
    expected = F.linear(F.gelu(F.linear(*wholes[:2])), wholes[2])
    (expected * weight.double()).sum().backward()
    fused = {choice.op for choice in log if choice.overlapped}
    assert fused == ({"all_gather_matmul", "matmul_reduce_scatter"} if how == "auto" else set())
    scale = 3e-2 if dtype == torch.bfloat16 else 4e-3 if dtype == torch.float16 else 1e-4
    for got, wanted in [(y.full(), expected), *((p.grad.full(), w.grad) for p, w in zip(placed, wholes, strict=True))]:
        torch.testing.assert_close(got.double(), wanted, rtol=scale, atol=scale * wanted.std().item())


# --- modules

DIM, HIDDEN, HEADS, VOCABULARY, BATCH, SEQUENCE = 128, 256, 8, 64, 4, 64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.Sequential(*(Block(DIM, HIDDEN, HEADS) for _ in range(2)))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


@pytest.fixture
def reference(seed, randn):
    model = Model().to("cuda", torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(randn(*parameter.shape) * 0.1)
    return model


@pytest.fixture
def batches(seed):
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    return torch.randint(VOCABULARY, (8, 2, BATCH, SEQUENCE), generator=generator, device="cuda")


def part_of(mesh, whole, place):
    return shard(whole.clone(), mesh, place).local


@pytest.mark.parametrize("how", ["sequential", "auto"])
@pytest.mark.parametrize("place", [P("dp"), P("dp", "tp")], ids=["tensor", "sequence"])
def test_a_plain_model_trains_as_on_one_gpu(mesh, reference, batches, place, how):
    model = shard_module(copy.deepcopy(reference), mesh, LAYOUTS, defer_gradients=True)
    expected = loss_of(reference, *batches[0])
    expected.backward()
    with choosing(how):
        loss = loss_of(model, *(shard(t, mesh, place) for t in batches[0]))
        loss.backward()
    (loss,) = reduce_gradients(model, loss)
    torch.testing.assert_close(loss.full(), expected)
    wanted = dict(reference.named_parameters())
    for name, value in sharded_parameters(model).items():
        lies = shard(wanted[name].grad, mesh, value.layout)
        torch.testing.assert_close(value.local.grad, lies.local, msg=lambda text, name=name: f"{name}: {text}")
    assert all(torch.equal(v, reference.state_dict()[k]) for k, v in full_state_dict(model).items())


def train(model, optimizer, tokens, targets, how):
    with choosing(how):
        loss = loss_of(model, tokens, targets)
        loss.backward()
    _, (loss,) = clip_grad_norm_(model, 1.0, loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.full()


@pytest.mark.parametrize("how", ["sequential", "auto"])
@pytest.mark.parametrize("place", [P("dp"), P("dp", "tp")], ids=["tensor", "sequence"])
def test_a_whole_step_in_a_graph(mesh, reference, batches, place, how):
    """Forward, backward, clipping and AdamW: replays with other tokens, some of them after an eager step."""
    shape = batches.shape[2:]
    models = [shard_module(copy.deepcopy(reference), mesh, LAYOUTS, defer_gradients=True) for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, capturable=True) for m in models]
    static = [part_of(mesh, t, place) for t in batches[0]]
    placed = [from_local(t, mesh, place, shape) for t in static]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # recipes, communicators, the optimizer's state
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, *placed, how)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train(models[0], optimizers[0], *placed, how)
    for step, batch in enumerate(batches[1:]):
        for mine, t in zip(static, batch, strict=True):
            mine.copy_(part_of(mesh, t, place))
        if step % 3 == 2:
            train(models[0], optimizers[0], *placed, how)
        else:
            graph.replay()
        eager = train(models[1], optimizers[1], *placed, how)
        if step % 3 != 2:
            torch.testing.assert_close(captured, eager)
    ours, theirs = (full_state_dict(m) for m in models)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], msg=lambda text, name=name: f"{name}: {text}")


def test_a_set_of_axes_without_a_communicator_in_a_capture(comm, randn):
    if SIZE < 4:
        pytest.skip("needs two axes")
    mesh = connect({"dp": 2, "tp": SIZE // 2}, comm, name="gpu_lacking", sets=["dp"])
    x = from_local(randn(8 // (SIZE // 2), 8), mesh, P("tp"), (8, 8))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises((StateError, InvalidValueError), match="prepare"), torch.cuda.graph(graph):
        x.reshard(P())
    torch.cuda.synchronize()
    mesh.close()


def test_calibrate_measures_this_machine(mesh, comm):
    model = calibrate(mesh, name="here", rounds=3).to_dict()
    curves = model["links"]["nvlink"]["curves"]
    assert {curve["ranks"] for curve in curves} == set(mesh.mesh.axes.values()) - {1}
    for curve in curves:
        (_, quick), *_, (_, slow) = curve["bytes_us"]
        assert 0 < quick < slow
    assert all(value > 0 for value in model["device"]["tflops"].values())
    text = torch.frombuffer(bytearray(repr(model).encode()), dtype=torch.uint8).cuda()
    every = torch.empty(SIZE * len(text), dtype=torch.uint8, device="cuda")
    comm.all_gather_single(every, text, async_op=False)
    assert (every.view(SIZE, -1) == text).all()

"""Trainer code that does not know our styles: clipping, optimizers, checkpoints and FSDP2 of torch on a parallel model.

Each run is compared with the unsharded model, in fp64.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from llama_cases import DIM, HEADS, HIDDEN, SEQUENCE, VOCABULARY, Llama, plan, start
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import torch_overlap as to
from torch_overlap.nn.styles import (
    ColumnParallel,
    Replicated,
    RowParallel,
    SequenceParallel,
    VocabularyParallel,
    parallelize,
)
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(600)
BATCH, STEPS = 2, 3


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def make_optimizer(how: str, model: nn.Module) -> torch.optim.Optimizer:
    if how == "sgd":
        return torch.optim.SGD(model.parameters(), 0.5, momentum=0.9, foreach=True)
    return torch.optim.AdamW(model.parameters(), 1e-2, **{"adamw": {}, "fused": {"fused": True}}[how])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[torch.Tensor, torch.Tensor]],
          max_norm: float, accumulate: int = 2) -> list[float]:  # fmt: skip
    """Returns the losses and the norms of the gradients."""
    seen = []
    for tokens, targets in batches:
        optimizer.zero_grad()
        for part, target in zip(tokens.chunk(accumulate), targets.chunk(accumulate), strict=True):
            loss = F.cross_entropy(model(part).flatten(0, 1), target.flatten()) / accumulate
            loss.backward()
            seen.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        seen.append(whole(norm).item())
        optimizer.step()
    return seen


def make_batches(seed: int, rows: int = 2 * BATCH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(VOCABULARY, (2, rows, SEQUENCE), generator=generator)) for _ in range(STEPS)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(whole(got), want, rtol=1e-8, atol=1e-10)


def same_model(model: nn.Module, reference: nn.Module) -> None:
    got = {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}
    assert set(got) == set(dict(reference.named_parameters()))
    for name, parameter in reference.named_parameters():
        close(got[name].detach(), parameter.detach())


def clipped(rank: int, size: int, store: Any, seed: int, sequence_parallel: bool, how: str) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    reference = Llama(6, True).double()
    model = parallelize(copy.deepcopy(reference), mesh, plan(sequence_parallel, "pipelined"))
    assert all(isinstance(p, DTensor) and p.device_mesh == mesh for p in model.parameters())
    batches = make_batches(seed)
    want = train(reference, make_optimizer(how, reference), batches, 0.3)
    got = train(model, make_optimizer(how, model), batches, 0.3)
    assert got == pytest.approx(want, rel=1e-8)
    same_model(model, reference)


@pytest.mark.parametrize("how", ["adamw", "fused", "sgd"])
@pytest.mark.parametrize(("size", "sequence_parallel"), [(2, True), (3, False)])
def test_clipping_and_optimizers(seed: int, size: int, sequence_parallel: bool, how: str) -> None:
    run_ranks(clipped, size, seed, sequence_parallel, how, comm=False, timeout=120)


def data_parallel(rank: int, size: int, store: Any, seed: int, shape: tuple[int, ...]) -> None:
    names = ("shard", "tp") if len(shape) == 2 else ("replicate", "shard", "tp")
    mesh = start(rank, size, store, shape, names)
    torch.manual_seed(seed)
    reference = Llama(6, True).double()
    model = parallelize(copy.deepcopy(reference), mesh["tp"], plan(True, "pipelined"))
    data = mesh[names[:-1]]
    for layer in model.layers.values():
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    assert all(p.device_mesh.mesh_dim_names == names for p in model.parameters())
    ranks, own = size // shape[-1], rank // shape[-1]
    batches = make_batches(seed, 2 * BATCH * ranks)

    def part(t: torch.Tensor) -> torch.Tensor:  # of each micro-batch
        return torch.cat([half.chunk(ranks)[own] for half in t.chunk(2)])

    want = train(reference, make_optimizer("adamw", reference), batches, 0.3)
    optimizer = make_optimizer("adamw", model)
    got = train(model, optimizer, [(part(x), part(y)) for x, y in batches], 0.3)
    assert got[2::3] == pytest.approx(want[2::3], rel=1e-8)  # the norms: a loss is that of this rank's rows
    same_model(model, reference)
    state, _ = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    for name, value in reference.state_dict().items():
        if rank == 0:
            close(state[name], value)
    for name, value in to.nn.full_state_dict(model).items():
        close(value, reference.state_dict()[name])


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2), (1, 2, 2)])
def test_fully_shard_on_top(seed: int, shape: tuple[int, ...]) -> None:
    run_ranks(data_parallel, 4, seed, shape, comm=False, timeout=240)


def save(rank: int, size: int, store: Any, seed: int, folder: str) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    model = parallelize(Llama(6, True).double(), mesh, plan(True, "pipelined"))
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer, make_batches(seed)[:1], 0.3)
    parts, states = get_state_dict(model, optimizer)
    dcp.save({"model": parts, "optimizer": states}, checkpoint_id=folder)
    dist.destroy_process_group()


def load(rank: int, size: int, store: Any, seed: int, folder: str) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    reference = Llama(6, True).double()
    batches = make_batches(seed)
    once = make_optimizer("adamw", reference)
    want = train(reference, once, batches, 0.3)
    torch.manual_seed(seed + 1)
    model = parallelize(Llama(6, True).double(), mesh, plan(size != 3, "pipelined"))
    optimizer = make_optimizer("adamw", model)
    parts, states = get_state_dict(model, optimizer)
    state = {"model": parts, "optimizer": states}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    got = train(model, optimizer, batches[1:], 0.3)
    assert got == pytest.approx(want[3:], rel=1e-8)
    same_model(model, reference)
    full, _ = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        again = Llama(6, True).double()
        again.load_state_dict(full)
        same_model(again, reference)
    torch.manual_seed(seed + 2)
    other = parallelize(Llama(6, True).double(), mesh, plan(size != 3, "pipelined"))
    to.nn.load_full_state_dict(other, reference.state_dict())
    same_model(other, reference)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_checkpoints_of_torch_load_on_any_number_of_ranks(tmp_path: Any, seed: int, size: int) -> None:
    run_ranks(save, 2, seed, str(tmp_path), comm=False, timeout=120)
    run_ranks(load, size, seed, str(tmp_path), comm=False, timeout=120)


# --- Ties ---------------------------------------------------------------------------------------------


def tied(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)

    def make() -> Llama:
        torch.manual_seed(seed)
        model = Llama(6, False).double()
        model.output.weight = model.tok_embeddings.weight
        return model

    with pytest.raises(
        ValueError,
        match=r"^Embedding: expected one layout for a parameter that two modules share, got "
        r"dimension None split for 'weight', and 0 for 'weight' of ColumnParallel",
    ):
        parallelize(make(), mesh, plan(True))  # fmt: skip
    apart = parallelize_module(make(), mesh, plan(True))
    with pytest.raises(to.StateError, match=r"expected no gradient of a parameter that was replaced by 'weight' of "
                                            r"ColumnParallelLinear, got one"):  # fmt: skip
        apart(torch.zeros(1, SEQUENCE, dtype=torch.int64)).sum().backward()


def test_a_tie_is_kept_or_refused(seed: int) -> None:
    run_ranks(tied, 2, seed, comm=False)


# --- Modules over a mesh ------------------------------------------------------------------------------


def over_a_mesh(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)
    comm = to.nn.styles.comm_of(mesh)
    torch.manual_seed(seed)
    options = {"activation": "swiglu", "norm": "rms", "dtype": torch.float64}
    block = to.nn.ParallelTransformerBlock(DIM, HEADS, HIDDEN, mesh, **options)
    torch.manual_seed(seed)
    parts = to.nn.ParallelTransformerBlock(DIM, HEADS, HIDDEN, comm, **options)
    x = torch.randn(SEQUENCE // size, BATCH, DIM, dtype=torch.float64)
    split = to.nn.split_parameters(block)
    for run in (lambda m: m(x), torch.compile(lambda m: m(x), backend="aot_eager", fullgraph=True)):
        for module in (block, parts):
            module.zero_grad()
            run(module).square().sum().backward()
        for (name, p), q in zip(block.named_parameters(), parts.parameters(), strict=True):
            assert isinstance(p, DTensor)
            assert p.placements == ((Shard(split[name][1]),) if name in split else (Replicate(),))
            assert torch.equal(p.to_local(), q)
            # Over a communicator the weights of one gather are one product.
            torch.testing.assert_close(p.grad.to_local(), q.grad, rtol=1e-12, atol=1e-10, msg=name)
    assert block.attention_norm.weight.grad.placements == (Replicate(),)
    assert type(block.attention_norm).__name__ == "RMSNorm"
    assert isinstance(block.attention_norm, nn.RMSNorm)
    assert isinstance(block.attention_norm.weight, nn.Parameter)


def test_modules_over_a_mesh_have_dtensors(seed: int) -> None:
    run_ranks(over_a_mesh, 2, seed, comm=False)


def errors(rank: int, size: int, store: Any) -> None:
    mesh = start(rank, size, store, (1, size), ("dp", "tp"))

    def refuses(error: type[Exception], message: str, act: Any) -> None:
        with pytest.raises(error, match=message):
            act()

    refuses(ValueError, r"^parallelize: expected module names of Llama as the keys of the plan, got 'layers.\*.att'",
            lambda: parallelize(Llama(), mesh["tp"], {"layers.*.att": RowParallel()}))  # fmt: skip
    refuses(ValueError, r"^ColumnParallel: expected out_features .*, got 30; .* \(entry 'output' of the plan\)$",
            lambda: parallelize(Llama(), mesh["tp"], {"output": ColumnParallel(multiple_of=7)}))  # fmt: skip
    refuses(TypeError, r"^ColumnParallel: expected plain parameters, got 'weight' of Linear as a DTensor of DeviceMesh",
            lambda: parallelize(fully_shard(Llama(), mesh=mesh["dp"]), mesh["tp"],
                                {"output": ColumnParallel()}))  # fmt: skip
    model = fully_shard(parallelize(Llama(), mesh["tp"], plan(True)), mesh=mesh["dp"])
    refuses(to.StateError, r"^Embedding: expected 'weight' as a DTensor of DeviceMesh.*, got one of .* Call the module",
            lambda: model.tok_embeddings(torch.zeros(2, dtype=torch.int64)))  # fmt: skip
    norm = parallelize_module(nn.Sequential(nn.LayerNorm(DIM)), mesh["tp"], {"0": SequenceParallel(), "": Replicated()})
    refuses(RuntimeError, "normalized_shape", lambda: norm(torch.ones(DIM + 1)))
    assert isinstance(norm[0].weight, DTensor)  # the parameters are in place after an error


def test_errors_name_what_was_expected() -> None:
    run_ranks(errors, 2, comm=False)


# --- Gradients that ranks forget ----------------------------------------------------------------------


class Heads(nn.Module):
    """Attention with norms of the queries' and keys' heads, as in Qwen3."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(DIM // HEADS), nn.RMSNorm(DIM // HEADS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for t in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


def norms_of_heads(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    reference, x = Heads().double(), torch.randn(BATCH, SEQUENCE, DIM, dtype=torch.float64)
    reference(x).square().sum().backward()
    plan = {"q": ColumnParallel(sequence_parallel=False), "k": ColumnParallel(sequence_parallel=False),
            "v": ColumnParallel(sequence_parallel=False), "o": RowParallel(sequence_parallel=False)}  # fmt: skip
    model = parallelize(copy.deepcopy(reference), mesh, plan | {n: SequenceParallel() for n in ("q_norm", "k_norm")})
    model(x).square().sum().backward()
    for name, parameter in reference.named_parameters():
        close(model.get_parameter(name).grad, parameter.grad)
    forgotten = parallelize(copy.deepcopy(reference), mesh, plan)
    message = r"^backward: expected the same gradient of 'weight' of RMSNorm on all ranks, got .*: give it Sequence"
    with pytest.raises(to.StateError, match=message):
        forgotten(x).square().sum().backward()


def test_a_norm_of_split_heads_is_summed_or_missed(seed: int) -> None:
    run_ranks(norms_of_heads, 2, seed, comm=False)


def guarded(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    forgets = {name: style for name, style in plan(True).items() if name != "norm"}
    model = parallelize(Llama(), mesh, forgets)
    tokens = make_batches(seed)[0][0]
    for factor in (0.0, float("inf")):  # says nothing of the ranks' gradients
        (model(tokens).square().sum() * factor).backward()
    with pytest.raises(to.StateError, match=r"^backward: expected the same gradient of 'weight' of RMSNorm"):
        model(tokens).square().sum().backward()
    assigned = parallelize(Llama(), mesh, plan(True))
    assigned.load_state_dict(Llama().state_dict(), assign=True)
    with pytest.raises(to.StateError, match=r"expected 'weight' as a DTensor of .*, got a plain tensor. Load whole"):
        assigned(tokens)


def test_a_gradient_that_says_nothing_and_a_parameter_of_another_layout(seed: int) -> None:
    run_ranks(guarded, 2, seed, comm=False)


def refused_modules(rank: int, size: int, store: Any) -> None:
    mesh = start(rank, size, store)
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(ValueError, match=f"expected an embedding without {next(iter(option))}, got"):
            parallelize_module(nn.Embedding(8, 4, **option), mesh, VocabularyParallel())
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"expected Linear with parameters of its own, got Parametrized"):
        parallelize_module(normed, mesh, ColumnParallel())
    patched = nn.LayerNorm(4)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="expected a module whose forward is that of its class"):
        parallelize_module(patched, mesh, SequenceParallel())


def test_modules_that_would_be_wrong_are_refused() -> None:
    run_ranks(refused_modules, 2, comm=False)


def vocabulary(rank: int, size: int, store: Any, seed: int, padding: int) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    reference = nn.Sequential(nn.Embedding(8, 4, padding_idx=padding), nn.BatchNorm1d(4, affine=False)).double()
    reference[1].running_mean += rank  # type: ignore[operator]  # buffers are rank 0's
    model = parallelize(copy.deepcopy(reference), mesh, {"0": VocabularyParallel()})
    assert torch.equal(model[1].running_mean, torch.zeros(4, dtype=torch.float64))
    tokens = torch.randint(8, (3, 7), generator=torch.Generator().manual_seed(seed))
    copied = copy.deepcopy(model)
    for module in (model[0], copied[0], reference[0]):
        module(tokens).square().sum().backward()
        assert module.padding_idx == padding
    close(model[0].weight.grad, reference[0].weight.grad)
    close(copied[0].weight.grad, reference[0].weight.grad)
    with pytest.raises(IndexError):
        model[0](tokens + 8)


@pytest.mark.parametrize("padding", [0, 5])
def test_an_embedding_that_is_split_by_vocabulary(seed: int, padding: int) -> None:
    run_ranks(vocabulary, 2, seed, padding, comm=False)


def compiled_vocabulary(rank: int, size: int, store: Any, seed: int) -> None:
    torch._dynamo.reset()
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    reference = nn.Sequential(nn.Embedding(8, 4, padding_idx=5), nn.Linear(4, 8)).double()
    model = parallelize(copy.deepcopy(reference), mesh, {"0": VocabularyParallel()})
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for tokens in (torch.randint(8, (3, 6)), torch.arange(8)):
        torch.testing.assert_close(run(tokens), reference(tokens))
        run(tokens).square().sum().backward()
        reference(tokens).square().sum().backward()
    torch.testing.assert_close(whole(model[0].weight.grad), reference[0].weight.grad)


def test_an_embedding_that_is_split_by_vocabulary_compiles(seed: int) -> None:
    run_ranks(compiled_vocabulary, 2, seed, comm=False)


def forgotten_norm(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    model = parallelize(Llama(), mesh, {name: style for name, style in plan(True).items() if name != "norm"})
    with pytest.raises(to.StateError, match=r"^backward: expected the same gradient of 'weight' of RMSNorm"):
        model(make_batches(seed)[0][0]).square().sum().backward()


def test_a_norm_that_the_plan_forgets_is_missed(seed: int) -> None:
    run_ranks(forgotten_norm, 2, seed, comm=False)

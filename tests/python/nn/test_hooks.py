"""Hooks of modules, and parameters that change or are copied between the forward and the backward pass.

Each case is compared with the unsharded model, in fp64.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llama_cases import SEQUENCE, VOCABULARY, Llama, plan, start
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import torch_overlap as to
from torch_overlap import nn as tnn
from torch_overlap.nn.styles import VocabularyParallel, parallelize
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
FEATURES, HEADS, HIDDEN, ROWS, BATCH = 8, 2, 16, 4, 2


def block_of(comm: Any, seed: int, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return tnn.ParallelTransformerBlock(FEATURES, HEADS, HIDDEN, comm, activation="swiglu", dtype=torch.float64,
                                        **options)  # fmt: skip


def rows(comm: to.TorchComm, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(ROWS, BATCH, FEATURES, dtype=torch.float64, generator=generator)
    return whole.chunk(comm.get_size())[comm.get_rank()].clone().requires_grad_()


def whole_grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for name, p in module.named_parameters()}  # fmt: skip


def llamas(mesh: Any, seed: int, sequence_parallel: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    whole = Llama(6, True).double()
    return parallelize(copy.deepcopy(whole), mesh, plan(sequence_parallel)), whole


def train(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=generator)
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()


def same_gradients(model: nn.Module, whole: nn.Module) -> None:
    got = whole_grads(model)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad)


# --- Hooks --------------------------------------------------------------------------------------------


def hooked_projections(comm: to.TorchComm, seed: int) -> None:
    """Hooks of the layer with gate and up get the list that its class documents."""
    mlp = tnn.ParallelMLP(FEATURES, HIDDEN, comm, activation="swiglu", dtype=torch.float64)
    x = rows(comm, seed)
    gate, up = mlp.up(x)
    want = mlp.down(F.silu(2 * gate) * (2 * up))
    want.square().sum().backward()
    expected, found = whole_grads(mlp), x.grad
    mlp.zero_grad()
    x.grad = None
    mlp.up.register_forward_hook(lambda _, args, outputs: [2 * y for y in outputs])
    got = mlp(x)
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    torch.testing.assert_close(whole_grads(mlp), expected)
    torch.testing.assert_close(x.grad, found)


def test_hooks_of_gate_and_up_get_a_list(seed: int) -> None:
    run_ranks(hooked_projections, 2, seed)


def scaled(grads: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(grad if grad is None else 2 * grad for grad in grads)


def add_hook(module: nn.Module, kind: str) -> None:
    if kind == "full":
        module.register_full_backward_hook(lambda _, inputs, outputs: scaled(inputs))
    elif kind == "pre":
        module.register_full_backward_pre_hook(lambda _, outputs: scaled(outputs))
    elif kind == "forward":
        module.register_forward_hook(lambda _, args, y: 2 * y)
    else:
        module.register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))


def shared_gather(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)
    for kind in ("pre", "forward", "full", "forward_pre"):
        for name in ("attention", "attention.wk", "attention.wo", "feed_forward", "feed_forward.w1"):
            reads_input = kind in ("full", "forward_pre") and name != "attention.wo"
            for sequence_parallel in (False,) if reads_input else (False, True):
                models = llamas(mesh, seed, sequence_parallel)
                for one in models:
                    add_hook(one.layers["1"].get_submodule(name), kind)
                    train(one, seed)
                same_gradients(*models)
    # With sequence parallelism the argument of the parent and of its linears is a placeholder.
    model, _ = llamas(mesh, seed, True)
    seen = []
    for name in ("attention", "attention.wq"):
        module = model.layers["0"].get_submodule(name)
        module.register_full_backward_hook(lambda _, inputs, outputs: seen.append((inputs[0], outputs[0].isfinite())))
    with pytest.warns(UserWarning, match="Full backward hook is firing"):
        train(model, seed)
    assert [inputs is None and bool(finite.all()) for inputs, finite in seen] == [True, True]


def test_hooks_of_linears_that_share_a_gather(seed: int) -> None:
    run_ranks(shared_gather, 2, seed, comm=False, timeout=120)


def split_embedding(rank: int, size: int, store: Any, seed: int, when: str) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    whole = nn.Sequential(nn.Embedding(8, 4, padding_idx=5), nn.Linear(4, 8)).double()
    seen: dict[str, list[Tensor]] = {"own": [], "all": []}

    def hook(model: nn.Module, to_list: list[Tensor]) -> None:
        model[0].register_forward_pre_hook(lambda _, args: ((args[0] + 1) % 8,))
        model[0].register_forward_pre_hook(lambda _, args: to_list.append(args[0]))
        model[0].register_forward_hook(lambda _, args, y: y - y.mean(1, keepdim=True))  # of all tokens

    model = copy.deepcopy(whole)
    hook(whole, seen["all"])
    if when == "before":
        hook(model, seen["own"])
    parallelize(model, mesh, {"0": VocabularyParallel()})
    if when == "after":
        hook(model, seen["own"])
    tokens = torch.arange(8).view(2, 4)
    torch.testing.assert_close(model(tokens), whole(tokens))
    torch.testing.assert_close(seen["own"], seen["all"])
    for one in (model, whole):
        one(tokens).square().sum().backward()
    same_gradients(model, whole)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_a_split_embedding_see_all_tokens(seed: int, when: str) -> None:
    run_ranks(split_embedding, 2, seed, when, comm=False)


# --- Copies -------------------------------------------------------------------------------------------


def copied_with_gradients(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)
    model, whole = llamas(mesh, seed, True)
    train(model, seed)
    train(whole, seed)
    copied = copy.deepcopy(model)
    same_gradients(copied, whole)
    for one in (copied, model, whole):  # gradients of both accumulate
        train(one, seed + 1)
    same_gradients(copied, whole)
    same_gradients(model, whole)


def test_a_model_over_a_mesh_is_copied_with_its_gradients(seed: int) -> None:
    run_ranks(copied_with_gradients, 2, seed, comm=False)


# --- A block over a mesh ------------------------------------------------------------------------------


def clipped_block(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)
    block = block_of(mesh["tp"], seed, sequence_parallel=False, norm="rms", norm_eps=1e-5)
    single = block_of(to.new_comm("fake", "cpu", "single", rank=0, size=1), seed, sequence_parallel=False, norm="rms",
                      norm_eps=1e-5)  # fmt: skip
    assert all(isinstance(parameter, DTensor) for parameter in block.parameters())
    x = torch.randn(ROWS, BATCH, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    norms = []
    for one in (block, single):
        one(x).square().sum().backward()
        nn.utils.clip_grad_value_(one.parameters(), 0.5, foreach=True)
        norm = nn.utils.clip_grad_norm_(one.parameters(), 0.3, foreach=True)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(whole_grads(block), whole_grads(single))


def test_a_block_without_sequence_parallelism_has_dtensors(seed: int) -> None:
    run_ranks(clipped_block, 2, seed, comm=False)


# --- Parameters that change between forward and backward ------------------------------------------------


def changed_llama(rank: int, size: int, store: Any, seed: int, sequence_parallel: bool) -> None:
    mesh = start(rank, size, store)
    model, whole = llamas(mesh, seed, sequence_parallel)
    layer = "layers.1."
    names = ("attention.wq", "attention.wv", "attention.wo", "feed_forward.w3", "feed_forward.w2", "ffn_norm")
    for name in [f"{layer}{name}.weight" for name in names] + ["norm.weight", "output.weight"]:
        for trains in (True, False):
            for one in (model, whole):
                parameter = one.get_parameter(name).requires_grad_(trains)
                loss = one(torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)).sum()
                with torch.no_grad():
                    parameter.mul_(2)
                with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|inplace)"):
                    loss.backward()
                parameter.requires_grad_(True)
    for one in (model, whole):  # these products do not read what changes
        one.zero_grad()
        y = one(torch.zeros(BATCH, SEQUENCE, dtype=torch.int64))
        with torch.no_grad():
            one.tok_embeddings.weight.mul_(2)
            one.output.bias.mul_(2) if one.output.bias is not None else None
            one.layers["0"].attention.wo.bias.mul_(2)
        y.square().sum().backward()
    same_gradients(model, whole)
    for one in (model, whole):  # and all is well afterwards
        one.zero_grad()
        train(one, seed)
        torch.optim.SGD(one.parameters(), 1e-2, foreach=True).step()
        train(one, seed + 1)
    same_gradients(model, whole)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_parameter_that_changes_before_the_backward_pass_is_found(seed: int, sequence_parallel: bool) -> None:
    run_ranks(changed_llama, 2, seed, sequence_parallel, comm=False, timeout=120)


def changed_norm(comm: to.TorchComm, seed: int) -> None:
    block = block_of(comm, seed)
    y = block(rows(comm, seed))
    with torch.no_grad():
        block.mlp_norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_replicated_norm_that_changes_before_the_backward_pass_is_found(seed: int) -> None:
    run_ranks(changed_norm, 2, seed)

"""Weights that torch.nn.utils computes, before and after a plan: weight_norm, spectral_norm, pruning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llama_cases import start
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, parametrize, prune

import torch_overlap as to
from torch_overlap.nn.styles import (
    ColumnParallel,
    RowParallel,
    SequenceParallel,
    SharedGather,
    VocabularyParallel,
    parallelize,
)
from torch_overlap.testing import run_ranks

PLAN = {"0": ColumnParallel(sequence_parallel=False), "1": RowParallel(sequence_parallel=False)}
HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda module: prune.l1_unstructured(module, "weight", 0.5),
}
REMOVE: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": nn.utils.remove_weight_norm,
    "spectral_norm": nn.utils.remove_spectral_norm,
    "prune": lambda module: prune.remove(module, "weight"),
}


def pair() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).double()


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare(model: nn.Module, reference: nn.Module, x: torch.Tensor) -> None:
    """Compares results and gradients."""
    torch.testing.assert_close(model(x), reference(x))
    for module in (model, reference):
        module(x).square().sum().backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(whole(model.get_parameter(name).grad), parameter.grad)


def split_after(rank: int, size: int, store: Any, seed: int) -> None:
    mesh, generator = start(rank, size, store), torch.Generator().manual_seed(seed)
    x = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    norms = (parametrizations.weight_norm, nn.utils.weight_norm)
    for norm, layer, dim in [(norm, *case) for norm in norms for case in ((0, 1), (1, 0))]:
        model = parallelize(pair(), mesh, PLAN)
        norm(model[layer], dim=dim)
        message = rf"expected 'weight' as a DTensor of \(Shard\(dim={layer}\),\), got one of .* Before the split, "
        with pytest.raises(to.StateError, match=message):
            model(x)
    removed = pair()
    parametrizations.weight_norm(removed[1])
    parametrize.remove_parametrizations(removed[1], "weight")
    compare(parallelize(removed, mesh, PLAN), pair(), x)


def test_weight_norm_across_the_split_after_a_plan(seed: int) -> None:
    """The advice of the error is followed, too."""
    run_ranks(split_after, 2, seed, comm=False)


def left_behind(rank: int, size: int, store: Any, seed: int) -> None:
    mesh, generator = start(rank, size, store), torch.Generator().manual_seed(seed)
    x = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    model = parallelize(pair(), mesh, PLAN)
    parametrizations.weight_norm(model[1])
    parametrize.remove_parametrizations(model[1], "weight")
    with pytest.raises(to.StateError, match=r"got one of \(Shard\(dim=0\),\). Make it nn.Parameter") as error:
        model(x)
    advice = str(error.value).rpartition("Make it ")[2].removesuffix(".")
    names = {"nn": nn, "parameter": model[1].weight, "Shard": torch.distributed.tensor.Shard}
    model[1].weight = eval(advice, names)
    compare(model, pair(), x)


def test_a_parameter_of_another_placement(seed: int) -> None:
    run_ranks(left_behind, 2, seed, comm=False)


def split_before(rank: int, size: int, store: Any, seed: int, how: str) -> None:
    mesh, generator = start(rank, size, store), torch.Generator().manual_seed(seed)
    x = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    for layer, style in ((0, "ColumnParallel"), (1, "RowParallel")):
        model = pair()
        HOOKS[how](model[layer])
        with pytest.raises(TypeError, match=rf"{style}: expected 'weight' of Linear as a parameter, got .* a hook"):
            parallelize(model, mesh, PLAN)
    model = pair()
    HOOKS[how](model[0])
    with pytest.raises(TypeError, match=r"Replicated: expected 'weight' of Linear as a parameter, got"):
        parallelize(model, mesh, {"1": RowParallel(sequence_parallel=False)})
    embedding = nn.Sequential(nn.Embedding(8, 4))
    HOOKS[how](embedding[0])
    with pytest.raises(TypeError, match=r"VocabularyParallel: expected 'weight' of Embedding as a parameter, got"):
        parallelize(embedding, mesh, {"0": VocabularyParallel()})
    torch.manual_seed(seed)  # of the vectors of spectral_norm
    removed = pair()
    HOOKS[how](removed[0])
    removed(x)
    REMOVE[how](removed[0])
    reference = pair()
    reference.load_state_dict(removed.state_dict())
    compare(parallelize(removed, mesh, PLAN), reference, x)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("how", HOOKS)
def test_hooks_before_a_plan_are_refused(seed: int, how: str) -> None:
    run_ranks(split_before, 2, seed, how, comm=False)


def parametrized_before(rank: int, size: int, store: Any, seed: int) -> None:
    mesh, generator = start(rank, size, store), torch.Generator().manual_seed(seed)
    x = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    for register in (parametrizations.weight_norm, parametrizations.orthogonal, parametrizations.spectral_norm):
        reference = pair()
        register(reference[1])
        with pytest.raises(TypeError, match=r"RowParallel: expected Linear with parameters of its own, got"):
            parallelize(copy.deepcopy(reference), mesh, PLAN)
        with pytest.raises(TypeError, match=r"SharedGather at '1': expected Linear with parameters of its own, got"):
            parallelize(nn.Sequential(copy.deepcopy(reference)), mesh, {"0": SharedGather("0", "1")})
        compare(parallelize(copy.deepcopy(reference), mesh, {}), reference, x)
    embedding = nn.Sequential(nn.Embedding(8, 4))
    parametrizations.weight_norm(embedding[0])
    with pytest.raises(TypeError, match=r"VocabularyParallel: expected Embedding with parameters of its own, got"):
        parallelize(embedding, mesh, {"0": VocabularyParallel()})


def test_parametrizations_before_a_plan(seed: int) -> None:
    """A split module refuses them, a replicated one computes with them."""
    run_ranks(parametrized_before, 2, seed, comm=False)


def replicated_after(rank: int, size: int, store: Any) -> None:
    mesh, x = start(rank, size, store), torch.ones(3, 8, dtype=torch.float64)
    message = r"expected 'weight' as a parameter, as under the plan, got a tensor that is none. Register torch.nn.utils"
    for register in (parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm):
        for plan in ({}, {"0": SequenceParallel()}):
            model = parallelize(pair(), mesh, plan)
            register(model[0])
            with pytest.raises(to.StateError, match=message):
                model(x)
    comm = to.comm_from_group(mesh.get_group())
    for register in (parametrizations.weight_norm, nn.utils.weight_norm):
        norm = nn.Linear(8, 8).double()
        to.nn.mark_replicated(norm, comm)
        register(norm)
        with pytest.raises(to.StateError, match=message):  # its gradient would not be summed
            norm(x)


def test_a_replicated_weight_that_is_computed_after_a_plan() -> None:
    run_ranks(replicated_after, 2, comm=False)


def with_an_average(rank: int, size: int, store: Any) -> None:
    mesh, x = start(rank, size, store), torch.ones(3, 8, dtype=torch.float64)
    model = parallelize(pair(), mesh, {"0": SequenceParallel()})
    model[0].average = model[0].weight.detach().clone()
    compare(model, pair(), x)


def test_tensors_that_are_not_used_are_not_refused() -> None:
    """An average of the weights, kept as an attribute."""
    run_ranks(with_an_average, 1, comm=False)

"""Optimizers and tools of torch that see all parameters: what the table in docs/explanation/modules.md says of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from llama_cases import start
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from torch_overlap import TorchComm, ops
from torch_overlap import nn as tnn
from torch_overlap.nn.styles import comm_of
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
FEATURES, HIDDEN, ROWS = 16, 32, 4
FLATTEN = "Attempted to flatten multiple dimensions"
NAMES = {"0.weight": "up.weight0", "0.bias": "up.bias0", "2.weight": "down.weight", "2.bias": "down.bias"}


def stepped(model: nn.Module, name: str, x: Tensor, **options: Any) -> None:
    parameters = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]
    optimizer = getattr(torch.optim, name)(parameters, lr=1e-3, **options)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = model(x).square().sum()
        value.backward()
        return value

    if name == "LBFGS":
        optimizer.step(loss)
    else:
        loss()
        optimizer.step()


def is_right(where: Any, name: str, **options: Any) -> bool:
    """Returns True if a step of a model over a mesh or a communicator is that of the unsharded model."""
    torch.manual_seed(0)
    model = tnn.ParallelMLP(FEATURES, HIDDEN, where, sequence_parallel=False, dtype=torch.float64)
    state = tnn.full_state_dict(model)
    whole = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, FEATURES)).double()
    whole.load_state_dict({name: state[own] for name, own in NAMES.items()})
    x = torch.randn(ROWS, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for one in (model, whole):
        stepped(one, name, x, **options)
    state = tnn.full_state_dict(model)
    # Muon multiplies in bfloat16.
    tolerance = 2e-4 if name == "Muon" else 1e-9
    return all(torch.allclose(state[own], whole.state_dict()[name], rtol=0, atol=tolerance)
               for name, own in NAMES.items())  # fmt: skip


def ranks_that_skip(where: Any, scaler: torch.amp.GradScaler, names: tuple[str, ...], rank: int) -> list[bool]:
    """Returns for each rank True if it skipped a step in which the last rank's gradient of up.weight0 is infinite."""
    torch.manual_seed(0)
    comm = where if isinstance(where, TorchComm) else comm_of(where)
    model = tnn.ParallelMLP(FEATURES, HIDDEN, where, sequence_parallel=False)
    optimizer = torch.optim.SGD([model.get_parameter(name) for name in names], lr=0.1)
    scaler.scale(model(torch.ones(ROWS, FEATURES)).square().sum()).backward()
    grad, before = model.get_parameter("up.weight0").grad, local_of(model.down.bias).clone()
    if rank == comm.get_size() - 1:
        local_of(grad)[0, 0] = float("inf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own tensor with one element
        scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    has_skipped = torch.equal(local_of(model.down.bias), before)
    assert scaler.get_scale() == (scale / 2 if has_skipped else scale)
    return ops.all_gather(torch.tensor([has_skipped]), comm, 0).tolist()


def local_of(x: Any) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def tools(rank: int, size: int, store: Any) -> None:
    mesh = start(rank, size, store)
    comm = comm_of(mesh)
    for name in ("SGD", "Adam", "AdamW", "RMSprop"):
        assert is_right(mesh, name)
        assert is_right(comm, name)
    assert is_right(mesh, "Muon")
    assert not is_right(comm, "Muon")
    with pytest.raises(RuntimeError, match=FLATTEN):
        is_right(mesh, "LBFGS")
    assert not is_right(comm, "LBFGS")
    for name, options in (("Adafactor", {}), ("Rprop", {}), ("SGD", {"fused": True})):
        with pytest.raises((RuntimeError, NotImplementedError)):
            is_right(mesh, name, **options)
        assert name == "Adafactor" or is_right(comm, name, **options)

    for where in (mesh, comm):
        for first, second in (("up.weight0", "down.bias"), ("down.bias", "up.weight0")):  # split and replicated
            scaler = ShardedGradScaler("cpu", process_group=mesh.get_group())
            assert ranks_that_skip(where, scaler, (first, second), rank) == [True] * size
            skips = ranks_that_skip(where, torch.amp.GradScaler("cpu"), (first, second), rank)
            assert skips == [where is mesh and first == "up.weight0"] * (size - 1) + [True]

    x = torch.ones(ROWS, FEATURES)
    model = tnn.ParallelMLP(FEATURES, HIDDEN, mesh, sequence_parallel=False)
    with pytest.raises(RuntimeError, match=FLATTEN):
        nn.utils.parameters_to_vector(model.parameters())
    with torch.autograd.detect_anomaly(check_nan=False):
        model(x).sum().backward()
    with torch.autograd.detect_anomaly(), pytest.raises(NotImplementedError, match=r"aten\._is_any_true"):
        model(x).sum().backward()
    y = model(x)
    weight = model.down.weight
    weight.data = weight.data * 2
    torch.testing.assert_close(model(x), y)
    with torch.no_grad():
        weight.copy_(weight * 2)
        model.down.bias.mul_(2)
    torch.testing.assert_close(model(x), 2 * y)
    with pytest.raises(NotImplementedError, match=r"c10d\.broadcast_"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, process_group=mesh.get_group()).step()
    model = tnn.ParallelMLP(FEATURES, HIDDEN, comm, sequence_parallel=False)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, process_group=mesh.get_group())
    optimizer.step()
    mine, other = tnn.full_state_dict(model)["up.weight0"].chunk(size)
    torch.testing.assert_close(mine, other)  # one rank's shard on both


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_the_table_of_the_manual() -> None:
    run_ranks(tools, 2, comm=False, timeout=120)

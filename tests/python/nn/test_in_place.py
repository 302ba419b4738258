"""Results of layers may be changed in place, as those of nn.Linear; the gradients are those of the other spelling."""

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_overlap.nn as tnn
from torch_overlap.nn.styles import ColumnParallel, GatherSequence, SequenceParallel, ShardInput, parallelize
from torch_overlap.testing import run_ranks

LAYERS = {
    "column": lambda c, **o: tnn.ColumnParallelLinear(16, 16 * c.get_size(), c, **o),
    "columns": lambda c, **o: tnn.ColumnParallelLinear(16, [16 * c.get_size(), 16 * c.get_size()], c, **o),
    "columns apart": lambda c, **o: apart(tnn.ColumnParallelLinear(16, [16 * c.get_size(), 16 * c.get_size()], c, **o)),
    "gathered": lambda c, **o: tnn.ColumnParallelLinear(16, 16 * c.get_size(), c, gather_output=True, **o),
    "row": lambda c, **o: tnn.RowParallelLinear(16 * c.get_size(), 16, c, **o),
}


def apart(layer):
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
    return layer


def layers(comm, seed, name, options):
    torch.manual_seed(seed)
    options = dict(options)
    if "scaling" in options:
        options["fp8"] = tnn.Float8Recipe(options.pop("scaling"))
    layer = LAYERS[name](comm, **options)
    twin = copy.deepcopy(layer)
    for shape in ((4, 16), (4, 2, 16), (4, 1, 2, 16)):
        leaves = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_() for _ in range(2)]
        for one, leaf, in_place in ((layer, leaves[0], True), (twin, leaves[1], False)):
            one.zero_grad()
            results = one(leaf)
            loss = 0.0
            for y in results if isinstance(results, list) else [results]:
                changed = y.add_(1).relu_() if in_place else y.add(1).relu()
                loss = loss + changed.square().sum()
            loss.backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
        for own, other in zip(layer.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize(
    "options", [{}, {"sequence_parallel": False}, {"scaling": "current"}, {"scaling": "delayed"}], ids=str
)
@pytest.mark.parametrize("name", LAYERS)
def test_results_of_layers(seed, name, options):
    run_ranks(layers, 2, seed, name, options)


class Model(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.in_place = in_place

    def forward(self, hidden_states):
        x = self.norm(torch.tanh(self.body(hidden_states)))
        x = x.mul_(0.5) if self.in_place else x * 0.5
        y = self.head(x)
        return y.add_(1) if self.in_place else y + 1


def gathered(rank, size, store, seed):
    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    torch.manual_seed(seed)
    whole = Model(False).double()
    model = Model(True).double()
    model.load_state_dict(whole.state_dict())
    plan = {
        "": ShardInput(), "body": SequenceParallel(), "norm": GatherSequence(),
        "head": ColumnParallel(sequence_parallel=False, gather_output=True),
    }  # fmt: skip
    parallelize(model, mesh, plan)
    for length in (6, 5):
        x = torch.randn(2, length, 8, dtype=torch.float64)
        results = []
        for one in (model, whole):
            one.zero_grad()
            y = one(x)
            y.square().sum().backward()
            results.append([y.detach(), *(p.grad for p in one.parameters())])
        found = [getattr(value, "full_tensor", lambda value=value: value)() for value in results[0]]
        torch.testing.assert_close(found, results[1])
    dist.destroy_process_group()


def test_the_result_of_gather_sequence(seed):
    run_ranks(gathered, 2, seed, comm=False)

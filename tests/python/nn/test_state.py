"""State dicts for any number of ranks, and the gradients of parameters that every rank holds."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_overlap import nn as tnn
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)


def make(comm, **options):
    return nn.Sequential(
        tnn.ParallelTransformerBlock(12, 12, 24, comm, **options),
        nn.Linear(12, 12),
        tnn.ColumnParallelLinear(12, 24, comm, **options),
        tnn.RowParallelLinear(24, 12, comm, **options),
    )


def randomized(module, comm, seed):
    """Returns shards that differ between the ranks; tensors that every rank holds in full are the same."""
    split = tnn.split_parameters(module)
    generators = [torch.Generator().manual_seed(seed + offset) for offset in (0, 1 + comm.get_rank())]
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(generator=generators[name in split])
    return module


def save(comm, seed):
    module = randomized(make(comm), comm, seed)
    full = tnn.full_state_dict(module)
    assert list(full) == list(module.state_dict())
    for key, value in tnn.full_state_dict(module, offload_to_cpu=True).items():
        assert torch.equal(value, full[key])
    return full


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_checkpoint_of_two_ranks_loads_on_any_number(seed, size):
    """A state dict is saved by two ranks, loaded by `size`, and saved again by those: it is the same."""
    saved = run_ranks(save, 2, seed, backend="local")
    assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])
    state = saved[0]

    def rank(comm):
        module = make(comm)
        assert str(tnn.load_full_state_dict(module, state)) == "<All keys matched successfully>"
        again = tnn.full_state_dict(module)
        assert list(again) == list(state)
        for key, value in again.items():
            assert torch.equal(value, state[key])

    run_ranks(rank, size, backend="local")


def test_a_state_dict_has_the_shards_and_comes_back(seed):
    def rank(comm):
        module = randomized(make(comm), comm, seed)
        state = module.state_dict()
        assert state["2.weight"].shape == (12, 12)
        assert state["3.weight"].shape == (12, 12)
        assert state["3.bias"].shape == (12,)
        assert state["0.attention.qkv.weight0"].shape == (6, 12)
        stored = io.BytesIO()
        torch.save(state, stored)
        stored.seek(0)
        other = make(comm)
        other.load_state_dict(torch.load(stored))
        for key, value in other.state_dict().items():
            assert torch.equal(value, state[key])

    run_ranks(rank, 2, backend="local")


def test_one_layer_loads_what_an_nn_linear_saved():
    linear = nn.Linear(6, 8)

    def rank(comm):
        for kind in (tnn.ColumnParallelLinear, tnn.RowParallelLinear):
            layer = kind(6, 8, comm)
            tnn.load_full_state_dict(layer, linear.state_dict())
            whole = nn.Linear(6, 8)
            whole.load_state_dict(tnn.full_state_dict(layer))
            assert torch.equal(whole.weight, linear.weight)
            assert torch.equal(whole.bias, linear.bias)

    run_ranks(rank, 2, backend="local")


def test_errors_of_loading():
    def rank(comm):
        layer = tnn.ColumnParallelLinear(6, 8, comm)
        message = r"load_full_state_dict: expected 'weight' of shape \[8, 6\], got \[4, 6\]; a shard loads by"
        with pytest.raises(ValueError, match=message):
            tnn.load_full_state_dict(layer, layer.state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            tnn.load_full_state_dict(layer, {"weight": torch.ones(8, 6)})
        result = tnn.load_full_state_dict(layer, {"weight": torch.ones(8, 6), "other": torch.ones(1)}, strict=False)
        assert (result.missing_keys, result.unexpected_keys) == (["bias"], ["other"])

    run_ranks(rank, 2, backend="local")


# --- Layouts ------------------------------------------------------------------------------------------


def test_which_parameters_are_split():
    def rank(comm):
        split = tnn.split_parameters(make(comm))
        assert {name: dim for name, (_, dim) in split.items() if not name.startswith("0.")} == {
            "2.weight": 0, "2.bias": 0, "3.weight": 1,
        }  # fmt: skip
        assert set(tnn.split_parameters(tnn.RowParallelLinear(4, 4, comm))) == {"weight"}

    run_ranks(rank, 2, backend="local")


def deep_copied(module):
    return copy.deepcopy(module)


def materialized(module):
    state = module.state_dict()
    module.to("meta").to_empty(device="cpu").load_state_dict(state)
    return module


@pytest.mark.parametrize("change", [lambda m: m, deep_copied, materialized, nn.Module.double],
                         ids=["as made", "copied", "from meta", "double"])  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sync_sums_what_is_partial_and_nothing_else(size, change):
    def rank(comm):
        module = nn.Sequential(nn.LayerNorm(12), tnn.ColumnParallelLinear(12, 12, comm),
                               tnn.RowParallelLinear(12, 12, comm),
                               tnn.RowParallelLinear(12, 12, comm, sequence_parallel=False))  # fmt: skip
        tnn.mark_replicated(module[0], comm)
        module = change(module)
        factor = comm.get_rank() + 1.0
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, factor)
        module[0].bias.grad = None
        tnn.sync_replicated_grads(module, comm)  # there is nothing to do: backward sums
        assert all(p.grad is None or (p.grad == factor).all() for p in module.parameters())
        tnn.defer_replicated_grads(module)
        tnn.sync_replicated_grads(module, comm)
        total = size * (size + 1) / 2
        wanted = {"0.weight": total, "2.bias": total}
        for name, parameter in module.named_parameters():
            if name == "0.bias":
                assert parameter.grad is None
            else:
                assert torch.equal(parameter.grad, torch.full_like(parameter, wanted.get(name, factor))), name

    run_ranks(rank, size, backend="local")


def test_sync_keeps_to_the_communicator_it_is_given_and_counts_a_shared_parameter_once():
    def rank(comm):
        other = comm.split([0, 1], name="other")
        first, second = nn.LayerNorm(4), nn.LayerNorm(4)
        second.weight = first.weight
        third = nn.LayerNorm(4)
        tnn.mark_replicated(nn.Sequential(first, second), comm)
        tnn.mark_replicated(third, other)
        module = nn.Sequential(first, second, third)
        tnn.defer_replicated_grads(module)
        for parameter in module.parameters():
            parameter.grad = torch.ones(4)
        tnn.sync_replicated_grads(module, other)
        assert [p.grad[0].item() for p in module.parameters()] == [1, 1, 1, 2, 2]
        tnn.sync_replicated_grads(module, comm)
        assert [p.grad[0].item() for p in module.parameters()] == [2, 2, 2, 2, 2]
        other.finalize()

    run_ranks(rank, 2, backend="local")


def test_a_second_sync_adds_nothing():
    def rank(comm):
        norm = nn.LayerNorm(4).double()
        tnn.mark_replicated(norm, comm)
        tnn.defer_replicated_grads(norm)
        x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.get_rank()))
        parts = [torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(2)]
        for step in range(2):
            norm.zero_grad()
            for _ in range(2):
                (norm(x) * x).sum().backward()
            tnn.sync_replicated_grads(norm, comm)
            norm.weight.grad.mul_(0.5)  # clipping
            tnn.sync_replicated_grads(norm, comm)
            weight = sum((2 * F.layer_norm(part, (4,)) * part).sum(0) for part in parts)
            torch.testing.assert_close(norm.weight.grad, weight * 0.5, rtol=1e-12, atol=1e-12, msg=f"step {step}")
            torch.testing.assert_close(norm.bias.grad, sum(2 * part.sum(0) for part in parts), rtol=1e-12, atol=1e-12)

    run_ranks(rank, 2, backend="local")


def test_mark_replicated_leaves_parallel_layers_alone():
    def rank(comm):
        block = nn.Sequential(nn.LayerNorm(4), tnn.ColumnParallelLinear(4, 4, comm))
        tnn.mark_replicated(block, comm)
        assert set(tnn.split_parameters(block)) == {"1.weight", "1.bias"}

    run_ranks(rank, 2, backend="local")


def check_copies(comm):
    layer = tnn.ColumnParallelLinear(4, 4, comm)
    assert copy.deepcopy(layer).comm == comm  # the communicator is shared
    for value in (comm, layer):
        with pytest.raises(
            TypeError, match=rf"^pickle: expected .*, got the communicator '{comm.get_name()}'; make one"
        ):
            pickle.dumps(value)


def test_layers_are_copied_and_not_pickled():
    run_ranks(check_copies, 1, backend="fake")

"""Sequences of several models, and several sequences of one model, whose lengths the ranks may not divide."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from llama_cases import start
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import torch_overlap as to
from torch_overlap.nn.styles import (
    ColumnParallel,
    GatherSequence,
    RowParallel,
    SequenceParallel,
    ShardInput,
    parallelize,
)
from torch_overlap.testing import run_ranks

DIM = 6
STYLES = {"0": ShardInput(argument="input"), "1": SequenceParallel()}


def inputs(seed: int, *lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, length, DIM, generator=generator, dtype=torch.float64) for length in lengths]


def two_models(rank: int, size: int, store: Any, seed: int) -> None:
    """The first model leaves its sequence split; the second has rows of its own."""
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    first = parallelize(nn.Sequential(nn.Identity(), nn.LayerNorm(DIM)).double(), mesh, STYLES)
    whole = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)).double()
    second = parallelize(copy.deepcopy(whole), mesh, {"0": ColumnParallel(), "2": RowParallel()})
    odd, even = inputs(seed, 2 * size - 1, 2 * size)
    first(odd)
    got, want = second(even.chunk(size, 1)[rank]), whole(even).chunk(size, 1)[rank]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_a_length_belongs_to_one_model(seed: int, size: int) -> None:
    run_ranks(two_models, size, seed, comm=False)


class Cross(nn.Module):
    """A decoder whose projections take rows of the encoder and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Identity(), nn.LayerNorm(DIM))
        self.decoder = nn.Sequential(nn.Identity(), nn.LayerNorm(DIM))
        self.k, self.q, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        source, target = self.encoder(source), self.decoder(target)
        return self.out(self.q(target).tanh() * self.k(source).mean(1, keepdim=True))


def cross(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    whole = Cross().double()
    plan = {f"{name}.{key}": style for name in ("encoder", "decoder") for key, style in STYLES.items()}
    model = parallelize(copy.deepcopy(whole), mesh, plan | {"k": ColumnParallel(), "q": ColumnParallel(),
                                                             "out": RowParallel()})  # fmt: skip
    for lengths in ((2 * size, 3 * size), (2 * size - 1, 2 * size - 1)):
        xs = inputs(seed, *lengths)
        for module in (model, whole):
            module.zero_grad()
        got, want = model(*xs), whole(*xs)
        own = got.size(1)
        want.square().sum().backward()
        got[:, : max(0, min(own, lengths[1] - rank * own))].square().sum().backward()
        torch.testing.assert_close(got[:, : lengths[1] - rank * own], want[:, rank * own : (rank + 1) * own],
                                   rtol=1e-10, atol=1e-12)  # fmt: skip
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=1e-9,
                                       atol=1e-11)  # fmt: skip
    for lengths in ((2 * size - 1, 2 * size), (2 * size, 2 * size - 1)):
        message = rf"the sequence of length {lengths[0]} to be gathered before .*, got one of length {lengths[1]}"
        with pytest.raises(to.StateError, match=message):
            model(*inputs(seed, *lengths))
        model(*inputs(seed, 2 * size, 2 * size))


@pytest.mark.parametrize("size", [2, 3])
def test_two_sequences_of_one_model_are_right_or_refused(seed: int, size: int) -> None:
    run_ranks(cross, size, seed, comm=False)


class LastRow(nn.Module):
    """Logits of the last row alone, as a model makes them for generation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = nn.Identity(), nn.LayerNorm(DIM), nn.Linear(DIM, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(x))[:, -1:])


def last_row(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    whole = LastRow().double()
    head = {"gather_output": True}
    split = {"blocks": ShardInput(argument="input"), "norm": SequenceParallel(), "head": ColumnParallel(**head)}
    gathered = split | {"norm": GatherSequence(), "head": ColumnParallel(sequence_parallel=False, **head)}
    wrong, right = (parallelize(copy.deepcopy(whole), mesh, plan) for plan in (split, gathered))
    for x in inputs(seed, 2 * size, 2 * size + 1):
        message = rf"expected all rows of the sequence of length {x.size(1)} .*, got 1 on each of {size} ranks"
        with pytest.raises(to.StateError, match=message):
            wrong(x)
        for module in (right, whole):
            module.zero_grad()
            module(x).square().sum().backward()
        torch.testing.assert_close(right(x), whole(x), rtol=1e-10, atol=1e-12)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(right.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=1e-9,
                                       atol=1e-11)  # fmt: skip


def test_logits_of_the_last_row_are_right_or_refused(seed: int) -> None:
    run_ranks(last_row, 2, seed, comm=False)


def by_module(rank: int, size: int, store: Any) -> None:
    mesh = start(rank, size, store)
    model = parallelize_module(nn.Sequential(nn.Identity(), nn.LayerNorm(DIM)), mesh, dict(STYLES))
    assert model(torch.ones(1, 2 * size, DIM)).shape == (1, 2, DIM)
    with pytest.raises(to.UnsupportedError, match=r"divisible by 2 ranks under parallelize_module, got length 5. Pad"):
        model(torch.ones(1, 5, DIM))


def test_parallelize_module_pads_no_sequence() -> None:
    run_ranks(by_module, 2, comm=False)


class Repeated(nn.Module):
    """One block that runs twice, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Identity()
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8))
        self.head = nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        return self.head(self.block(self.block(x)))


def repeated(rank: int, size: int, store: Any, seed: int) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    whole = Repeated().double()
    plan = {"begin": ShardInput(), "block.0": SequenceParallel(), "block.1": ColumnParallel(),
            "block.2": RowParallel(), "head": ColumnParallel(gather_output=True)}  # fmt: skip
    model = parallelize(copy.deepcopy(whole), mesh, plan)
    for length in (6, 5):
        x = torch.randn(2, length, 8, dtype=torch.float64)
        results = [one(x) for one in (model, whole)]
        torch.testing.assert_close(*results)
        for y in results:
            y.square().sum().backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad)


def test_a_block_that_runs_twice_after_the_split(seed: int) -> None:
    run_ranks(repeated, 2, seed, comm=False)


class Mixing(nn.Module):
    """A block between whose linears every row sees all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).tanh()
        return x + self.down(y * y.mean(1, keepdim=True))


class Recomputed(nn.Module):
    """Blocks that are recomputed in the backward pass, after one sequence or two, and a head."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.second = (nn.ModuleList([nn.Identity(), Mixing(), Mixing()]) for _ in range(2))
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        def run(blocks: nn.ModuleList, z: torch.Tensor) -> torch.Tensor:
            for block in blocks:
                z = block(z) if block is blocks[0] else checkpoint(block, z, use_reentrant=self.use_reentrant)
            return z

        x = run(self.first, x)
        return self.head(x if y is None else x * run(self.second, y))


def recomputed(rank: int, size: int, store: Any, seed: int, use_reentrant: bool) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    whole = Recomputed(use_reentrant=use_reentrant).double()
    plan = {"first.0": ShardInput(), "second.0": ShardInput(), "*.*.up": ColumnParallel(), "*.*.down": RowParallel(),
            "head": ColumnParallel(gather_output=True)}  # fmt: skip
    model = parallelize(copy.deepcopy(whole), mesh, plan)
    even, odd, longer = inputs(seed, 2 * size, 2 * size - 1, 4 * size - 1)
    # Calls whose losses are added, and one in between without gradients.
    passes = [([(odd,), (odd + 1,)], None), ([(odd,), (longer,)], None), ([(even,), (odd,)], None),
              ([(even,)], (odd,)), ([(odd,)], (even,)), ([(even,)], (longer[:, 1:],)),
              ([(odd, odd + 1)], None), ([(odd, odd + 1), (longer, longer + 1)], (odd,))]  # fmt: skip
    for calls, between in passes:
        found = []
        for module in (model, whole):
            module.zero_grad()
            leaves = [[x.clone().requires_grad_() for x in call] for call in calls]
            loss = torch.stack([module(*call).square().sum() for call in leaves]).sum()
            if between is not None:
                with torch.no_grad():
                    module(*between)
            loss.backward()
            found.append([loss.detach(), *[x.grad for call in leaves for x in call]])
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)
        for name, parameter in whole.named_parameters():
            got = model.get_parameter(name).grad
            assert (got is None) == (parameter.grad is None)
            if got is not None:
                torch.testing.assert_close(got.full_tensor(), parameter.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_blocks_are_recomputed_with_the_sequence_of_their_pass(seed: int, use_reentrant: bool) -> None:
    run_ranks(recomputed, 2, seed, use_reentrant, comm=False)


def ungathered(rank: int, size: int, store: Any, seed: int, use_reentrant: bool) -> None:
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    whole = Recomputed(use_reentrant=use_reentrant).double()
    whole.head = nn.Identity()
    plan = {"first.0": ShardInput(), "*.*.up": ColumnParallel(), "*.*.down": RowParallel()}
    model = parallelize(copy.deepcopy(whole), mesh, plan)
    even, odd, longer = inputs(seed, 2 * size, 2 * size - 1, 4 * size - 1)
    for passes in ((odd,), (odd, odd + 1), (odd, longer), (even, odd), (odd, even), (odd, even, longer)):
        found = []
        for module in (model, whole):
            module.zero_grad()
            losses = []
            for x in passes:
                y = module(x.clone().requires_grad_())
                part = -(-x.size(1) // size)
                first = rank * part if module is whole else 0
                count = min(part, x.size(1) - rank * part)  # without the padding
                losses.append(y[:, first : first + count].square().sum())
            torch.stack(losses).sum().backward()
            found.append([parameter.grad for parameter in module.first.parameters()])
        for got, grad in zip(*found, strict=True):
            wanted = grad.clone()
            torch.distributed.all_reduce(wanted)  # each rank's loss is that of its rows
            torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_blocks_are_recomputed_without_a_gather_after_them(seed: int, use_reentrant: bool) -> None:
    run_ranks(ungathered, 2, seed, use_reentrant, comm=False)


class Regions(nn.Module):
    """A model of which parts are compiled by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.block, self.head = nn.Identity(), Mixing(), nn.Linear(DIM, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.begin(x)))


def compiled_regions(rank: int, size: int, store: Any, seed: int, region: str, full: bool) -> None:
    torch._dynamo.reset()
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    whole = Regions().double()
    plan = {"begin": ShardInput(argument="input"), "block.up": ColumnParallel(), "block.down": RowParallel(),
            "head": ColumnParallel(gather_output=True)}  # fmt: skip
    model = parallelize(copy.deepcopy(whole), mesh, plan)
    even, odd, longer = inputs(seed, 2 * size, 2 * size - 1, 4 * size - 1)
    with torch.no_grad():
        torch.testing.assert_close(model(odd), whole(odd))
    for module in model.get_submodule(region).modules() if region == "block" else [model.get_submodule(region)]:
        module.compile(backend="aot_eager", fullgraph=full)
    for x in (even, odd, longer, even, odd):
        if full and x is not even:
            with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"divisible by {size} ranks under torch\.compile"):
                model(x)
            continue
        results = [one(x) for one in (model, whole)]
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
        for one, y in zip((model, whole), results, strict=True):
            one.zero_grad()
            y.square().sum().backward()
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=1e-9,
                                       atol=1e-11)  # fmt: skip


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("region", ["begin", "block", "head"])
def test_a_compiled_part_of_a_model_is_right_or_refuses_a_padded_sequence(seed: int, region: str, full: bool) -> None:
    run_ranks(compiled_regions, 2, seed, region, full, comm=False)


def compiled_decoder(rank: int, size: int, store: Any, seed: int, full: bool) -> None:
    torch._dynamo.reset()
    mesh = start(rank, size, store)
    model = nn.ModuleDict({"encoder": nn.Identity(), "decoder": nn.Identity()})
    parallelize(model, mesh, dict.fromkeys(model, ShardInput(argument="input")))
    even, odd = inputs(seed, 2 * size, 2 * size - 1)
    model["decoder"].compile(backend="aot_eager", fullgraph=full)
    for _ in range(2):  # a pass of the same module begins again
        assert model["encoder"](odd).size(1) == 2
    with pytest.raises(
        (torch._dynamo.exc.Unsupported, to.Error), match=r"ShardInput: expected .* to be gathered before"
    ):
        model["decoder"](even)
    model["encoder"](even)
    assert model["decoder"](even).size(1) == 2


@pytest.mark.parametrize("full", [False, True])
def test_a_compiled_module_does_not_split_beside_a_padded_sequence(seed: int, full: bool) -> None:
    run_ranks(compiled_decoder, 2, seed, full, comm=False)

"""Medians, ratios, and rounds whose order rotates."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter
from functools import partial

import pytest
import torch

import torch_overlap as to
from torch_overlap._timing import Stopwatch, interleave, order_of, ratio_of, slowest_rank, spread_of
from torch_overlap.testing import run_ranks


def test_spread() -> None:
    values = [random.random() for _ in range(101)]
    ordered = sorted(values)
    median, iqr = spread_of(values)
    assert median == statistics.median(values) == ordered[50]
    assert iqr == pytest.approx(ordered[76] - ordered[24], abs=ordered[77] - ordered[75] + ordered[25] - ordered[23])
    assert spread_of([3.0, 1.0]) == (2.0, 2.0)


def test_a_ratio_is_of_each_round() -> None:
    noise = [random.uniform(1, 100) for _ in range(21)]
    samples = {"ours": [1.5 * x for x in noise], "theirs": noise}
    assert ratio_of(samples, "ours", "theirs") == pytest.approx((1.5, 0.0))
    with pytest.raises(ValueError, match="zip"):
        ratio_of({"ours": [1.0], "theirs": noise}, "ours", "theirs")


@pytest.mark.parametrize("count", range(1, 12))
def test_every_variant_has_every_place_and_neighbour_as_often(count: int) -> None:
    names = [chr(ord("a") + i) for i in range(count)]
    turns = count * (1 + count % 2)
    orders = [order_of(names, turn) for turn in range(turns)]
    assert all(sorted(order) == names for order in orders)
    assert set(Counter((place, name) for order in orders for place, name in enumerate(order)).values()) == {
        turns // count
    }
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(pairs) == count * (count - 1)
    assert set(pairs.values()) <= {turns // count}
    assert orders[0] == order_of(names, turns)
    assert order_of([], 3) == []


def test_rounds() -> None:
    log: list[str] = []

    def sampler(name: str) -> float:
        log.append(name)
        return float(len(log))

    samples = interleave({name: partial(sampler, name) for name in "abc"}, rounds=4, warmup=2)
    assert ["".join(sorted(log[i : i + 3])) for i in range(0, 18, 3)] == ["abc"] * 6
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys("abc", 4)
    for name, values in samples.items():
        assert [log[int(value) - 1] for value in values] == [name] * 4
        assert min(values) > 2 * 3


def test_a_stopwatch_prepares_then_meets_then_works() -> None:
    log: list[str] = []
    watch = Stopwatch(torch.device("cpu"), lambda: log.append("meet"))
    sample = watch.sampler(lambda: log.append("work"), calls=5, repeats=2, before=lambda: log.append("before"))
    assert sample() >= 0
    assert log == ["before", "meet", "work", "work"]


class _Event:
    """A CUDA event that the device either has reached or has not when the host queries it."""

    late = True

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    synchronize = record

    def query(self) -> bool:
        return self.late

    def elapsed_time(self, end: _Event) -> float:
        return 1.0


def test_a_stopwatch_leads_by_more_where_the_host_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    watch = Stopwatch(torch.device("cuda"), lambda: None, lead_cycles=10)
    sample, other = watch.sampler(lambda: None, calls=5), watch.sampler(lambda: None)
    assert [sample() for _ in range(8)] == [200.0] * 8
    assert slept == [10, 20, 40, 80, 160, 320, 320, 320]
    monkeypatch.setattr(_Event, "late", False)
    other(), other()
    assert slept[8:] == [10, 10]  # each work has its own
    eager = Stopwatch(torch.device("cuda"), lambda: None).sampler(lambda: None)
    monkeypatch.setattr(_Event, "late", True)
    eager(), eager()
    assert len(slept) == 10


def run_slowest(comm: to.TorchComm) -> None:
    rank = comm.get_rank()
    found = slowest_rank({"b": [1.0 + rank, 9.0 - rank], "a": [5.0, 5.0 * rank]}, comm)
    assert found == {"a": [5.0, 5.0], "b": [2.0, 9.0]}


def test_the_slowest_rank_counts() -> None:
    run_ranks(run_slowest, 2)

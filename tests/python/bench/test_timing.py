"""Medians, ratios, and rounds whose order rotates."""

from __future__ import annotations

import random
import statistics
from functools import partial

import pytest
import torch

import torch_overlap as to
from torch_overlap.bench.timing import Stopwatch, interleave, ratio_of, rotated, slowest_rank, spread_of
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


def test_every_variant_comes_first_as_often() -> None:
    names = ["a", "b", "c"]
    orders = [rotated(names, turn) for turn in range(6)]
    assert all(sorted(order) == names for order in orders)
    assert [order[0] for order in orders] == names * 2
    assert rotated([], 3) == []


def test_rounds() -> None:
    log: list[str] = []

    def sampler(name: str) -> float:
        log.append(name)
        return float(len(log))

    samples = interleave({name: partial(sampler, name) for name in "abc"}, rounds=4, warmup=2)
    assert "".join(log) == "abcbcacababcbcacab"
    assert samples == {"a": [9, 10, 15, 17], "b": [7, 11, 13, 18], "c": [8, 12, 14, 16]} or all(
        len(values) == 4 for values in samples.values()
    )
    for name, values in samples.items():
        assert [log[int(value) - 1] for value in values] == [name] * 4
        assert min(values) > 2 * 3


def test_a_stopwatch_prepares_then_meets_then_works() -> None:
    log: list[str] = []
    watch = Stopwatch(torch.device("cpu"), lambda: log.append("meet"))
    sample = watch.sampler(lambda: log.append("work"), calls=5, repeats=2, before=lambda: log.append("before"))
    assert sample() >= 0
    assert log == ["before", "meet", "work", "work"]


def run_slowest(comm: to.TorchComm) -> None:
    rank = comm.get_rank()
    found = slowest_rank({"b": [1.0 + rank, 9.0 - rank], "a": [5.0, 5.0 * rank]}, comm)
    assert found == {"a": [5.0, 5.0], "b": [2.0, 9.0]}


def test_the_slowest_rank_counts() -> None:
    run_ranks(run_slowest, 2)

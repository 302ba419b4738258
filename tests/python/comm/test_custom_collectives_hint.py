"""Every backend accepts the hint custom_collectives. Its effect is on NCCL: gpu/test_small_collectives.py."""

from datetime import timedelta
from typing import Any

import pytest
import torch

import torch_overlap as to
from torch_overlap import InvalidValueError, ReduceOp
from torch_overlap.testing import run_ranks

MODES = ["off", "auto", "always", "ll", "ll128", "simple", "two_shot", "bulk", "zero_copy"]
BAD = "custom_collectives: expected off, auto, always, ll, ll128, simple, two_shot, bulk or zero_copy, got 'fast'"


def run_modes(comm: to.TorchComm) -> None:
    for mode in MODES:
        x = torch.ones(3)
        comm.all_reduce(x, ReduceOp.SUM, False, hints={"custom_collectives": mode})
        assert (x == comm.get_size()).all()
        comm.set_hints({"custom_collectives": mode})
        assert comm.get_options().hints.get("custom_collectives", "auto") == mode
    with pytest.raises(InvalidValueError, match=f"hint {BAD}"):
        comm.all_reduce(x, ReduceOp.SUM, False, hints={"custom_collectives": "fast"})
    with pytest.raises(InvalidValueError, match=f"hint {BAD}"):
        comm.set_hints({"custom_collectives": "fast"})
    comm.barrier(False)  # nothing was sent


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_every_mode_is_taken_and_nothing_else(backend: str) -> None:
    run_ranks(run_modes, 2, backend=backend)


def run_environment(rank: int, size: int, store: Any) -> None:
    options: dict[str, Any] = {"store": store, "rank": rank, "size": size, "timeout": timedelta(seconds=60)}
    with to.new_comm("gloo", "cpu", "by_environment", **options) as comm:
        assert comm.get_options().hints["custom_collectives"] == "off"
    with to.new_comm("gloo", "cpu", "by_hint", hints={"custom_collectives": "always"}, **options) as comm:
        assert comm.get_options().hints["custom_collectives"] == "always"
    hints = {"custom_collectives": "ll"} if rank == 0 else {}
    with pytest.raises(InvalidValueError, match=r"the same request for 'differs' on all ranks.*custom_collectives"):
        to.new_comm("gloo", "cpu", "differs", hints=hints, **options)


def test_the_environment_is_the_default_and_all_ranks_agree() -> None:
    run_ranks(run_environment, 2, comm=False, env={"TORCH_OVERLAP_CUSTOM_COLLECTIVES": "off"})


def test_a_bad_value_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_OVERLAP_CUSTOM_COLLECTIVES", "fast")
    with pytest.raises(InvalidValueError, match=f"TORCH_OVERLAP_CUSTOM_COLLECTIVES{BAD[len('custom_collectives') :]}"):
        to.new_comm("fake", "cpu", "bad_environment", rank=0, size=1)

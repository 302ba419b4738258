"""run_ranks itself: results by rank, failures with their tracebacks, no hang."""

import os
import time

import pytest
import torch

from torch_overlap import ReduceOp, TorchComm
from torch_overlap.testing import RanksFailed, run_ranks


class Parcel:
    """A class of the test's own module, sent to ranks and returned."""

    def __init__(self, value: object) -> None:
        self.value = value


def run_exchange(rank: int, size: int, store: object, parcel: Parcel) -> Parcel:
    store.set(f"at{rank}", str(rank))  # type: ignore[attr-defined]
    met = [int(store.get(f"at{peer}")) for peer in range(size)]  # type: ignore[attr-defined]
    return Parcel((rank, met, parcel.value, os.getpid(), torch.full((2,), rank)))


def test_results_come_by_rank_from_processes_that_live_on() -> None:
    pids = set()
    for size in (2, 3, 1):
        results = [parcel.value for parcel in run_ranks(run_exchange, size, Parcel("x"), comm=False)]
        assert [result[:3] for result in results] == [(rank, list(range(size)), "x") for rank in range(size)]
        assert [int(result[4][1]) for result in results] == list(range(size))
        pids |= {result[3] for result in results}
    assert len(pids) == 3
    assert os.getpid() not in pids


def run_hash(rank: int, size: int, store: object) -> int:
    return hash("a name")


def test_the_sets_of_neighbours_iterate_in_different_orders() -> None:
    """An order that ranks must agree on, and that comes from a set, makes tests fail."""
    hashes = run_ranks(run_hash, 3, comm=False)
    assert hashes[0] != hashes[1] != hashes[2]


def run_environment(rank: int, size: int, store: object) -> tuple[str | None, str | None]:
    return os.environ.get("A_TEST_VARIABLE"), os.environ.get("HOME")


def test_variables_are_set_for_the_call_only() -> None:
    assert run_ranks(run_environment, 1, comm=False, env={"A_TEST_VARIABLE": "1", "HOME": None}) == [("1", None)]
    assert run_ranks(run_environment, 1, comm=False) == [(None, os.environ.get("HOME"))]


def run_failing(comm: TorchComm) -> None:
    if comm.get_rank() == 1:
        raise ValueError("rank one has a problem")
    comm.all_reduce(torch.ones(1), ReduceOp.SUM, False).wait()


@pytest.mark.parametrize("which", ["gloo", "local"])
def test_a_failing_rank_frees_the_others_and_is_told(which: str) -> None:
    run_ranks(run_exchange, 2, Parcel(1), comm=False)  # the processes exist
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="ValueError: rank one has a problem") as caught:
        run_ranks(run_failing, 2, backend=which, timeout=200)
    assert set(caught.value.errors) == {0, 1}
    assert "all_reduce" in caught.value.errors[0]
    assert time.monotonic() - start < 90  # the timeout is 100


def run_dying(rank: int, size: int, store: object) -> None:
    if rank == 0:
        print("last words")
        os._exit(3)


def test_a_dead_rank_is_told_with_its_last_words() -> None:
    with pytest.raises(RanksFailed, match="exited with status 3") as caught:
        run_ranks(run_dying, 2, comm=False)
    assert "last words" in caught.value.errors[0]
    run_ranks(run_exchange, 2, Parcel(1), comm=False)


def run_hanging(rank: int, size: int, store: object) -> None:
    if rank == 1:
        time.sleep(1000)


def test_a_hanging_rank_is_killed_and_where_it_was_is_told() -> None:
    with pytest.raises(RanksFailed, match="did not end") as caught:
        run_ranks(run_hanging, 2, comm=False, timeout=8)
    assert set(caught.value.errors) == {1}
    assert "in run_hanging" in caught.value.errors[1]
    run_ranks(run_exchange, 2, Parcel(1), comm=False)


def fail_to_load() -> None:
    raise KeyError("a class that is not here")


class Unloadable:
    def __reduce__(self) -> tuple[object, ...]:
        return fail_to_load, ()


def run_unloadable(rank: int, size: int, store: object) -> object:
    return Unloadable() if rank == 1 else rank


def test_a_result_that_cannot_be_unpickled_is_told_with_its_rank() -> None:
    with pytest.raises(RanksFailed, match="its result cannot be unpickled") as caught:
        run_ranks(run_unloadable, 2, comm=False)
    assert set(caught.value.errors) == {1}
    assert "a class that is not here" in caught.value.errors[1]
    run_ranks(run_exchange, 2, Parcel(1), comm=False)


def test_a_function_must_be_findable() -> None:
    with pytest.raises(TypeError, match="expected a module-level function"):
        run_ranks(lambda comm: None, 2)
    with pytest.raises(ValueError, match="expected size >= 1"):
        run_ranks(run_failing, 0)


def run_skipping(comm: TorchComm) -> None:
    pytest.skip("not here")


def test_a_skip_on_a_rank_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_ranks(run_skipping, 2)

"""Several threads of a rank: calls in order, the GIL released while one waits."""

import threading
import time

import pytest
import torch

from torch_overlap import ReduceOp, TorchComm
from torch_overlap.testing import run_ranks


def run_gil(comm: TorchComm) -> None:
    """Counts on one thread while the other is inside a collective, which the peer joins when the count is done."""
    meeting = comm.split([0, 1])
    assert meeting is not None
    if comm.get_rank() == 1:
        meeting.barrier(False)
        comm.all_reduce(torch.ones(1), ReduceOp.SUM, False).wait()
    else:
        done = threading.Event()

        def blocked() -> None:
            comm.all_reduce(torch.ones(1), ReduceOp.SUM, False).wait()
            done.set()

        thread = threading.Thread(target=blocked)
        thread.start()
        for _ in range(50):
            time.sleep(0.01)
            assert not done.is_set()
        meeting.barrier(False)
        thread.join()
        assert done.is_set()
    meeting.finalize()


@pytest.mark.parametrize("which", ["gloo", "local"])
def test_a_call_that_waits_lets_other_threads_run(which: str) -> None:
    run_ranks(run_gil, 2, backend=which)


def run_threads(comm: TorchComm, seed: int) -> None:
    """Uses one communicator per thread: each thread's order is the same on all ranks."""
    everyone = list(range(comm.get_size()))
    children = [comm.split(everyone) for _ in range(3)]
    errors: list[BaseException] = []

    def work(child: TorchComm, number: int) -> None:
        try:
            for turn in range(20):
                x = torch.full((64,), number * 100 + turn + child.get_rank())
                child.all_reduce(x, ReduceOp.SUM, turn % 2 == 0).wait()
                expected = sum(number * 100 + turn + rank for rank in everyone)
                assert torch.equal(x, torch.full((64,), expected))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(child, n)) for n, child in enumerate(children)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for child in children:
        assert child is not None
        child.finalize()


@pytest.mark.parametrize(("which", "ranks"), [("gloo", 2), ("local", 4)])
def test_threads_with_communicators_of_their_own(which: str, ranks: int, seed: int) -> None:
    run_ranks(run_threads, ranks, seed, backend=which)


def run_work_elsewhere(comm: TorchComm) -> None:
    """A work may be waited for, and dropped, on a thread that did not issue it."""
    x = torch.full((1000,), 1.0)
    works = [comm.all_reduce(x, ReduceOp.SUM, True)]
    thread = threading.Thread(target=lambda: works.pop().wait())
    thread.start()
    thread.join()
    assert torch.equal(x, torch.full((1000,), float(comm.get_size())))


@pytest.mark.parametrize("which", ["gloo", "local"])
def test_a_work_may_be_waited_for_on_another_thread(which: str) -> None:
    run_ranks(run_work_elsewhere, 2, backend=which)

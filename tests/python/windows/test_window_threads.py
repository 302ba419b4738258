"""Windows of one communicator used from several threads at once."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torch_overlap as to
from torch_overlap import TorchComm
from torch_overlap.testing import run_ranks

COUNT, THREADS = 64, 4


def run_windows_of_their_own(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    windows = [comm.new_window(to.symmetric_empty(COUNT, torch.float32, comm)) for _ in range(THREADS)]

    def around(index: int) -> None:
        window = windows[index]
        for step in range(100):
            if step > 0:
                window.wait_signal(right, async_op=False)  # the previous data was read
            value = float(1000 * step + 10 * index)
            window.put(torch.full((COUNT,), value + rank), right, 0, async_op=step % 2 == 0)
            window.signal(right, async_op=step % 3 == 0)
            window.wait_signal(left, async_op=step % 2 == 1).wait()
            assert (window.get_tensor() == value + left).all(), step
            window.signal(left, async_op=False)

    with ThreadPoolExecutor(THREADS) as pool:
        threads = [pool.submit(around, index) for index in range(THREADS)]
        for _ in range(30):  # collectives run in the meantime
            x = torch.ones(100)
            comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
            assert (x == size).all()
        for thread in threads:
            thread.result()
    for window in windows:
        window.tensor_deregister()


@pytest.mark.parametrize(("which", "ranks"), [("gloo", 2), ("local", 3)])
def test_threads_with_windows_of_their_own(which: str, ranks: int) -> None:
    run_ranks(run_windows_of_their_own, ranks, backend=which)


def run_deregister_under_puts(comm: TorchComm, seed: int) -> None:
    """Each thread's put is done or refused; after the last one nothing is written any more."""
    dice = random.Random(seed + comm.get_rank())
    for _ in range(10):
        window = comm.new_window(to.symmetric_empty(COUNT, torch.float32, comm))
        buffer = window.get_tensor()
        begun = threading.Barrier(3)

        def put_until_refused(window: to.TorchCommWindow = window, begun: threading.Barrier = begun) -> None:
            begun.wait()
            while True:
                window.put(torch.ones(COUNT), 1 - comm.get_rank(), 0, async_op=dice.random() < 0.5)

        with ThreadPoolExecutor(2) as pool:
            threads = [pool.submit(put_until_refused) for _ in range(2)]
            begun.wait()
            time.sleep(dice.uniform(0, 0.02))
            window.tensor_deregister()
            buffer.fill_(7)
            for thread in threads:
                with pytest.raises(to.StateError, match="put: expected a window with a tensor"):
                    thread.result()
        comm.barrier(False)
        assert (buffer == 7).all()


def test_a_tensor_is_deregistered_under_threads_that_put(pair_backend: str, seed: int) -> None:
    run_ranks(run_deregister_under_puts, 2, seed, backend=pair_backend)

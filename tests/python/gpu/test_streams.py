"""Streams, threads, lifetimes of tensors."""

import threading
from datetime import timedelta

import pytest
import torch

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)

SECOND = 2_000_000_000  # cycles of torch.cuda._sleep, approximately


def stream_of(work):
    stream = work.stream
    return torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def total(size):
    return size * (size + 1) / 2


def test_async_result_is_there_after_wait_though_the_input_is_late(comm):
    comm.all_reduce(torch.ones(1, device="cuda"), to.ReduceOp.SUM, async_op=False)  # allocates what the first call does
    x = torch.empty(1 << 20, device="cuda")
    torch.cuda._sleep(SECOND // 10)
    x.fill_(comm.get_rank() + 1.0)
    work = comm.all_reduce(x, to.ReduceOp.SUM, async_op=True)
    assert not work.is_completed()  # and the host did not wait
    assert work.status() == to.WorkStatus.INPROGRESS
    work.wait()
    copy = x.clone()
    torch.cuda.synchronize()
    assert work.is_completed()
    assert work.status() == to.WorkStatus.COMPLETED
    assert (copy == total(comm.get_size())).all()


@pytest.mark.parametrize("high_priority", [False, True])
def test_operations_issued_from_side_streams(comm, high_priority):
    hints = {"is_high_priority_stream": str(high_priority).lower()}
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    outs = []
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            torch.cuda._sleep(SECOND // 1000)
            x = torch.full((1 << 16,), comm.get_rank() + 1.0 + i, device="cuda")
            outs.append((i, x, comm.all_reduce(x, to.ReduceOp.SUM, async_op=True, hints=hints)))
    for i, x, work in outs:
        work.wait()
        assert (x == total(comm.get_size()) + i * comm.get_size()).all()


def test_operations_run_in_order_of_issue_over_all_streams(comm):
    size = comm.get_size()
    x = torch.ones(1 << 18, device="cuda")
    torch.cuda._sleep(SECOND // 20)
    works = []
    for step in range(12):
        hints = {"is_high_priority_stream": "true"} if step % 3 == 1 else None
        works.append(comm.all_reduce(x, to.ReduceOp.AVG if step % 2 else to.ReduceOp.SUM, step % 3 != 2, hints=hints))
    works[-1].wait()
    works[-2].wait()
    assert (x == float(size) ** 6).all()


def test_a_communicator_of_high_priority(make_comm):
    comm = make_comm("high", is_high_priority_stream=True)
    work = comm.all_reduce(torch.ones(8, device="cuda"), to.ReduceOp.SUM, async_op=True)
    least, greatest = torch.cuda.Stream.priority_range()
    assert stream_of(work).priority <= greatest < least  # torch's own range ends before the device's
    comm.finalize()


def test_the_hint_of_one_operation_moves_it_to_the_other_stream(comm):
    x = torch.ones(8, device="cuda")
    hints = {"torchcomm::ncclx::high_priority_stream": "true"}
    assert stream_of(comm.all_reduce(x, to.ReduceOp.MAX, async_op=True)).priority == 0
    assert stream_of(comm.all_reduce(x, to.ReduceOp.MAX, async_op=True, hints=hints)).priority < 0
    assert stream_of(comm.all_reduce(x, to.ReduceOp.MAX, async_op=False)) == torch.cuda.current_stream()


def test_wait_with_a_timeout_raises_and_the_operation_goes_on(comm):
    x = torch.ones(8, device="cuda")
    torch.cuda._sleep(SECOND // 2)
    work = comm.all_reduce(x, to.ReduceOp.SUM, async_op=True)
    with pytest.raises(to.OperationTimeoutError, match="all_reduce"):
        work.wait(timedelta(milliseconds=20))
    work.wait_blocking()
    assert work.is_completed()
    assert work.exception() is None
    assert (x == comm.get_size()).all()


def test_two_communicators_in_two_threads(make_comm):
    comms = [make_comm(f"thread_{i}") for i in range(2)]
    failures = []

    def loop(comm, index):
        try:
            torch.cuda.set_device(comm.get_device())
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(200):
                    x = torch.full((4096,), float(i + index), device="cuda")
                    comm.all_reduce(x, to.ReduceOp.SUM, async_op=bool(i % 2)).wait()
                    assert (x == (i + index) * comm.get_size()).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=loop, args=(comm, i)) for i, comm in enumerate(comms)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for comm in comms:
        comm.finalize()


def test_a_work_may_be_waited_for_by_another_thread(comm):
    x = torch.full((1 << 16,), comm.get_rank() + 1.0, device="cuda")
    torch.cuda._sleep(SECOND // 20)
    work = comm.all_reduce(x, to.ReduceOp.SUM, async_op=True)
    copies = []

    def other():
        with torch.cuda.stream(torch.cuda.Stream()):
            work.wait()
            copies.append(x.clone())
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert (copies[0] == total(comm.get_size())).all()


def churn(count):
    """Allocates memory that was just freed on this stream, if any, and writes to it."""
    for _ in range(8):
        torch.full((count,), float("nan"), device="cuda")


def test_inputs_may_be_dropped_before_wait(comm):
    count, size = 1 << 20, comm.get_size()
    out = torch.empty(count * size, device="cuda")
    x = torch.full((count,), comm.get_rank() + 1.0, device="cuda")
    torch.cuda._sleep(SECOND // 10)
    work = comm.all_gather_single(out, x, async_op=True)
    del x
    with torch.cuda.stream(torch.cuda.Stream()):
        churn(count)
    churn(count)
    work.wait()
    for r, part in enumerate(out.chunk(size)):
        assert (part == r + 1.0).all()


def test_outputs_may_be_dropped_before_wait(comm):
    count, size = 1 << 20, comm.get_size()
    torch.cuda._sleep(SECOND // 10)
    x = torch.full((count,), comm.get_rank() + 1.0, device="cuda")
    work = comm.all_gather_single(torch.empty(count * size, device="cuda"), x, async_op=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        kept = [torch.zeros(count * size, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    assert all((tensor == 0).all() for tensor in kept)  # nothing wrote to foreign memory
    work.wait()


def test_a_premul_factor_and_the_work_itself_may_be_dropped(comm):
    x = torch.full((1 << 16,), 2.0, device="cuda")
    torch.cuda._sleep(SECOND // 10)
    comm.all_reduce(x, to.ReduceOp.PREMUL_SUM(torch.tensor(0.5, device="cuda")), async_op=True)
    churn(1)
    torch.cuda.synchronize()
    assert (x == comm.get_size()).all()


def test_memory_is_given_back_at_wait(comm):
    x = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda._sleep(SECOND // 10)
    work = comm.broadcast(x, 0, async_op=True)
    del x
    assert torch.cuda.memory_allocated() == before
    work.wait()
    assert torch.cuda.memory_allocated() == before - (64 << 20)

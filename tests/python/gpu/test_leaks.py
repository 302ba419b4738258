"""Many communicators leave no threads, descriptors, device memory or streams."""

import gc
import os
import time
from datetime import timedelta

import pytest
import torch

import torch_overlap as to
from torch_overlap import _C

pytestmark = pytest.mark.gpu(2)

COUNT = 200 if int(os.environ.get("TORCH_OVERLAP_STRESS", "1")) > 1 else 60
MIB = 1 << 20


def resources():
    """Returns the numbers of threads and descriptors, the device's memory in use, in MiB, and streams made by the
    library."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info()
    tasks, files = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
    return tasks, files, (whole - free) // MIB, _C._streams_made()


def once(turn):
    """Runs NCCL's collectives and custom ones, messages, both streams, and a child."""
    device = torch.device("cuda")
    options = {"timeout": timedelta(seconds=60), "abort_process_on_timeout_or_error": False}
    made = to.new_comm("nccl", device, f"turn{turn % 7}", **options)
    child = made.split(list(reversed(range(made.get_size())))) if turn % 4 == 0 else None
    for one in filter(None, (made, child)):
        rank, size = one.get_rank(), one.get_size()
        inputs = [torch.full((count,), float(rank + turn), device=device) for count in (5000, 4 << 20)]
        works = [one.all_reduce(x, to.ReduceOp.SUM, async_op=True) for x in inputs]
        hints = {"is_high_priority_stream": "true"}
        out = torch.full((5000 * size,), -1.0, device=device)
        part = torch.full((5000,), float(rank), device=device)
        works.append(one.all_gather_single(out, part, async_op=True, hints=hints))
        batch = one.batch_op_create()
        came = torch.full((5000,), -1.0, device=device)
        batch.send(part, (rank + 1) % size)
        batch.recv(came, (rank - 1) % size)
        works.append(batch.issue(True))
        for work in works:
            work.wait()
        for x in inputs:
            assert (x == size * turn + size * (size - 1) / 2).all()
        assert (out.view(size, 5000) == torch.arange(size, device=device).view(size, 1)).all()
        assert (came == (rank - 1) % size).all()
    for one in filter(None, (child, made)):
        one.finalize()


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_many_communicators_leave_nothing_behind(comm):
    for turn in range(10):
        once(turn)
    comm.barrier(async_op=False)
    before = resources()
    begin = time.monotonic()
    for turn in range(COUNT):
        once(turn)
        if turn % 10 == 9:
            print(f"{turn + 1} communicators after {time.monotonic() - begin:.1f} s", flush=True)
    comm.barrier(async_op=False)
    deadline = time.monotonic() + 60  # background work may need a moment to end
    after = resources()
    while any(now > then for now, then in zip(after, before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.2)
        after = resources()
    print(f"threads, descriptors, MiB of the device, streams: {before} -> {after}")
    assert after[0] <= before[0] + 2, f"threads: {before[0]} -> {after[0]}"
    assert after[1] <= before[1] + 4, f"descriptors: {before[1]} -> {after[1]}"
    assert after[2] <= before[2] + 64, f"device memory in MiB: {before[2]} -> {after[2]}"
    # Streams are reused once the work enqueued on them has ended: a few more may have been busy at a time.
    assert 0 < after[3] <= before[3] + 16, f"streams: {before[3]} -> {after[3]}"

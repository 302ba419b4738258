"""Process groups in CUDA graphs: captured once, replayed with changing inputs, late ranks and eager calls between."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from torch_overlap.testing import gpu_of, run_ranks

pytestmark = pytest.mark.gpu(2)

COUNT = 1009


class Static:
    """Runs each collective once on static buffers. Integers below 2^24 are exact in float32, in any order of a sum."""

    def __init__(self, rank, size, device, seed, group=None):
        self.rank, self.size, self.seed, self.group = rank, size, seed, group
        self.inputs = torch.zeros(size * COUNT, device=device)
        self.results = {
            "all_reduce": torch.zeros(size * COUNT, device=device),
            "max": torch.zeros(size * COUNT, device=device),
            "broadcast": torch.zeros(size * COUNT, device=device),
            "all_gather_into_tensor": torch.zeros(size * COUNT, device=device),
            "all_gather": torch.zeros(size * COUNT, device=device),
            "reduce_scatter_tensor": torch.zeros(COUNT, device=device),
            "all_to_all_single": torch.zeros(size * COUNT, device=device),
            "ring": torch.zeros(size * COUNT, device=device),
        }

    def of(self, rank, step):
        generator = torch.Generator().manual_seed(self.seed + 1000 * step + rank)
        return torch.randint(-1000, 1000, (self.size * COUNT,), generator=generator).float()

    def fill(self, step):
        self.inputs.copy_(self.of(self.rank, step))
        for result in self.results.values():
            result.fill_(float("nan"))

    def issue(self, async_op):
        x, out, more = self.inputs, self.results, {"group": self.group, "async_op": async_op}
        for name in ("all_reduce", "max", "broadcast"):
            out[name].copy_(x)
        works = [
            dist.all_reduce(out["all_reduce"], **more),
            dist.all_reduce(out["max"], op=dist.ReduceOp.MAX, **more),
            dist.broadcast(out["broadcast"], 1, **more),
            dist.all_gather_into_tensor(out["all_gather_into_tensor"], x[:COUNT], **more),
            dist.all_gather(list(out["all_gather"].chunk(self.size)), x[:COUNT], **more),
            dist.reduce_scatter_tensor(out["reduce_scatter_tensor"], x, **more),
            dist.all_to_all_single(out["all_to_all_single"], x, **more),
            *dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x, (self.rank + 1) % self.size, self.group),
                    dist.P2POp(dist.irecv, out["ring"], (self.rank - 1) % self.size, self.group),
                ]
            ),
        ]
        for work in works:
            if work is not None:
                work.wait()

    def check(self, step):
        every = [self.of(r, step) for r in range(self.size)]
        total = torch.stack(every).double().sum(0).float()
        own = slice(self.rank * COUNT, (self.rank + 1) * COUNT)
        gathered = torch.cat([x[:COUNT] for x in every])
        expected = {
            "all_reduce": total,
            "max": torch.stack(every).amax(0),
            "broadcast": every[1],
            "all_gather_into_tensor": gathered,
            "all_gather": gathered,
            "reduce_scatter_tensor": total[own],
            "all_to_all_single": torch.cat([x[own] for x in every]),
            "ring": every[(self.rank - 1) % self.size],
        }
        for name, result in self.results.items():
            assert torch.equal(result.cpu(), expected[name]), f"{name}, step {step}"


def begin(rank, size, store, eager):
    os.environ["LOCAL_RANK"] = str(rank)
    device = gpu_of(rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60),
        device_id=device if eager else None,
    )  # fmt: skip
    return device


def capture(static, async_op):
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.issue(async_op)
    return graph


def replay(graph, static, step, late=True):
    static.fill(step)
    if late and static.rank == step % static.size:
        torch.cuda._sleep(50_000_000)
    graph.replay()
    static.check(step)


def replays(rank, size, store, seed, eager, async_op):
    device = begin(rank, size, store, eager)
    static = Static(rank, size, device, seed)
    static.fill(0)
    static.issue(async_op)  # makes the communicator, which a capture cannot
    static.check(0)
    graph = capture(static, async_op)
    for step in range(1, 7):
        replay(graph, static, step)
        if step % 2:
            static.fill(100 + step)
            static.issue(async_op)
            static.check(100 + step)
    # The graph keeps what it needs and outlives the group.
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    for step in range(7, 10):
        replay(graph, static, step, late=False)
    torch.cuda.synchronize()


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "device_id"])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_replays_with_changing_inputs_and_a_late_rank(seed, eager, async_op):
    run_ranks(replays, 2, seed, eager, async_op, comm=False, timeout=180)


def first_captured(rank, size, store, seed):
    device = begin(rank, size, store, eager=True)
    static = Static(rank, size, device, seed)
    graph = capture(static, async_op=True)
    for step in range(3):
        replay(graph, static, step)
    torch.cuda.synchronize()
    del graph


def test_the_first_operation_of_a_group_with_a_device_may_be_captured(seed):
    run_ranks(first_captured, 2, seed, comm=False, timeout=180)


def several(rank, size, store, seed):
    device = begin(rank, size, store, eager=True)
    groups = [None, dist.new_group(list(range(size))), dist.split_group(split_ranks=[list(range(size))])]
    statics = [Static(rank, size, device, seed + 7919 * i, group) for i, group in enumerate(groups)]
    for static in statics:
        static.fill(0)
        static.issue(async_op=True)
        static.check(0)
    graphs = [capture(static, async_op=i % 2 == 0) for i, static in enumerate(statics)]
    for step in range(1, 6):
        for static, graph in zip(statics, graphs, strict=True):
            replay(graph, static, step)
        turn = statics[step % len(statics)]
        turn.fill(50 + step)
        turn.issue(async_op=True)
        turn.check(50 + step)
    torch.cuda.synchronize()
    del graphs, graph


def test_graphs_of_several_groups_take_turns_with_eager_calls(seed):
    run_ranks(several, 2, seed, comm=False, timeout=180)

"""The cost of communication in the model, and the equality with the bytes sent."""

import pytest
import torch
from spmd_ranks import MESHES, P, on_mesh

from torch_overlap.mesh import CostModel, assume_partial, from_local, shard
from torch_overlap.mesh.communication import (
    AllGatherOp,
    AllReduceOp,
    AllToAllOp,
    AxisIndexOp,
    BroadcastOp,
    GatherAllAxesOp,
    PMeanOp,
    PPermuteOp,
    ReduceScatterOp,
    ReshardOp,
    ShardOp,
)

BYTES = CostModel.bandwidth_only()


def ring(size):
    return [(i, (i + 1) % size) for i in range(size)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_bytes_on_the_wire(size, dtype, seed):
    """T52-T55: all_reduce 2(n-1)/n S, the others (n-1)/n S, nothing for one rank; by the dtype."""

    def body(r):
        whole = shard(torch.zeros(16, 8, dtype=dtype), r.mesh)
        rows = whole.reshard(P("x"))
        pending = assume_partial(whole, "x")
        total = 128 * dtype.itemsize
        share = (size - 1) / size
        with r.sends():
            for operation, args, expected in (
                (AllReduceOp(), (pending,), 2 * share * total),
                (AllReduceOp(), (rows, "sum"), 2 * share * total / size),
                (PMeanOp(), (whole, "x"), 2 * share * total),
                (AllGatherOp(), (rows, 0), share * total),
                (AllGatherOp(), (rows, 1), 0),
                (GatherAllAxesOp(), (rows,), share * total),
                (GatherAllAxesOp(), (whole,), 0),
                (ReduceScatterOp(), (pending, 0), share * total),
                (AllToAllOp(), (rows, 1, 0), share * total / size),
                (PPermuteOp(), (rows, ring(size)), total / size * (size > 1)),
                (BroadcastOp(), (whole,), total * (size > 1)),
                (ReshardOp(), (whole, P("x")), 0),
                (ReshardOp(), (rows, None), share * total),
                (ShardOp(), (rows, P(None, "x")), share * total / size),
            ):
                assert operation.communication_cost(*args) == pytest.approx(expected), operation.name
                assert (operation.estimate_cost(*args) > 0) == (expected > 0), operation.name
            assert AxisIndexOp().communication_cost(r.mesh, "x") == AxisIndexOp().estimate_cost(r.mesh, "x") == 0

    on_mesh(f"x={size}", body, seed, cost=BYTES)


def test_seconds(seed):
    """T52-T55: the cost grows with bytes and with ranks, halves with twice the bandwidth; both axes cost more than
    either."""

    def body(r):
        slow, fast = CostModel.bandwidth_only(1.0), CostModel.bandwidth_only(2.0)
        operation = AllReduceOp()

        def seconds(n, axes, model=None):
            return operation.estimate_cost(assume_partial(shard(torch.zeros(n), r.mesh), axes), cost=model)

        assert seconds(1000, "x", slow) == pytest.approx(2 * seconds(1000, "x", fast))
        assert seconds(2000, "x", slow) == pytest.approx(2 * seconds(1000, "x", slow))
        assert seconds(1000, ("x", "y"), slow) > seconds(1000, "y", slow) > seconds(1000, "x", slow) > 0
        times = [seconds(1 << n, "y") for n in range(4, 24, 4)]
        assert times == sorted(times)
        assert times[0] > 0
        big = assume_partial(shard(torch.zeros(1 << 20), r.mesh), ("x", "y"))
        assert operation.plan(big).num_sends == 1
        assert operation.plan(big).seconds == operation.estimate_cost(big)

    on_mesh("x=2,y=4", body, seed)


@pytest.mark.parametrize("text", MESHES)
def test_a_plan_sends_what_runs(text, seed):
    """T52-T55: the bytes of a plan are those of its collectives' operands, on every mesh."""

    def body(r):
        a, b, *_ = r.mesh.mesh.axes
        for before, after in ((P(a, b), None), (P(a, b), P(b, a)), (P(a), P(None, a)), (None, P(a, b)), (P(b), P(a))):
            x = shard(r.randn(12, 24), r.mesh, before)
            plan = ReshardOp().plan(x, after)
            r.sent()
            x.reshard(after)
            assert len(r.sent()) == plan.num_sends
            assert ReshardOp().communication_cost(x, after) == pytest.approx(sum(s.wire_bytes for s in plan.steps))
            assert ReshardOp().estimate_cost(x, after) == pytest.approx(sum(s.seconds for s in plan.steps))

    on_mesh(text, body, seed)


def test_uneven_parts_cost_what_is_sent(seed):
    """T52-T55: parts are padded to the largest."""

    def body(r):
        x = from_local(torch.zeros((2, 2, 1, 0)[r.index], 4), r.mesh, P("x"), (5, 4))
        assert AllGatherOp().communication_cost(x, 0) >= 3 / 4 * 5 * 4 * 4
        with r.sends("all_gather x"):
            assert x.full().shape == (5, 4)

    on_mesh("x=4", body, seed)

"""Device-side waits of operators over channels that expire: the host's error names the rank, the expected operation,
and the actual one."""

from datetime import timedelta
from functools import partial

import pytest
import torch
from graph_nodes import disable_all_but
from shared_gpus import SHARES_GPU
from soak_cases import WAITING
from test_fused import KINDS
from test_fused_row_scales import RowGather, RowScatter
from test_fused_scaled import KINDS as SCALED
from test_fused_scaled import TYPES
from timeout_cases import expired, run_until_an_error

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)
EACH = pytest.mark.parametrize("case", WAITING, ids=lambda case: case.name)
# Others begin in the kernel that does the rest.
BEGIN_APART = [case for case in WAITING if not case.name.endswith("low_latency")]
TIMEOUT = timedelta(milliseconds=700)
BF16 = torch.bfloat16
FUSED = {kind.__name__: partial(kind, dtype=BF16) for kind in KINDS} | {
    f"8_bit_{kind.__name__}": partial(kind, types=TYPES["4x4"], out_dtype=BF16, bias=True)
    for kind in (*SCALED, RowGather, RowScatter)
}


def capture(run):
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    graph.instantiate()
    return graph


def all_are_here(comm):
    torch.cuda.synchronize()
    comm.barrier(async_op=False)
    torch.cuda.synchronize()


def end(comm, lonely):
    """Checks the state after the last rank's absence was detected; the device continues."""
    comm.barrier(async_op=True).wait_blocking()
    lonely.abort()
    torch.cuda.synchronize()
    x = torch.ones(100, device="cuda")
    comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    assert (x == comm.get_size()).all()


def miss_the_last(comm, lonely, run):
    """Replays the graph of `run`. On the last rank it only signals to the others that it has begun."""
    run()
    torch.cuda.synchronize()
    lonely.set_timeout(TIMEOUT)
    graph = capture(run)
    all_are_here(comm)
    graph.replay()
    last = comm.get_size() - 1
    torch.cuda.synchronize()
    if comm.get_rank() == last:
        disable_all_but(graph, "begin_kernel")
    all_are_here(comm)
    graph.replay()
    torch.cuda.synchronize()
    if comm.get_rank() != last:
        with pytest.raises(to.OperationTimeoutError, match=expired(comm, last, "chunk")):
            run_until_an_error(run)
    end(comm, lonely)
    graph.reset()


def call_of(case, comm):
    inputs = [torch.randn(shape, device="cuda") for shape in case.shapes]
    return lambda: case.run(comm, *inputs)


@pytest.mark.parametrize("case", BEGIN_APART, ids=lambda case: case.name)
def test_a_rank_that_begins_and_does_no_more(comm, make_comm, case):
    lonely = make_comm(f"begun_{case.name}")
    miss_the_last(comm, lonely, call_of(case, lonely))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="the kernels are for sm_90"
)
@pytest.mark.skipif(SHARES_GPU, reason="there a kernel sends all tiles, and begins by itself")
@pytest.mark.parametrize("kind", list(FUSED))
def test_a_rank_that_begins_a_fused_kernel_and_does_no_more(comm, make_comm, kind):
    lonely = make_comm(f"begun_fused_{kind}")
    # A gather with one product that sends up to 16 MiB, and a smaller sum, begin in the kernel.
    case = FUSED[kind](lonely, 2048, 8448 if "Gather" in kind else 256, 4160)
    case.fill()
    miss_the_last(comm, lonely, case.run)


@EACH
def test_a_rank_that_does_not_begin(comm, make_comm, case):
    lonely = make_comm(f"away_{case.name}")
    run = call_of(case, lonely)
    run()
    torch.cuda.synchronize()
    lonely.set_timeout(TIMEOUT)
    all_are_here(comm)
    last = comm.get_size() - 1
    if comm.get_rank() != last:
        run()
        torch.cuda.synchronize()
        with pytest.raises(to.OperationTimeoutError, match=expired(comm, last, "begin")):
            run_until_an_error(run)
    end(comm, lonely)

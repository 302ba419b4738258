"""Uses of graphs in frameworks: captures concurrent with threads, repeated captures, graphed callables,
torch.compile."""

import threading
from datetime import timedelta

import pytest
import torch
from graph_cases import AllGatherSingle, AllReduce, capture

import torch_overlap as to
from torch_overlap import ops

pytestmark = pytest.mark.gpu(2)


@pytest.mark.parametrize("error_mode", ["global", "thread_local", "relaxed"])
def test_a_capture_while_another_thread_communicates(comm, make_comm, error_mode):
    other = make_comm(f"beside_{error_mode}")
    x = torch.zeros(4096, device="cuda")
    rounds, stop, failures = 300, threading.Event(), []

    def communicate():
        try:
            torch.cuda.set_device(other.get_device())
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(rounds):
                    other.broadcast(x, i % other.get_size(), async_op=bool(i % 2)).wait()
        except BaseException as error:
            failures.append(error)
        finally:
            stop.set()

    case = AllReduce(comm)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    other.broadcast(x, 0, async_op=False)
    torch.cuda.synchronize()
    thread = threading.Thread(target=communicate)
    with torch.cuda.graph(graph, stream=side, capture_error_mode=error_mode):
        thread.start()
        for _ in range(50):
            case.issue(True)
        stop.wait(60)
    thread.join()
    assert not failures, failures
    case.x.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert (case.x == float(comm.get_size()) ** 50).all()
    other.finalize()


def test_capture_again_and_again(comm):
    graph = torch.cuda.CUDAGraph()
    for round_ in range(20):
        case = (AllReduce if round_ % 2 else AllGatherSingle)(comm)
        with torch.cuda.graph(graph):
            case.issue(round_ % 3 != 0)
        for step in range(3):
            case.fill(step)
            graph.replay()
            case.check(step)
        graph.reset()


def test_a_second_capture_beside_the_first_is_refused_and_leaves_it_whole(comm):
    """The first operation is left as a leaf, and the next one must follow it."""
    size, x = comm.get_size(), torch.zeros(1 << 20, device="cuda")
    eager = comm.all_reduce(torch.ones(8, device="cuda"), to.ReduceOp.SUM, async_op=True)
    eager.wait()
    torch.cuda.synchronize()
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="relaxed")
        work = comm.all_reduce(x, to.ReduceOp.SUM, async_op=True)
        with pytest.raises(to.StateError, match=r"expected an operation that runs now for wait_blocking\(\)"):
            work.wait_blocking()
        with torch.cuda.stream(torch.cuda.Stream()):
            beside.capture_begin(capture_error_mode="relaxed")
            with pytest.raises(to.StateError, match="expected one capture of this communicator at a time"):
                comm.all_reduce(x, to.ReduceOp.SUM, async_op=True)
            with pytest.raises(to.StateError, match="in the capture that has the operation, got it in another"):
                work.wait()
            beside.capture_end()
        comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
        graph.capture_end()
    beside.reset()
    for step in range(1, 6):
        x.fill_(step)
        graph.replay()
        assert (x == step * size**2).all()


def test_a_graph_lives_on_without_its_handle(comm, make_comm):
    """Both ways: a graph whose Python object is dropped, and a capture that is discarded."""
    fresh = make_comm("handle_dropped")
    case = AllReduce(fresh)
    graph = capture(case, "leaf")
    capture(case, "wait").reset()
    fresh.finalize()
    case.comm = None
    del fresh
    case.x.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert (case.x == comm.get_size()).all()


class Block(torch.nn.Module):
    def __init__(self, comm, width=64):
        super().__init__()
        self.comm = comm
        generator = torch.Generator(device="cuda").manual_seed(1 + comm.get_rank())
        make = lambda *s: torch.nn.Parameter(torch.randn(*s, device="cuda", generator=generator) / 8)  # noqa: E731
        self.up, self.down = make(width, width), make(width, width)

    def forward(self, x):
        (h,), _ = ops.all_gather_matmul(x, [self.up], self.comm)
        y = ops.matmul_reduce_scatter(torch.relu(h), self.down, self.comm)
        return x + y + ops.wait_tensor(ops.all_reduce_async(y, self.comm, "avg"))


def grads_of(module, function, x):
    x = x.detach().requires_grad_()
    y = function(x)
    grads = torch.autograd.grad(y.square().sum(), [x, *module.parameters()])
    return [y.detach().clone(), *(g.clone() for g in grads)]


def test_make_graphed_callables(comm):
    sample = torch.randn(32, 64, device="cuda", requires_grad=True)
    graphed, plain = torch.cuda.make_graphed_callables(Block(comm), (sample,)), Block(comm)
    for _ in range(5):
        x = torch.randn(32, 64, device="cuda")
        for got, want in zip(grads_of(graphed, graphed, x), grads_of(plain, plain, x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile(comm, mode):
    torch._dynamo.reset()
    block, plain = Block(comm), Block(comm)
    compiled = torch.compile(block, fullgraph=True, mode=mode)
    for _ in range(6):
        x = torch.randn(32, 64, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        for got, want in zip(grads_of(block, compiled, x), grads_of(plain, plain, x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    del compiled
    torch._dynamo.reset()


def test_compiled_inference_with_reduce_overhead(comm):
    torch._dynamo.reset()
    block, plain = Block(comm), Block(comm)
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(20):
            x = torch.randn(32, 64, device="cuda")
            torch.testing.assert_close(compiled(x), plain(x), rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()


def test_autocast_and_vmap(comm):
    x = torch.randn(8, 64, device="cuda")
    w = torch.randn(64, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y = ops.matmul_reduce_scatter(x, w, comm)
        (z,), _ = ops.all_gather_matmul(x, [w], comm)
    assert y.dtype == z.dtype == torch.bfloat16
    want = ops.reduce_scatter(x.bfloat16() @ w.bfloat16().t(), comm)
    torch.testing.assert_close(y, want, rtol=5e-2, atol=5e-1)
    batch = torch.randn(3, 8, 16, device="cuda")
    got = torch.vmap(lambda t: ops.all_gather(t, comm, 1))(batch)
    torch.testing.assert_close(got, torch.stack([ops.all_gather(t, comm, 1) for t in batch]))


RAW = torch.ops.torch_overlap
OPCHECKED = {
    "all_reduce": (RAW.all_reduce, lambda x, c, n: (x, "sum", c, n)),
    "all_gather": (RAW.all_gather, lambda x, c, n: (x, 0, c, n)),
    "reduce_scatter": (RAW.reduce_scatter, lambda x, c, n: (x, 0, "avg", c, n)),
    "all_to_all": (RAW.all_to_all, lambda x, c, n: (x, 0, 1, c, n)),
    "broadcast": (RAW.broadcast, lambda x, c, n: (x, 1, c)),
}


@pytest.mark.parametrize("name", OPCHECKED)
def test_opcheck(comm, name):
    op, arguments = OPCHECKED[name]
    x = torch.randn(8, 8, device="cuda", requires_grad=True)
    torch.library.opcheck(op, arguments(x, comm.get_name(), comm.get_size()))


def test_what_cannot_be_captured_says_so_and_leaves_the_capture_whole(comm, make_comm):
    rank, size = comm.get_rank(), comm.get_size()
    spare = make_comm("spare_in_a_capture", enable_reconfigure=True)
    staged = to.new_comm("gloo", torch.device("cuda"), "staged_in_a_capture", timeout=timedelta(seconds=60))
    x = torch.ones(1000, device="cuda")
    sparse = torch.eye(4, device="cuda").to_sparse()
    objects = [None] * size
    refused = {
        "new_comm": lambda: to.new_comm("nccl", torch.device("cuda"), "made_in_a_capture"),
        "split": lambda: comm.split([rank]),
        "finalize": spare.finalize,
        "reconfigure": lambda: spare.reconfigure(1, [spare.get_init_handle()]),
        "all_reduce": lambda: comm.all_reduce(sparse, to.ReduceOp.SUM, async_op=False),
        "broadcast": lambda: staged.broadcast(x, 0, async_op=False),  # staged on the host
        "symmetric_empty": lambda: to.symmetric_empty(8, torch.float32, comm),
        "all_gather_object": lambda: to.objcol.all_gather_object(comm, objects, rank),
        "gather_object": lambda: to.objcol.gather_object(comm, rank, 0, objects),
        "send_object_list": lambda: to.objcol.send_object_list(comm, [rank], 1),
        "recv_object_list": lambda: to.objcol.recv_object_list(comm, [None], 0),
        "broadcast_object_list": lambda: to.objcol.broadcast_object_list(comm, [rank], 0),
        "scatter_object_list": lambda: to.objcol.scatter_object_list(comm, 0, [None], objects),
    }
    comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
        for op, call in refused.items():
            with pytest.raises(to.StateError, match=f"{op}: expected a stream that is not capturing"):
                call()
        comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    x.fill_(1)
    graph.replay()
    assert (x == size**2).all()
    for one in (spare, staged):  # unchanged
        x.fill_(rank + 1)
        one.all_reduce(x, to.ReduceOp.SUM, async_op=False)
        assert (x == sum(range(1, size + 1))).all()
        one.finalize()
    child = comm.split(list(range(size)))
    x.fill_(1)
    child.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    assert (x == size).all()
    child.finalize()

"""Shapes without a communicator, vmap, opcheck and torch.compile.

Tests that need real ranks run on gloo processes: the state of a compiler belongs to its process.
"""

import time

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from tracing_cases import EXPECTED, NOBODY, calls, scaled_calls

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(600)
raw = torch.ops.torch_overlap


def flat(result):
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", calls(2))
@pytest.mark.parametrize("how", ["meta", "fake"])
def test_shapes_and_gradients_need_no_communicator(name, how):
    op, shapes, arguments = calls(2)[name]
    with FakeTensorMode() if how == "fake" else torch.device("meta"):
        tensors = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        results = flat(op(*arguments(*tensors)))
        assert [tuple(t.shape) for t in results] == EXPECTED.get(name, [(4, 6)])
        assert all(t.dtype == torch.bfloat16 and t.is_contiguous() for t in results)
        grads = torch.autograd.grad(sum(t.sum() for t in results), tensors)
        assert [tuple(g.shape) for g in grads] == shapes


@pytest.mark.parametrize("name", scaled_calls(2))
@pytest.mark.parametrize("how", ["meta", "fake"])
def test_shapes_of_scaled_products_need_no_communicator(name, how):
    op, arguments = scaled_calls(2)[name]
    with FakeTensorMode() if how == "fake" else torch.device("meta"):
        results = flat(op(*arguments()))
    assert [tuple(t.shape) for t in results] == EXPECTED[name]
    dtype = torch.bfloat16 if name.endswith(" 1") else torch.float32
    assert all(t.is_contiguous() for t in results)
    products = results[:-2] if "gather" in name else results  # the rest is gathered
    assert all(t.dtype == dtype for t in products)


def test_in_place_operators_need_no_communicator():
    with FakeTensorMode():
        x = torch.empty(4)
        assert raw.all_reduce_(x, "sum", NOBODY) is x
        assert raw.recv_(x, 0, NOBODY) is x
        assert raw.wait_tensor(x) is x
        raw.send(x, 1, NOBODY)


def test_a_meta_kernel_checks_what_the_real_one_checks():
    x = torch.empty(3, 4, device="meta")
    with pytest.raises(ValueError, match="divisible by the group size 2, got 3"):
        raw.reduce_scatter(x, 0, "sum", NOBODY, 2)
    with pytest.raises(ValueError, match="expected group_size > 0, got 0"):
        raw.all_gather(x, 0, NOBODY, 0)
    with pytest.raises(ValueError, match="got 'tree'"):
        raw.matmul_all_reduce(x, x, None, NOBODY, 2, "sum", "tree")


ILLEGAL = [
    ("premul_sum", torch.int32), ("premul_sum", torch.bool), ("min", torch.complex64), ("product", torch.complex64),
    ("band", torch.float32), ("bxor", torch.bfloat16), ("avg", torch.bool),
]  # fmt: skip


@pytest.mark.parametrize(("op", "dtype"), ILLEGAL)
def test_a_reduction_that_a_dtype_does_not_take_is_refused_everywhere(op, dtype):
    factor = 2.0 if op == "premul_sum" else None

    def refuses(x, name):
        with pytest.raises(TypeError, match=r"^all_reduce: expected an? .*dtype for .*, got "):
            raw.all_reduce(x, op, name, 1, "R", factor)
        with pytest.raises(TypeError, match=r"^reduce_scatter: expected an? .*dtype for .*, got "):
            raw.reduce_scatter(x, 0, op, name, 1, factor)
        with pytest.raises(TypeError, match=r"^all_reduce_: expected an? .*dtype for .*, got "):
            raw.all_reduce_(x, op, name, factor)

    refuses(torch.empty(4, dtype=dtype, device="meta"), NOBODY)
    with FakeTensorMode():
        refuses(torch.empty(4, dtype=dtype), NOBODY)
    run_ranks(lambda comm: refuses(torch.ones(4, dtype=dtype), comm.get_name()), 1, backend="local")


# --- vmap -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("batch_dim", [0, 1, 2])
def test_vmap_equals_a_loop(size, batch_dim):
    def rank(comm):
        torch.manual_seed(comm.get_rank())
        x = torch.randn(6, 6, 6)
        functions = [
            lambda t: ops.all_reduce(t, comm),
            lambda t: ops.all_gather(t, comm, 0),
            lambda t: ops.all_gather(t, comm, -1),
            lambda t: ops.reduce_scatter(t, comm, 1),
            lambda t: ops.all_to_all(t, comm, 0, 1),
            lambda t: ops.all_to_all_v(t, comm, [6 // size] * size, [6 // size] * size),
            lambda t: ops.broadcast(t, comm, size - 1),
            lambda t: ops.permute(t, comm, [(r, (r + 1) % size) for r in range(size)]),
            lambda t: ops.wait_tensor(ops.all_gather_async(t, comm)),
            lambda t: ops.all_reduce_(t.clone(), comm),
        ]
        for function in functions:
            want = torch.stack([function(t) for t in x.unbind(batch_dim)])
            torch.testing.assert_close(torch.vmap(function, in_dims=batch_dim)(x), want)

    run_ranks(rank, size, backend="local")


def test_vmap_does_not_split_the_batch_of_scalars():
    def rank(comm):
        with pytest.raises(ValueError, match="expected examples of one or more dimensions, got scalars"):
            torch.vmap(lambda t: ops.all_to_all_v(t, comm, [2, 2], [2, 2]))(torch.arange(4.0))

    run_ranks(rank, 2, backend="local")


def test_gradient_of_a_vmapped_reduction():
    """d/du sum((all_reduce(u))^2) = 2 * (the sum), once for each rank's loss."""

    def rank(comm):
        u = torch.full((2, 2, 4), float(comm.get_rank() + 1), requires_grad=True)
        nested = torch.vmap(torch.vmap(lambda t: ops.all_reduce(t, comm)))
        nested(u).square().sum().backward()
        torch.testing.assert_close(u.grad, torch.full((2, 2, 4), 2 * 3.0 * 2))

    run_ranks(rank, 2, backend="local")


# --- opcheck, torch.compile ---------------------------------------------------------------------------


def make(shapes, rank):
    gen = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=gen).requires_grad_() for shape in shapes]


def opcheck_rank(comm, names):
    size, rank = comm.get_size(), comm.get_rank()
    for name in names:
        op, shapes, arguments = calls(size, comm.get_name(), root=size - 1)[name]
        # An async result must not be read before a wait, which the other utility does; traced, it is the synchronous
        # operator.
        some = {"test_utils": ("test_schema", "test_autograd_registration", "test_faketensor")}
        torch.library.opcheck(op, arguments(*make(shapes, rank)), **(some if name.endswith("_async") else {}))
    plain = torch.randn(4, 6)
    torch.library.opcheck(raw.all_reduce_, (plain, "sum", comm.get_name()))
    torch.library.opcheck(raw.wait_tensor, (plain,))
    torch.library.opcheck(raw._waited, (plain,))


def opcheck_point_to_point(comm):
    """On the backend that moves nothing: opcheck calls each operator any number of times, without a matching call of
    the peer."""
    plain = torch.randn(4, 6)
    for op in (raw.send, raw.recv_):
        torch.library.opcheck(
            op, (plain, 1 - comm.get_rank(), comm.get_name()), test_utils=("test_schema", "test_faketensor")
        )


def test_opcheck_of_send_and_recv():
    run_ranks(opcheck_point_to_point, 2, backend="fake")


NAMES = list(calls(2))


@pytest.mark.parametrize("names", [NAMES[:8], NAMES[8:16], NAMES[16:24], NAMES[24:]])
def test_opcheck_on_every_rank(names):
    run_ranks(opcheck_rank, 2, names, backend="gloo", timeout=540)


def opcheck_scaled_rank(comm):
    # The remaining utility compares inputs before and after, which torch cannot do for 8-bit floats.
    some = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for op, arguments in scaled_calls(comm.get_size(), comm.get_name()).values():
        torch.library.opcheck(op, arguments(), test_utils=some)


def test_opcheck_of_scaled_products_on_every_rank():
    run_ranks(opcheck_scaled_rank, 2, backend="gloo", timeout=540)


def layer(x, w1, w2, v, b, comm):
    """A sequence-parallel MLP and a few collectives around it."""
    (h, g), _ = ops.all_gather_matmul(x, [w1, w2], comm, algorithm="pipelined")
    y = ops.matmul_reduce_scatter(torch.relu(h) * g, v, comm, b, algorithm="pipelined")
    y = y + ops.wait_tensor(ops.all_reduce_async(y, comm, "avg"))
    y = ops.all_to_all(ops.all_gather(y, comm, 1), comm, 1, 0)
    return ops.reduce_scatter(y, comm, 0, to.ReduceOp.SUM) + ops.broadcast(x, comm, 1).sum()


def compile_rank(comm, backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (4, 6, 10) if dynamic else (4,):
        tensors = make([(rows, 6), (8, 6), (8, 6), (6, 8), (6,)], comm.get_rank() + rows)
        want = layer(*tensors, comm)
        want_grads = torch.autograd.grad(want.square().sum(), tensors)
        got = compiled(*tensors, comm)
        torch.testing.assert_close(got, want)
        grads = torch.autograd.grad(got.square().sum(), tensors)
        for grad, want_grad in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(grad, want_grad, rtol=1e-4, atol=1e-4)
        again = torch.autograd.grad(checkpoint(compiled, *tensors, comm, use_reentrant=False).square().sum(), tensors)
        torch.testing.assert_close(again, grads)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*tensors, comm), want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic):
    run_ranks(compile_rank, 2, "aot_eager", dynamic, backend="gloo", timeout=540)


def exchanging_layer(x, q, v, o, comm):
    """Tokens to heads and back, and a gradient's reduction concurrent with a product."""
    a, b = ops.matmul_all_to_all(x, [q, v], comm, algorithm="pipelined")
    y = ops.all_to_all_matmul(torch.relu(a) * b, o, comm, algorithm="pipelined")
    z, part = ops.bulk_overlap_matmul(y, o, y, comm, collective="reduce_scatter", algorithm="pipelined")
    return ops.bulk_overlap_matmul(z, o, part, comm, collective="all_gather", algorithm="pipelined")[1] + z


def scaled_layer(x, s, w, comm):
    (y,), *_ = ops.scaled_all_gather_matmul(x, s, [w], [s], comm, out_dtype=torch.float32, algorithm="pipelined")
    z = ops.scaled_matmul_reduce_scatter(x, s, w, s, comm, out_dtype=torch.float32, algorithm="pipelined")
    total = ops.scaled_matmul_all_reduce(x, s, w, s, comm, out_dtype=torch.float32, algorithm="pipelined")
    return y.sum(0) + z + total.sum(0)


def compile_exchanging_rank(comm, backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(exchanging_layer, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (4, 6, 10) if dynamic else (4,):
        tensors = make([(rows, 6), (6, 6), (6, 6), (6, 6)], comm.get_rank() + rows)
        want = exchanging_layer(*tensors, comm)
        want_grads = torch.autograd.grad(want.square().sum(), tensors)
        got = compiled(*tensors, comm)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        grads = torch.autograd.grad(got.square().sum(), tensors)
        for grad, want_grad in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(grad, want_grad, rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()
    compiled = torch.compile(scaled_layer, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (4, 6, 10) if dynamic else (4,):
        x, w = (torch.randn(*shape).to(torch.float8_e4m3fn) for shape in ((rows, 16), (8, 16)))
        s = torch.full((1,), 0.5)
        torch.testing.assert_close(compiled(x, s, w, comm), scaled_layer(x, s, w, comm))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_exchanging_bulk_and_scaled_products(dynamic):
    run_ranks(compile_exchanging_rank, 2, "aot_eager", dynamic, backend="gloo", timeout=540)


@pytest.mark.slow
@pytest.mark.inductor
def test_compile_exchanging_bulk_and_scaled_products_inductor():
    run_ranks(compile_exchanging_rank, 2, "inductor", False, backend="gloo", timeout=540)


def recompiling_rank(comm):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, c: ops.all_gather(x, c), backend=counter, fullgraph=True)
    alone = comm.split([comm.get_rank()])
    x = torch.ones(3)
    assert [len(compiled(x, c)) for c in (comm, alone, comm, alone)] == [3 * comm.get_size(), 3] * 2
    assert counter.frame_count == 2
    alone.finalize()


def test_another_communicator_compiles_again():
    run_ranks(recompiling_rank, 1, backend="gloo")


BACKENDS = ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.inductor])]


def factor_rank(comm):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, s: ops.all_reduce(x, comm, "premul_sum", factor=s), backend="aot_eager", fullgraph=True
    )
    for s in (1.5, 2.5, 3.0, 4, 1.5):
        assert torch.equal(compiled(torch.ones(3), s), torch.full((3,), 2.0 * s))
    op = to.ReduceOp.PREMUL_SUM(2.5)
    by_op = torch.compile(lambda x: ops.all_reduce(x, comm, op), backend="aot_eager", fullgraph=True)
    assert torch.equal(by_op(torch.ones(3)), torch.full((3,), 5.0))


def test_a_factor_may_change_between_calls_of_a_compiled_function():
    run_ranks(factor_rank, 2, backend="gloo", timeout=540)


def late(comm, seconds):
    """Rank 1 enters last: results of operations that the others started before are not complete yet."""
    comm.barrier(async_op=False)
    if comm.get_rank() == 1:
        time.sleep(seconds)


def wait_rank(comm, backend, requires_grad):
    def use_result(y):
        return ops.wait_tensor(y) + 1

    def use_argument(y):
        ops.wait_tensor(y[1:])
        return y + 1

    # The test that must fail does so only if this rank is early.
    seconds = 2.0 if backend == "aot_eager" and requires_grad else 0.3
    for function in (use_result, use_argument):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for turn in range(3):
            x = torch.full((4, 3), 1.0 + turn, requires_grad=requires_grad)
            late(comm, seconds)
            y = ops.all_reduce_async(x, comm)
            assert torch.equal(compiled(y).detach(), torch.full((4, 3), 2.0 * turn + 3)), (function, turn)
            assert torch.equal(y.detach(), torch.full((4, 3), 2.0 * turn + 2))
            if requires_grad and function is use_result:
                late(comm, seconds)
                y = ops.all_reduce_async(x, comm)
                (grad,) = torch.autograd.grad(compiled(y).sum(), x)
                assert torch.equal(grad, torch.full((4, 3), 2.0))


# If gradients are recorded, aot_eager first clones an argument that the function changes, as wait_tensor does.
@pytest.mark.parametrize(
    ("backend", "requires_grad"),
    [
        ("aot_eager", False),
        pytest.param("aot_eager", True, marks=pytest.mark.xfail(strict=True, reason="cloned before the wait")),
        pytest.param("inductor", False, marks=[pytest.mark.slow, pytest.mark.inductor]),
        pytest.param("inductor", True, marks=[pytest.mark.slow, pytest.mark.inductor]),
    ],
)
def test_a_compiled_wait_waits_for_what_was_started_outside(backend, requires_grad):
    run_ranks(wait_rank, 2, backend, requires_grad, backend="gloo", timeout=540)


def unused_rank(comm, backend):
    def function(x, w, rank):
        results = [
            ops.all_reduce(x, comm), ops.all_gather(x, comm), ops.reduce_scatter(x, comm),
            ops.all_to_all(x, comm), ops.all_to_all_v(x, comm, [2, 2], [2, 2]),
            ops.broadcast(x, comm, 0), ops.permute(x, comm, [(0, 1), (1, 0)]),
            ops.wait_tensor(ops.all_gather_async(x, comm)),
            ops.all_gather_matmul(x, [w, w], comm, return_gathered=True)[0][1],
            ops.matmul_reduce_scatter(x, w, comm), ops.matmul_all_reduce(x, w, comm),
            ops.all_to_all_matmul(x, torch.cat([w, w], 1), comm), ops.matmul_all_to_all(x, [w, w], comm)[1],
            ops.bulk_overlap_matmul(x, w, x, comm, collective="all_gather")[1],
        ]  # fmt: skip
        return [x + 1, *results] if rank == 0 else [x + 1]

    torch._dynamo.reset()
    x = torch.arange(24.0).view(4, 6) + comm.get_rank()
    w = torch.ones(6, 6)
    want = function(x, w, comm.get_rank())
    got = torch.compile(function, backend=backend, fullgraph=True)(x, w, comm.get_rank())
    torch.testing.assert_close(got, want)
    comm.barrier(async_op=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_result_that_one_rank_does_not_use_is_still_computed(backend):
    run_ranks(unused_rank, 2, backend, backend="gloo", timeout=540)


def export_rank(comm):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            gen = torch.Generator().manual_seed(comm.get_rank())
            make = lambda *sizes: torch.nn.Parameter(torch.randn(*sizes, generator=gen))  # noqa: E731
            self.w1, self.w2, self.v, self.b = make(8, 6), make(8, 6), make(6, 8), make(6)

        def forward(self, x):
            ops.all_gather(x, comm)  # unused
            return layer(x, self.w1, self.w2, self.v, self.b, comm)

    module = Layer()
    x = torch.randn(4, 6)
    program = torch.export.export(module, (x,))
    torch.testing.assert_close(program.module()(x), module(x))
    torch.testing.assert_close(program.run_decompositions().module()(x), module(x))


def test_export():
    run_ranks(export_rank, 2, backend="gloo", timeout=540)


@pytest.mark.slow
@pytest.mark.inductor
def test_compile_inductor():
    run_ranks(compile_rank, 2, "inductor", False, backend="gloo", timeout=540)


def exchange(x, comm, rank):
    """Sends and receives that a compiler would merge or drop if they were pure functions."""
    first, second = torch.zeros(3), torch.zeros(3)
    if rank == 0:
        ops.send(x, comm, 1)
        ops.send(x + 1, comm, 1)
        ops.recv_(first, comm, 1)
    else:
        ops.recv_(first, comm, 0)
        ops.recv_(second, comm, 0)
        ops.send(x, comm, 0)
    total = x.clone()
    ops.all_reduce_(total, comm)
    return first, second, total


def exchange_rank(comm, backend):
    torch._dynamo.reset()
    x = torch.arange(3.0) + 10 * comm.get_rank()
    want = exchange(x, comm, comm.get_rank())
    got = torch.compile(exchange, backend=backend, fullgraph=True)(x, comm, comm.get_rank())
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    return [t.tolist() for t in got]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_keeps_every_send_and_receive_in_order(backend):
    results = run_ranks(exchange_rank, 2, backend, backend="gloo", timeout=540)
    assert results[1][:2] == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]

"""Values of the collectives against fp64 references, on ranks that are threads."""

import concurrent.futures
import time

import pytest
import torch

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.testing import run_ranks

SIZES = [1, 2, 3, 4]
pytestmark = pytest.mark.timeout(300)


def inputs(size, shape, seed, dtype=torch.float32):
    """Returns all ranks' inputs; each rank makes them all, and uses its own."""
    gen = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for _ in range(size)]
    if dtype == torch.bool:
        return [torch.randint(0, 2, shape, generator=gen).bool() for _ in range(size)]
    return [torch.randint(1, 4, shape, generator=gen).to(dtype) for _ in range(size)]


def strided(x):
    """Returns the same values in memory that is not contiguous."""
    return torch.stack([x, torch.full_like(x, 1)], dim=-1)[..., 0]


def local(fn, size):
    """Runs fn(comm) on `size` threads."""
    return run_ranks(fn, size, backend="local")


REDUCTIONS = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "product": lambda parts: parts.prod(0),
    "min": lambda parts: parts.amin(0),
    "max": lambda parts: parts.amax(0),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_all_reduce_equals_the_reduction_of_all_inputs(size, op, seed):
    def rank(comm):
        xs = inputs(size, (5, 3), seed)
        want = REDUCTIONS[op](torch.stack(xs).double())
        mine = xs[comm.get_rank()]
        results = [
            ops.all_reduce(mine, comm, op),
            ops.all_reduce(strided(mine), comm, op),
            ops.wait_tensor(ops.all_reduce_async(mine, comm, op)),
            ops.all_reduce_(mine.clone(), comm, op),
            ops.all_reduce_(strided(mine), comm, op),
        ]
        for result in results:
            torch.testing.assert_close(result.double(), want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine, xs[comm.get_rank()], rtol=0, atol=0)

    local(rank, size)


@pytest.mark.parametrize("size", [1, 3])
def test_all_reduce_of_bits_and_with_a_factor(size, seed):
    def rank(comm):
        xs = torch.stack(inputs(size, (7,), seed, torch.int64))
        mine = xs[comm.get_rank()]
        want = {"band": xs[0], "bor": xs[0], "bxor": xs[0]}
        for other in xs[1:]:
            want = {"band": want["band"] & other, "bor": want["bor"] | other, "bxor": want["bxor"] ^ other}
        for op, value in want.items():
            assert torch.equal(ops.all_reduce(mine, comm, op), value)
        assert torch.equal(ops.all_reduce(mine, comm, to.ReduceOp.MAX), xs.amax(0))

        reals = torch.stack(inputs(size, (7,), seed))
        factors = torch.arange(size, dtype=torch.float64) + 0.5
        want = (reals.double() * factors[:, None]).sum(0)
        mine, factor = reals[comm.get_rank()], float(factors[comm.get_rank()])
        by_op = ops.all_reduce(mine, comm, to.ReduceOp.PREMUL_SUM(factor))
        by_name = ops.all_reduce(mine, comm, "premul_sum", factor=factor)
        torch.testing.assert_close(by_op.double(), want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(by_name.double(), want, rtol=1e-5, atol=1e-6)

    local(rank, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64])
def test_all_gather_equals_cat(size, dtype, seed):
    def rank(comm):
        xs = inputs(size, (2, 3, 4), seed, torch.float32 if dtype.is_complex else dtype)
        xs = [x.to(dtype) * 1j if dtype.is_complex else x for x in xs]
        mine = xs[comm.get_rank()]
        for dim in (-3, -2, -1, 0, 1, 2):
            want = torch.cat(xs, dim)
            result = ops.all_gather(mine, comm, dim)
            assert result.is_contiguous()
            assert torch.equal(result, want)
            assert torch.equal(ops.all_gather(strided(mine), comm, dim), want)
            later = ops.all_gather_async(mine, comm, dim)
            assert torch.equal(ops.wait_tensor(later), want)

    local(rank, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_reduce_scatter_equals_a_part_of_the_reduction(size, op, seed):
    def rank(comm):
        xs = inputs(size, (12, 24, 36), seed)
        mine = xs[comm.get_rank()]
        for dim in (-1, 0, 1, 2):
            want = REDUCTIONS[op](torch.stack(xs).double()).chunk(size, dim)[comm.get_rank()]
            result = ops.reduce_scatter(mine, comm, dim, op)
            assert result.is_contiguous()
            torch.testing.assert_close(result.double(), want, rtol=1e-5, atol=1e-6)
            later = ops.wait_tensor(ops.reduce_scatter_async(strided(mine), comm, dim, op))
            torch.testing.assert_close(later.double(), want, rtol=1e-5, atol=1e-6)

    local(rank, size)


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_moves_a_sharding(size, seed):
    def rank(comm):
        xs = inputs(size, (12, 24, 4), seed)
        mine = xs[comm.get_rank()]
        for split, concat in [(0, 0), (0, 1), (1, 0), (1, 1), (-2, -1), (1, -1)]:
            want = torch.cat([x.chunk(size, split)[comm.get_rank()] for x in xs], concat)
            result = ops.all_to_all(mine, comm, split, concat)
            assert result.is_contiguous()
            assert torch.equal(result, want)
            assert torch.equal(ops.wait_tensor(ops.all_to_all_async(strided(mine), comm, split, concat)), want)

    local(rank, size)


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_v_takes_any_sizes(size, seed):
    sizes = torch.randint(0, 4, (size, size), generator=torch.Generator().manual_seed(seed))

    def rank(comm):
        me = comm.get_rank()
        gen = torch.Generator().manual_seed(seed + 1)
        xs = [torch.randn(int(sizes[r].sum()), 3, generator=gen) for r in range(size)]
        want = torch.cat([xs[r].split(sizes[r].tolist())[me] for r in range(size)])
        out_splits, in_splits = sizes[:, me].tolist(), sizes[me].tolist()
        assert torch.equal(ops.all_to_all_v(xs[me], comm, out_splits, in_splits), want)
        later = ops.all_to_all_v_async(xs[me], comm, out_splits, in_splits)
        assert torch.equal(ops.wait_tensor(later), want)

    local(rank, size)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_and_permute(size, seed):
    def rank(comm):
        xs, me = inputs(size, (3, 2), seed), comm.get_rank()
        for root in range(size):
            assert torch.equal(ops.broadcast(xs[me], comm, root), xs[root])
            assert torch.equal(ops.wait_tensor(ops.broadcast_async(strided(xs[me]), comm, root)), xs[root])
        ring = [(r, (r + 1) % size) for r in range(size)]
        assert torch.equal(ops.permute(xs[me], comm, ring), xs[me - 1])
        assert torch.equal(ops.wait_tensor(ops.permute_async(xs[me], comm, ring)), xs[me - 1])
        assert torch.equal(ops.permute(xs[me], comm, [(r, r) for r in range(size)]), xs[me])
        # Only rank 0 sends, and only the last rank receives.
        want = xs[0] if me == size - 1 else torch.zeros(3, 2)
        assert torch.equal(ops.permute(xs[me], comm, [(0, size - 1)]), want)
        assert torch.equal(ops.permute(xs[me], comm, []), torch.zeros(3, 2))

    local(rank, size)


def test_send_and_recv_meet(seed):
    def rank(comm):
        xs, me = inputs(2, (4,), seed), comm.get_rank()
        target = torch.full((4,), float("nan"))
        version = target._version
        if me == 0:
            ops.send(strided(xs[0]), comm, 1)
            assert ops.recv_(target, comm, 1) is target
        else:
            assert ops.recv_(target, comm, 0) is target
            ops.send(xs[1], comm, 0)
        assert torch.equal(target, xs[1 - me])
        assert target._version > version

    local(rank, 2)


def test_zero_sizes():
    def rank(comm):
        assert ops.all_reduce(torch.empty(0, 3), comm).shape == (0, 3)
        assert ops.all_gather(torch.empty(0, 3), comm).shape == (0, 3)
        assert ops.all_gather(torch.empty(4, 0), comm, dim=1).shape == (4, 0)
        assert ops.reduce_scatter(torch.empty(0, 3), comm).shape == (0, 3)
        assert ops.all_to_all(torch.empty(0, 3), comm, 0, 0).shape == (0, 3)

    local(rank, 2)


def test_a_result_that_dies_unwaited_leaves_nothing_behind():
    def rank(comm):
        for _ in range(200):
            ops.all_gather_async(torch.ones(16), comm)
        last = ops.wait_tensor(ops.all_reduce_async(torch.ones(3), comm))
        assert torch.equal(last, torch.full((3,), 2.0))
        comm.barrier(async_op=False)

    local(rank, 2)
    assert torch.ops.torch_overlap._pending_works() == 0


def test_wait_tensor_takes_views_and_tensors_that_nobody_writes():
    def rank(comm):
        x = torch.full((4, 2), float(comm.get_rank() + 1))
        later = ops.all_reduce_async(x, comm)
        ops.wait_tensor(later[1:].view(-1))
        assert torch.equal(later, torch.full((4, 2), 3.0))
        plain = torch.ones(3)
        assert ops.wait_tensor(plain).data_ptr() == plain.data_ptr()
        assert ops.wait_tensor(ops.wait_tensor(later)).data_ptr() == later.data_ptr()

    local(rank, 2)


def test_every_thread_that_waits_for_a_result_finds_it():
    def rank(comm):
        comm.barrier(async_op=False)
        if comm.get_rank() == 1:
            time.sleep(0.3)  # the others wait before a result exists
        later = ops.all_reduce_async(torch.ones(1000), comm)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: ops.wait_tensor(later).clone(), range(4)))
        for result in found:
            assert torch.equal(result, torch.full((1000,), 2.0))

    local(rank, 2)
    assert torch.ops.torch_overlap._pending_works() == 0


def test_in_place_operators_refuse_elements_that_share_memory():
    def rank(comm):
        expanded = torch.ones(1).expand(4)
        with pytest.raises(ValueError, match=r"^all_reduce_: expected .* share memory, got shape \[4\]"):
            ops.all_reduce_(expanded, comm)
        with pytest.raises(ValueError, match=r"^recv_: expected .* share memory, got shape \[4\]"):
            ops.recv_(expanded, comm, 1 - comm.get_rank())
        assert torch.equal(ops.all_reduce(torch.ones(2), comm), torch.full((2,), 2.0))  # nothing was sent

    local(rank, 2)


def test_async_results_may_be_waited_for_in_any_order():
    def rank(comm):
        laters = [ops.all_reduce_async(torch.full((8,), float(i)), comm) for i in range(10)]
        for i in (7, 3, 9, 0, 1, 2, 4, 5, 6, 8):
            assert torch.equal(ops.wait_tensor(laters[i]), torch.full((8,), 2.0 * i))

    local(rank, 2)


def test_the_input_of_an_async_operation_may_be_dropped():
    def rank(comm):
        laters = [ops.all_gather_async(torch.full((1000,), float(comm.get_rank() + i)), comm) for i in range(20)]
        for i, later in enumerate(laters):
            want = torch.tensor([float(i), float(i + 1)]).repeat_interleave(1000)
            assert torch.equal(ops.wait_tensor(later), want)

    local(rank, 2)


ERRORS = {
    "expected one of sum, avg": lambda comm, x: ops.all_reduce(x, comm, "mean"),
    "grad to be one of R I, got 'V'": lambda comm, x: ops.all_reduce(x, comm, grad="V"),
    r"dim in \[-2, 1\], got 2": lambda comm, x: ops.all_gather(x, comm, 2),
    "divisible by the group size 2, got 3": lambda comm, x: ops.reduce_scatter(x, comm),
    "divisible by the group size 2, got 5": lambda comm, x: ops.all_to_all(x, comm, 1, 0),
    "the sum 3, got 2": lambda comm, x: ops.all_to_all_v(x, comm, [1, 1], [1, 1]),
    "one entry for each of the 2 ranks": lambda comm, x: ops.all_to_all_v(x, comm, [3], [3]),
    "a rank >= 0 for root, got -1": lambda comm, x: ops.broadcast(x, comm, -1),
    "at most once": lambda comm, x: ops.permute(x, comm, [(0, 1), (1, 1)]),
    "ranks below 2": lambda comm, x: ops.permute(x, comm, [(0, 2)]),
    "group_size 2, the size of communicator": lambda comm, x: torch.ops.torch_overlap.all_gather(
        x, 0, comm.get_name(), 3
    ),
    "a live communicator, got 'nobody'": lambda comm, x: torch.ops.torch_overlap.broadcast(x, 0, "nobody"),
    "no factor for 'sum', got 3": lambda comm, x: ops.all_reduce(x, comm, "sum", factor=3.0),
    "got 3.0 beside ReduceOp.MAX": lambda comm, x: ops.all_reduce_(x, comm, to.ReduceOp.MAX, factor=3.0),
    "got 3.0 beside .*PREMUL_SUM": lambda comm, x: ops.all_reduce(x, comm, to.ReduceOp.PREMUL_SUM(2), factor=3.0),
}


@pytest.mark.parametrize("message", ERRORS)
def test_a_mistake_is_an_error_that_says_what_to_do(message):
    def rank(comm):
        with pytest.raises(to.InvalidValueError, match=message):
            ERRORS[message](comm, torch.ones(3, 5))
        assert torch.equal(ops.all_reduce(torch.ones(2), comm), torch.full((2,), 2.0))  # still usable

    local(rank, 2)


WRONG_TYPES = {
    r"write ReduceOp.PREMUL_SUM\(factor\)": lambda comm, x: ops.all_reduce(x, comm, to.ReduceOp.PREMUL_SUM),
    "a ReduceOp or its name, got None": lambda comm, x: ops.reduce_scatter(x, comm, 0, None),
    "a number as the factor": lambda comm, x: ops.all_reduce_(x, comm, to.ReduceOp.PREMUL_SUM(torch.ones(1))),
    "comm as a TorchComm, got 'tp'": lambda comm, x: ops.all_gather(x, "tp"),
}


@pytest.mark.parametrize("message", WRONG_TYPES)
def test_an_argument_of_another_type_is_named(message):
    def rank(comm):
        with pytest.raises(to.InvalidTypeError, match=f"expected .*{message}"):
            WRONG_TYPES[message](comm, torch.ones(4, 5))

    local(rank, 2)

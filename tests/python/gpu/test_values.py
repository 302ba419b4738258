"""Every operation, dtype and reduction over NCCL against a reference of higher precision, every element compared."""

import pytest
import torch

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *SIGNED, *UNSIGNED, *COMPLEX, torch.bool]
FACTORS = [0.5, -1.25, 2.0, 0.75, -0.5, 1.5, 0.25, -2.0]
NAMES = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG", "PREMUL_SUM"]

# Dtypes that custom collectives can reduce; they move data of any dtype.
CUSTOM = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]


def each(custom):
    """Returns a mark: every dtype with the default, and over NCCL those that custom collectives would run."""
    grid = [("comm", dtype) for dtype in DTYPES] + [("nccl_comm", dtype) for dtype in custom]
    return pytest.mark.parametrize(("on", "dtype"), grid, indirect=["on"], ids=str)


def legal(name, dtype):
    if dtype in COMPLEX:
        return name in ("SUM", "AVG", "PREMUL_SUM")
    if dtype in FLOATS:
        return name not in ("BAND", "BOR", "BXOR")
    return name != "PREMUL_SUM" and not (dtype == torch.bool and name == "AVG")


def everybodys(seed, size, count, dtype, name="SUM"):
    """Returns all ranks' inputs, on the CPU, the same on every rank. Their exact results fit the dtype."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(size):
        if dtype == torch.bool:
            part = torch.randint(2, (count,), generator=generator)
        elif dtype in COMPLEX:
            part = torch.randn(count, dtype=torch.complex128, generator=generator)
        elif dtype in FLOATS:
            part = torch.rand(count, dtype=torch.float64, generator=generator) + 0.5
            part *= torch.randint(2, (count,), generator=generator) * 2 - 1
        else:
            low = 0 if dtype in UNSIGNED else (-2 if name == "PRODUCT" else -8)
            part = torch.randint(low, 3 if name == "PRODUCT" else 9, (count,), generator=generator)
        parts.append(part.to(dtype))
    return parts


def wide(tensor):
    if tensor.dtype in COMPLEX:
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.dtype in FLOATS else torch.int64)


def reference(parts, name):
    """Returns the result in high precision, and the error allowed for each element."""
    size, dtype = len(parts), parts[0].dtype
    if dtype == torch.bool:
        total = torch.stack([wide(part) for part in parts]).sum(0)
        if name == "BXOR":
            return total % 2, None
        return (total == size if name in ("PRODUCT", "MIN", "BAND") else total > 0).long(), None
    stack = torch.stack([wide(part) for part in parts])
    if name in ("MIN", "MAX"):
        return (stack.amin(0) if name == "MIN" else stack.amax(0)), None
    if name in ("BAND", "BOR", "BXOR"):
        function = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[name]
        result = stack[0]
        for part in stack[1:]:
            result = function(result, part)
        return result, None
    if name == "PREMUL_SUM":
        factors = torch.tensor(FACTORS[:size], dtype=torch.float64)
        stack = stack * factors.view(-1, *[1] * (stack.dim() - 1))
    if dtype not in FLOATS + COMPLEX:
        total = stack.prod(0) if name == "PRODUCT" else stack.sum(0)
        return (torch.div(total, size, rounding_mode="trunc") if name == "AVG" else total), None
    result = stack.prod(0) if name == "PRODUCT" else stack.sum(0)
    scale = stack.abs().prod(0) if name == "PRODUCT" else stack.abs().sum(0)
    if name == "AVG":
        result, scale = result / size, scale / size
    real = torch.empty((), dtype=dtype).real.dtype if dtype in COMPLEX else dtype
    return result, torch.finfo(real).eps * (size + 2) * scale


def check(actual, parts, name):
    expected, bound = reference(parts, name)
    actual = wide(actual.cpu())
    if bound is None:
        assert torch.equal(actual, expected)
    else:
        wrong = ~((actual - expected).abs() <= bound)
        assert not wrong.any(), f"{int(wrong.sum())} wrong, e.g. {actual[wrong][0]} for {expected[wrong][0]}"


def reduce_op(name, rank, dtype, as_tensor):
    if name != "PREMUL_SUM":
        return getattr(to.ReduceOp, name)
    if as_tensor:
        real = torch.empty((), dtype=dtype).real.dtype if dtype in COMPLEX else dtype
        return to.ReduceOp.PREMUL_SUM(torch.tensor(FACTORS[rank], device="cuda").to(real))
    return to.ReduceOp.PREMUL_SUM(FACTORS[rank])


def poisoned(count, dtype):
    tensor = torch.empty(count, dtype=dtype, device="cuda")
    (tensor if dtype == torch.bool else tensor.view(torch.uint8)).fill_(0x5B)
    return tensor


def reductions(dtype):
    return [name for name in NAMES if legal(name, dtype)]


@each(CUSTOM)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("count", [1, 1003, 100_003])
def test_all_reduce_and_reduce(on, seed, dtype, async_op, count):
    rank, size = on.get_rank(), on.get_size()
    for number, name in enumerate(reductions(dtype)):
        parts = everybodys(seed + number, size, count, dtype, name)
        for as_tensor in [False, True] if name == "PREMUL_SUM" else [False]:
            op = reduce_op(name, rank, dtype, as_tensor)
            mine = parts[rank].cuda()
            on.all_reduce(mine, op, async_op).wait()
            check(mine, parts, name)
            mine = parts[rank].cuda()
            root = number % size
            on.reduce(mine, root, op, async_op).wait()
            if rank == root:
                check(mine, parts, name)
            else:
                assert torch.equal(wide(mine.cpu()), wide(parts[rank])), (
                    "reduce changed a tensor that is not the root's"
                )


@each(CUSTOM)
@pytest.mark.parametrize("async_op", [False, True])
def test_reduce_scatter_in_all_forms(on, seed, dtype, async_op):
    rank, size, count = on.get_rank(), on.get_size(), 517
    for number, name in enumerate(reductions(dtype)):
        parts = everybodys(seed + number, size, count * size, dtype, name)
        op = reduce_op(name, rank, dtype, False)
        flat = parts[rank].cuda()
        expected = [part[rank * count : (rank + 1) * count] for part in parts]

        out = poisoned(count, dtype)
        on.reduce_scatter_single(out, flat, op, async_op).wait()
        check(out, expected, name)

        out = poisoned(count, dtype)
        on.reduce_scatter(out, list(flat.chunk(size)), op, async_op).wait()  # contiguous parts
        check(out, expected, name)

        out = poisoned(count, dtype)
        apart = [chunk.clone() for chunk in flat.chunk(size)]
        on.reduce_scatter(out, apart if rank else list(flat.chunk(size)), op, async_op).wait()  # differs by rank
        check(out, expected, name)

        counts = [100 * r + 3 for r in range(size)]
        begin = sum(counts[:rank])
        out = poisoned(counts[rank], dtype)
        pieces = list(flat[: sum(counts)].split(counts)) if sum(counts) <= count * size else None
        if pieces is not None:
            on.reduce_scatter_v(out, pieces, op, async_op).wait()
            check(out, [part[begin : begin + counts[rank]] for part in parts], name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_group_of_one_rank(comm, seed, dtype):
    """A reduction is a copy; NCCL has a kernel of its own there, which left out the last elements of some sizes."""
    alone = comm.split([comm.get_rank()])
    for count in (1, 4099, 8193, 12_301, 100_003):
        for number, name in enumerate(reductions(dtype)):
            parts = everybodys(seed + number, 1, count, dtype, name)
            op, mine, out = reduce_op(name, 0, dtype, False), parts[0].cuda(), poisoned(count, dtype)
            alone.reduce_scatter_single(out, mine, op, async_op=False)
            check(out, parts, name)
            alone.all_reduce(mine, op, async_op=False)
            check(mine, parts, name)
    alone.finalize()


def same(actual, expected):
    """Compares bit for bit."""
    view = (lambda t: t) if expected.dtype == torch.bool else (lambda t: t.view(torch.uint8))
    assert torch.equal(view(actual.cpu().contiguous().view(-1)), view(expected.contiguous().view(-1)))


@each(DTYPES)
@pytest.mark.parametrize("async_op", [False, True])
def test_data_movement(on, seed, dtype, async_op):
    rank, size, count = on.get_rank(), on.get_size(), 1009
    parts = everybodys(seed, size, count * size, dtype)
    mine = parts[rank].cuda()
    head = [part[:count] for part in parts]

    for root in range(size):
        tensor = mine.clone()
        on.broadcast(tensor, root, async_op).wait()
        same(tensor, parts[root])

    out = poisoned(count * size, dtype)
    on.all_gather_single(out, mine[:count], async_op).wait()
    same(out, torch.cat([wide(part) for part in head]).to(dtype))

    out = poisoned(count * size, dtype)
    on.all_gather(list(out.chunk(size)), mine[:count], async_op).wait()
    same(out, torch.cat([wide(part) for part in head]).to(dtype))

    outs = [poisoned(count, dtype) for _ in range(size)]
    flat = poisoned(count * size, dtype)
    into = outs if rank == 0 else list(flat.chunk(size))  # separate tensors on one rank, contiguous ones on the others
    on.all_gather(into, mine[:count], async_op).wait()
    for r in range(size):
        same(into[r], head[r])

    counts = [7 * r for r in range(size)]
    outs = [poisoned(n, dtype) for n in counts]
    on.all_gather_v(outs, mine[: counts[rank]], async_op).wait()
    for r in range(size):
        same(outs[r], parts[r][: counts[r]])

    outs = [poisoned(count, dtype) for _ in range(size)]
    inputs = list(mine.chunk(size)) if rank else [chunk.clone() for chunk in mine.chunk(size)]
    on.all_to_all(outs, inputs, async_op).wait()
    for r in range(size):
        same(outs[r], parts[r].chunk(size)[rank])

    out = poisoned(count * size, dtype)
    on.all_to_all_single(out, mine, async_op).wait()
    for r in range(size):
        same(out.chunk(size)[r], parts[r].chunk(size)[rank])

    splits = [[(3 * a + 5 * b) % 11 for b in range(size)] for a in range(size)]  # a sends splits[a][b] to b
    received = [splits[a][rank] for a in range(size)]
    out = poisoned(sum(received), dtype)
    on.all_to_all_v_single(out, mine[: sum(splits[rank])], received, splits[rank], async_op).wait()
    for a, piece in enumerate(out.split(received)):
        begin = sum(splits[a][:rank])
        same(piece, parts[a][begin : begin + splits[a][rank]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("async_op", [False, True])
def test_gather_scatter_and_p2p(comm, seed, dtype, async_op):
    rank, size, count = comm.get_rank(), comm.get_size(), 511
    parts = everybodys(seed, size, count * size, dtype)
    mine = parts[rank].cuda()
    for root in range(size):
        outs = [poisoned(count, dtype) for _ in range(size)] if rank == root else []
        comm.gather(outs, mine[:count], root, async_op).wait()
        for r, out in enumerate(outs):
            same(out, parts[r][:count])
        out = poisoned(count, dtype)
        comm.scatter(out, list(mine.chunk(size)) if rank == root else [], root, async_op).wait()
        same(out, parts[root].chunk(size)[rank])

    left, right = (rank - 1) % size, (rank + 1) % size
    batch = comm.batch_op_create()
    out = poisoned(count, dtype)
    batch.send(mine[:count], right)
    batch.recv(out, left)
    batch.issue(async_op).wait()
    same(out, parts[left][:count])

    if rank < 2:  # one after the other: the even rank sends first
        out = poisoned(count, dtype)
        steps = [lambda: comm.send(mine[:count], 1 - rank, async_op), lambda: comm.recv(out, 1 - rank, async_op)]
        for step in steps if rank == 0 else reversed(steps):
            step().wait()
        same(out, parts[1 - rank][:count])


def test_empty_tensors_go_through_every_operation(comm):
    rank, size = comm.get_rank(), comm.get_size()
    empty = lambda: torch.empty(0, device="cuda")  # noqa: E731
    comm.all_reduce(empty(), to.ReduceOp.SUM, False)
    comm.all_reduce(empty().int(), to.ReduceOp.BXOR, False)
    comm.broadcast(empty(), 0, False)
    comm.all_gather([empty() for _ in range(size)], empty(), False)
    comm.all_gather_single(empty(), empty(), False)
    comm.reduce_scatter(empty(), [empty() for _ in range(size)], to.ReduceOp.SUM, False)
    comm.all_to_all_single(empty(), empty(), False)
    comm.gather([empty() for _ in range(size)] if rank == 0 else [], empty(), 0, False)
    comm.barrier(async_op=True).wait()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [*FLOATS[:4], *COMPLEX], ids=str)
@pytest.mark.parametrize("count", [1, 1000, 200_003, 1_000_001])
def test_a_factor_on_one_rank(comm, seed, dtype, count):
    """In a group of one rank too, every element is multiplied."""
    alone = comm.split([comm.get_rank()])
    x = everybodys(seed, 1, count, dtype)[0].cuda()
    given = torch.full((1,), 0.25, device="cuda", dtype=dtype.to_real())
    for factor in (0.25, given):
        op = to.ReduceOp.PREMUL_SUM(factor)
        summed, reduced, scattered = x.clone(), x.clone(), torch.empty_like(x)
        alone.all_reduce(summed, op, async_op=False)
        alone.reduce(reduced, 0, op, async_op=False)
        alone.reduce_scatter_single(scattered, x, op, async_op=False)
        for result in (summed, reduced, scattered):
            assert torch.equal(result, x * 0.25)
    alone.finalize()

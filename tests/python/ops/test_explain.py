"""explain() of every operator: with ranks that reach each other's memory, and with ranks that do not."""

import pytest
import torch
import torch.nn.functional as F

import torch_overlap as to
from torch_overlap import _C, _tuning, ops
from torch_overlap.testing import run_ranks

E4M3 = torch.float8_e4m3fn
ROWS, FEATURES, INNER = 2048, 16, 32  # of a rank: any pieces of its rows are worth sending
FAR = "ranks pretend that peers' memory is unreachable"


def calls(comm):
    """Returns operators over shared memory: their arguments, the name of that algorithm, and this rank's whole
    result."""
    me, size = comm.get_rank(), comm.get_size()
    gen = torch.Generator().manual_seed(11)
    xs, ws = torch.randn(size, ROWS, INNER, generator=gen), torch.randn(size, FEATURES, INNER, generator=gen)
    x, w, one = xs[me], ws[me], torch.ones(1)
    total = sum(F.linear(a, b) for a, b in zip(xs, ws, strict=True))
    x8, w8 = x.to(E4M3), w.to(E4M3)
    all8 = torch.cat([a.to(E4M3).float() for a in xs])
    total8 = sum(F.linear(a.to(E4M3).float(), b.to(E4M3).float()) for a, b in zip(xs, ws, strict=True))
    wide = {"out_dtype": torch.float32}
    return {
        "all_gather_matmul": ((x, [w], comm), {}, "p2p", lambda y: y[0][0], F.linear(xs.flatten(0, 1), w)),
        "matmul_reduce_scatter": ((x, w, comm), {}, "p2p", lambda y: y, total.chunk(size)[me]),
        "matmul_all_reduce": ((x, w, comm), {}, "p2p", lambda y: y, total),
        "bulk_overlap_matmul": (
            (x, w, xs[me], comm),
            {"collective": "all_gather"},
            "bulk",
            lambda y: y[1],
            xs.flatten(0, 1),
        ),
        "scaled_all_gather_matmul": (
            (x8, one, [w8], [one], comm),
            wide,
            "p2p",
            lambda y: y[0][0],
            F.linear(all8, w8.float()),
        ),
        "scaled_matmul_reduce_scatter": ((x8, one, w8, one, comm), wide, "p2p", lambda y: y, total8.chunk(size)[me]),
        "scaled_matmul_all_reduce": ((x8, one, w8, one, comm), wide, "p2p", lambda y: y, total8),
    }


def entries(op, comm):
    """Returns a table in which the algorithm over shared memory was measured as the fastest."""
    size = comm.get_size()
    gathers = "gather" in op
    shape = (ROWS * size, FEATURES * size, INNER) if gathers else (ROWS, FEATURES, INNER * size)
    key = _C._tuning_key(op, *shape, torch.float32, size, "cpu", False)
    return {key: "p2p"}


def check_close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def reached_rank(comm):
    for op, (args, options, way, _, _) in calls(comm).items():
        assert str(to.explain(op, *args, **options)) == f"{op}: pipelined (a CPU)"
        getattr(ops, op)(*args, **options, algorithm=way)
        found = to.explain(op, *args, **options, algorithm=way)
        assert (found.algorithm, found.why, found.decided_by) == (way, "asked for", "caller")


def test_ranks_that_reach_each_other():
    run_ranks(reached_rank, 2)


def unreached_rank(comm):
    pretence = _C._PretendUnreachable()
    for op, (args, options, way, part, want) in calls(comm).items():
        message = f"^{op}: expected what algorithm '{way}' needs, got: {FAR}"
        with pytest.raises(to.UnsupportedError, match=message):
            getattr(ops, op)(*args, **options, algorithm=way)
        with pytest.raises(to.UnsupportedError, match=message):  # it has been tried
            to.explain(op, *args, **options, algorithm=way)
        check_close(part(getattr(ops, op)(*args, **options)), want)  # through the communicator
        assert str(to.explain(op, *args, **options)) == f"{op}: pipelined (a CPU)"
        if op == "bulk_overlap_matmul":
            continue  # it is not measured
        _C._set_tuning("table", entries(op, comm))
        found = to.explain(op, *args, **options)
        assert (found.algorithm, found.decided_by) == ("pipelined", "rule")
        assert str(found) == f"{op}: pipelined (a CPU; 'p2p' of the table cannot be: {FAR})"
        check_close(part(getattr(ops, op)(*args, **options)), want)
        _C._set_tuning("table", {})
    del pretence
    _tuning.load()


def test_ranks_that_do_not_reach_each_other():
    run_ranks(unreached_rank, 2)


def exchange_rank(comm):
    """Operators that exchange go through the communicator unless p2p is requested, or was measured as the fastest."""
    size, pretence = comm.get_size(), None
    x, w = torch.randn(ROWS, INNER), torch.randn(FEATURES, INNER)
    heads = torch.randn(ROWS * size, INNER // size)
    for _ in range(2):
        for op, args in (("matmul_all_to_all", (x, [w], comm)), ("all_to_all_matmul", (heads, w, comm))):
            assert str(to.explain(op, *args)) == f"{op}: pipelined (a CPU)"
            assert to.explain(op, *args, algorithm="sequential").why == "asked for"
            few = (args[0][: 64 * size], *args[1:])
            found = to.explain(op, *few)
            rows = 64 * size if op == "matmul_all_to_all" else 64 // 4
            assert found.algorithm == "sequential"
            assert found.why.startswith(f"chunks of {rows} rows are quicker computed than sent")
            with pytest.raises(to.InvalidValueError, match=f"^{op}: expected algorithm to be one of .*, got 'fused'"):
                to.explain(op, *args, algorithm="fused")
            if pretence is None:
                assert to.explain(op, *args, algorithm="p2p").why == "asked for"
                getattr(to.ops, op)(*args, algorithm="p2p")
                continue
            with pytest.raises(to.UnsupportedError, match=f"^{op}: expected what algorithm 'p2p' needs"):
                getattr(to.ops, op)(*args, algorithm="p2p")
        # A communicator of its own, whose channels do not exist yet.
        comm = comm.split(list(range(size)))
        pretence = _C._PretendUnreachable()
    del pretence


def test_exchanges():
    run_ranks(exchange_rank, 2)


def bulk_rank(comm):
    x, w = torch.randn(ROWS, INNER), torch.randn(FEATURES, INNER)

    def found(other, collective, algorithm="auto", rows=ROWS):
        return to.explain("bulk_overlap_matmul", x[:rows], w, other, comm, collective=collective, algorithm=algorithm)

    assert found(x, "reduce_scatter", "bulk").algorithm == "bulk"
    assert found(x.int(), "all_gather", "bulk").algorithm == "bulk"
    assert found(x.int(), "reduce_scatter").algorithm == "pipelined"
    assert found(x, "all_gather", rows=8).algorithm == "sequential"
    with pytest.raises(to.UnsupportedError, match=r"^bulk_overlap_matmul: expected other of dtype .*; use 'pipelined'"):
        found(x.int(), "reduce_scatter", "bulk")
    with pytest.raises(to.InvalidValueError, match="one of auto sequential pipelined bulk, got 'p2p'"):
        found(x, "all_gather", "p2p")
    with pytest.raises(to.InvalidValueError, match=r"^explain: expected op to be one of all_gather_matmul, .*'gemm'"):
        to.explain("gemm", x, w, comm)


def test_a_collective_beside_a_product():
    run_ranks(bulk_rank, 2)


def alone_rank(comm):
    for op, (args, options, *_) in calls(comm).items():
        assert str(to.explain(op, *args, **options)) == f"{op}: sequential (one rank)"


def test_one_rank():
    run_ranks(alone_rank, 1)

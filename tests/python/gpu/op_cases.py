"""Operators, and the result of rank r from all ranks' inputs in plain torch: see test_ops.py and test_op_soak.py."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from torch_overlap import ops

ROWS, IN, OUT = 24, 32, 16  # of one rank; ROWS is divisible by every size up to 4


class Sizes(NamedTuple):
    rows: int = ROWS
    k: int = IN
    n: int = OUT


EVEN = Sizes()


class Case:
    """An operator: the shapes of one rank's inputs, and the result of rank r from all ranks' inputs, in plain torch.
    Inputs of the indices `shared` are equal on all ranks."""

    def __init__(self, name, shapes, run, reference, shared=()):
        self.name, self.shapes, self.run, self.reference, self.shared = name, shapes, run, reference, shared

    def on(self, comm, dtype):
        """Returns the case with its state for one communicator. Collective."""
        return self


def poison(comm, case, inputs):
    """Calls the operator with NaN inputs. It leaves NaN in the memory that the next call stages data in or returns
    results in."""
    case.run(comm, *[torch.full_like(t, float("nan")) for t in inputs])


def gathered(xs):
    return torch.cat(xs)


def summed(xs):
    return torch.stack(xs).sum(0)


def fused_cases(algorithm, sizes=EVEN):
    rows, k, n = sizes

    def gather_matmul(comm, x, w1, w2, bias):
        (a, b), whole = ops.all_gather_matmul(
            x, [w1, w2], comm, [bias, None], return_gathered=True, algorithm=algorithm
        )
        return torch.cat([a, b, whole], dim=1)

    def gather_matmul_reference(every, r):
        x, (_, w1, w2, bias) = gathered([e[0] for e in every]), every[r]
        return torch.cat([F.linear(x, w1, bias), F.linear(x, w2), x], dim=1)

    def product_sum(every, r):
        return summed([F.linear(e[0], e[1]) for e in every])

    return [
        Case(f"all_gather_matmul-{algorithm}", [(rows, k), (n, k), (2 * n, k), (n,)],
             gather_matmul, gather_matmul_reference),
        Case(f"matmul_reduce_scatter-{algorithm}", [(4 * rows, k), (n, k)],
             lambda comm, x, w: ops.matmul_reduce_scatter(x, w, comm, algorithm=algorithm),
             lambda every, r: product_sum(every, r).chunk(len(every))[r]),
        Case(f"matmul_all_reduce-{algorithm}", [(rows, k), (n, k)],
             lambda comm, x, w: ops.matmul_all_reduce(x, w, comm, algorithm=algorithm), product_sum),
    ]  # fmt: skip


def exchange_cases(algorithm, sizes=EVEN):
    rows, k, n = sizes

    def by_tokens(every, r):
        size = len(every)
        x = torch.cat([e[0].chunk(size)[r] for e in every], dim=1)
        return F.linear(x, every[r][1][:, : size * k], every[r][2])

    def by_heads(every, r):
        products = [torch.stack([F.linear(e[0], e[1], e[3]), F.linear(e[0], e[2])]) for e in every]
        return torch.cat([p.chunk(len(every), dim=2)[r] for p in products], dim=1)

    return [
        Case(f"all_to_all_matmul-{algorithm}", [(4 * rows, k), (n, 8 * k), (n,)],
             lambda comm, x, w, b: ops.all_to_all_matmul(x, w[:, : comm.get_size() * k], comm, b, algorithm=algorithm),
             by_tokens),
        Case(f"matmul_all_to_all-{algorithm}", [(rows, k), (24, k), (24, k), (24,)],
             lambda comm, x, w1, w2, b: torch.stack(
                 ops.matmul_all_to_all(x, [w1, w2], comm, [b, None], algorithm=algorithm)),
             by_heads),
    ]  # fmt: skip


def bulk_cases(algorithm, sizes=EVEN):
    rows, k, n = sizes

    def run(collective):
        def both(comm, x, w, b, other):
            results = ops.bulk_overlap_matmul(x, w, other, comm, b, collective=collective, algorithm=algorithm)
            return torch.cat([t.flatten() for t in results])

        return both

    def reference(collect):
        return lambda every, r: torch.cat([F.linear(*every[r][:3]).flatten(), collect(every, r).flatten()])

    shapes = [(rows, k), (n, k), (n,), (4 * rows, 3)]
    return [
        Case(f"bulk_overlap_matmul-all_gather-{algorithm}", shapes, run("all_gather"),
             reference(lambda every, r: gathered([e[3] for e in every]))),
        Case(f"bulk_overlap_matmul-reduce_scatter-{algorithm}", shapes, run("reduce_scatter"),
             reference(lambda every, r: summed([e[3] for e in every]).chunk(len(every))[r])),
    ]  # fmt: skip


def around(comm):
    """Pairs that send to the next rank."""
    return [(r, (r + 1) % comm.get_size()) for r in range(comm.get_size())]


X = [(4 * ROWS, IN)]


def uneven_case(name, exchange, shapes=X):
    """all_to_all_v: parts of every size, some of them empty."""
    rows = shapes[0][0]

    def sent_by(a, size):
        parts = [5 * ((a + 2 * b) % 3) for b in range(size - 1)]
        return [*parts, rows - sum(parts)]

    def run(comm, x):
        rank, size = comm.get_rank(), comm.get_size()
        return exchange(x, comm, [sent_by(a, size)[rank] for a in range(size)], sent_by(rank, size))

    def reference(every, r):
        return torch.cat([e[0].split(sent_by(a, len(every)))[r] for a, e in enumerate(every)])

    return Case(name, shapes, run, reference)


CASES = [
    Case("all_reduce", X, lambda comm, x: ops.all_reduce(x, comm), lambda every, r: summed([e[0] for e in every])),
    Case("all_reduce_async", X, lambda comm, x: ops.wait_tensor(ops.all_reduce_async(x, comm, "avg")),
         lambda every, r: summed([e[0] for e in every]) / len(every)),
    Case("all_gather", X, lambda comm, x: ops.all_gather(x, comm, 1),
         lambda every, r: torch.cat([e[0] for e in every], dim=1)),
    Case("reduce_scatter", X, lambda comm, x: ops.reduce_scatter(x, comm),
         lambda every, r: summed([e[0] for e in every]).chunk(len(every))[r]),
    Case("all_to_all", X, lambda comm, x: ops.all_to_all(x, comm, 0, 1),
         lambda every, r: torch.cat([e[0].chunk(len(every))[r] for e in every], dim=1)),
    Case("all_gather_async", X, lambda comm, x: ops.wait_tensor(ops.all_gather_async(x, comm, 1)),
         lambda every, r: torch.cat([e[0] for e in every], dim=1)),
    Case("reduce_scatter_async", X, lambda comm, x: ops.wait_tensor(ops.reduce_scatter_async(x, comm, 0, "avg")),
         lambda every, r: summed([e[0] for e in every]).chunk(len(every))[r] / len(every)),
    Case("all_to_all_async", X, lambda comm, x: ops.wait_tensor(ops.all_to_all_async(x, comm, 0, 1)),
         lambda every, r: torch.cat([e[0].chunk(len(every))[r] for e in every], dim=1)),
    uneven_case("all_to_all_v", ops.all_to_all_v),
    uneven_case("all_to_all_v_async", lambda *args: ops.wait_tensor(ops.all_to_all_v_async(*args))),
    Case("broadcast", X, lambda comm, x: ops.broadcast(x, comm, 1), lambda every, r: every[1][0].clone()),
    Case("broadcast_async", X, lambda comm, x: ops.wait_tensor(ops.broadcast_async(x, comm, 1)),
         lambda every, r: every[1][0].clone()),
    Case("permute", X, lambda comm, x: ops.permute(x, comm, around(comm)),
         lambda every, r: every[(r - 1) % len(every)][0].clone()),
    Case("permute_async", X, lambda comm, x: ops.wait_tensor(ops.permute_async(x, comm, around(comm))),
         lambda every, r: every[(r - 1) % len(every)][0].clone()),
    *(case for name in ("sequential", "pipelined", "p2p", "bulk", "low_latency") for case in fused_cases(name)),
    *(case for algorithm in ("sequential", "pipelined", "p2p") for case in exchange_cases(algorithm)),
    *(case for algorithm in ("sequential", "pipelined", "bulk") for case in bulk_cases(algorithm)),
]  # fmt: skip
OVER_CHANNELS = [case for case in CASES if case.name.endswith(("p2p", "low_latency"))]
OVER_CHANNELS += [case for case in CASES if case.name.startswith("bulk_overlap") and case.name.endswith("bulk")]

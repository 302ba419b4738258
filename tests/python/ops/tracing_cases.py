"""Calls of each operator, and the shapes of its results: see test_tracing.py."""

import torch

raw = torch.ops.torch_overlap
NOBODY = "no such communicator"


def calls(size, comm=NOBODY, root=0):
    """Returns name -> (operator, shapes of its tensors, call). There is at least one of each operator."""
    ring = [rank for r in range(size) for rank in (r, (r + 1) % size)]
    return {
        "all_reduce": (raw.all_reduce, [(4, 6)], lambda x: (x, "sum", comm, size)),
        "all_reduce I": (raw.all_reduce, [(4, 6)], lambda x: (x, "avg", comm, size, "I")),
        "all_reduce premul": (raw.all_reduce, [(4, 6)], lambda x: (x, "premul_sum", comm, size, "R", 2.0)),
        "all_gather": (raw.all_gather, [(4, 6)], lambda x: (x, 0, comm, size)),
        "all_gather 1": (raw.all_gather, [(4, 6)], lambda x: (x, -1, comm, size, "I")),
        "reduce_scatter": (raw.reduce_scatter, [(4, 6)], lambda x: (x, 0, "sum", comm, size)),
        "reduce_scatter 1": (raw.reduce_scatter, [(4, 6)], lambda x: (x, 1, "avg", comm, size)),
        "all_to_all": (raw.all_to_all, [(4, 6)], lambda x: (x, 0, 1, comm, size)),
        "all_to_all_v": (raw.all_to_all_v, [(4, 6)], lambda x: (x, [4 // size] * size, [4 // size] * size, comm)),
        "broadcast": (raw.broadcast, [(4, 6)], lambda x: (x, root, comm)),
        "permute": (raw.permute, [(4, 6)], lambda x: (x, ring, comm)),
        "_own_part": (raw._own_part, [(4, 6)], lambda x: (x, 1, comm, size)),
        "_reduce_to_root": (raw._reduce_to_root, [(4, 6)], lambda x: (x, root, comm)),
        "all_reduce_async": (raw.all_reduce_async, [(4, 6)], lambda x: (x, "sum", comm, size)),
        "all_gather_async": (raw.all_gather_async, [(4, 6)], lambda x: (x, 0, comm, size)),
        "reduce_scatter_async": (raw.reduce_scatter_async, [(4, 6)], lambda x: (x, 0, "sum", comm, size)),
        "all_to_all_async": (raw.all_to_all_async, [(4, 6)], lambda x: (x, 0, 0, comm, size)),
        "all_to_all_v_async": (
            raw.all_to_all_v_async,
            [(4, 6)],
            lambda x: (x, [4 // size] * size, [4 // size] * size, comm),
        ),
        "broadcast_async": (raw.broadcast_async, [(4, 6)], lambda x: (x, root, comm)),
        "permute_async": (raw.permute_async, [(4, 6)], lambda x: (x, ring, comm)),
        "all_gather_matmul": (
            raw.all_gather_matmul,
            [(4, 6), (5, 6), (3, 6), (3,)],
            lambda x, w1, w2, b2: (x, [w1, w2], [None, b2], comm, size, 0, False, "pipelined"),
        ),
        "all_gather_matmul 1": (
            raw.all_gather_matmul,
            [(2, 4, 6), (5, 6)],
            lambda x, w: (x, [w], [], comm, size, 1, True, "sequential"),
        ),
        "matmul_reduce_scatter": (
            raw.matmul_reduce_scatter,
            [(4, 6), (5, 6), (5,)],
            lambda x, w, b: (x, w, b, comm, size, 0, "sum", "pipelined"),
        ),
        "matmul_reduce_scatter 1": (
            raw.matmul_reduce_scatter,
            [(3, 4, 6), (5, 6)],
            lambda x, w: (x, w, None, comm, size, -2, "avg", "sequential"),
        ),
        "matmul_all_reduce": (
            raw.matmul_all_reduce,
            [(2, 4, 6), (5, 6), (5,)],
            lambda x, w, b: (x, w, b, comm, size, "sum", "pipelined"),
        ),
        "matmul_all_reduce_rms_norm": (
            raw.matmul_all_reduce_rms_norm,
            [(2, 4, 6), (5, 6), (5,), (2, 4, 5), (5,)],
            lambda x, w, b, residual, g: (x, w, b, residual, g, comm, size, 1e-5, "pipelined"),
        ),
        "matmul_all_reduce_rms_norm 1": (
            raw.matmul_all_reduce_rms_norm,
            [(4, 6), (5, 6), (4, 5), (5,), (3, 5)],
            lambda x, w, residual, g, after: (x, w, None, residual, g, comm, size, 1e-5, "sequential", after),
        ),
        "all_reduce_rms_norm": (
            raw.all_reduce_rms_norm,
            [(4, 6), (4, 6), (6,), (6,)],
            lambda x, residual, g, b: (x, residual, g, b, comm, size, 1e-5),
        ),
        "all_reduce_rms_norm 1": (
            raw.all_reduce_rms_norm,
            [(2, 4, 6), (2, 4, 6), (6,), (3, 6)],
            lambda x, residual, g, after: (x, residual, g, None, comm, size, 1e-5, after),
        ),
        "all_to_all_matmul": (
            raw.all_to_all_matmul,
            [(4, 3, 2), (5, 2 * size), (5,)],
            lambda x, w, b: (x, w, b, comm, size, "pipelined"),
        ),
        "matmul_all_to_all": (
            raw.matmul_all_to_all,
            [(4, 6), (2 * size, 6), (3 * size, 6), (3 * size,)],
            lambda x, w1, w2, b2: (x, [w1, w2], [None, b2], comm, size, "pipelined"),
        ),
        "matmul_all_to_all 1": (
            raw.matmul_all_to_all,
            [(4, 3, 6), (2 * size, 6)],
            lambda x, w: (x, [w], [], comm, size, "sequential"),
        ),
        "bulk_overlap_matmul": (
            raw.bulk_overlap_matmul,
            [(3, 6), (5, 6), (5,), (4, 2)],
            lambda x, w, b, other: (x, w, b, other, "all_gather", comm, size, 0, "pipelined"),
        ),
        "bulk_overlap_matmul 1": (
            raw.bulk_overlap_matmul,
            [(2, 3, 6), (5, 6), (3, 4)],
            lambda x, w, other: (x, w, None, other, "reduce_scatter", comm, size, -1, "sequential"),
        ),
    }


def scaled_calls(size, comm=NOBODY):
    """Returns name -> (operator, call), for 8-bit floats: they have no gradient."""

    def x(*shape):
        return torch.ones(*shape).to(torch.float8_e4m3fn)

    s = lambda: torch.ones(1)  # noqa: E731
    e8m0 = lambda *shape: torch.ones(*shape).to(torch.float8_e8m0fnu)  # noqa: E731
    gather, scatter = raw.scaled_all_gather_matmul, raw.scaled_matmul_reduce_scatter
    return {
        "scaled_all_gather_matmul": (
            gather,
            lambda: (
                x(4, 16),
                s(),
                [x(8, 16)],
                [s()],
                [torch.ones(8)],
                comm,
                size,
                0,
                torch.float32,
                True,
                "pipelined",
            ),
        ),
        "scaled_all_gather_matmul 1": (
            gather,
            lambda: (x(2, 4, 16), s(), [x(8, 16)] * 2, [s(), s()], [], comm, size, 1),
        ),
        "scaled_all_gather_matmul 2": (
            gather,
            lambda: (
                x(8, 64),
                e8m0(8, 2),
                [x(8, 64)],
                [e8m0(8, 2)],
                [],
                comm,
                size,
                0,
                torch.float32,
                False,
                "sequential",
                2,
                True,
            ),
        ),
        "scaled_matmul_reduce_scatter": (
            scatter,
            lambda: (
                x(4, 16),
                s(),
                x(8, 16),
                s(),
                torch.ones(8),
                comm,
                size,
                0,
                "avg",
                torch.float32,
                False,
                "pipelined",
            ),
        ),
        "scaled_matmul_reduce_scatter 1": (scatter, lambda: (x(3, 4, 16), s(), x(8, 16), s(), None, comm, size, 1)),
        "scaled_matmul_all_reduce": (
            raw.scaled_matmul_all_reduce,
            lambda: (
                x(3, 4, 16),
                s(),
                x(8, 16),
                s(),
                torch.ones(8),
                comm,
                size,
                "avg",
                torch.float32,
                True,
                "pipelined",
            ),
        ),
    }


EXPECTED = {
    "all_gather": [(8, 6)],
    "all_gather 1": [(4, 12)],
    "reduce_scatter": [(2, 6)],
    "reduce_scatter 1": [(4, 3)],
    "all_to_all": [(2, 12)],
    "_own_part": [(4, 3)],
    "all_gather_async": [(8, 6)],
    "reduce_scatter_async": [(2, 6)],
    "all_gather_matmul": [(8, 5), (8, 3), (0,)],
    "all_gather_matmul 1": [(2, 8, 5), (2, 8, 6)],
    "matmul_reduce_scatter": [(2, 5)],
    "matmul_reduce_scatter 1": [(3, 2, 5)],
    "matmul_all_reduce": [(2, 4, 5)],
    "matmul_all_reduce_rms_norm": [(2, 4, 5), (2, 4, 5)],
    "matmul_all_reduce_rms_norm 1": [(4, 3), (4, 5)],
    "all_reduce_rms_norm": [(4, 6), (4, 6)],
    "all_reduce_rms_norm 1": [(2, 4, 3), (2, 4, 6)],
    "all_to_all_matmul": [(2, 3, 5)],
    "matmul_all_to_all": [(8, 2), (8, 3)],
    "matmul_all_to_all 1": [(8, 3, 2)],
    "bulk_overlap_matmul": [(3, 5), (8, 2)],
    "bulk_overlap_matmul 1": [(2, 3, 5), (3, 2)],
    "scaled_all_gather_matmul": [(8, 8), (0,), (0,)],
    "scaled_all_gather_matmul 1": [(2, 8, 8), (2, 8, 8), (0,), (0,)],
    "scaled_all_gather_matmul 2": [(16, 8), (16, 64), (16, 2)],
    "scaled_matmul_reduce_scatter": [(2, 8)],
    "scaled_matmul_reduce_scatter 1": [(3, 2, 8)],
    "scaled_matmul_all_reduce": [(3, 4, 8)],
}

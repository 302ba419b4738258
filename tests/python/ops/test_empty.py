"""Operands without elements: their strides do not matter, and are never rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.gemm import ScalingMode as Mode
from torch_overlap.testing import run_ranks

SIZE = 2
K, N = 32, 16
E4M3 = torch.float8_e4m3fn

# Matrices [rows, columns] of which one is 0.
STRIDED: dict[str, Callable[[int, int], Tensor]] = {
    "column stride": lambda r, c: torch.empty(r, 2 * c)[:, ::2],
    "transposed": lambda r, c: torch.empty(c, r).t(),
    "no strides": lambda r, c: torch.empty(0).as_strided((r, c), (0, 0)),
    "row stride": lambda r, c: torch.empty(max(r, 1), c + 3)[:r, :c],
}
MATMULS = ("auto", "sequential", "pipelined", "p2p", "low_latency", "bulk")
EXCHANGES = ("auto", "sequential", "pipelined", "p2p")
OPERATORS: dict[str, tuple[tuple[str, ...], Callable[..., list[Tensor]]]] = {
    "all_gather_matmul": (
        MATMULS,
        lambda x, w, c, **o: [*(found := ops.all_gather_matmul(x, [w], c, return_gathered=True, **o))[0], found[1]],
    ),
    "matmul_reduce_scatter": (MATMULS, lambda x, w, c, **o: [ops.matmul_reduce_scatter(x, w, c, **o)]),
    "matmul_all_reduce": (MATMULS, lambda x, w, c, **o: [ops.matmul_all_reduce(x, w, c, **o)]),
    "all_to_all_matmul": (
        EXCHANGES,
        lambda x, w, c, **o: [ops.all_to_all_matmul(x, torch.cat([w] * c.get_size(), 1), c, **o)],
    ),
    "matmul_all_to_all": (EXCHANGES, lambda x, w, c, **o: ops.matmul_all_to_all(x, [w], c, **o)),
    "bulk_overlap_matmul": (
        ("auto", "sequential", "pipelined", "bulk"),
        lambda x, w, c, **o: list(ops.bulk_overlap_matmul(x, w, x, c, collective="reduce_scatter", **o)),
    ),
}


def plain(comm: to.TorchComm) -> None:
    failed = []
    for name, (algorithms, run) in OPERATORS.items():
        want = [y.shape for y in run(torch.empty(0, K), torch.ones(N, K), comm)]
        for algorithm in algorithms:
            for strides, make in STRIDED.items():
                x, w = make(0, K).requires_grad_(), torch.ones(N, K).requires_grad_()
                try:
                    found = run(x, w, comm, algorithm=algorithm)
                    assert [y.shape for y in found] == want, [y.shape for y in found]
                    sum(y.sum() for y in found).backward()  # of expanded gradients
                    assert x.grad is not None
                    assert x.grad.shape == x.shape
                    assert w.grad is None or not w.grad.any()
                except Exception as error:
                    failed.append(f"{name} by {algorithm}, {strides}: {error}")
    assert not failed, "\n".join(failed)


def test_no_rows_by_every_algorithm() -> None:
    run_ranks(plain, SIZE, backend="local")


def no_features(comm: to.TorchComm) -> None:
    """Products over nothing are zeros; products with nothing are empty."""
    failed = []
    for name, (algorithms, run) in OPERATORS.items():
        for algorithm in algorithms:
            for strides, make in STRIDED.items():
                for x, w in ((make(4, 0), make(N, 0)), (torch.ones(4, K), make(0, K))):
                    try:
                        y = run(x, w, comm, algorithm=algorithm)[0]
                        assert y.shape[-1] == (w.size(0) // SIZE if name == "matmul_all_to_all" else w.size(0))
                        assert not y.any()
                    except Exception as error:
                        failed.append(f"{name} by {algorithm}, {strides} {list(w.shape)}: {error}")
    assert not failed, "\n".join(failed)


def test_no_features_by_every_algorithm() -> None:
    run_ranks(no_features, SIZE, backend="local")


def overlapping(comm: to.TorchComm) -> None:
    """Rows that overlap are copied, not refused."""
    x, w = torch.ones(1, K).expand(4, K), torch.arange(K, dtype=torch.float32).expand(N, K)
    for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        algorithms, run = OPERATORS[name]
        for algorithm in algorithms:
            y = run(x, w, comm, algorithm=algorithm)[0]
            ranks = 1 if name == "all_gather_matmul" else SIZE
            assert (y == ranks * K * (K - 1) / 2).all(), (name, algorithm)


def test_expanded_operands() -> None:
    run_ranks(overlapping, SIZE, backend="local")


MODES = [mode for mode in (Mode.CURRENT_TENSOR_SCALING, Mode.MXFP8_1D_SCALING, Mode.BLOCK_1D_SCALING,
                           Mode.BLOCK_2D_SCALING, Mode.ROW_SCALING)]  # fmt: skip


def scaled(comm: to.TorchComm, mode: Mode) -> None:
    weights = ops.quantize(torch.ones(N, 128), mode)
    of_rows = Mode.BLOCK_1D_SCALING if mode == Mode.BLOCK_2D_SCALING else mode
    failed = []
    for strides, make in STRIDED.items():
        data, scale, *_ = ops.quantize(make(0, 128), of_rows)
        x = (
            make(0, 128).to(E4M3)
            if strides != "no strides"
            else torch.empty(0, dtype=E4M3).as_strided((0, 128), (0, 0))
        )
        assert data.shape == x.shape
        for algorithm in ("auto", "sequential", "pipelined", "p2p"):
            more: dict[str, Any] = {"algorithm": algorithm, "scaling_mode": mode}
            try:
                (y,), rows, _ = ops.scaled_all_gather_matmul(x, scale, [weights[0]], [weights[1]], comm,
                                                             return_gathered=True, **more)  # fmt: skip
                assert y.shape == (0, N)
                assert rows.shape == (0, 128)
                for op in (ops.scaled_matmul_reduce_scatter, ops.scaled_matmul_all_reduce):
                    assert op(x, scale, *weights[:2], comm, **more).shape == (0, N)
            except Exception as error:
                failed.append(f"{algorithm}, {strides}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_no_rows_of_8_bits(mode: Mode) -> None:
    run_ranks(scaled, SIZE, mode, backend="local")


def test_collectives_of_nothing() -> None:
    def rank(comm: to.TorchComm) -> None:
        for make in STRIDED.values():
            x = make(0, 4)
            assert ops.all_reduce(x, comm).shape == (0, 4)
            assert ops.all_reduce_(make(0, 4), comm).shape == (0, 4)
            assert ops.all_gather(x, comm, 1).shape == (0, 8)
            assert ops.reduce_scatter(x, comm).shape == (0, 4)
            assert ops.all_to_all(x, comm, 1, 0).shape == (0, 2)
            assert ops.all_to_all_v(x, comm, [0, 0], [0, 0]).shape == (0, 4)
            assert ops.broadcast(x, comm).shape == (0, 4)
            assert ops.permute(x, comm, [(0, 1)]).shape == (0, 4)
            for issue in (ops.all_reduce_async, ops.all_gather_async, ops.reduce_scatter_async, ops.all_to_all_async):
                ops.wait_tensor(issue(x, comm))

    run_ranks(rank, SIZE, backend="local")

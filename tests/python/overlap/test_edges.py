"""Corners: the first call of a buffer, odd biases, rows that do not divide, the log of chunks."""

from __future__ import annotations

import time

import torch
from overlap_cases import logged

import torch_overlap as to
from torch_overlap import CommOverlapMethod as Method
from torch_overlap import CommOverlapType as Type
from torch_overlap import TorchComm
from torch_overlap.gemm import GemmArgs, GemmOperand, gemm
from torch_overlap.testing import run_ranks


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def run_first_call_of_a_late_rank(comm: TorchComm, seed: int) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    config = to.CommOverlapConfig(Type.AG, Method.RING_EXCHANGE, [4 * size, 8], torch.float64, size)
    buffer = to.CommOverlapP2PBase(comm, config)
    if rank == size - 1:
        time.sleep(0.2)  # the others have entered their call
    buffer.get_buffer().fill_(float("nan"))
    x, w = draw(4 * size, 8, seed=seed), draw(3, 8, seed=seed + 1 + rank)
    y = torch.empty(4 * size, 3, dtype=torch.float64)
    buffer.split_overlap_ag(w, True, x.chunk(size)[rank].clone(), False, y)
    torch.testing.assert_close(y, x @ w.T, rtol=1e-12, atol=1e-12)


def test_what_a_rank_writes_before_its_first_call_is_not_mixed_with_what_others_send(seed: int) -> None:
    run_ranks(run_first_call_of_a_late_rank, 3, seed)


def run_odd_biases(comm: TorchComm, seed: int) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    x, w = draw(6, 8, seed=seed), draw(10, 8, seed=seed + 1)
    columns = draw(10, 2, seed=seed + 2)
    for bias in (columns[:, 0], columns[0, 0].expand(10), columns.flatten()[::2]):
        y = to.ops.matmul_reduce_scatter(x.repeat(size, 1), w, comm, bias, algorithm="p2p")
        torch.testing.assert_close(y, size * (x @ w.T) + bias, rtol=1e-12, atol=1e-12)
        (z,), _ = to.ops.all_gather_matmul(x + rank, [w], comm, [bias], algorithm="p2p")
        expected = torch.cat([(x + r) @ w.T for r in range(size)]) + bias
        torch.testing.assert_close(z, expected, rtol=1e-12, atol=1e-12)


def test_a_bias_with_any_strides(seed: int) -> None:
    run_ranks(run_odd_biases, 2, seed)


def run_uneven_rows(comm: TorchComm, seed: int) -> None:
    """Products of exactly 2 MiB: the ranks send each other more than that, and the memory must be large enough."""
    rank, size = comm.get_rank(), comm.get_size()
    for rows, columns in ((4096, 256), (1024, 1024), (5, 7)):
        xs = [draw(rows, 8, seed=seed + r, dtype=torch.bfloat16) for r in range(size)]
        w = draw(columns, 8, seed=seed + 10, dtype=torch.bfloat16)
        y = to.ops.matmul_all_reduce(xs[rank], w, comm, algorithm="p2p")
        expected = sum((x.double() @ w.double().T).bfloat16().double() for x in xs)
        torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=2**-5)


def test_rows_that_ranks_cannot_share_evenly(seed: int) -> None:
    run_ranks(run_uneven_rows, 3, seed)


def run_blocks(comm: TorchComm, seed: int) -> None:
    """The product is so large that it is split into blocks of rows; each is gathered during the next. Integers make
    it exact."""
    rank, size = comm.get_rank(), comm.get_size()
    rows, columns = 8191, 4200
    xs = [torch.randint(-3, 4, (rows, 4), generator=torch.Generator().manual_seed(seed + r)) for r in range(size)]
    w = torch.randint(-2, 3, (columns, 4), generator=torch.Generator().manual_seed(seed + 10)).bfloat16()
    bias = torch.arange(columns) % 5 + rank
    for op, with_bias in (("sum", True), ("avg", False)):
        given = bias.bfloat16() if with_bias else None
        y = to.ops.matmul_all_reduce(xs[rank].bfloat16(), w, comm, given, op=op, algorithm="p2p")
        expected = sum(xs[1:], xs[0]).bfloat16() @ w.T / (size if op == "avg" else 1)
        assert torch.equal(y, expected + given if with_bias else expected)


def test_an_all_reduce_in_blocks_of_rows(seed: int) -> None:
    run_ranks(run_blocks, 2, seed)


def run_logged(comm: TorchComm, relay: bool = False) -> str:
    size = comm.get_size()
    config = to.CommOverlapConfig(Type.AG, Method.RING_EXCHANGE, [2 * size, 8], torch.float64, size, relay_ag=relay)
    buffer = to.CommOverlapP2PBase(comm, config)
    x, w, y = torch.ones(2, 8).double(), torch.ones(3, 8).double(), torch.empty(2 * size, 3).double()
    return logged(lambda: buffer.split_overlap_ag(w, True, x, False, y))


def test_every_product_and_exchange_is_logged_when_that_is_asked_for() -> None:
    logs = run_ranks(run_logged, 2, env={"TORCH_OVERLAP_LOG_CHUNKS": "1"})
    for rank, log in enumerate(logs):
        assert log.count("product 2 x 3 x 8 on stream") == 2, log
        other = 1 - rank
        assert f"rank {rank}: chunk {rank} of 128 bytes to rank {other}, chunk {other} from rank {other}" in log
    assert run_ranks(run_logged, 2) == ["", ""]


def test_chunks_are_passed_on_to_the_neighbour_only_where_that_is_asked_for() -> None:
    size = 4
    for relay in (False, True):
        logs = run_ranks(run_logged, size, relay, env={"TORCH_OVERLAP_LOG_CHUNKS": "1"})
        for rank, log in enumerate(logs):
            given = [line.split(" to rank ")[1].split(",")[0] for line in log.splitlines() if " to rank " in line]
            others = [(rank + (1 if relay else step)) % size for step in range(1, size)]
            assert given == [str(other) for other in others], log


def run_gradients_into_the_buffer(comm: TorchComm, seed: int) -> None:
    """The product of an input's gradient is written to the buffer; its sum is overlapped with the weight's gradient."""
    rank, size = comm.get_rank(), comm.get_size()
    tokens, outputs, features = 4 * size, 6, 8
    config = to.CommOverlapConfig(Type.RS, Method.BULK, [tokens, features], torch.float64, size)
    buffer = to.CommOverlapBase(comm, config)
    grads = [draw(tokens, outputs, seed=seed + 3 * r) for r in range(size)]
    weights = [draw(outputs, features, seed=seed + 3 * r + 1) for r in range(size)]
    x = draw(tokens, features, seed=seed + 3 * rank + 2)
    grad, weight = grads[rank], weights[rank]
    place = buffer.get_buffer()
    assert place.data_ptr() == buffer.get_ubuf_dptr()
    gemm(GemmArgs(GemmOperand(grad), GemmOperand(weight), place))
    torch.testing.assert_close(buffer.get_buffer(), grad @ weight, rtol=1e-12, atol=1e-12)
    weight_grad = torch.empty(outputs, features, dtype=torch.float64)
    log = logged(lambda: buffer.bulk_overlap(x, False, grad, True, weight_grad, comm_type=Type.RS))
    torch.testing.assert_close(weight_grad, grad.T @ x, rtol=1e-12, atol=1e-12)
    mine = sum(g @ w for g, w in zip(grads, weights, strict=True)).chunk(size)[rank]
    torch.testing.assert_close(buffer.get_buffer(local_chunk=True), mine, rtol=1e-12, atol=1e-12)
    # The streams run only the product and the sum, which reads the buffers in place.
    assert [line.split(": ")[2].split(" ")[0] for line in log.splitlines()] == ["sum", "product"]


def test_a_gradient_is_multiplied_into_the_buffer_that_is_reduced(seed: int) -> None:
    run_ranks(run_gradients_into_the_buffer, 2, seed, env={"TORCH_OVERLAP_LOG_CHUNKS": "1"})
    run_ranks(run_gradients_into_the_buffer, 3, seed, env={"TORCH_OVERLAP_LOG_CHUNKS": "1"})


def run_workspaces(comm: TorchComm, seed: int) -> None:
    size = comm.get_size()
    config = to.CommOverlapConfig(Type.AG, Method.RING_EXCHANGE, [4 * size, 8], torch.float64, size)
    buffer = to.CommOverlapP2PBase(comm, config)
    x, w = draw(4 * size, 8, seed=seed), draw(3, 8, seed=seed + 1)
    y = torch.empty(4 * size, 3, dtype=torch.float64)
    own = x.chunk(size)[comm.get_rank()].clone()
    for length in (0, 1, 1000):
        y.fill_(float("nan"))
        buffer.split_overlap_ag(w, True, own, False, y, workspace=torch.empty(length, dtype=torch.uint8))
        torch.testing.assert_close(y, x @ w.T, rtol=1e-12, atol=1e-12)
    buffer.check()


def test_a_workspace_of_any_length(seed: int) -> None:
    run_ranks(run_workspaces, 3, seed)

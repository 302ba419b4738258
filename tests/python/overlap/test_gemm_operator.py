"""torch.ops.torch_overlap.gemm over buffers of the registry: every element, on every rank."""

from __future__ import annotations

import pytest
import torch

import torch_overlap as to
from torch_overlap import CommOverlapMethod as Method
from torch_overlap import CommOverlapType as Type
from torch_overlap import TorchComm
from torch_overlap.quantize import ScalingMode as Mode
from torch_overlap.testing import run_ranks

OP = torch.ops.torch_overlap.gemm
E4M3 = torch.float8_e4m3fn
TOKENS, K, N = 24, 32, 16


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own(x: torch.Tensor, comm: TorchComm) -> torch.Tensor:
    return x.chunk(comm.get_size())[comm.get_rank()].contiguous()


def gather(comm: TorchComm, seed: int, atomic: bool) -> None:
    rank = comm.get_rank()
    id = to.create_comm_overlap_buffer(
        comm, Type.AG, Method.RING_EXCHANGE, (TOKENS, K), torch.float64, atomic_gemm=atomic
    )
    for turn in range(3):
        x = draw(TOKENS // 2, 2, K, seed=seed + turn)
        w = draw(N, K, seed=seed + 10 + rank)
        bias = draw(N, seed=seed + 20)
        y, bias_grad, pre_gelu, aux = OP(
            own(x, comm), None, w, None, bias, comm_type=2, comm_overlap_method=3, comm_overlap_id=id,
            lhs_axis_boundary=-1, rhs_axis_boundary=-1, rhs_transposed=True, fuse_bias=True,
        )  # fmt: skip
        torch.testing.assert_close(y, x @ w.T + bias, rtol=1e-12, atol=1e-12)
        assert torch.equal(aux, x)
        assert bias_grad.numel() == pre_gelu.numel() == 0
    to.destroy_comm_overlap_buffer(id)


def scatter(comm: TorchComm, seed: int, method: Method, atomic: bool) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    id = to.create_comm_overlap_buffer(comm, Type.RS, method, (TOKENS, N), torch.float64, atomic_gemm=atomic)
    for turn in range(3):
        xs = [draw(TOKENS // 2, 2, K, seed=seed + turn * size + r) for r in range(size)]
        ws = [draw(N, K, seed=seed + 100 + r) for r in range(size)]
        y, *_ = OP(
            xs[rank], None, ws[rank], None, comm_type=1, comm_overlap_method=int(method), comm_overlap_id=id,
            lhs_axis_boundary=-1, rhs_axis_boundary=-1, rhs_transposed=True,
        )  # fmt: skip
        expected = sum(x @ w.T for x, w in zip(xs, ws, strict=True))
        torch.testing.assert_close(y, own(expected, comm), rtol=1e-12, atol=1e-11)
    to.destroy_comm_overlap_buffer(id)


def bulk(comm: TorchComm, seed: int) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    id = to.create_comm_overlap_buffer(comm, Type.NONE, Method.BULK, (TOKENS, K), torch.float64)
    x, w = draw(7, 2, 5, seed=seed), draw(5, 3, seed=seed + 1)
    auxes = [draw(TOKENS // 2, 2, K, seed=seed + 2 + r) for r in range(size)]
    common = {"comm_overlap_method": 1, "comm_overlap_id": id, "rhs_axis_boundary": 1}
    y, _, _, gathered = OP(x, None, w, None, aux_in=own(auxes[0], comm), comm_type=2, **common)
    torch.testing.assert_close(y, x @ w, rtol=1e-12, atol=1e-12)
    assert torch.equal(gathered, auxes[0])
    y, _, _, summed = OP(x, None, w, None, aux_in=auxes[rank], comm_type=1, **common)
    torch.testing.assert_close(y, x @ w, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(summed, own(sum(auxes), comm), rtol=1e-12, atol=1e-12)
    to.destroy_comm_overlap_buffer(id)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("atomic", [False, True])
def test_gather(size: int, atomic: bool, seed: int) -> None:
    run_ranks(gather, size, seed, atomic)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("method", [Method.RING_EXCHANGE, Method.PIPELINE], ids=lambda m: m.name)
@pytest.mark.parametrize("atomic", [False, True])
def test_scatter(size: int, method: Method, atomic: bool, seed: int) -> None:
    run_ranks(scatter, size, seed, method, atomic)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bulk(size: int, seed: int) -> None:
    run_ranks(bulk, size, seed)


def uneven(comm: TorchComm, seed: int, rows: list[tuple[int, ...]]) -> None:
    """A reduce-scatter may have any number of rows up to the buffer's; the last ranks get the remainder."""
    rank, size = comm.get_rank(), comm.get_size()
    ids = {method: to.create_comm_overlap_buffer(comm, Type.NONE if method == Method.BULK else Type.RS, method,
                                                 (TOKENS + 1, N), torch.float64)
           for method in (Method.RING_EXCHANGE, Method.PIPELINE, Method.BULK)}  # fmt: skip

    def mine(x: torch.Tensor) -> torch.Tensor:
        part = -(-len(x) // size)
        return x[part * rank : part * (rank + 1)]

    for turn, shape in enumerate(rows):
        xs = [draw(*shape, K, seed=seed + 10 * turn + r) for r in range(size)]
        ws = [draw(N, K, seed=seed + 100 + r) for r in range(size)]
        bias = draw(N, seed=seed + 7)
        total = mine(sum(x @ w.T for x, w in zip(xs, ws, strict=True)))
        for method in (Method.RING_EXCHANGE, Method.PIPELINE):
            call = {"comm_type": 1, "comm_overlap_method": int(method), "comm_overlap_id": ids[method],
                    "rhs_transposed": True, "fuse_bias": True}  # fmt: skip
            y, *_ = OP(xs[rank], None, ws[rank], None, bias, **call)
            torch.testing.assert_close(y, total + bias, rtol=1e-12, atol=1e-11)
            meta = OP(xs[rank].to("meta"), None, ws[rank].to("meta"), None, bias.to("meta"), **call)
            assert meta[0].shape == y.shape
        auxes = [draw(*shape, N, seed=seed + 200 + 10 * turn + r) for r in range(size)]
        y, _, _, summed = OP(xs[0], None, ws[0], None, aux_in=auxes[rank], comm_type=1, comm_overlap_method=1,
                             comm_overlap_id=ids[Method.BULK], rhs_transposed=True)  # fmt: skip
        torch.testing.assert_close(y, xs[0] @ ws[0].T, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(summed, mine(sum(auxes)), rtol=1e-12, atol=1e-12)
    for id in ids.values():
        to.destroy_comm_overlap_buffer(id)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_that_the_ranks_do_not_share_equally(size: int, seed: int) -> None:
    rows: list[tuple[int, ...]] = [(TOKENS + 1,), (5,), (2,), (1,), (TOKENS,), (size * 2 - 1, 1)]
    run_ranks(uneven, size, seed, rows)


def test_parts_of_several_dimensions(seed: int) -> None:
    """7 x 3 rows on 4 ranks: 6 rows each, which are 2 of the first dimension; the last rank has 1 of it."""
    run_ranks(uneven, 4, seed, [(7, 3), (8, 3)])


def fewer(comm: TorchComm, seed: int) -> None:
    """All ranks have the same number of gathered rows, which is less than the buffer's."""
    rank, size = comm.get_rank(), comm.get_size()
    ring = to.create_comm_overlap_buffer(comm, Type.AG, Method.RING_EXCHANGE, (TOKENS + 1, K), torch.float64)
    bulk = to.create_comm_overlap_buffer(comm, Type.AG, Method.BULK, (TOKENS + 1, K), torch.float64)
    for part in (TOKENS // size, 1, 2, 0):
        x, w = draw(part * size, K, seed=seed + part), draw(N, K, seed=seed + 50)
        mine = x[part * rank : part * (rank + 1)]
        y, _, _, aux = OP(mine, None, w, None, comm_type=2, comm_overlap_method=3, comm_overlap_id=ring,
                          rhs_transposed=True)  # fmt: skip
        torch.testing.assert_close(y, x @ w.T, rtol=1e-12, atol=1e-12)
        assert torch.equal(aux, x)
        *_, aux = OP(x, None, w, None, aux_in=mine, comm_type=2, comm_overlap_method=1, comm_overlap_id=bulk,
                     rhs_transposed=True)  # fmt: skip
        assert torch.equal(aux, x)
    # A rank does not know the others' numbers of rows: if they differ, all ranks get an error.
    part = torch.zeros(3 - (rank == size - 1), K, dtype=torch.float64)
    with pytest.raises(to.Error, match=f"expected the same number of rows on all ranks, got {len(part) * size}"):
        OP(part, None, w, None, comm_type=2, comm_overlap_method=3, comm_overlap_id=ring, rhs_transposed=True)


@pytest.mark.parametrize("size", [2, 3])
def test_fewer_gathered_rows(size: int, seed: int) -> None:
    run_ranks(fewer, size, seed)


MODES = [
    Mode.CURRENT_TENSOR_SCALING,
    Mode.MXFP8_1D_SCALING,
    Mode.BLOCK_1D_SCALING,
    Mode.BLOCK_2D_SCALING,
    Mode.ROW_SCALING,
]


def scaled(comm: TorchComm, seed: int, mode: Mode) -> None:
    """8-bit operands with the scales of each mode: gathered, summed, and concurrent with a collective."""
    rank, size, k, n, rows = comm.get_rank(), comm.get_size(), 256, 256, 8
    of_rows = Mode.BLOCK_1D_SCALING if mode == Mode.BLOCK_2D_SCALING else mode
    ring, bulk = Method.RING_EXCHANGE, Method.BULK
    ids = [to.create_comm_overlap_buffer(comm, kind, method, (rows * size, columns), dtype)
           for kind, method, columns, dtype in ((Type.AG, ring, k, E4M3), (Type.RS, ring, n, torch.float32),
                                                (Type.RS, Method.PIPELINE, n, torch.float32),
                                                (Type.NONE, bulk, k, torch.float32))]  # fmt: skip

    def quantized(x, mode):
        if mode == Mode.CURRENT_TENSOR_SCALING:  # one factor, equal on all ranks
            x = x.clamp(-8, 8)
            return (x * 56).to(E4M3), torch.full((1,), 1 / 56)
        return tuple(to.ops.quantize(x.float(), mode, E4M3)[:2])

    def value(operand, mode):
        return to.ops.dequantize(*operand, mode).double()

    xs = [quantized(draw(rows, k, seed=seed + r), of_rows) for r in range(size)]
    whole = [quantized(draw(rows * size, k, seed=seed + 50 + r), of_rows) for r in range(size)]
    ws = [quantized(draw(n, k, seed=seed + 100 + r), mode) for r in range(size)]
    total = sum(value(x, of_rows) @ value(w, mode).T for x, w in zip(whole, ws, strict=True))
    gathered = torch.cat([value(x, of_rows) for x in xs])
    common = {"scaling_mode": int(mode), "rhs_transposed": True, "out_dtype": torch.float32}

    def call(x, id, kind, method, **more):
        return to.ops.gemm(*x, *ws[rank], comm_type=int(kind), comm_overlap_method=int(method), comm_overlap_id=id,
                           **common, **more)  # fmt: skip

    y, _, _, aux = call(xs[rank], ids[0], Type.AG, ring)
    torch.testing.assert_close(y.double(), gathered @ value(ws[rank], mode).T, rtol=1e-4, atol=1e-3)
    assert torch.equal(aux.view(torch.uint8), torch.cat([x[0].view(torch.uint8) for x in xs]))
    for id, method in ((ids[1], ring), (ids[2], Method.PIPELINE)):
        y, *_ = call(whole[rank], id, Type.RS, method)
        torch.testing.assert_close(y.double(), own(total, comm), rtol=1e-4, atol=1e-3)
    others = [draw(rows, k, seed=seed + 200 + r).float() for r in range(size)]
    y, _, _, aux = call(whole[rank], ids[3], Type.AG, bulk, aux_in=others[rank])
    torch.testing.assert_close(y.double(), value(whole[rank], of_rows) @ value(ws[rank], mode).T, rtol=1e-4, atol=1e-3)
    assert torch.equal(aux, torch.cat(others))
    if mode == Mode.MXFP8_1D_SCALING:
        buffer = torch.empty(128, 8, dtype=torch.uint8)
        with pytest.raises(to.UnsupportedError, match=r"lhs whose scales have a row .*swizzled ones; use unswizzle"):
            call(xs[rank], ids[0], Type.AG, ring, lhs_swizzle=buffer)
        swizzle = torch.zeros(n, k // 32, dtype=torch.uint8)
        y, *_ = call(xs[rank], ids[0], Type.AG, ring, rhs_swizzle=swizzle)  # the weight stays where it is
        torch.testing.assert_close(y.double(), gathered @ value(ws[rank], mode).T, rtol=1e-4, atol=1e-3)
        assert torch.equal(swizzle, to.ops.swizzle_scales(ws[rank][1]).view(torch.uint8))
    for id in ids:
        to.destroy_comm_overlap_buffer(id)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_8_bit_operands(mode: Mode, size: int, seed: int) -> None:
    run_ranks(scaled, size, seed, mode)


def wrong(comm: TorchComm) -> None:
    id = to.create_comm_overlap_buffer(comm, Type.AG, Method.RING_EXCHANGE, (TOKENS, K), torch.float64)
    x, w = torch.zeros(TOKENS // comm.get_size(), K, dtype=torch.float64), torch.zeros(N, K, dtype=torch.float64)

    def call(comm_type=2, method=3, buffer=id, lhs=x, **more):
        return OP(lhs, None, w, None, comm_type=comm_type, comm_overlap_method=method, comm_overlap_id=buffer,
                  rhs_axis_boundary=-1, rhs_transposed=True, **more)  # fmt: skip

    for message, kind, arguments in [
        ("invalid collective type", to.InvalidValueError, {"comm_type": 5}),
        ("the id of a live buffer, got 0", to.InvalidValueError, {"buffer": 0}),
        ("comm_overlap_method to be that of buffer", to.InvalidValueError, {"method": 2}),
        ("lhs as it is with comm_type AG", to.UnsupportedError, {"lhs_transposed": True}),
        ("no aux_in for AG", to.InvalidValueError, {"aux_in": x}),
        ("Operation not supported", to.UnsupportedError, {"comm_type": 1, "lhs": torch.zeros_like(x)}),
        ("at most the 24 tokens of the buffer", to.InvalidValueError, {"lhs": x.repeat(2, 1)}),
        ("expected lhs of 32 features of 8 bytes, as the buffer has, got 31 of 8", to.InvalidValueError,
         {"lhs": x[:, 1:]}),
        ("expected lhs of 32 features of 8 bytes, as the buffer has, got 32 of 4", to.InvalidValueError,
         {"lhs": x.float()}),
    ]:  # fmt: skip
        with pytest.raises(kind, match=message):
            call(**arguments)
    y, *_ = call()  # nothing was sent: all ranks still match
    assert y.shape == (TOKENS, N)
    to.destroy_comm_overlap_buffer(id)
    with pytest.raises(to.InvalidValueError, match="which was destroyed"):
        call()
    id = to.create_comm_overlap_buffer(comm, Type.RS, Method.PIPELINE, (TOKENS, N), torch.float64)
    sized = "^gemm: GEMM->RS overlap output buffer is sized incorrectly: expected a first dimension"
    for message, columns, shape in [
        (rf"{sized} that 2 ranks can share, got 3 of 2 rows, which a part rounded up cuts. Pad it", N, (3, 2)),
        ("^gemm: expected an output of 16 features, as the buffer has, got 15", N - 1, (4,)),
        ("^gemm: expected at most the 24 tokens of the buffer for the rows of the product, got 25", N, (25,)),
    ]:
        with pytest.raises(to.InvalidValueError, match=message):
            OP(torch.zeros(*shape, K, dtype=torch.float64), None, w[:columns], None, comm_type=1, comm_overlap_method=2,
               comm_overlap_id=id, rhs_transposed=True)  # fmt: skip
    for name, more in [("fuse_gelu", {"fuse_gelu": True}), ("bias gradient", {"fuse_bias": True, "grad": True})]:
        with pytest.raises(to.UnsupportedError, match=f"^gemm: expected no {name} with comm_type RS, got it"):
            OP(torch.zeros(4, K, dtype=torch.float64), None, w, None, comm_type=1, comm_overlap_method=2,
               comm_overlap_id=id, rhs_transposed=True, **more)  # fmt: skip
    to.destroy_comm_overlap_buffer(id)


def test_errors() -> None:
    run_ranks(wrong, 2)


def unchanged(comm: TorchComm) -> None:
    """A call that is refused leaves the buffer, and its number of active tokens, unchanged."""
    size = comm.get_size()
    f64 = torch.float64
    bulk = to.create_comm_overlap_buffer(comm, Type.NONE, Method.BULK, (TOKENS, K), f64)
    ag = to.create_comm_overlap_buffer(comm, Type.AG, Method.RING_EXCHANGE, (TOKENS, K), f64)
    rs = to.create_comm_overlap_buffer(comm, Type.RS, Method.RING_EXCHANGE, (TOKENS, N), f64)
    x, few = torch.zeros(7, 5, dtype=f64), torch.ones(size, K, dtype=f64)
    aside, beside = (x, torch.zeros(5, 3, dtype=f64), 1, few), (few, torch.zeros(K, N, dtype=f64), 3, None)
    for id, kind, (lhs, rhs, method, aux) in [(bulk, 1, aside), (bulk, 2, aside), (ag, 2, beside), (rs, 1, beside)]:
        buffer = to.comm_overlap_buffer(id)
        held = draw(*buffer.get_buffer().shape, seed=comm.get_rank())
        buffer.copy_into_buffer(held)
        bias = torch.ones(rhs.shape[1])  # float32: refused by the last check
        with pytest.raises(to.InvalidTypeError, match=r"expected .*bias"):
            OP(lhs, None, rhs, None, bias, fuse_bias=True, aux_in=aux, comm_type=kind, comm_overlap_method=method,
               comm_overlap_id=id, rhs_axis_boundary=1)  # fmt: skip
        assert buffer.active_tokens() == TOKENS
        assert torch.equal(buffer.get_buffer(), held)
        comm.barrier(async_op=False)
    for id in (bulk, ag, rs):
        to.destroy_comm_overlap_buffer(id)


def test_a_refused_call_changes_no_buffer() -> None:
    run_ranks(unchanged, 2)


def wrong_bulk(comm: TorchComm) -> None:
    size = comm.get_size()
    id = to.create_comm_overlap_buffer(comm, Type.NONE, Method.BULK, (TOKENS, K), torch.float64)
    x, w = torch.zeros(7, 5, dtype=torch.float64), torch.zeros(5, 3, dtype=torch.float64)

    def call(comm_type, aux, **more):
        return OP(x, None, w, None, aux_in=aux, comm_type=comm_type, comm_overlap_method=1, comm_overlap_id=id,
                  rhs_axis_boundary=1, **more)  # fmt: skip

    def rows(count, columns=K, dtype=torch.float64):
        return torch.zeros(count, columns, dtype=dtype)

    def incorrectly(kind, expected):
        return f"^gemm: bulk {kind} overlap auxiliary output is sized incorrectly: expected {expected}"

    own, fit = TOKENS // size, "aux_in of at most {} rows of 32 features of 8 bytes, as the buffer has, got "
    for message, comm_type, aux in [
        (incorrectly("AG", fit.format(own) + f"{own + 1} of 32 of 8"), 2, rows(own + 1)),
        (incorrectly("AG", fit.format(own) + f"{own} of 31 of 8"), 2, rows(own, K - 1)),
        (incorrectly("AG", fit.format(own) + f"{own} of 32 of 4"), 2, rows(own, dtype=torch.float32)),
        (incorrectly("RS", fit.format(TOKENS) + f"{TOKENS + size} of 32 of 8"), 1, rows(TOKENS + size)),
        (incorrectly("RS", fit.format(TOKENS) + f"{TOKENS} of 33 of 8"), 1, rows(TOKENS, K + 1)),
        (incorrectly("RS", f"a first dimension of aux_in that {size} ranks can share, got {size + 1} of {size} rows"),
         1, torch.zeros(size + 1, size, K, dtype=torch.float64)),
        ("^gemm: expected aux_in, which the collective of method BULK takes, got none", 2, None),
    ]:  # fmt: skip
        if comm.get_rank() == size - 1:  # only on one rank: had it sent anything, the call below would be wrong
            with pytest.raises(to.InvalidValueError, match=message):
                call(comm_type, aux)
        aux_out = call(1, rows(TOKENS) + comm.get_rank())[3]
        assert (aux_out == sum(range(size))).all()
    to.destroy_comm_overlap_buffer(id)


@pytest.mark.parametrize("size", [2, 3])
def test_errors_of_bulk(size: int) -> None:
    run_ranks(wrong_bulk, size)


def meta(comm: TorchComm) -> None:
    id = to.create_comm_overlap_buffer(comm, Type.AG, Method.RING_EXCHANGE, (TOKENS, K), torch.float64)
    x = torch.empty(TOKENS // comm.get_size(), K, dtype=torch.float64, device="meta")
    w = torch.empty(N, K, dtype=torch.float64, device="meta")
    y, _, _, aux = OP(x, None, w, None, comm_type=2, comm_overlap_method=3, comm_overlap_id=id, rhs_axis_boundary=-1,
                      rhs_transposed=True)  # fmt: skip
    assert y.shape == (TOKENS, N)
    assert aux.shape == (TOKENS, K)
    to.destroy_comm_overlap_buffer(id)


def test_meta() -> None:
    run_ranks(meta, 2)

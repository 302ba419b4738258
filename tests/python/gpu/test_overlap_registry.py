"""Buffers by number and over callbacks on GPUs: the operator gemm with their options, eager and captured.

Ranks count wrong elements, and agree on the count after the last call: a rank that fails leaves no other waiting.
"""

from datetime import timedelta

import pytest
import torch
from overlap_gpu_cases import (
    AG,
    BULK,
    KINDS,
    PIPELINE,
    RING,
    RS,
    SMALL,
    agree,
    capture,
    counting,
    eager,
    hundred_replays,
    integers,
    late,
    nan,
    replay,
    share,
)

import torch_overlap as to
from torch_overlap import CommOverlapType as Type

pytestmark = pytest.mark.gpu(2)

OP = torch.ops.torch_overlap.gemm
K, N, ROWS = 64, 384, 128  # ROWS of a rank; sums of K products are exact in bfloat16


class Called:
    """The operator gemm over a buffer of the registry, on small integers in static tensors."""

    kind, method, columns = AG, RING, K

    def __init__(self, comm, **options):
        self.comm, self.rank, self.size = comm, comm.get_rank(), comm.get_size()
        self.tokens = ROWS * self.size
        self.mine = share(self.tokens, self.size, self.rank)
        self.id = to.create_comm_overlap_buffer(
            comm, self.kind, self.method, (self.tokens, self.columns), torch.bfloat16, **options
        )
        self.buffer = to.comm_overlap_buffer(self.id)
        self.name = f"{type(self).__name__} {options}"
        self.ws = [integers(N, K, 1000 + r).bfloat16() for r in range(self.size)]
        self.bias = integers(1, N, 5)[0].bfloat16()
        whole = self.kind != AG
        self.x = nan(self.tokens if whole else ROWS, K)
        self.results = None

    def of(self, rank, step):
        return integers(self.tokens, K, 11 * rank + step)

    def call(self, kind, **more):
        self.results = OP(
            self.x, None, self.ws[self.rank], None, self.bias, comm_type=int(kind),
            comm_overlap_method=int(self.method), comm_overlap_id=self.id, rhs_transposed=True, fuse_bias=True, **more,
        )  # fmt: skip

    def fill(self, step):
        self.x.copy_(self.of(self.rank, step) if self.kind == RS else self.of(0, step)[self.mine])
        for result in self.results or ():
            result.fill_(float("nan"))

    def issue(self):
        self.call(self.kind)

    def same(self, got, want):
        self.wrong += (got.float() != want.to(got.dtype).float()).sum()

    def product(self, x, rank):
        return x.float() @ self.ws[rank].float().T


class Gathered(Called):
    def check(self, step):
        x = self.of(0, step)
        output, _, _, aux_out = self.results
        self.same(output, self.product(x, self.rank) + self.bias.float())
        self.same(aux_out, x)


class Summed(Called):
    kind, columns = RS, N

    def check(self, step):
        parts = [self.product(self.of(r, step)[self.mine], r).bfloat16().float() for r in range(self.size)]
        self.same(self.results[0], sum(parts) + self.bias.float())


class Pipelined(Summed):
    method = PIPELINE


class Beside(Called):
    """Runs both collectives of a BULK buffer, one after the other."""

    kind, method = Type.NONE, BULK

    def __init__(self, comm, **options):
        super().__init__(comm, **options)
        self.own, self.parts = nan(ROWS, K), nan(self.tokens, K)

    def fill(self, step):
        self.x.copy_(self.of(0, step))
        self.own.copy_(self.of(1, step)[self.mine])
        self.parts.copy_(self.of(2 + self.rank, step))
        for results in (self.gathered, self.summed) if self.results else ():
            for result in results:
                result.fill_(float("nan"))

    def issue(self):
        self.call(AG, aux_in=self.own)
        self.gathered = self.results
        self.call(RS, aux_in=self.parts)
        self.summed = self.results

    def check(self, step):
        want = self.product(self.x, self.rank) + self.bias.float()
        self.same(self.gathered[0], want)
        self.same(self.summed[0], want)
        self.same(self.gathered[3], self.of(1, step))
        self.same(self.summed[3], sum(self.of(2 + r, step)[self.mine] for r in range(self.size)))


KERNELS = {"use_ce": False, "num_comm_sm": 8, "comm_cga_size": 2}
CALLS = [
    (Gathered, {}),
    (Gathered, {"atomic_gemm": True, "num_max_streams": 1}),
    (Gathered, {"relay_ag": True, "gemm_priority": -1, "comm_priority": -2}),
    (Gathered, {**KERNELS, "set_sm_margin": True}),
    (Summed, {}),
    (Summed, {"atomic_gemm": True, **KERNELS}),
    (Pipelined, {}),
    (Pipelined, {"atomic_gemm": True, "num_splits": 3, "rs_overlap_first_gemm": True}),
    (Pipelined, {**KERNELS, "num_splits": 2, "set_sm_margin": False, "num_max_streams": 2}),
    (Beside, {}),
    (Beside, {"use_ce": True, "set_sm_margin": False, "num_comm_sm": 4, "comm_cga_size": 4}),
]


def run(comm, case):
    """Eager calls and replays take turns, each with other inputs and another late rank."""
    counting(case)
    for step in range(3):
        late(case, step, 1)
        eager(case, step)
    graph = capture(case.issue)
    captured = case.results
    agree(comm, case)
    hundred_replays(comm, graph, case, 3, lateness=1)
    assert case.results is captured
    return graph


@pytest.mark.parametrize(("kind", "options"), CALLS, ids=lambda v: getattr(v, "__name__", None) or "-".join(v))
def test_gemm_over_a_buffer(comm, kind, options):
    case = kind(comm, **options)
    graph = run(comm, case)
    path = case.buffer.last_path()
    # The graph keeps what it uses; the number is no longer valid.
    case.buffer = None
    to.destroy_comm_overlap_buffer(case.id)
    counting(case)
    for step in range(2):
        replay(graph, case, step)
    agree(comm, case)
    assert "send and receive" not in path
    assert ("flags in place of counters" in path) == options.get("atomic_gemm", False)
    with pytest.raises(to.InvalidValueError, match=f"got {case.id}, which was destroyed"):
        case.issue()


def test_products_of_two_chunks_by_number(comm):
    if comm.get_size() % 2:
        pytest.skip("needs an even number of ranks")
    run(comm, Gathered(comm, aggregate_ag=True))


def test_equal_parameters_are_one_buffer(comm):
    first, second = Gathered(comm), Gathered(comm)
    other = Gathered(comm, num_max_streams=2)
    holds = to.comm_overlap_buffers()[first.id].holds
    ids = first.id, second.id, other.id
    for case in (first, second, other):
        counting(case)
    for step in range(4):  # in turns on one buffer, and concurrently
        for case in (first, other, second):
            eager(case, step)
    for case in (first, second, other):
        agree(comm, case)
        to.destroy_comm_overlap_buffer(case.id)
    assert ids[0] == ids[1] != ids[2]
    assert holds == 2


# --- Over callbacks -------------------------------------------------------------------------------------------------


def group_over(comm):
    """Two callbacks, as an external framework provides them: an all-gather of bytes, and a barrier."""
    rank, size = comm.get_rank(), comm.get_size()

    def all_gather(mine):
        lengths = torch.zeros(size, dtype=torch.int64, device="cuda")
        comm.all_gather_single(lengths, torch.tensor([len(mine)], device="cuda"), async_op=False)
        room = max(int(lengths.max()), 1)
        padded = torch.zeros(room, dtype=torch.uint8, device="cuda")
        padded[: len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
        everyone = torch.zeros(size * room, dtype=torch.uint8, device="cuda")
        comm.all_gather_single(everyone, padded, async_op=False)
        rows = everyone.view(size, room).cpu()
        return [bytes(row[:length].tolist()) for row, length in zip(rows, lengths.tolist(), strict=True)]

    device = torch.device("cuda", torch.cuda.current_device())
    return to.OverlapGroup(
        all_gather, lambda: comm.barrier(async_op=False), rank, size, device, "lent", timedelta(seconds=60)
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_buffers_over_callbacks(comm, kind):
    case = counting(kind(group_over(comm), **SMALL))
    for step in range(3):
        late(case, step, 1)
        eager(case, step)
    agree(comm, case)
    hundred_replays(comm, capture(case.issue), case, 3, lateness=1)
    assert "send and receive" not in case.buffer.last_path()


def test_parameters_that_differ_over_callbacks(comm):
    """All ranks raise, before any part of the buffer exists."""
    rank, size = comm.get_rank(), comm.get_size()
    config = to.CommOverlapConfig(RS, PIPELINE, [64, 64 + 64 * (rank == size - 1)], torch.bfloat16, size)
    group = group_over(comm)
    with pytest.raises(to.InvalidValueError, match=r"the same on all ranks, got .*\[64, 64\].*\[64, 128\]"):
        to.CommOverlapBase(group, config)
    case = counting(KINDS[0](group, **SMALL))
    eager(case, 0)
    agree(comm, case)


# --- Ranks that do not reach each other -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Gathered, Summed, Pipelined, Beside], ids=lambda kind: kind.__name__)
def test_gemm_over_a_buffer_of_ranks_that_cannot_reach_each_other(comm, kind):
    pretence = to._C._PretendUnreachable()
    case = kind(comm, num_max_streams=5)  # no other test has this value
    del pretence
    run(comm, case)
    path = case.buffer.last_path()
    to.destroy_comm_overlap_buffer(case.id)
    assert "send and receive" in path
    assert "(ranks pretend that peers' memory is unreachable)" in path


def test_explain_names_the_reason(make_comm):
    """For every operator "auto" uses the communicator, and explain() has the reason."""
    comm = make_comm("out_of_reach")
    far = "ranks pretend that peers' memory is unreachable"
    gen = torch.Generator(device="cuda").manual_seed(3)
    x = torch.randn(2048, 512, generator=gen, device="cuda").bfloat16()
    w = torch.randn(256, 512, generator=gen, device="cuda").bfloat16()
    one, x8, w8 = torch.ones(1, device="cuda"), x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    calls = {
        "all_gather_matmul": ((x, [w], comm), {}),
        "matmul_reduce_scatter": ((x, w, comm), {}),
        "bulk_overlap_matmul": ((x, w, x, comm), {"collective": "all_gather"}),
        "scaled_all_gather_matmul": ((x8, one, [w8], [one], comm), {}),
        "scaled_matmul_reduce_scatter": ((x8, one, w8, one, comm), {}),
        "scaled_matmul_all_reduce": ((x8, one, w8, one, comm), {}),
    }
    found, refused = {}, {}
    pretence = to._C._PretendUnreachable()
    for op, (args, options) in calls.items():
        try:  # on all ranks alike
            getattr(to.ops, op)(*args, **options, algorithm="bulk" if op == "bulk_overlap_matmul" else "p2p")
        except to.UnsupportedError as error:
            refused[op] = str(error)
        getattr(to.ops, op)(*args, **options)
        found[op] = to.explain(op, *args, **options)
    del pretence
    torch.cuda.synchronize()
    for op in calls:
        assert f"needs, got: {far}" in refused[op], refused
        assert found[op].algorithm in ("pipelined", "sequential")
        if found[op].decided_by == "rule":
            assert found[op].algorithm == "pipelined"
            if op != "scaled_matmul_all_reduce":  # split into pieces by rule, for any transport
                assert far in found[op].why, found[op]

"""Effects of the options of a buffer on a GPU: kernels, blocks, clusters, priorities, streams and the order of
issue.

All communication is done before a rank compares anything: a rank that fails leaves no other waiting.
"""

import pytest
import torch
from graph_nodes import nodes_of
from overlap_gpu_cases import (
    FULL,
    BulkGather,
    BulkScatter,
    Gather,
    Pipeline,
    Scatter,
    agree,
    counting,
    eager,
)
from trace_cases import GEMM, traced_tasks

from torch_overlap import ops
from torch_overlap.gemm import gemm_statistics, reset_gemm_statistics, set_gemm_tuning

pytestmark = pytest.mark.gpu(2)

# Our own kernels, and torch's: all others are cuBLASLt's.
COPY_SIGNAL, SUM = "copy_signal_kernel", "sum_kernel"
NO_PRODUCTS = (COPY_SIGNAL, SUM, "begin_kernel", "await_kernel", "signal_flags_kernel", "elementwise", "at6native")


def issued(kind, comm, **options):
    """Returns the nodes of a captured call, after an eager one that made its plans."""
    case = counting(kind(comm, **{**FULL, **options}))
    eager(case, 0)
    agree(comm, case)
    return nodes_of(case.issue)


def named(kernels, name):
    return [kernel for kernel in kernels if name in kernel.name]


def products_of(kernels):
    return [kernel for kernel in kernels if not any(name in kernel.name for name in NO_PRODUCTS)]


def test_use_ce_moves_chunks_with_copies_instead_of_kernels(comm):
    ways = {"comm_cga_size": 1, "num_comm_sm": 4}
    found = {kind: [issued(kind, comm, use_ce=ce, **ways) for ce in (True, False)]
             for kind in (Gather, Scatter, BulkGather)}  # fmt: skip
    others = comm.get_size() - 1
    for (with_ce, copies), (without, fewer) in found.values():
        assert named(with_ce, COPY_SIGNAL) == []
        assert len(named(without, COPY_SIGNAL)) == others
        assert copies - fewer == 2 * others  # of data and of its flag


@pytest.mark.parametrize(("sms", "cluster"), [(4, 1), (8, 2), (16, 8)])
def test_num_comm_sm_and_comm_cga_size_are_blocks_and_clusters(comm, sms, cluster):
    # The number of tokens gives a sum work for all blocks.
    options = {"use_ce": False, "num_comm_sm": sms, "comm_cga_size": cluster, "tokens": 4096 * comm.get_size()}
    copies = [k for kind in (Gather, Scatter, BulkGather) for k in named(issued(kind, comm, **options)[0], COPY_SIGNAL)]
    (bulk,) = named(issued(BulkScatter, comm, **options)[0], SUM)
    *sums, last = named(issued(Pipeline, comm, num_splits=4, **options)[0], SUM)
    if torch.cuda.get_device_capability()[0] < 9:
        cluster = 1  # these GPUs have no clusters
    assert len(copies) == 3 * (comm.get_size() - 1)
    assert len(sums) == 3
    assert {(k.blocks, k.cluster) for k in (*copies, bulk, *sums)} == {(sms, cluster)}
    assert (last.blocks, last.cluster) == (2 * sms, cluster)  # no product is concurrent with the last one


def test_priorities_are_those_of_the_streams(comm):
    least, greatest = torch.cuda.Stream.priority_range()
    options = {"use_ce": False, "num_comm_sm": 4, "comm_cga_size": 1}
    asked = [issued(kind, comm, gemm_priority=-1, comm_priority=-2, **options)[0] for kind in (Gather, BulkGather)]
    usual = [issued(kind, comm, **options)[0] for kind in (Gather, BulkGather)]
    for kernels in asked:
        assert {k.priority for k in products_of(kernels)} == {-1}
        assert {k.priority for k in named(kernels, COPY_SIGNAL)} == {-2}
    for kernels in usual:  # both 0: the lowest and the highest priority
        assert {k.priority for k in products_of(kernels)} == {least}
        assert all(k.priority <= greatest < least for k in named(kernels, COPY_SIGNAL))


def test_set_sm_margin_leaves_the_blocks_of_communication_free(comm):
    """The same problem gets another plan, whose products use fewer SMs."""
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    seen = {}
    few, many = sms // 4 + 1, sms // 2 + 1  # no other test leaves this number free
    for margin, free in ((False, few), (True, few), (True, many)):
        case = counting(BulkGather(comm, set_sm_margin=margin, num_comm_sm=free, comm_cga_size=1, **FULL))
        plans = []
        for step in range(2):
            reset_gemm_statistics()
            case.fill(step)
            case.issue()
            plans.append(gemm_statistics()["plans"])
            case.check(step)
        agree(comm, case)
        kernels, _ = nodes_of(case.issue)
        blocks = max(k.blocks for k in products_of(kernels))
        seen[margin, free] = plans, blocks
    assert [seen[key][0][1] for key in seen] == [0, 0, 0]  # the plan exists
    assert [seen[True, free][0][0] for free in (few, many)] == [1, 1]
    if seen[False, few][1] == sms:  # a kernel that is persistent on its SMs
        assert [seen[True, free][1] <= sms - free for free in (few, many)] == [True, True], seen


@pytest.fixture
def names(comm, tmp_path):
    """Traces a call's work on the device: the names, in order, and the streams of its products."""

    def trace(kind, **options):
        case = kind(comm, **options, **FULL)
        for step in range(2):
            case.fill(step)
            case.issue()
        comm.barrier(async_op=False)
        tasks = traced_tasks(case.issue, tmp_path / "trace.json")
        streams = [task.streams for task in tasks if task.name.startswith(GEMM)]
        return [task.name.removeprefix("torch_overlap::") for task in tasks], streams

    return trace


def test_num_splits_and_num_max_streams_are_products_and_their_streams(names):
    found = {(splits, most): names(Pipeline, num_splits=splits, num_max_streams=most)
             for splits, most in ((1, 3), (2, 3), (6, 1), (6, 3), (6, 8))}  # fmt: skip
    for (splits, most), (order, streams) in found.items():
        assert order.count("gemm") == order.count("sum") == splits
        assert len(set.union(*streams)) == min(splits, most)
        for i, stream in enumerate(streams):  # in turns
            assert stream == streams[i % min(splits, most)]


def test_rs_overlap_first_gemm_issues_a_product_before_the_sum_of_the_one_before_it(names):
    found = {}
    for first in (False, True):
        order, _ = names(Pipeline, num_splits=4, rs_overlap_first_gemm=first)
        found[first] = "".join({"gemm": "G", "sum": "R"}.get(name, "") for name in order)
    assert found == {False: "GRGRGRGR", True: "GGRGRGRR"}


def gather(x, w, comm, algorithm):
    return ops.all_gather_matmul(x, [w], comm, algorithm=algorithm)


def scatter(x, w, comm, algorithm):
    return ops.matmul_reduce_scatter(x, w, comm, algorithm=algorithm)


@pytest.mark.usefixtures("gemm_draws")
@pytest.mark.parametrize("operator", [gather, scatter], ids=lambda operator: operator.__name__)
def test_products_of_chunks_are_not_measured(comm, seed, operator):
    """The whole product is measured. No plan exists for these features."""
    set_gemm_tuning("measured")
    features = 264 + 8 * (seed % 1000)
    x = torch.randn(512 * comm.get_size(), 136, device="cuda").bfloat16()
    w = torch.randn(features, 136, device="cuda").bfloat16()
    measured = {}
    for algorithm in ("p2p", "pipelined", "sequential"):
        reset_gemm_statistics()
        operator(x, w, comm, algorithm)
        measured[algorithm] = gemm_statistics()["measured"]
    torch.cuda.synchronize()
    assert measured["p2p"] == measured["pipelined"] == 0
    assert measured["sequential"] > 0


def test_aggregate_ag_makes_half_as_many_products(comm, names):
    size = comm.get_size()
    if size % 2:
        pytest.skip("needs an even number of ranks")
    found = {aggregate: names(Gather, aggregate_ag=aggregate)[0] for aggregate in (False, True)}
    assert found[False].count("gemm") == size
    assert found[True].count("gemm") == size // 2
    assert found[True].count("exchange") == found[False].count("exchange") == size - 1

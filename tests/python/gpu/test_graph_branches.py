"""Branches of captured graphs: no kernel that waits for SMs is concurrent with a kernel that has nearly all SMs and
waits for it.

A fused kernel keeps every SM, or all but two, until the chunks of all ranks have arrived. Sending the chunks must
need only copy engines: a copy within a device is a kernel, and so is a fill. A fused reduction waits for the same
kernels of the other ranks, which start when all their predecessors have ended. Concurrent kernels may need SMs, but
none of them may wait for other ranks.
"""

import pytest
import torch
from graph_branches import (
    FULL_GRID_WAITS,
    REDUCTIONS,
    SINGLE_BLOCK_WAITS,
    WAITS,
    blocked_nodes,
    concurrent_nodes,
    reachable,
)
from graph_nodes import Copy, Kernel, captured
from overlap_gpu_cases import KINDS, SMALL
from shared_gpus import SHARES_GPU
from soak_cases import IN_ONE_KERNEL, WAITING, cases_of

from torch_overlap import nn as tnn
from torch_overlap import ops
from torch_overlap.quantize import ScalingMode as Mode

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="the kernels are for sm_90"
    ),
]
separate = pytest.mark.skipif(SHARES_GPU, reason="copies within a GPU need SMs")


def random(*shape):
    return torch.randn(shape, device="cuda").bfloat16()


def named(nodes, *parts):
    """Returns the kernels with one of these parts in their names."""
    return [n for n in nodes if isinstance(n, Kernel) and any(part in n.name for part in parts)]


def around(issue, *names):
    """Returns, for each kernel of these names, the nodes that may run concurrently with it."""
    issue()  # memory is shared, and kernels are loaded
    nodes, edges = captured(issue)
    found = [i for i, node in enumerate(nodes) if named([node], *names)]
    return [[nodes[i] for i in concurrent_nodes(at, range(len(nodes)), edges)] for at in found]


GATHERS = {
    "one": {},
    "bias": {"biases": True},
    "two weights": {"weights": 2},
    "gathered rows kept": {"return_gathered": True},
}


@separate
@pytest.mark.parametrize("kind", list(GATHERS))
def test_a_fused_gather_waits_for_copies_to_other_devices(comm, kind):
    options = GATHERS[kind]
    x, ws = random(20_000, 512), [random(768, 512) for _ in range(options.get("weights", 1))]
    biases = [random(768) for _ in ws] if "biases" in options else ()

    def issue():
        return ops.all_gather_matmul(
            x, ws, comm, biases, return_gathered=options.get("return_gathered", False), algorithm="fused"
        )

    found = around(issue, "fused_gather_kernel")
    assert len(found) == len(ws)
    size, own = comm.get_size(), torch.cuda.current_device()
    assert sum(isinstance(n, Copy) and n.bytes > 4 for n in found[0]) == size - 1
    for others in found:
        assert all(isinstance(n, Copy) and n.to_device != own for n in others), others


@separate
def test_a_fused_gather_of_8_bit_rows_and_their_scales(comm):
    mode = Mode.ROW_SCALING
    x, w = (ops.quantize(random(n, 512), mode)[:2] for n in (40_000, 768))

    def issue():
        return ops.scaled_all_gather_matmul(*x, [w[0]], [w[1]], comm, scaling_mode=mode, algorithm="fused")

    (others,) = around(issue, "fused_gather_kernel")
    own = torch.cuda.current_device()
    assert sum(isinstance(n, Copy) and n.bytes > 4 for n in others) == 2 * (comm.get_size() - 1)
    assert all(isinstance(n, Copy) and n.to_device != own for n in others), others


def test_a_fused_gather_of_few_rows_is_one_kernel(comm):
    x, w = random(256, 512), random(768, 512)
    mode = Mode.ROW_SCALING
    (x8, x_scale), (w8, w_scale) = (ops.quantize(t, mode)[:2] for t in (x, w))

    def issue():
        ops.all_gather_matmul(x, [w], comm, [random(768)], algorithm="fused")
        ops.scaled_all_gather_matmul(x8, x_scale, [w8], [w_scale], comm, scaling_mode=mode, algorithm="fused")

    assert around(issue, "fused_gather_kernel") == [[], []]
    nodes, _ = captured(issue)
    assert not named(nodes, "begin_kernel", "await")


def nothing_waits_in(found):
    """Checks that no kernel waits for ranks among the nodes that are concurrent with each kernel."""
    for others in found:
        assert named(others, *WAITS) == []


@pytest.mark.parametrize("rows", [1024, 8192])
@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_beside_a_fused_reduction_nothing_else_waits_for_ranks(comm, op, rows):
    x, w = random(rows, 256), random(6144, 256)
    found = around(lambda: getattr(ops, op)(x, w, comm, random(6144), algorithm="fused"), *REDUCTIONS)
    blocks = 3 if (op, rows) == ("matmul_all_reduce", 8192) else 1
    assert len(found) == blocks
    nothing_waits_in(found)
    if op == "matmul_reduce_scatter":
        own = torch.cuda.current_device()
        assert all(isinstance(n, Copy) and n.to_device != own for n in found[0]), found[0]


def test_few_rows_are_multiplied_and_summed_by_one_kernel(comm):
    x, w = random(64, 256), random(6144, 256)
    assert around(
        lambda: ops.matmul_all_reduce(x, w, comm, random(6144), algorithm="fused"), "fused_all_reduce_kernel"
    ) == [[]]


@separate
def test_a_fused_sum_waits_for_copies_to_other_devices(comm):
    """The pieces of the last chunks may be in flight, but their products are done."""
    size = comm.get_size()
    x, w = random(4200 * size, 256), random(2056, 256)

    def issue():
        return ops.matmul_reduce_scatter(x, w, comm, algorithm="fused")

    issue()
    nodes, edges = captured(issue)
    everything, own = range(len(nodes)), torch.cuda.current_device()
    goes_out = {i for i in everything if isinstance(nodes[i], Copy) and nodes[i].to_device != own}
    assert sum(nodes[i].bytes > 4 for i in goes_out) == 2 * (size - 1)
    (wide,) = (i for i in everything if named([nodes[i]], "fused_reduce_scatter_sum_kernel"))
    others = concurrent_nodes(wide, everything, edges)
    assert others
    assert set(others) <= goes_out, [nodes[i] for i in others]
    assert not goes_out & set(blocked_nodes(wide, everything, edges, lambda i: i not in goes_out))


FUSED = [case for dtype in (torch.bfloat16, torch.float8_e4m3fn) for case in cases_of(dtype, has_fused=True)
         if case.name.endswith("fused") and "all_gather" not in case.name]  # fmt: skip


@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
def test_beside_other_fused_reductions_nothing_waits_for_ranks(comm, case):
    dtype = torch.float32 if case.name.startswith("scaled") else torch.bfloat16
    inputs = [torch.randn(shape, device="cuda", dtype=dtype) for shape in case.shapes]
    found = around(lambda: case.run(comm, *inputs), *REDUCTIONS)
    assert found
    nothing_waits_in(found)


@separate
@pytest.mark.parametrize("algorithm", ["p2p", "fused"])
def test_a_reduction_begins_beside_its_first_product(comm, algorithm):
    """All nodes that concern other ranks follow the begin."""
    size, own = comm.get_size(), torch.cuda.current_device()
    x, w = random(4200 * size, 256), random(2056, 256)

    def issue():
        return ops.matmul_reduce_scatter(x, w, comm, algorithm=algorithm)

    issue()
    nodes, edges = captured(issue)
    (begin,) = [i for i, n in enumerate(nodes) if named([n], "begin_kernel")]
    behind = reachable(begin, edges)
    others = {
        i
        for i, n in enumerate(nodes)
        if named([n], "await", "fused_reduce_scatter_sum_kernel") or (isinstance(n, Copy) and n.to_device != own)
    }
    assert others
    assert others <= behind, [nodes[i] for i in others - behind]
    assert [n for i, n in enumerate(nodes) if isinstance(n, Kernel) and i not in behind and i != begin]


def waiting_kernels(issue):
    issue()
    nodes, _ = captured(issue)
    assert named(nodes, *FULL_GRID_WAITS) == []
    return named(nodes, *SINGLE_BLOCK_WAITS)


APART = [case for case in WAITING if case not in IN_ONE_KERNEL]


@pytest.mark.parametrize("case", APART, ids=lambda case: case.name)
def test_what_waits_over_a_channel_is_one_block(comm, case):
    """The kernel that waits has one block, so products and copies of other operations have the other SMs."""
    inputs = [torch.randn(shape, device="cuda") for shape in case.shapes]
    found = waiting_kernels(lambda: case.run(comm, *inputs))
    assert found
    assert all(n.blocks == 1 for n in found), found


@pytest.mark.parametrize("case", IN_ONE_KERNEL, ids=lambda case: case.name)
def test_a_kernel_that_does_all_stands_alone(comm, case):
    """All of its blocks wait, and they are many."""
    inputs = [torch.randn(shape, device="cuda") for shape in case.shapes]
    name = "low_latency_gather_kernel" if "all_gather" in case.name else "low_latency_sum_kernel"
    assert around(lambda: case.run(comm, *inputs), name) == [[]]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_waits_in_the_overlap_classes_is_one_block(comm, kind):
    case = kind(comm, **SMALL)
    case.fill(0)
    found = waiting_kernels(case.issue)
    assert found
    assert all(n.blocks == 1 for n in found), found


# Number of copies to each other rank. Those of an all-to-all before a product are split into pieces.
COPIES = {"all_gather_matmul": 1, "matmul_reduce_scatter": 1, "all_to_all_matmul": 4, "matmul_all_to_all": 1}


@separate
@pytest.mark.parametrize("op", list(COPIES))
def test_products_of_chunks_wait_for_copies_alone(comm, op):
    """Only one block waits, in a kernel of its own. Concurrent with it are the copies, which need no SM. None of the
    copies waits for another rank that has begun."""
    size = comm.get_size()
    x, w = random(1024, 512), random(768, 512 * size if op == "all_to_all_matmul" else 512)
    weight = [w] if op in ("all_gather_matmul", "matmul_all_to_all") else w

    def issue():
        return getattr(ops, op)(x, weight, comm, algorithm="p2p")

    issue()
    nodes, edges = captured(issue)
    waiting = {i for i, n in enumerate(nodes) if isinstance(n, Kernel) and "await" in n.name}
    assert waiting
    assert all(nodes[i].blocks == 1 for i in waiting), [nodes[i] for i in waiting]
    own = torch.cuda.current_device()
    copies = [i for i, n in enumerate(nodes) if isinstance(n, Copy) and n.to_device != own]
    if op == "matmul_all_to_all":  # arrived data is copied to the result, whose device may not follow from its address
        told = {first for first, second in edges if isinstance(nodes[second], Copy) and nodes[second].bytes == 4}
        copies = [i for i in copies if i in told or nodes[i].bytes == 4]
    assert sum(nodes[i].bytes > 4 for i in copies) == COPIES[op] * (size - 1)
    if op == "matmul_reduce_scatter":  # its second product follows an await of nothing
        return
    before = [(second, first) for first, second in edges]
    assert not [i for i in copies if waiting & reachable(i, before)]


# --- A layer ------------------------------------------------------------------------------------------------------

# Kernels that must be present, with sequence parallelism and without.
WAYS = {
    "fused": (("fused_gather_kernel", "fused_reduce_scatter_kernel"), ("fused_reduce_scatter_kernel",)),
    "low_latency": (("low_latency_gather_kernel", "low_latency_sum_kernel"), ("low_latency_sum_kernel",)),
    "p2p": (SINGLE_BLOCK_WAITS, SINGLE_BLOCK_WAITS),
    "bulk": (SINGLE_BLOCK_WAITS, ()),
    "pipelined": ((), ()),
    "auto": ((), ()),
}


def step_of_a_layer(comm, algorithm, sequence_parallel, rows=512):
    features, heads, hidden = 1024, 16, 2048
    block = tnn.ParallelTransformerBlock(
        features, heads, hidden, comm, norm="rms", activation="swiglu", bias=False, dtype=torch.bfloat16,
        algorithm=algorithm, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    x = random(rows // comm.get_size() if sequence_parallel else rows, 2, features).requires_grad_()

    def step():
        block.zero_grad(set_to_none=True)
        x.grad = None
        block(x).square().sum().backward()

    return step


def check_branches(step):
    """A kernel whose blocks all wait is concurrent with no kernel that waits for ranks, and with no copy to a rank
    that follows a node that needs an SM; a fused gather is concurrent only with copies to other devices. Other
    kernels that wait over a channel have one block."""
    for _ in range(2):
        step()
    nodes, edges = captured(step)
    own, everything = torch.cuda.current_device(), range(len(nodes))

    def goes_out(i):
        return isinstance(nodes[i], Copy) and nodes[i].to_device != own

    assert all(n.blocks == 1 for n in named(nodes, *SINGLE_BLOCK_WAITS))
    for wide in (i for i in everything if named([nodes[i]], *FULL_GRID_WAITS)):
        others = concurrent_nodes(wide, everything, edges)
        assert named([nodes[i] for i in others], *WAITS) == []
        held = blocked_nodes(wide, everything, edges, lambda i: not goes_out(i))
        assert not [nodes[i] for i in held if goes_out(i)]
        if "fused_gather_kernel" in nodes[wide].name:
            assert all(goes_out(i) for i in others), [nodes[i] for i in others]
    return nodes


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole"])
@pytest.mark.parametrize("algorithm", list(WAYS))
def test_a_layer_forward_and_backward(comm, algorithm, sequence_parallel):
    nodes = check_branches(step_of_a_layer(comm, algorithm, sequence_parallel))
    for name in WAYS[algorithm][0 if sequence_parallel else 1]:
        assert named(nodes, name), name


def test_a_layer_of_few_rows(comm):
    nodes = check_branches(step_of_a_layer(comm, "fused", sequence_parallel=False, rows=64))
    assert named(nodes, "fused_all_reduce_kernel")
    assert not named(nodes, "fused_reduce_scatter_kernel")

"""Parts of a captured graph that may run concurrently, and kernels that wait for other ranks. Values only."""

from collections.abc import Callable, Hashable, Iterable

# Kernels of fused reductions: tiles sent by the kernel, pieces sent by copies, and few rows.
REDUCTIONS = ("fused_reduce_scatter_kernel", "fused_reduce_scatter_sum_kernel", "fused_all_reduce_kernel")
# Kernels in which all blocks wait for other ranks, and which may occupy all SMs.
FULL_GRID_WAITS = ("fused_gather_kernel", "low_latency_gather_kernel", "low_latency_sum_kernel", *REDUCTIONS)
SINGLE_BLOCK_WAITS = ("begin_kernel", "await_kernel")
# Other kernels that wait for ranks: collectives, and signals of windows.
COLLECTIVES = ("ll_copy_kernel", "ll_reduce_kernel", "ll_norm_kernel", "ll128_copy_kernel", "ll128_reduce_kernel",
               "ll128_norm_kernel", "simple_copy_kernel", "simple_reduce_kernel", "simple_norm_kernel",
               "two_shot_kernel", "bulk_kernel", "zero_copy", "nccl", "wait_kernel")  # fmt: skip
WAITS = (*FULL_GRID_WAITS, *SINGLE_BLOCK_WAITS, *COLLECTIVES)
NON_WAITING = {
    "increment_counter_kernel",
    "norm_kernel",
    "copy_signal_kernel",
    "put_kernel",
    "signal_kernel",
    "sum_kernel",
    "signal_flags_kernel",
}


def reachable(start: Hashable, edges: Iterable[tuple[Hashable, Hashable]]) -> set[Hashable]:
    """Returns all successors of `start`, direct or not, without `start` itself."""
    behind: dict[Hashable, list[Hashable]] = {}
    for first, second in edges:
        behind.setdefault(first, []).append(second)
    found: set[Hashable] = set()
    waiting = [start]
    while waiting:
        for node in behind.get(waiting.pop(), []):
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found


def concurrent_nodes(
    node: Hashable, nodes: Iterable[Hashable], edges: list[tuple[Hashable, Hashable]]
) -> set[Hashable]:
    """Returns the nodes that are neither predecessors nor successors of `node`."""
    before = reachable(node, [(second, first) for first, second in edges])
    return set(nodes) - before - reachable(node, edges) - {node}


def blocked_nodes(
    node: Hashable,
    nodes: Iterable[Hashable],
    edges: list[tuple[Hashable, Hashable]],
    needs_sms: Callable[[Hashable], bool],
) -> set[Hashable]:
    """Returns the nodes concurrent with `node` that follow another concurrent node that `needs_sms`: `node` may
    occupy those SMs."""
    others = concurrent_nodes(node, nodes, edges)
    waiting = {other for other in others if needs_sms(other)}
    return set().union(*(reachable(other, edges) for other in waiting)) & others

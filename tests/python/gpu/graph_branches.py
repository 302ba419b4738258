"""What of a captured graph may run at the same time, and which kernels wait for other ranks. Values only."""

from collections.abc import Callable, Hashable, Iterable

# What a product and its sums are one of: where tiles are sent by the kernel, where copies take pieces, and of few rows.
REDUCTIONS = ("fused_scatter_kernel", "fused_sum_kernel", "fused_reduce_kernel")
# Of these all blocks wait for other ranks, and they may have all SMs.
WIDE = ("fused_gather_kernel", "direct_gather_kernel", "direct_sum_kernel", *REDUCTIONS)
NARROW = ("begin_kernel", "await_kernel")
# What else waits for ranks: collectives, and signals of windows.
COLLECTIVES = ("line_copy_kernel", "line_reduce_kernel", "line_norm_kernel", "ll128_copy_kernel", "ll128_reduce_kernel",
               "push_copy_kernel", "push_reduce_kernel", "push_norm_kernel", "two_shot_kernel", "bulk_kernel",
               "zero_copy", "nccl", "wait_kernel")  # fmt: skip
WAITS = (*WIDE, *NARROW, *COLLECTIVES)
QUIET = {"bump_kernel", "norm_kernel", "push_kernel", "put_kernel", "signal_kernel", "sum_kernel", "tell_kernel"}


def reachable(start: Hashable, edges: Iterable[tuple[Hashable, Hashable]]) -> set[Hashable]:
    """All nodes behind `start`, which is not one of them."""
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


def beside(node: Hashable, nodes: Iterable[Hashable], edges: list[tuple[Hashable, Hashable]]) -> set[Hashable]:
    """The nodes that neither come before `node` nor wait for it."""
    before = reachable(node, [(second, first) for first, second in edges])
    return set(nodes) - before - reachable(node, edges) - {node}


def held_up(
    node: Hashable,
    nodes: Iterable[Hashable],
    edges: list[tuple[Hashable, Hashable]],
    needs_room: Callable[[Hashable], bool],
) -> set[Hashable]:
    """The nodes beside `node` that come behind one beside it that `needs_room`, which `node` may have taken."""
    others = beside(node, nodes, edges)
    waiting = {other for other in others if needs_room(other)}
    return set().union(*(reachable(other, edges) for other in waiting)) & others

"""What of a captured graph may run at the same time. Values only."""

from collections.abc import Callable, Hashable, Iterable


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

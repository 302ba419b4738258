"""The logic with which tests/python/gpu/test_graph_branches.py reads captured graphs, on synthetic graphs."""

import os
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "gpu"))
from graph_branches import NON_WAITING, WAITS, blocked_nodes, concurrent_nodes, reachable

FORK = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "e"), ("d", "f"), ("e", "f")]


def test_a_fork():
    nodes = "abcdef"
    assert reachable("b", FORK) == {"d", "f"}
    assert concurrent_nodes("b", nodes, FORK) == {"c", "e"}
    assert concurrent_nodes("a", nodes, FORK) == concurrent_nodes("f", nodes, FORK) == set()
    assert concurrent_nodes("g", [*nodes, "g"], FORK) == set(nodes)


def test_what_comes_behind_a_node_that_gets_no_room():
    nodes = "abcdefg"
    edges = [*FORK, ("c", "g")]  # concurrent with b: c, then e and g
    assert blocked_nodes("b", nodes, edges, lambda node: node == "c") == {"e", "g"}
    assert blocked_nodes("b", nodes, edges, lambda node: node in "eg") == set()
    assert blocked_nodes("b", nodes, edges, lambda node: node in "adf") == set()


def test_random_graphs(seed):
    """Compares with the closure of the edges by multiplication."""
    draws = random.Random(seed)
    for _ in range(20):
        size = draws.randrange(1, 14)
        edges = [(i, j) for j in range(size) for i in range(j) if draws.random() < 0.25]
        leads = [[(i, j) in edges for j in range(size)] for i in range(size)]
        for middle in range(size):
            for i in range(size):
                for j in range(size):
                    leads[i][j] |= leads[i][middle] and leads[middle][j]
        for node in range(size):
            assert reachable(node, edges) == {j for j in range(size) if leads[node][j]}
            apart = {j for j in range(size) if j != node and not leads[node][j] and not leads[j][node]}
            assert concurrent_nodes(node, range(size), edges) == apart
            behind = {j for j in apart if any(leads[i][j] for i in apart if i % 3 == 0)}
            assert blocked_nodes(node, range(size), edges, lambda i: i % 3 == 0) == behind


def test_what_waits_is_known_of_every_kernel():
    """All kernels that communicate with other ranks are classified."""
    sources = Path(__file__).parents[3] / "csrc" / "torch_overlap"
    folders = ("symm", "collectives", "comm", "overlap")
    files = [file for folder in folders for file in (sources / folder).rglob("*.cu*")]
    text = "\n".join(file.read_text() for file in files)
    names = re.findall(r"__global__[^;{]*?(\w+_kernel)\(", text)
    assert len(names) == text.count("__global__") > len(NON_WAITING)
    assert {name for name in names if not any(part in name for part in WAITS)} == NON_WAITING

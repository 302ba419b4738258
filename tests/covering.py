"""Covering arrays: a selection from a grid of parameters of which only a few act together."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def select(sizes: Sequence[int], strength: int = 2) -> list[tuple[int, ...]]:
    """Returns rows of the grid of these sizes that hold all combinations of any `strength` factors: always the same."""
    rows = list(product(*map(range, sizes)))
    groups = list(combinations(range(len(sizes)), min(strength, len(sizes))))
    covers = {row: {(group, tuple(row[i] for i in group)) for group in groups} for row in rows}
    missing = set().union(*covers.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(covers[row] & missing))  # the first of equal ones
        missing -= covers[best]
        chosen.append(best)
    return sorted(chosen)


def covering(factors: Mapping[str, Sequence[Any]], strength: int = 2) -> pytest.MarkDecorator:
    """Parametrizes a test with all combinations of any `strength` factors, in place of the whole grid.

    Args:
        factors: values by name. Several names with commas between them are one factor of tuples.
        strength: 2 if any two factors may act together, 3 if any three.
    """
    names = [name.split(",") for name in factors]
    values = []
    for row in select([len(given) for given in factors.values()], strength):
        chosen = [given[i] for given, i in zip(factors.values(), row, strict=True)]
        parts = [value if len(name) > 1 else (value,) for name, value in zip(names, chosen, strict=True)]
        values.append(tuple(one for part in parts for one in part))
    return pytest.mark.parametrize([one for name in names for one in name], values)

"""The selection from a grid of parameters."""

from itertools import combinations, product

import pytest
from covering import select


@pytest.mark.parametrize("sizes", [(3, 2, 2, 2, 10), (4, 4, 4), (1, 5), (2, 2, 2, 2), (3,)])
@pytest.mark.parametrize("strength", [2, 3])
def test_every_combination_is_among_the_rows(sizes: tuple[int, ...], strength: int) -> None:
    rows = select(sizes, strength)
    assert rows == select(sizes, strength)
    assert len(rows) == len(set(rows)) <= len(list(product(*map(range, sizes))))
    for group in combinations(range(len(sizes)), min(strength, len(sizes))):
        found = {tuple(row[i] for i in group) for row in rows}
        assert found == set(product(*(range(sizes[i]) for i in group)))


def test_it_is_smaller_than_the_grid() -> None:
    assert len(select((3, 2, 2, 2, 10))) <= 33

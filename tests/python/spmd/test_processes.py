"""A choice of the cases on ranks that are processes, over gloo."""

import process_cases
import pytest
from spmd_ranks import on_mesh

pytestmark = pytest.mark.timeout(300)


def test_layouts(seed):
    """T1-T4, T22-T26, T43."""
    shapes = on_mesh("x=2,y=2", process_cases.layouts, seed, backend="gloo")
    assert shapes == [(2, 2), (1, 2), (1, 2), (1, 2)]


def test_communication(seed):
    """T5-T21, B1, B5-B9."""
    on_mesh("x=2,y=2", process_cases.communication, seed, backend="gloo")


def test_products(seed):
    """T27-T33."""
    on_mesh("x=2,y=2", process_cases.products, seed, backend="gloo")


@pytest.mark.parametrize("mesh", ["x=2,y=2", "x=4,y=1", "x=1,y=4"])
def test_random_reshards(mesh, seed):
    """Layouts of every kind, and the gradients."""
    on_mesh(mesh, process_cases.random_reshards, seed, 20, backend="gloo")


def test_parts_of_an_axis(seed):
    """T45, B2."""
    on_mesh("d=4", process_cases.parts_of_an_axis, seed, backend="gloo", sub_axes=("d:(1)2", "d:(2)2"))

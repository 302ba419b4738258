"""One process with four devices: ranks are threads of the backend `local`."""

from __future__ import annotations

import jax
import jax_checks
import numpy as np
import pytest
from jax.sharding import Mesh

import torch_overlap_jax as toj


@pytest.fixture(scope="module")
def mesh():
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    axis = toj.bootstrap(mesh, "tp", timeout=60)
    yield mesh
    axis.close()


@pytest.mark.parametrize("name", jax_checks.CHECKS)
def test_check(mesh, name, seed):
    jax_checks.run_check(name, mesh, seed)

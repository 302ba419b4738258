"""One process with four devices: ranks are threads of the backend `local`."""

from __future__ import annotations

import jax
import jax_checks
import numpy as np
import pytest
import torch_overlap_jax as toj
from jax.sharding import Mesh


@pytest.fixture(scope="module", params=[2, 4])
def mesh(request):
    mesh = Mesh(np.array(jax.devices()[: request.param]), ("tp",))
    axis = toj.bootstrap(mesh, "tp", timeout=60)
    yield mesh
    axis.close()


@pytest.mark.parametrize("name", jax_checks.CHECKS)
def test_check(mesh, name):
    jax_checks.run_check(name, mesh, seed=np.random.SeedSequence().entropy)

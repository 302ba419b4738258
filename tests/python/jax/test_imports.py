"""The package works without Python's torch, and with torch imported before or after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_overlap.jax import _library

BODY = """
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("tp",))
axis = toj.bootstrap(mesh, "tp", timeout=30)
sum_over_ranks = lambda x: toj.all_reduce(x, "tp")
f = jax.jit(jax.shard_map(sum_over_ranks, mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False))
assert float(f(np.arange(2.0, dtype=np.float32))[0]) == 1
product = toj.gemm(np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)).output
assert (np.asarray(product) == 3).all()
"""
USE_TORCH = """
import torch, torch_overlap
product = torch.ops.torch_overlap.gemm(torch.ones(2, 3), None, torch.ones(3, 4), None)[0]
assert torch.equal(product, torch.full((2, 4), 3.0))
assert torch_overlap.jax is toj
"""
ORDERS = {
    "no torch": ("import torch_overlap_jax as toj", 'import sys; assert "torch" not in sys.modules'),
    "torch first": (
        "import torch, torch_overlap.jax as toj, torch_overlap_jax as other; assert other is toj",
        USE_TORCH,
    ),
    "torch second": ("import torch_overlap_jax as toj", USE_TORCH),
    "jax, then both": ("import jax; jax.devices(); import torch_overlap.jax as toj", USE_TORCH),
}


@pytest.mark.parametrize("order", ORDERS)
def test_order_of_imports(order):
    before, after = ORDERS[order]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[3]), env.get("PYTHONPATH", "")])
    program = "\n".join([before, BODY, after])
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "expected finalize()" not in done.stderr  # the axis ends with the process


def test_another_version_of_the_ffi_is_named():
    _library.check_ffi_version(4, 4, "0.11.2")
    _library.check_ffi_version(4, 5, "0.12.0")
    _library.check_ffi_version(4, None, "0.11.2")
    expected = r"expected a jaxlib with XLA FFI 0\.4, for which it was built, got 0\.1 in jaxlib 0\.5\.0"
    with pytest.raises(ImportError, match=expected):
        _library.check_ffi_version(4, 1, "0.5.0")
    with pytest.raises(ImportError, match=r"got 1\.0 in jaxlib 1\.0\.0"):
        _library.check_ffi_version(4, 1000, "1.0.0")


def test_the_build_and_jaxlib_agree():
    assert _library.running_ffi_version() is not None
    assert _library.library().torch_overlap_jax_ffi_version() // 1000 == _library.running_ffi_version() // 1000

"""The JAX tests run where jax is installed (make test-jax). One process has four CPU devices."""

import importlib.util
import os
import sys
from pathlib import Path

HAS_JAX = importlib.util.find_spec("jax") is not None
collect_ignore_glob = [] if HAS_JAX else ["test_*.py"]
if HAS_JAX and "jax" not in sys.modules:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_ENABLE_X64", "1")
sys.path.insert(0, str(Path(__file__).parent))

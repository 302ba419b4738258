"""The JAX tests run where jax is installed (make test-jax). One process has four CPU devices."""

import importlib.util
import sys
from pathlib import Path

HAS_JAX = importlib.util.find_spec("jax") is not None
collect_ignore_glob = [] if HAS_JAX else ["test_*.py"]
if HAS_JAX:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_enable_x64", True)
sys.path.insert(0, str(Path(__file__).parent))

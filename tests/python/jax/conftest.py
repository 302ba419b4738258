"""The JAX tests run where jax is installed (make test-jax). One process has four CPU devices."""

import importlib.util
import os
import sys
from pathlib import Path

HAS_JAX = importlib.util.find_spec("jax") is not None
collect_ignore_glob = [] if HAS_JAX else ["test_*.py"]
if HAS_JAX:
    # Tests spend most of their time in LLVM, on code of XLA's own.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_enable_x64", True)
sys.path.insert(0, str(Path(__file__).parent))

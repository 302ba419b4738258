"""`torch_overlap.jax` for processes that do not import torch.

    import torch_overlap_jax as toj

`import torch_overlap.jax` imports its parent first, and so torch. This module is the same package without that: its
C++ libraries are loaded, torch's Python is not. Both names may be used in one process.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_NAME = "torch_overlap.jax"


def _load() -> object:
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    if "torch_overlap" in sys.modules:
        return importlib.import_module(_NAME)
    parent = importlib.util.find_spec("torch_overlap")
    if parent is None or not parent.submodule_search_locations:
        raise ImportError(
            "torch_overlap_jax: expected torch_overlap to be installed, got none; pip install torch_overlap"
        )
    folder = Path(next(iter(parent.submodule_search_locations))) / "jax"
    spec = importlib.util.spec_from_file_location(
        _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"torch_overlap_jax: expected a package in {folder}, got none; install torch_overlap again")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_NAME]
        raise
    return module


sys.modules[__name__] = _load()  # type: ignore[assignment]

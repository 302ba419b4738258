"""Loads libtorch_overlap.so, with a clear error if this installation does not match the running torch."""

from __future__ import annotations

import warnings
from pathlib import Path

LIBRARY = Path(__file__).parent / "libtorch_overlap.so"
# Versions of torch that the tests run with.
TESTED_TORCH = ("2.11",)


def load_library() -> None:
    """Loads the operators and the core. `import torch` must have loaded the libraries that they link to.

    Raises:
        ImportError: the library is not built, or is built for another torch.
    """
    import torch

    try:
        from torch_overlap import _build_info
    except ImportError:
        raise ImportError(
            f"torch_overlap: expected a built package, got only its sources in {LIBRARY.parent}; "
            "run `pip install --no-build-isolation -e .` in the checkout, or import it from another folder"
        ) from None
    check_version(_build_info.TORCH_VERSION, _build_info.CUDA_VERSION, torch.__version__, torch.version.cuda)
    warn_of_untested(torch.__version__)
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"torch_overlap: expected {LIBRARY} to load beside torch {torch.__version__}, got: {error}; "
            "build torch_overlap again in this environment"
        ) from error


def check_version(built_torch: str, built_cuda: str, torch_version: str, torch_cuda: str | None) -> None:
    """Raises ImportError if torch is not the version of the build: C++ types change between versions without notice.

    A build without CUDA (`built_cuda` empty) accepts its torch version with any CUDA, or none.
    """
    if built_torch.partition("+")[0] != str(torch_version).partition("+")[0]:
        raise ImportError(
            f"torch_overlap: expected torch {built_torch}, which it was built for, got torch {torch_version}; "
            f"build torch_overlap again in this environment, or pip install torch=={built_torch.partition('+')[0]}"
        )
    if built_cuda and built_cuda != torch_cuda:
        raise ImportError(
            f"torch_overlap: expected a torch for CUDA {built_cuda}, which it was built for, got torch {torch_version} "
            f"for CUDA {torch_cuda or '(none)'}; build torch_overlap again in this environment"
        )


def warn_of_untested(torch_version: str) -> None:
    """Issues one UserWarning if the tests have not run with this version of torch. A warnings filter silences it."""
    if not any(str(torch_version).startswith(f"{tested}.") for tested in TESTED_TORCH):
        warnings.warn(
            f"torch_overlap: expected torch {' or '.join(TESTED_TORCH)}, which it was tested with, got torch "
            f"{torch_version}; run its tests (make test), or silence this with "
            "warnings.filterwarnings('ignore', 'torch_overlap: expected torch')",
            UserWarning,
            stacklevel=2,
        )

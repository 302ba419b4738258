"""The entry point by which vLLM finds torch_overlap: group `vllm.platform_plugins`, name `torch_overlap`.

vLLM loads the platform plug-ins of all installed packages in each of its processes, and refuses to start if two of
them apply. This one therefore applies only on request (TORCH_OVERLAP_VLLM=1), and until then imports nothing: a broken
or CPU-only torch_overlap does not disturb a vLLM that did not ask for it.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import PackageNotFoundError, version

__all__ = ["SUPPORTED_VERSION", "VARIABLE", "platform_plugin"]

SUPPORTED_VERSION = "0.26.0"
VARIABLE = "TORCH_OVERLAP_VLLM"
PLATFORM = "torch_overlap.compat.vllm.platform.OverlapPlatform"

_logger = logging.getLogger("torch_overlap.vllm")


def platform_plugin() -> str | None:
    """Returns the name of our platform class if it was requested and can run, otherwise None.

    vLLM calls it several times in a process and ignores what it raises, so the reason for a None is logged.
    """
    value = os.environ.get(VARIABLE, "0")
    if value in ("", "0"):
        return None
    reason = _unsupported_reason(value)
    if reason is None:
        return PLATFORM
    _logger.warning("%s; vLLM runs without torch_overlap.", reason)
    return None


def _unsupported_reason(value: str) -> str | None:
    """Returns why the platform cannot be used although TORCH_OVERLAP_VLLM is set, or None if it can."""
    if value != "1":
        return f"torch_overlap_vllm: expected 0 or 1 for {VARIABLE}, got {value!r}. Set it to 1, or unset it"
    try:
        found = version("vllm")
    except PackageNotFoundError:
        found = "none"
    if found.split(".")[:2] != SUPPORTED_VERSION.split(".")[:2]:
        return f"torch_overlap_vllm: expected vLLM {SUPPORTED_VERSION}, got {found}. Install vllm=={SUPPORTED_VERSION}"
    from vllm.platforms import cuda_platform_plugin

    if cuda_platform_plugin() is None:
        return "torch_overlap_vllm: expected vLLM's CUDA platform to apply, got none. Run on a machine with NVIDIA GPUs"
    try:
        from torch_overlap import built_backends
    except ImportError as error:
        return f"torch_overlap_vllm: expected torch_overlap to be importable, got {error!r}. Install it again"
    backends = built_backends()
    if "nccl" not in backends:
        return f"torch_overlap_vllm: expected the backend nccl, got {backends}. Build torch_overlap with FORCE_CUDA=1"
    return None

"""The entry point by which SGLang finds torch_overlap: group `sglang.srt.platforms`, name `torch_overlap`.

SGLang asks the platform plug-ins of all installed packages, and refuses to start if two of them apply. This one
therefore applies only if SGLANG_PLATFORM=torch_overlap selects it, and until then imports nothing.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import PackageNotFoundError, version

__all__ = ["SUPPORTED_VERSION", "platform_plugin"]

SUPPORTED_VERSION = "0.5.15.post1"
PLATFORM = "torch_overlap.compat.sglang.OverlapPlatform"

_logger = logging.getLogger("torch_overlap.sglang")


def platform_plugin() -> str | None:
    """Returns the name of our platform class if it was selected and can run, otherwise None.

    SGLang raises if the selected platform answers None; the reason is logged.
    """
    if os.environ.get("SGLANG_PLATFORM") != "torch_overlap":
        return None
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "none"
    if found.split(".")[:3] != SUPPORTED_VERSION.split(".")[:3]:
        _logger.warning(
            "torch_overlap_sglang: expected SGLang %s, got %s. Install sglang==%s.",
            SUPPORTED_VERSION, found, SUPPORTED_VERSION,
        )  # fmt: skip
        return None
    return PLATFORM

"""A platform plug-in for vLLM: our communicator and our fused all-reduce and RMSNorm in vLLM's slots for them.

- platform: the platform class that the entry point `torch_overlap_vllm` names.
- communicator: the device communicator of the platform.
- fusion: the pass manager of the platform, with a pass that fuses all-reduce, RMSNorm and quantization.

The modules are written against one version of vLLM (`torch_overlap_vllm.SUPPORTED_VERSION`). scripts/check_plugins.py
compares them with the signatures of that version, and nothing of vLLM is replaced.
"""

import importlib.util

__all__: list[str] = []

if importlib.util.find_spec("vllm") is None:
    raise ImportError(
        "torch_overlap.compat.vllm: expected vLLM to be installed, got none. Run: pip install 'torch_overlap[vllm]'"
    )

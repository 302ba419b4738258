"""The plug-in for vLLM, over a stand-in package `vllm`: plug-in function, platform, communicator, fusion."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_overlap
import torch_overlap_vllm as entry
from torch_overlap.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
import vllm_cases as cases

sys.path.pop(0)


def run(case: str, size: int, *args: object) -> None:
    run_ranks(getattr(cases, case), size, *args, comm=False, timeout=120)


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size: int) -> None:
    run("collectives", size, 1)


@pytest.mark.parametrize("size", [2, 3])
def test_messages(size: int) -> None:
    run("messages", size, 2)


def test_what_is_left_to_vllm() -> None:
    run("left_to_vllm", 2, 3)


def test_unserved_groups() -> None:
    run("unserved_groups", 2)


def test_the_package_says_what_it_needs() -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(ImportError, match=r"expected vLLM to be installed, got none. Run: pip install"):
        importlib.import_module("torch_overlap.compat.vllm")


def test_the_entry_point_imports_nothing_until_it_is_asked_for() -> None:
    program = (
        "import sys, torch_overlap_vllm as entry\n"
        "assert entry.platform_plugin() is None\n"
        "assert not {'torch', 'torch_overlap', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3], env={}, timeout=60)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes the plug-in function find vLLM's supported version, a GPU and a CUDA build; yields what changes that."""
    monkeypatch.setattr(entry, "version", lambda name: {"vllm": "0.26.0+cu130"}[name])
    monkeypatch.setattr(torch_overlap, "built_backends", lambda: ["gloo", "nccl"])
    monkeypatch.setenv("TORCH_OVERLAP_VLLM", "1")
    return monkeypatch


def asked() -> str | None:
    """Returns the plug-in function's answer, which does not change when vLLM asks again."""
    with cases.stand_in():
        answer = entry.platform_plugin()
        assert entry.platform_plugin() == answer
        return answer


def test_the_plug_in_applies_on_request(installed: pytest.MonkeyPatch) -> None:
    name = asked()
    assert name is not None
    with cases.stand_in():
        module, _, kind = name.rpartition(".")
        platform = getattr(importlib.import_module(module), kind)
        assert issubclass(platform, importlib.import_module("vllm.platforms.cuda").CudaPlatform)
    for value in ("0", ""):
        installed.setenv("TORCH_OVERLAP_VLLM", value)
        assert asked() is None
    installed.delenv("TORCH_OVERLAP_VLLM")
    assert asked() is None


def missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("reason", ["value", "version", "none", "gpu", "build"])
def test_the_plug_in_says_why_it_does_not_apply(
    installed: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    if reason == "value":
        installed.setenv("TORCH_OVERLAP_VLLM", "yes")
    elif reason in ("version", "none"):
        installed.setattr(entry, "version", missing if reason == "none" else lambda name: "0.27.1")
    elif reason == "gpu":
        installed.setenv("STAND_IN_GPUS", "0")
    else:
        installed.setattr(torch_overlap, "built_backends", lambda: ["gloo"])
    with caplog.at_level(logging.WARNING, "torch_overlap.vllm"):
        assert asked() is None
    expected = {
        "value": "expected 0 or 1 for TORCH_OVERLAP_VLLM, got 'yes'. Set it to 1, or unset it",
        "version": "expected vLLM 0.26.0, got 0.27.1. Install vllm==0.26.0",
        "none": "expected vLLM 0.26.0, got none. Install vllm==0.26.0",
        "gpu": "expected vLLM's CUDA platform to apply, got none",
        "build": "expected the backend nccl, got ['gloo']. Build torch_overlap with FORCE_CUDA=1",
    }
    assert expected[reason] in caplog.text
    assert "vLLM runs without torch_overlap." in caplog.text


def test_the_platform_names_our_classes() -> None:
    with cases.stand_in():
        platform = cases.plug_in("platform").OverlapPlatform
        config = importlib.import_module("vllm.config")
        assert set(platform.additional_env_vars) == {"SOMETHING", "TORCH_OVERLAP_VLLM"}
        for name in (platform.get_device_communicator_cls(), platform.get_pass_manager_cls()):
            module, _, kind = name.rpartition(".")
            assert module.startswith("torch_overlap.compat.vllm.")
            assert isinstance(getattr(importlib.import_module(module), kind), type)
        elastic = config.VllmConfig(parallel_config=config.ParallelConfig(enable_elastic_ep=True))
        with config.set_current_vllm_config(elastic):
            assert platform.get_device_communicator_cls().endswith("cuda_communicator.CudaCommunicator")
        with config.set_current_vllm_config(config.VllmConfig()):
            assert platform.get_device_communicator_cls().endswith("OverlapCommunicator")


@pytest.mark.parametrize(
    ("size", "is_fused", "hidden", "before", "after"),
    [
        (2, True, 4096, None, [256]),
        (4, True, 8192, [16, 512], [16, 32, 512]),
        (8, True, 8192, [16], [16]),
        (8, True, 4096, None, [32]),
        (1, True, 4096, None, None),
        (16, True, 4096, [8], [8]),
        (2, False, 4096, [8], [8]),
    ],
)
def test_the_range_that_is_fused(
    size: int, is_fused: bool, hidden: int, before: list[int] | None, after: list[int] | None
) -> None:
    with cases.stand_in():
        platform, config = cases.plug_in("platform").OverlapPlatform, importlib.import_module("vllm.config")
        made = config.VllmConfig(
            parallel_config=config.ParallelConfig(size),
            model_config=config.ModelConfig(torch.bfloat16, hidden),
            compilation_config=config.CompilationConfig(compile_ranges_endpoints=before),
        )
        made.compilation_config.pass_config.fuse_allreduce_rms = is_fused
        platform.check_and_update_config(made)
        assert made.compilation_config.custom_ops == ["+checked"]
        assert made.compilation_config.compile_ranges_endpoints == after
        made.model_config = None
        platform.check_and_update_config(made)
        assert made.compilation_config.compile_ranges_endpoints == after

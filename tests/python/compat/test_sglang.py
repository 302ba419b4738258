"""The plug-in for SGLang, over a stand-in package `sglang`: plug-in function, platform, process groups."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import torch_overlap_sglang as entry
from torch_overlap.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
import vllm_cases as cases


def missing(name: str) -> str:
    raise PackageNotFoundError(name)


def test_process_groups_are_ours() -> None:
    run_ranks(cases.sglang_groups, 2, comm=False, timeout=120)


def test_the_module_says_what_it_needs() -> None:
    if importlib.util.find_spec("sglang") is not None:
        pytest.skip("SGLang is installed")
    with pytest.raises(ImportError, match=r"expected SGLang to be installed, got none. Run: pip install"):
        importlib.import_module("torch_overlap.compat.sglang")


def test_the_entry_point_imports_nothing_until_it_is_selected() -> None:
    program = (
        "import sys, torch_overlap_sglang as entry\n"
        "assert entry.platform_plugin() is None\n"
        "assert not {'torch', 'torch_overlap', 'sglang'} & set(sys.modules)"
    )
    environment = {"SGLANG_PLATFORM": "other"}
    subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3], env=environment, timeout=60
    )


def test_the_plug_in_applies_if_it_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "version", lambda name: {"sglang": "0.5.15.post1"}[name])
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert entry.platform_plugin() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "torch_overlap")
    name = entry.platform_plugin()
    assert name is not None
    with cases.stand_in("sglang"):
        module, _, kind = name.rpartition(".")
        platform = getattr(importlib.import_module(module), kind)
        assert issubclass(platform, importlib.import_module("sglang.srt.platforms.cuda").CudaSRTPlatform)


@pytest.mark.parametrize("found", ["0.5.23", "none"])
def test_other_versions_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "torch_overlap")
    monkeypatch.setattr(entry, "version", missing if found == "none" else lambda name: found)
    with caplog.at_level(logging.WARNING, "torch_overlap.sglang"):
        assert entry.platform_plugin() is None
    assert f"expected SGLang 0.5.15.post1, got {found}. Install sglang==0.5.15.post1." in caplog.text

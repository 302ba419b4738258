"""The plug-in for vLLM, over a stand-in package `vllm`: plug-in function, platform, communicator, fusion."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from torch_overlap.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
import vllm_cases as cases  # noqa: E402

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

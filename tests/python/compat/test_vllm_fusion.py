"""The fusion pass of the plug-in for vLLM, over a stand-in package `vllm`: graphs, values, ranges, Inductor."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from torch_overlap.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
import vllm_fusion_cases as cases


def run(case: str, *args: object) -> None:
    run_ranks(getattr(cases, case), 2, *args, comm=False, timeout=120)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers(dtype: torch.dtype) -> None:
    run("layers", 11, dtype)


@pytest.mark.parametrize("custom_ops", [(), ("+quant_fp8",)], ids=["ATen", "one operator"])
def test_quantization(custom_ops: tuple[str, ...]) -> None:
    run("quantized", 12, custom_ops)


def test_products() -> None:
    run("products", 16)


def test_similar_graphs_stay() -> None:
    run("not_fused", 13)


def test_ranges_and_keys() -> None:
    run("ranges_and_keys", 14)


def test_torch_compile() -> None:
    run("compiled", 15)

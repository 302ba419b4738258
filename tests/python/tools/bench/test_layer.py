"""benchmarks/layer.py runs without a GPU, and its result names what it measures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed._symmetric_memory as symmetric
from launcher import Launcher

from torch_overlap.tools.bench.libraries import NO_CUDA

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
LAYER = BENCHMARKS / "layer.py"
sys.path.insert(0, str(BENCHMARKS))
from layer_floor import longest, time_by_category  # noqa: E402

# torch's fused operators on the CPU, by its references for fake tensors; their products times {factor}.
WITH_FUSED = """
import runpy
import sys
sys.path.insert(0, {benchmarks!r})
import torch
import torch.distributed._symmetric_memory as symmetric

def gather_matmul(x, weights, dim, group, *, return_A=True):
    gathered, products = symmetric._fused_all_gather_matmul_fallback(x, weights, dim, group, return_A=return_A)
    return gathered, [{factor} * y for y in products]

library = torch.library.Library("symm_mem", "IMPL")
library.impl("fused_all_gather_matmul", gather_matmul, "CPU")
library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
runpy.run_path({layer!r}, run_name="__main__")
"""


def run(launcher: Launcher, program: Path, out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    code, output = launcher.run_ranks(2, program, "--tiny", "--rounds", 2, "--out", out, *arguments)
    assert code == 0, output
    (path,) = out.glob("layer-cpu-tp2-*.json")
    return json.loads(path.read_text()), output


@pytest.mark.slow
def test_two_ranks_without_a_gpu(launcher: Launcher, tmp_path: Path) -> None:
    found, told = run(launcher, LAYER, tmp_path)
    ways = ("auto", "p2p", "p2p+mesh", "sequential", "no communication")
    expected = {(model, way) for model in ("llama3-8b", "llama3-70b") for way in ways}
    assert {(row["name"], row["algorithm"]) for row in found["rows"]} == expected
    for row in found["rows"]:
        assert set(row["peers"]) == {"nccl"}
        assert min(row["us"], row["peers"]["nccl"], row["over_nccl"], row["over_no communication"]) > 0
        parts = [row["floor"][f"{part}_us"] for part in ("products", "attention", "elementwise")]
        assert min(parts) > 0
        assert row["floor"]["us"] == pytest.approx(sum(parts), rel=1e-3)
        assert row["ratio_floor"] == pytest.approx(row["us"] / row["floor"]["us"], rel=1e-3)
        assert "predicted_us" not in row  # it would be out of date as soon as the planner changes
    why = {"torch fused": NO_CUDA, "torch fused joined": NO_CUDA}
    assert found["missing"] == {"llama3-8b": why, "llama3-70b": why}
    assert f"not run: torch fused: {NO_CUDA}" in told


def test_kernels_are_counted_by_category() -> None:
    kernels = [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT", 0, 10),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", 10, 5),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 12, 6),
        ("Memcpy PtoP (Device -> Device)", 20, 2),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)>", 22, 1),
        ("void at::native::elementwise_kernel<128, 4>", 23, 2),
        ("a_kernel_of_nobody", 25, 1),
    ]
    found = time_by_category((name, float(start), float(length)) for name, start, length in kernels)
    assert found == {
        "products": 10, "attention": 5, "communication": 8, "copies": 1, "element-wise": 2, "other": 1,
        "idle": 2, "communication alone": 5,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(symmetric, "_fused_all_gather_matmul_fallback"), reason="this torch has no such reference"
)
@pytest.mark.parametrize("factor", [1, 2])
def test_async_tp_takes_turns_unless_it_is_wrong(launcher: Launcher, tmp_path: Path, factor: int) -> None:
    program = tmp_path / "layer.py"
    program.write_text(WITH_FUSED.format(factor=factor, layer=str(LAYER), benchmarks=str(BENCHMARKS)))
    changed = ["p2p+kept+silu", "p2p+main_grad"]
    found, told = run(launcher, program, tmp_path, "--models", "llama3-8b", "--accumulate", "--algorithms",
                      ",".join(["p2p", *changed]))  # fmt: skip
    by_algorithm = {row["algorithm"]: row for row in found["rows"]}
    assert set(by_algorithm) == {"p2p", *changed, "no communication"}
    assert all(row["accumulates"] for row in found["rows"])
    row = by_algorithm["p2p"]
    names = ("torch fused", "torch fused joined")
    if factor == 1:
        assert found["missing"] == {"llama3-8b": {}}
        assert set(row["peers"]) == {"nccl", *names}
        assert min(row[f"over_{name}"] for name in names) > 0
        assert " x torch fused joined" in told
    else:
        assert set(row["peers"]) == {"nccl"}
        for name in names:
            assert f"expected {name} within" in found["missing"]["llama3-8b"][name]


def test_the_longest_kernels_are_summed_by_name() -> None:
    kernels = [("a", 0.0, 2.0), ("b", 2.0, 3.0), ("a", 5.0, 2.0), ("c", 7.0, 1.0)]
    assert longest(kernels, 2) == [("a", 2, 4.0), ("b", 1, 3.0)]
    assert longest([], 2) == []

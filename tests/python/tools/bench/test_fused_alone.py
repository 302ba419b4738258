"""benchmarks/fused_alone.py: invalid arguments, and its report of the samples."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from torch_overlap.tools.bench import result

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"


@pytest.fixture
def fused_alone(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fused_alone

    return fused_alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "1"], "expected --tp from 2 to 7, got 1"),
        (["--tp", "8"], "expected --tp from 2 to 7, got 8"),
        (["--rounds", "0"], "expected --rounds of 1 or more, got 0"),
        (["--only", "small ag", "large"], "expected --only to name shapes of 70b-qkv ag, .*, got large"),
        (["--library", "nowhere.so"], "expected a library in --library, got nowhere.so; build .*torch_overlap_benchma"),
        ([], "expected a GPU of compute capability 9.0, got none"),
    ],
)
def test_refuses(
    fused_alone: ModuleType, options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    library = tmp_path / "library.so"
    library.touch()
    with pytest.raises(SystemExit) as stopped:
        fused_alone.parse(["--library", str(library), *options])
    assert stopped.value.code == 2
    text = " ".join(capsys.readouterr().err.split())
    assert re.search(message, text), text


def test_refuses_other_gpus(
    fused_alone: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"is_available": True, "get_device_capability": (8, 0), "get_device_name": "A100"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    library = tmp_path / "library.so"
    library.touch()
    with pytest.raises(SystemExit):
        fused_alone.parse(["--library", str(library)])
    assert "expected a GPU of compute capability 9.0, got A100" in capsys.readouterr().err


def test_rows(fused_alone: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = {
        "cublaslt": [100.0, 200.0, 100.0, 100.0],
        "own 128x256": [130.0, 250.0, 130.0, 130.0],
        "own 128x224": [110.0, 220.0, 110.0, 110.0],
        "gather": [121.0, 242.0, 121.0, 121.0],
    }
    rows: list[dict[str, Any]] = fused_alone.rows_of("small-up ag", (2048, 3584, 4096), "fp8", 4, samples)
    assert [row["algorithm"] for row in rows] == list(samples)
    found = rows[-1]
    assert {key: found[key] for key in ("name", "shape", "dtype", "tp", "mode", "own", "us", "gemm_us", "own_us")} == {
        "name": "small-up ag", "shape": [2048, 3584, 4096], "dtype": "fp8", "tp": 4, "mode": "graph",
        "own": "own 128x224", "us": 121.0, "gemm_us": 100.0, "own_us": 110.0,
    }  # fmt: skip
    assert (found["ratio_gemm"], found["ratio_own"]) == (pytest.approx(1.21), pytest.approx(1.1))
    assert (found["iqr_ratio_gemm"], found["iqr_ratio_own"]) == (pytest.approx(0), pytest.approx(0))
    assert found["iqr_us"] > 0
    assert fused_alone.line_of(rows).split("  ")[-1] == "gather 1.210 (1.100 of ours)"

    monkeypatch.setattr("sys.argv", ["benchmarks/fused_alone.py", "--library", "x.so", "--tp", "4"])
    path = result.write(result.result("fused_alone", rows), 4, tmp_path)
    assert re.fullmatch(r"fused_alone-.*-tp4-\d{4}-\d\d-\d\d\.json", path.name)
    content = result.read(path)
    assert content["rows"] == result.compact({"rows": rows})["rows"]
    assert content["command"].endswith("benchmarks/fused_alone.py --tp 4")


def test_a_shape_for_every_goal(fused_alone: ModuleType) -> None:
    for tp in (2, 4):
        shapes = fused_alone.shapes_of(tp)
        assert sum(name.endswith(" ag") for name in shapes) == sum(name.endswith(" rs") for name in shapes) == 6
        assert shapes["small-up ag"] == (2048, 14336 // tp, 4096)
        assert shapes["70b-o rs"] == (8192, 8192, 8192 // tp)


def test_a_wrong_result_is_found(fused_alone: ModuleType, seed: int) -> None:
    torch.manual_seed(seed)
    expected = torch.randn(64, 64)
    fused_alone.close(expected.bfloat16(), expected, 2.0**-7)
    for at in (0, -1):
        wrong = expected.bfloat16()
        wrong.view(-1)[at] += 1
        with pytest.raises(RuntimeError, match="expected torch's result"):
            fused_alone.close(wrong, expected, 2.0**-7)
    with pytest.raises(RuntimeError):
        fused_alone.close(torch.full_like(expected, float("nan")), expected, 2.0**-7)

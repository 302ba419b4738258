"""`python -m torch_overlap plan` and its predictions."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import run_here
from launcher import Launcher

from torch_overlap.mesh import CostModel, Mesh, save_cost_model
from torch_overlap.mesh.models import PRESETS, Eager, Transformer
from torch_overlap.mesh.transformer import meshes_for, predict, predict_layer
from torch_overlap.tools.plan import draw

LLAMA = PRESETS["llama3-8b"]
SMALL = Transformer("small", 4, 1024, 16, 8, 4096, 512, sequence=512)


def test_a_preset_has_as_many_parameters_as_it_says() -> None:
    assert LLAMA.parameters == pytest.approx(8.03e9, rel=0.01)
    assert PRESETS["llama3-70b"].parameters == pytest.approx(70.6e9, rel=0.01)
    assert PRESETS["gpt3-175b"].parameters == pytest.approx(175e9, rel=0.01)


def test_a_layer_has_the_collectives_of_megatron() -> None:
    """One gather and one scatter for attention, the same for the other half, as in examples/gpt/model.py."""
    for model in (LLAMA, PRESETS["train_gpt"], SMALL):
        found = predict(model, Mesh({"tp": 4}), batch=4)
        kinds = [what.split()[0] for _, what, _, _ in found.collectives]
        assert kinds == ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"], found.collectives
        rows = 4 * model.sequence * model.hidden * 2
        assert [size for _, _, size, _ in found.collectives] == [rows * 3 / 4] * 4
    assert predict(LLAMA, Mesh({"dp": 4}), batch=4).collectives == []


def test_one_rank_sends_nothing() -> None:
    found = predict(SMALL, Mesh({"dp": 1, "tp": 1}), batch=2)
    assert (found.moving, found.gradients, found.bubble, found.traffic) == (0, 0, 0, {})
    assert 0 < found.flops_per_second < 790e12
    assert found.seconds == found.compute + found.optimizer


def test_work_is_shared_out() -> None:
    alone = predict(SMALL, Mesh({"dp": 1}), batch=64)
    shared = predict(SMALL, Mesh({"dp": 8}), batch=64)
    assert alone.compute / 8.8 < shared.compute < alone.compute / 6  # some of it is not sharded
    assert shared.traffic["dp"] == 2 * 7 / 8 * 4 * (SMALL.layers * SMALL.layer_parameters + 2 * 512 * 1024)
    hidden = predict(SMALL, Mesh({"tp": 4}), batch=64)
    assert hidden.moving <= predict(SMALL, Mesh({"tp": 4}), batch=64, overlap=False).moving


@pytest.mark.parametrize("overlap", [True, False])
def test_a_layer_is_what_one_more_of_them_takes(overlap: bool) -> None:
    mesh, batch = Mesh({"dp": 2, "tp": 4}), 16
    more, fewer = (
        predict(replace(LLAMA, layers=n), mesh, batch=batch, overlap=overlap, micro_batches=1) for n in (3, 2)
    )
    took = more.compute + more.moving - fewer.compute - fewer.moving
    assert predict_layer(LLAMA, mesh, batch=batch, overlap=overlap) == pytest.approx(took)


def test_a_pipeline_waits_for_its_ends() -> None:
    few = predict(SMALL, Mesh({"pp": 4}), batch=8, micro_batches=4)
    many = predict(SMALL, Mesh({"pp": 4}), batch=8, micro_batches=8)
    assert few.bubble > many.bubble > 0
    assert many.memory < predict(SMALL, Mesh({"pp": 1}), batch=8).memory


def test_a_network_costs_more_than_nvlink() -> None:
    near, far = Mesh.parse("dp=8"), Mesh.parse("dp=8", ranks_per_host=1)
    assert predict(LLAMA, far, batch=8).gradients > predict(LLAMA, near, batch=8).gradients


@pytest.mark.parametrize(
    ("mesh", "batch", "message"),
    [
        ("dp=3", 4, "batch divisible by dp=3, got 4"),
        ("tp=32", 4, "heads divisible by tp=32, got 16"),
        ("pp=3", 4, "layers divisible by pp=3, got 4"),
        ("ep=2", 4, r"the axes dp, tp and pp, got \['ep'\] as well"),
    ],
)
def test_what_the_mesh_does_not_divide_is_refused(mesh: str, batch: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(SMALL, Mesh.parse(mesh), batch=batch)


def test_wrong_models_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_heads that divide heads"):
        Transformer("odd", 1, 64, 8, 3, 64, 64)
    with pytest.raises(ValueError, match="layers of at least 1, got 0"):
        Transformer("none", 0, 64, 8, 8, 64, 64)
    with pytest.raises(ValueError, match="layer of at least 0 bytes, got -1"):
        Eager(-1, 34)
    with pytest.raises(ValueError, match="rate above 0, at most 1, got 2"):
        Eager(1, 34, rate=2)
    with pytest.raises(ValueError, match="micro_batches that divide the 4 sequences"):
        predict(SMALL, Mesh({"dp": 2}), batch=8, micro_batches=3)


def test_eager_models_move_what_they_say() -> None:
    """Bytes at the memory bandwidth: of layers by their share of it, of parameters, and of gradients that are
    reduced."""
    cost, mesh = CostModel.h200(), Mesh({"dp": 4})
    rate = 1e12 / (cost.elementwise(2e12) - cost.elementwise(1e12))
    first = predict(replace(SMALL, eager=Eager(100, 30, 8, 0.5)), mesh, batch=64)
    second = predict(replace(SMALL, eager=Eager(140, 50, 24, 0.5)), mesh, batch=64)
    tokens = SMALL.layers * 16 * SMALL.sequence * SMALL.hidden
    assert second.compute - first.compute == pytest.approx(40 * tokens / 0.5 / rate)
    parameters = first.traffic["dp"] / 4 / (2 * 3 / 4)
    assert second.optimizer - first.optimizer == pytest.approx(20 * parameters / rate)
    assert second.gradients - first.gradients == pytest.approx(16 * parameters / rate)
    assert first.gradients > cost.collective("all_reduce", {"nvlink": 4}, 4 * parameters)
    hidden = predict(SMALL, mesh, batch=64)
    assert hidden.gradients < cost.collective("all_reduce", {"nvlink": 4}, 4 * parameters)


def test_every_mesh_is_listed_once() -> None:
    meshes = list(meshes_for(SMALL, 16, 16, ranks_per_host=8))
    sizes = [tuple(mesh.axes.values()) for mesh in meshes]
    assert len(set(sizes)) == len(sizes)
    assert all(mesh.size == 16 for mesh in meshes)
    assert (1, 2, 8) in sizes
    assert (4, 4, 1) in sizes


@pytest.mark.smoke
def test_the_command_compares_thousands_of_ranks(launcher: Launcher, tmp_path: Path) -> None:
    numbers, picture, model = tmp_path / "plan.json", tmp_path / "plan.png", tmp_path / "cost.json"
    save_cost_model(CostModel.h200(), model)
    done = launcher.fork("-m", "torch_overlap", "plan", "--model", "llama3-8b", "--ranks", "2048", "--scaling",
                         "--json", numbers, "--plot", picture, "--cost", model, "--top", "3")  # fmt: skip
    assert done.wait() == 0, done.printed()
    assert "llama3-8b: 8.03 G parameters" in done.printed()
    assert "one layer of the first, forward:" in done.printed() or "tp=1" in done.printed()
    rows = json.loads(numbers.read_text())["rows"]
    assert [r["seconds"] for r in rows] == sorted(r["seconds"] for r in rows)
    assert all(r["memory"] <= 141e9 for r in rows)
    scaling = json.loads(numbers.read_text())["scaling"]
    assert scaling[-1]["mesh"] == rows[0]["mesh"]
    if importlib.util.find_spec("matplotlib") is None:
        assert "no plot: matplotlib is not installed" in done.printed()
        assert not picture.exists()
    else:
        assert f"wrote {picture}" in done.printed()
        assert picture.read_bytes()[:4] == b"\x89PNG"


def test_the_plot_shows_the_parts_of_each_step_and_the_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure_class, "savefig", lambda figure, *_, **__: figures.append(figure))
    found = [predict(SMALL, Mesh({"dp": dp, "tp": 8 // dp}), batch=16) for dp in (1, 2, 8)]
    scaling = [predict(SMALL, Mesh({"dp": dp}), batch=4 * dp) for dp in (1, 2, 4)]
    assert draw(SMALL, found, scaling, tmp_path / "plot.png") == f"wrote {tmp_path / 'plot.png'}"
    bars, speeds = figures[0].axes
    assert [label.get_text() for label in bars.get_yticklabels()] == ["dp=1,tp=8", "dp=2,tp=4", "dp=8,tp=1"]
    ends = [max(bar.get_x() + bar.get_width() for bar in row) for row in zip(*bars.containers, strict=True)]
    assert ends == pytest.approx([p.seconds * 1e3 for p in found])
    (line,) = speeds.get_lines()
    assert list(line.get_xdata()) == [1, 2, 4]
    assert list(line.get_ydata()) == [p.flops_per_second / 1e12 for p in scaling]


def test_the_command_marks_meshes_that_fill_the_memory(tmp_path: Path) -> None:
    needed = predict(LLAMA, Mesh({"dp": 8, "tp": 8}), batch=64).memory / 1e9
    for memory, is_marked, note in (
        (needed / 0.94, False, ""),
        (needed / 0.96, True, "! 1 mesh is within 5 % of the device's"),
        (needed / 1.01, True, "! 1 mesh is beyond the device's"),
    ):
        numbers = tmp_path / "plan.json"
        arguments = ("--mesh", "dp=8,tp=8", "--batch", "64", "--memory", str(memory), "--json", str(numbers))
        done = run_here("plan", *arguments)
        assert done.returncode == 0, done
        (row,) = (line for line in done.stdout.splitlines() if line.startswith("dp=8,tp=8"))
        assert ("!" in row) == is_marked, row
        assert ("\n! " in done.stdout) == is_marked, done.stdout
        assert note in done.stdout
        assert json.loads(numbers.read_text())["device_memory"] == memory * 1e9
    several = run_here("plan", "--ranks", "64", "--memory", str(needed / 0.96))
    marked = sum("!" in line for line in several.stdout.splitlines() if line.startswith("pp="))
    assert ("is within" if marked == 1 else f"{marked} meshes are within") in several.stdout


def test_the_command_says_what_is_wrong() -> None:
    for arguments, message in (
        ((), "expected --mesh or --ranks"),
        (("--mesh", "dp=3", "--batch", "4"), "batch divisible by dp=3"),
        (("--mesh", "dp"), "dp=2,tp=4"),
        (("--ranks", "8", "--memory", "1"), "fits into 1.0 GB"),
    ):
        done = run_here("plan", *arguments)
        assert done.returncode == 2, done
        assert message in done.stderr

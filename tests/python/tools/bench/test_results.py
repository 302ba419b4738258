"""Result files, and the tables and pictures made from them."""

from __future__ import annotations

import json
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from bench_rows import check_rows

from torch_overlap.mesh import Mesh
from torch_overlap.mesh.models import PRESETS
from torch_overlap.mesh.transformer import predict_layer
from torch_overlap.tools.bench import result

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "benchmarks"))
import results_page  # noqa: E402
from results_tables import groups_of, layer_table, table  # noqa: E402

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def content(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return result.result("bench_test", rows, "python -m torch_overlap bench", **more)


def gemm_row(name: str, mode: str, algorithm: str, ratio: float, **more: Any) -> dict[str, Any]:
    return {"op": "ag_gemm", "name": name, "shape": [64, 64, 64], "dtype": "bf16", "tp": 2, "mode": mode,
            "algorithm": algorithm, "us": 100 * ratio, "iqr_us": 1.0, "gemm_us": 100.0,
            "ratio_gemm": ratio, "floor_us": 101.0, "ratio_floor": round(ratio / 1.01, 4), "peers": {"nccl": 150.0},
            **more}  # fmt: skip


def size_row(size: int, algorithm: str, us: float) -> dict[str, Any]:
    return {"op": "all_reduce", "shape": size, "dtype": "bf16", "tp": 2, "mode": "graph", "algorithm": algorithm,
            "us": us, "iqr_us": 0.1, "floor_us": 2.5, "ratio_floor": us / 2.5, "peers": {"nccl": 9.0}}  # fmt: skip


ROWS = [
    gemm_row("one", "graph", "auto", 1.25, chosen="p2p"),
    gemm_row("one", "graph", "fused", 1.125),
    gemm_row("one", "eager", "auto", 1.375),
    gemm_row("two", "graph", "auto", 1.5, shape=[64, 64, 128]),
    size_row(1024, "auto", 3.25),
    size_row(1024, "plain", 8.75),
    size_row(1 << 20, "auto", 12.5),
]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_are_result_files(path: Path) -> None:
    found = result.read(path)
    assert path.name == f"{found['benchmark']}-{result.gpu_name(found)}-tp{path.stem.split('-tp')[1]}.json"
    assert path.stem.endswith(found["date"])
    assert found["rows"]
    assert not re.search(r"(^|[ =])/", found["command"]), "a path of the machine"
    assert path.read_text() == result.text(found), "run scripts/compact_results.py on it"


def test_committed_results_are_few_and_used() -> None:
    """Each claim has its current file only: older ones are in git's history."""
    assert len(RESULTS) < 40
    assert sum(path.stat().st_size for path in RESULTS) < 1_000_000
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "tests/python/mesh/test_h200.py"]
    named = {name for page in pages for name in re.findall(r"[\w.*-]+\.json", page.read_text())}
    assert [path.name for path in RESULTS if not any(fnmatch(path.name, name) for name in named - {"*.json"})] == []


def test_a_file_has_a_name_of_its_kind(tmp_path: Path) -> None:
    path = result.write(content(ROWS, rates={"link_gbps": 1.0, "memory_gbps": 2.0}) | {"gpu": "NVIDIA H200"}, 2,
                        tmp_path / "deep")  # fmt: skip
    assert re.fullmatch(r"bench_test-h200-tp2-\d{4}-\d{2}-\d{2}\.json", path.name)
    found = result.read(path)
    check_rows(found)
    assert found["rows"] == ROWS
    path.write_text(json.dumps({**found, "rows": None}))
    with pytest.raises(ValueError, match=r"expected a result file, got .*rows = None"):
        result.read(path)


def test_a_file_has_a_line_for_each_row() -> None:
    """Figures that nothing reads are left out, and so are digits beyond the precision of a measurement."""
    noise = dict.fromkeys(result.UNREAD, 0.5)
    row = gemm_row("one", "graph", "auto", 1.2345678, ratio_peer=0.98765432, peers={"nccl": 150.123456, "none": 0.0})
    rows = [row | noise, size_row(1 << 27, "auto", 12345.678)]
    made = content(rows, timelines=TIMELINE, rates={"link_gbps": 386.7512})
    lines = result.text(made).splitlines()
    assert [line for line in lines if '"op"' in line] == [line for line in lines if line.startswith(" {")]
    assert len(lines) == len(made) + 2 + len(TIMELINE) + 1 + 2 + 1  # two lists of objects; the braces of the file
    found = json.loads(result.text(made))
    assert found["rows"][0] == row | {"us": 123.457, "ratio_gemm": 1.23457, "ratio_peer": 0.987654,
                                      "peers": {"nccl": 150.123, "none": 0.0}}  # fmt: skip
    assert (found["rows"][1]["shape"], found["rows"][1]["us"]) == (1 << 27, 12345.7)
    assert (found["rates"], found["timelines"]) == ({"link_gbps": 386.751}, TIMELINE)
    assert result.text(found) == result.text(made)


def test_a_command_says_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ["/somewhere/torch_overlap/__main__.py", "bench", "ag_gemm", "--json", "/tmp/x.json", "--tp", "2",
            "--out=/tmp", "--began", "1.5"]  # fmt: skip
    monkeypatch.setattr("sys.argv", here)
    assert result.command_line() == "python -m torch_overlap bench ag_gemm --tp 2"
    monkeypatch.setattr(
        "sys.argv", ["/somewhere/benchmarks/window.py", "--out", "results", "--cutlass", "x.so", "--rounds", "5"]
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert result.command_line() == "torchrun --nproc_per_node 4 benchmarks/window.py --rounds 5"


def test_tables() -> None:
    groups = groups_of(ROWS)
    assert [(group.op, group.label) for group in groups] == [
        ("ag_gemm", "one"), ("ag_gemm", "two"), ("all_reduce", "1 KiB"), ("all_reduce", "1 MiB")
    ]  # fmt: skip
    lines = table(groups[:2]).splitlines()
    assert lines[0] == "| layer (M, N, K) | product alone, us | ours: graph | eager | floor | nccl |"
    assert lines[2] == "| one 64, 64, 64 | 100 | 1.250 (p2p), fused 1.125 | 1.375 | 1.010 | 1.500 |"
    assert lines[3] == "| two 64, 64, 128 | 100 | 1.500 (auto) | - | 1.010 | 1.500 |"
    assert table(groups[2:]).splitlines()[2] == "| 1 KiB | 3.2 | 8.8 | 2.5 | 9.0 |"
    lines = table(groups_of([*ROWS, size_row(1024, "auto registered", 3.125)])[2:]).splitlines()
    assert lines[0] == "| size | ours, us | ours by NCCL | ours, registered | floor | nccl |"
    assert lines[2:] == ["| 1 KiB | 3.2 | 8.8 | 3.1 | 2.5 | 9.0 |", "| 1 MiB | 12.5 | - | - | 2.5 | 9.0 |"]
    by_lines = size_row(1024, "auto", 3.25) | {"chosen": "ll"}
    assert table(groups_of([by_lines])).splitlines()[2] == "| 1 KiB | 3.2 (ll) | - | 2.5 | 9.0 |"


def layer_row(name: str, algorithm: str, us: float, peers: dict[str, float]) -> dict[str, Any]:
    return {"op": "layer", "name": name, "shape": [8192, 14336, 4096], "dtype": "bfloat16", "tp": 4, "mode": "graph",
            "algorithm": algorithm, "us": us, "iqr_us": 1.0, "peers": peers,
            **{f"over_{peer}": us / other for peer, other in peers.items()}}  # fmt: skip


LAYERS = [
    layer_row("llama3-8b", "auto", 2000.0, {"nccl": 3200.0, "torch fused": 2500.0}),
    layer_row("llama3-8b", "p2p", 2100.0, {"nccl": 3200.0, "torch fused": 2500.0}),
    layer_row("llama3-70b", "auto", 4000.0, {"nccl": 5000.0}),
    layer_row("llama3-70b", "p2p", 3900.0, {"nccl": 5000.0}),
]


def test_a_table_of_layers() -> None:
    lines = layer_table(LAYERS).splitlines()
    assert lines[0] == ("| layer (M, ffn, hidden) | ours, us: auto | p2p | nccl | torch fused | predicted "
                        "| auto / nccl | auto / torch fused | auto / predicted |")  # fmt: skip
    small, large = (1e6 * predict_layer(PRESETS[f"llama3-{size}b"], Mesh({"tp": 4}), batch=1) for size in (8, 70))
    assert lines[2:] == [
        "| llama3-8b 8192, 14336, 4096 | 2000 | 2100 | 3200 | 2500 "
        f"| {small:.0f} | 0.625 | 0.800 | {2000 / small:.3f} |",
        f"| llama3-70b 8192, 14336, 4096 | 4000 | 3900 | 5000 | - | {large:.0f} | 0.800 | - | {4000 / large:.3f} |",
    ]


def test_a_document_of_layers(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text(f"{results_page.BEGIN}\n{results_page.END}\n")
    file = result.write(content(LAYERS) | {"benchmark": "layer", "gpu": "NVIDIA H200"}, 4, tmp_path)
    results_page.update([file], tmp_path / "images", page)
    text = page.read_text()
    assert "### 4 H200" in text
    assert f"#### A transformer layer, forward and backward, bfloat16\n\n{layer_table(LAYERS)}\n" in text


TIMELINE = [
    {"op": "ag_gemm", "name": "one", "variant": variant, "spans": [
        {"lane": "communication", "name": "Memcpy PtoP", "start_us": 0.0, "us": 40.0},
        {"lane": "product", "name": "nvjet", "start_us": start, "us": 100.0},
    ]}
    for variant, start in (("ours, auto (p2p)", 5.0), ("nccl", 42.0))
]  # fmt: skip


def test_a_document_with_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, images = tmp_path / "results.md", tmp_path / "images"
    page.write_text(f"# Before\n\n{results_page.BEGIN}\nold\n{results_page.END}\n\nafter\n")
    file = result.write(content(ROWS, timelines=TIMELINE), 2, tmp_path)
    assert results_page.update([file], images, page) == 0
    text = page.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert table(groups_of(ROWS)[:2]) in text
    shown = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert len(shown) == 3
    assert len(list(images.iterdir())) == 3
    for name in shown:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / name).stat().st_size < 100_000
    results_page.update([file], images, page)
    assert page.read_text() == text
    page.write_text(f"{results_page.BEGIN}\n{results_page.END}\n")
    with pytest.raises(ValueError, match="got none"):
        results_page.update([], images, page)
    page.write_text("no marks")
    with pytest.raises(ValueError, match=r"expected .* with the lines"):
        results_page.update([file], images, page)


def test_a_document_says_which_files_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without files those of the page are drawn again; the picture of an operation is made from its first file."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    page, images, folder = tmp_path / "results.md", tmp_path / "images", Path("benchmarks/results")
    page.write_text(f"{results_page.BEGIN}\n{results_page.END}\n")
    files = [result.write(content(ROWS) | {"benchmark": name}, 2, folder) for name in ("b", "a")]
    results_page.update(files, images, page)
    text = page.read_text()
    names = {path.name for path in images.iterdir()}
    assert len(names) == 2
    assert all(name.startswith("b-") for name in names)
    results_page.update([], images, page)
    assert page.read_text() == text


def run_here(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["results_page.py", *map(str, words)])
    return results_page.main()


def test_the_page_has_its_files_in_the_given_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{results_page.BEGIN}\n{results_page.END}\n")
    files = [tmp_path / "b.json", tmp_path / "a.json"]  # not that of their names
    for file, rows in zip(files, (ROWS[:1], ROWS[3:4]), strict=True):
        file.write_text(json.dumps(content(rows)))
    assert run_here(monkeypatch, *files, "--images", tmp_path / "images", "--document", page) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    text = page.read_text()
    assert re.findall(r"benchmarks/results/(\w+.json)", text) == ["b.json", "a.json"]
    assert text.index(table(groups_of(ROWS[:1]))) < text.index(table(groups_of(ROWS[3:4])))


@pytest.mark.parametrize("files", [(), ("missing.json",)])
def test_a_page_that_is_not_there(
    files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_here(monkeypatch, *files, "--document", "none.md")
    error = capsys.readouterr().err
    assert "expected none.md with the lines" in error
    assert "got no such file; give --document" in error


def test_every_figure_of_the_page_is_in_a_committed_file() -> None:
    page = ROOT / "docs" / "results.md"
    text = page.read_text()
    between = text.split(results_page.BEGIN)[1].split(results_page.END)[0]
    names = re.findall(r"^`benchmarks/results/(.*?)`:", between, re.MULTILINE)
    assert names
    for name in names:
        rows = result.read(ROOT / "benchmarks" / "results" / name)["rows"]
        groups, layers = groups_of(rows), [row for row in rows if row.get("op") == "layer"]
        tables = [table([group for group in groups if (group.op, group.dtype) == key])
                  for key in {(group.op, group.dtype) for group in groups}]  # fmt: skip
        tables += [layer_table(layers)] if layers else []
        assert tables
        assert all(shown in between for shown in tables)
    shown = {(page.parent / image).resolve() for image in re.findall(r"!\[.*?\]\((.*?)\)", text)}
    assert shown == set((page.parent / "images").iterdir())
    assert len(shown) <= 8
    assert all(0 < image.stat().st_size < 100_000 for image in shown)

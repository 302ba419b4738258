"""benchmarks/whole_host.py: what it would run on a host of eight GPUs, and that no run is lost or left behind."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torch_overlap.tools.bench import cli
from torch_overlap.tools.bench.build import check_algorithms

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "benchmarks"))
import whole_host  # noqa: E402


def whole(*arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "whole_host.py"), *arguments, "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_every_file_of_gpu_tests_runs_by_itself_on_all_ranks(tmp_path: Path) -> None:
    files = {path.name for path in (ROOT / "tests/python/gpu").glob("test_*.py")} - {"test_torchrun.py"}
    done = whole("tests", "--ranks", "8", "--list", out=tmp_path)
    lines = [line for line in done.stdout.splitlines() if "tests/python/gpu/" in line]
    assert {re.search(r"gpu/(\w+\.py)$", line)[1] for line in lines} == files  # type: ignore[index]
    assert len(lines) == len(files)
    assert all("--nproc_per_node 8" in line for line in lines)


def test_measurements_of_eight_ranks(tmp_path: Path) -> None:
    lines = whole("measurements", "--ranks", "8", "--list", out=tmp_path).stdout.splitlines()
    names = [line.split(" ")[0] for line in lines]
    assert {"bench_bf16", "bench_fp8", "bench_collectives", "layer", "llama_step", "train_step", "tune", "goals",
            "plan_llama3-8b_tp=8"} <= set(names)  # fmt: skip
    assert len(names) == len(set(names))
    assert any("--meshes tp=8,dp=2:tp=4" in line for line in lines)


def test_commands_of_bench_are_ones_that_it_takes(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    for run in whole_host.measurements(8, tmp_path, False):
        if run.name.startswith("bench_"):
            args = parser.parse_args(run.command[run.command.index("bench") + 1 :])
            cases = cli.chosen_cases(args.what, args.shape, args.set, args.dtype)
            check_algorithms([name for name in args.algorithm.split(",") if name], [case.op for case in cases])
            for case in cases:
                case.check(args.tp)


def test_a_plan_is_made(tmp_path: Path) -> None:
    done = whole("measurements", "--ranks", "4", "--tiny", "--only", "plan_llama3-8b_tp=4", out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^plan_llama3-8b_tp=4: passed, \d+ s$", done.stdout, re.M)
    assert "1 of 1 passed on 4 ranks" in done.stdout
    assert "tp=4" in (tmp_path / "plan_llama3-8b_tp=4.log").read_text()


def test_a_run_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = {"fails": "print('said'); exit(3)", "works": "print('done')"}
    runs = [whole_host.Run(name, [sys.executable, "-c", body], 60) for name, body in bodies.items()]
    monkeypatch.setattr(whole_host, "tests", lambda ranks: runs)
    monkeypatch.setattr(sys, "argv", ["whole_host.py", "tests", "--ranks", "2", "--out", str(tmp_path)])
    assert whole_host.main() == 1
    printed = capsys.readouterr().out
    assert re.search(r"^fails: exit status 3, .*^works: passed, .*^1 of 2 passed", printed, re.M | re.S)
    assert "said" in (tmp_path / "fails.log").read_text()
    assert "done" in (tmp_path / "works.log").read_text()


def test_a_pattern_is_the_files_that_are_there_when_a_run_starts(tmp_path: Path) -> None:
    run = whole_host.Run(
        "prints", [sys.executable, "-c", "import sys; print(sys.argv[1:])", f"{tmp_path}/of-*.json"], 60
    )
    for name in ("of-b.json", "of-a.json", "other.json"):
        (tmp_path / name).touch()
    assert whole_host.execute(run, tmp_path / "prints.log")[0] == "passed"
    assert f"['{tmp_path}/of-a.json', '{tmp_path}/of-b.json']" in (tmp_path / "prints.log").read_text()


def test_a_run_that_hangs_is_ended_with_its_processes(tmp_path: Path) -> None:
    body = "import os, time; pid = os.fork(); print(pid, flush=True) if pid else None; time.sleep(60)"
    hangs = whole_host.Run("hangs", [sys.executable, "-c", body], 1.5)
    assert whole_host.execute(hangs, tmp_path / "hangs.log")[0] == "not done after 2 s"
    child = int((tmp_path / "hangs.log").read_text().splitlines()[-1])
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}/stat").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, os.listdir("/proc")
        time.sleep(0.05)


@pytest.mark.parametrize(("arguments", "message"), [
    (["tests", "--ranks", "1"], "expected --ranks of 2 or more, got 1"),
    (["measurements", "--only", "nothing"], "expected --only of words in bench_bf16, .*, got \\['nothing'\\]"),
])  # fmt: skip
def test_bad_arguments(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = whole(*arguments, out=tmp_path)
    assert done.returncode == 2
    assert re.search(message, done.stderr), done.stderr

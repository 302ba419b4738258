"""Runs all tests on GPUs, or all measurements, on all GPUs of a host, one after the other: two commands.

    python benchmarks/whole_host.py tests --out build/host
    python benchmarks/whole_host.py measurements --out build/host

Each run has a time limit of its own; one that fails or hangs is ended with its processes, and the next one starts. Its
output is in FOLDER/<name>.log, results are in FOLDER/results. A line for each says how it ended; the exit status is 1
if one failed. Kernels of two runs would wait for each other, so nothing else may use the GPUs. --list shows the
commands, --only takes those whose names have a word; --tiny makes the measurements those of a machine without a GPU,
over gloo, which shows that every command runs.
"""

from __future__ import annotations

import argparse
import glob
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
END_SECONDS = 20.0  # for a run to end after its time
SLOW_TESTS = {"op_soak": 900.0, "graph_soak": 900.0, "own_gemm_soak": 900.0, "leaks": 900.0}
TEST_SECONDS = 600.0
COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
PRODUCTS = ["ag_gemm", "gemm_rs", "gemm_ar"]
# Protocols of the custom collectives that have limits, and sizes around these (collectives/select.cpp).
PROTOCOLS = "auto,ll,ll128,simple,two_shot"
LIMITS = ["1K", "8K", "64K", "256K", "512K", "1M", "2M", "4M", "8M", "16M"]


@dataclass
class Run:
    """A command and its time limit in seconds. Arguments with * are the files of that name when it starts."""

    name: str
    command: list[str]
    limit: float


def torchrun(ranks: int, *command: str) -> list[str]:
    return [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *command]


def tests(ranks: int) -> list[Run]:
    """Returns a run for each file: kernels that wait for other ranks must not wait for those of another file."""
    names = sorted(path.stem.removeprefix("test_") for path in (ROOT / "tests/python/gpu").glob("test_*.py"))
    runs = [
        Run(f"test_{name}", torchrun(ranks, "-m", "pytest", "-q", f"tests/python/gpu/test_{name}.py"),
            SLOW_TESTS.get(name, TEST_SECONDS))
        for name in names if name != "torchrun"
    ]  # fmt: skip
    campaign = [PYTHON, "tests/python/faults/campaign.py", "--backend", "nccl", "--ranks", str(ranks)]
    jax = [PYTHON, "-m", "pytest", "-q", "tests/python/jax", "-k", "gpus"]
    return [*runs, Run("fault_campaign", campaign, 1200), Run("test_jax", jax, TEST_SECONDS)]


def meshes(ranks: int) -> list[str]:
    """Returns the meshes of the training step: tensor parallelism alone, and of half with two replicas."""
    return [f"tp={ranks}", *([f"dp=2:tp={ranks // 2}"] if ranks >= 4 and ranks % 2 == 0 else [])]


def measurements(ranks: int, out: Path, tiny: bool) -> list[Run]:
    """Returns the operators and collectives beside their peers, choices, layers, the step and what was predicted."""
    results = str(out / "results")
    bench = [PYTHON, "-m", "torch_overlap", "bench"]
    measured = ["--tp", str(ranks), "--rounds", "2" if tiny else "30", *(["--mode", "eager"] if tiny else [])]
    sizes = ["1K", "64K"] if tiny else LIMITS
    shapes = [flag for size in sizes for flag in ("--shape", size)]
    models = ["--tiny"] if tiny else ["--models", "llama3-8b,llama3-70b"]
    small = ["--tiny"] if tiny else []
    presets = ["llama3-8b"] if tiny else ["llama3-8b", "llama3-70b"]
    plan = [PYTHON, "-m", "torch_overlap", "plan"]
    runs = [Run(f"bench_{kind}", [*bench, *PRODUCTS, *measured, "--set", kind, "--json", f"{results}/{kind}.json"], 900)
            for kind in (["tiny"] if tiny else ["bf16", "fp8", "fp8_rows", "decode"])]  # fmt: skip
    runs += [
        Run("bench_exchanges", [*bench, "a2a_gemm", "gemm_a2a", *measured, "--set", "tiny" if tiny else "bf16",
                                "--json", f"{results}/exchanges.json"], 600),
        Run("bench_collectives", [*bench, *COLLECTIVES, *measured, *shapes,
                                  *([] if tiny else ["--algorithm", PROTOCOLS]), "--json",
                                  f"{results}/collectives.json"], 1800),
        Run("layer", torchrun(ranks, "benchmarks/layer.py", *models, "--out", results), 900),
        Run("llama_step", torchrun(ranks, "benchmarks/llama_step.py", *small, "--out", results), 600),
        Run("train_step", torchrun(ranks, "benchmarks/train_step.py", *small, "--meshes", ",".join(meshes(ranks)),
                                   "--out", results), 900),
        *(Run(f"plan_{name}_{mesh}", [*plan, "--model", name, "--mesh", mesh.replace(":", ",")], 120)
          for name in presets for mesh in meshes(ranks)),
    ]  # fmt: skip
    if not tiny:
        files = [f"{results}/{kind}.json" for kind in ("bf16", "fp8", "fp8_rows", "decode", "exchanges")]
        tune = [PYTHON, "-m", "torch_overlap", "tune", "--results", *files, "--cache", f"{results}/tune.json"]
        check = [PYTHON, "benchmarks/check_goals.py", "benchmarks/goals.json", *files,
                 f"{results}/collectives.json", f"{results}/layer-*.json", f"{results}/llama_step-*.json"]  # fmt: skip
        runs += [Run("tune", tune, 120), Run("goals", check, 120)]
    return runs


def execute(run: Run, log: Path) -> tuple[str, float]:
    """Runs a command in a process group of its own; returns how it ended, and seconds."""
    began = time.monotonic()
    command = [name for part in run.command for name in (sorted(glob.glob(part)) if "*" in part else [part])]
    with log.open("w") as output:
        output.write(shlex.join(command) + "\n")
        output.flush()
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(run.limit)
            ended = "passed" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            ended = f"not done after {run.limit:.0f} s"
        finally:
            _end(process)
    return ended, time.monotonic() - began


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the group of a process: ranks may outlive the command that started them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=("tests", "measurements"))
    add("--ranks", type=int, help="Number of ranks. Default: all GPUs; 2 without a GPU.")
    add("--out", type=Path, default=Path("build/host"), metavar="FOLDER", help="Default: %(default)s.")
    add("--only", nargs="+", default=[], metavar="WORD", help="Runs only those whose names have one of these words.")
    add("--list", action="store_true", help="Prints the commands, and runs none.")
    add("--tiny", action="store_true", help="Measures tiny shapes over gloo.")
    args = parser.parse_args()
    ranks = args.ranks or _gpus() or 2
    if ranks < 2:
        parser.error(f"expected --ranks of 2 or more, got {ranks}")
    out = args.out.resolve()
    every = tests(ranks) if args.what == "tests" else measurements(ranks, out, args.tiny)
    runs = [run for run in every if not args.only or any(word in run.name for word in args.only)]
    if not runs:
        parser.error(f"expected --only of words in {', '.join(run.name for run in every)}, got {args.only}")
    if args.list:
        print("\n".join(f"{run.name} ({run.limit:.0f} s): {shlex.join(run.command)}" for run in runs))
        return 0
    (out / "results").mkdir(parents=True, exist_ok=True)
    failed = 0
    for run in runs:
        ended, seconds = execute(run, out / f"{run.name}.log")
        failed += ended != "passed"
        print(f"{run.name}: {ended}, {seconds:.0f} s", flush=True)
    print(f"{len(runs) - failed} of {len(runs)} passed on {ranks} ranks; output in {out}")
    return 1 if failed else 0


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())

"""Every code block of README.md and docs/ runs, on two gloo ranks, and prints what the page says: see blocks.py."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blocks import ROOT, Command, Program, commands_of, pages, programs_of, unimported

from torch_overlap.testing import run_ranks

PROGRAMS = [program for page in pages() for program in programs_of(page)]
COMMANDS = [command for page in pages() for command in commands_of(page)]
RUNS = itertools.count(1)
TORCHRUN = ["torchrun", "--standalone", "--nproc_per_node"]


def as_rank(rank: int, size: int, store: Any, run: int, source: str, file: str, folder: str) -> str:
    """Runs a program in a folder as torchrun would start it, and returns what it prints."""
    import torch.distributed as dist

    import torch_overlap

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(store.underlying_store.port), TORCHELASTIC_RUN_ID=str(run)
    )
    printed, path, before = io.StringIO(), list(sys.path), os.getcwd()
    scope: dict[str, Any] = {"__name__": "__main__", "__file__": file}
    try:
        os.chdir(folder)
        with contextlib.redirect_stdout(printed):
            if source:
                exec(compile(source, file, "exec"), scope)
            else:
                sys.path.insert(0, str(Path(file).parent))
                runpy.run_path(file, run_name="__main__")
    finally:
        sys.path[:] = path
        os.chdir(before)
    assert not dist.is_initialized(), "expected destroy_process_group() at the end of the program"
    assert torch_overlap.comm_names() == [], "expected finalize() at the end of the program"
    return printed.getvalue()


def on_ranks(size: int, source: str, file: str, folder: Path) -> list[str]:
    run = next(RUNS)
    env = {
        "RANK": "", "LOCAL_RANK": "", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "", "TORCHELASTIC_RESTART_COUNT": str(run), "TORCHCOMM_TIMEOUT_SECONDS": "60",
        "TORCHCOMM_ABORT_ON_ERROR": "0", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    return run_ranks(as_rank, size, run, source, file, str(folder), comm=False, timeout=120, env=env)


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """Returns the modules that a program has after its first lines."""
    code = "import sys, torch, torch_overlap; print(*sys.modules)"
    return set(in_process([sys.executable, "-c", code], ROOT).split())


def in_process(words: list[str], folder: Path) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def same(lines: list[str]) -> list[str]:
    """Returns the parts of lines in an order of their own, without the digits in which machines differ.

    A part begins where a line or the name of a rank does: two ranks that print at once may share a line.
    """
    parts = (part for line in lines for part in re.split(r"(?=(?:rank|worker) \d)", line))
    return sorted(re.sub(r"\d+\.\d+(e[-+]?\d+)?", "<number>", part.rstrip()) for part in parts if part.strip())


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program(program: Program, tmp_path: Path, loaded: set[str]) -> None:
    assert unimported(program.source, loaded) == set()
    if program.is_compiled_only:
        compile(program.source, program.page, "exec")
        return
    if program.needs:
        pytest.importorskip(program.needs)
    if program.runs == "process":
        (tmp_path / "program.py").write_text(program.source)
        printed = in_process([sys.executable, "program.py"], tmp_path)
    else:
        printed = on_ranks(2, program.source, program.page, tmp_path)[0]
    if program.output:
        assert same(printed.splitlines()) == same(program.output)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_command(command: Command, tmp_path: Path) -> None:
    words = command.words
    if words[: len(TORCHRUN)] == TORCHRUN:
        assert len(words) == len(TORCHRUN) + 2, f"{command.name}: expected a file without arguments"
        printed = "".join(on_ranks(int(words[-2]), "", str(ROOT / words[-1]), tmp_path))
    else:
        assert words[0] == "python", f"{command.name}: expected torchrun or python before output, got {words[0]}"
        printed = in_process([sys.executable, *words[1:]], ROOT)
    assert same(printed.splitlines()) == same(command.output)


def test_a_missing_import_is_found(loaded: set[str]) -> None:
    source = "import torch\ntorch.distributed.fsdp.fully_shard(torch.nn.functional.gelu)\n"
    assert unimported(source, loaded) == {"torch.distributed.fsdp"}
    assert unimported(f"from torch.distributed.fsdp import fully_shard\n{source}", loaded) == set()


def test_the_pages_have_programs() -> None:
    assert len(PROGRAMS) > 10
    assert sum(program.is_compiled_only for program in PROGRAMS) < len(PROGRAMS) / 4

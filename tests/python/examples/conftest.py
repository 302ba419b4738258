import importlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
SECONDS = 300
MARK = "TORCH_OVERLAP_TEST_RUN"


class Launcher:
    """Starts example programs on ranks of this machine. What still runs at the end of the test is killed."""

    def __init__(self) -> None:
        self.mark = f"{MARK}={uuid.uuid4()}"

    def start(self, command: list[str], *, gpu: bool = False, **variables: str) -> "subprocess.Popen[str]":
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env[MARK] = self.mark.removeprefix(f"{MARK}=")
        if not gpu:
            env["CUDA_VISIBLE_DEVICES"] = ""
        return subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def torchrun_command(self, ranks: int, program: str, *arguments: object) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        return [*torchrun, str(EXAMPLES / program), *map(str, arguments)]

    def torchrun(self, ranks: int, program: str, *arguments: object, gpu: bool = False) -> tuple[int, str]:
        """Exit code and output of the whole run."""
        process = self.start(self.torchrun_command(ranks, program, *arguments), gpu=gpu)
        output, _ = process.communicate(timeout=SECONDS)
        return process.returncode, output

    def running(self) -> list[int]:
        """The processes that this launcher's programs have left, directly or not."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def all_gone(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.running():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def kill_all(self) -> None:
        for pid in self.running():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.kill_all()


@pytest.fixture
def gpt(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of examples/gpt by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: importlib.import_module(f"gpt.{name}")

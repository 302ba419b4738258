"""Starts programs for a test, and finds the processes that they leave."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import nullcontext, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SECONDS = 300
MARK = "TORCH_OVERLAP_TEST_RUN"


class Launcher:
    """Starts programs on ranks of this machine. Processes that still run at the end of the test are killed,
    including those that torchrun started in sessions of their own."""

    def __init__(self) -> None:
        self.mark = f"{MARK}={uuid.uuid4()}"

    def start(
        self, command: list[str], *, gpu: bool = False, output: Path | None = None, **variables: str
    ) -> "subprocess.Popen[str]":
        """Starts `command`. `output` is the file to print to; without it, stdout is a pipe, which the caller must
        read."""
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env[MARK] = self.mark.removeprefix(f"{MARK}=")
        if not gpu:
            env["CUDA_VISIBLE_DEVICES"] = ""
        with nullcontext(subprocess.PIPE) if output is None else output.open("w") as stdout:
            return subprocess.Popen(
                command, env=env, stdout=stdout, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )

    def torchrun_command(self, ranks: int, program: str, *arguments: object) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        return [*torchrun, str(EXAMPLES / program), *map(str, arguments)]

    def torchrun(self, ranks: int, program: str, *arguments: object, gpu: bool = False) -> tuple[int, str]:
        """Returns the exit code and the output of the whole run."""
        process = self.start(self.torchrun_command(ranks, program, *arguments), gpu=gpu)
        output, _ = process.communicate(timeout=SECONDS)
        return process.returncode, output

    def running(self) -> list[int]:
        """Returns the processes that this launcher's programs have left, directly or not."""
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
        while found := self.running():  # again: one of them may have started another
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def free_port() -> int:
    """Returns a port that can be named before it is bound: the kernel does not give it to connections or to port 0."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [port for port in range(10000, 65536) if not first <= port <= last]
    while True:
        with suppress(OSError), socket.socket() as probe:
            port = random.SystemRandom().choice(others)
            probe.bind(("127.0.0.1", port))
            return port

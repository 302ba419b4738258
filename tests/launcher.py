"""Starts programs for a test, and finds the processes that they leave."""

import atexit
import functools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO

from torch_overlap.testing._forkserver import ForkedProcess, ForkServer

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SECONDS = 300
RUN_SECONDS = 120
MARK = "TORCH_OVERLAP_TEST_RUN"


class Program:
    """A program that runs in a fork of a process that has imported torch."""

    def __init__(self, process: ForkedProcess, output: IO[bytes]) -> None:
        self._process, self._output = process, output
        self.send_signal, self.kill = process.send_signal, process.kill

    def wait(self, seconds: float = SECONDS) -> int:
        """Returns the exit status."""
        code = self._process.wait(seconds)
        assert code is not None, f"the program did not end in {seconds} s:\n{self.printed()}"
        return code

    def poll(self) -> int | None:
        """Returns the exit status, or None if it still runs."""
        return self._process.wait(0)

    def printed(self) -> str:
        return os.pread(self._output.fileno(), 1 << 24, 0).decode(errors="replace")


class Launcher:
    """Starts programs on ranks of this machine. Processes that still run at the end of the test are killed,
    including those that torchrun started in sessions of their own."""

    def __init__(self) -> None:
        self.mark = f"{MARK}={uuid.uuid4()}"
        self.forks: list[Program] = []

    def fork(
        self, program: Path | str, *arguments: object, output: IO[bytes] | None = None, **variables: str
    ) -> Program:
        """Starts a program, or code ("-c"), in a fork, without a GPU."""
        env = self.environment(gpu=False, **variables)
        output = tempfile.TemporaryFile() if output is None else output  # noqa: SIM115
        request = {"argv": [str(program), *map(str, arguments)], "env": env}
        self.forks.append(Program(server().fork(request, output.fileno()), output))
        return self.forks[-1]

    def fork_ranks(self, ranks: int, program: Path | str, *arguments: object) -> list[Program]:
        """Starts the ranks of an example, a program or a module ("-m") as torchrun would. All print to one file."""
        output, port = tempfile.TemporaryFile(), free_port()  # noqa: SIM115
        program = program if program == "-m" else EXAMPLES / program
        return [
            self.fork(program, *arguments, output=output, RANK=str(rank), WORLD_SIZE=str(ranks),
                      LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            for rank in range(ranks)
        ]  # fmt: skip

    def run_ranks(self, ranks: int, program: Path | str, *arguments: object) -> tuple[int, str]:
        """Returns the exit code and the output of all ranks."""
        started = self.fork_ranks(ranks, program, *arguments)
        codes = [process.wait() for process in started]
        return max(codes, key=abs), started[0].printed()

    def start(
        self, command: list[str], *, gpu: bool = False, output: Path | None = None, **variables: str
    ) -> "subprocess.Popen[str]":
        """Starts `command`. `output` is the file to print to; without it, stdout is a pipe, which the caller must
        read."""
        env = self.environment(gpu, **variables)
        with nullcontext(subprocess.PIPE) if output is None else output.open("w") as stdout:
            return subprocess.Popen(
                command, env=env, stdout=stdout, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )

    def environment(self, gpu: bool, **variables: str) -> dict[str, str]:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env[MARK] = self.mark.removeprefix(f"{MARK}=")
        if not gpu:
            env["CUDA_VISIBLE_DEVICES"] = ""
        return env

    def torchrun_command(self, ranks: int, program: str, *arguments: object) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        return [*torchrun, str(EXAMPLES / program), *map(str, arguments)]

    def torchrun(self, ranks: int, program: str, *arguments: object, gpu: bool = False) -> tuple[int, str]:
        """Returns the exit code and the output of the whole run. Without GPUs torchrun itself is a fork."""
        command = self.torchrun_command(ranks, program, *arguments)
        if not gpu:
            forked = self.fork(*command[1:])
            return forked.wait(), forked.printed()
        process = self.start(command, gpu=gpu)
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
        for program in self.forks:
            program.kill()
        while found := self.running():  # again: one of them may have started another
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


@functools.cache
def server() -> ForkServer:
    started = ForkServer([str(Path(__file__).with_name("program_server.py"))])
    atexit.register(started.kill)
    return started


def run_code(code: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs `python -c code` in a fork of a process that has imported torch."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    pipes = os.pipe(), os.pipe()  # no files: the code may limit their size
    process = server().fork({"argv": ["-c", code], "env": env}, *(write for _, write in pipes))
    for _, write in pipes:
        os.close(write)
    with ThreadPoolExecutor(len(pipes)) as pool:
        reads = [pool.submit(read_all, read) for read, _ in pipes]
        try:
            status = process.wait(RUN_SECONDS)
        finally:
            process.kill()
        printed = [read.result() for read in reads]
    assert status is not None, f"the code did not end in {RUN_SECONDS} s:\n{printed}"
    return subprocess.CompletedProcess(["-c"], status, *printed)


def read_all(fd: int) -> str:
    with os.fdopen(fd, "rb") as pipe:
        return pipe.read().decode(errors="replace")


def free_port() -> int:
    """Returns a port that can be named before it is bound: the kernel does not give it to connections or to port 0."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [port for port in range(10000, 65536) if not first <= port <= last]
    while True:
        with suppress(OSError), socket.socket() as probe:
            port = random.SystemRandom().choice(others)
            probe.bind(("127.0.0.1", port))
            return port

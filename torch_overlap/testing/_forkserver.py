"""A process that has imported torch and forks others: an import of torch takes longer than most tests."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

START_SECONDS = 180.0  # includes importing torch on a loaded machine
MAX_REQUEST_BYTES = 1 << 16
MAX_FDS = 2


class ForkServer:
    """Starts `python <command> <fd>`, which imports what its forks need and calls serve_forks(fd, ...)."""

    def __init__(self, command: Sequence[str]) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(p or os.getcwd() for p in sys.path))
            self._process = subprocess.Popen(
                [sys.executable, "-u", *command, str(theirs.fileno())],
                env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            )  # fmt: skip

    def is_running(self) -> bool:
        return self._process.poll() is None

    def fork(self, request: Any, output: int, *fds: int) -> ForkedProcess:
        """Returns a new process, which prints to `output`, and has `request` and `fds`."""
        return ForkedProcess(self, self.ask({"fork": request}, [output, *fds], START_SECONDS))

    def ask(self, request: dict[str, Any], fds: Sequence[int], seconds: float) -> Any:
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            self._socket.settimeout(seconds)
            reply = self._socket.recv(MAX_REQUEST_BYTES)
        except OSError as error:
            reply, reason = b"", str(error)
        else:
            reason = "it ended"
        if not reply:
            self.kill()
            printed = os.pread(self._log.fileno(), 1 << 16, 0).decode(errors="replace")
            raise RuntimeError(f"run_ranks: expected an answer of the process that forks ranks: {reason}\n{printed}")
        return json.loads(reply)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()


class ForkedProcess:
    """A process that a server has forked, and alone can wait for."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self._pid = pid
        self._code: int | None = None

    def send_signal(self, number: int) -> None:
        if self._code is None:  # else another process may have its number
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def wait(self, seconds: float) -> int | None:
        """Returns its exit status, negative for a signal, or None if it still runs."""
        if self._code is None:
            request = {"wait": self._pid, "seconds": seconds}
            self._code = self._server.ask(request, [], seconds + START_SECONDS)
        return self._code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        with contextlib.suppress(RuntimeError):  # the server has ended, and its processes with it
            self.wait(10)


def serve_forks(fd: int, body: Callable[[Any, list[int]], None]) -> None:
    """Serves the requests of a ForkServer until it is gone. Returns in each fork too, after `body(request, fds)`."""
    server = socket.socket(fileno=fd)
    _end_with_parent()
    gc.collect()
    gc.freeze()  # a collection in a fork copies none of these pages
    while True:
        data, fds, _, _ = socket.recv_fds(server, MAX_REQUEST_BYTES, MAX_FDS)
        if not data:
            return
        request = json.loads(data)
        if "fork" not in request:
            server.send(json.dumps(_wait(request["wait"], request["seconds"])).encode())
            continue
        pid = os.fork()
        if pid == 0:
            _end_with_parent()
            server.close()
            os.dup2(fds[0], 1)
            os.dup2(fds[0], 2)
            os.close(fds[0])
            body(request["fork"], fds[1:])
            return
        for fd in fds:
            os.close(fd)
        server.send(json.dumps(pid).encode())


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _wait(pid: int, seconds: float) -> int | None:
    """Returns the exit status of a child, or None if it still runs after that time."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)

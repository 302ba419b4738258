"""The rank processes of this process. They live until it exits, or until one of them dies or hangs."""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any

from torch_overlap.testing._body import Job, Task
from torch_overlap.testing._forkserver import START_SECONDS, ForkServer
from torch_overlap.testing._report import Outcome, unpickled

GRACE_SECONDS = 15.0  # time that the other ranks have after the first failure
LOG_BYTES = 8000
NUM_SERVERS = 2  # forks have the hash seed of their server: sets of neighbours iterate in different orders
# Ranks are likely to need what this process has imported of these.
PRELOADED = ("pytest", "torch.distributed.tensor", "torch._dynamo", "torch._inductor.compile_fx")


class Worker:
    """One process, its pipe and the file with its output."""

    def __init__(self, server: ForkServer) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        self.pipe: Connection[Any, Any]
        self.pipe, theirs = Pipe()
        with theirs:
            self.process = server.fork(None, self.log.fileno(), theirs.fileno())
        self.ready = False
        self.log_start = 0

    def await_ready(self) -> None:
        if self.ready:
            return
        try:
            if not self.pipe.poll(START_SECONDS):
                raise RuntimeError(
                    f"run_ranks: a rank process did not start in {START_SECONDS:.0f} s\n{self.printed()}"
                )
            self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"run_ranks: a rank process {self.end()} at start\n{self.printed()}") from None
        self.ready = True

    def printed(self) -> str:
        """Returns the last lines of its output in this call."""
        size = os.fstat(self.log.fileno()).st_size
        start = max(self.log_start, size - LOG_BYTES)
        return os.pread(self.log.fileno(), size - start, start).decode(errors="replace")

    def stacks(self) -> str:
        """Returns the stacks of its Python threads."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        return self.printed()

    def end(self) -> str:
        code = self.process.wait(10)
        if code is None:
            return "closed its pipe"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def kill(self) -> None:
        self.process.kill()
        self.pipe.close()
        self.log.close()


class Pool:
    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._servers: dict[int, ForkServer] = {}
        self._store: Any = None
        atexit.register(self._end)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _end(self) -> None:
        self.close()
        for server in self._servers.values():
            server.kill()

    def run(self, make_task: Callable[[int, int], Task], job: Job) -> dict[int, Outcome]:
        """Runs each rank's task in its own process. Afterwards every process is idle, or the pool is replaced."""
        port = self._ensure_workers(job.size)
        workers = self._workers[: job.size]
        for rank, worker in enumerate(workers):
            worker.log_start = os.fstat(worker.log.fileno()).st_size
            worker.pipe.send(make_task(rank, port))
        outcomes: dict[int, Outcome] = {}
        healthy = False
        try:
            healthy = self._collect(workers, job, outcomes)
        finally:
            if not healthy:
                self.close()
        return outcomes

    def _collect(self, workers: list[Worker], job: Job, outcomes: dict[int, Outcome]) -> bool:
        """Fills `outcomes`; returns False if a rank died, did not finish in time, or failed with process groups of its
        own."""
        healthy = True
        deadline = time.monotonic() + job.timeout
        pending: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(workers)}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in pending.values():
                    where = workers[rank].stacks()
                    outcomes[rank] = Outcome(
                        False, error=f"did not end; killed. Its threads, and what it printed:\n{where}"
                    )
                return False
            for pipe in ready:
                rank = pending.pop(pipe)
                try:
                    outcomes[rank] = unpickled(workers[rank].pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    worker = workers[rank]
                    outcomes[rank] = Outcome(False, error=f"{worker.end()}; it printed:\n{worker.printed()}")
                    healthy = False
                if not outcomes[rank].ok:
                    # The state of torch's process groups after a failed body is unknown.
                    healthy = healthy and (job.comm or bool(outcomes[rank].skipped))
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return healthy

    def _ensure_servers(self, size: int) -> dict[int, ForkServer]:
        for number in range(min(size, NUM_SERVERS)):
            if number not in self._servers or not self._servers[number].is_running():
                loaded = [name for name in PRELOADED if name in sys.modules]
                self._servers[number] = ForkServer(["-m", "torch_overlap.testing._worker", *loaded])
        return self._servers

    def _ensure_workers(self, size: int) -> int:
        """Ensures at least `size` processes, and returns the port of their rendezvous store."""
        import torch.distributed as c10d

        dist: Any = c10d
        if self._store is None:
            # Any free port, without a wait: clients connect and disconnect with the calls.
            self._store = dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_SECONDS)
            )
        servers = self._ensure_servers(size)
        try:
            while len(self._workers) < size:
                self._workers.append(Worker(servers[len(self._workers) % NUM_SERVERS]))
            for worker in self._workers[:size]:
                worker.await_ready()
        except BaseException:
            self.close()
            raise
        return int(self._store.port)


_pool: Pool | None = None
_calls = itertools.count()


def pool() -> Pool:
    global _pool
    if _pool is None:
        _pool = Pool()
    return _pool


def call_name() -> str:
    """Returns a name that is unique in this process, as a prefix of communicators and store keys."""
    return f"ranks{next(_calls)}"

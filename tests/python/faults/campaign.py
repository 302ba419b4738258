"""Fault campaign: during every operation one rank is killed, stopped or absent, and the others survive.

    python tests/python/faults/campaign.py --backend nccl --ranks 2 --json out.json
    python tests/python/faults/campaign.py --backend gloo --ranks 3 --faults kill,stop,absent --parallel 4

A case: new rank processes loop over one operation; the last rank gets the fault at a random moment. Every survivor
must get an error within the timeout and the margin (1 s on GPUs, 5 s on the CPU), then reconfigure without the lost
rank, and compute again. Processes are forked from one that has imported everything, those of the next case while
this one runs. A case that hangs is killed and reported. Exit code 1 if any case failed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast in any form
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's store resolves the name of every client: a name server that does not answer must not be part of the time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import every_op  # noqa: E402

FAULTS = ("kill", "stop", "absent")
START_SECONDS = 120.0  # importing torch and making a communicator on a loaded machine
SETTLE_SECONDS = 60.0  # to reconfigure, and to end


@dataclass(frozen=True)
class Case:
    """One operation and one fault. The victim is the last rank."""

    number: int
    op: str
    fault: str
    backend: str
    ranks: int
    timeout: float
    numel: int

    @property
    def what(self) -> str:
        return f"{self.op} {self.fault}"

    @property
    def victim(self) -> int:
        return self.ranks - 1


# ---- a rank -----------------------------------------------------------------------------------


def rank_main(case: Case, rank: int, port: int, pipe: Connection[Any, Any]) -> None:
    """Reports events through the pipe: ready, running, error, regrouped, or failed."""
    try:
        run_rank(case, rank, port, pipe)
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(("failed", time.time(), f"{type(error).__name__}: {error}"))
        os._exit(1)
    os._exit(0)  # state left by a fault must not delay the end


def run_rank(case: Case, rank: int, port: int, pipe: Connection[Any, Any]) -> None:
    import torch
    import torch.distributed as dist

    import torch_overlap as to
    from torch_overlap.testing import gpu_of

    device = gpu_of(rank) if case.backend == "nccl" else torch.device("cpu")
    torch.ones(1, device=device)  # the context of a GPU is slow to make
    pipe.send(("ready", time.time(), ""))
    if pipe.recv() != "go":
        return
    store = dist.PrefixStore(f"case{case.number}", dist.TCPStore("127.0.0.1", port, is_master=False))
    comm = to.new_comm(
        case.backend, device, "campaign", store=store, rank=rank, size=case.ranks, enable_reconfigure=True,
        timeout=timedelta(seconds=START_SECONDS),
    )  # fmt: skip
    handles: list[Any] = [None] * case.ranks
    to.objcol.all_gather_object(comm, handles, comm.get_init_handle())
    issue = every_op.operation(comm, case.op, case.victim, case.numel)
    for _ in range(2):
        issue(True).wait_blocking()
    comm.barrier(True).wait_blocking()
    comm.set_timeout(timedelta(seconds=case.timeout))
    pipe.send(("running", time.time(), ""))
    try:
        while not (case.fault == "absent" and rank == case.victim and pipe.poll()):
            issue(True).wait_blocking()
    except to.Error as error:
        pipe.send(("error", time.time(), f"{type(error).__name__}: {error}"))
    else:
        pipe.send(("absent", time.time(), ""))
        while True:
            time.sleep(1)
    # A survivor communicates again, in the same process.
    survivors = [handles[r] for r in range(case.ranks) if r != case.victim]
    comm.reconfigure(1, survivors, timeout=timedelta(seconds=SETTLE_SECONDS / 2))
    comm.set_timeout(timedelta(seconds=SETTLE_SECONDS / 2))  # the timed part is over
    x = torch.full((1000,), rank + 1.0, device=device)
    comm.all_reduce(x, to.ReduceOp.SUM, True).wait_blocking()
    expected = sum(r + 1.0 for r in range(case.ranks) if r != case.victim)
    if not bool((x == expected).all()):
        raise AssertionError(f"expected {expected} after reconfigure, got {x.unique().tolist()}")
    comm.finalize()
    pipe.send(("regrouped", time.time(), ""))


# ---- the one who hits -------------------------------------------------------------------------


@dataclass
class Ranks:
    """The processes of a case, which prepare by themselves."""

    case: Case
    port: int
    processes: list[Any] = field(default_factory=list)
    pipes: list[Any] = field(default_factory=list)

    def start(self) -> Ranks:
        context = multiprocessing.get_context("forkserver")
        for rank in range(self.case.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(self.case, rank, self.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        return self

    def expect(self, rank: int, what: str, seconds: float) -> tuple[float, str]:
        """Returns the time and the text of the event `what` of the rank.

        Raises:
            RuntimeError: The rank reported another event, none in time, or died.
        """
        who = f"rank {rank} of {self.case.what}"
        try:
            if not self.pipes[rank].poll(max(seconds, 0.0)):
                raise RuntimeError(f"{who}: expected {what!r} within {seconds:.1f} s, got nothing: it hangs")
            said, when, text = self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(5)
            raise RuntimeError(f"{who}: expected {what!r}, it died ({self.processes[rank].exitcode})") from None
        if said != what:
            raise RuntimeError(f"{who}: expected {what!r}, got {said!r}: {text}")
        return when, text

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(30)
            pipe.close()

    def hit(self) -> float:
        """Inflicts the fault on the victim; returns the time of it."""
        victim = self.case.victim
        time.sleep(random.uniform(0.05, 0.3))
        if self.case.fault == "absent":
            self.pipes[victim].send("leave")
            return self.expect(victim, "absent", self.case.timeout + 30)[0]
        os.kill(self.processes[victim].pid, signal.SIGKILL if self.case.fault == "kill" else signal.SIGSTOP)
        return time.time()


def run_case(ranks: Ranks, margin: float) -> dict[str, Any]:
    """Returns a row of the result file; `error` describes the failure, and is empty if there was none."""
    case = ranks.case
    row: dict[str, Any] = {"what": case.what, "us": None, "regroup_us": None, "said": "", "error": "", "peers": {}}
    survivors = [r for r in range(case.ranks) if r != case.victim]
    try:
        for rank in range(case.ranks):
            ranks.expect(rank, "ready", START_SECONDS)
        for pipe in ranks.pipes:
            pipe.send("go")
        for rank in range(case.ranks):
            ranks.expect(rank, "running", START_SECONDS)
        hit = ranks.hit()
        limit = every_op.timeout_of(case.op, case.timeout) + margin
        deadline = time.monotonic() + limit + 15
        errors = [ranks.expect(rank, "error", deadline - time.monotonic()) for rank in survivors]
        row["us"] = max(when for when, _ in errors) * 1e6 - hit * 1e6
        row["said"] = errors[0][1]
        again = [ranks.expect(rank, "regrouped", SETTLE_SECONDS) for rank in survivors]
        row["regroup_us"] = max(when for when, _ in again) * 1e6 - max(when for when, _ in errors) * 1e6
        if row["us"] > limit * 1e6:
            row["error"] = f"survivors raised after {row['us'] / 1e6:.2f} s, expected at most {limit:.2f} s"
    except RuntimeError as error:
        row["error"] = str(error)
    finally:
        ranks.kill()
    return row


def campaign(cases: list[Case], port: int, parallel: int, margin: float) -> Iterator[dict[str, Any]]:
    """Yields the rows, in the order in which the cases end. Each lane prepares the processes of its next case."""
    done: list[dict[str, Any]] = []
    changed = threading.Condition()

    def lane(mine: list[Case]) -> None:
        following: Ranks | None = Ranks(mine[0], port).start()
        for index in range(len(mine)):
            current, following = following, None
            if index + 1 < len(mine):
                following = Ranks(mine[index + 1], port).start()
            assert current is not None
            row = run_case(current, margin)
            with changed:
                done.append(row)
                changed.notify()

    lanes = [cases[k::parallel] for k in range(parallel) if cases[k::parallel]]
    with ThreadPoolExecutor(len(lanes)) as pool:
        running = [pool.submit(lane, mine) for mine in lanes]
        for index in range(len(cases)):
            with changed:
                while len(done) <= index:
                    changed.wait(1)
                    for one in running:
                        if one.done() and one.exception():
                            raise RuntimeError("a lane of the campaign failed") from one.exception()
            yield done[index]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ops", default=",".join(every_op.NAMES), help="some of the operations")
    parser.add_argument("--faults", default="kill,stop", help="some of kill, stop, absent")
    parser.add_argument("--timeout", type=float, default=2.0, help="of an operation, in seconds")
    parser.add_argument("--margin", type=float, help="what may come on top: 1 on GPUs, 5 on the CPU")
    parser.add_argument("--numel", type=int, default=0, help="elements a rank: large on GPUs, small on the CPU")
    parser.add_argument("--parallel", type=int, default=1, help="cases at a time")
    parser.add_argument("--json", help="the result file")
    args = parser.parse_args()
    ops, faults = args.ops.split(","), args.faults.split(",")
    for given, known in ((ops, every_op.NAMES), (faults, FAULTS)):
        unknown = [one for one in given if one not in known]
        if unknown:
            parser.error(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
    if args.ranks < 2:
        parser.error(f"expected at least 2 ranks, got {args.ranks}")
    on_gpu = args.backend == "nccl"
    margin = args.margin if args.margin is not None else (1.0 if on_gpu else 5.0)
    numel = args.numel or (1 << 20 if on_gpu else 1 << 12)
    pairs = [(op, fault) for op in ops for fault in faults]
    cases = [Case(i, op, fault, args.backend, args.ranks, args.timeout, numel) for i, (op, fault) in enumerate(pairs)]

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch_overlap", "every_op"])
    import torch.distributed as dist

    store: Any = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_SECONDS)
    )
    begin = time.monotonic()
    rows = []
    for row in campaign(cases, store.port, args.parallel, margin):
        rows.append(row)
        times = "" if row["us"] is None else f"raised after {row['us'] / 1e6:6.2f} s"
        times += "" if row["regroup_us"] is None else f", regrouped in {row['regroup_us'] / 1e6:5.2f} s"
        print(f"{len(rows):3}/{len(cases)} {row['what']:28} {times} {row['error'] and 'FAILED: ' + row['error']}",
              flush=True)  # fmt: skip
    bad = [row["what"] for row in rows if row["error"]]
    print(f"{len(rows)} cases in {time.monotonic() - begin:.0f} s, {len(bad)} failed {bad or ''}", flush=True)
    if args.json:
        from torch_overlap.tools.bench.result import result, text

        command = f"python tests/python/faults/campaign.py --backend {args.backend} --ranks {args.ranks}"
        command += f" --faults {args.faults} --parallel {args.parallel}"
        Path(args.json).write_text(text(result("fault_campaign", rows, command)))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

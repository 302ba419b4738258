"""For every operation: a rank that never calls, that is killed, that is stopped."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from every_op import NAMES, WITHOUT_OPTIONS, Issue, operation

import torch_overlap as to
from torch_overlap.testing import run_ranks

MARGIN = 5.0  # seconds that loaded cores may add to a timeout: the library's guarantee there
SOON = timedelta(seconds=0.4)


def until_it_fails(issue: Issue, **options: object) -> None:
    """Issues until an error: an operation that only sends succeeds as long as the peer receives."""
    while True:
        issue(True, **options).wait()


def check_never_called(comm: to.TorchComm, name: str) -> None:
    victim = comm.get_size() - 1
    issue = operation(comm, name, victim, numel=256)
    issue(True).wait()
    meeting = None if name == "reconfigure" else comm.split(list(range(comm.get_size())))
    comm.barrier(False)
    options = {} if name in WITHOUT_OPTIONS else {"timeout": SOON}
    if comm.get_rank() == victim:
        if meeting is None:
            time.sleep(1.0)
    else:
        if not options:
            comm.set_timeout(SOON)

        begin = time.monotonic()
        with pytest.raises(to.Error) as raised:  # a timeout, or the notification of another rank's
            until_it_fails(issue, **options)
        limit = 3.0 if name == "reconfigure" else SOON.total_seconds()
        assert time.monotonic() - begin < limit + MARGIN
        assert f"'{comm.get_name()}" in str(raised.value)  # or of a child of it
    if meeting is not None:  # leaving earlier would be another error
        meeting.barrier(False)
        meeting.finalize()
    comm.abort()


@pytest.mark.parametrize("backend", ["gloo", "local"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "reconfigure"])
def test_a_rank_that_never_calls(name: str, backend: str) -> None:
    run_ranks(check_never_called, 3, name, backend=backend)


def check_left(comm: to.TorchComm, name: str, seed: int) -> None:
    """The equivalent of a kill for threads: the victim disappears in the middle, perhaps in its own call."""
    victim = comm.get_size() - 1
    issue = operation(comm, name, victim, numel=256)
    issue(True).wait()
    comm.barrier(False)
    comm.set_timeout(timedelta(seconds=1))
    if comm.get_rank() == victim:
        threading.Timer(random.Random(seed).uniform(0.0, 0.1), comm.abort).start()
    begin = time.monotonic()
    with pytest.raises(to.Error):
        until_it_fails(issue)
    assert time.monotonic() - begin < 0.1 + 1.0 + MARGIN
    comm.abort()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "reconfigure"])
def test_a_rank_leaves_in_the_middle(name: str, seed: int) -> None:
    run_ranks(check_left, 3, name, seed, backend="local")


def check_never_reconfigured(rank: int, size: int, store: Any) -> None:
    comm = to.new_comm("gloo", "cpu", "never", store=store, rank=rank, size=size, enable_reconfigure=True)
    check_never_called(comm, "reconfigure")


def test_a_rank_that_never_reconfigures() -> None:
    run_ranks(check_never_reconfigured, 3, comm=False)


def campaign(tmp_path: Path, *arguments: str) -> list[dict[str, object]]:
    out = tmp_path / "out.json"
    script = str(Path(__file__).with_name("campaign.py"))
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, script, *arguments, "--json", str(out)],
                          env=env, capture_output=True, text=True, timeout=500, check=False)  # fmt: skip
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["benchmark"] == "fault_campaign"
    return list(result["rows"])


def test_a_rank_is_killed_or_stopped_in_the_middle_of_every_operation(tmp_path: Path) -> None:
    rows = campaign(tmp_path, "--backend", "gloo", "--ranks", "3", "--timeout", "1", "--parallel", "4",
                    "--margin", str(MARGIN))  # fmt: skip
    assert len(rows) == 2 * len(NAMES)
    assert {row["what"] for row in rows} == {f"{name} {fault}" for name in NAMES for fault in ("kill", "stop")}
    for row in rows:
        assert isinstance(row["us"], float)
        assert row["us"] < (1 + MARGIN) * 1e6

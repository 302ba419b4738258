"""Ranks that are lost while gloo connects them: the timeout applies there too."""

import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from launcher import Launcher

import torch_overlap as to
from torch_overlap import _gloo

MARGIN = 5.0  # seconds that loaded cores may add to a timeout: the library's guarantee there

VICTIM = """
import sys
from datetime import timedelta
import torch.distributed as dist
import torch_overlap as to

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
rank, size = int(sys.argv[2]), int(sys.argv[3])
store.set(f"ready/{rank}", "yes")
to.new_comm("gloo", "cpu", "connecting", store=store, rank=rank, size=size, timeout=timedelta(seconds=60))
"""


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_while_it_connects(
    fault: signal.Signals, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, seconds = 3, 10.0
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    victims = [launcher.fork("-c", VICTIM, store.port, rank, size) for rank in range(1, size)]
    connect: Callable[..., Any] = _gloo._connect

    def connect_when_they_are_lost(*arguments: Any) -> Any:
        time.sleep(2.0)  # they publish their addresses, and wait for this rank
        for victim in victims:
            victim.send_signal(fault)
        return connect(*arguments)

    monkeypatch.setattr(_gloo, "_connect", connect_when_they_are_lost)
    store.wait([f"ready/{rank}" for rank in range(1, size)], timedelta(seconds=120))
    begin = time.monotonic()
    with pytest.raises(to.Error, match="3 ranks within"):
        to.new_comm("gloo", "cpu", "connecting", store=store, rank=0, size=size, timeout=timedelta(seconds=seconds))
    # The meeting and the connection have a timeout each, and all ranks had arrived at the meeting.
    assert time.monotonic() - begin < seconds + MARGIN

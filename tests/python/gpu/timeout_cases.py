"""Waits on the device that expire, and the error of the host."""

import time

PART = {"begin": "begin", "chunk": "do its part of"}


def expired(comm, rank, what):
    """Returns the pattern of the error of a wait for `rank` in an operation over a channel. If several ranks wait,
    the first one to give up notifies them while they begin."""
    message = rf"expected rank {rank} to {PART[what]} operation \d+ within \d+ ms, got operation \d+"
    return message if comm.get_size() == 2 else rf"{message}|got one that has given up"


def run_until_an_error(run):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        run()
        time.sleep(0.05)

"""Waits on the device that end without what they wait for, and what the host then says."""

import time

PART = {"begin": "begin", "chunk": "do its part of"}


def expired(comm, rank, what):
    """The message of a wait for `rank` in an operation over a channel. Of several ranks that wait, the first to give up
    while others begin tells them."""
    message = rf"expected rank {rank} to {PART[what]} operation \d+ within \d+ ms, got operation \d+"
    return message if comm.get_size() == 2 else rf"{message}|got one that has given up"


def run_until_an_error(run):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        run()
        time.sleep(0.05)

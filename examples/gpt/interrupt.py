"""Ctrl-C in a program of many ranks. Imports nothing heavy: it serves while torch is still being imported."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, Protocol

EXIT_CODE = 130  # what shells report for a program that SIGINT ended
GRACE_SECONDS = 5.0  # for a signal to come after its effect at a peer; for an abort to return
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Abortable(Protocol):
    def abort(self) -> None: ...
    def register_abort_hook(self, callback: Callable[[], object]) -> object: ...


class Interrupt:
    """From its creation on, SIGINT and SIGTERM end this rank quietly with exit code 130. Made in the main thread.

    Python runs a signal handler between two instructions of the main thread; a thread that waits in a collective for a
    rank that is gone never comes to the next one. So a thread listens on the wakeup descriptor, into which the signal
    itself writes; it aborts the communicator, which ends every wait here and at the peers, and then the process.
    """

    def __init__(self) -> None:
        self._comm: Abortable | None = None
        self._received = threading.Event()
        self._is_failure = False  # no signal came: nothing waits for one again
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # the thread does it all; the main thread goes on until then
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, name="interrupt", daemon=True)
        self._watcher.start()

    def protect(self, comm: Abortable) -> None:
        """The communicator to abort when a signal comes. An error of its own, perhaps from a peer's signal, waits."""
        self._comm = comm
        comm.register_abort_hook(self.hold_if_received)

    def hold_if_received(self) -> None:
        """For a failure, on any thread: does not return if a signal was the reason (here, or first at a peer)."""
        if self._is_failure or threading.current_thread() is self._watcher:
            return
        if self._received.wait(GRACE_SECONDS):
            threading.Event().wait()  # the watching thread is about to end the process
        self._is_failure = True

    def _watch(self) -> NoReturn:
        while (number := self._read.recv(1)[0]) not in SIGNALS:
            pass
        self._received.set()
        if os.environ.get("RANK", "0") == "0":
            print(f"\n{signal.Signals(number).name}: ending all ranks", file=sys.stderr, flush=True)
        if self._comm is not None:
            backstop = threading.Timer(GRACE_SECONDS, os._exit, (EXIT_CODE,))
            backstop.daemon = True
            backstop.start()
            self._comm.abort()
        os._exit(EXIT_CODE)

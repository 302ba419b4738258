"""Ctrl-C in a program of many ranks. Imports nothing heavy, so that it works while torch is still being imported."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, Protocol

EXIT_CODE = 130  # the shell's exit code for a program ended by SIGINT
GRACE_SECONDS = 5.0  # for a signal to arrive after its effect at a peer; for an abort to return
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Abortable(Protocol):
    def abort(self) -> None: ...
    def register_abort_hook(self, callback: Callable[[], object]) -> object: ...


class Interrupt:
    """From its creation on, makes SIGINT and SIGTERM end this rank quietly with exit code 130. Created in the main
    thread.

    Python runs a signal handler between two instructions of the main thread; a thread that waits in a collective for a
    dead rank never reaches the next one. Therefore a thread listens on the wakeup descriptor, to which the signal
    itself writes. It aborts the communicator, which ends every wait here and at the peers, and then ends the process.
    """

    def __init__(self) -> None:
        self._comm: Abortable | None = None
        self._received = threading.Event()
        self._is_failure = False  # set if no signal arrived: nothing waits for one again
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        for number in SIGNALS:
            # The watching thread handles it; the main thread continues until then.
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, name="interrupt", daemon=True)
        self._watcher.start()

    def protect(self, comm: Abortable) -> None:
        """Sets the communicator to abort when a signal arrives. Its own errors, perhaps from a peer's signal, wait for
        one."""
        self._comm = comm
        comm.register_abort_hook(self.hold_if_received)

    def hold_if_received(self) -> None:
        """Called on a failure, on any thread. Does not return if a signal was the reason (here, or first at a peer)."""
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

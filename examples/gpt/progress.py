"""A progress bar with loss and tokens per second; plain lines if the output is not a terminal."""

from __future__ import annotations

import sys
import time

from torch import Tensor

WIDTH = 30
LINES = 20  # number of lines of a run without a terminal
REFRESH_SECONDS = 0.25


class Progress:
    """Progress, shown by one rank. Reading a loss waits for the device, so it is read only when something is shown."""

    def __init__(self, steps: int, tokens_per_step: int, *, shown: bool) -> None:
        self.steps, self.tokens_per_step, self.shown = steps, tokens_per_step, shown
        self.terminal = sys.stdout.isatty()
        self.started = self.last_time = time.perf_counter()
        self.last_step = 0

    def update(self, done: int, loss: Tensor) -> None:
        """Updates the bar. `done`: steps issued so far; `loss`: that of the last of them."""
        if not self.shown or not self._is_due(done):
            return
        value = loss.item()
        now = time.perf_counter()
        rate = (done - self.last_step) * self.tokens_per_step / (now - self.last_time)
        self.last_step, self.last_time = done, now
        left = (now - self.started) / done * (self.steps - done)
        count = f"step {done:>{len(str(self.steps))}}/{self.steps}"
        text = f"{count}  loss {value:.4f}  {rate:>9,.0f} tokens/s  {left:4.0f} s left"
        if self.terminal:
            filled = WIDTH * done // self.steps
            text = f"\r[{'#' * filled}{'.' * (WIDTH - filled)}] {text}"
        print(text, end="" if self.terminal and done < self.steps else "\n", flush=True)

    def _is_due(self, done: int) -> bool:
        if done in (1, self.steps):
            return True
        if self.terminal:
            return time.perf_counter() - self.last_time >= REFRESH_SECONDS
        return done % max(1, self.steps // LINES) == 0

    def summary(self) -> str:
        seconds = time.perf_counter() - self.started
        return f"{self.steps} steps in {seconds:.1f} s, {self.steps * self.tokens_per_step / seconds:,.0f} tokens/s"

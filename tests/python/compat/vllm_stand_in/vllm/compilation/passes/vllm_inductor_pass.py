from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import VllmConfig


class VllmInductorPass(InductorPass):
    def __init__(self, config: VllmConfig) -> None:
        self.pass_config = config.compilation_config.pass_config
        self.model_dtype = config.model_config.dtype if config.model_config else None
        self.device = config.device_config.device

    @staticmethod
    def time_and_log(call_fn: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(call_fn)
        def wrapped(self: Any, graph: Any) -> None:
            call_fn(self, graph)

        return wrapped


class VllmPatternMatcherPass(VllmInductorPass):
    matched_count: int = 0

    def dump_patterns(self, config: VllmConfig, pm_pass: Any) -> None:
        self.dumped = len(pm_pass.patterns)

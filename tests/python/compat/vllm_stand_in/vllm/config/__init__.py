"""The parts of vLLM's configuration that the plug-in reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm.config.compilation import CompilationConfig
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig


@dataclass
class DeviceConfig:
    device: str = "cpu"


@dataclass
class VllmConfig:
    model_config: ModelConfig | None = field(default_factory=ModelConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)


_current: list[VllmConfig] = []


@contextmanager
def set_current_vllm_config(
    vllm_config: VllmConfig, check_compile: bool = False, prefix: str | None = None
) -> Iterator[None]:
    _current.append(vllm_config)
    try:
        yield
    finally:
        _current.pop()


def get_current_vllm_config_or_none() -> VllmConfig | None:
    return _current[-1] if _current else None

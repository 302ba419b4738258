from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PassConfig:
    fuse_allreduce_rms: bool = True


@dataclass
class CompilationConfig:
    pass_config: PassConfig = field(default_factory=PassConfig)
    compile_ranges_endpoints: list[int] | None = None
    custom_ops: list[str] = field(default_factory=list)

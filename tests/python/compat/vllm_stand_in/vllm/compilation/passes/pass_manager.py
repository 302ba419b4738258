from __future__ import annotations

from torch import fx
from vllm.compilation.passes.fusion.allreduce_rms_fusion import AllReduceFusionPass
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import VllmConfig
from vllm.config.utils import Range


class FirstPass(InductorPass):
    def __call__(self, graph: fx.Graph) -> None:
        pass


class PostGradPassManager(InductorPass):
    compile_range = Range(1, 1)

    def __init__(self) -> None:
        self.passes: list[InductorPass] = []

    def __call__(self, graph: fx.Graph) -> None:
        for pass_ in self.passes:
            if pass_.is_applicable_for_range(self.compile_range):
                pass_(graph)

    def configure(self, config: VllmConfig) -> None:
        self.passes.append(FirstPass())
        if config.compilation_config.pass_config.fuse_allreduce_rms:
            self.passes.append(AllReduceFusionPass(config))

    def uuid(self) -> str:
        return self.hash_source(*[pass_.uuid() for pass_ in self.passes])

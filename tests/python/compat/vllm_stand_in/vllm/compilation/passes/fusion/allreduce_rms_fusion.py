from __future__ import annotations

from torch import fx
from vllm.compilation.passes.vllm_inductor_pass import VllmPatternMatcherPass


class AllReduceFusionPass(VllmPatternMatcherPass):
    def __call__(self, graph: fx.Graph) -> None:
        """Counts what the passes before it have left."""
        self.matched_count = sum("vllm.all_reduce" in str(node.target) for node in graph.nodes)

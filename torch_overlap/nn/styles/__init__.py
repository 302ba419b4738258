"""Styles for torch.distributed.tensor.parallel.parallelize_module over a mesh of backend "torch_overlap".

A plan names the model's own layers, whose code is unchanged. All parameters become DTensors of the mesh under their old
names, so optimizers, `clip_grad_norm_`, `fully_shard` and checkpoints of torch treat them as whole tensors. For a model
of [batch, sequence, features]:

    parallelize(model, mesh["tp"], {
        "layers.0": ShardInput(),  # from here on each rank has its part of the sequence
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": SharedGather("wq", "wk", "wv"),
        "layers.*.attention.wo": RowParallel(),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": SharedGather("w1", "w3"),
        "layers.*.feed_forward.w2": RowParallel(),
        "norm": SequenceParallel(),
        "output": ColumnParallel(gather_output=True),  # the embedding, which the plan does not name, is replicated
    })

Gradients are complete after backward.

`torch_overlap.mesh.shard_module` accepts the same plans.
"""

from torch_overlap.nn.layout import comm_of
from torch_overlap.nn.styles.adapters import parallelize_adapters
from torch_overlap.nn.styles.base import Style, matching_modules
from torch_overlap.nn.styles.embedding import VocabularyParallel
from torch_overlap.nn.styles.linear import ColumnParallel, RowParallel, SharedGather
from torch_overlap.nn.styles.plan import Replicated, parallelize
from torch_overlap.nn.styles.pretrained import ParallelLoss, Plan, plan_for
from torch_overlap.nn.styles.sequence import GatherSequence, SequenceParallel, ShardInput

__all__ = [
    "ColumnParallel",
    "GatherSequence",
    "ParallelLoss",
    "Plan",
    "Replicated",
    "RowParallel",
    "SequenceParallel",
    "ShardInput",
    "SharedGather",
    "Style",
    "VocabularyParallel",
    "comm_of",
    "matching_modules",
    "parallelize",
    "parallelize_adapters",
    "plan_for",
]

"""Shapes of the transformers that the planner predicts, and the properties of their steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["PRESETS", "Eager", "Transformer"]


@dataclass(frozen=True)
class Eager:
    """An unfused step. Counts the memory traffic of its kernels other than products and attention, from the program.
    Gradients are summed over dp after the backward pass, in one transfer.

    layer: Bytes for each token and hidden unit of a layer, forward and backward: norms, activation, sums, rotations,
        casts.
    parameter: Bytes for each parameter: casts, gradients as they are made and clipped, AdamW in fp32.
    reduced: Bytes for each gradient that is summed over dp: into one buffer with the others, and back.
    rate: Fraction of the memory rate that the kernels of layers reach. Fitted to a measured step on one rank, so it
        includes launches and everything else that is not modelled.
    """

    layer: float
    parameter: float
    reduced: float = 0
    rate: float = 1

    def __post_init__(self) -> None:
        for name in ("layer", "parameter", "reduced"):
            if getattr(self, name) < 0:
                raise ValueError(f"Eager: expected {name} of at least 0 bytes, got {getattr(self, name)}")
        if not 0 < self.rate <= 1:
            raise ValueError(f"Eager: expected a rate above 0, at most 1, got {self.rate}")


@dataclass(frozen=True)
class Transformer:
    """Shapes of the whole model.

    `gated`: two products up and one down (SwiGLU), else one and one. `residual_size`: bytes of an element of the
    residual stream and the norms. `eager`: None for a model whose elementwise kernels are fused, and whose gradients
    are summed while the backward pass runs.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    gated: bool = True
    sequence: int = 8192
    residual_size: int = 2
    eager: Eager | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"Transformer: expected {name} of at least 1, got {getattr(self, name)}")
        if self.hidden % self.heads != 0 or self.heads % self.kv_heads != 0:
            raise ValueError(
                f"Transformer: expected kv_heads that divide heads, and heads that divide hidden, got {self.kv_heads}, "
                f"{self.heads} and {self.hidden}"
            )

    @property
    def layer_parameters(self) -> int:
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.vocabulary * self.hidden + self.hidden


# Bytes of examples/train_gpt.py: tests/python/mesh/test_eager.py counts them again. Halves of heads are strided and
# dtypes mixed, so the rate is fitted to the measured step, on one H200, of the model that communicates explicitly. Of
# its bytes, 12 joined gradients inside an operator when that was measured: they are counted now, at the same time.
RATE = 0.575
_GPT = Transformer("train_gpt", 8, 1024, 16, 16, 4096, 256, gated=False, sequence=1024, residual_size=4)

PRESETS = {
    model.name: model
    for model in (
        replace(_GPT, eager=Eager(layer=264, parameter=76, rate=RATE * 264 / 252)),
        # With --mesh, which rotates in fp32.
        replace(_GPT, name="train_gpt_mesh", eager=Eager(layer=364, parameter=52, reduced=16, rate=RATE)),
        Transformer("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
        Transformer("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
        Transformer("gpt3-175b", 96, 12288, 96, 96, 49152, 50257, gated=False, sequence=2048),
    )
}

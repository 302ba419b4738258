"""Operators that draw random numbers, which would differ between ranks."""

from __future__ import annotations

import torch

from torch_overlap._C import UnsupportedError
from torch_overlap.mesh.aten_call import AtenCall

__all__ = ["refuse_random"]

# Positions of the probability and of the training flag: if either is zero or False nothing is drawn.
_SWITCHES: dict[str, tuple[int, int | None]] = {
    "dropout": (1, 2), "alpha_dropout": (1, 2), "feature_dropout": (1, 2), "feature_alpha_dropout": (1, 2),
    "native_dropout": (1, 2), "scaled_dot_product_attention": (4, None),
    "gru": (5, 6), "lstm": (5, 6), "rnn_relu": (5, 6), "rnn_tanh": (5, 6),
}  # fmt: skip


def refuse_random(call: AtenCall) -> None:
    """Raises UnsupportedError if the operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in call.target.tags:
        return
    name = call.name.removesuffix("_")
    if name in _SWITCHES:
        probability, train = _SWITCHES[name]
        drops = float(call.argument(probability, "p" if train else "dropout_p", 0.0) or 0.0) > 0
        if not drops or (train is not None and not call.argument(train, "train", True)):
            return
    elif name == "rrelu" and not call.argument(3, "training", False):
        return
    raise UnsupportedError(
        f"{call.name}: expected an operator that draws no random numbers, got {call.target}; ranks would draw "
        "different ones: draw plain tensors from one seed on every rank and lay them out, or set the probability to 0"
    )

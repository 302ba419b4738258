"""Text written by the model, byte by byte."""

from __future__ import annotations

import torch

from gpt.training import Trainer


def generate(trainer: Trainer, prompt: str, length: int, *, seed: int, temperature: float = 0.8) -> str:
    """Collective: every rank computes its part of the window and gets the same text."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt.encode())
    for _ in range(length):
        window = text[-trainer.config.sequence :]
        row = trainer.logits_at(window, len(window) - 1)
        chances = torch.softmax(row.cpu() / temperature, dim=0)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text).decode(errors="replace")

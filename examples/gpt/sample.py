"""Text written by the model, byte by byte."""

from __future__ import annotations

import torch

import torch_overlap as to
from gpt.model import GPT


@torch.no_grad()
def generate(model: GPT, comm: to.TorchComm, sequence: int, prompt: str, length: int, *, seed: int,
             temperature: float = 0.8) -> str:  # fmt: skip
    """Collective: every rank computes its rows of the window and gets the same text.

    The logits that matter are those at the last byte: the rank that has this row puts them into a sum over all.
    """
    device, per_rank = comm.get_device(), sequence // comm.get_size()
    first_row = comm.get_rank() * per_rank
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt.encode())
    for _ in range(length):
        window = text[-sequence:]
        last_row = len(window) - 1
        padded = torch.zeros(sequence, 1, dtype=torch.int64)
        padded[: len(window), 0] = torch.tensor(window)
        logits = model(padded[first_row : first_row + per_rank].to(device))
        row = torch.zeros_like(logits[0, 0])
        if first_row <= last_row < first_row + per_rank:
            row = logits[last_row - first_row, 0].clone()
        comm.all_reduce(row, to.ReduceOp.SUM, async_op=False)
        chances = torch.softmax(row.cpu() / temperature, dim=0)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text).decode(errors="replace")

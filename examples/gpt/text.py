"""The text: the source files of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import torch_overlap as to

# Excluded: third-party packages, and folders that are mostly tables or test data.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes to test on; every tenth file is in the second."""

    train: Tensor
    valid: Tensor
    files: int


def read(comm: to.TorchComm) -> Text:
    """Reads the text. Collective: rank 0 reads, the others get its bytes (their Python may be another version)."""
    device = comm.get_device()
    sizes = torch.zeros(3, dtype=torch.int64)
    parts: list[Tensor] = []
    if comm.get_rank() == 0:
        files = stdlib_files()
        parts = [to_bytes(f for i, f in enumerate(files) if (i % 10 == 9) == held_out) for held_out in (False, True)]
        sizes = torch.tensor([parts[0].numel(), parts[1].numel(), len(files)])
    sizes = shared(comm, sizes.to(device)).cpu()
    if comm.get_rank() != 0:
        parts = [torch.empty(int(n), dtype=torch.uint8) for n in sizes[:2]]
    train, valid = (shared(comm, part.to(device)).cpu() for part in parts)
    return Text(train, valid, int(sizes[2]))


def shared(comm: to.TorchComm, tensor: Tensor) -> Tensor:
    comm.broadcast(tensor, 0, async_op=False)
    return tensor


def stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in sorted(root.rglob("*.py")) if not SKIPPED & set(p.relative_to(root).parts)]
    if len(files) < 10:
        raise RuntimeError(f"train_gpt: expected Python's source files in {root}, got {len(files)}; use a full Python")
    return files


def to_bytes(files: Iterable[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in files)), dtype=torch.uint8)


def batch(data: Tensor, *, seed: int, step: int, size: int, sequence: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Returns `rows` of `size` random windows, and the bytes that follow them: two int64 tensors [len(rows), size].

    A pure function of (seed, step): the same windows for any number of ranks.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(data.numel() - sequence, (size,), generator=generator)
    index = torch.arange(rows.start, rows.stop)[:, None] + starts
    return data[index].long(), data[index + 1].long()

"""The style that splits an embedding by vocabulary."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torch_overlap import ops
from torch_overlap._C import StateError, TorchComm
from torch_overlap.nn._computed import expect_own_weight
from torch_overlap.nn.layout import (
    ParameterLayout,
    comm_of,
    compute_locally,
    layout_of,
    replace_parameter,
    set_layout,
    subclass_with,
)
from torch_overlap.nn.styles.base import Style

_ROWS = "_own_rows"  # of a module: the first row of this rank, the number of its rows, and of ranks
_COMPARED = "_compared_tokens"  # of a module: number of forward passes whose tokens were compared
_COMPARISONS = 3


class VocabularyParallel(Style):
    """Splits the rows of an nn.Embedding, or of a subclass that scales its result, over the ranks.

    Each rank looks up the tokens of its part, and the ranks' results are summed. The result is whole on every rank, as
    its gradient must be. A head that is tied to the embedding stays tied under `ColumnParallel`. All ranks must pass
    the same tokens: the first eager forward passes compare them.

    Raises:
        TypeError: not an nn.Embedding.
        StateError: in forward, on all ranks, if they pass different tokens.
        ValueError: the number of ranks does not divide the vocabulary; an embedding with max_norm, scale_grad_by_freq
            or sparse gradients.
    """

    def __init__(self) -> None:
        super().__init__()

    def _embedding(self, module: nn.Module, ranks: int) -> nn.Embedding:
        if not isinstance(module, nn.Embedding):
            raise TypeError(f"VocabularyParallel: expected an nn.Embedding, got {type(module).__name__}; change the "
                            "plan")  # fmt: skip
        expect_own_weight("VocabularyParallel", module)
        if module.num_embeddings % ranks != 0 or module.weight.size(0) != module.num_embeddings:
            raise ValueError(f"VocabularyParallel: expected num_embeddings divisible by {ranks} ranks, got "
                             f"{module.num_embeddings}. Pad the vocabulary, or leave it replicated.")  # fmt: skip
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise ValueError(f"VocabularyParallel: expected an embedding without {option}, got "
                                 f"{getattr(module, option)}. Leave it replicated.")  # fmt: skip
        return module

    def split_dims(self, module: nn.Module, ranks: int) -> dict[str, int]:
        self._embedding(module, ranks)
        return {"weight": 0}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = comm_of(device_mesh)
        size, rank = comm.get_size(), comm.get_rank()
        embedding = self._embedding(module, size)
        self._synchronize(embedding, comm)
        whole = cast("nn.Parameter", embedding.weight)
        part = whole.detach().chunk(size)[rank].clone()
        embedding.weight = nn.Parameter(part, requires_grad=whole.requires_grad)
        set_layout(embedding, ParameterLayout(comm, {"weight": 0}, mesh=device_mesh))
        replace_parameter(embedding, "weight", whole)
        module.__class__ = subclass_with(_OwnTokens, type(module))
        compute_locally(embedding)
        vars(embedding)[_ROWS] = rank * part.size(0), part.size(0), size
        return module


class _OwnTokens(nn.Module):
    """The mixin of a split embedding. Hooks see all tokens and the summed result, as on one rank."""

    padding_idx: int | None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tokens = args[0] if args else kwargs.pop("input")
        layout, (first, rows, size) = layout_of(self), vars(self)[_ROWS]
        assert layout is not None
        _expect_same_tokens(self, tokens, layout.comm)
        own = tokens - first
        # A token outside of the vocabulary stays so, and the lookup raises.
        foreign = ((own < 0) | (own >= rows)) & (tokens >= 0) & (tokens < rows * size)
        padding = self.padding_idx  # its row gets no gradient, on the rank that has it
        own_padding = None if padding is None or not 0 <= padding - first < rows else padding - first
        try:
            self.padding_idx = own_padding
            # Foreign tokens read different rows, and the results are masked. If all read one row, its gradient would
            # be a serial sum.
            y = super().forward(own.remainder(rows).where(foreign, own), *args[1:], **kwargs)
        finally:
            self.padding_idx = padding
        return ops.all_reduce(y.masked_fill(foreign.unsqueeze(-1), 0), layout.comm, grad="I")


@torch.no_grad()
def _expect_same_tokens(module: nn.Module, tokens: Tensor, comm: TorchComm) -> None:
    """Compares the tokens of the ranks in the first forward passes: other ones on one rank give wrong values on all."""
    compared = vars(module).get(_COMPARED, 0)
    if compared >= _COMPARISONS or torch.compiler.is_compiling():
        return
    if tokens.is_meta or (tokens.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    vars(module)[_COMPARED] = compared + 1
    flat = tokens.flatten().long()
    places = torch.arange(1, flat.numel() + 1, device=flat.device)
    mine = torch.stack([torch.tensor(flat.numel(), device=flat.device), flat.sum(), (flat * places).sum()])
    largest, smallest = ops.all_reduce(torch.stack([mine, -mine]), comm, "max")
    if not torch.equal(largest, -smallest):
        raise StateError(f"forward: expected the same tokens on all {comm.get_size()} ranks that share an embedding, "
                         f"got others on some (from {-int(smallest[0])} to {int(largest[0])} tokens). Give all of them "
                         "the same batch, and seed what samples tokens alike.")  # fmt: skip

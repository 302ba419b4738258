"""8-bit floats in the products of layers: the recipe, and the state of delayed scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_overlap import ops
from torch_overlap._C import ScalingMode, TorchComm
from torch_overlap.ops._arguments import group

_ops = torch.ops.torch_overlap
_SCALINGS = ("current", "delayed", "mxfp8", "block")
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Float8Recipe:
    """Recipe for the products of a layer on 8-bit floats: data = tensor * scale.

    With "current" and "delayed" each tensor has one scale, which maps the largest magnitude to the largest value of the
    8-bit type. The magnitude is that of the whole tensor, over all ranks of the layer, so that 8-bit values do not
    depend on the number of ranks. With "mxfp8" every 32 elements along the summed dimension share a power of two; with
    "block" every 128 elements of activations and gradients share a scale, and every 128 x 128 of weights.

    Args:
        scaling: "current": the magnitude is that of the tensor itself; the ranks reduce it in one small all-reduce
            in each forward and each backward of a layer. "delayed": it is the largest of the last `amax_history_len`
            steps; the ranks reduce it in `update_float8_scales`, once per step for all layers. Until its first call the
            scales are current ones. "mxfp8", "block": block scales, without communication.
        margin: scales leave headroom for magnitudes 2^margin times as large. Must be 0 with block scales.
        amax_history_len: number of steps in the history of delayed scaling.
        forward_dtype: of activations and weights: torch.float8_e4m3fn.
        backward_dtype: of the gradients of outputs: torch.float8_e5m2 or torch.float8_e4m3fn. Default: e4m3 with
            block scales, which follow the magnitudes closely, else e5m2.
        use_split_accumulator: if True, promotes the partial sums of forward products to float32 during accumulation on
            Hopper. This is always on for gradients, and for all products with "block".

    Raises:
        ValueError: an unsupported value.
    """

    scaling: str = "current"
    margin: int = 0
    amax_history_len: int = 16
    forward_dtype: torch.dtype = _E4M3
    backward_dtype: torch.dtype | None = None
    use_split_accumulator: bool = False

    def __post_init__(self) -> None:
        if self.backward_dtype is None:
            object.__setattr__(self, "backward_dtype", _E4M3 if self.block else _E5M2)
        for what, value, choices in (
            ("scaling", self.scaling, _SCALINGS),
            ("forward_dtype", self.forward_dtype, (_E4M3,)),  # tensor cores support e5m2 for one operand only
            ("backward_dtype", self.backward_dtype, (_E4M3, _E5M2)),
        ):
            if value not in choices:
                listed = " or ".join(str(choice) for choice in choices)
                raise ValueError(f"Float8Recipe: expected {what} {listed}, got {value}. Use one of them.")
        if self.block and self.margin != 0:
            raise ValueError(f"Float8Recipe: expected margin 0 with {self.scaling}, got {self.margin}; a block's scale "
                             "is that of its own values")  # fmt: skip
        if self.amax_history_len < 1:
            raise ValueError(f"Float8Recipe: expected amax_history_len of 1 or more, got {self.amax_history_len}. 1 "
                             "looks at the step before.")  # fmt: skip

    @property
    def alignment(self) -> int:
        """Required alignment of the features of a rank."""
        return 32 if self.scaling == "mxfp8" else 16

    @property
    def alignment_of_rows(self) -> int:
        """Required alignment of the rows of a rank."""
        return 8 if self.scaling == "block" else 1

    @property
    def block(self) -> int:
        """Number of elements along the summed dimension that share a scale; 0: the whole tensor."""
        return {"mxfp8": 32, "block": 128}.get(self.scaling, 0)

    @property
    def mode(self) -> ScalingMode:
        """The mode of the products with a weight."""
        modes = {"mxfp8": ScalingMode.MXFP8_1D_SCALING, "block": ScalingMode.BLOCK_2D_SCALING}
        return modes.get(self.scaling, ScalingMode.CURRENT_TENSOR_SCALING)


class Float8State(nn.Module):
    """The scales of one layer's tensors. With delayed scaling its buffers are part of the layer's state dict.

    Buffers, always float32: `forward_scale` [2] and `forward_amax_history` [length, 2], of the activations and the
    weights; `backward_scale` [1] and `backward_amax_history` [length, 1], of the outputs' gradients. Entry 0 of a
    history is that of the current step. After `update_float8_scales` they are the same on all ranks.
    """

    def __init__(self, recipe: Float8Recipe, comm: TorchComm, device: torch.device | str) -> None:
        super().__init__()
        self.recipe, self.comm = recipe, comm
        self.started = False  # True once delayed scaling has its scales
        if recipe.scaling == "delayed":
            for name, count in (("forward", 2), ("backward", 1)):
                self.register_buffer(f"{name}_scale", torch.ones(count, device=device))
                history = torch.zeros(recipe.amax_history_len, count, device=device)
                self.register_buffer(f"{name}_amax_history", history)

    def reset(self) -> None:
        """Returns to the initial state, with empty histories."""
        self.started = False
        for name, buffer in self.named_buffers():
            buffer.fill_(float(name.endswith("_scale")))

    @torch.no_grad()
    def scales(self, direction: str, groups: Sequence[Sequence[Tensor]]) -> Tensor:
        """Returns the scales of the groups of tensors, float32 [number of groups]. Collective unless `started`."""
        if self.started:
            return self.get_buffer(f"{direction}_scale")
        amax = torch.stack([_amax(tensors) for tensors in groups])
        _ops.all_reduce_(amax, "max", group(self.comm)[0])
        scale = torch.ones_like(amax)
        ops.update_scale_(amax.unsqueeze(0), scale, self.dtype(direction), margin=self.recipe.margin)
        return scale

    @torch.no_grad()
    def note(self, direction: str, amax: Sequence[Tensor]) -> None:
        """Records this rank's largest magnitudes, one for each group, for the scales of later steps."""
        if self.recipe.scaling == "delayed":
            entry = self.get_buffer(f"{direction}_amax_history")[0]
            entry.copy_(torch.maximum(entry, torch.cat([a.view(1) for a in amax])))

    def dtype(self, direction: str) -> torch.dtype:
        found = self.recipe.forward_dtype if direction == "forward" else self.recipe.backward_dtype
        assert found is not None
        return found

    def extra_repr(self) -> str:
        return f"scaling={self.recipe.scaling}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float8State:
        """Moves the buffers, but keeps them float32 if the module is cast."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self.get_buffer(name)
            if moved.dtype != torch.float32:
                self.register_buffer(name, buffer.to(moved.device))
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.started = any(bool(buffer.any()) for name, buffer in self.named_buffers()
                           if name.endswith("_amax_history") and not buffer.is_meta)  # fmt: skip


def _amax(tensors: Sequence[Tensor]) -> Tensor:
    found = [torch.linalg.vector_norm(t.detach(), float("inf"), dtype=torch.float32) for t in tensors if t.numel() > 0]
    return torch.stack(found).amax() if found else tensors[0].new_zeros((), dtype=torch.float32)


@torch.no_grad()
def update_float8_scales(module: nn.Module, comm: TorchComm | None = None) -> None:
    """Ends a step of delayed scaling for all layers in `module`: computes new scales, and rotates the histories.

    Call it once for each optimizer step, after backward. Collective: one all_reduce takes the maximum of the ranks'
    magnitudes. Runs on the current stream; the host does not wait. May be captured in a CUDA graph, and so may the
    step, once this has been called. Layers without delayed scaling are skipped.

    The rule is that of `torch_overlap.ops.update_scale_`: a scale becomes the largest value of the 8-bit type, divided
    by the largest entry of the history and by 2^margin, and is unchanged if that entry is 0, infinite or NaN.
    Then entry 0 of the history becomes its last, and the next step's is 0.

    Args:
        module: the module with the layers.
        comm: only the layers that belong to this communicator; None: all, each over its own.
    """
    by_comm: dict[str, list[Float8State]] = {}
    for state in module.modules():
        if isinstance(state, Float8State) and state.recipe.scaling == "delayed":
            by_comm.setdefault(state.comm.get_name(), []).append(state)
    for name, states in by_comm.items():
        if comm is None or comm.get_name() == name:
            _all_reduce_amaxes(states, name)
            _update_scales(states)


def _entries(states: Sequence[Float8State]) -> list[tuple[Float8State, str, Tensor, Tensor]]:
    return [(state, direction, state.get_buffer(f"{direction}_amax_history"), state.get_buffer(f"{direction}_scale"))
            for state in states for direction in ("forward", "backward")]  # fmt: skip


def _all_reduce_amaxes(states: Sequence[Float8State], comm: str) -> None:
    """Replaces entry 0 of every history by the maximum over the ranks."""
    latest = [history[0] for _, _, history, _ in _entries(states)]
    flat = torch.cat(latest)
    _ops.all_reduce_(flat, "max", comm)
    for entry, shared in zip(latest, flat.split([entry.numel() for entry in latest]), strict=True):
        entry.copy_(shared)


def _update_scales(states: Sequence[Float8State]) -> None:
    """Updates all histories of a kind at once."""
    kinds: dict[tuple[torch.dtype, int, int], list[tuple[Tensor, Tensor]]] = {}
    for state, direction, history, scale in _entries(states):
        key = state.dtype(direction), state.recipe.margin, state.recipe.amax_history_len
        kinds.setdefault(key, []).append((history, scale))
        state.started = True
    for (dtype, margin, _), pairs in kinds.items():
        histories = torch.cat([history for history, _ in pairs], 1)
        scales = torch.cat([scale for _, scale in pairs])
        ops.update_scale_(histories, scales, dtype, margin=margin)
        counts = [scale.numel() for _, scale in pairs]
        for (history, scale), h, s in zip(pairs, histories.split(counts, 1), scales.split(counts), strict=True):
            history.copy_(h)
            scale.copy_(s)

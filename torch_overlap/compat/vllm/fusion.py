"""The pass manager, and its pass that puts our operator in place of all-reduce, RMSNorm and quantization.

vLLM's graph has these as `vllm::all_reduce`, `vllm_ir::rms_norm` or `vllm_ir::fused_add_rms_norm`, and the static
quantization to float8_e4m3fn as a custom operator or as ATen operators, by the configuration. Patterns are traced from
vLLM's own functions, so they have whichever form the model's graph has.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._inductor.pattern_matcher as pm
from torch import Tensor, fx
from vllm.compilation.passes.fusion.allreduce_rms_fusion import AllReduceFusionPass
from vllm.compilation.passes.fusion.matcher_utils import MatcherQuantFP8
from vllm.compilation.passes.inductor_pass import enable_fake_mode
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass, VllmPatternMatcherPass
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.ir.ops import fused_add_rms_norm, rms_norm
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

import torch_overlap
from torch_overlap._C import ScalingMode
from torch_overlap.compat.vllm.sizes import max_fused_tokens

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

    from torch_overlap import TorchComm

__all__ = ["FusedAllReducePass", "OverlapPassManager"]

_logger = logging.getLogger("torch_overlap.vllm")

_ops = torch.ops.torch_overlap
_GIVEN_SCALE = int(ScalingMode.DELAYED_TENSOR_SCALING)
_FUSED_DTYPES = (torch.bfloat16, torch.float16)
# Example value of epsilon, which occurs in no model: tracing turns this constant, and no other, into an argument.
_EPSILON = 0.0113377


def call_operator(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, scale: Tensor | None, comm: str, size: int
) -> tuple[Tensor, Tensor]:
    """Calls the operator, with quantization if there is a scale: the one place that knows its signature.

    Returns: the normalized rows, and the rows before the norm.

    Args:
        x: this rank's terms of the sum.
        residual: added to the sum, or None.
        weight: of the norm.
        epsilon: of the norm.
        scale: vLLM's scale, by which a quantized value is multiplied to get the original; None: no quantization. The
            operator multiplies by its own scale, so it takes the reciprocal.
        comm, size: name of the communicator, and its number of ranks.
    """
    if residual is None:
        residual = torch.zeros_like(x)
    if scale is None:
        out, hidden = _ops.all_reduce_rms_norm(x, residual, weight, None, comm, size, epsilon)
        return out, hidden
    factor = scale.reshape(1).reciprocal()
    out, _, hidden, _ = _ops.all_reduce_rms_norm_quantize(
        x, residual, weight, None, factor, _GIVEN_SCALE, comm, size, epsilon
    )
    return out, hidden


class _Pattern(NamedTuple):
    search: Callable[..., Any]
    replace: Callable[..., Any]
    num_rows_inputs: int  # inputs of the shape of x, which come first; weight follows
    has_scale: bool


def _patterns(comm: str, size: int, quantize: MatcherQuantFP8) -> list[_Pattern]:
    """Returns what is replaced by what. A pattern with more operators comes before one that it contains."""

    def quantized(x: Tensor, weight: Tensor, scale: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        summed = tensor_model_parallel_all_reduce(x)
        return quantize(rms_norm(summed, weight, epsilon), scale)[0], summed

    def fused_quantized(x: Tensor, weight: Tensor, scale: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        return call_operator(x, None, weight, epsilon, scale, comm, size)

    def added_quantized(
        x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        out, hidden = fused_add_rms_norm(tensor_model_parallel_all_reduce(x), residual, weight, epsilon)
        return quantize(out, scale)[0], hidden

    def fused_added_quantized(
        x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        return call_operator(x, residual, weight, epsilon, scale, comm, size)

    def normed(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        summed = tensor_model_parallel_all_reduce(x)
        return rms_norm(summed, weight, epsilon), summed

    def fused_normed(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        return call_operator(x, None, weight, epsilon, None, comm, size)

    def added(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        out, hidden = fused_add_rms_norm(tensor_model_parallel_all_reduce(x), residual, weight, epsilon)
        return out, hidden

    def fused_added(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        return call_operator(x, residual, weight, epsilon, None, comm, size)

    # The last norm of a model, behind which nothing reads the residual.
    def last(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return added(x, residual, weight, epsilon)[0]

    def fused_last(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return call_operator(x, residual, weight, epsilon, None, comm, size)[0]

    return [
        _Pattern(added_quantized, fused_added_quantized, 2, True),
        _Pattern(quantized, fused_quantized, 1, True),
        _Pattern(added, fused_added, 2, False),
        _Pattern(last, fused_last, 2, False),
        _Pattern(normed, fused_normed, 1, False),
    ]


def _can_replace(match: pm.Match) -> bool:
    """Returns True if the operator supports the operands, and all of them exist where the sum is.

    The replacement is inserted before the first node of the match that has other users, which may be the sum. Operands
    of one dtype are required: Gemma's norm has a weight of float32.
    """
    operands = [match.kwargs[name] for name in ("x", "residual", "weight", "scale") if name in match.kwargs]
    dtypes = {node.meta["val"].dtype for node in operands if node is not match.kwargs.get("scale")}
    first = min(node for node in match.output_nodes() if node is not None)
    are_known = all(node.op in ("placeholder", "get_attr") or node < first for node in operands)
    return are_known and len(dtypes) == 1 and dtypes <= set(_FUSED_DTYPES)


def _weight_of(product: fx.Node, rows: fx.Node) -> fx.Node | None:
    """Returns the weight [out_features, in_features] if a node is rows weight^T, else None."""
    if product.target is not torch.ops.aten.mm.default or product.args[0] is not rows:
        return None
    transposed = product.args[1]
    if not isinstance(transposed, fx.Node) or not isinstance(transposed.args[0], fx.Node):
        return None
    is_transpose = transposed.target is torch.ops.aten.t.default or (
        transposed.target is torch.ops.aten.permute.default and list(transposed.args[1]) == [1, 0]  # type: ignore[arg-type]
    )
    return transposed.args[0] if is_transpose else None


def join_products(graph: fx.Graph) -> int:
    """Gives the operator the weight of the product that alone reads its normalized rows, in place of that product.

    Returns: the number of products.
    """
    joined = 0
    for norm in graph.find_nodes(op="call_function", target=_ops.all_reduce_rms_norm.default):
        rows = [node for node in norm.users if node.target is operator.getitem and node.args[1] == 0]
        if len(rows) != 1 or len(rows[0].users) != 1:
            continue
        product = next(iter(rows[0].users))
        weight = _weight_of(product, rows[0])
        if weight is None or weight > norm or weight.meta["val"].dtype != rows[0].meta["val"].dtype:
            continue
        norm.update_kwarg("next_weight", weight)
        rows[0].meta = dict(product.meta)
        norm.meta["val"] = (product.meta["val"], *norm.meta["val"][1:])
        product.replace_all_uses_with(rows[0])
        (transposed,) = (node for node in product.all_input_nodes if node is not rows[0])
        graph.erase_node(product)
        if not transposed.users:
            graph.erase_node(transposed)
        joined += 1
    return joined


class FusedAllReducePass(VllmPatternMatcherPass):  # type: ignore[misc]
    """Replaces all-reduce and RMSNorm, with residual and static quantization to float8_e4m3fn or without, by one
    operator. Without quantization it has the product behind the norm too, whose weight it loads meanwhile.

    It applies to ranges of up to `max_fused_tokens` tokens, if OverlapCommunicator serves the tensor-parallel group.
    """

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.max_tokens = 0
        group: GroupCoordinator = get_tp_group()
        comm: TorchComm | None = getattr(group.device_communicator, "overlap_comm", None)
        if comm is None or config.model_config is None or self.model_dtype not in _FUSED_DTYPES:
            return
        self.comm_name, self.comm_size = comm.get_name(), comm.get_size()
        self.max_tokens = max_fused_tokens(
            self.comm_size, config.model_config.get_hidden_size(), self.model_dtype.itemsize
        )
        self.patterns = pm.PatternMatcherPass(pass_name="torch_overlap_all_reduce_rms_norm")
        self._register()
        self.dump_patterns(config, self.patterns)

    @enable_fake_mode  # type: ignore[untyped-decorator]
    def _register(self) -> None:
        quantize = MatcherQuantFP8(kFp8StaticTensorSym)
        rows = torch.empty(5, 16, dtype=self.model_dtype, device=self.device)
        scale: Tensor = quantize.inputs()[1]
        for pattern in _patterns(self.comm_name, self.comm_size, quantize):
            examples = [*[torch.empty_like(rows) for _ in range(pattern.num_rows_inputs)], torch.empty_like(rows[0])]
            pm.register_replacement(
                pattern.search,
                pattern.replace,
                [*examples, *([scale] if pattern.has_scale else []), _EPSILON],
                pm.fwd_only,
                self.patterns,
                extra_check=_can_replace,
                scalar_workaround={"epsilon": _EPSILON},
            )

    def is_applicable_for_range(self, compile_range: Range) -> bool:
        """Returns True if the operator is fused for all token counts of the range."""
        end: int = compile_range.end
        return end <= self.max_tokens

    @VllmInductorPass.time_and_log  # type: ignore[untyped-decorator]
    def __call__(self, graph: fx.Graph) -> None:
        self.matched_count = self.patterns.apply(graph)
        self.joined_count = join_products(graph)
        _logger.debug("%s replaced %d all-reduces, with %d products behind them.", type(self).__name__,
                      self.matched_count, self.joined_count)  # fmt: skip

    def uuid(self) -> str:
        """Returns a key of all that the replacement depends on; vLLM's compile cache contains it."""
        parts = [
            torch_overlap.__version__,
            type(self),
            _patterns,
            call_operator,
            _can_replace,
            join_products,
            _weight_of,
        ]
        if self.max_tokens:
            parts += [self.comm_name, str(self.comm_size), str(self.max_tokens)]
        key: str = self.hash_source(*parts)
        return key


class OverlapPassManager(PostGradPassManager):  # type: ignore[misc]
    """vLLM's pass manager, with FusedAllReducePass directly before vLLM's own pass for all-reduce and RMSNorm.

    vLLM's `fuse_allreduce_rms` turns both on. Ours takes the range of few tokens, vLLM's what is left.
    """

    def configure(self, config: VllmConfig) -> None:
        """Adds vLLM's passes, then ours.

        Args:
            config: vLLM's.
        """
        super().configure(config)
        for index, other in enumerate(self.passes):
            if isinstance(other, AllReduceFusionPass):
                with set_current_vllm_config(config, check_compile=False):
                    self.passes.insert(index, FusedAllReducePass(config))
                return

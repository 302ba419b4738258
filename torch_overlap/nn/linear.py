"""Linear layers whose weights are split over the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torch_overlap import ops
from torch_overlap._C import TorchComm
from torch_overlap.nn._changes import watch_changes
from torch_overlap.nn._computed import expect_linear
from torch_overlap.nn._float8 import column_parallel_linear, row_parallel_linear
from torch_overlap.nn._initialize import Init, fill_shard, uniform
from torch_overlap.nn._joined import are_joined, joined, rejoin, split_columns
from torch_overlap.nn._parallel_linear import ParallelLinear, part_of, per_rank
from torch_overlap.nn.float8 import Float8Recipe
from torch_overlap.nn.functional import copy_matmul, local_shard, sum_matmul
from torch_overlap.nn.layout import ParameterLayout, local_parameter, set_layout, set_part

_Column = TypeVar("_Column", bound="ColumnParallelLinear")
_TAKEN = "its weight and bias alone are taken, so pass one with the forward of nn.Linear"


class ColumnParallelLinear(ParallelLinear):
    """Computes linear(x, w, b) with the rows of w, the output features, split over the ranks. Several layers may share
    x.

        sequence_parallel  x                                          output, on each rank
        True               this rank's rows [S/n, ..., in_features]    all rows [S, ..., out_features/n]
        False              all rows, the same on all ranks             all rows [..., out_features/n]

    With sequence parallelism all_gather_matmul gathers x along `gather_dim`, once for all outputs, while it multiplies.
    Without it nothing is sent forward, and the gradient of x is summed by matmul_all_reduce.

    Parameters: `weight` [out_features/n, in_features] and `bias` [out_features/n], with the dtype of x (or under
    autocast); `weight0`, `bias0`, `weight1`, ... if out_features is a list, which lie next to each other in memory and
    are multiplied as one, except with fp8. They are initialized like nn.Linear, as parts of one full weight: give all
    ranks the same seed. Their gradients are complete.

    Args:
        in_features: the features of x.
        out_features: of the whole layer; a list makes several layers, and forward returns a list.
        comm: the communicator whose ranks share the layer, or a DeviceMesh of one dimension of backend "torch_overlap".
            Parameters over a mesh are DTensors. Every rank makes the same layers, and calls them in the same order.
        bias: if True, adds biases.
        sequence_parallel: selects the row of the table above.
        gather_output: if True, gathers the output features too, so that every rank has [..., out_features]. Its
            gradient must then be whole on every rank, as when all ranks compute the same loss.
        gather_dim: the dimension of x along which rows are gathered, with sequence_parallel. 0 needs no copies.
        keep_gathered: if True, keeps all rows of x until the backward pass, n times the memory of this rank's rows,
            instead of gathering them again for the gradient of the weight.
        device: default: that of comm. "meta" initializes nothing; call reset_parameters() after to_empty().
        dtype: of the parameters. Default: torch's default dtype.
        algorithm: of the operators; see torch_overlap.ops.
        require_fused: if True, forward raises UnsupportedError if the operator would not overlap (never with one rank).
        init: fills rows of the full weight in place, [any number, in_features], instead of nn.Linear's distribution.
        fp8: the recipe of 8-bit products, forward and backward; parameters keep their dtype. x must be float32, float16
            or bfloat16, or under autocast, and gradients are of the first order. The gradient of the weight is
            multiplied in bfloat16 (with 8-bit values still) if the number of rows is not a multiple of 16; with "mxfp8"
            rows are padded with zeros to blocks of 32.
        gradient_accumulation_fusion: if True, the gradient of each weight is added to `weight.main_grad`, a tensor of
            its shape that the caller sets before the forward pass, and `weight.grad` stays None (Megatron's
            convention: with the attribute `grad_added_to_main_grad` it gets a tensor of no meaning). With sequence
            parallelism the product itself adds it, if the buffer is contiguous and has the dtype of x or, for 16-bit x,
            float32. Gradients are then of the first order. Not with FSDP2.

    Raises:
        ValueError: features not divisible by the number of ranks; with fp8, a rank's features not divisible by 16
            ("mxfp8": 32); an unknown algorithm.
        TypeError: comm is not a TorchComm (a process group, a name), or fp8 not a Float8Recipe.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        comm: TorchComm | DeviceMesh,
        *,
        bias: bool = True,
        sequence_parallel: bool = True,
        gather_output: bool = False,
        gather_dim: int = 0,
        keep_gathered: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        algorithm: str = "auto",
        require_fused: bool = False,
        init: Init | None = None,
        fp8: Float8Recipe | None = None,
        gradient_accumulation_fusion: bool = False,
    ) -> None:
        super().__init__(comm, sequence_parallel=sequence_parallel, algorithm=algorithm, require_fused=require_fused,
                         init=init, fp8=fp8,
                         gradient_accumulation_fusion=gradient_accumulation_fusion)  # fmt: skip
        self.in_features, self.keep_gathered = in_features, keep_gathered
        self.out_features = out_features if isinstance(out_features, int) else list(out_features)
        self.gather_output, self.gather_dim = gather_output, gather_dim
        if isinstance(self.out_features, int):
            sizes, self._names = [self.out_features], [("weight", "bias")]
        else:
            sizes = self.out_features
            self._names = [(f"weight{i}", f"bias{i}") for i in range(len(sizes))]
        if not sizes:
            raise ValueError("ColumnParallelLinear: expected one or more out_features, got none. Pass a number, or a "
                             "list of them.")  # fmt: skip
        device = self.comm.get_device() if device is None else device
        for (weight, bias_name), size in zip(self._names, sizes, strict=True):
            part = per_rank("ColumnParallelLinear", "out_features", size, self.comm)
            empty = torch.empty(part, in_features, device=device, dtype=dtype)
            self.register_parameter(weight, nn.Parameter(empty))
            self.register_parameter(bias_name, nn.Parameter(empty.new_empty(part)) if bias else None)
        self._make_float8(self.weights)
        split = {name: 0 for names in self._names for name in names}
        set_layout(self, ParameterLayout(self.comm, split, mesh=self.mesh))
        self._rejoin()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws new weights, equal for any number of ranks if their generators have the same state."""
        self._reset_float8()
        rank, size = self.comm.get_rank(), self.comm.get_size()
        start = uniform(self.in_features)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            fill_shard(weight, self.init or start, 0, rank, size)
            if bias is not None:
                fill_shard(bias, start, 0, rank, size)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Parameters that are apart stay where they are: a CUDA graph may read them there.
        may_move = [are_joined(group) or any(part.is_meta for part in group) for group in self._joinable()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for group, moves in zip(self._joinable(), may_move, strict=True):
            if moves:
                rejoin(group, self.mesh)
        return self

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._rejoin()

    def _joinable(self) -> list[list[nn.Parameter]]:
        """Returns the weights, and the biases if there are any."""
        groups = [[getattr(self, name) for name in names] for names in zip(*self._names, strict=True)]
        return [group for group in groups if all(parameter is not None for parameter in group)]

    def _rejoin(self) -> None:
        for group in self._joinable():
            rejoin(group, self.mesh)

    @property
    def weights(self) -> list[Tensor]:
        """This rank's part of each weight."""
        return [local_parameter(self, weight) for weight, _ in self._names]  # type: ignore[misc]

    @property
    def biases(self) -> list[Tensor | None]:
        """This rank's part of each bias; None for a layer without one."""
        return [local_parameter(self, bias) for _, bias in self._names]

    def forward(self, input: Tensor) -> Any:
        """Returns a tensor, or a list if `out_features` is a list. Valid on the current stream."""
        self._expect_no_tangent(input)
        parts = self.weights
        weights, main_grads = self._with_main_grads(input, [name for name, _ in self._names], parts)
        outputs = self._products(input, weights, self.biases, main_grads)
        watch_changes(zip([getattr(self, weight) for weight, _ in self._names], parts, strict=True), outputs)
        return outputs if isinstance(self.out_features, list) else outputs[0]

    def _products(self, x: Tensor, weights: list[Tensor], biases: Sequence[Tensor | None],
                  main_grads: Sequence[Tensor] = ()) -> list[Tensor]:  # fmt: skip
        self._expect_features(x, weights)
        sizes = [w.size(0) for w in weights]
        features = sum(sizes)
        # The operator saves the gathered rows for the backward pass if it returns them.
        keep = self.keep_gathered and torch.is_grad_enabled() and any(w.requires_grad for w in weights)
        if self.float8 is not None:
            self._require_fused_float8("scaled_all_gather_matmul", x, features)
            dim = self.gather_dim if self.sequence_parallel else None
            outputs = column_parallel_linear(
                x, weights, biases, self.float8, dim, self.algorithm, keep and dim is not None
            )
            return self._gathered(outputs)
        weight, bias = joined(weights), joined(biases)
        is_joined = len(sizes) > 1 and weight is not None and (bias is None) == all(b is None for b in biases)
        if weight is not None and is_joined:
            weights, biases = [weight], [bias]
        if self.sequence_parallel:
            self._require_fused("all_gather_matmul", x, features)
            outputs, _ = ops.all_gather_matmul(
                x, weights, self.comm, biases, gather_dim=self.gather_dim, return_gathered=keep,
                algorithm=self.algorithm, main_grads=main_grads,
            )  # fmt: skip
        else:
            self._require_fused("matmul_all_reduce", x, features)  # the gradient's operator
            outputs = copy_matmul(x, weights, biases, self.comm, self.algorithm)
        if is_joined:
            outputs = split_columns(outputs[0], sizes)
        return self._gathered(outputs)

    def _gathered(self, outputs: list[Tensor]) -> list[Tensor]:
        if not self.gather_output:
            return outputs
        return [ops.all_gather(y, self.comm, -1, grad="I") for y in outputs]

    def regathered(self, x: Tensor) -> Tensor | None:
        """Returns x for RowParallelLinear's `regather` if the backward pass gathers it again; else None."""
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
            return None
        gathers = (self.sequence_parallel and not self.keep_gathered and self.float8 is None
                   and self.algorithm != "sequential" and self.comm.get_size() > 1)  # fmt: skip
        if not gathers:
            return None
        trains = torch.is_grad_enabled() and any(getattr(self, weight).requires_grad for weight, _ in self._names)
        return x.detach() if trains else None

    def extra_repr(self) -> str:
        """Returns the layer's text for repr()."""
        return self._describe(in_features=self.in_features, out_features=self.out_features,
                              bias=self.biases[0] is not None, gather_output=self.gather_output,
                              **{"keep_gathered": True} if self.keep_gathered else {})  # fmt: skip

    @classmethod
    def from_linear(cls: type[_Column], linear: nn.Linear | Sequence[nn.Linear],
                    comm: TorchComm | DeviceMesh,
                    **options: Any) -> _Column:  # fmt: skip
        """Makes this rank's part of an nn.Linear that is the same on all ranks; of several, one layer with all outputs.

        Sends nothing.

        Args:
            linear: one nn.Linear, or several with the same input.
            comm: as for the constructor.
            options: those of the constructor, except bias, device and dtype, which are the linear's.

        Raises:
            TypeError: a module that is no nn.Linear, has a forward of its own (LoRA) or a weight that is computed
                (weight_norm).
            ValueError: linears of different in_features, or some with a bias and some without.
        """
        linears = [linear] if isinstance(linear, nn.Module) else list(linear)
        for other in linears:
            expect_linear("ColumnParallelLinear.from_linear", "an nn.Linear or several", other, _TAKEN)
        first = linears[0]
        if any(other.in_features != first.in_features or (other.bias is None) != (first.bias is None)
               for other in linears):  # fmt: skip
            raise ValueError("ColumnParallelLinear.from_linear: expected linears of the same in_features, all with a "
                             f"bias or none, got {linears}; make a layer of each")  # fmt: skip
        sizes = [other.out_features for other in linears]
        layer = cls(first.in_features, sizes[0] if isinstance(linear, nn.Linear) else sizes, comm,
                    bias=first.bias is not None, device="meta", dtype=first.weight.dtype, **options)  # fmt: skip
        for names, other in zip(layer._names, linears, strict=True):
            for name, full in zip(names, (other.weight, other.bias), strict=True):
                if full is not None:
                    set_part(layer, name, part_of(full, 0, layer.comm))
        layer._rejoin()
        layer._make_float8(layer.weights)
        return layer.train(first.training)


class RowParallelLinear(ParallelLinear):
    """Computes the sum of all ranks' linear(x, w), plus b, with the columns of w, the input features, split over the
    ranks.

        sequence_parallel  x, on each rank                     output
        True               all rows [S, ..., in_features/n]    this rank's rows [S/n, ..., out_features]
        False              all rows [..., in_features/n]       all rows, the same on all ranks

    With sequence parallelism matmul_reduce_scatter sums the products along `scatter_dim`, without it matmul_all_reduce;
    both overlap communication with the product. The bias is added once.

    Parameters: `weight` [out_features, in_features/n] and `bias` [out_features], which every rank holds in full. They
    are initialized as in ColumnParallelLinear. Under sequence parallelism the gradient of the bias is summed
    over the ranks in the backward pass.

    Args:
        input_is_parallel: if False, x has all input features on every rank, and each rank takes its own part. Its
            gradient is then whole on every rank too.
        scatter_dim: the dimension of x along which rows are scattered, with sequence_parallel, divisible by the number
            of ranks. 0 needs no copies.
        others: as for ColumnParallelLinear.

    Raises:
        ValueError: in_features not divisible by the number of ranks; with fp8, features of a rank not divisible by 16
            or 32; an unknown algorithm.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: TorchComm | DeviceMesh,
        *,
        bias: bool = True,
        sequence_parallel: bool = True,
        input_is_parallel: bool = True,
        scatter_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        algorithm: str = "auto",
        require_fused: bool = False,
        init: Init | None = None,
        fp8: Float8Recipe | None = None,
        gradient_accumulation_fusion: bool = False,
    ) -> None:
        super().__init__(comm, sequence_parallel=sequence_parallel, algorithm=algorithm, require_fused=require_fused,
                         init=init, fp8=fp8,
                         gradient_accumulation_fusion=gradient_accumulation_fusion)  # fmt: skip
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel, self.scatter_dim = input_is_parallel, scatter_dim
        part = per_rank("RowParallelLinear", "in_features", in_features, self.comm)
        device = self.comm.get_device() if device is None else device
        self.weight = nn.Parameter(torch.empty(out_features, part, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(self.weight.detach().new_empty(out_features)) if bias else None)
        self._make_float8([self.weight])
        partial = frozenset({"bias"} if sequence_parallel else ())
        set_layout(self, ParameterLayout(self.comm, {"weight": 1}, partial, self.mesh))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws new weights, equal for any number of ranks if their generators have the same state."""
        self._reset_float8()
        start = uniform(self.in_features)
        weight, bias = self._local()
        fill_shard(weight, self.init or start, 1, self.comm.get_rank(), self.comm.get_size())
        if bias is not None:
            fill_shard(bias, start, 0, 0, 1)

    def _local(self) -> tuple[Tensor, Tensor | None]:
        return local_parameter(self, "weight"), local_parameter(self, "bias")  # type: ignore[return-value]

    def forward(self, input: Tensor, regather: Tensor | None = None) -> Tensor:
        """Returns the output, valid on the current stream.

        Args:
            input: this rank's features of it, or all, see `input_is_parallel`.
            regather: as for ops.matmul_reduce_scatter, with sequence_parallel.
        """
        self._expect_no_tangent(input)
        x = input if self.input_is_parallel else local_shard(input, -1, self.comm)
        weight, bias = self._local()
        self._expect_features(x, [weight])
        part = weight
        (weight,), main_grads = self._with_main_grads(x, ["weight"], [weight])
        y = self._product(x, weight, bias, main_grads, regather)
        watch_changes([(self.weight, part)], y)
        return y

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, main_grads: Sequence[Tensor],
                 regather: Tensor | None) -> Tensor:  # fmt: skip
        if self.float8 is not None:
            self._require_fused_float8("scaled_matmul_reduce_scatter", x, self.out_features)
            dim = self.scatter_dim if self.sequence_parallel else None
            return row_parallel_linear(x, weight, bias, self.float8, dim, self.algorithm)
        if self.sequence_parallel:
            self._require_fused("matmul_reduce_scatter", x, self.out_features)
            return ops.matmul_reduce_scatter(
                x, weight, self.comm, bias, scatter_dim=self.scatter_dim, algorithm=self.algorithm, regather=regather,
                main_grads=main_grads,
            )  # fmt: skip
        self._require_fused("matmul_all_reduce", x, self.out_features)
        return sum_matmul(x, weight, bias, self.comm, self.algorithm)

    def extra_repr(self) -> str:
        """Returns the layer's text for repr()."""
        return self._describe(in_features=self.in_features, out_features=self.out_features,
                              bias=self.bias is not None, input_is_parallel=self.input_is_parallel)  # fmt: skip

    @classmethod
    def from_linear(cls, linear: nn.Linear, comm: TorchComm | DeviceMesh, **options: Any) -> RowParallelLinear:
        """Makes this rank's part of an nn.Linear that is the same on all ranks. `options`: as for
        ColumnParallelLinear."""
        expect_linear("RowParallelLinear.from_linear", "an nn.Linear", linear, _TAKEN)
        layer = cls(linear.in_features, linear.out_features, comm, bias=linear.bias is not None, device="meta",
                    dtype=linear.weight.dtype, **options)  # fmt: skip
        set_part(layer, "weight", part_of(linear.weight, 1, layer.comm))
        if linear.bias is not None:
            set_part(layer, "bias", part_of(linear.bias, None, layer.comm))
        layer._make_float8(layer._local()[:1])
        return layer.train(linear.training)

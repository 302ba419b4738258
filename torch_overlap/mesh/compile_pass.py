"""torch.compile pass that fuses a product and an adjacent collective into one operator.

    all_gather -> mm, mm ...   all_gather_matmul, with all the weights
    mm -> reduce_scatter       matmul_reduce_scatter
    mm -> all_reduce           matmul_all_reduce
    mm + mm -> either          one product of both, with concatenated operands

It handles the collectives of torch_overlap.ops, including those of sharded tensors, and the functional ones of
torch.distributed over groups of backend "torch_overlap". The cost model decides. The logger "torch_overlap.compile"
logs every collective that is not fused, with the reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from torch_overlap._C import InvalidValueError, _BackendWrapper
from torch_overlap.mesh._core import CostModel

__all__ = ["Decision", "OverlapPass", "overlap_products"]

_log = logging.getLogger("torch_overlap.compile")
_aten = torch.ops.aten
_with_effects = torch.ops.higher_order.with_effects
_RESHAPES = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_VIEWS = (*_RESHAPES, _aten.permute.default, _aten.t.default, _aten.transpose.int, _aten.alias.default)
_LINK = "nvlink"
_CHOICES = ("auto", "always", "never")


@dataclass(frozen=True)
class Decision:
    """The decision on one collective.

    Attributes:
        collective: "all_gather", "reduce_scatter" or "all_reduce".
        fused: True if it was fused with its products into one operator.
        why: The times that were compared, or the reason why it was not fused.
    """

    collective: str
    fused: bool
    why: str


@dataclass
class _Collective:
    """A collective in a graph, of either family."""

    name: str
    node: fx.Node
    x: fx.Node
    dim: int
    op: str
    comm: str
    size: int
    result: fx.Node
    token: fx.Node | None  # the preceding token of the ordered effects
    next_token: fx.Node | None


class _NotFused(Exception):
    pass


class OverlapPass(CustomGraphPass):
    """The pass. `decisions` has its decisions on all graphs so far, in order.

    Args:
        cost: the cost model. Default: H200s.
        overlap: which possible products are fused: "auto", those that the cost model says to; "always" or "never".
    """

    def __init__(self, cost: CostModel | None = None, overlap: str = "auto") -> None:
        if overlap not in _CHOICES:
            raise InvalidValueError(f"OverlapPass: expected overlap of {_CHOICES}, got {overlap!r}")
        self.cost, self.overlap = cost or CostModel.h200(), overlap
        self.decisions: list[Decision] = []

    def uuid(self) -> Any:
        text = f"torch_overlap 2 {self.overlap} {sorted(self.cost.to_dict().items())}"
        return hashlib.sha256(text.encode()).hexdigest()

    def __deepcopy__(self, memo: object) -> OverlapPass:
        """Returns itself: torch.compile copies Inductor's settings, and all decisions must go to one pass."""
        return self

    def __call__(self, graph: fx.Graph) -> None:
        for node in [n for n in graph.nodes if _collective(n) is not None]:
            found = _collective(node)  # again: its operand may be another fusion's result by now
            assert found is not None
            try:
                why = self._fuse(graph, found)
                decision = Decision(found.name, True, why)
            except _NotFused as reason:
                decision = Decision(found.name, False, str(reason))
            self.decisions.append(decision)
            _log.info("%s of %s over '%s': %s, %s", found.name, tuple(_fake_value(found.x).shape), found.comm,
                      "fused" if decision.fused else "left alone", decision.why)  # fmt: skip
        graph.eliminate_dead_code()
        graph.lint()

    def _fuse(self, graph: fx.Graph, found: _Collective) -> str:
        if any(not isinstance(n, int) for n in _fake_value(found.x).shape):
            raise _NotFused("shapes are symbolic")
        if found.name == "all_gather":
            return self._fuse_gather(graph, found)
        return self._fuse_reduction(graph, found)

    def _check_is_faster(
        self, found: _Collective, moved: int, sizes: tuple[int, int, int], itemsize: int, terms: int = 1
    ) -> str:
        """Returns the reason to fuse; raises _NotFused otherwise. `terms`: number of products, added if separate,
        concatenated if fused."""
        product = self.cost.matmul(*sizes, element_size=itemsize)
        sequential = product + self.cost.collective(found.name, {_LINK: found.size}, moved)
        overlapped = self.cost.overlapped(found.name, {_LINK: found.size}, moved, product)
        if terms > 1:
            m, n, k = sizes
            sequential += (terms - 1) * self.cost.elementwise(3 * m * n * itemsize)
            overlapped += self.cost.elementwise(2 * m * k * itemsize) + self.cost.elementwise(2 * k * n * itemsize)
        why = f"{overlapped * 1e6:.1f} us overlapped, {sequential * 1e6:.1f} us sequential by the cost model"
        if self.overlap == "never" or (self.overlap == "auto" and overlapped >= sequential):
            raise _NotFused(why if self.overlap == "auto" else "as asked for")
        return why

    # --- all_gather -> mm -----------------------------------------------------------------------

    def _fuse_gather(self, graph: fx.Graph, found: _Collective) -> str:
        whole = _fake_value(found.result)
        if whole.dim() < 2 or found.dim == whole.dim() - 1:
            raise _NotFused("it gathers the dimension that is multiplied")
        products = [mm for mm in _matmuls_of(found.result) if _fake_value(mm).dtype == whole.dtype]
        if not products:
            users = sorted({_name(user) for user in found.result.users})
            raise _NotFused(f"no product takes the result, but {', '.join(users) or 'nobody'}")
        order = {node: i for i, node in enumerate(graph.nodes)}
        taken = [mm for mm in products if _is_available_at(mm.args[1], order, order[found.node])]
        if not taken:
            raise _NotFused("the weights are computed after it")
        columns = sum(_fake_value(mm).shape[1] for mm in taken)
        rows, inner = _fake_value(taken[0]).shape[0], whole.shape[-1]
        why = self._check_is_faster(
            found, whole.numel() * whole.element_size(), (rows, columns, inner), whole.element_size()
        )
        with graph.inserting_before(found.node):
            weights = [_transposed(graph, _hoist_views(graph, mm.args[1], order, order[found.node])) for mm in taken]
            kept = not _is_only_used_by(found.result, taken)
            args: tuple[Any, ...] = (found.x, weights, [], found.comm, found.size, found.dim, kept, "auto")
            outs, gathered = _emit(graph, found, torch.ops.torch_overlap.all_gather_matmul.default, args)
        for i, mm in enumerate(taken):
            with graph.inserting_before(mm):
                out = _call_function(graph, operator.getitem, (outs, i))
                mm.replace_all_uses_with(_reshaped(graph, out, list(_fake_value(mm).shape)))
        found.result.replace_all_uses_with(gathered)
        _erase(graph, found)
        return why

    # --- mm -> reduce_scatter, all_reduce -------------------------------------------------------

    def _fuse_reduction(self, graph: fx.Graph, found: _Collective) -> str:
        y = _fake_value(found.x)
        if found.op != "sum":
            raise _NotFused(f"it is no sum but {found.op}")
        if y.dim() < 2 or found.dim == y.dim() - 1:
            raise _NotFused("it scatters the columns of the product")
        terms = _summed_matmuls(found.x)
        inner = sum(_fake_value(mm.args[0]).shape[1] for mm in terms)
        sizes = (*_fake_value(terms[0]).shape, inner)
        why = self._check_is_faster(found, y.numel() * y.element_size(), sizes, y.element_size(), len(terms))
        scatter = found.name == "reduce_scatter"
        with graph.inserting_before(found.node):
            a, b = (_concatenated(graph, [mm.args[i] for mm in terms], 1 - i) for i in (0, 1))
            x = _reshaped(graph, a, [*y.shape[:-1], inner])
            weight = _transposed(graph, b)
            args: tuple[Any, ...] = (x, weight, None, found.comm, found.size)
            if scatter:
                op, args = torch.ops.torch_overlap.matmul_reduce_scatter.default, (*args, found.dim, "sum", "auto")
            else:
                op, args = torch.ops.torch_overlap.matmul_all_reduce.default, (*args, "sum", "auto")
            (out,) = _emit(graph, found, op, args)
        found.result.replace_all_uses_with(out)
        _erase(graph, found)
        return why


@contextlib.contextmanager
def overlap_products(cost: CostModel | None = None, overlap: str = "auto") -> Iterator[OverlapPass]:
    """Makes torch.compile (Inductor) run the pass inside the block, before its own passes. A graph from Inductor's
    cache was passed when it was compiled: its decisions are not reported again.

    with overlap_products() as log:
        step = torch.compile(model)
        step(x)  # compiles
    print(log.decisions)

    Raises:
        InvalidValueError: another pass is installed already.
    """
    import torch._inductor.config as config

    if config.post_grad_custom_pre_pass is not None:
        raise InvalidValueError(
            f"overlap_products: expected no torch._inductor.config.post_grad_custom_pre_pass, got "
            f"{config.post_grad_custom_pre_pass}; call an OverlapPass in yours"
        )
    made = OverlapPass(cost, overlap)
    with config.patch(post_grad_custom_pre_pass=made):
        yield made


# --- Finding ------------------------------------------------------------------------------------


def _collective(node: fx.Node) -> _Collective | None:
    if node.op != "call_function":
        return None
    ours, theirs = torch.ops.torch_overlap, torch.ops._c10d_functional
    effects = node.target is _with_effects
    everything: Any = node.args
    target, args = (everything[1], everything[2:]) if effects else (node.target, everything)
    names = {ours.all_gather.default: "all_gather", ours.reduce_scatter.default: "reduce_scatter",
             ours.all_reduce.default: "all_reduce"}  # fmt: skip
    if target in names:
        name = names[target]
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem} if effects else {}
        result = items.get(1) if effects else node
        if result is None:
            return None
        x, *rest = args
        if name == "all_gather":
            dim, op, comm, size = rest[0], "sum", rest[1], rest[2]
        elif name == "reduce_scatter":
            dim, op, comm, size = rest[:4]
        else:
            dim, (op, comm, size) = 0, rest[:3]
        dim = dim % max(1, _fake_value(x).dim())
        token = everything[0] if effects else None
        return _Collective(name, node, x, dim, op, comm, size, result, token, items.get(0))
    if target is theirs.all_gather_into_tensor.default:
        name, (x, size, group), op = "all_gather", args, "sum"
    elif target is theirs.reduce_scatter_tensor.default:
        name, (x, op, size, group) = "reduce_scatter", args
    elif target is theirs.all_reduce.default:
        name, (x, op, group), size = "all_reduce", args, 0
    else:
        return None
    waits = [user for user in node.users if user.target is theirs.wait_tensor.default]
    comm = _comm_of_group(str(group), _fake_value(x).device)
    if comm is None or len(node.users) != 1 or len(waits) != 1:
        return None
    return _Collective(name, node, x, 0, op, comm.get_name(), size or comm.get_size(), waits[0], None, None)


def _comm_of_group(name: str, device: torch.device) -> Any:
    import torch.distributed.distributed_c10d as distributed

    c10d: Any = distributed
    try:
        backend = c10d._resolve_process_group(name)._get_backend(device)
    except (LookupError, RuntimeError, ValueError):
        return None
    return backend.get_comm(device) if isinstance(backend, _BackendWrapper) else None


def _matmuls_of(value: fx.Node) -> list[fx.Node]:
    """Returns the two-dimensional products with the value, or a view as rows, as their first operand."""
    found, inner = [], _fake_value(value).shape[-1]
    for user in value.users:
        if user.target is _aten.mm.default and user.args[0] is value and user.args[1] is not value:
            found.append(user)
        elif user.target in _RESHAPES and _fake_value(user).shape == (_fake_value(value).numel() // inner, inner):
            found += [
                u for u in user.users if u.target is _aten.mm.default and u.args[0] is user and u.args[1] is not user
            ]
    return found


def _summed_matmuls(value: fx.Node) -> list[fx.Node]:
    """Returns the two-dimensional products whose sum is the value, with no other user. Raises _NotFused if there are
    none."""
    node: Any = value
    while node.target in _RESHAPES and len(node.users) == 1:
        node = node.args[0]
    added = _is_sum(node)
    if not added and node.target is not _aten.mm.default:
        raise _NotFused(f"what it reduces comes from {_name(node)}, not from a product")
    if len(node.users) != 1:
        raise _NotFused("the product is needed before it is reduced as well")
    if _fake_value(node).shape[-1] != _fake_value(value).shape[-1]:
        raise _NotFused("the product is reshaped in its columns")
    return [term for x in node.args for term in _summed_matmuls(x)] if added else [node]


def _is_sum(node: fx.Node) -> bool:
    """Returns True if the node adds two values of its own shape and dtype."""
    if node.target is not _aten.add.Tensor or node.kwargs:
        return False
    mine = (_fake_value(node).shape, _fake_value(node).dtype)
    return all(isinstance(x, fx.Node) and (_fake_value(x).shape, _fake_value(x).dtype) == mine for x in node.args)


def _is_only_used_by(value: fx.Node, taken: list[fx.Node]) -> bool:
    return all(user in taken or (user.target in _RESHAPES and _is_only_used_by(user, taken)) for user in value.users)


def _is_available_at(node: Any, order: dict[fx.Node, int], at: int) -> bool:
    """Returns True if the value, or the tensor that it is a view of, is computed before position `at`."""
    while order[node] > at and node.target in _VIEWS:
        node = node.args[0]
    return order[node] < at


# --- Writing ------------------------------------------------------------------------------------


def _fake_value(node: Any) -> torch.Tensor:
    return node.meta["val"]  # type: ignore[no-any-return]


def _name(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.op
    target = node.args[1] if node.target is _with_effects else node.target
    return str(getattr(target, "_opname", getattr(target, "__name__", target)))


def _call_function(graph: fx.Graph, target: Callable[..., Any], args: Sequence[Any]) -> fx.Node:
    """Adds a node, with its value as tracing would compute it."""
    node = graph.call_function(target, tuple(args))
    node.meta["val"] = _value(target, args)
    return node


def _value(target: Callable[..., Any], args: Sequence[Any]) -> Any:
    values = fx.map_arg(tuple(args), lambda n: n.meta["val"])
    mode = next((t.fake_mode for t in torch.utils._pytree.tree_leaves(values) if hasattr(t, "fake_mode")), None)
    with mode or contextlib.nullcontext():
        return target(*values)


def _reshaped(graph: fx.Graph, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    return (
        node
        if list(_fake_value(node).shape) == list(shape)
        else _call_function(graph, _aten.reshape.default, (node, list(shape)))
    )


def _transposed(graph: fx.Graph, node: Any) -> Any:
    if node.target is _aten.permute.default and list(node.args[1]) == [1, 0]:
        return node.args[0]
    return _call_function(graph, _aten.permute.default, (node, [1, 0]))


def _concatenated(graph: fx.Graph, nodes: list[Any], dim: int) -> Any:
    return nodes[0] if len(nodes) == 1 else _call_function(graph, _aten.cat.default, (nodes, dim))


def _hoist_views(graph: fx.Graph, node: Any, order: dict[fx.Node, int], at: int) -> fx.Node:
    """Returns the value at position `at`. Views that come later are recomputed."""
    if order[node] < at:
        return node  # type: ignore[no-any-return]
    return _call_function(graph, node.target, (_hoist_views(graph, node.args[0], order, at), *node.args[1:]))


def _emit(graph: fx.Graph, found: _Collective, op: Any, args: Sequence[Any]) -> list[fx.Node]:
    """Inserts the operator in place of the collective, also in the order of effects; returns its results."""
    if found.token is None:
        node = _call_function(graph, op, args)
        results = node.meta["val"]
        count = len(results) if isinstance(results, tuple) else 0
        return [_call_function(graph, operator.getitem, (node, i)) for i in range(count)] if count else [node]
    node = graph.call_function(_with_effects, (found.token, op, *args))
    value = _value(op, args)
    values = value if isinstance(value, tuple) else (value,)
    node.meta["val"] = (found.token.meta.get("val"), *values)
    token = _call_function(graph, operator.getitem, (node, 0))
    if found.next_token is not None:
        found.next_token.replace_all_uses_with(token)
    results = [_call_function(graph, operator.getitem, (node, 1 + i)) for i in range(len(values))]
    return results


def _erase(graph: fx.Graph, found: _Collective) -> None:
    """Removes the collective, which has an effect and is therefore not dead code."""
    for node in dict.fromkeys((found.result, *found.node.users, found.node)):
        assert node is found.node or not node.users
        if node is not found.node:
            graph.erase_node(node)
    graph.erase_node(found.node)

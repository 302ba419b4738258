"""Types of the compiled planner. The docstrings are in the module itself: help(torch_overlap.mesh.Layout)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

class AxisRef:
    axis: Final[int]
    pre: Final[int]
    size: Final[int]

_Axis = str | AxisRef
_Axes = None | str | AxisRef | Iterable[str | AxisRef]
_Partial = None | str | AxisRef | Iterable[str | AxisRef] | Mapping[str, str]

class Mesh:
    def __init__(
        self,
        axes: Mapping[str, int],
        ranks: Sequence[int] | None = None,
        ranks_per_host: int = 0,
        links: Mapping[str, str] = ...,
    ) -> None: ...
    @staticmethod
    def parse(text: str, ranks_per_host: int = 0) -> Mesh: ...
    axes: Final[dict[str, int]]
    size: Final[int]
    ranks: Final[list[int]]
    ranks_per_host: Final[int]
    def axis(self, name: str) -> AxisRef: ...
    def coordinate(self, rank: int, axis: _Axis) -> int: ...
    def group(self, rank: int, axes: _Axes) -> list[int]: ...
    def links(self, axes: _Axes) -> dict[str, int]: ...

class Layout:
    def __init__(
        self, mesh: Mesh, dims: Sequence[_Axes], partial: _Partial = None, invariant: _Axes = None
    ) -> None: ...
    @staticmethod
    def parse(mesh: Mesh, text: str) -> Layout: ...
    @staticmethod
    def replicated(mesh: Mesh, dims: int) -> Layout: ...
    mesh: Final[Mesh]
    dims: Final[tuple[tuple[str, ...], ...]]
    partial: Final[dict[str, str]]
    invariant: Final[tuple[str, ...]]
    num_dims: Final[int]
    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]: ...
    def offsets(self, shape: Sequence[int], rank: int) -> tuple[int, ...]: ...
    def global_shape(self, local_shapes: Sequence[Sequence[int]]) -> tuple[int, ...]: ...
    def with_dims(self, dims: Sequence[_Axes]) -> Layout: ...
    def with_partial(self, partial: _Partial) -> Layout: ...
    def with_invariant(self, axes: _Axes) -> Layout: ...

class CostModel:
    @staticmethod
    def h200() -> CostModel: ...
    @staticmethod
    def bandwidth_only(bandwidth: float = 1.0) -> CostModel: ...
    @staticmethod
    def from_dict(values: dict[str, Any]) -> CostModel: ...
    def to_dict(self) -> dict[str, Any]: ...
    name: Final[str]
    def collective(self, collective: str, links: Mapping[str, int], bytes: float) -> float: ...
    def matmul(self, m: float, n: float, k: float, element_size: int) -> float: ...
    def elementwise(self, bytes: float) -> float: ...
    def overlapped(self, collective: str, links: Mapping[str, int], bytes: float, matmul_seconds: float) -> float: ...

def wire_bytes(collective: str, ranks: int, bytes: float) -> float: ...

class Step:
    kind: Final[str]
    axes: Final[tuple[str, ...]]
    sources: Final[tuple[str, ...]]
    dim: Final[int]
    from_dim: Final[int]
    reduce: Final[str]
    before: Final[Layout]
    after: Final[Layout]
    ranks: Final[int]
    bytes: Final[float]
    wire_bytes: Final[float]
    seconds: Final[float]
    sends: Final[bool]

class Plan:
    from_layout: Final[Layout]
    to_layout: Final[Layout]
    shape: Final[tuple[int, ...]]
    element_size: Final[int]
    steps: Final[list[Step]]
    seconds: Final[float]
    wire_bytes: Final[float]
    num_sends: Final[int]
    def explain(self) -> str: ...

def plan_reshard(
    from_layout: Layout, to_layout: Layout, shape: Sequence[int], element_size: int, cost: CostModel
) -> Plan: ...
def greedy_reshard(
    from_layout: Layout, to_layout: Layout, shape: Sequence[int], element_size: int, cost: CostModel
) -> Plan: ...
def distribute(array: ArrayLike, layout: Layout) -> list[NDArray[np.float64]]: ...
def collect(locals: Sequence[ArrayLike], layout: Layout, shape: Sequence[int]) -> NDArray[np.float64]: ...
def simulate(plan: Plan, locals: Sequence[ArrayLike]) -> list[NDArray[np.float64]]: ...

class OpRule:
    @staticmethod
    def einsum(op: str, equation: str, inputs: Sequence[Sequence[int]]) -> OpRule: ...
    @staticmethod
    def elementwise(op: str, inputs: Sequence[Sequence[int]], how: str = "nonlinear") -> OpRule: ...
    @staticmethod
    def matmul(a: Sequence[int], b: Sequence[int]) -> OpRule: ...
    @staticmethod
    def linear(x: Sequence[int], weight: Sequence[int], has_bias: bool = False) -> OpRule: ...
    @staticmethod
    def reduction(op: str, x: Sequence[int], dims: Sequence[int] = ..., keepdim: bool = False) -> OpRule: ...
    @staticmethod
    def reshape(from_shape: Sequence[int], to_shape: Sequence[int]) -> OpRule: ...
    @staticmethod
    def transpose(x: Sequence[int], order: Sequence[int]) -> OpRule: ...
    @staticmethod
    def broadcast(from_shape: Sequence[int], to_shape: Sequence[int]) -> OpRule: ...
    @staticmethod
    def concat(inputs: Sequence[Sequence[int]], dim: int) -> OpRule: ...
    @staticmethod
    def slice(x: Sequence[int], dim: int, parts: Sequence[tuple[int, int]]) -> OpRule: ...
    @staticmethod
    def take(table: Sequence[int], index: Sequence[int], dim: int = 0) -> OpRule: ...
    @staticmethod
    def along(op: str, x: Sequence[int], dims: Sequence[int], outputs: Sequence[Sequence[int]] = ...) -> OpRule: ...
    @staticmethod
    def norm(x: Sequence[int], normalized_dims: int = 1, num_weights: int = 0) -> OpRule: ...
    @staticmethod
    def conv(
        x: Sequence[int], weight: Sequence[int], output: Sequence[int], groups: int = 1, has_bias: bool = False
    ) -> OpRule: ...
    @staticmethod
    def attention(
        query: Sequence[int], key: Sequence[int], value: Sequence[int], is_causal: bool = False
    ) -> OpRule: ...
    @staticmethod
    def opaque(op: str, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> OpRule: ...
    op: Final[str]
    note: Final[str]
    inputs: Final[list[tuple[int, ...]]]
    outputs: Final[list[tuple[int, ...]]]

class Strategy:
    inputs: Final[list[Layout]]
    outputs: Final[list[Layout]]
    roles: Final[str]
    reshard: Final[float]
    compute: Final[float]
    after: Final[float]
    gradients: Final[float]
    seconds: Final[float]

class Propagation:
    inputs: Final[list[Layout]]
    outputs: Final[list[Layout]]
    chosen: Final[Strategy]
    plans: Final[list[Plan]]
    strategies: Final[list[Strategy]]
    seconds: Final[float]
    def explain(self) -> str: ...

def propagate(
    rule: OpRule,
    inputs: Sequence[Layout],
    cost: CostModel,
    element_sizes: Sequence[int] | None = None,
    wanted: Sequence[Layout | None] = ...,
    explore: bool = False,
    training: bool = False,
) -> Propagation: ...

class GraphPlan:
    layouts: Final[list[Layout]]
    strategies: Final[list[Strategy]]
    plans: Final[list[list[Plan]]]
    results: Final[list[tuple[int, Plan]]]
    reshard: Final[float]
    compute: Final[float]
    gradients: Final[float]
    seconds: Final[float]
    wire_bytes: Final[float]
    num_sends: Final[int]

class AutoShard:
    plan: Final[GraphPlan]
    alternatives: Final[list[tuple[str, GraphPlan]]]
    def explain(self, graph: Graph) -> str: ...

_Constraint = Layout | Sequence[tuple[_Axes, bool, int]]

class Graph:
    def __init__(self, mesh: Mesh) -> None: ...
    def add_value(
        self,
        name: str,
        shape: Sequence[int],
        element_size: int = 4,
        constraint: _Constraint | None = None,
        is_parameter: bool = False,
    ) -> int: ...
    def add_node(
        self, rule: OpRule, inputs: Sequence[int], output_names: Sequence[str], element_size: int = 4
    ) -> list[int]: ...
    def constrain(self, value: int, constraint: _Constraint) -> None: ...
    mesh: Final[Mesh]
    values: Final[list[tuple[str, tuple[int, ...]]]]
    def dims(self, max_priority: int = 1000) -> list[Layout]: ...
    def plan(self, cost: CostModel, training: bool = False) -> GraphPlan: ...
    def auto_shard(self, cost: CostModel, training: bool = False, width: int = 24, branch: int = 12) -> AutoShard: ...
    def explain(self, plan: GraphPlan) -> str: ...
    def collectives(self, plan: GraphPlan) -> list[tuple[str, Step]]: ...

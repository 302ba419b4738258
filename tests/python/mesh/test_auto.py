"""auto_shard on modules and functions: traced by torch.export, with layouts chosen by cost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torch_overlap.mesh import CostModel, DimSpec, Layout, Mesh, P, ShardingSpec, auto_shard, trace


class Mlp(nn.Module):
    def __init__(self, dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim, bias), nn.Linear(4 * dim, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.mlp = Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(z.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm2(x))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_function_is_split_by_rows() -> None:  # T46
    mesh = Mesh({"d": 4})
    found = auto_shard(lambda a, b: a @ b, mesh, (meta(1024, 1024), meta(1024, 1024)))
    assert {name: str(x) for name, x in found.layouts.items()} == {"a": "[d],[]", "b": "[],[]"}
    assert str(found.out_layouts[0]) == "[d],[]"
    assert found.collectives == []
    assert found.explain().startswith("chosen: search 1, Mesh(d=4): 0 collectives")


@pytest.mark.parametrize(
    ("dtype", "layouts"),
    [(torch.float32, {}), (torch.float32, {"b": "[d],[]"}), (torch.bfloat16, {"b": "[d],[]"})],
    ids=["free", "weight by rows", "weight by rows, bf16"],
)
def test_a_flat_product_is_split_by_k(dtype: torch.dtype, layouts: dict[str, str]) -> None:  # T47
    mesh = Mesh({"d": 4})
    args = (meta(3, 4096, dtype=dtype), meta(4096, 1024, dtype=dtype))
    found = auto_shard(lambda a, b: a @ b, mesh, args, layouts=layouts, out_layouts=[P()])
    assert {name: str(x) for name, x in found.layouts.items()} == {"a": "[],[d]", "b": "[d],[]"}
    assert [step.kind for _, step in found.collectives] == ["all_reduce"]
    assert found.out_layouts == [Layout.replicated(mesh, 2)]


def test_a_product_shorter_than_a_reduction_is_not_split() -> None:  # T47
    found = auto_shard(lambda a, b: a @ b, Mesh({"d": 4}), (meta(3, 4096), meta(4096, 1024)), out_layouts=[P()])
    assert {name: str(x) for name, x in found.layouts.items()} == {"a": "[],[]", "b": "[],[]"}
    assert found.collectives == []


def test_a_closed_dimension_holds_back_nothing_else() -> None:  # T51
    args, layouts = (meta(8, 4), meta(8, 4)), {"a": "[x,y],[]", "b": "[x],[]"}
    found = auto_shard(lambda a, b: a + b, Mesh({"x": 2, "y": 2}), args, layouts=layouts)
    assert {name: str(x) for name, x in found.layouts.items()} == layouts
    assert str(found.out_layouts[0]) == "[x,y],[]"
    assert found.collectives == []


def test_a_fixed_result_reaches_back() -> None:  # T48
    mesh = Mesh({"d": 4})
    args = (meta(1024, 1024), meta(1024, 1024), meta(1024, 1024))
    for wanted in ("[d],[]", "[],[d]"):
        found = auto_shard(lambda a, b, c: a @ b + c, mesh, args, out_layouts=[wanted])
        assert str(found.out_layouts[0]) == wanted
        assert found.collectives == []


def test_large_weights_stay_where_they_are() -> None:
    with torch.device("meta"):
        module = Mlp(8192).bfloat16()
    mesh = Mesh({"tp": 4})
    found = auto_shard(module, mesh, (meta(1024, 8192),), layouts={"x": P()}, out_layouts=[P()], training=True)
    assert str(found.layouts["up.weight"]) == "[tp],[]"
    assert str(found.layouts["down.weight"]) == "[],[tp]"
    assert [step.kind for _, step in found.collectives] == ["all_reduce"]


def test_a_transformer_block_needs_no_unknown_operator() -> None:
    with torch.device("meta"):
        module = Block(4096, 32).bfloat16()
    mesh = Mesh.parse("dp=2,tp=4")
    found = auto_shard(module, mesh, (meta(4, 2048, 4096),), layouts={"x": P("dp")}, training=True)
    assert found.unknown == []
    assert not any(x.partial for x in found.layouts.values())
    assert "not " in found.explain()
    best, *others = [plan.seconds for _, plan in found.alternatives]
    assert all(best <= other for other in others)
    names = {name for name, _ in found.alternatives}
    assert {"data parallel", "replicated inputs"} <= names


def test_a_bias_is_never_laid_out_as_pending() -> None:
    with torch.device("meta"):
        module = Mlp(4096, bias=True).bfloat16()
    found = auto_shard(module, Mesh({"tp": 4}), (meta(64, 4096),), layouts={"x": P()})
    assert all(not layout.partial for layout in found.layouts.values())


def test_what_has_no_rule_runs_on_whole_tensors() -> None:
    mesh = Mesh({"x": 2})
    found = auto_shard(lambda a: torch.linalg.inv(a.float()) + 1, mesh, (meta(64, 64),), layouts={"a": "[x],[]"})
    assert found.unknown == ["linalg_inv"]
    assert "for want of a rule: linalg_inv" in found.explain()
    assert [step.kind for _, step in found.collectives] == ["all_gather"]


def test_operators_that_are_several_have_rules() -> None:
    def loss(x: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        x = torch.addmm(b, x, w)
        first, second = torch.stack((x, x * 2)).unbind(0)
        return nn.functional.cross_entropy(first + second, target)

    args = (meta(65536, 512), meta(512, 4096), meta(4096), torch.empty(65536, dtype=torch.int64, device="meta"))
    mesh = Mesh({"x": 4})
    found = auto_shard(loss, mesh, args, layouts={"x": "[x],[]", "w": P(), "b": P(), "target": "[x]"})
    assert found.unknown == []
    assert {step.kind for _, step in found.collectives} == {"all_reduce"}


def test_open_dimensions_are_heard_by_priority() -> None:
    mesh = Mesh.parse("x=2,y=2")
    strong = ShardingSpec(mesh, (DimSpec(("y",), is_open=True), DimSpec(is_open=True)))
    weak = ShardingSpec(mesh, (DimSpec(("x",), is_open=True, priority=1), DimSpec(is_open=True)))
    traced = trace(lambda a, b: a + b, (meta(8, 8), meta(8, 8)), mesh, {"a": weak, "b": strong})
    number = traced.outputs[0]
    assert str(traced.graph.dims()[number]) == "[y],[]"
    assert str(traced.graph.dims(max_priority=0)[traced.inputs["a"]]) == "[y],[]"


def test_the_result_is_the_same_every_time() -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    with torch.device("meta"):
        module = Mlp(1024)
    texts = {auto_shard(module, mesh, (torch.empty(64, 1024, device="meta"),)).explain() for _ in range(3)}
    assert len(texts) == 1


def test_wrong_names_and_numbers_are_refused() -> None:
    mesh, x = Mesh({"x": 2}), meta(8, 8)
    with pytest.raises(ValueError, match=r"expected layouts of \['a'\], got some of \['b'\]"):
        trace(lambda a: a + 1, (x,), mesh, {"b": P()})
    with pytest.raises(ValueError, match="expected 1 out_layouts, got 2"):
        trace(lambda a: a + 1, (x,), mesh, None, [P(), P()])
    with pytest.raises(ValueError, match="at most 2 entries"):
        trace(lambda a: a + 1, (x,), mesh, {"a": P("x", None, None)})
    with pytest.raises(ValueError, match="carrier_pigeon"):
        auto_shard(lambda a: a.sum(), Mesh({"x": 2}, links={"x": "carrier_pigeon"}), (x,), layouts={"a": "[x],[]"},
                   out_layouts=[P()], cost=CostModel.h200())  # fmt: skip

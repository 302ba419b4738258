"""Decomposition of torch functions: operators, their numbers, results, writes, and unsupported functions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torch_overlap import UnsupportedError
from torch_overlap.mesh import CostModel, Layout, Mesh, propagate
from torch_overlap.mesh.aten_call import AtenCall, Operand
from torch_overlap.mesh.capture import capture
from torch_overlap.mesh.local import local_call
from torch_overlap.mesh.program import Program, Ref
from torch_overlap.mesh.rules import known_operators, rule_of

X, Y, V = (Operand(shape, torch.float32) for shape in ((4, 6), (4, 6), (6,)))
INDEX = Operand((4,), torch.int64)


def names(program: Program) -> list[str]:
    return [step.call.name for step in program.steps]


@pytest.mark.smoke
def test_a_call_knows_its_tensors() -> None:
    call = AtenCall(torch.ops.aten.cat.default, [[X, Y], 1], {}, [Operand((4, 12), torch.float32)])
    assert call.name == "cat"
    assert call.inputs == [X, Y]
    assert call.argument(1, "dim", 0) == 1
    assert call.argument(2, "other", "default") == "default"
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    assert call.as_function()([a, b]).equal(torch.cat((a, b), 1))
    args, kwargs = call.bind([a, b])
    assert args[0][0] is a
    assert args[0][1] is b
    assert kwargs == {}
    assert call.args[0] == [X, Y]
    assert "aten.cat.default" in repr(call)


FAST: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (torch.matmul, (X, Operand((6, 3), torch.float32))),
    (torch.matmul, (Operand((2, 1, 4, 6), torch.float32), Operand((3, 6, 5), torch.float32))),
    (torch.mm, (X, Operand((6, 3), torch.float32))),
    (torch.bmm, (Operand((2, 4, 6), torch.float32), Operand((2, 6, 3), torch.float32))),
    (F.linear, (X, Operand((5, 6), torch.float32), Operand((5,), torch.float32))),
    (Tensor.add, (X, V)),
    (Tensor.__radd__, (X, 2)),
    (torch.sub, (V, X)),
    (torch.mul, (X, Operand((4, 1), torch.float32))),
    (torch.div, (X, 3)),
    (Tensor.__truediv__, (X, Y)),
    (torch.relu, (X,)),
    (F.gelu, (X,)),
    (torch.exp, (X,)),
    (F.silu, (X,)),
    (torch.gt, (X, Y)),
    (torch.maximum, (X, V)),
    (torch.neg, (X,)),
]


@pytest.mark.parametrize(("function", "args"), FAST)
def test_the_fast_way_is_the_traced_one(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    fast = capture(function, args)
    traced = capture(lambda *x: function(*x), args)
    assert [str(s.call) for s in fast.steps] == [str(s.call) for s in traced.steps]
    assert [s.call.outputs for s in fast.steps] == [s.call.outputs for s in traced.steps]
    assert (fast.steps[0].inputs, fast.steps[0].outputs) == (traced.steps[0].inputs, traced.steps[0].outputs)
    assert fast.result == traced.result
    assert fast.operands == traced.operands


WHOLE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "layer_norm": (F.layer_norm, (X, (6,))),
    "softmax": (torch.softmax, (X, -1)),
    "reshape": (Tensor.reshape, (X, 3, -1)),
    "rms_norm": (F.rms_norm, (X, (6,))),
    "log_softmax": (F.log_softmax, (X, -1)),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, (Operand((2, 3, 4, 5), torch.float32),) * 3),
    "conv1d": (F.conv1d, (Operand((2, 4, 9), torch.float32), Operand((6, 4, 3), torch.float32))),
    "rsub": (Tensor.__rsub__, (X, 1)),
    "numpy_T": (Tensor.T.__get__, (X,)),  # type: ignore[attr-defined]
    "embedding": (F.embedding, (INDEX, X)),
    "einsum": (torch.einsum, ("ab,cb->ac", X, Y)),
    "contiguous": (Tensor.contiguous, (X,)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_composite_operators_stay_whole(name: str) -> None:
    program = capture(*WHOLE[name])
    assert names(program) == [name]
    assert rule_of(program.steps[0].call) is not None


def test_others_come_in_parts_with_rules() -> None:
    assert names(capture(torch.outer, (V, V))) == ["reshape", "mul"]
    assert names(capture(torch.stack, ([X, Y],))) == ["unsqueeze", "unsqueeze", "cat"]
    assert names(capture(torch.addmm, (V, X, Operand((6, 6), torch.float32)))) == ["matmul", "add"]
    for function, args in ((F.cross_entropy, (X, INDEX)), (F.nll_loss, (X, INDEX)), (torch.topk, (X, 2)),
                           (torch.linalg.vector_norm, (X,)), (F.pad, (X, (1, 1))), (F.one_hot, (INDEX, 3)),
                           (Tensor.repeat, (X, 2, 1)), (F.mse_loss, (X, Y)), (torch.tensordot, (X, Y)),
                           (Tensor.__getitem__, (X, (0, slice(1, 3))))):  # fmt: skip
        program = capture(function, args)
        assert all(rule_of(s.call) is not None for s in program.steps if s.call.inputs), names(program)


def test_results_have_their_structure() -> None:
    both = capture(torch.max, (X, -1))
    assert type(both.result) is torch.return_types.max
    assert both.result.values == Ref(1)
    assert both.results(lambda number: number * 10)[1] == 20
    assert capture(Tensor.size, (X,)).result == torch.Size((4, 6))
    assert capture(Tensor.dim, (X,)).result == 2
    assert isinstance(capture(Tensor.split, (X, 2)).result, tuple)
    assert len(capture(Tensor.__iter__, (X,)).result) == 4
    assert capture(lambda x: {"a": x, "b": [x + 1, 3]}, (X,)).result == {"a": Ref(0), "b": [Ref(1), 3]}


def test_every_operand_is_its_own() -> None:
    program = capture(torch.addcmul, (X, X, X))
    assert program.operands == [X, X, X]
    assert program.steps[0].inputs == (0, 1, 2)
    named = capture(F.linear, (X,), {"weight": Operand((5, 6), torch.float32)})
    assert named.steps[0].inputs == (0, 1)


def test_plain_tensors_are_constants() -> None:
    plain = torch.randn(6)
    program = capture(torch.add, (X, plain))
    (step,) = program.steps
    assert step.inputs == (0, 1)
    assert program.constants[1] is plain
    inside = capture(lambda x: x * torch.tensor(2.5), (X,))
    assert [float(c) for c in inside.constants.values()] == [2.5]


def test_writes_are_new_values() -> None:
    program = capture(lambda x, y: x.mul_(2).add_(y), (X, Y))
    assert names(program) == ["mul", "add"]
    assert program.writes == {0: program.steps[1].outputs[0]}
    assert program.result == Ref(program.writes[0])
    assert names(capture(F.relu, (X,), {"inplace": True})) == ["relu"]
    wide = capture(Tensor.add_, (X, Operand((6,), torch.float64)))
    last = wide.steps[-1]
    assert wide.writes == {0: last.outputs[0]}
    assert last.call.outputs == [X]  # in place keeps the dtype


def test_writes_to_parts_are_refused() -> None:
    refused = r"_: expected to write to a whole tensor.*torch\.where"
    with pytest.raises(UnsupportedError, match="copy" + refused):
        capture(lambda x, y: x[1:].copy_(y[1:]), (X, Y))
    with pytest.raises(UnsupportedError, match="(copy|fill)" + refused):  # torch decides which of them
        capture(Tensor.__setitem__, (X, 0, 1.0))
    with pytest.raises(UnsupportedError, match="add_: expected to write to a whole"):
        capture(lambda x: x[1:].add_(1), (X,))
    with pytest.raises(UnsupportedError, match="out="):
        capture(torch.add, (X, Y), {"out": Y})


@pytest.mark.parametrize(
    ("function", "args"),
    [(F.dropout, (X, 0.1)), (torch.rand_like, (X,)), (torch.bernoulli, (X,)), (Tensor.uniform_, (X,)),
     (torch.multinomial, (X, 2)), (F.alpha_dropout, (X, 0.5, True)), (lambda x: x + torch.rand(6), (X,)),
     (F.scaled_dot_product_attention, (Operand((2, 3, 4, 5), torch.float32),) * 3 + (None, 0.5))],
)  # fmt: skip
def test_random_numbers_are_refused(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with pytest.raises(UnsupportedError, match=r"expected an operator that draws no random numbers, got aten\."):
        capture(function, args)


def test_dropout_that_is_off_is_not() -> None:
    assert names(capture(F.dropout, (X, 0.1, False))) == ["dropout"]
    assert names(capture(F.dropout, (X, 0.0))) == ["dropout"]
    call = AtenCall(torch.ops.aten.dropout.default, [X, 0.1, True], {}, [X])
    with pytest.raises(UnsupportedError, match="dropout"):
        local_call(call, None, *[[Layout.replicated(Mesh({"x": 2}), 2)]] * 2, 0)


def test_errors_are_those_of_torch() -> None:
    with pytest.raises(RuntimeError, match="6"):
        capture(torch.add, (X, Operand((4, 5), torch.float32)))
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|size mismatch|same reduction dim"):
        capture(torch.matmul, (X, X))
    with pytest.raises(IndexError):
        capture(Tensor.__getitem__, (X, 7))
    with pytest.raises(RuntimeError, match="shape"):
        capture(Tensor.view, (X, 5, 5))
    with pytest.raises(TypeError):
        capture(torch.matmul, (X,))


@pytest.mark.parametrize(
    "function",
    [Tensor.item, torch.nonzero, Tensor.tolist, lambda x: x[x > 0], lambda x: bool(x.sum()),
     lambda x: x.narrow(0, x.sum().to(torch.int64), 1), lambda x: x.repeat_interleave(x[0].to(torch.int64), 1),
     lambda x: x.tensor_split(x[0].to(torch.int64), 1), lambda x: F.gaussian_nll_loss(x, x, x)],
)  # fmt: skip
def test_results_that_depend_on_elements_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match="expected a function whose operators and shapes follow from shapes"):
        capture(function, (X,))


def test_tensors_of_numbers_on_the_device_of_operands_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="tensors of numbers on the CPU"):
        capture(lambda x: torch.unravel_index(x, (2, 2)), (Operand((4,), torch.int64),))


def test_devices_are_those_of_the_ranks() -> None:
    mesh, cpu = Mesh({"x": 2}), torch.device("cpu")
    whole = Layout.replicated(mesh, 1)
    (step,) = capture(lambda: torch.arange(5, device=cpu), (), device=cpu).steps
    assert step.call.inputs == []
    made = local_call(step.call, None, [], [whole], 0, cpu)([])
    assert made.equal(torch.arange(5))
    for args in ((V, cpu), (V, "cpu"), (V, "cpu", torch.float64)):
        for step in capture(Tensor.to, args, device=cpu).steps:
            part = local_call(step.call, rule_of(step.call), [whole], [whole], 0)([torch.randn(6)])
            assert part.device == cpu
    with pytest.raises(UnsupportedError, match="expected the device of the operands, cpu, got cuda"):
        capture(Tensor.to, (V, "cuda"), device=cpu)


def test_modes_of_the_caller_do_not_matter() -> None:
    expected = [str(s.call) for s in capture(F.layer_norm, (X, (6,))).steps]
    with torch.inference_mode():
        assert [str(s.call) for s in capture(F.layer_norm, (X, (6,))).steps] == expected
    with torch.device("cpu"):
        assert [str(s.call) for s in capture(F.layer_norm, (X, (6,))).steps] == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert [str(s.call) for s in capture(F.layer_norm, (X, (6,))).steps] == expected


def test_an_operator_without_a_rule_is_opaque() -> None:
    call = capture(torch.linalg.eigvalsh, (Operand((4, 4), torch.float32),)).steps[0].call
    assert rule_of(call) is None
    assert {"linear", "softmax", "gather", "index", "einsum"} <= set(known_operators())


def test_a_view_as_another_type_moves_no_pending_sum() -> None:
    mesh = Mesh({"x": 2})
    (step,) = capture(Tensor.view, (X, torch.int32)).steps
    rule = rule_of(step.call)
    assert rule is not None
    (plan,) = propagate(rule, [Layout.parse(mesh, "[],[] P{x}")], CostModel.h200()).plans
    assert [s.kind for s in plan.steps] == ["all_reduce"]  # the bits of terms are not those of the sum
    (step,) = capture(Tensor.view, (X, torch.int16)).steps
    assert rule_of(step.call) is None  # elements are cut


def test_threads_take_turns() -> None:
    cases = list(WHOLE.values())
    expected = [str(capture(*case).steps) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda case: str(capture(*case).steps), cases)) == expected


def test_modes_do_not_see_what_is_only_traced() -> None:
    with FlopCounterMode(display=False) as counter:
        capture(F.scaled_dot_product_attention, (Operand((2, 3, 4, 5), torch.float32),) * 3)
    assert counter.get_total_flops() == 0

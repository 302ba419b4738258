"""Functions of torch on parts of tensors: the results of all ranks, collected, equal the function of the whole
tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import simulated as sim
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_overlap.mesh import Layout, Mesh, OpRule, propagate
from torch_overlap.mesh.aten_call import AtenCall
from torch_overlap.mesh.local import local_call
from torch_overlap.mesh.rules import rule_of

Make = Callable[[torch.Generator], Tensor]


def real(*shape: int) -> Make:
    return lambda g: (torch.randn(shape, generator=g, dtype=torch.float64) * 256).round() / 256


def counted(generator: torch.Generator) -> Tensor:
    """Returns classes of 4, not all of them ignored."""
    return torch.cat([torch.randint(4, (5,), generator=generator), torch.zeros(1, dtype=torch.int64)])


def integer(high: int, *shape: int) -> Make:
    return lambda g: torch.randint(0, high, shape, generator=g)


def signed(high: int, *shape: int) -> Make:
    return lambda g: torch.randint(-high, high, shape, generator=g)


def distinct(*shape: int) -> Make:
    """Returns values without ties: torch does not specify which of equal values is first."""
    return lambda g: torch.randperm(math.prod(shape), generator=g).reshape(shape).double() / 8 - 1.53125


def truth(*shape: int) -> Make:
    return lambda g: torch.rand(shape, generator=g) < 0.5


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


def sorted_values(x: Tensor) -> Tensor:
    return x.sort(1)[0]


X, Y, V, D = real(4, 7), real(4, 7), real(7), distinct(4, 7)
QKV = (real(2, 4, 5, 8), real(2, 2, 6, 8), real(2, 2, 6, 3))

CASES: dict[str, tuple[Callable[..., Any], tuple[Make, ...]]] = {
    "add": (torch.add, (X, Y)),
    "add, broadcast": (torch.add, (X, V)),
    "add, alpha": (lambda x, y: torch.add(x, y, alpha=3), (X, Y)),
    "add, number": (lambda x: x + 2, (X,)),
    "sub, alpha": (lambda x, y: torch.sub(x, y, alpha=0.5), (X, Y)),
    "rsub": (lambda x: 1 - x, (X,)),
    "mul": (torch.mul, (X, V)),
    "div": (torch.div, (X, distinct(4, 7))),
    "div, floor": (lambda x: torch.div(x, 0.5, rounding_mode="floor"), (X,)),
    "rdiv": (lambda x: 3 / (x * x + 1), (X,)),
    "pow": (lambda x: x**2, (X,)),
    "exp": (torch.exp, (X,)),
    "relu": (F.relu, (X,)),
    "gelu": (F.gelu, (X,)),
    "silu": (F.silu, (X,)),
    "softplus": (F.softplus, (X,)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), (X,)),
    "compare": (lambda x, y: (x > y) & (x > 0), (X, Y)),
    "where": (torch.where, (truth(4, 7), X, V)),
    "masked_fill": (lambda x, m: x.masked_fill(m, -1.0), (X, truth(4, 7))),
    "addcmul": (lambda x, y, v: torch.addcmul(x, y, v, value=2), (X, Y, V)),
    "cast": (lambda x: x.float().double(), (X,)),
    "matmul": (torch.matmul, (real(6, 5), real(5, 7))),
    "matmul, batches": (torch.matmul, (real(2, 4, 6), real(2, 6, 3))),
    "matmul, one batch": (torch.matmul, (real(4, 3, 6), real(6, 5))),
    "matmul, vectors": (torch.matmul, (real(6), real(6))),
    "vector matmul": (torch.matmul, (real(6), real(6, 5))),
    "matmul vector": (torch.matmul, (real(5, 6), real(6))),
    "matmul, ones": (torch.matmul, (real(1, 1), real(1, 1))),
    "linear": (F.linear, (real(4, 3, 6), real(5, 6), real(5))),
    "linear, one row": (F.linear, (real(1, 6), real(8, 6))),
    "addmm": (torch.addmm, (real(5), real(4, 6), real(6, 5))),
    "addmm, factors": (lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=0.5), (real(5), real(4, 6), real(6, 5))),
    "baddbmm": (torch.baddbmm, (real(4, 3, 5), real(4, 3, 6), real(4, 6, 5))),
    "outer": (torch.outer, (real(5), real(4))),
    "einsum": (lambda a, b: torch.einsum("bid,bjd->bij", a, b), (real(2, 4, 6), real(2, 5, 6))),
    "einsum, implicit": (lambda a, b: torch.einsum("ab,bc", a, b), (real(4, 6), real(6, 5))),
    "einsum, ellipsis": (lambda a, b: torch.einsum("...ab,bc->...ac", a, b), (real(2, 4, 6), real(6, 5))),
    "sum": (torch.sum, (X,)),
    "sum, dim": (lambda x: x.sum(0), (X,)),
    "sum, keepdim": (lambda x: x.sum(-1, keepdim=True), (X,)),
    "mean": (torch.mean, (X,)),
    "mean, dim": (lambda x: x.mean(0), (X,)),
    "mean, dims": (lambda x: x.mean((0, 2), keepdim=True), (real(4, 3, 5),)),
    "amax": (lambda x: x.amax(1), (X,)),
    "amin, few": (lambda x: x.amin(0), (real(3, 5),)),
    "max": (torch.max, (X,)),
    "max, dim": (lambda x: x.max(0), (D,)),
    "maximum": (torch.maximum, (X, Y)),
    "prod": (lambda x: x.prod(0), (X,)),
    "any": (lambda m: m.any(1), (truth(4, 7),)),
    "all": (torch.all, (truth(4, 7),)),
    "argmax": (lambda x: x.argmax(-1), (D,)),
    "argmin, all": (torch.argmin, (D,)),
    "sort": (sorted_values, (D,)),
    "topk": (lambda x: x.topk(3, -1), (D,)),
    "logsumexp": (lambda x: x.logsumexp(-1), (X,)),
    "var": (lambda x: x.var(-1, keepdim=True), (X,)),
    "var, all": (lambda x: x.var(), (X,)),
    "std": (lambda x: x.std(0, correction=0), (X,)),
    "norm": (torch.linalg.vector_norm, (X,)),
    "norm, dim": (lambda x: x.norm(dim=-1), (X,)),
    "norm, one": (lambda x: torch.linalg.vector_norm(x, 1), (X,)),
    "norm, infinite": (lambda x: torch.linalg.vector_norm(x, float("inf")), (X,)),
    "normalize": (F.normalize, (X,)),
    "cumsum": (lambda x: x.cumsum(0), (X,)),
    "softmax": (lambda x: x.softmax(-1), (X,)),
    "log_softmax": (lambda x: x.log_softmax(0), (X,)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (7,), w, b), (real(4, 3, 7), V, V)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (7,), w), (real(4, 3, 7), V)),
    "native_layer_norm": (lambda x: torch.native_layer_norm(x, (7,), None, None, 1e-5), (real(4, 3, 7),)),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), (real(4, 6, 5), real(6))),
    "batch_norm": (lambda x, m: F.batch_norm(x, m, m * m + 1), (real(4, 6, 5), real(6))),
    "batch_norm, training": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (real(4, 6, 5), real(6), real(6))),
    "prelu": (F.prelu, (real(4, 6, 5), real(6))),
    "logsigmoid": (F.logsigmoid, (X,)),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), (real(4, 6, 5), real(8, 6, 3), real(8))),
    "conv2d, groups": (lambda x, w: F.conv2d(x, w, groups=4), (real(3, 8, 5, 5), real(8, 2, 3, 3))),
    "conv1d, depthwise": (lambda x, w, b: F.conv1d(x, w, b, groups=8), (real(2, 8, 5), real(8, 1, 3), real(8))),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), QKV),
    "attention, causal": (lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), (real(3, 4, 5, 8),) * 3),
    "attention, mask": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
                        (*QKV, real(2, 1, 5, 6))),
    "attention, by hand": (masked_attention, (real(2, 4, 5, 8),) * 3),
    "rotary": (rotated, (real(2, 4, 5, 8), real(5, 8), real(5, 8))),
    "view": (lambda x: x.view(8, 6), (real(4, 2, 6),)),
    "view, split": (lambda x: x.view(4, 2, 3, 5), (real(4, 6, 5),)),
    "reshape, merge": (lambda x: x.reshape(-1), (real(4, 4),)),
    "reshape, other": (lambda x: x.reshape(2, 4, 32), (real(8, 32),)),
    "reshape, odd": (lambda x: x.reshape(6, 4), (real(4, 6),)),
    "flatten": (lambda x: x.flatten(1), (real(4, 3, 5),)),
    "unflatten": (lambda x: x.unflatten(-1, (4, 3)), (real(4, 12),)),
    "squeeze": (torch.squeeze, (real(4, 1, 2, 1),)),
    "squeeze, not one": (lambda x: x.squeeze(0), (real(2, 3),)),
    "unsqueeze": (lambda x: x.unsqueeze(1)[..., None], (X,)),
    "permute": (lambda x: x.permute(2, 0, -2), (real(4, 3, 5),)),
    "transpose": (lambda x: x.mT.contiguous(), (real(4, 3, 5),)),
    "T": (lambda x: x.T.t(), (X,)),
    "movedim": (lambda x: x.movedim(0, -1), (real(4, 3, 5),)),
    "expand": (lambda x: x.expand(3, 4, 7), (real(4, 1),)),
    "expand_as": (lambda x, y: x.expand_as(y), (V, X)),
    "repeat": (lambda x: x.repeat(2, 1, 3), (X,)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), (real(2, 2, 5),)),
    "cat": (lambda x, y: torch.cat((x, y), 0), (X, real(3, 7))),
    "stack": (lambda x, y: torch.stack((x, y), -1), (X, Y)),
    "split": (lambda x: x.split(3, 1), (X,)),
    "split, sizes": (lambda x: x.split([1, 3], 0), (X,)),
    "chunk": (lambda x: x.chunk(3, -1), (real(4, 6),)),
    "chunk, one": (lambda x: x.chunk(1, 0), (X,)),
    "unbind": (lambda x: x.unbind(0), (X,)),
    "narrow": (lambda x: x.narrow(0, 0, 4), (X,)),
    "select": (lambda x: x[-1], (X,)),
    "slice": (lambda x: x[1:3, ::2, None], (X,)),
    "slice, all": (lambda x: x[:, :7], (X,)),
    "index": (lambda x, i: x[:, i], (X, signed(7, 3, 2))),
    "index, plain": (lambda x: x[torch.tensor([0, 2, 3])], (X,)),
    "index_select": (lambda x, i: x.index_select(1, i), (X, integer(7, 5))),
    "take, partial": (lambda x, y, i: (x @ y)[i], (real(5, 8), real(8, 6), integer(5, 4))),
    "gather": (lambda x, i: x.gather(1, i), (X, integer(7, 4, 3))),
    "gather, fewer": (lambda x, i: x.gather(1, i), (X, integer(7, 2, 3))),
    "embedding": (F.embedding, (integer(11, 4, 3), real(11, 6))),
    "embedding, padding": (lambda i, w: F.embedding(i, w, padding_idx=3), (integer(5, 4), real(5, 6))),
    "embedding, few": (F.embedding, (integer(3, 4, 3), real(3, 4))),
    "scatter_add": (lambda x, i, y: x.scatter_add(1, i, y), (X, integer(7, 4, 3), real(4, 3))),
    "scatter": (lambda x, i: x.scatter(0, i, 2.0), (X, integer(4, 1, 7))),
    "index_add": (lambda x, i, y: x.index_add(0, i, y), (X, integer(4, 3), real(3, 7))),
    "flip": (lambda x: x.flip(0), (X,)),
    "roll": (lambda x: x.roll(1, 0), (X,)),
    "tril": (torch.tril, (real(3, 5, 5),)),
    "pad": (lambda x: F.pad(x, (1, 2, -1, 1), value=3.0), (X,)),
    "one_hot": (lambda i: F.one_hot(i, 6), (integer(6, 4, 3),)),
    "full_like": (lambda x: torch.full_like(x, 2) + torch.zeros_like(x), (X,)),
    "new_ones": (lambda x: x.new_ones(3, 7).sum(0) + x, (X,)),
    "glu": (F.glu, (real(4, 6),)),
    "cross_entropy": (F.cross_entropy, (X, integer(7, 4))),
    "cross_entropy, sum": (lambda x, t: F.cross_entropy(x, t, reduction="sum"), (X, integer(7, 4))),
    "cross_entropy, none": (lambda x, t: F.cross_entropy(x, t, reduction="none"), (real(4, 7, 3), integer(7, 4, 3))),
    "cross_entropy, ignored": (lambda x, t: F.cross_entropy(x, t, ignore_index=2), (real(6, 4), counted)),
    "cross_entropy, all of it": (
        lambda x, t, w: F.cross_entropy(x, t, w.abs(), ignore_index=1, label_smoothing=0.1),
        (real(6, 4), counted, real(4))),
    "cross_entropy, soft": (lambda x, t: F.cross_entropy(x, t.softmax(1), label_smoothing=0.1), (X, Y)),
    "nll_loss": (lambda x, t: F.nll_loss(x.log_softmax(-1), t), (X, integer(7, 4))),
    "loss by hand": (lambda x, t: -x.log_softmax(-1).gather(-1, t[:, None]).squeeze(-1).mean(), (X, integer(7, 4))),
    "mse_loss": (F.mse_loss, (X, Y)),
    "smooth_l1_loss": (F.smooth_l1_loss, (X, Y)),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, (X, real(4, 7))),
    "no rule": (lambda x: torch.linalg.inv(x @ x.mT + torch.eye(4, dtype=x.dtype, device=x.device)), (X,)),
    "uneven": (lambda x: (x * 2 + 1).exp().sum(1), (real(11, 5),)),
    "few": (lambda x: (x * 2 + 1).relu().mean(0), (real(1, 3),)),
    "scalar": (lambda x: x * 2 + x, (real(),)),
}  # fmt: skip


def check(name: str, mesh: Mesh, rng: random.Random, kinds: list[str] | None = None) -> None:
    function, makes = CASES[name]
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    tensors = [make(generator) for make in makes]
    layouts = [sim.random_layout(rng, mesh, x.dim(), partial=x.is_floating_point()) for x in tensors]
    program = sim.captured(function, tensors, layouts if rng.random() < 0.5 else ())
    operands = [sim.spread(x, layout, rng) for x, layout in zip(tensors, layouts, strict=True)]
    result = sim.run_program(program, operands, mesh, kinds)
    expected = function(*tensors)
    got, spec = pytree.tree_flatten(result)
    wanted, wanted_spec = pytree.tree_flatten(expected)
    assert spec == wanted_spec
    about = f"{name} on {mesh} of {[str(x) for x in layouts]}: {program.steps}"
    for value, reference in zip(got, wanted, strict=True):
        assert value.operand.dtype == reference.dtype, about
        torch.testing.assert_close(value.collected(), reference, atol=1e-7, rtol=1e-7, msg=lambda m: f"{m}\n{about}")


@pytest.mark.parametrize("name", CASES)
def test_parts_make_the_whole(name: str, seed: int) -> None:
    rng = random.Random(seed)
    for text in sim.MESHES:
        for _ in range(2):
            check(name, Mesh.parse(text), rng)


def steps_of(name: str, rng: random.Random) -> list[tuple[AtenCall, list[Tensor]]]:
    """Returns the operators of a case, with their inputs."""
    function, makes = CASES[name]
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    tensors = [make(generator) for make in makes]
    program = sim.captured(function, tensors)
    values: dict[int, Tensor] = {**dict(enumerate(tensors)), **program.constants}
    out = []
    for call, inputs, outputs in program.steps:
        given = [values[n] for n in inputs]
        out.append((call, given))
        whole = [Layout.replicated(Mesh({"x": 1}), len(x.shape)) for x in [*call.inputs, *call.outputs]]
        run = local_call(call, None, whole[: len(given)], whole[len(given) :], 0, torch.device("cpu"))
        result = run(given)
        values.update(zip(outputs, result if call.is_sequence else [result], strict=True))
    return out


def check_gradients(call: AtenCall, tensors: list[Tensor], mesh: Mesh, rng: random.Random) -> None:
    """Compares the gradients of the parts, of the sum of all outputs with random weights."""
    shapes = [x.shape for x in call.inputs]
    rule = rule_of(call) or OpRule.opaque(call.name, shapes, [x.shape for x in call.outputs])
    layouts = [sim.random_layout(rng, mesh, x.dim(), partial=x.is_floating_point()) for x in tensors]
    chosen = propagate(rule, layouts, sim.H200).chosen
    if any(kind != "sum" for layout in chosen.outputs for kind in layout.partial.values()):
        return  # gradients of maxima are refused
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    outputs = call.as_function()([x.clone() for x in leaves])
    outputs = list(outputs) if call.is_sequence else [outputs]
    places = [i for i, x in enumerate(outputs) if x.requires_grad]
    if not places:
        return
    weights = {i: torch.tensor([rng.randrange(-8, 8) / 4 for _ in range(outputs[i].numel())]).reshape(outputs[i].shape)
               .double() for i in places}  # fmt: skip
    expected = torch.autograd.grad([outputs[i] for i in places], [x for x in leaves if x.requires_grad],
                                   [weights[i] for i in places], allow_unused=True)  # fmt: skip
    cut = {i: sim.spread(weights[i], chosen.outputs[i].with_partial(None), rng).parts for i in places}
    inputs = [sim.spread(x, layout, rng) for x, layout in zip(tensors, chosen.inputs, strict=True)]
    grads: list[list[Tensor]] = []
    for index, rank in enumerate(mesh.ranks):
        own = [x.parts[index].requires_grad_(x.operand.dtype.is_floating_point) for x in inputs]
        out = local_call(call, rule, chosen.inputs, chosen.outputs, rank)([x.clone() for x in own])
        out = list(out) if call.is_sequence else [out]
        got = torch.autograd.grad([out[i] for i in places], [x for x in own if x.requires_grad],
                                  [cut[i][index] for i in places], allow_unused=True)  # fmt: skip
        grads.append(list(got))  # type: ignore[arg-type]
    used = {axis for x in [*chosen.inputs, *chosen.outputs] for axis in [*sum(x.dims, ()), *x.partial]}
    about = f"{call} as {[str(x) for x in chosen.inputs]} -> {[str(x) for x in chosen.outputs]}"
    floats = [x for x in inputs if x.operand.dtype.is_floating_point]
    for i, (value, gradient) in enumerate(zip(floats, expected, strict=True)):
        parts = [g[i] for g in grads]
        assert all((part is None) == (gradient is None) for part in parts), about
        if gradient is None:
            continue
        pending = used - set(sum(value.layout.dims, ())) - set(value.layout.partial)
        layout = Layout(mesh, value.layout.dims, sorted(pending))
        collected = sim.Value(parts, layout, value.operand).collected()
        torch.testing.assert_close(collected, gradient, atol=1e-7, rtol=1e-7, msg=lambda m: f"{m}\n{about}")


@pytest.mark.parametrize("name", [name for name in CASES if name != "batch_norm"])  # running statistics have none
def test_gradients_of_parts(name: str, seed: int) -> None:
    rng = random.Random(seed)
    steps = [(call, tensors) for call, tensors in steps_of(name, rng) if any(x.is_floating_point() for x in tensors)]
    for text in sim.MESHES:
        for call, tensors in steps:
            check_gradients(call, tensors, Mesh.parse(text), rng)

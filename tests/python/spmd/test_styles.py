"""Plans for parallelize_module, used by shard_module: plain models, compared with unsharded ones in fp64."""

from __future__ import annotations

import copy
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_overlap import InvalidTypeError, InvalidValueError, UnsupportedError
from torch_overlap.mesh import P, choices, choosing, connect, shard, shard_module, sharded_parameters
from torch_overlap.nn import Float8Recipe
from torch_overlap.nn.styles import ColumnParallel, RowParallel, ShardInput
from torch_overlap.testing import run_ranks

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "nn"))
from llama_cases import SEQUENCE, VOCABULARY, Llama, plan

BATCH = 4


def drawn(model, generator):
    """Ranks are threads, which share torch's own generator."""
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def layout_of(model, name):
    return str(sharded_parameters(model)[name].layout.with_invariant(None))


def check_model(comm, axes, seed, sequence_parallel, bias, how):
    mesh = connect(axes, comm)
    generator = torch.Generator().manual_seed(seed)
    whole = drawn(Llama(2, bias), generator)
    model = shard_module(copy.deepcopy(whole), mesh, plan(sequence_parallel), axis="tp")
    first = "layers.0.attention"
    assert layout_of(model, f"{first}.wk.weight") == layout_of(model, "output.weight") == "[tp],[]"
    assert layout_of(model, f"{first}.wo.weight") == "[],[tp]"
    assert layout_of(model, "layers.1.ffn_norm.weight") == "[]"
    if bias:
        assert (layout_of(model, f"{first}.wq.bias"), layout_of(model, f"{first}.wo.bias")) == ("[tp]", "[]")
    tokens, targets = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=generator)
    seen = []
    model.layers["0"].attention_norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].layout.dims[1]))
    with choosing(how), choices() as log:
        logits = model(shard(tokens, mesh, P("dp")))
        assert logits.layout.dims == (("dp",), (), ())
        loss = F.cross_entropy(logits.flatten(0, 1), shard(targets, mesh, P("dp")).flatten())
        loss.backward()
    assert seen == [("tp",) if sequence_parallel else ()]
    expected = whole(tokens)
    wanted = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    wanted.backward()
    torch.testing.assert_close(logits.full(), expected)
    torch.testing.assert_close(loss.full(), wanted)
    gradients = dict(whole.named_parameters())
    for name, value in sharded_parameters(model).items():
        torch.testing.assert_close(value.grad.full(), gradients[name].grad, msg=lambda text, at=name: f"{at}: {text}")
    mesh.close()
    return {choice.op for choice in log if choice.overlapped}


@pytest.mark.parametrize("axes", ["dp=1,tp=2", "dp=2,tp=2"])
@pytest.mark.parametrize(("sequence_parallel", "bias"), [(True, False), (True, True), (False, True)])
def test_a_plan_of_styles_shards_a_model(seed, axes, sequence_parallel, bias):
    ranks = 4 if "dp=2" in axes else 2
    for how in ("sequential", "auto"):
        fused = run_ranks(check_model, ranks, axes, seed, sequence_parallel, bias, how, backend="local")[0]
        # Without sequence parallelism a partial sum passes through the residual, and is reduced before the norm.
        both = {"all_gather_matmul", "matmul_reduce_scatter"} if sequence_parallel and how == "auto" else set()
        assert fused == both


def check_boundaries(comm, seed):
    """Names together with styles, a first argument by name, outputs that are gathered."""
    mesh = connect({"tp": 2}, comm)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.gate, self.down = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, *, value):
            return self.down(self.up(value) * self.gate(value))

    whole = drawn(Two(), generator)
    layouts = {
        "": ShardInput(sequence_dim=0, argument="value"),
        "up": ColumnParallel(gather_output=True),
        "gate.*": P("tp"),
        "down": RowParallel(),
    }
    model = shard_module(copy.deepcopy(whole), mesh, layouts)  # the only axis
    seen = []
    model.up.register_forward_hook(lambda _, args, y: seen.append((args[0].layout.dims[0], y.layout.dims)))
    y = model(value=shard(x, mesh))
    assert seen == [(("tp",), ((), (), ()))]
    torch.testing.assert_close(y.full(), whole(value=x))
    assert layout_of(model, "gate.weight") == "[tp],[]"
    mesh.close()


def test_where_values_come_and_go(seed):
    run_ranks(check_boundaries, 2, seed, backend="local")


def check_mistakes(comm):
    mesh = connect({"dp": 1, "tp": 2}, comm)

    def refuses(error, message, styles, axis="tp", **options):
        model = Llama(**options)
        with pytest.raises(error, match=message):
            shard_module(model, mesh, styles, axis=axis)
        assert type(model.layers["0"]).__mro__[1] is nn.Module  # unchanged

    refuses(
        TypeError, r"^ColumnParallel: expected an nn.Linear, got RMSNorm; change the plan", {"norm": ColumnParallel()}
    )
    refuses(ValueError, r"expected out_features divisible by 2 ranks times 4 \(multiple_of\), got 4", plan(True),
            kv_heads=1)  # fmt: skip
    refuses(InvalidValueError, r"^shard_module: expected patterns of modules, got \['layers.\*.mlp'\], which fit none",
            {"layers.*.mlp": RowParallel()})  # fmt: skip
    refuses(InvalidValueError, r"^shard_module: expected axis= with styles, one of \['dp', 'tp'\], got None",
            plan(True), axis=None)  # fmt: skip
    refuses(InvalidValueError, "expected axis= with styles, one of .*, got 'pp'", plan(True), axis="pp")
    for option in ({"algorithm": "p2p"}, {"require_fused": True}, {"fp8": Float8Recipe()}):
        refuses(UnsupportedError, r"^shard_module: expected a style without .*, got RowParallel with .*choosing\(",
                {"layers.*.attention.wo": RowParallel(**option)})  # fmt: skip
    model = shard_module(Llama(), mesh, {"layers.0": ShardInput()}, axis="tp")
    with pytest.raises(InvalidTypeError, match=r"^ShardInput: expected a Sharded as the first argument or as 'hidden"):
        model.layers["0"](x=None, angles=None)
    mesh.close()


def test_mistakes_in_a_plan():
    run_ranks(check_mistakes, 2, backend="local")

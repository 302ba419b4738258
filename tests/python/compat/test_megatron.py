"""Megatron-core's blocks with our provider, beside the same with Megatron's own layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(600)
SEQUENCE, BATCH, HIDDEN = 8, 2, 16


@contextmanager
def begin(rank: int, size: int, store: Any, seed: int) -> Iterator[None]:
    from megatron.core import parallel_state

    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size, create_gloo_process_groups=False)
    torch.manual_seed(seed)
    try:
        # Megatron's own sequence parallelism allocates on the current GPU, and its dropout draws on it.
        tracker = SimpleNamespace(fork=nullcontext)
        with (mock.patch("torch.cuda.current_device", return_value="cpu"),
              mock.patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", return_value=tracker)):  # fmt: skip
            yield
    finally:
        parallel_state.destroy_model_parallel()


def config_of(size: int, sequence_parallel: bool, fusion: bool = False) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, tensor_model_parallel_size=size, sequence_parallel=sequence_parallel,
        params_dtype=torch.float64, pipeline_dtype=torch.float64, masked_softmax_fusion=False,
    )  # fmt: skip
    config.gradient_accumulation_fusion = fusion
    return config


def layers(rank: int, size: int, store: Any, seed: int, fusion: bool) -> None:
    from megatron.core.models.backends import LocalSpecProvider

    from torch_overlap.compat.megatron import spec_provider

    ours, theirs = spec_provider("sequential"), LocalSpecProvider()
    with begin(rank, size, store, seed):
        for sequence_parallel in (False, True):
            for skip in (False, True):
                for column in (False, True):
                    name = "column_parallel_linear" if column else "row_parallel_linear"
                    options = {"init_method": torch.nn.init.normal_, "bias": True, "skip_bias_add": skip,
                               "is_expert": False}  # fmt: skip
                    options |= {"gather_output": False} if column else {"input_is_parallel": True}
                    want = getattr(theirs, name)()(HIDDEN, 12, config=config_of(size, sequence_parallel), **options)
                    own = getattr(ours, name)()(HIDDEN, 12, config=config_of(size, sequence_parallel, fusion),
                                                **options)  # fmt: skip
                    own.load_state_dict(want.state_dict())
                    with torch.no_grad():
                        for layer in (own, want):
                            layer.bias.copy_(torch.arange(layer.bias.numel()))
                    if fusion:
                        own.weight.main_grad = torch.ones_like(own.weight)
                        own.weight.grad_added_to_main_grad = False
                    compare(own, want, column, sequence_parallel, size, rank, seed, fusion)


def compare(own: Any, want: Any, column: bool, sequence_parallel: bool, size: int, rank: int, seed: int,
            fusion: bool) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed + (rank if sequence_parallel or not column else 0))
    rows = SEQUENCE // size if column and sequence_parallel else SEQUENCE
    x = torch.randn(rows, BATCH, HIDDEN if column else HIDDEN // size, generator=generator, dtype=torch.float64)
    results = []
    for layer in (own, want):
        leaf = x.clone().requires_grad_()
        y, bias = layer(leaf)
        assert (bias is not None) == layer.skip_bias_add
        y.square().sum().backward()
        results.append((y, leaf.grad, layer))
    (y, grad, _), (y_want, grad_want, _) = results
    torch.testing.assert_close(y, y_want, rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(grad, grad_want, rtol=1e-13, atol=1e-12)
    if size == 2:
        assert torch.equal(y, y_want)
        assert torch.equal(grad, grad_want)
    got = own.weight.main_grad - 1 if fusion else own.weight.grad
    torch.testing.assert_close(got, want.weight.grad, rtol=1e-12, atol=1e-10)
    assert not fusion or own.weight.grad_added_to_main_grad
    if own.bias.grad is not None:
        torch.testing.assert_close(own.bias.grad, want.bias.grad, rtol=1e-13, atol=1e-12)
    metadata = {"dp_cp_group": None}
    parts, parts_want = (layer.sharded_state_dict("layer.", metadata=metadata) for layer in (own, want))
    assert set(parts) == set(parts_want)
    for key, part in parts_want.items():
        for field in ("key", "global_shape", "global_offset", "axis_fragmentations"):
            assert getattr(parts[key], field, None) == getattr(part, field, None)


@pytest.mark.parametrize(("size", "fusion"), [(2, False), (2, True), (4, False)])
def test_layers_equal_megatrons(seed: int, size: int, fusion: bool) -> None:
    pytest.importorskip("megatron.core")
    run_ranks(layers, size, seed, fusion, comm=False, timeout=240)


def block(rank: int, size: int, store: Any, seed: int, sequence_parallel: bool) -> tuple[list[float], list[float]]:
    """Returns the losses of three steps of a transformer layer and an MLP, with our provider and with Megatron's."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_mlp_module_spec_for_backend
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import build_module

    from torch_overlap.compat.megatron import spec_provider

    with begin(rank, size, store, seed):
        losses = []
        for provider in (spec_provider(), LocalSpecProvider()):
            spec = copy.deepcopy(get_gpt_layer_local_spec())
            spec.submodules.mlp = get_mlp_module_spec_for_backend(backend=provider)
            attention = spec.submodules.self_attention.submodules
            attention.linear_qkv, attention.linear_proj = (provider.column_parallel_linear(),
                                                           provider.row_parallel_linear())  # fmt: skip
            if sequence_parallel:  # without APEX or Transformer Engine Megatron has no norm for it
                spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = IdentityOp
            torch.manual_seed(seed)
            layer = build_module(spec, config=config_of(size, sequence_parallel and size > 1), layer_number=1).double()
            generator = torch.Generator().manual_seed(seed)
            optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
            seen = []
            for _ in range(3):
                x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
                mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
                part = x.chunk(size)[rank] if sequence_parallel else x
                optimizer.zero_grad()
                y, _ = layer(part, attention_mask=mask)
                loss = y.square().mean()
                (loss / size if sequence_parallel else loss).backward()
                if sequence_parallel:
                    for parameter in layer.parameters():
                        if getattr(parameter, "sequence_parallel", False):
                            dist.all_reduce(parameter.grad)
                    dist.all_reduce(loss := loss.detach() / size)
                optimizer.step()
                seen.append(loss.item())
            losses.append(seen)
        return losses[0], losses[1]


@pytest.mark.parametrize(("size", "sequence_parallel"), [(2, True), (4, False)])
def test_a_block_trains_as_megatrons_and_as_on_one_rank(seed: int, size: int, sequence_parallel: bool) -> None:
    pytest.importorskip("megatron.core")
    own, want = run_ranks(block, size, seed, sequence_parallel, comm=False, timeout=240)[0]
    assert own == pytest.approx(want, rel=1e-12)
    _, alone = run_ranks(block, 1, seed, sequence_parallel, comm=False, timeout=240)[0]
    assert own == pytest.approx(alone, rel=1e-9)

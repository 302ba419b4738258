"""Gradients that layers add to weight.main_grad: equal to those in .grad, by every algorithm and layout."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.testing import run_ranks

ALGORITHMS = ["auto", "sequential", "p2p", "pipelined", "bulk"]
STEPS = 3


def draw(seed, *shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def copied(module, make):
    """Another module with the same parameters."""
    other = make()
    with torch.no_grad():
        for a, b in zip(other.parameters(), module.parameters(), strict=True):
            a.copy_(b)
    return other


def train(module, seed, rank, shape, dtype, **options):
    for step in range(STEPS):
        x = draw(seed + 10 * step + rank, *shape, dtype=dtype).requires_grad_()
        y = checkpoint(module, x, use_reentrant=False) if options.get("checkpointed") else module(x)
        y.backward(draw(seed + 10 * step + rank + 5, *y.shape, dtype=dtype))


def set_main_grads(module, dtype):
    """Buffers that begin at 1, which shows that gradients are added."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dim() == 2:
            parameter.main_grad = torch.ones_like(parameter, dtype=dtype)


def check(module, plain, tolerance):
    for (name, parameter), expected in zip(module.named_parameters(), plain.parameters(), strict=True):
        if not parameter.requires_grad:
            assert parameter.grad is None
            continue
        if parameter.dim() == 2:
            assert parameter.grad is None, name
            got = parameter.main_grad.double() - 1
        else:
            got = parameter.grad.double()
        scale = expected.grad.double().abs().max()
        assert (got - expected.grad.double()).abs().max() <= tolerance * scale, name


def blocks(comm, seed, algorithm, dtype, buffers, sequence_dim=0, tolerance=1e-6, **options):
    def make(**more):
        torch.manual_seed(seed)
        return to.nn.ParallelTransformerBlock(
            16, 4, 24, comm, kv_heads=2, activation="swiglu", norm="rms", sequence_dim=sequence_dim, dtype=dtype,
            algorithm=algorithm, **options, **more,
        )  # fmt: skip

    plain = make()
    fused = copied(plain, lambda: make(gradient_accumulation_fusion=True))
    set_main_grads(fused.attention, buffers)
    set_main_grads(fused.mlp, buffers)
    rows = 4 if options.get("sequence_parallel", True) else 8
    shape = (rows, 3, 16) if sequence_dim == 0 else (3, rows, 16)
    for module in (plain, fused):
        train(module, seed, comm.get_rank(), shape, dtype)
    for part in ("attention", "mlp", "attention_norm", "mlp_norm"):
        check(getattr(fused, part), getattr(plain, part), tolerance)
    comm.barrier(async_op=False)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("sequence_dim", [0, 1])
def test_a_block_by_every_algorithm(algorithm, sequence_dim, seed):
    run_ranks(blocks, 2, seed, algorithm, torch.float64, torch.float64, sequence_dim, 1e-12)


# bfloat16: .grad is rounded at each step, and the difference is theirs.
@pytest.mark.parametrize(("dtype", "buffers", "tolerance"),
                         [(torch.float32, torch.float32, 1e-5), (torch.bfloat16, torch.float32, 2e-2),
                          (torch.bfloat16, torch.bfloat16, 2e-2)])  # fmt: skip
def test_dtypes_of_weight_and_buffer(dtype, buffers, tolerance, seed):
    run_ranks(blocks, 2, seed, "p2p", dtype, buffers, 0, tolerance)


def whole_activations(comm, seed):
    blocks(comm, seed, "auto", torch.float64, torch.float64, tolerance=1e-12, sequence_parallel=False)


def test_without_sequence_parallelism_it_is_added_after_the_product(seed):
    run_ranks(whole_activations, 2, seed)


def only_some(comm, seed):
    """A frozen weight, the gathered rows kept, recomputation, and an x without a gradient."""

    def make(fusion):
        torch.manual_seed(seed)
        layer = to.nn.ColumnParallelLinear(8, [4, 6], comm, dtype=torch.float64, keep_gathered=True,
                                           gradient_accumulation_fusion=fusion)  # fmt: skip
        row = to.nn.RowParallelLinear(10, 8, comm, dtype=torch.float64, gradient_accumulation_fusion=fusion)
        layer.weight0.requires_grad_(False)
        return Pair(layer, row)

    plain, fused = make(False), make(True)
    for a, b in zip(fused.parameters(), plain.parameters(), strict=True):
        a.data.copy_(b.data)
    set_main_grads(fused, torch.float64)
    for module in (plain, fused):
        train(module, seed, comm.get_rank(), (4, 8), torch.float64, checkpointed=True)
        x = draw(seed, 4, 8, dtype=torch.float64)  # needs no gradient
        module(x).sum().backward()
        h = draw(seed + comm.get_rank(), 8, 5, dtype=torch.float64)
        module.row(h).sum().backward()
    check(fused, plain, 1e-12)
    comm.barrier(async_op=False)


class Pair(nn.Module):
    def __init__(self, column, row):
        super().__init__()
        self.column, self.row = column, row

    def forward(self, x):
        return self.row(torch.cat(self.column(x), -1))


def test_some_weights_and_recomputation(seed):
    run_ranks(only_some, 2, seed)


def hooks(comm, seed):
    torch.manual_seed(seed)
    layer = to.nn.RowParallelLinear(6, 4, comm, bias=False, gradient_accumulation_fusion=True)
    x = draw(seed + comm.get_rank(), 4, 3, dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"RowParallelLinear: expected weight.main_grad, a tensor of shape \[4, 3\].*none"
    ):
        layer(x)
    layer.weight.main_grad = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"got Tensor of shape \[3, 4\], torch.float32 on cpu"):
        layer(x)
    layer.weight.main_grad = torch.zeros(4, 3)
    calls = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad is None))
    layer(x).sum().backward()
    assert calls == [True]  # the hook runs after main_grad is complete, without a gradient
    layer.weight.grad_added_to_main_grad = False  # Megatron's hooks expect a gradient
    layer(x).sum().backward()
    assert calls == [True, False]
    assert layer.weight.grad_added_to_main_grad
    with torch.no_grad():
        layer.weight.main_grad = None
        layer(x)
    comm.barrier(async_op=False)


def replaced(comm, seed):
    """The buffer of the forward pass gets the gradient, whether the product adds it or not."""
    for sequence_parallel in (True, False):
        torch.manual_seed(seed)
        layer = to.nn.ColumnParallelLinear(4, [4, 6], comm, bias=False, sequence_parallel=sequence_parallel,
                                           gradient_accumulation_fusion=True)  # fmt: skip
        set_main_grads(layer, torch.float32)
        old = [p.main_grad for p in layer.parameters()]
        x = draw(seed, 4, 4, dtype=torch.float32).requires_grad_()
        y = torch.cat(layer(x), -1).square().sum()
        set_main_grads(layer, torch.float32)
        y.backward(retain_graph=True)
        assert all((buffer != 1).any() for buffer in old)
        assert all((p.main_grad == 1).all() for p in layer.parameters())
        with pytest.raises(RuntimeError, match="without create_graph"):
            y.backward(create_graph=True)
        comm.barrier(async_op=False)
        for buffer in (torch.ones(2, 4, requires_grad=True), torch.ones(2, 4, dtype=torch.int64)):
            layer.weight0.main_grad = buffer
            with pytest.raises(ValueError, match=r"expected weight.main_grad.*got Tensor of shape \[2, 4\]"):
                layer(x)


def test_buffers_of_the_forward_pass(seed):
    run_ranks(replaced, 2, seed)


def changed_in_place(comm):
    layer = to.nn.ColumnParallelLinear(6, [4, 4], comm, bias=False)
    for parameter in layer.parameters():
        y = torch.cat(layer(torch.ones(2, 6, requires_grad=True)), -1).sum()
        with torch.no_grad():
            parameter.zero_()
        with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
            y.backward()
        comm.barrier(async_op=False)


def test_a_joined_weight_that_changes_before_the_backward_pass_is_found():
    run_ranks(changed_in_place, 2)


def test_hooks_and_missing_buffers(seed):
    run_ranks(hooks, 2, seed)


def refused(comm):
    x = torch.randn(2, 4, requires_grad=True)
    w = torch.randn(6, 4, requires_grad=True)
    for main_grads, error, match in [
        ([torch.zeros(6, 5)], ValueError, r"main_grads\[0\] of shape \[6, 5\]"),
        ([torch.zeros(5, 4)], ValueError, "the 6 rows of weight 0, got 5"),
        ([torch.zeros(4, 4), torch.zeros(4, 4)], ValueError, r"main_grads\[1\] of shape \[4, 4\].*rows 4 to 6"),
        ([torch.zeros(6, 4), torch.zeros(1, 4)], ValueError, "expected 1 main_grads.*got 2"),
        ([torch.zeros(4, 6).t()], ValueError, "contiguous"),
        ([torch.zeros(6, 4, dtype=torch.bfloat16)], TypeError, "dtype torch.float32 on cpu.*got main_grads"),
        ([torch.zeros(6, 4, requires_grad=True)], TypeError, "which requires a gradient"),
    ]:
        with pytest.raises(error, match=match):
            ops.all_gather_matmul(x, [w], comm, main_grads=main_grads)
        with pytest.raises(error, match=match):
            ops.matmul_reduce_scatter(x, w, comm, main_grads=main_grads)
    buffer = torch.zeros(6, 4)
    (y,), _ = ops.all_gather_matmul(x, [w], comm, main_grads=[buffer])
    with pytest.raises(RuntimeError, match="without create_graph"):
        torch.autograd.grad(y.sum(), [x, w], create_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError, match="traced or transformed"):
        torch.autograd.grad(y, [x, w], torch.ones(3, *y.shape), is_grads_batched=True, allow_unused=True)
    # Several buffers for one weight, which change between the passes.
    parts = [torch.zeros(2, 4), torch.zeros(4, 4)]
    (y,), _ = ops.all_gather_matmul(x, [w], comm, main_grads=parts)
    for part in parts:
        part.add_(1)
    grads = torch.autograd.grad(y.sum(), [x, w], allow_unused=True)
    assert grads[1] is None
    gathered = ops.all_gather(x.detach(), comm, 0)
    torch.testing.assert_close(torch.cat(parts) - 1, torch.ones(len(gathered), 6).t() @ gathered)
    comm.barrier(async_op=False)


def test_refused_buffers():
    run_ranks(refused, 2)

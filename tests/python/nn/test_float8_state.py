"""Delayed scaling, checkpoints with its state, and 8-bit layers under styles and torch.compile."""

import copy

import pytest
import torch
import torch.distributed as dist
from float8_cases import E4M3, E5M2, part, rounded, scale_of
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from torch_overlap import nn as tnn
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
SIZES = [1, 2, 3]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("margin", [0, 1])
def test_scales_follow_the_last_steps_of_all_ranks(problem, seed, size, margin):
    data = problem(seed, torch.float32)
    linear, length = data.linear(16, 96, False), 3
    inputs = [[data(12, 16) * 2.0 ** (k % 3) for k in range(2)] for _ in range(6)]  # two forwards in a step
    grads = [[data(12, 96) for _ in range(2)] for _ in range(6)]

    def rank(comm):
        recipe = tnn.Float8Recipe("delayed", margin=margin, amax_history_len=length)
        layer = tnn.ColumnParallelLinear.from_linear(linear, comm, fp8=recipe)
        weight = linear.weight.detach()
        history, scales = [], []
        for xs, gs in zip(inputs, grads, strict=True):
            for x, g in zip(xs, gs, strict=True):
                mine = part(x, 0, comm)
                y = layer(mine)
                with torch.no_grad():
                    layer(mine * 1000)  # outside of a step
                if history:
                    x_scale, w_scale, _ = scales
                    want = rounded(x, E4M3, x_scale) @ rounded(weight, E4M3, w_scale).t()
                    torch.testing.assert_close(y.detach().double(), part(want, -1, comm), rtol=1e-4, atol=1e-4)
                y.backward(part(g, -1, comm))
            history.append([torch.stack([t.abs().max() for t in tensors]).max() for tensors in (xs, [weight], gs)])
            tnn.update_float8_scales(layer)
            scales = [torch.finfo(dtype).max / max(step[i] for step in history[-length:]) / 2**margin
                      for i, dtype in enumerate((E4M3, E4M3, E5M2))]  # fmt: skip
            got = torch.cat([layer.float8.forward_scale, layer.float8.backward_scale])
            torch.testing.assert_close(got, torch.stack(scales), rtol=1e-6, atol=0)
            kept = torch.cat([layer.float8.forward_amax_history, layer.float8.backward_amax_history], 1)
            for age, step in enumerate(reversed(history[-length + 1 :])):
                assert torch.equal(kept[-1 - age], torch.stack(step))
            assert not kept[0].any()

    run_ranks(rank, size, backend="local")


def test_magnitudes_that_say_nothing_leave_the_scale(problem, seed):
    linear = problem(seed, torch.float32).linear(16, 16, False)

    def rank(comm):
        layer = tnn.RowParallelLinear.from_linear(linear, comm, fp8=tnn.Float8Recipe("delayed", amax_history_len=1))
        layer(torch.full((16, 16), 2.0)).sum().backward()
        tnn.update_float8_scales(layer)
        before = layer.float8.forward_scale.clone()
        assert before[0] == 224
        for value in (0.0, float("inf"), float("nan")):
            layer(torch.full((16, 16), value))
            tnn.update_float8_scales(layer)
            assert torch.equal(layer.float8.forward_scale, before)

    run_ranks(rank, 1, backend="local")


def test_one_all_reduce_shares_the_scales_of_all_layers(problem, seed):
    data = problem(seed, torch.float32)
    linears, x = [data.linear(32, 32, False) for _ in range(3)], data(16, 32)

    def rank(comm):
        other = comm.split(list(range(comm.get_size())), name=f"other{seed}")
        recipes = [tnn.Float8Recipe("delayed")] * 2 + [tnn.Float8Recipe("delayed", margin=1, amax_history_len=2)]
        model = nn.Sequential(*(
            tnn.ColumnParallelLinear.from_linear(linear, one, gather_output=True, sequence_parallel=False, fp8=recipe)
            for linear, one, recipe in zip(linears, (comm, comm, other), recipes, strict=True)
        ))  # fmt: skip
        model(x).sum().backward()
        names = []
        for one in (comm, other):
            one.register_pre_hook(lambda name, *_: names.append(name))
        tnn.update_float8_scales(model, comm)
        assert len(names) == 1
        assert [layer.float8.started for layer in model] == [True, True, False]
        tnn.update_float8_scales(model)
        assert len(names) == 3
        assert all(layer.float8.started for layer in model)
        model(x)
        other.finalize()

    run_ranks(rank, 2, backend="local")


def trained(comm, linear, x, recipe):
    layer = tnn.ColumnParallelLinear.from_linear(linear, comm, fp8=recipe)
    layer(part(x, 0, comm)).square().sum().backward()
    tnn.update_float8_scales(layer)
    return layer


@pytest.mark.parametrize("size", SIZES)
def test_a_checkpoint_has_the_scales_and_fits_any_number_of_ranks(problem, seed, size):
    data, recipe = problem(seed, torch.float32), tnn.Float8Recipe("delayed")
    linear, x = data.linear(16, 96, True), data(12, 16)

    def save(comm):
        layer = trained(comm, linear, x, recipe)
        return tnn.full_state_dict(layer), tnn.full_state_dict(tnn.ColumnParallelLinear(16, 96, comm))

    state, plain = run_ranks(save, 2, backend="local")[0]
    assert {key.removeprefix("float8.") for key in state if key not in plain} == {
        "forward_scale", "forward_amax_history", "backward_scale", "backward_amax_history"
    }  # fmt: skip

    def load(comm):
        layer = tnn.ColumnParallelLinear(16, 96, comm, fp8=recipe)
        assert str(tnn.load_full_state_dict(layer, state)) == "<All keys matched successfully>"
        again = tnn.full_state_dict(layer)
        assert all(torch.equal(again[key], value) for key, value in state.items())
        for one in (layer, copy.deepcopy(layer)):
            y = one(part(3 * x, 0, comm))  # saturates: the scale is that of x
            want = rounded(3 * x, E4M3, scale_of(x, E4M3)) @ rounded(linear.weight.detach(), E4M3).t() + linear.bias
            torch.testing.assert_close(y.double(), part(want, -1, comm), rtol=1e-4, atol=1e-4)
        layer.reset_parameters()
        fresh = layer(part(3 * x, 0, comm))
        want = rounded(3 * x, E4M3) @ rounded(tnn.full_state_dict(layer)["weight"], E4M3).t()
        want = want + tnn.full_state_dict(layer)["bias"]
        torch.testing.assert_close(fresh.double(), part(want, -1, comm), rtol=1e-4, atol=1e-4)

    run_ranks(load, size, backend="local")


def test_scales_stay_float32_and_follow_the_device(problem, seed):
    linear, x = problem(seed, torch.float32).linear(16, 16, True), problem(seed, torch.float32)(16, 16)

    def rank(comm):
        layer = trained(comm, linear, x, tnn.Float8Recipe("delayed"))
        before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        layer.to(torch.bfloat16)
        assert layer.weight.dtype == torch.bfloat16
        for name, buffer in layer.named_buffers():
            assert buffer.dtype == torch.float32
            assert torch.equal(buffer, before[name])
        layer(x.bfloat16()).sum().backward()
        assert layer.weight.grad.dtype == torch.bfloat16
        deferred = tnn.RowParallelLinear(16, 16, comm, device="meta", fp8=tnn.Float8Recipe("delayed"))
        assert all(buffer.is_meta for buffer in deferred.buffers())
        deferred.to_empty(device="cpu").reset_parameters()
        deferred(x).sum().backward()
        tnn.update_float8_scales(deferred)
        assert all(buffer.isfinite().all() for buffer in deferred.buffers())

    run_ranks(rank, 1, backend="local")


# --- Models that exist ---------------------------------------------------------------------------------


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 64)

    def forward(self, hidden_states):
        return self.w2(self.w1(hidden_states) * self.w3(hidden_states))


def styled(rank, size, store, seed):
    dist.init_process_group("torch_overlap", store=store, rank=rank, world_size=size)
    mesh = dist.init_device_mesh("cpu", (size,))
    torch.manual_seed(seed)
    model, x, options = FeedForward(), torch.randn(2, 16, 32), {"fp8": tnn.Float8Recipe("delayed")}
    comm = tnn.styles.comm_of(mesh)
    gate_up = tnn.ColumnParallelLinear.from_linear([model.w1, model.w3], comm, gather_dim=1, **options)
    down = tnn.RowParallelLinear.from_linear(model.w2, comm, scatter_dim=1, **options)
    plan = {"": tnn.styles.SharedGather("w1", "w3", **options), "w2": tnn.styles.RowParallel(**options)}
    parallelize_module(model, mesh, plan)
    mine = part(x, 1, comm)
    for _ in range(2):
        one, other = gate_up(mine)
        want, got = down(one * other), model(mine)
        assert torch.equal(got, want)
        for y in (want, got):
            y.square().sum().backward()
        for layer in (gate_up, down, model):
            tnn.update_float8_scales(layer)
    assert torch.equal(model.w3.weight.grad.to_local(), gate_up.weight1.grad)
    assert torch.equal(model.w2.weight.grad.to_local(), down.weight.grad)
    dist.destroy_process_group()


def test_styles(seed):
    run_ranks(styled, 2, seed, comm=False)


# --- torch.compile ------------------------------------------------------------------------------------


def compiled(comm, seed, sequence_parallel, scaling):
    torch._dynamo.reset()
    torch.manual_seed(seed)
    module = tnn.ParallelMLP(32, 64, comm, activation="swiglu", sequence_parallel=sequence_parallel,
                             fp8=tnn.Float8Recipe(scaling))  # fmt: skip
    twin = copy.deepcopy(module)
    run = torch.compile(twin, backend="aot_eager", fullgraph=True)
    x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(seed))
    for _ in range(3):
        results = []
        for one, parameters in ((module, module), (run, twin)):
            parameters.zero_grad()
            leaf = part(x, 0 if sequence_parallel else None, comm).clone().requires_grad_()
            y = one(leaf)
            y.square().mean().backward()
            tnn.update_float8_scales(parameters)
            results.append([y.detach(), leaf.grad, *(p.grad for p in parameters.parameters()), *parameters.buffers()])
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "sequence_parallel"),
    [("current", True), ("delayed", True), ("delayed", False), ("mxfp8", True), ("block", True), ("block", False)],
)
def test_compile_fullgraph(seed, sequence_parallel, scaling):
    run_ranks(compiled, 2, seed, sequence_parallel, scaling, backend="gloo", timeout=280)

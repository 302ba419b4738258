"""Layers on 8-bit floats, against the same in fp64: within the bounds of rounding, and exactly as rounded by hand."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import torch_overlap as to
from torch_overlap import nn as tnn
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(120)
SIZES = [1, 2, 3]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LAYOUTS = [(True, (24, 2), 0), (True, (2, 24), 1), (True, (6, 3), 0), (False, (4, 8), 0), (False, (18,), 0)]


def part(tensor, dim, comm):
    return tensor if dim is None else tensor.detach().chunk(comm.get_size(), dim)[comm.get_rank()]


def scale_of(x, dtype, margin=0):
    return torch.finfo(dtype).max / x.abs().max().float() / 2**margin


def rounded(x, dtype, scale=None):
    """x as the 8-bit values that stand for it, in fp64."""
    scale = scale_of(x, dtype) if scale is None else scale
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype).double() / scale.double()


def error(x, dtype):
    """The largest |rounded(x) - x|: half a last bit, which for subnormals is that of the smallest normal number.

    Twice 2^-24 of x for the scale's own roundings.
    """
    limits = torch.finfo(dtype)
    return x.abs() * (limits.eps / 2 + 2**-23) + limits.smallest_normal * limits.eps / 2 / scale_of(x, dtype).double()


class Matrix:
    """A matrix whose elements are known to `error`, and the products of such."""

    def __init__(self, value, error):
        self.value, self.error = value, error

    def __matmul__(self, other):
        size, size_of_other = self.value.abs(), other.value.abs()
        most = (size + self.error) @ (size_of_other + other.error)
        return Matrix(self.value @ other.value, most - size @ size_of_other)

    def t(self):
        return Matrix(self.value.t(), self.error.t())


def forms(x, dtype):
    """As it is, with the error of rounding; and rounded, with the error that sums in fp32 may make of it."""
    value = rounded(x, dtype)
    return Matrix(x, error(x, dtype)), Matrix(value, value.abs() * 2**-20)


def layer_in_fp64(x, weight, bias, grad):
    """Output, gradient of x and of weight, each as `forms`; gradient of bias."""
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    found = []
    for a, w, g in zip(forms(x, E4M3), forms(weight, E4M3), forms(grad, E5M2), strict=True):
        y = a @ w.t()
        found.append((Matrix(y.value + (0 if bias is None else bias), y.error), g @ w, g.t() @ a))
    return found, grad.sum(0)


def within(got, want, shape, cut, rounding=2**-22):
    """Each element of `got` within the error of `want` and the rounding of the result."""
    value, most = (cut(t.reshape(shape)) for t in (want.value, want.error))
    excess = (got.double() - value).abs() - most - rounding * value.abs()
    assert excess.max().item() <= 1e-12 * value.abs().max().item()


def check(got, problem, cuts, rounding):
    """`got`: output, gradients of x, weight and bias; `cuts`: this rank's part of each."""
    x, weight, bias, grad = problem
    found, bias_grad = layer_in_fp64(x, weight, bias, grad)
    for products in found:
        for mine, want, shape, cut, unit in zip(got, products, (grad.shape, x.shape, weight.shape), cuts, rounding,
                                                strict=False):  # fmt: skip
            within(mine, want, shape, cut, unit)
    if bias is not None:
        torch.testing.assert_close(got[3].double(), cuts[3](bias_grad), rtol=1e-5, atol=1e-4)


def steps(layer, run, scaling):
    """The results of `run` with the scales that the tensors ask for, and with those of the step before, if delayed."""
    yield run()
    if scaling == "delayed":
        tnn.update_float8_scales(layer)
        layer.zero_grad()
        yield run()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scaling", ["current", "delayed"])
@pytest.mark.parametrize("features", [[96], [96, 192]], ids=["one", "several"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("sequence_parallel", "rows", "dim"), LAYOUTS)
def test_column(problem, seed, size, scaling, features, bias, sequence_parallel, rows, dim):
    data = problem(seed, torch.float32)
    linears = [data.linear(32, n, bias) for n in features]
    x, grads = data(*rows, 32), [data(*rows, n) for n in features]
    row_dim = dim if sequence_parallel else None
    whole = [torch.cat([t.detach() for t in tensors], d).double() if tensors[0] is not None else None
             for tensors, d in (([m.weight for m in linears], 0), ([m.bias for m in linears], 0), (grads, -1))]  # fmt: skip
    weight, whole_bias, grad = whole

    def own(dim):
        """This rank's part of each layer's features."""
        return lambda comm, t: torch.cat([part(one, dim, comm) for one in t.split(features, dim)], dim)

    def rank(comm):
        layer = tnn.ColumnParallelLinear.from_linear(linears, comm, sequence_parallel=sequence_parallel, gather_dim=dim,
                                                     fp8=tnn.Float8Recipe(scaling))  # fmt: skip

        def run():
            mine = part(x, row_dim, comm).clone().requires_grad_()
            outputs = layer(mine)
            sum((part(g, -1, comm) * y).sum() for g, y in zip(grads, outputs, strict=True)).backward()
            bias_grads = [b.grad for b in layer.biases if b is not None]
            return [torch.cat(outputs, -1).detach(), mine.grad, torch.cat([w.grad for w in layer.weights]),
                    torch.cat(bias_grads) if bias else None]  # fmt: skip

        cuts = [lambda t: own(-1)(comm, t), lambda t: part(t, row_dim, comm), lambda t: own(0)(comm, t),
                lambda t: own(0)(comm, t)]  # fmt: skip
        for got in steps(layer, run, scaling):
            check(got, (x.double(), weight, whole_bias, grad), cuts, roundings(rows))

    run_ranks(rank, size, backend="local")


def roundings(rows):
    """Of output and gradients: that of the weight is bfloat16 where the rows are no multiple of 16."""
    return 2**-22, 2**-22, 2**-22 if torch.Size(rows).numel() % 16 == 0 else 2**-7


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scaling", ["current", "delayed"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("sequence_parallel", "rows", "dim"), LAYOUTS)
@pytest.mark.parametrize("input_is_parallel", [False, True])
def test_row(problem, seed, size, scaling, bias, sequence_parallel, rows, dim, input_is_parallel):
    data = problem(seed, torch.float32)
    linear = data.linear(96, 32, bias)
    x, grad = data(*rows, 96), data(*rows, 32)
    row_dim, feature_dim = dim if sequence_parallel else None, -1 if input_is_parallel else None

    def rank(comm):
        layer = tnn.RowParallelLinear.from_linear(
            linear, comm, sequence_parallel=sequence_parallel, scatter_dim=dim, input_is_parallel=input_is_parallel,
            fp8=tnn.Float8Recipe(scaling),
        )  # fmt: skip

        def run():
            mine = part(x, feature_dim, comm).clone().requires_grad_()
            output = layer(mine)
            (part(grad, row_dim, comm) * output).sum().backward()
            tnn.sync_replicated_grads(layer)
            return [output.detach(), mine.grad, layer.weight.grad, layer.bias.grad if bias else None]

        cuts = [lambda t: part(t, row_dim, comm), lambda t: part(t, feature_dim, comm), lambda t: part(t, 1, comm),
                lambda t: t]  # fmt: skip
        whole = x.double(), linear.weight.detach().double(), linear.bias.detach().double() if bias else None
        for got in steps(layer, run, scaling):
            check(got, (*whole, grad.double()), cuts, roundings(rows))

    run_ranks(rank, size, backend="local")


@pytest.mark.parametrize("backward_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("split", [False, True])
def test_the_recipe_is_followed(problem, seed, backward_dtype, split):
    data = problem(seed, torch.float32)
    linear, x, grad = data.linear(16, 32, False), data(16, 16), data(16, 32)

    def rank(comm):
        recipe = tnn.Float8Recipe(margin=2, backward_dtype=backward_dtype, use_split_accumulator=split)
        layer = tnn.ColumnParallelLinear.from_linear(linear, comm, fp8=recipe)
        mine = x.clone().requires_grad_()
        layer(mine).backward(grad)
        g = rounded(grad, backward_dtype, scale_of(grad, backward_dtype, 2))
        w = rounded(linear.weight.detach(), E4M3, scale_of(linear.weight.detach(), E4M3, 2))
        torch.testing.assert_close(mine.grad.double(), g @ w, rtol=1e-5, atol=1e-5)

    run_ranks(rank, 1, backend="local")


@pytest.mark.smoke
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_master_weights(problem, seed, sequence_parallel, dtype):
    data = problem(seed, torch.float32)
    up, down, x = data.linear(32, 64, True), data.linear(64, 32, True), data(32, 32)

    def rank(comm):
        options = {"sequence_parallel": sequence_parallel, "fp8": tnn.Float8Recipe()}
        column = tnn.ColumnParallelLinear.from_linear([up, up], comm, **options)
        row = tnn.RowParallelLinear.from_linear(down, comm, **options)
        mine = part(x, 0 if sequence_parallel else None, comm).clone().requires_grad_()
        with torch.autocast("cpu", dtype):
            first, second = column(mine)
            y = row(first)
            assert first.dtype == second.dtype == y.dtype == dtype
            (y.float().sum() + second.float().sum()).backward()  # under autocast too
        for tensor in (mine, *column.parameters(), *row.parameters()):
            assert tensor.grad.dtype == torch.float32
        want = rounded(x, E4M3) @ rounded(up.weight.detach(), E4M3).t() + up.bias.detach()
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(first.detach().double(), part(want, -1, comm), rtol=unit, atol=unit)

    run_ranks(rank, 2, backend="local")


def test_only_the_gradients_that_are_asked_are_computed(problem, seed):
    data = problem(seed, torch.float32)
    up, down, x = data.linear(32, 32, True), data.linear(32, 32, True), data(4, 32)
    up.weight.requires_grad_(False)
    down.bias.requires_grad_(False)

    def rank(comm):
        for sequence_parallel in (False, True):
            options = {"sequence_parallel": sequence_parallel, "fp8": tnn.Float8Recipe("delayed")}
            first = tnn.ColumnParallelLinear.from_linear(up, comm, **options)
            second = tnn.RowParallelLinear.from_linear(down, comm, **options)
            second(first(part(x, 0 if sequence_parallel else None, comm))).sum().backward()
            assert first.weight.grad is None
            assert second.bias.grad is None
            assert first.bias.grad is not None
            assert second.weight.grad is not None

    run_ranks(rank, 2, backend="local")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_block(seed, size, sequence_parallel, activation):
    """Roundings are relative errors of at most 2^-4 (e4m3) and 2^-3 (e5m2), evenly spread: 2^-4 / sqrt(3) = 0.036 and
    0.072 in the mean square. A product of two rounded matrices has 0.051 then, one with a rounded gradient 0.081; four
    of each in a row have 0.19.
    """

    def rank(comm):
        generator = torch.Generator().manual_seed(seed)
        options = {"activation": activation, "sequence_parallel": sequence_parallel, "bias": False,
                   "init": lambda rows: rows.normal_(std=rows.size(1) ** -0.5, generator=generator)}  # fmt: skip
        module = tnn.ParallelTransformerBlock(96, 6, 96, comm, fp8=tnn.Float8Recipe(), **options)
        exact = tnn.ParallelTransformerBlock(96, 6, 96, comm, **options)
        exact.load_state_dict(module.state_dict())
        exact.double()
        x = torch.randn(12, 2, 96, generator=torch.Generator().manual_seed(seed))
        results = []
        for one, dtype in ((module, torch.float32), (exact, torch.float64)):
            mine = part(x, 0 if sequence_parallel else None, comm).to(dtype, copy=True).requires_grad_()
            y = one(mine)
            y.square().mean().backward()
            results.append([y.detach(), mine.grad, *(p.grad for p in one.parameters())])
        for got, want in zip(*results, strict=True):
            assert (got.double() - want).norm() <= want.norm() / 4

    run_ranks(rank, size, backend="local")


# --- Delayed scaling ----------------------------------------------------------------------------------


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
        history = []
        for xs, gs in zip(inputs, grads, strict=True):
            for x, g in zip(xs, gs, strict=True):
                mine = part(x, 0, comm)
                y = layer(mine)
                with torch.no_grad():
                    layer(mine * 1000)  # of no step
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
        model = nn.Sequential(*(
            tnn.ColumnParallelLinear.from_linear(linear, comm, gather_output=True, sequence_parallel=False,
                                                 fp8=tnn.Float8Recipe("delayed")) for linear in linears[:2]
        ), tnn.ColumnParallelLinear.from_linear(linears[2], other, sequence_parallel=False,
                                                fp8=tnn.Float8Recipe("delayed", margin=1, amax_history_len=2)))  # fmt: skip
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
    assert torch.equal(model.w3.weight.grad, gate_up.weight1.grad)
    assert torch.equal(model.w2.weight.grad, down.weight.grad)
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


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_compile_fullgraph(seed, sequence_parallel, scaling):
    run_ranks(compiled, 2, seed, sequence_parallel, scaling, backend="gloo", timeout=110)


# --- Errors -------------------------------------------------------------------------------------------


RECIPE = tnn.Float8Recipe()
ERRORS = {
    r"Float8Recipe: expected scaling current or delayed, got block": lambda c: tnn.Float8Recipe("block"),
    r"Float8Recipe: expected forward_dtype torch.float8_e4m3fn, got torch.float8_e5m2":
        lambda c: tnn.Float8Recipe(forward_dtype=E5M2),
    r"Float8Recipe: expected backward_dtype torch.float8_e4m3fn or torch.float8_e5m2, got torch.bfloat16":
        lambda c: tnn.Float8Recipe(backward_dtype=torch.bfloat16),
    r"Float8Recipe: expected amax_history_len of 1 or more, got 0": lambda c: tnn.Float8Recipe(amax_history_len=0),
    r"ColumnParallelLinear: expected out_features of a rank divisible by 16 with fp8, got 8; pad it":
        lambda c: tnn.ColumnParallelLinear(16, 16, c, fp8=RECIPE),
    r"RowParallelLinear: expected in_features of a rank divisible by 16 with fp8, got 8; pad it":
        lambda c: tnn.RowParallelLinear(16, 16, c, fp8=RECIPE),
    r"ColumnParallelLinear: expected x of two or more dimensions, got shape \[32\]; use x.unsqueeze":
        lambda c: tnn.ColumnParallelLinear(32, 32, c, fp8=RECIPE)(torch.ones(32)),
    r"ColumnParallelLinear: expected x of 32 features, got shape \[2, 16\]; check the layer before":
        lambda c: tnn.ColumnParallelLinear(32, 32, c, fp8=RECIPE)(torch.ones(2, 16)),
    r"RowParallelLinear: expected dimension 0 divisible by the group size 2, got 3; pad it":
        lambda c: tnn.RowParallelLinear(32, 32, c, fp8=RECIPE)(torch.ones(3, 16)),
}  # fmt: skip


@pytest.mark.parametrize("message", ERRORS)
def test_a_mistake_is_an_error_that_says_what_to_do(message):
    def rank(comm):
        with pytest.raises(ValueError, match=message):
            ERRORS[message](comm)

    run_ranks(rank, 2, backend="local")


def test_other_refusals(problem, seed):
    def rank(comm):
        layer = tnn.ColumnParallelLinear(32, 32, comm, fp8=RECIPE)
        with pytest.raises(TypeError, match=r"expected x of float32, float16 or bfloat16 with fp8, got torch.float64"):
            layer(torch.ones(2, 32, dtype=torch.float64))
        x = torch.ones(2, 32, requires_grad=True)
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
        fused = tnn.ColumnParallelLinear(32, 32, comm, fp8=RECIPE, require_fused=True)
        with pytest.raises(to.UnsupportedError, match=r"^ColumnParallelLinear: expected overlapped products"):
            fused(x)

    run_ranks(rank, 2, backend="local")

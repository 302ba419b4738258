"""Layers on 8-bit floats, against the same in fp64: within the bounds of rounding, and exactly as rounded by hand."""

import pytest
import torch
from covering import covering
from float8_cases import E4M3, E5M2, Matrix, forms, part, rounded, scale_of

import torch_overlap as to
from torch_overlap import nn as tnn
from torch_overlap.quantize import ScalingMode as Mode
from torch_overlap.quantize import quantize
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
SIZES = [1, 2, 3]
SCALINGS = ["current", "delayed", "mxfp8", "block"]
# Scaling modes of activations and of weights.
MODES = {"current": (Mode.CURRENT_TENSOR_SCALING,) * 2, "delayed": (Mode.CURRENT_TENSOR_SCALING,) * 2,
         "mxfp8": (Mode.MXFP8_1D_SCALING,) * 2, "block": (Mode.BLOCK_1D_SCALING, Mode.BLOCK_2D_SCALING)}  # fmt: skip
ALGORITHMS = ["auto", "sequential", "pipelined", "p2p", "bulk"]
LAYOUTS = [(True, (24, 2), 0), (True, (2, 24), 1), (True, (6, 3), 0), (False, (4, 8), 0), (False, (18,), 0)]


def layer_in_fp64(x, weight, bias, grad):
    """Returns the output and the gradients of x and weight, each as `forms`, and the gradient of the bias."""
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    found = []
    for a, w, g in zip(forms(x, E4M3), forms(weight, E4M3), forms(grad, E5M2), strict=True):
        y = a @ w.t()
        found.append((Matrix(y.value + (0 if bias is None else bias), y.error), g @ w, g.t() @ a))
    return found, grad.sum(0)


def within(got, want, shape, cut, rounding=2**-22):
    """Checks that each element of `got` is within the error of `want` and the rounding of the result."""
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
    """Yields the results of `run` by each algorithm; with delayed scaling all but the first use the previous step's
    scales."""
    for algorithm in ALGORITHMS:
        layer.algorithm = algorithm
        layer.zero_grad()
        yield run()
        if scaling == "delayed":
            tnn.update_float8_scales(layer)


EACH = {"size": SIZES, "scaling": ["current", "delayed"], "bias": [False, True],
        "sequence_parallel,rows,dim": LAYOUTS}  # fmt: skip


@covering(EACH | {"features": [[96], [96, 192]]})
def test_column(problem, seed, size, scaling, features, bias, sequence_parallel, rows, dim):
    data = problem(seed, torch.float32)
    linears = [data.linear(32, n, bias) for n in features]
    x, grads = data(*rows, 32), [data(*rows, n) for n in features]
    row_dim = dim if sequence_parallel else None
    weight, grad = torch.cat([m.weight.detach() for m in linears]).double(), torch.cat(grads, -1).double()
    whole_bias = torch.cat([m.bias.detach() for m in linears]).double() if bias else None

    def own(dim):
        """Returns this rank's part of each layer's features."""
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
    """Returns the roundings of output and gradients: the weight's is bfloat16 if the number of rows is no multiple
    of 16."""
    return 2**-22, 2**-22, 2**-22 if torch.Size(rows).numel() % 16 == 0 else 2**-7


@covering(EACH | {"input_is_parallel": [False, True]})
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
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_master_weights(problem, seed, sequence_parallel, scaling, dtype):
    data = problem(seed, torch.float32)
    up, down, x = data.linear(64, 256, True), data.linear(256, 64, True), data(32, 64)

    def value(x, of_weights=False):
        return quantize(x, MODES[scaling][of_weights], E4M3).dequantize().double()

    def rank(comm):
        options = {"sequence_parallel": sequence_parallel, "fp8": tnn.Float8Recipe(scaling)}
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
        want = value(x) @ value(up.weight.detach(), of_weights=True).t() + up.bias.detach()
        # The result is rounded once. The bias is rounded before, and may nearly cancel in the sum.
        unit = torch.finfo(dtype).eps
        loss = unit * (1 + up.bias.detach().abs().max().item())
        torch.testing.assert_close(first.detach().double(), part(want, -1, comm), rtol=unit, atol=loss)

    run_ranks(rank, 2, backend="local")


@pytest.mark.parametrize("scaling", SCALINGS)
def test_only_the_gradients_that_are_asked_are_computed(problem, seed, scaling):
    data = problem(seed, torch.float32)
    up, down, x = data.linear(64, 64, True), data.linear(64, 64, True), data(16, 64)
    up.weight.requires_grad_(False)
    down.bias.requires_grad_(False)

    def rank(comm):
        for sequence_parallel in (False, True):
            options = {"sequence_parallel": sequence_parallel, "fp8": tnn.Float8Recipe(scaling)}
            first = tnn.ColumnParallelLinear.from_linear(up, comm, **options)
            second = tnn.RowParallelLinear.from_linear(down, comm, **options)
            second(first(part(x, 0 if sequence_parallel else None, comm))).sum().backward()
            assert first.weight.grad is None
            assert second.bias.grad is None
            assert first.bias.grad is not None
            assert second.weight.grad is not None

    run_ranks(rank, 2, backend="local")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    ("sequence_parallel", "activation"), [(True, "gelu_tanh"), (True, "swiglu"), (False, "swiglu")]
)
def test_training_steps_follow_those_in_fp64(seed, size, scaling, sequence_parallel, activation):
    """Rounding has relative errors of at most 2^-4 (e4m3) and 2^-3 (e5m2), evenly spread: 2^-4 / sqrt(3) = 0.036 and
    0.072 in the mean square. A product of two rounded matrices has 0.051 then, one with a rounded gradient 0.081;
    four of each in a row have 0.19, which hardly affects a step of the weights. Delayed scales are those of the
    previous steps, whose largest values may be smaller: a margin prevents the saturation of values that are larger
    now.
    """
    recipe = tnn.Float8Recipe(scaling, margin=1 if scaling == "delayed" else 0)

    def rank(comm):
        generator = torch.Generator().manual_seed(seed)

        def init(rows):
            rows.normal_(std=rows.size(1) ** -0.5, generator=generator)

        options = {"activation": activation, "bias": False, "sequence_parallel": sequence_parallel, "init": init,
                   "output_init": init}  # fmt: skip
        module = tnn.ParallelTransformerBlock(192, 6, 192, comm, fp8=recipe, **options)
        exact = tnn.ParallelTransformerBlock(192, 6, 192, comm, **options)
        exact.load_state_dict({name: t for name, t in module.state_dict().items() if ".float8." not in name})
        exact.double()
        start = {name: p.detach().clone() for name, p in exact.named_parameters()}
        draw = torch.Generator().manual_seed(seed)
        for _ in range(3):
            x = torch.randn(24, 2, 192, generator=draw)
            results = []
            for one, dtype in ((module, torch.float32), (exact, torch.float64)):
                mine = part(x, 0 if sequence_parallel else None, comm).to(dtype, copy=True).requires_grad_()
                one.zero_grad()
                y = one(mine)
                y.square().mean().backward()
                results.append([y.detach(), mine.grad, *(p.grad.clone() for p in one.parameters())])
                tnn.update_float8_scales(one)
                with torch.no_grad():
                    for p in one.parameters():
                        p -= 0.1 * p.grad / p.grad.norm()
            for got, want in zip(*results, strict=True):
                assert (got.double() - want).norm() <= want.norm() / 4
        for (name, want), got in zip(exact.named_parameters(), module.parameters(), strict=True):
            moved = (want - start[name]).norm()
            assert moved > 0
            assert (got.double() - want).norm() <= moved / 4, name

    run_ranks(rank, size, backend="local")


# --- Errors -------------------------------------------------------------------------------------------


RECIPE = tnn.Float8Recipe()
ERRORS = {
    r"Float8Recipe: expected scaling current or delayed or mxfp8 or block, got row": lambda c: tnn.Float8Recipe("row"),
    r"Float8Recipe: expected forward_dtype torch.float8_e4m3fn, got torch.float8_e5m2":
        lambda c: tnn.Float8Recipe(forward_dtype=E5M2),
    r"Float8Recipe: expected backward_dtype torch.float8_e4m3fn or torch.float8_e5m2, got torch.bfloat16":
        lambda c: tnn.Float8Recipe(backward_dtype=torch.bfloat16),
    r"Float8Recipe: expected amax_history_len of 1 or more, got 0": lambda c: tnn.Float8Recipe(amax_history_len=0),
    r"Float8Recipe: expected margin 0 with mxfp8, got 1; a block's scale":
        lambda c: tnn.Float8Recipe("mxfp8", margin=1),
    r"Float8Recipe: expected margin 0 with block, got -1; a block's scale":
        lambda c: tnn.Float8Recipe("block", margin=-1),
    r"ColumnParallelLinear: expected out_features of a rank divisible by 32 with mxfp8, got 16; pad it":
        lambda c: tnn.ColumnParallelLinear(32, 32, c, fp8=tnn.Float8Recipe("mxfp8")),
    r"ColumnParallelLinear: expected gather_dim to be a dimension of rows, got -1, .*shape \[2, 32\]":
        lambda c: tnn.ColumnParallelLinear(32, 64, c, gather_dim=-1, fp8=tnn.Float8Recipe("mxfp8"))(torch.ones(2, 32)),
    r"RowParallelLinear: expected scatter_dim to be a dimension of rows, got 1, .*shape \[2, 32\]":
        lambda c: tnn.RowParallelLinear(64, 32, c, scatter_dim=1, fp8=tnn.Float8Recipe("mxfp8"))(torch.ones(2, 32)),
    r"ColumnParallelLinear: expected out_features of a rank divisible by 16 with fp8, got 8; pad it":
        lambda c: tnn.ColumnParallelLinear(16, 16, c, fp8=RECIPE),
    r"RowParallelLinear: expected in_features of a rank divisible by 16 with fp8, got 8; pad it":
        lambda c: tnn.RowParallelLinear(16, 16, c, fp8=RECIPE),
    r"ColumnParallelLinear: expected x of two or more dimensions, got shape \[32\]. Use x.unsqueeze":
        lambda c: tnn.ColumnParallelLinear(32, 32, c, fp8=RECIPE)(torch.ones(32)),
    r"ColumnParallelLinear: expected x .* and weight .* got shapes \[2, 16\] and \[\d+, 32\]. Check the layer before":
        lambda c: tnn.ColumnParallelLinear(32, 32, c, fp8=RECIPE)(torch.ones(2, 16)),
    r"ColumnParallelLinear: expected algorithm to be one of auto, sequential, pipelined, p2p, bulk, got 'none'":
        lambda c: tnn.ColumnParallelLinear(32, 32, c, fp8=RECIPE, algorithm="none"),
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

    run_ranks(rank, 2, backend="local")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_require_fused_refuses_a_fallback(sequence_parallel):
    def layers(comm, algorithm):
        options = {"fp8": RECIPE, "algorithm": algorithm, "require_fused": True, "sequence_parallel": sequence_parallel}
        return tnn.ColumnParallelLinear(32, 32, comm, **options), tnn.RowParallelLinear(32, 32, comm, **options)

    def refuses(layer, rows, reason):
        what = "scaled_[a-z_]*" if sequence_parallel else "scaled_matmul_all_reduce"
        with pytest.raises(
            to.UnsupportedError, match=f"^{type(layer).__name__}: expected an overlapped {what} .*{reason}"
        ):
            layer(torch.ones(rows, layer.weight.size(1)))

    def rank(comm):
        for algorithm, reason in (("auto", "rows are quicker computed than sent"), ("sequential", "asked for")):
            for layer in layers(comm, algorithm):
                refuses(layer, 4, reason)
        column, row = layers(comm, "bulk")
        if sequence_parallel:
            column(torch.ones(4, 32))
        else:
            refuses(column, 4, "it hides no transfer")
        refuses(row, 4, "it hides no transfer")
        for algorithm, rows in (("pipelined", 4), ("p2p", 4), ("auto", 2048)):
            column, row = layers(comm, algorithm)
            column(torch.ones(rows, 32))
            row(torch.ones(rows, 16))

    def alone(comm):
        for layer in layers(comm, "auto"):
            layer(torch.ones(2, 32))  # one rank has nothing to overlap

    run_ranks(rank, 2, backend="local")
    run_ranks(alone, 1, backend="local")


def compiled_inference(comm, seed, scaling, joined_if_parallel):
    torch.manual_seed(seed)
    torch._dynamo.reset()
    layers = []
    for sequence_parallel in (True, False):
        features = [64, 64] if sequence_parallel == joined_if_parallel else 64
        options = {"fp8": tnn.Float8Recipe(scaling), "sequence_parallel": sequence_parallel}
        column = tnn.ColumnParallelLinear(64, features, comm, **options)
        layers.append((column, tnn.RowParallelLinear(128, 64, comm, **options)))

    def mlps(x):
        results = []
        for column, row in layers:
            y = column(x)
            results.append(row(torch.cat(y if isinstance(y, list) else [y, y.tanh()], -1)))
        return results

    run = torch.compile(mlps, backend="aot_eager", fullgraph=True)
    for rows, is_frozen in ((32, False), (64, False), (32, True)):
        for parameter in torch.nn.ModuleList(sum(layers, ())).parameters():
            parameter.requires_grad_(not is_frozen)
        x = torch.randn(rows, 64)
        with torch.set_grad_enabled(is_frozen):
            got, want = run(x), mlps(x)
        assert not any(y.requires_grad for y in got)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("scaling", "joined_if_parallel"), zip(SCALINGS, [True, False] * 2, strict=True))
def test_layers_without_gradients_compile(seed, scaling, joined_if_parallel):
    """Any two of the three options occur together."""
    run_ranks(compiled_inference, 2, seed, scaling, joined_if_parallel)

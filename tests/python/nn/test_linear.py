"""The two linear layers against nn.Linear in fp64: values, gradients of the input and of the parameters."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import torch_overlap as to
from torch_overlap.nn import ColumnParallelLinear, RowParallelLinear
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
SIZES = [1, 2, 3, 4]
ALGORITHMS = ["sequential", "pipelined", "auto"]


def part(tensor, dim, comm):
    return tensor if dim is None else tensor.detach().chunk(comm.get_size(), dim)[comm.get_rank()]


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-9, atol=1e-9)


def whole_gradients(linears, x, factors):
    """Returns the outputs of the whole layers; their loss leaves its gradients in x.grad and in the layers."""
    x = x.clone().requires_grad_()
    outputs = [linear(x) for linear in linears]
    sum((f * y * y).sum() for f, y in zip(factors, outputs, strict=True)).backward()
    return [y.detach() for y in outputs], x.grad


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("features", [12, [12, 24, 12]], ids=["one", "several"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("sequence_parallel", "shape", "dim"), [
    (True, (12, 2, 5), 0), (True, (2, 12, 5), 1), (True, (12, 5), 0), (False, (3, 2, 5), 0), (False, (3, 5), 0),
])  # fmt: skip
@pytest.mark.parametrize("gather_output", [False, True])
def test_column(problem, seed, size, features, bias, sequence_parallel, shape, dim, gather_output):
    data = problem(seed)
    sizes = features if isinstance(features, list) else [features]
    linears = [data.linear(5, n, bias) for n in sizes]
    x, factors = data(*shape), [data(*shape[:-1], n) for n in sizes]
    want, x_grad = whole_gradients(linears, x, factors)
    output_dim = None if gather_output else -1

    def rank(comm):
        for algorithm in ALGORITHMS:
            layer = ColumnParallelLinear.from_linear(
                linears if isinstance(features, list) else linears[0], comm, sequence_parallel=sequence_parallel,
                gather_dim=dim, gather_output=gather_output, algorithm=algorithm,
            )  # fmt: skip
            mine = part(x, dim if sequence_parallel else None, comm).clone().requires_grad_()
            outputs = layer(mine)
            assert isinstance(outputs, list) == isinstance(features, list)
            outputs = outputs if isinstance(outputs, list) else [outputs]
            for got, full in zip(outputs, want, strict=True):
                close(got.detach(), part(full, output_dim, comm))
            sum((part(f, output_dim, comm) * y * y).sum() for f, y in zip(factors, outputs, strict=True)).backward()
            close(mine.grad, part(x_grad, dim if sequence_parallel else None, comm))
            for linear, weight, layer_bias in zip(linears, layer.weights, layer.biases, strict=True):
                close(weight.grad, part(linear.weight.grad, 0, comm))
                assert (layer_bias is not None) == bias
                if bias:
                    close(layer_bias.grad, part(linear.bias.grad, 0, comm))

    run_ranks(rank, size, backend="local")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("sequence_parallel", "shape", "dim"), [
    (True, (12, 2, 12), 0), (True, (2, 12, 12), 1), (True, (12, 12), 0), (False, (3, 2, 12), 0), (False, (3, 12), 0),
])  # fmt: skip
@pytest.mark.parametrize("input_is_parallel", [False, True])
def test_row(problem, seed, size, bias, sequence_parallel, shape, dim, input_is_parallel):
    data = problem(seed)
    linear = data.linear(12, 7, bias)
    x, factor = data(*shape), data(*shape[:-1], 7)
    (want,), x_grad = whole_gradients([linear], x, [factor])
    input_dim, output_dim = -1 if input_is_parallel else None, dim if sequence_parallel else None

    def rank(comm):
        for algorithm in ALGORITHMS:
            layer = RowParallelLinear.from_linear(
                linear, comm, sequence_parallel=sequence_parallel, scatter_dim=dim,
                input_is_parallel=input_is_parallel, algorithm=algorithm,
            )  # fmt: skip
            mine = part(x, input_dim, comm).clone().requires_grad_()
            output = layer(mine)
            close(output.detach(), part(want, output_dim, comm))
            (part(factor, output_dim, comm) * output * output).sum().backward()
            close(mine.grad, part(x_grad, input_dim, comm))
            close(layer.weight.grad, part(linear.weight.grad, 1, comm))
            assert (layer.bias is not None) == bias
            if bias:
                close(layer.bias.grad, linear.bias.grad)

    run_ranks(rank, size, backend="local")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_only_the_gradients_that_are_asked_are_computed(problem, seed, sequence_parallel):
    data = problem(seed)
    up, down, x = data.linear(4, 6, True), data.linear(6, 4, True), data(4, 4)
    up.weight.requires_grad_(False)
    down.bias.requires_grad_(False)

    def rank(comm):
        layers = nn.Sequential(
            ColumnParallelLinear.from_linear(up, comm, sequence_parallel=sequence_parallel),
            RowParallelLinear.from_linear(down, comm, sequence_parallel=sequence_parallel),
        )
        layers(part(x, 0 if sequence_parallel else None, comm)).sum().backward()
        first, second = layers
        assert first.weight.grad is None
        assert second.bias.grad is None
        assert first.bias.grad is not None
        assert second.weight.grad is not None

    run_ranks(rank, 2, backend="local")


@pytest.mark.smoke
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_autocast(problem, seed, size, sequence_parallel):
    data = problem(seed, torch.float32)
    up, down, x = data.linear(8, 16, True), data.linear(16, 8, True), data(4, 8)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        want = down(up(x))
    want.float().square().sum().backward()

    def rank(comm):
        dim = 0 if sequence_parallel else None
        options = {"sequence_parallel": sequence_parallel}
        layers = nn.Sequential(
            ColumnParallelLinear.from_linear(up, comm, **options), RowParallelLinear.from_linear(down, comm, **options)
        )
        mine = part(x.detach(), dim, comm).clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            got = layers(mine)
        assert got.dtype == torch.bfloat16
        got.float().square().sum().backward()
        torch.testing.assert_close(got.detach(), part(want.detach(), dim, comm), rtol=5e-2, atol=0.5)
        pairs = [(mine.grad, part(x.grad, dim, comm)), (layers[0].weight.grad, part(up.weight.grad, 0, comm)),
                 (layers[1].weight.grad, part(down.weight.grad, 1, comm)), (layers[1].bias.grad, down.bias.grad),
                 (layers[0].bias.grad, part(up.bias.grad, 0, comm))]  # fmt: skip
        for grad, expected in pairs:
            assert grad.dtype == torch.float32
            scale = expected.abs().max().item()
            torch.testing.assert_close(grad / scale, expected / scale, rtol=0, atol=5e-2)

    run_ranks(rank, size, backend="local")


def test_the_description_says_what_the_layer_is():
    def rank(comm):
        column = ColumnParallelLinear(4, [2, 6], comm, algorithm="pipelined")
        assert repr(column) == (
            "ColumnParallelLinear(in_features=4, out_features=[2, 6], bias=True, gather_output=False, ranks=2, "
            "sequence_parallel=True, algorithm=pipelined)"
        )
        row = RowParallelLinear(4, 3, comm, bias=False, sequence_parallel=False)
        assert repr(row) == (
            "RowParallelLinear(in_features=4, out_features=3, bias=False, input_is_parallel=True, ranks=2, "
            "sequence_parallel=False, algorithm=auto)"
        )

    run_ranks(rank, 2, backend="local")


# --- Errors -------------------------------------------------------------------------------------------


def with_transposed(layer, name, x):
    """Returns a layer one of whose weights was replaced by one of [in_features, out_features]."""
    setattr(layer, name, nn.Parameter(getattr(layer, name).detach().t().contiguous()))
    return layer(x)


ERRORS = {
    r"ColumnParallelLinear: expected out_features divisible by the group size 2, got 7. Pad it, or use":
        lambda c: ColumnParallelLinear(4, 7, c),
    r"ColumnParallelLinear: expected one or more out_features, got none": lambda c: ColumnParallelLinear(4, [], c),
    r"RowParallelLinear: expected in_features divisible by the group size 2, got 5. Pad it":
        lambda c: RowParallelLinear(5, 4, c),
    r"ColumnParallelLinear: expected x of two or more dimensions, got shape \[4\]. Use x.unsqueeze":
        lambda c: ColumnParallelLinear(4, 2, c, sequence_parallel=False)(torch.ones(4)),
    r"RowParallelLinear: expected x of two or more dimensions, got shape \[2\]. Use x.unsqueeze":
        lambda c: RowParallelLinear(4, 2, c)(torch.ones(2)),
    r"ColumnParallelLinear: expected x .* and weight \[out_features, in_features\] of this rank, got shapes "
    r"\[3, 2\] and \[2, 4\]. Check the layer before, or pass weight.t\(\)":
        lambda c: with_transposed(ColumnParallelLinear(2, 8, c), "weight", torch.ones(3, 2)),
    r"ColumnParallelLinear: expected x .* and weights\[1\] .* got shapes \[3, 4\] and \[4, 6\]":
        lambda c: with_transposed(ColumnParallelLinear(4, [8, 12], c), "weight1", torch.ones(3, 4)),
    r"RowParallelLinear: expected x .* and weight .* got shapes \[4, 3\] and \[2, 2\]. Check":
        lambda c: RowParallelLinear(4, 2, c, sequence_parallel=False)(torch.ones(4, 3)),
    r"matmul_reduce_scatter: expected .* divisible by the group size 2, got 3":
        lambda c: RowParallelLinear(4, 2, c)(torch.ones(3, 2)),
    r"ColumnParallelLinear: expected algorithm to be one of auto, sequential, .*p2p.*, got 'fsat'":
        lambda c: ColumnParallelLinear(4, 2, c, algorithm="fsat"),
    r"RowParallelLinear: expected algorithm to be one of auto, sequential, .*p2p.*, got 'none'":
        lambda c: RowParallelLinear(4, 2, c, algorithm="none"),
    r"from_linear: expected linears of the same in_features, all with a bias or none, got":
        lambda c: ColumnParallelLinear.from_linear([nn.Linear(4, 2), nn.Linear(4, 2, bias=False)], c),
}  # fmt: skip


@pytest.mark.parametrize("message", ERRORS)
def test_a_mistake_is_an_error_that_says_what_to_do(message):
    def rank(comm):
        with pytest.raises(ValueError, match=message):
            ERRORS[message](comm)

    run_ranks(rank, 2, backend="local")


class Doubled(nn.Linear):
    """Computes something else than its base."""

    def forward(self, x):
        return 2 * super().forward(x)


TYPES = {
    r"ColumnParallelLinear: expected comm as a TorchComm or a DeviceMesh, got 'tp' \(str\); new_comm makes a ":
        lambda c: ColumnParallelLinear(4, 2, "tp"),
    r"RowParallelLinear: expected comm as a TorchComm or a DeviceMesh, got .*ProcessGroup.*; new_comm":
        lambda c: RowParallelLinear(4, 2, torch.distributed.ProcessGroup(0, 1)),
    r"ParallelMLP: expected comm as a TorchComm or a DeviceMesh, got None": lambda c: to.nn.ParallelMLP(4, 4, None),
    r"RowParallelLinear: expected fp8 as a Float8Recipe, got 'delayed' \(str\); write Float8Recipe":
        lambda c: RowParallelLinear(32, 32, c, fp8="delayed"),
    r"ColumnParallelLinear.from_linear: expected an nn.Linear or several, got Conv1d":
        lambda c: ColumnParallelLinear.from_linear(nn.Conv1d(2, 2, 1), c),
    r"ColumnParallelLinear.from_linear: expected an nn.Linear or several, got Identity":
        lambda c: ColumnParallelLinear.from_linear([nn.Linear(2, 2), nn.Identity()], c),
    r"RowParallelLinear.from_linear: expected an nn.Linear, got Conv1d":
        lambda c: RowParallelLinear.from_linear(nn.Conv1d(2, 2, 1), c),
    r"ColumnParallelLinear.from_linear: expected Linear with parameters of its own, got ParametrizedLinear. Before":
        lambda c: ColumnParallelLinear.from_linear([nn.Linear(2, 2), weight_norm(nn.Linear(2, 2))], c),
    r"RowParallelLinear.from_linear: expected Linear with parameters of its own, got ParametrizedLinear. Before":
        lambda c: RowParallelLinear.from_linear(weight_norm(nn.Linear(2, 2)), c),
    r"RowParallelLinear.from_linear: expected an nn.Linear, got Doubled; its weight and bias alone are taken":
        lambda c: RowParallelLinear.from_linear(Doubled(2, 2), c),
}  # fmt: skip


@pytest.mark.parametrize("message", TYPES)
def test_what_is_no_communicator_recipe_or_linear_is_refused(message):
    def rank(comm):
        with pytest.raises(TypeError, match=message):
            TYPES[message](comm)

    run_ranks(rank, 2, backend="local")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_require_fused_refuses_a_fallback(problem, seed, sequence_parallel):
    column, row = problem(seed, torch.float32).linear(4, 8, False), problem(seed, torch.float32).linear(8, 4, False)
    ops = {
        True: ("all_gather_matmul", "matmul_reduce_scatter"),
        False: ("matmul_all_reduce", "matmul_all_reduce"),
    }[sequence_parallel]

    def layers(comm, algorithm):
        options = {"sequence_parallel": sequence_parallel, "algorithm": algorithm, "require_fused": True}
        return (ColumnParallelLinear.from_linear(column, comm, **options),
                RowParallelLinear.from_linear(row, comm, **options))  # fmt: skip

    def rank(comm):
        for algorithm, reason in (("auto", "rows are quicker computed than sent"), ("sequential", "asked for")):
            for layer, op, width in zip(layers(comm, algorithm), ops, (4, 4), strict=True):
                name = type(layer).__name__
                with pytest.raises(to.UnsupportedError, match=rf"^{name}: expected an overlapped {op} .*{reason}"):
                    layer(torch.ones(4, width))
        for layer in layers(comm, "pipelined"):
            layer(torch.ones(4, 4))
        for layer in layers(comm, "auto"):
            layer(torch.ones(2048, 4))

    def alone(comm):
        for layer, width in zip(layers(comm, "auto"), (4, 8), strict=True):
            layer(torch.ones(2, width))  # one rank has nothing to overlap

    run_ranks(rank, 2, backend="local")
    run_ranks(alone, 1, backend="local")


# --- Initial weights ----------------------------------------------------------------------------------


def drawn(rank, size, store, seed, pieces):
    """Returns the whole weights of layers made after one seed, and the random number that follows."""
    from torch_overlap.nn import _initialize

    comm = to.new_comm("gloo", torch.device("cpu"), name="draw", store=store, rank=rank, size=size)
    default, _initialize._PIECE_ELEMENTS = _initialize._PIECE_ELEMENTS, pieces or _initialize._PIECE_ELEMENTS
    try:
        torch.manual_seed(seed)
        column = ColumnParallelLinear(10, [12, 24], comm)
        row = RowParallelLinear(12, 7, comm)
        own = ColumnParallelLinear(10, 12, comm, init=lambda rows: rows.normal_(std=3.0))
        deferred = RowParallelLinear(12, 7, comm, device="meta")
        assert deferred.weight.is_meta
        deferred.to_empty(device="cpu").reset_parameters()
        full = {}
        for name, layer in (("column", column), ("row", row), ("own", own), ("deferred", deferred)):
            full |= {f"{name}.{key}": value for key, value in to.nn.full_state_dict(layer).items()}
        return full, torch.rand(3)
    finally:
        _initialize._PIECE_ELEMENTS = default
        comm.finalize()


@pytest.mark.parametrize("pieces", [None, 64])
def test_weights_start_equal_for_any_number_of_ranks(seed, pieces):
    results = [result for size in (1, 2, 3) for result in run_ranks(drawn, size, seed, pieces, comm=False)]
    first, after = results[0]
    assert len(first) == 10
    for full, following in results[1:]:
        assert torch.equal(following, after)
        for key, value in full.items():
            assert torch.equal(value, first[key]), key


def test_weights_start_as_those_of_nn_linear(seed):
    ((full, _),) = run_ranks(drawn, 1, seed, 64, comm=False)
    torch.manual_seed(seed)
    for keys, (inputs, outputs) in {("column.weight0", "column.bias0"): (10, 12),
                                    ("column.weight1", "column.bias1"): (10, 24),
                                    ("row.weight", "row.bias"): (12, 7)}.items():  # fmt: skip
        linear = nn.Linear(inputs, outputs)
        for key, want in zip(keys, (linear.weight, linear.bias), strict=True):
            torch.testing.assert_close(full[key], want.detach(), rtol=1e-5, atol=1e-7)

"""The operators on GPUs, forward and backward: eager, and captured in a graph whose inputs change between replays."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from op_cases import CASES, IN, OUT, OVER_CHANNELS, ROWS, Case, around, summed

from torch_overlap import ops

pytestmark = pytest.mark.gpu(2)


class Problem:
    """All ranks' inputs and output gradients in fp64, equal on all ranks, and this rank's in fp32 on the device."""

    def __init__(self, case, comm, seed):
        self.case, self.comm, self.rank, self.size = case, comm, comm.get_rank(), comm.get_size()
        generator = torch.Generator().manual_seed(seed)
        self.every = [
            [
                torch.randn(*shape, generator=generator, dtype=torch.float64).cuda().requires_grad_()
                for shape in case.shapes
            ]
            for _ in range(self.size)
        ]
        outputs = [case.reference(self.every, r) for r in range(self.size)]
        self.cotangents = [torch.randn(*o.shape, generator=generator, dtype=torch.float64).cuda() for o in outputs]
        self.output = outputs[self.rank].detach()
        total = sum((o * c).sum() for o, c in zip(outputs, self.cotangents, strict=True))
        self.gradients = torch.autograd.grad(total, self.every[self.rank], allow_unused=True)

    def inputs(self):
        return [t.detach().float() for t in self.every[self.rank]]

    def cotangent(self):
        return self.cotangents[self.rank].float()

    def check_output(self, output):
        torch.testing.assert_close(output.double(), self.output, rtol=1e-4, atol=1e-4)

    def check(self, output, gradients):
        self.check_output(output)
        for got, want, shape in zip(gradients, self.gradients, self.case.shapes, strict=True):
            want = torch.zeros(shape, dtype=torch.float64, device="cuda") if want is None else want
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def forward_and_backward(case, comm, inputs, cotangent):
    output = case.run(comm, *inputs)
    return output, torch.autograd.grad(output, inputs, cotangent)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients(comm, seed, case):
    problem = Problem(case, comm, seed)
    inputs = [t.requires_grad_() for t in problem.inputs()]
    problem.check(*forward_and_backward(case, comm, inputs, problem.cotangent()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_graph_replays_with_changing_inputs(comm, seed, case):
    problem = Problem(case, comm, seed)
    inputs = [t.requires_grad_() for t in problem.inputs()]
    cotangent = problem.cotangent()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries allocate their workspaces
        forward_and_backward(case, comm, inputs, cotangent)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, gradients = forward_and_backward(case, comm, inputs, cotangent)
    for step in range(1, 6):
        problem = Problem(case, comm, seed + step)
        with torch.no_grad():
            for static, new in zip(inputs, problem.inputs(), strict=True):
                static.copy_(new)
        cotangent.copy_(problem.cotangent())
        output.detach().fill_(float("nan"))
        for gradient in gradients:
            gradient.fill_(float("nan"))
        if comm.get_rank() == step % comm.get_size():
            torch.cuda._sleep(20_000_000)  # one rank is late
        graph.replay()
        problem.check(output, gradients)


@pytest.mark.parametrize("case", [case for case in CASES if "-" in case.name], ids=lambda case: case.name)
def test_no_rows(comm, seed, case):
    """No rank has rows; then all have some again."""
    with_rows = (0, 3) if case.name.startswith("bulk_overlap") else (0,)
    shapes = [(0, *shape[1:]) if i in with_rows else shape for i, shape in enumerate(case.shapes)]
    for problem in (Problem(Case(case.name, shapes, case.run, case.reference), comm, seed), Problem(case, comm, seed)):
        inputs = [t.requires_grad_() for t in problem.inputs()]
        problem.check(*forward_and_backward(case, comm, inputs, problem.cotangent()))


@pytest.mark.parametrize("case", OVER_CHANNELS, ids=lambda case: case.name)
def test_memory_that_is_first_used_in_inference_mode(make_comm, seed, case):
    """Memory first used in inference mode later serves training, and graphs."""
    comm = make_comm(f"inference {case.name}")
    for step, made_inside in enumerate((False, True)):
        problem = Problem(case, comm, seed + step)
        inputs = [t.requires_grad_() for t in problem.inputs()]
        with torch.inference_mode():
            output = case.run(comm, *([t.clone() for t in inputs] if made_inside else inputs))
        problem.check_output(output)
        problem.check(*forward_and_backward(case, comm, inputs, problem.cotangent()))
    static = [t.detach().clone() for t in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        output = case.run(comm, *static)
    problem = Problem(case, comm, seed + 2)
    for t, new in zip(static, problem.inputs(), strict=True):
        t.copy_(new)
    graph.replay()
    problem.check_output(output)
    comm.finalize()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_several_async_operators_are_waited_for_in_any_order(comm, captured):
    rank, size = comm.get_rank(), comm.get_size()
    base = torch.arange(4 * ROWS * IN, device="cuda").view(4 * ROWS, IN) % 89
    x = torch.zeros(4 * ROWS, IN, device="cuda")

    def run():
        started = [
            ops.all_gather_async(x, comm),
            ops.reduce_scatter_async(x, comm),
            ops.all_to_all_async(x, comm),
            ops.broadcast_async(x, comm, 1),
            ops.permute_async(x, comm, around(comm)),
            ops.all_reduce_async(x, comm),
        ]
        ops.broadcast_async(x + 1, comm, 0)  # the result is never waited for
        return [2 * ops.wait_tensor(started[i]) for i in (3, 0, 5, 4, 1, 2)]

    results = run()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            results = run()
    for step in range(5):
        every = [(base + 3 * r + 5 * step).float() for r in range(size)]
        x.copy_(every[rank])
        if rank == step % size:
            torch.cuda._sleep(20_000_000)  # one rank is late
        if captured:
            graph.replay()
        else:
            results = run()
        total = summed(every)
        parts = [one.chunk(size)[rank] for one in every]
        wanted = [
            every[1],
            torch.cat(every),
            total,
            every[(rank - 1) % size],
            total.chunk(size)[rank],
            torch.cat(parts),
        ]
        for got, want in zip(results, wanted, strict=True):
            assert torch.equal(got, 2 * want)


class ScaledProblem:
    """The products of 8-bit floats: operands on the device, and the results in fp64 of the values that they
    represent."""

    def __init__(self, comm, seed):
        rank, size = comm.get_rank(), comm.get_size()
        generator = torch.Generator().manual_seed(seed)

        def quantized(*shape):
            data, scale_inv, *_ = ops.quantize(torch.randn(*shape, generator=generator))
            return (data.cuda(), scale_inv.cuda()), data.double() * scale_inv.double()

        (x, scale_inv), x_value = quantized(size, ROWS, IN)  # one factor for all ranks
        w, w_value = [list(some) for some in zip(*(quantized(OUT, IN) for _ in range(size)), strict=True)]
        h, h_value = [list(some) for some in zip(*(quantized(4 * ROWS, IN) for _ in range(size)), strict=True)]
        self.inputs = [x[rank].contiguous(), scale_inv, *w[rank], *h[rank]]
        product_sum = sum(F.linear(a, b) for a, b in zip(h_value, w_value, strict=True))
        self.outputs = [F.linear(x_value.flatten(0, 1), w_value[rank]), product_sum.chunk(size)[rank], product_sum]

    def check(self, outputs):
        for got, want in zip(outputs, self.outputs, strict=True):
            torch.testing.assert_close(got.double().cpu(), want, rtol=1e-2, atol=1e-2)


def scaled_products(comm, algorithm, x, x_scale_inv, w, w_scale_inv, h, h_scale_inv):
    options = {"out_dtype": torch.float32, "use_split_accumulator": True, "algorithm": algorithm}
    (y,), *_ = ops.scaled_all_gather_matmul(x, x_scale_inv, [w], [w_scale_inv], comm, **options)
    part = ops.scaled_matmul_reduce_scatter(h, h_scale_inv, w, w_scale_inv, comm, **options)
    return y, part, ops.scaled_matmul_all_reduce(h, h_scale_inv, w, w_scale_inv, comm, **options)


def check_eager_and_replayed(comm, seed, problem_of, run):
    """Calls run(*inputs) of problem_of(comm, seed), then replays with new inputs and a late rank."""
    problem = problem_of(comm, seed)
    inputs = problem.inputs
    problem.check(run(*inputs))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(*inputs)
    for step in range(1, 6):
        problem = problem_of(comm, seed + step)
        for static, new in zip(inputs, problem.inputs, strict=True):
            static.copy_(new)
        for output in outputs:
            output.fill_(float("nan"))
        if comm.get_rank() == step % comm.get_size():
            torch.cuda._sleep(20_000_000)
        graph.replay()
        problem.check(outputs)


@pytest.mark.parametrize("algorithm", ["sequential", "pipelined", "p2p"])
def test_scaled_products_eager_and_in_a_graph(comm, seed, algorithm):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs tensor cores of 8-bit floats")
    check_eager_and_replayed(comm, seed, ScaledProblem, partial(scaled_products, comm, algorithm))


class ExchangeProblem:
    """Rows that no vector divides: 16-bit, odd widths, pieces of one row; three products in one exchange."""

    def __init__(self, comm, seed):
        size, rank, generator = comm.get_size(), comm.get_rank(), torch.Generator().manual_seed(seed)

        def values(*shape):
            return torch.randn(*shape, generator=generator).to(torch.bfloat16)

        heads, w = values(size, 3 * size, 5), values(6, 5 * size)
        tokens, vs = values(size, 3, 7), [values(n * size, 7) for n in (1, 3, 5)]
        self.inputs = [t.cuda() for t in (heads[rank], w, tokens[rank], *vs)]
        joined = torch.cat([h.chunk(size)[rank] for h in heads], -1)
        parts = [[F.linear(t.double(), v.double()).chunk(size, -1)[rank] for t in tokens] for v in vs]
        self.outputs = [F.linear(joined.double(), w.double()), *(torch.cat(part) for part in parts)]

    def check(self, outputs):
        for got, want in zip(outputs, self.outputs, strict=True):
            torch.testing.assert_close(got.double().cpu(), want, rtol=1e-2, atol=1e-2)


def exchanged_products(comm, algorithm, x, w, y, *vs):
    first = ops.all_to_all_matmul(x, w, comm, algorithm=algorithm)
    return first, *ops.matmul_all_to_all(y, vs, comm, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["sequential", "pipelined", "p2p"])
def test_exchanges_of_odd_widths_eager_and_in_a_graph(comm, seed, algorithm):
    check_eager_and_replayed(comm, seed, ExchangeProblem, partial(exchanged_products, comm, algorithm))


def test_send_and_recv_in_a_graph(comm):
    rank, size = comm.get_rank(), comm.get_size()
    if rank > 1:
        return
    x = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if rank == 0:
            ops.send(x, comm, 1)
        else:
            ops.recv_(x, comm, 0)
    for step in range(4):
        x.fill_(step + 1 if rank == 0 else -1)
        graph.replay()
        assert (x == step + 1).all(), f"replay {step} of {size} ranks"

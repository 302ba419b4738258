"""The operators on GPUs, forward and backward: eager, and captured in a graph whose inputs change between replays."""

import pytest
import torch
import torch.nn.functional as F

from torch_overlap import ops

pytestmark = pytest.mark.gpu(2)

ROWS, IN, OUT = 24, 32, 16  # of one rank; ROWS is divisible by every size up to 4


class Case:
    """An operator: the shapes of one rank's inputs, and what rank r gets from everybody's, in plain torch."""

    def __init__(self, name, shapes, run, reference):
        self.name, self.shapes, self.run, self.reference = name, shapes, run, reference


def gathered(xs):
    return torch.cat(xs)


def summed(xs):
    return torch.stack(xs).sum(0)


def fused_cases(algorithm):
    def gather_matmul(comm, x, w1, w2, bias):
        (a, b), whole = ops.all_gather_matmul(
            x, [w1, w2], comm, [bias, None], return_gathered=True, algorithm=algorithm
        )
        return torch.cat([a, b, whole], dim=1)

    def gather_matmul_reference(every, r):
        x, (_, w1, w2, bias) = gathered([e[0] for e in every]), every[r]
        return torch.cat([F.linear(x, w1, bias), F.linear(x, w2), x], dim=1)

    def product_sum(every, r):
        return summed([F.linear(e[0], e[1]) for e in every])

    return [
        Case(f"all_gather_matmul-{algorithm}", [(ROWS, IN), (OUT, IN), (2 * OUT, IN), (OUT,)],
             gather_matmul, gather_matmul_reference),
        Case(f"matmul_reduce_scatter-{algorithm}", [(4 * ROWS, IN), (OUT, IN)],
             lambda comm, x, w: ops.matmul_reduce_scatter(x, w, comm, algorithm=algorithm),
             lambda every, r: product_sum(every, r).chunk(len(every))[r]),
        Case(f"matmul_all_reduce-{algorithm}", [(ROWS, IN), (OUT, IN)],
             lambda comm, x, w: ops.matmul_all_reduce(x, w, comm, algorithm=algorithm), product_sum),
    ]  # fmt: skip


def exchange_cases(algorithm):
    def by_tokens(every, r):
        size = len(every)
        x = torch.cat([e[0].chunk(size)[r] for e in every], dim=1)
        return F.linear(x, every[r][1][:, : size * IN], every[r][2])

    def by_heads(every, r):
        products = [torch.stack([F.linear(e[0], e[1], e[3]), F.linear(e[0], e[2])]) for e in every]
        return torch.cat([p.chunk(len(every), dim=2)[r] for p in products], dim=1)

    return [
        Case(f"all_to_all_matmul-{algorithm}", [(4 * ROWS, IN), (OUT, 8 * IN), (OUT,)],
             lambda comm, x, w, b: ops.all_to_all_matmul(x, w[:, : comm.get_size() * IN], comm, b, algorithm=algorithm),
             by_tokens),
        Case(f"matmul_all_to_all-{algorithm}", [(ROWS, IN), (24, IN), (24, IN), (24,)],
             lambda comm, x, w1, w2, b: torch.stack(
                 ops.matmul_all_to_all(x, [w1, w2], comm, [b, None], algorithm=algorithm)),
             by_heads),
    ]  # fmt: skip


def bulk_cases(algorithm):
    def run(collective):
        def both(comm, x, w, b, other):
            results = ops.bulk_overlap_matmul(x, w, other, comm, b, collective=collective, algorithm=algorithm)
            return torch.cat([t.flatten() for t in results])

        return both

    def reference(collect):
        return lambda every, r: torch.cat([F.linear(*every[r][:3]).flatten(), collect(every, r).flatten()])

    shapes = [(ROWS, IN), (OUT, IN), (OUT,), (4 * ROWS, 3)]
    return [
        Case(f"bulk_overlap_matmul-all_gather-{algorithm}", shapes, run("all_gather"),
             reference(lambda every, r: gathered([e[3] for e in every]))),
        Case(f"bulk_overlap_matmul-reduce_scatter-{algorithm}", shapes, run("reduce_scatter"),
             reference(lambda every, r: summed([e[3] for e in every]).chunk(len(every))[r])),
    ]  # fmt: skip


X = [(4 * ROWS, IN)]


def uneven_case(name, exchange):
    """all_to_all_v: parts of every size, some of them empty."""

    def sent_by(a, size):
        parts = [5 * ((a + 2 * b) % 3) for b in range(size - 1)]
        return [*parts, 4 * ROWS - sum(parts)]

    def run(comm, x):
        rank, size = comm.get_rank(), comm.get_size()
        return exchange(x, comm, [sent_by(a, size)[rank] for a in range(size)], sent_by(rank, size))

    def reference(every, r):
        return torch.cat([e[0].split(sent_by(a, len(every)))[r] for a, e in enumerate(every)])

    return Case(name, X, run, reference)


def around(comm):
    """To the next rank."""
    return [(r, (r + 1) % comm.get_size()) for r in range(comm.get_size())]


CASES = [
    Case("all_reduce", X, lambda comm, x: ops.all_reduce(x, comm), lambda every, r: summed([e[0] for e in every])),
    Case("all_reduce_async", X, lambda comm, x: ops.wait_tensor(ops.all_reduce_async(x, comm, "avg")),
         lambda every, r: summed([e[0] for e in every]) / len(every)),
    Case("all_gather", X, lambda comm, x: ops.all_gather(x, comm, 1),
         lambda every, r: torch.cat([e[0] for e in every], dim=1)),
    Case("reduce_scatter", X, lambda comm, x: ops.reduce_scatter(x, comm),
         lambda every, r: summed([e[0] for e in every]).chunk(len(every))[r]),
    Case("all_to_all", X, lambda comm, x: ops.all_to_all(x, comm, 0, 1),
         lambda every, r: torch.cat([e[0].chunk(len(every))[r] for e in every], dim=1)),
    Case("all_gather_async", X, lambda comm, x: ops.wait_tensor(ops.all_gather_async(x, comm, 1)),
         lambda every, r: torch.cat([e[0] for e in every], dim=1)),
    Case("reduce_scatter_async", X, lambda comm, x: ops.wait_tensor(ops.reduce_scatter_async(x, comm, 0, "avg")),
         lambda every, r: summed([e[0] for e in every]).chunk(len(every))[r] / len(every)),
    Case("all_to_all_async", X, lambda comm, x: ops.wait_tensor(ops.all_to_all_async(x, comm, 0, 1)),
         lambda every, r: torch.cat([e[0].chunk(len(every))[r] for e in every], dim=1)),
    uneven_case("all_to_all_v", ops.all_to_all_v),
    uneven_case("all_to_all_v_async", lambda *args: ops.wait_tensor(ops.all_to_all_v_async(*args))),
    Case("broadcast", X, lambda comm, x: ops.broadcast(x, comm, 1), lambda every, r: every[1][0].clone()),
    Case("broadcast_async", X, lambda comm, x: ops.wait_tensor(ops.broadcast_async(x, comm, 1)),
         lambda every, r: every[1][0].clone()),
    Case("permute", X, lambda comm, x: ops.permute(x, comm, around(comm)),
         lambda every, r: every[(r - 1) % len(every)][0].clone()),
    Case("permute_async", X, lambda comm, x: ops.wait_tensor(ops.permute_async(x, comm, around(comm))),
         lambda every, r: every[(r - 1) % len(every)][0].clone()),
    *(case for algorithm in ("sequential", "chunked", "ring", "bulk") for case in fused_cases(algorithm)),
    *(case for algorithm in ("sequential", "chunked") for case in exchange_cases(algorithm)),
    *(case for algorithm in ("sequential", "chunked", "bulk") for case in bulk_cases(algorithm)),
]  # fmt: skip


class Problem:
    """Everybody's inputs and output gradients in fp64, equal on all ranks, and this rank's in fp32 on the device."""

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

    def check(self, output, gradients):
        torch.testing.assert_close(output.double(), self.output, rtol=1e-4, atol=1e-4)
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
    with torch.cuda.stream(side):  # libraries make their workspaces
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
        ops.broadcast_async(x + 1, comm, 0)  # nobody waits for it
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
    """Both products of 8-bit floats: operands on the device, and the results in fp64 of what they stand for."""

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
        self.outputs = [F.linear(x_value.flatten(0, 1), w_value[rank]), product_sum.chunk(size)[rank]]

    def check(self, outputs):
        for got, want in zip(outputs, self.outputs, strict=True):
            torch.testing.assert_close(got.double().cpu(), want, rtol=1e-2, atol=1e-2)


def scaled_products(comm, algorithm, x, x_scale_inv, w, w_scale_inv, h, h_scale_inv):
    options = {"out_dtype": torch.float32, "use_split_accumulator": True, "algorithm": algorithm}
    (y,), *_ = ops.scaled_all_gather_matmul(x, x_scale_inv, [w], [w_scale_inv], comm, **options)
    return y, ops.scaled_matmul_reduce_scatter(h, h_scale_inv, w, w_scale_inv, comm, **options)


@pytest.mark.parametrize("algorithm", ["sequential", "chunked", "ring"])
def test_scaled_products_eager_and_in_a_graph(comm, seed, algorithm):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs tensor cores of 8-bit floats")
    problem = ScaledProblem(comm, seed)
    inputs = problem.inputs
    problem.check(scaled_products(comm, algorithm, *inputs))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        scaled_products(comm, algorithm, *inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = scaled_products(comm, algorithm, *inputs)
    for step in range(1, 6):
        problem = ScaledProblem(comm, seed + step)
        for static, new in zip(inputs, problem.inputs, strict=True):
            static.copy_(new)
        for output in outputs:
            output.fill_(float("nan"))
        if comm.get_rank() == step % comm.get_size():
            torch.cuda._sleep(20_000_000)  # one rank is late
        graph.replay()
        problem.check(outputs)


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

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


X = [(4 * ROWS, IN)]
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
    Case("broadcast", X, lambda comm, x: ops.broadcast(x, comm, 1), lambda every, r: every[1][0].clone()),
    Case("permute", X, lambda comm, x: ops.permute(x, comm, [(r, (r + 1) % comm.get_size())
                                                             for r in range(comm.get_size())]),
         lambda every, r: every[(r - 1) % len(every)][0].clone()),
    *fused_cases("sequential"),
    *fused_cases("chunked"),
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

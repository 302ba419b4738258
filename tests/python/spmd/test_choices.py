"""Products and their communication by the cost model alone: one operator where that is cheaper, two where it is not."""

import pytest
import torch
from functorch.compile import make_boxed_func
from spmd_ranks import on_mesh
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import torch_overlap as to
from torch_overlap.mesh import CostModel, choices
from torch_overlap.mesh.compile_pass import OverlapPass

M, K, N = 8, 12, 4


def model(start_us):
    """Products take as long as what they send, and hiding one behind the other costs `start_us` alone."""
    return CostModel.from_dict(
        {
            "name": "even",
            "links": {"nvlink": {"start_us": 1, "latency_us": 1, "bandwidth_gbps": 0.001, "curves": []}},
            "device": {
                "tflops": {str(n): 1e-6 for n in (1, 2, 4, 8)},
                "flops_hot": 1.0,
                "memory_gbps": 1000.0,
                "processors": 1,
                "kernel_us": 1.0,
                "tiles": False,
            },
            "overlap": {"contention": 0.0, "start_us": start_us, "step_us": 0.0},
        }
    )


MODELS = {"pays": model(1.0), "does not pay": model(1e6)}


class Operators(TorchDispatchMode):
    """The names of our operators that run in the block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "torch_overlap":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


# Where x [M, K] and w [K, N] lie, where the result is needed, what both are in one, and in two.
CASES = {
    "gather": ("[x],[]", "[],[x]", "[],[x]", "all_gather_matmul"),
    "scatter": ("[],[x]", "[x],[]", "[x],[]", "matmul_reduce_scatter"),
    "total": ("[],[x]", "[x],[]", "[],[]", "matmul_all_reduce"),
    "total with a whole gradient": ("[],[x]", "[x],[]", "[],[] I{x}", "matmul_all_reduce"),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("pays", MODELS)
@pytest.mark.parametrize("name", CASES)
def test_the_cheaper_form_is_taken(name, pays, size, seed):
    left, right, after, op = CASES[name]

    def body(r):
        a, b, c = r.randn(M, K), r.randn(K, N), r.randn(M, N)
        x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
        ((x @ w) * c).sum().backward()
        mine, weight = r.place(a, left).requires_grad_(), r.place(b, right).requires_grad_()
        with choices() as log, Operators() as ran:
            y = (mine @ weight.anchor()).reshard(after)
        (choice,) = log
        assert (choice.op, choice.fused, choice.why) == (op, pays == "pays", "cost")
        assert (choice.overlapped < choice.plain) == choice.fused
        assert any(found.startswith(op) for found in ran.names) == choice.fused, ran.names
        r.check(y, a @ b, after)
        y.backward(r.place(c, None))
        r.check(mine.grad, x.grad)
        r.check(weight.grad, w.grad)

    on_mesh(f"x={size}", body, seed, cost=MODELS[pays])


def feed_forward(comm, x, up, down):
    h = to.ops.all_gather(x, comm, 0) @ up
    return to.ops.reduce_scatter(torch.relu(h) @ down, comm, 0), to.ops.all_reduce(h.t() @ h, comm, "sum")


GRAPH = ["all_gather", "reduce_scatter", "all_reduce"]


def check_pass(comm, pays, seed):
    generator = torch.Generator().manual_seed(seed + comm.get_rank())
    x, up, down = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((M, K), (K, N), (N, K)))
    made, ran = OverlapPass(MODELS[pays]), []

    def compiler(module, _):
        made(module.graph)
        module.recompile()
        for node in module.graph.nodes:  # ordered effects carry the operator as an argument
            found = [a for a in (node.target, *node.args[:2]) if isinstance(a, torch._ops.OpOverload)]
            ran.extend(op._opname for op in found if op.namespace == "torch_overlap")
        return make_boxed_func(module.forward)

    with torch.no_grad():
        expected = feed_forward(comm, x, up, down)
        compiled = torch.compile(
            lambda *t: feed_forward(comm, *t), fullgraph=True, backend=aot_autograd(fw_compiler=compiler)
        )
        for got, want in zip(compiled(x, up, down), expected, strict=True):
            torch.testing.assert_close(got, want)
    return [(d.collective, d.fused, "by the cost model" in d.why) for d in made.decisions], ran


@pytest.mark.parametrize("pays", MODELS)
def test_the_pass_takes_the_cheaper_form(pays, seed):
    decisions, ran = to.testing.run_ranks(check_pass, 2, pays, seed, backend="gloo", timeout=240)[0]
    assert decisions == [(name, pays == "pays", True) for name in GRAPH]
    fused = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
    assert ran == (fused if pays == "pays" else GRAPH)

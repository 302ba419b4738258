"""Products and their communication: one operator if it can be. The compiler pass asks the cost model."""

import pytest
import torch
from functorch.compile import make_boxed_func
from spmd_ranks import on_mesh
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import torch_overlap as to
from torch_overlap.mesh import CostModel, choices, choosing, vmap
from torch_overlap.mesh.compile_pass import OverlapPass

M, K, N = 8, 12, 4


def model(start_us):
    """Products take as long as their communication, and their overlap costs only `start_us`."""
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
    """Records the names of our operators that run in the block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "torch_overlap":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


# Layouts of x [M, K] and w [K, N], the layout of the result, and the overlapped operator.
CASES = {
    "gather": ("[x],[]", "[],[x]", "[],[x]", "all_gather_matmul"),
    "scatter": ("[],[x]", "[x],[]", "[x],[]", "matmul_reduce_scatter"),
    "total": ("[],[x]", "[x],[]", "[],[]", "matmul_all_reduce"),
    "total with a whole gradient": ("[],[x]", "[x],[]", "[],[] I{x}", "matmul_all_reduce"),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("how", ["auto", "sequential"])
@pytest.mark.parametrize("name", CASES)
def test_a_product_runs_as_the_operator_unless_told_otherwise(name, how, size, seed):
    left, right, after, op = CASES[name]

    def body(r):
        a, b, c = r.randn(M, K), r.randn(K, N), r.randn(M, N)
        x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
        ((x @ w) * c).sum().backward()
        mine, weight = r.place(a, left).requires_grad_(), r.place(b, right).requires_grad_()
        with choosing(how), choices() as log, Operators() as ran:
            y = (mine @ weight.anchor()).reshard(after)
        (choice,) = log
        assert choice.op == op
        assert (choice.overlapped, choice.why) == ((True, "auto") if how == "auto" else (False, "asked for"))
        assert any(found.startswith(op) for found in ran.names) == choice.overlapped, ran.names
        r.check(y, a @ b, after)
        y.backward(r.place(c, None))
        r.check(mine.grad, x.grad)
        r.check(weight.grad, w.grad)

    on_mesh(f"x={size}", body, seed)


# Shapes of x and w; their layouts, the layout of the result; the operator that is not possible, and the reason.
REFUSED = {
    "rows": ((7, 12), (12, 4), "[x],[]", "[],[x]", "[],[x]", "all_gather_matmul",
             "dimension 0 of size 7 is not cut into 2 parts of one size"),
    "what is multiplied": ((8, 12), (12, 4), "[],[x]", "[],[x]", "[],[x]", "all_gather_matmul",
                           "it gathers the dimension that is multiplied"),
    "order": ((8, 12), (12, 4), "[y,x],[]", "[],[x,y]", "[],[x,y]", "all_gather_matmul",
              "the parts are in another order than the ranks of the communicator"),
    "columns": ((8, 12), (12, 4), "[],[x]", "[x],[]", "[],[x]", "matmul_reduce_scatter", "it scatters columns"),
    "uneven sums": ((7, 12), (12, 4), "[],[x]", "[x],[]", "[x],[]", "matmul_reduce_scatter",
                    "dimension 0 of size 7 is not cut into 2 parts of one size"),
    "uneven columns": ((8, 12), (12, 5), "[x],[]", "[],[x]", "[],[x]", "all_gather_matmul",
                       "dimension 1 of the weight of size 5 is not cut into 2 parts of one size"),
    "uneven inner size": ((8, 11), (11, 4), "[],[x]", "[x],[]", "[x],[]", "matmul_reduce_scatter",
                          "dimension 0 of the weight of size 11 is not cut into 2 parts of one size"),
    "uneven inner size of a sum": ((8, 11), (11, 4), "[],[x]", "[x],[]", "[],[]", "matmul_all_reduce",
                                   "dimension 0 of the weight of size 11 is not cut into 2 parts of one size"),
    "several steps": ((8, 12), (12, 4), "[y],[x]", "[x],[]", "[],[]", "matmul_all_reduce",
                      "its value moves in several steps: "),
}  # fmt: skip


@pytest.mark.parametrize("how", ["auto", "sequential"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_as_the_operator_says_why(name, how, seed):
    rows, columns, left, right, after, op, why = REFUSED[name]

    def body(r):
        a, b = r.randn(*rows), r.randn(*columns)
        x, weight = r.place(a, left), r.place(b, right)
        with choosing(how), choices() as log, Operators() as ran:
            y = (x @ weight.anchor()).reshard(after)
        (choice,) = log
        assert (choice.op, choice.overlapped) == (op, False)
        assert choice.why.startswith(why), choice.why
        assert not any("matmul" in found for found in ran.names)
        r.check(y, a @ b, after)

    on_mesh("x=2,y=2", body, seed)


def test_inside_vmap_nothing_is_fused(seed):
    def body(r):
        a, b = r.randn(3, 8, 12), r.randn(12, 4)
        x, weight = r.place(a, "[],[x],[]"), r.place(b, "[],[x]").anchor()
        with choosing("auto"), choices() as log:
            y = vmap(lambda x, w: x @ w, in_dims=(0, None))(x, weight)
        assert [(choice.op, choice.overlapped, choice.why) for choice in log] == [
            ("all_gather_matmul", False, "it runs inside vmap")
        ]
        r.check(y, a @ b)

    on_mesh("x=2", body, seed)


@pytest.mark.parametrize("how", ["auto", "sequential"])
def test_operands_are_moved_once_fused_or_not(how, seed):
    """Operands that are not gathered are moved once too: here the bias."""

    def body(r):
        a, b, c = r.randn(8, 12), r.randn(4, 12), r.randn(4)
        x, weight, bias = r.place(a, "[x],[]"), r.place(b, "[x],[]").anchor(), r.place(c, "[y]")
        r.sent()
        with choosing(how):
            y = torch.nn.functional.linear(x, weight, bias)
        sent = [what for what in r.sent() if what != "all_gather x"]
        r.place(c, "[y]").reshard("[x]")
        assert sent == r.sent() != []
        r.check(y, a @ b.t() + c)

    on_mesh("x=2,y=2", body, seed)


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
        for node in module.graph.nodes:  # ordered effects have the operator as an argument
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

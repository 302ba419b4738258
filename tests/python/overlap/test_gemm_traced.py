"""The operator gemm over buffers of the registry under opcheck, torch.compile and autograd, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config

import torch_overlap as to
from torch_overlap import CommOverlapMethod as Method
from torch_overlap import CommOverlapType as Type
from torch_overlap import TorchComm
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
OP = torch.ops.torch_overlap.gemm
TOKENS, K, N = 24, 16, 16
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.inductor])]


def calls(comm: TorchComm) -> dict[str, tuple[dict[str, Any], Callable[[int, int], list[Tensor]]]]:
    """Returns the options of each kind of call, and its operands by the number of tokens and a seed: lhs, rhs and,
    in bulk, aux_in."""
    size = comm.get_size()

    def draw(seed: int, *sizes: tuple[int, int]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed + comm.get_rank())
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in sizes]

    def way(kind: Type, method: Method, *operands: Callable[[int], tuple[int, int]]) -> Any:
        shape = (TOKENS, K if kind == Type.AG else N)
        id = to.create_comm_overlap_buffer(comm, kind, method, shape, torch.float64)
        options = {"comm_type": int(kind), "comm_overlap_method": int(method), "comm_overlap_id": id,
                   "rhs_transposed": True}  # fmt: skip
        return options, lambda tokens, seed: draw(seed, *(sizes(tokens) for sizes in operands))

    own, whole, weight = (lambda t: (t // size, K)), (lambda t: (t, K)), (lambda _: (N, K))
    return {
        "gather": way(Type.AG, Method.RING_EXCHANGE, own, weight),
        "scatter": way(Type.RS, Method.RING_EXCHANGE, whole, weight),
        "pipeline": way(Type.RS, Method.PIPELINE, whole, weight),
        "gather beside": way(Type.AG, Method.BULK, whole, weight, own),
        "scatter beside": way(Type.RS, Method.BULK, whole, weight, whole),
    }


def run(options: dict[str, Any], lhs: Tensor, rhs: Tensor, aux_in: Tensor | None = None) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = OP(lhs, None, rhs, None, None, None, aux_in, **options)
    return result


def opcheck(comm: TorchComm, seed: int) -> None:
    for options, operands in calls(comm).values():
        lhs, rhs, *aux = operands(TOKENS, seed)
        arguments = (lhs, None, rhs, None, None, None, *aux)
        torch.library.opcheck(OP.default, arguments, options)
        workspace = torch.zeros(512, dtype=torch.uint8)
        torch.library.opcheck(OP.buffers, arguments, {**options, "workspace": workspace})


def test_opcheck(seed: int) -> None:
    run_ranks(opcheck, 2, seed, timeout=280)


def compiled(comm: TorchComm, seed: int, backend: str, dynamic: bool) -> None:
    for options, operands in calls(comm).values():
        torch._dynamo.reset()
        function = torch.compile(lambda *tensors, options=options: run(options, *(t * 2 for t in tensors)),
                                 backend=backend, fullgraph=True, dynamic=dynamic)  # fmt: skip
        for tokens in (TOKENS, TOKENS // 2, TOKENS // 4) if dynamic else (TOKENS,):
            tensors = operands(tokens, seed + tokens)
            want = run(options, *(t * 2 for t in tensors))
            for got, value in zip(function(*tensors), want, strict=True):
                torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        ("aot_eager", False),
        ("aot_eager", True),
        pytest.param("inductor", False, marks=[pytest.mark.slow, pytest.mark.inductor]),
    ],
)
def test_compile_fullgraph(seed: int, backend: str, dynamic: bool) -> None:
    run_ranks(compiled, 2, seed, backend, dynamic, timeout=280)


def unused(comm: TorchComm, seed: int, backend: str) -> None:
    """Ranks compile different functions: one does not read the result of a call in which it takes part."""
    for options, operands in calls(comm).values():
        torch._dynamo.reset()
        rank, tensors = comm.get_rank(), operands(TOKENS, seed)

        def function(*tensors: Tensor, options: dict[str, Any] = options, rank: int = rank) -> Tensor:
            result = run(options, *tensors)[0]
            return tensors[0] + 1 if rank == 1 else result

        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for turn in range(2):  # the second turn would detect a call that one rank left out
            tensors = operands(TOKENS, seed + turn)
            torch.testing.assert_close(compiled(*tensors), function(*tensors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_whose_result_one_rank_does_not_use_is_still_made(seed: int, backend: str) -> None:
    run_ranks(unused, 2, seed, backend, timeout=140)


def ordered(comm: TorchComm, seed: int, backend: str) -> None:
    """Two calls, of which one rank uses only the second. Inductor keeps the order if it is requested."""
    for options, operands in calls(comm).values():
        torch._dynamo.reset()
        rank, tensors = comm.get_rank(), operands(TOKENS, seed)

        def function(*tensors: Tensor, options: dict[str, Any] = options, rank: int = rank) -> Tensor:
            first = run(options, *tensors)[0]
            second = run(options, *(t * 2 for t in tensors))[0]
            return second if rank == 1 else first + second

        with inductor_config.patch(reorder_for_peak_memory=False):
            got = torch.compile(function, backend=backend, fullgraph=True)(*tensors)
        torch.testing.assert_close(got, function(*tensors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_stay_in_order(seed: int, backend: str) -> None:
    run_ranks(ordered, 2, seed, backend, timeout=140)


def refused(comm: TorchComm, seed: int) -> None:
    for options, operands in calls(comm).values():
        lhs, rhs, *aux = operands(TOKENS, seed)
        y = run(options, lhs.requires_grad_(), rhs.requires_grad_(), *aux)[0]
        assert y.requires_grad
        with pytest.raises(RuntimeError, match=r"^gemm: expected comm_type NONE .* where a gradient is asked"):
            y.sum().backward()


def test_a_gradient_is_an_error_not_a_zero(seed: int) -> None:
    run_ranks(refused, 2, seed)

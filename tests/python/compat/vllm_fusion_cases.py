"""The fusion pass over the stand-in package: what each rank of tests/python/compat/test_vllm_fusion.py runs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from vllm_cases import group, plug_in

HIDDEN = 32


class Setting:
    """A group, a pass manager over it, and data that is equal on all ranks except x."""

    def __init__(self, made: Any, rank: int, size: int, seed: int, dtype: torch.dtype, custom_ops: list[str]) -> None:
        self.config = importlib.import_module("vllm.config")
        self.state = importlib.import_module("vllm.distributed.parallel_state")
        self.ir = importlib.import_module("vllm.ir.ops")
        self.state.set_tp_group(self.state.GroupCoordinator("tp:0", made))
        self.rank, self.size, self.dtype, self.made = rank, size, dtype, made
        self.generator = torch.Generator().manual_seed(seed)
        self.vllm_config = self.config.VllmConfig(
            model_config=self.config.ModelConfig(dtype=dtype, hidden_size=HIDDEN),
            compilation_config=self.config.CompilationConfig(custom_ops=custom_ops),
        )
        self.fusion = plug_in("fusion")
        with self.config.set_current_vllm_config(self.vllm_config):
            matcher = importlib.import_module("vllm.compilation.passes.fusion.matcher_utils").MatcherQuantFP8
            self.quantize = matcher("float8_e4m3fn, static, per tensor")
        self.manager = self.fusion.OverlapPassManager()
        self.manager.configure(self.vllm_config)

    @property
    def ours(self) -> Any:
        return next(pass_ for pass_ in self.manager.passes if isinstance(pass_, self.fusion.FusedAllReducePass))

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def sum(self, x: Tensor) -> Tensor:
        return self.state.tensor_model_parallel_all_reduce(x)

    def parts(self, *shape: int) -> list[Tensor]:
        return [self.draw(*shape).to(self.dtype) for _ in range(self.size)]

    def traced(self, model: Callable[..., Any], *args: Tensor) -> torch.fx.GraphModule:
        """Returns the model's graph after the passes, decomposed as by Inductor; the number of rows is symbolic."""
        traced = make_fx(model, select_decomp_table(), tracing_mode="symbolic")(*args)
        traced.graph.eliminate_dead_code()
        self.manager(traced.graph)
        traced.graph.lint()
        traced.recompile()
        return traced


@contextlib.contextmanager
def setting(
    rank: int, size: int, store: Any, seed: int, dtype: torch.dtype = torch.bfloat16, custom_ops: tuple[str, ...] = ()
) -> Iterator[Setting]:
    with group(rank, size, store) as made:
        yield Setting(made, rank, size, seed, dtype, list(custom_ops))


def targets(graph: torch.fx.GraphModule) -> str:
    return " ".join(str(node.target) for node in graph.graph.nodes if node.op == "call_function")


def normed(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon) * weight


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Compares with a float64 reference, within two roundings of the sum and one of the result."""
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), wanted, rtol=bound, atol=bound)


def layers(rank: int, size: int, store: Any, seed: int, dtype: torch.dtype) -> None:
    """Checks a model of three norms: one without a residual, one between layers, one behind the last layer."""
    with setting(rank, size, store, seed, dtype) as s:
        first, second, third = (s.parts(5, HIDDEN) for _ in range(3))
        weights = [s.draw(HIDDEN).to(dtype) for _ in range(3)]

        def model(x: Tensor, y: Tensor, z: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            residual = s.sum(x)
            one = s.ir.rms_norm(residual, a, 1e-5)
            two, residual = s.ir.fused_add_rms_norm(s.sum(y), residual, b, 1e-6)
            three, _ = s.ir.fused_add_rms_norm(s.sum(z), residual, c, 0.25)
            return one, two, three

        graph = s.traced(model, first[rank], second[rank], third[rank], *weights)
        assert s.ours.matched_count == 3, graph.graph
        assert s.manager.passes[-1].matched_count == 0
        assert "vllm" not in targets(graph)
        one, two, three = graph(first[rank], second[rank], third[rank], *weights)
        h = [sum(part.double() for part in parts) for parts in (first, second, third)]
        close(one, normed(h[0], weights[0].double(), 1e-5), dtype)
        close(two, normed(h[0] + h[1], weights[1].double(), 1e-6), dtype)
        close(three, normed(h[0] + h[1] + h[2], weights[2].double(), 0.25), dtype)


def quantized(rank: int, size: int, store: Any, seed: int, custom_ops: tuple[str, ...]) -> None:
    """Checks both patterns with static quantization, as ATen operators and as one operator."""
    with setting(rank, size, store, seed, custom_ops=custom_ops) as s:
        first, second = s.parts(6, HIDDEN), s.parts(6, HIDDEN)
        weights = [s.draw(HIDDEN).to(s.dtype) for _ in range(2)]
        scales = [torch.tensor(0.02), torch.tensor([0.005])]

        def model(x: Tensor, y: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            residual = s.sum(x)
            one = s.quantize(s.ir.rms_norm(residual, a, 1e-5), p)[0]
            out, residual = s.ir.fused_add_rms_norm(s.sum(y), residual, b, 1e-6)
            return one, s.quantize(out, q)[0], residual

        graph = s.traced(model, first[rank], second[rank], *weights, *scales)
        assert s.ours.matched_count == 2, graph.graph
        names = targets(graph)
        assert "vllm" not in names
        assert "clamp" not in names
        assert "auto_functionalized" not in names
        got = graph(first[rank], second[rank], *weights, *scales)
        h = [sum(part.double() for part in parts) for parts in (first, second)]
        wanted = [normed(h[0], weights[0].double(), 1e-5), normed(h[0] + h[1], weights[1].double(), 1e-6)]
        for result, rows, scale in zip(got[:2], wanted, scales, strict=True):
            assert result.dtype == torch.float8_e4m3fn
            clamped = (rows / scale.double()).clamp(-448, 448)
            torch.testing.assert_close(result.double(), clamped, rtol=0.07, atol=0.02)  # half a step of e4m3fn, and h's
        close(got[2], h[0] + h[1], s.dtype)


def products(rank: int, size: int, store: Any, seed: int) -> None:
    """Checks the products behind norms: one that alone reads the rows is joined, others stay."""
    with setting(rank, size, store, seed) as s:
        first, second, third = (s.parts(5, HIDDEN) for _ in range(3))
        gains = [s.draw(HIDDEN).to(s.dtype) for _ in range(3)]
        weights = [s.draw(n, HIDDEN).to(s.dtype) for n in (24, 3, 8)]

        def model(x: Tensor, y: Tensor, z: Tensor, a: Tensor, b: Tensor, c: Tensor, u: Tensor, v: Tensor,
                  w: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
            residual = s.sum(x)
            one = F.linear(s.ir.rms_norm(residual, a, 1e-5), u)
            rows, residual = s.ir.fused_add_rms_norm(s.sum(y), residual, b, 1e-6)
            two = F.linear(rows, v)  # read twice
            last, _ = s.ir.fused_add_rms_norm(s.sum(z), residual, c, 0.25)
            return one, two, rows, F.linear(last, w * 2), residual  # a weight from behind the sum

        args = (first[rank], second[rank], third[rank], *gains, *weights)
        graph = s.traced(model, *args)
        assert s.ours.matched_count == 3, graph.graph
        assert s.ours.joined_count == 1, graph.graph
        assert targets(graph).count("mm") == 2
        one, two, rows, three, residual = graph(*args)
        h = [sum(part.double() for part in parts) for parts in (first, second, third)]
        sums = [h[0], h[0] + h[1], h[0] + h[1] + h[2]]
        wanted = [normed(h, gain.double(), eps) for h, gain, eps in zip(sums, gains, (1e-5, 1e-6, 0.25), strict=True)]
        close(rows, wanted[1], s.dtype)
        close(residual, sums[1], s.dtype)
        for got, each, weight in zip((one, two, three), wanted, (weights[0], weights[1], weights[2] * 2), strict=True):
            exact, terms = each @ weight.double().t(), each.abs() @ weight.double().abs().t()
            assert ((got.double() - exact).abs() <= 4 * torch.finfo(s.dtype).eps * terms).all()


def not_fused(rank: int, size: int, store: Any, seed: int) -> None:
    """Checks graphs that look alike: vLLM's operators stay, and so do the values."""
    with setting(rank, size, store, seed) as s:
        parts, weight = s.parts(4, HIDDEN), s.draw(HIDDEN).to(s.dtype)
        rows, residual = sum(part.double() for part in parts), s.draw(4, HIDDEN).to(s.dtype)

        def gemma(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            summed = s.sum(x)
            return s.ir.rms_norm(summed, w.float() + 1.0, 1e-6), summed

        graph = s.traced(gemma, parts[rank], weight)
        assert s.ours.matched_count == 0
        close(graph(parts[rank], weight)[0], normed(rows, weight.double() + 1, 1e-6), s.dtype)

        def sum_is_used(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            summed = s.sum(x)
            return s.ir.fused_add_rms_norm(summed, y, w, 1e-6)[0], summed * 2

        graph = s.traced(sum_is_used, parts[rank], residual, weight)
        assert s.ours.matched_count == 0
        out, doubled = graph(parts[rank], residual, weight)
        close(out, normed(rows + residual.double(), weight.double(), 1e-6), s.dtype)
        close(doubled, rows * 2, s.dtype)

        def weight_is_late(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            summed = s.sum(x)
            return s.ir.rms_norm(summed, w * 2, 1e-6), summed

        graph = s.traced(weight_is_late, parts[rank], weight)
        assert s.ours.matched_count == 0
        close(graph(parts[rank], weight)[0], normed(rows, weight.double() * 2, 1e-6), s.dtype)

        def part_of_the_row(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            summed = s.sum(x)
            return s.ir.rms_norm(summed, w, 1e-6, 8), summed

        s.traced(part_of_the_row, parts[rank], weight)
        assert s.ours.matched_count == 0


def ranges_and_keys(rank: int, size: int, store: Any, seed: int) -> None:
    with setting(rank, size, store, seed) as s:
        limit, kind = plug_in("sizes").max_fused_tokens(size, HIDDEN, 2), importlib.import_module("vllm.config.utils")
        assert s.ours.max_tokens == limit > 1
        assert s.ours.is_applicable_for_range(kind.Range(1, limit))
        assert not s.ours.is_applicable_for_range(kind.Range(1, limit + 1))
        names = [type(pass_).__name__ for pass_ in s.manager.passes]
        assert names == ["FirstPass", "FusedAllReducePass", "AllReduceFusionPass"]
        assert s.ours.dumped > 0
        key = s.ours.uuid()
        again = s.fusion.OverlapPassManager()
        again.configure(s.vllm_config)
        assert again.passes[1].uuid() == key
        again.passes[1].max_tokens -= 1
        assert again.passes[1].uuid() != key
        s.vllm_config.compilation_config.pass_config.fuse_allreduce_rms = False
        off = s.fusion.OverlapPassManager()
        off.configure(s.vllm_config)
        assert [type(pass_).__name__ for pass_ in off.passes] == ["FirstPass"]
        s.vllm_config.compilation_config.pass_config.fuse_allreduce_rms = True
        s.made.overlap_comm, comm = None, s.made.overlap_comm  # as a group that is not served
        unserved = s.fusion.OverlapPassManager()
        unserved.configure(s.vllm_config)
        assert not unserved.passes[1].is_applicable_for_range(kind.Range(1, 1))
        assert unserved.passes[1].uuid() != key
        s.made.overlap_comm = comm


def compiled(rank: int, size: int, store: Any, seed: int) -> None:
    """Checks torch.compile with Inductor, which runs the manager after its own passes, as vLLM has it."""
    with setting(rank, size, store, seed) as s:
        weight = s.draw(HIDDEN).to(s.dtype)

        def model(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return s.ir.fused_add_rms_norm(torch.ops.vllm.all_reduce(x, "tp:0"), y, w, 1e-5)

        options = {"post_grad_custom_post_pass": s.manager, "fx_graph_cache": False}
        run = torch.compile(model, fullgraph=True, dynamic=True, options=options)
        with torch.inference_mode():
            for num_rows in (3, 7):
                parts, residual = s.parts(num_rows, HIDDEN), s.draw(num_rows, HIDDEN).to(s.dtype)
                out, hidden = run(parts[rank], residual, weight)
                rows = sum(part.double() for part in parts) + residual.double()
                close(out, normed(rows, weight.double(), 1e-5), s.dtype)
                close(hidden, rows, s.dtype)
        assert s.ours.matched_count == 1
        assert s.manager.passes[-1].matched_count == 0

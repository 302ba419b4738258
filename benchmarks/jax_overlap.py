"""Measures gather + product and product + reduce-scatter in JAX beside XLA's own ways and PyTorch's same operators.

    torchrun --nproc_per_node 4 benchmarks/jax_overlap.py --out benchmarks/results

Microseconds that one more call adds to a program, of the slowest rank: from programs of FEW and of MANY calls, each
call after the one before. The start of a program, which a training step makes once, is not in it. Variants in turns.

jax: torch_overlap.jax in shard_map. xla: lax.all_gather and a product, or a product and lax.psum_scatter. windowed: the
same under jit with sharded arguments, with XLA's collective matmul asked for at every size (only with --windowed: the
compiler of jaxlib 0.11.2 ends the process with a segmentation fault). torch: the operator of
PyTorch on the same operands, in CUDA graphs. `over_torch` is the median over rounds of jax - torch, in microseconds,
`ratio_torch` and `ratio_peer` those of jax / torch and of jax / the quicker of xla and windowed. The results of all
ways are compared first. Without a GPU it only checks that it runs.
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import torch_overlap as to
import torch_overlap.jax as toj
from torch_overlap._timing import in_graph, interleave, ratio_of, slowest_rank, spread_of
from torch_overlap.tools.bench import result
from torch_overlap.tools.bench.cases import Case, cases_of
from torch_overlap.tools.bench.ranks import Ranks

FEW, MANY = 10, 40
AXIS = "tp"
WINDOWED = {
    "xla_gpu_threshold_for_windowed_einsum_mib": 0,
    "xla_gpu_multi_streamed_windowed_einsum": True,
}


def start_jax(ranks: Ranks, command_buffers: bool) -> tuple[Mesh, toj.Axis]:
    """Starts JAX with one device in each process."""
    on_gpu = ranks.device.type == "cuda"
    jax.config.update("jax_platforms", "cuda" if on_gpu else "cpu")
    with socket.socket() as free:
        free.bind(("", 0))
        port = torch.tensor(free.getsockname()[1], device=ranks.device)
    ranks.comm.broadcast(port, 0, async_op=False)
    jax.distributed.initialize(
        f"{os.environ['MASTER_ADDR']}:{port.item()}",
        ranks.size,
        ranks.rank,
        local_device_ids=[ranks.device.index] if on_gpu else None,
    )
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    return mesh, toj.bootstrap(mesh, AXIS, store="tcp://127.0.0.1", command_buffers=command_buffers)


def repeated(product: Callable[[Any, Any], Any], count: int) -> Callable[[Any, Any], Any]:
    """Returns a function that calls `product` `count` times, each after the one before: an element of x depends on
    it."""

    def calls(x: Any, w: Any) -> Any:
        out = product(x, w)
        for _ in range(count - 1):
            x = jax.lax.dynamic_update_slice(x, x[:1, :1] + 0 * out[:1, :1], (0, 0))
            out = product(x, w)
        return out

    return calls


class Problem:
    """The operands of a case and the ways to compute it. A JAX weight is [k, n]."""

    def __init__(self, case: Case, ranks: Ranks, mesh: Mesh) -> None:
        self.case, self.ranks, self.mesh = case, ranks, mesh
        self.gathers = case.op == "ag_gemm"
        m, n, k = case.shape
        self.specs = (P(AXIS), P(None, AXIS)) if self.gathers else (P(None, AXIS), P(AXIS))
        self.out_spec = P(None, AXIS) if self.gathers else P(AXIS)
        dtype = jnp.bfloat16 if ranks.device.type == "cuda" else jnp.float32
        rng = np.random.default_rng(ranks.rank)

        def random(shape: tuple[int, int], spec: P) -> Any:
            sharding = NamedSharding(mesh, spec)
            local = sharding.shard_shape(shape)
            part = jnp.asarray(rng.standard_normal(local, np.float32) / k**0.25).astype(dtype)
            return jax.make_array_from_single_device_arrays(shape, sharding, [part])

        self.x, self.w = random((m, k), self.specs[0]), random((k, n), self.specs[1])

    def in_jax(self, windowed: bool, count: int) -> dict[str, Callable[[Any, Any], Any]]:
        """Returns `count` calls of each way of JAX."""
        if self.gathers:
            ours = functools.partial(toj.all_gather_matmul, axis=AXIS)
            plain = lambda x, w: jax.lax.all_gather(x, AXIS, tiled=True) @ w  # noqa: E731
        else:
            ours = functools.partial(toj.matmul_reduce_scatter, axis=AXIS)
            plain = lambda x, w: jax.lax.psum_scatter(x @ w, AXIS, tiled=True)  # noqa: E731

        def mapped(product: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
            inner = repeated(product, count)
            return jax.jit(
                jax.shard_map(inner, mesh=self.mesh, in_specs=self.specs, out_specs=self.out_spec, check_vma=False)
            )

        out = NamedSharding(self.mesh, self.out_spec)
        constrained = lambda x, w: jax.lax.with_sharding_constraint(x @ w, out)  # noqa: E731
        ways = {"jax": mapped(ours), "xla": mapped(plain)}
        if windowed:
            ways["windowed"] = jax.jit(repeated(constrained, count), compiler_options=WINDOWED)
        return ways

    def in_torch(self, count: int) -> Callable[[], object]:
        """Returns `count` calls of PyTorch's operator, in a CUDA graph on a GPU."""
        x, w = (torch.from_dlpack(array.addressable_data(0)) for array in (self.x, self.w))
        x = x.clone()
        if self.gathers:
            call = functools.partial(to.ops.all_gather_matmul, x, [w.t()], self.ranks.comm)
        else:
            call = functools.partial(to.ops.matmul_reduce_scatter, x, w.t(), self.ranks.comm)
        self.expected = call()

        def step() -> None:
            out = call()
            x[:1, :1] += 0 * (out[0][0] if self.gathers else out)[:1, :1]

        if self.ranks.device.type == "cuda":
            return in_graph(step, count)

        def steps() -> None:
            for _ in range(count):
                step()

        return steps

    def check(self, name: str, got: Any) -> None:
        want = self.expected[0][0] if self.gathers else self.expected
        have = torch.from_dlpack(got.addressable_data(0))
        error = (have.float() - want.float()).abs().max().item()
        allowed = 2e-2 * max(want.float().abs().max().item(), 1.0)
        if not error <= allowed:
            raise AssertionError(
                f"{self.case.op} {self.case.label} {name}: differs by {error}, expected at most {allowed}"
            )


def measure(case: Case, ranks: Ranks, mesh: Mesh, rounds: int, windowed: bool) -> dict[str, Any]:
    problem = Problem(case, ranks, mesh)
    programs: dict[str, dict[int, Callable[[], float]]] = {}  # of each way, by the number of calls

    def synchronize() -> None:
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()

    def sampler(work: Callable[[], object]) -> Callable[[], float]:
        def sample() -> float:
            ranks.comm.barrier(async_op=False)
            synchronize()
            begin = time.perf_counter()
            work()
            synchronize()
            return (time.perf_counter() - begin) * 1e6

        return sample

    for count in (FEW, MANY):
        programs.setdefault("torch", {})[count] = sampler(problem.in_torch(count))
        for name, compiled in problem.in_jax(windowed, count).items():
            problem.check(name, compiled(problem.x, problem.w))
            programs.setdefault(name, {})[count] = sampler(
                lambda compiled=compiled: compiled(problem.x, problem.w).block_until_ready()
            )
    samplers = {f"{name} {count}": way for name, counts in programs.items() for count, way in counts.items()}
    taken = slowest_rank(interleave(samplers, rounds), ranks.comm)
    samples = {}
    for name in programs:
        few, many = (taken[f"{name} {count}"] for count in (FEW, MANY))
        samples[name] = [(more - less) / (MANY - FEW) for less, more in zip(few, many, strict=True)]
    us = {name: spread_of(values).median for name, values in samples.items()}
    peers = {name: us[name] for name in us if name in ("xla", "windowed")}
    best = min(peers, key=lambda name: peers[name])
    over = [ours - theirs for ours, theirs in zip(samples["jax"], samples["torch"], strict=True)]
    return {
        "op": case.op, "name": case.name, "shape": list(case.shape), "dtype": case.dtype, "tp": ranks.size,
        "mode": "jit", "algorithm": "auto", "us": us["jax"], "iqr_us": spread_of(samples["jax"]).iqr, "peers": peers,
        "torch_us": us["torch"], "over_torch": spread_of(over).median,
        "ratio_torch": ratio_of(samples, "jax", "torch").median, "ratio_peer": ratio_of(samples, "jax", best).median,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--command-buffers", action="store_true", help="lets XLA capture our calls")
    parser.add_argument("--windowed", action="store_true", help="also measures windowed")
    parser.add_argument("--only", default="", help="names of the cases to measure, separated by commas; default: all")
    parser.add_argument("--out", type=Path, help="the folder of the result; default: it is only printed")
    args = parser.parse_args()
    ranks = Ranks.start("cuda" if torch.cuda.is_available() else "cpu")
    mesh, axis = start_jax(ranks, args.command_buffers)
    if ranks.device.type == "cuda":
        cases = [case for op in ("ag_gemm", "gemm_rs") for case in cases_of(op, "bf16")]
    else:
        cases = [Case(op, (16 * ranks.size,) * 3, "bf16", "tiny") for op in ("ag_gemm", "gemm_rs")]
    wanted = [name for name in args.only.split(",") if name]
    rows = []
    for case in cases:
        if wanted and case.label not in wanted:
            continue
        rows.append(measure(case, ranks, mesh, args.rounds, args.windowed))
        ranks.say(str(rows[-1]))
    if args.out and ranks.rank == 0:
        print(
            result.write(
                result.result("jax_overlap", rows, jax=jax.__version__, command_buffers=args.command_buffers),
                ranks.size,
                args.out,
            )
        )
    axis.close()
    ranks.comm.finalize()


if __name__ == "__main__":
    main()

"""Measures the host time of the operators: the time of an eager call beyond its kernels, by algorithm.

    torchrun --nproc_per_node 2 benchmarks/operator_host.py --out results

Small shapes, whose kernels take less time than the host needs to launch them. `host_us` is the host time of one of 50
consecutive calls; `us` is the time of such a call on the device and the host together, and `graph_us` that of the same
calls in a CUDA graph, which the host launches once: `us` - `graph_us` is the cost of the host. All take turns within
every round; medians of the slowest rank.

Rows whose operator is "part" are the host time of the parts of a "matmul_all_reduce sequential": its Python wrapper's
arguments, dispatch and checks (of tensors without memory), the result, the product, the sum; and of one launch, one
event and one view by themselves, of which "p2p" needs several per chunk. The time of "auto" beyond that of the selected
algorithm is the cost of the selection.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from host_time import host_sampler

import torch_overlap as to
from torch_overlap import gemm as products
from torch_overlap._timing import Stopwatch, in_graph, interleave, slowest_rank, spread_of
from torch_overlap.ops._arguments import group
from torch_overlap.quantize import ScalingMode
from torch_overlap.tools.bench.result import write_result

CALLS = 50
ROWS, FEATURES = 64, 1024  # per rank


def operators(comm: to.TorchComm) -> dict[str, Callable[[], object]]:
    """Returns each operator with each algorithm that can run here."""
    size = comm.get_size()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    own, whole, weight = random(ROWS, FEATURES), random(ROWS * size, FEATURES), random(FEATURES, FEATURES)
    own8, whole8, weight8 = (t.to(torch.float8_e4m3fn) for t in (own, whole, weight))
    one = torch.ones(1, device="cuda")
    residual, gain = random(ROWS * size, FEATURES), random(FEATURES)
    mode = {"scaling_mode": ScalingMode.CURRENT_TENSOR_SCALING}
    calls: dict[str, tuple[Callable[..., object], tuple[object, ...], dict[str, object]]] = {
        "all_gather_matmul": (to.ops.all_gather_matmul, (own, [weight], comm), {}),
        "matmul_reduce_scatter": (to.ops.matmul_reduce_scatter, (whole, weight, comm), {}),
        "matmul_all_reduce": (to.ops.matmul_all_reduce, (whole, weight, comm), {}),
        "matmul_all_reduce_rms_norm": (to.ops.matmul_all_reduce_rms_norm, (whole, weight, residual, gain, comm), {}),
        "scaled_all_gather_matmul": (to.ops.scaled_all_gather_matmul, (own8, one, [weight8], [one], comm), mode),
        "scaled_matmul_reduce_scatter": (to.ops.scaled_matmul_reduce_scatter, (whole8, one, weight8, one, comm), mode),
        "scaled_matmul_all_reduce": (to.ops.scaled_matmul_all_reduce, (whole8, one, weight8, one, comm), mode),
    }
    found: dict[str, Callable[[], object]] = {}
    for name, (call, arguments, options) in calls.items():
        for algorithm in ("auto", "sequential", "p2p", "fused", "low_latency"):
            try:
                taken = to.explain(name, *arguments, algorithm=algorithm, **options).algorithm
            except (to.UnsupportedError, to.InvalidValueError):
                continue
            if algorithm in ("auto", taken):
                found[f"{name} {algorithm}"] = partial(call, *arguments, algorithm=algorithm, **options)
    found["mm"] = partial(torch.mm, whole, weight)
    reduced = random(ROWS * size, FEATURES)
    found["comm.all_reduce"] = partial(comm.all_reduce, reduced, to.ReduceOp.SUM, async_op=False)
    found["ops.all_reduce_"] = partial(to.ops.all_reduce_, reduced, comm)
    return found


def parts(comm: to.TorchComm) -> dict[str, Callable[[], object]]:
    """Returns the parts of an operator, each by itself."""
    size = comm.get_size()
    x = torch.randn(ROWS * size, FEATURES, device="cuda").bfloat16()
    weight = torch.randn(FEATURES, FEATURES, device="cuda").bfloat16()
    out = torch.empty_like(x)
    prepared = products.GemmArgs(products.GemmOperand(x), products.GemmOperand(weight, True), out)
    meta = [t.to("meta") for t in (x, weight)]
    operator = torch.ops.torch_overlap.matmul_all_reduce
    event = torch.cuda.Event()
    return {
        "arguments": partial(group, comm),
        "dispatch": partial(operator, *meta, None, comm.get_name(), size, "sum", "sequential"),
        "result": partial(torch.empty, x.shape, dtype=x.dtype, device=x.device),
        "product": partial(products.gemm, prepared),
        "sum": partial(comm.all_reduce, out, to.ReduceOp.SUM, async_op=False),
        "launch": partial(torch.cuda._sleep, 1),
        "event": event.record,
        "view": partial(x.narrow, 0, 1, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="variants whose name has this; no file is written")
    args = parser.parse_args()
    comm = to.new_comm("nccl", torch.device("cuda"), name="operator_host")
    watch = Stopwatch(comm.get_device(), meet=lambda: comm.barrier(async_op=False))
    host, device = {}, {}
    for name, call in (operators(comm) | {f"part {name}": call for name, call in parts(comm).items()}).items():
        if args.only not in name:
            continue
        try:
            for _ in range(3):
                call()
        except to.UnsupportedError as error:  # on all ranks alike: explain() decides without communication
            if comm.get_rank() == 0:
                print(f"{name}: left out, {error}")
            continue
        host[name] = host_sampler(call, CALLS)
        if name.startswith("part "):
            continue
        device[f"{name} eager"] = watch.sampler(call, repeats=CALLS)
        device[f"{name} graph"] = watch.sampler(in_graph(call, CALLS), calls=CALLS)
    host_us = slowest_rank(interleave(host, args.rounds), comm)
    device_us = slowest_rank(interleave(device, args.rounds), comm)
    rows = []
    for name, samples in host_us.items():
        if name.startswith("part "):
            us, iqr = spread_of(samples)
            rows.append({"op": "part", "algorithm": name.split()[-1], "us": us, "iqr_us": iqr, "peers": {}})
            if comm.get_rank() == 0:
                print(f"{name:40s} host {us:6.1f}")
            continue
        us, iqr = spread_of(device_us[f"{name} eager"])
        row = {"op": name.split()[0], "algorithm": name.split()[-1], "us": us, "iqr_us": iqr, "peers": {},
               "host_us": spread_of(samples).median,
               "graph_us": spread_of(device_us[f"{name} graph"]).median}  # fmt: skip
        rows.append(row)
        if comm.get_rank() == 0:
            over = us - row["graph_us"]
            print(f"{name:40s} host {row['host_us']:6.1f}  eager {us:6.1f}  graph {row['graph_us']:6.1f}  {over:+.1f}")
    if comm.get_rank() == 0 and not args.only:
        print(write_result("operator_host", comm.get_size(), rows, args.out))
    comm.finalize()


if __name__ == "__main__":
    main()

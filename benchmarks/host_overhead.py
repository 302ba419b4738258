"""Measures the host time of an eager all_reduce of 1 KiB: C++, Python, raw NCCL, torch.distributed, torch's two-shot.

    torchrun --nproc_per_node 2 benchmarks/host_overhead.py --out results

A sample is the host time of 100 consecutive calls, divided by 100, followed by a
synchronization. All variants take turns within every round. The C++ variants are the two loops of
benchmarks/cpp/loops.cpp, called through ctypes once a sample: `raw` is ncclAllReduce on the
communicator's own ncclComm_t and a stream of its own; `cpp` is TorchComm::all_reduce. `python` and
`torch.distributed` are asynchronous. On the current stream: `on the stream` uses our own kernels, `on the
stream, NCCL` the hint for NCCL; `torch two-shot` is that of torch.ops.symm_mem, from existing symmetric memory;
and, for scale, `one kernel` is a relu_ of torch.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from host_time import host_sampler

import torch_overlap as to
from torch_overlap._timing import interleave, ratio_of, slowest_rank, spread_of
from torch_overlap.tools.bench.libraries import torch_symmetric
from torch_overlap.tools.bench.result import write_result

CALLS = 100


def cpp_loops(library: Path, comm: to.TorchComm, tensor: torch.Tensor) -> dict[str, Callable[[], float]]:
    """Returns the loops of benchmarks/cpp/loops.cpp; each returns seconds of host time for the whole loop."""
    loops = ctypes.CDLL(str(library))
    loops.raw_all_reduce_loop.restype = ctypes.c_double
    loops.raw_all_reduce_loop.argtypes = [
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    loops.torch_comm_all_reduce_loop.restype = ctypes.c_double
    loops.torch_comm_all_reduce_loop.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
    stream = torch.cuda.Stream()
    name = comm.get_name().encode()

    def raw() -> float:
        torch.cuda.synchronize()
        seconds = loops.raw_all_reduce_loop(
            comm.get_native_handle(), tensor.data_ptr(), tensor.numel(), CALLS, stream.cuda_stream
        )
        torch.cuda.synchronize()
        return float(seconds) * 1e6 / CALLS

    def cpp() -> float:
        torch.cuda.synchronize()
        seconds = loops.torch_comm_all_reduce_loop(name, tensor.numel(), CALLS)
        torch.cuda.synchronize()
        return float(seconds) * 1e6 / CALLS

    return {"raw": raw, "cpp": cpp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--loops", type=Path, help="libtorch_overlap_loops.so; without it no C++ rows")
    args = parser.parse_args()

    comm = to.new_comm("nccl", torch.device("cuda"), name="overhead")
    dist.init_process_group("nccl", device_id=comm.get_device())
    tensor = torch.zeros(256, device=comm.get_device())
    symmetric = torch_symmetric(comm.get_device(), tensor.nbytes)
    shared = symmetric.arena.empty(tensor.shape, tensor.dtype).zero_()
    op, off = to.ReduceOp.SUM, {"custom_collectives": "off"}
    variants: dict[str, Callable[[], float]] = {
        "python": host_sampler(lambda: comm.all_reduce(tensor, op, async_op=True), CALLS),
        "torch.distributed": host_sampler(lambda: dist.all_reduce(tensor, async_op=True), CALLS),
        "on the stream": host_sampler(lambda: comm.all_reduce(tensor, op, async_op=False), CALLS),
        "on the stream, NCCL": host_sampler(lambda: comm.all_reduce(tensor, op, async_op=False, hints=off), CALLS),
        "torch two-shot": host_sampler(lambda: symmetric.two_shot_all_reduce(shared), CALLS),
        "one kernel": host_sampler(lambda: torch.relu_(tensor), CALLS),
    }
    if args.loops:
        variants |= cpp_loops(args.loops.resolve(), comm, tensor)
    samples = slowest_rank(interleave(variants, args.rounds, warmup=10), comm)

    rows = []
    for name, values in samples.items():
        us, iqr = spread_of(values)
        peers = {other: ratio_of(samples, name, other)[0] for other in samples if other != name}
        rows.append({"what": f"all_reduce 1 KiB, {name}", "us": us, "iqr_us": iqr, "ratio_to": peers})
        if comm.get_rank() == 0:
            text = "  ".join(f"{value:.2f}x {other}" for other, value in peers.items())
            print(f"{name:18s} {us:7.2f} us (iqr {iqr:.2f})   {text}", flush=True)
    if comm.get_rank() == 0:
        print(write_result("host_overhead", comm.get_size(), rows, args.out))
    dist.destroy_process_group()
    comm.finalize()


if __name__ == "__main__":
    main()

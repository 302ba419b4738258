"""Ranks that exit without finalize(), rank 0 late, with their communicator dropped before or kept to the end:

torchrun --nproc_per_node 2 tests/python/gpu/exit_cases.py dropped
"""

import sys
import time

import torch

import torch_overlap as to


def main():
    comm = to.new_comm("nccl", torch.device("cuda"), "exit")
    x = torch.ones(8, device="cuda")
    comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    graph.replay()
    torch.cuda.synchronize()
    assert x.eq(comm.get_size() ** 2).all()
    is_late = comm.get_rank() == 0
    if sys.argv[1] == "dropped":
        del graph, comm
    if is_late:
        time.sleep(6)


if __name__ == "__main__":
    main()

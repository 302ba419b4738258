"""A communicator: rank and size, one collective, and finalize.

torchrun --standalone --nproc_per_node 2 examples/01_hello_comm.py
"""

import os

import torch

import torch_overlap as to

if "LOCAL_WORLD_SIZE" not in os.environ:
    raise SystemExit("run it with torchrun --standalone --nproc_per_node 2 examples/01_hello_comm.py")
# NCCL if this host has a GPU for each of its ranks, else gloo.
CUDA = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])


def main() -> None:
    # Collective: rank, size and the store come from torchrun. "cuda" without an index becomes this rank's own GPU.
    comm = to.new_comm("nccl" if CUDA else "gloo", torch.device("cuda" if CUDA else "cpu"), name="hello")
    rank, size = comm.get_rank(), comm.get_size()

    x = torch.full((4,), float(rank + 1), device=comm.get_device())
    comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)  # in place

    assert x.tolist() == [size * (size + 1) / 2] * 4
    print(f"rank {rank} of {size} over {comm.get_backend()} on {comm.get_device()}: {x.tolist()}", flush=True)
    comm.finalize()  # collective; afterwards the communicator refuses every operation


if __name__ == "__main__":
    main()

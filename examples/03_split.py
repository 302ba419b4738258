"""Communicators of some of the ranks.

    torchrun --standalone --nproc_per_node 4 examples/03_split.py     (any number of ranks)

New here: split. It is collective over the parent: every rank names the members of its own part. The position in the
list becomes the rank in the child; a rank that passes an empty list gets None.
"""

import os

import torch

import torch_overlap as to

if "LOCAL_WORLD_SIZE" not in os.environ:
    raise SystemExit("run it with torchrun --standalone --nproc_per_node 4 examples/03_split.py")
CUDA = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])


def main() -> None:
    world = to.new_comm("nccl" if CUDA else "gloo", torch.device("cuda" if CUDA else "cpu"), name="world")
    rank, size = world.get_rank(), world.get_size()

    # Even and odd ranks form two children, which inherit the parent's options.
    parity = world.split([r for r in range(size) if r % 2 == rank % 2], name="parity")
    x = torch.tensor([float(rank)], device=world.get_device())
    parity.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    assert x.item() == sum(r for r in range(size) if r % 2 == rank % 2)

    # The same members in reverse order: rank 0 of this child is the last rank of the world.
    backwards = world.split(list(reversed(range(size))), name="backwards")
    assert backwards.get_rank() == size - 1 - rank
    y = torch.tensor([float(rank)], device=world.get_device())
    backwards.broadcast(y, 0, async_op=False)
    assert y.item() == size - 1

    # A child with rank 0 only.
    alone = world.split([0] if rank == 0 else [], name="alone")
    assert (alone is None) == (rank != 0)

    print(f"rank {rank}: {parity.get_rank()} of {parity.get_size()} in my half, sum {x.item():g}; "
          f"{backwards.get_rank()} from the other end", flush=True)  # fmt: skip
    for comm in (alone, backwards, parity, world):
        if comm is not None:
            comm.finalize()


if __name__ == "__main__":
    main()

"""A ring of one-sided writes: each rank writes into the memory of the next.

    torchrun --standalone --nproc_per_node 2 examples/06_windows.py     (any number of ranks of one host)

New here: windows. A window is a tensor on every rank that the others write to without its participation. put() copies;
signal() notifies; wait_signal() waits for one signal of one rank, after which that rank's previous puts are visible.
put() itself neither notifies nor waits: the owner signals back when it has read, before the next put overwrites.
"""

import os

import torch

import torch_overlap as to

if "LOCAL_WORLD_SIZE" not in os.environ:
    raise SystemExit("run it with torchrun --standalone --nproc_per_node 2 examples/06_windows.py")
CUDA = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])


def main() -> None:
    comm = to.new_comm("nccl" if CUDA else "gloo", torch.device("cuda" if CUDA else "cpu"), name="ring")
    rank, size = comm.get_rank(), comm.get_size()
    right, left = (rank + 1) % size, (rank - 1) % size

    # The memory must be mappable by the other ranks; making the window is collective.
    inbox = to.symmetric_empty(4, torch.float32, comm)
    window = comm.new_window(inbox)

    # In step k every rank forwards the data that it received in step k - 1: after `size` steps every rank has seen all.
    seen = [rank]
    for step in range(1, size + 1):
        if step > 1:
            window.wait_signal(right, async_op=False)  # it has read the data that the next put overwrites
        window.put(torch.full((4,), float(seen[-1]), device=comm.get_device()), right, offset=0, async_op=False)
        window.signal(right, async_op=False)
        window.wait_signal(left, async_op=False)
        seen.append(int(inbox[0].item()))
        window.signal(left, async_op=False)  # the data has been read
    assert seen == [(rank - step) % size for step in range(size + 1)]
    print(f"rank {rank}: saw {seen}", flush=True)

    # Every rank can also read another's part directly. Only signals and barriers order these accesses.
    comm.barrier(async_op=True).wait_blocking()
    assert window.map_remote_tensor(right)[0].item() == seen[-2]  # this rank's last put
    window.tensor_deregister()
    comm.finalize()


if __name__ == "__main__":
    main()

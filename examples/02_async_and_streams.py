"""Collectives in the background: issue, compute, wait.

    torchrun --standalone --nproc_per_node 2 examples/02_async_and_streams.py

New here: async_op=True and TorchWork. On a GPU the collective runs on the communicator's own stream, after all work
that is on the current stream now, and wait() makes the current stream wait for it; the host continues. On CPU it
runs on a thread, and wait() blocks.
"""

import os
from datetime import timedelta

import torch

import torch_overlap as to

if "LOCAL_WORLD_SIZE" not in os.environ:
    raise SystemExit("run it with torchrun --standalone --nproc_per_node 2 examples/02_async_and_streams.py")
CUDA = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])


def main() -> None:
    comm = to.new_comm("nccl" if CUDA else "gloo", torch.device("cuda" if CUDA else "cpu"), name="async")
    device, size = comm.get_device(), comm.get_size()
    torch.manual_seed(comm.get_rank())

    # Gradients are computed one after another: each is sent while the next is computed.
    weights = [torch.randn(256, 256, device=device) for _ in range(4)]
    gradients, works = [], []
    for weight in weights:
        gradient = weight @ weight.T
        works.append(comm.all_reduce(gradient, to.ReduceOp.AVG, async_op=True))
        gradients.append(gradient)  # must not be read or written before wait()
    for work in works:
        work.wait()

    # Every rank has the same averages now.
    for gradient in gradients:
        everyone = torch.empty(size, 256, 256, device=device)
        comm.all_gather_single(everyone, gradient, async_op=False)
        assert all(torch.equal(part, gradient) for part in everyone)

    # wait_blocking() also blocks the host until the operation completes, for at most its timeout. Tensors may be
    # dropped meanwhile: the work keeps references.
    work = comm.barrier(async_op=True, timeout=timedelta(seconds=30))
    work.wait_blocking()
    assert work.is_completed()
    print(f"rank {comm.get_rank()}: {len(works)} averages, works {[work.is_completed() for work in works]}", flush=True)
    comm.finalize()


if __name__ == "__main__":
    main()

"""PyTorch's own parallelism on torch_overlap: only the backend's name changes.

    torchrun --standalone --nproc_per_node 2 examples/05_ddp.py

New here: importing torch_overlap registers a backend of torch.distributed, for DDP, FSDP2, DTensor and DeviceMesh.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import torch_overlap  # noqa: F401  (registers the backend)

if "LOCAL_WORLD_SIZE" not in os.environ:
    raise SystemExit("run it with torchrun --standalone --nproc_per_node 2 examples/05_ddp.py")
CUDA = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])


def main() -> None:
    dist.init_process_group(backend="torch_overlap")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    # Every rank trains on its own rows; DDP averages the gradients.
    torch.manual_seed(1 + rank)
    x = torch.randn(256, 16, device=device)
    y = x.sum(dim=1, keepdim=True).sin()
    losses = []
    for _ in range(50):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]

    # The weights stayed equal.
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(weights, flat) for weights in everyone)
    print(f"rank {rank} of {size}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, weights equal on all ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A model in plain torch, made tensor parallel by a plan.

    torchrun --standalone --nproc_per_node 2 examples/08_parallel_modules.py

New here: torch_overlap.nn.styles. parallelize replaces the named linears by those of torch_overlap.nn, and makes all
parameters DTensors; the model's code (plain_llama.py) is unchanged. Linears with the same input share one gather, which
overlaps with them.
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_llama import HEAD_DIM, VOCABULARY, Llama
from torch import nn

import torch_overlap as to
from torch_overlap.nn.styles import ColumnParallel, RowParallel, SequenceParallel, ShardInput, SharedGather, parallelize

if "LOCAL_WORLD_SIZE" not in os.environ:
    raise SystemExit("run it with torchrun --standalone --nproc_per_node 2 examples/08_parallel_modules.py")
CUDA = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
PLAN = {
    "layers.0": ShardInput(),  # from here on each rank has its part of the sequence
    "layers.*.attention_norm": SequenceParallel(),
    "layers.*.attention": SharedGather("wq", "wk", "wv", multiple_of=HEAD_DIM),
    "layers.*.attention.wo": RowParallel(),
    "layers.*.mlp_norm": SequenceParallel(),
    "layers.*.mlp": SharedGather("gate", "up"),
    "layers.*.mlp.down": RowParallel(),
    "norm": SequenceParallel(),
    "output": ColumnParallel(gather_output=True),  # every rank has all logits again
}


def train(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, steps: int = 5) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group(backend="torch_overlap")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
    mesh = dist.init_device_mesh(device.type, (size,), mesh_dim_names=("tp",))

    torch.manual_seed(0)  # the same model and the same text on all ranks
    whole = Llama().to(device, torch.float64)
    tokens, targets = torch.randint(VOCABULARY, (2, 2, 32)).to(device)
    model = parallelize(copy.deepcopy(whole), mesh, PLAN)

    expected, losses = train(whole, tokens, targets), train(model, tokens, targets)
    torch.testing.assert_close(losses, expected)
    full = to.nn.full_state_dict(model)  # loads into the model without parallelism
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(full[name], value)

    sizes = [sum(p.numel() for p in whole.parameters()), sum(p.to_local().numel() for p in model.parameters())]
    print(f"rank {rank} of {size}: {sizes[1]} of {sizes[0]} parameters here, loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
          "weights as without the plan", flush=True)  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Communication inside a model: operators with gradients.

    torchrun --standalone --nproc_per_node 2 examples/04_torch_ops.py

New here: torch_overlap.ops. An operator returns a new tensor, has a gradient, and can be compiled. The two fused ones
are the halves of a tensor-parallel layer: all_gather_matmul gathers the rows of x while it multiplies them, and
matmul_reduce_scatter sums the ranks' partial products while it computes them. Each is used in the other's gradient.
"""

import os

import torch

import torch_overlap as to

if "LOCAL_WORLD_SIZE" not in os.environ:
    raise SystemExit("run it with torchrun --standalone --nproc_per_node 2 examples/04_torch_ops.py")
CUDA = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
ROWS, DIM, HIDDEN = 16, 32, 64


def main() -> None:
    comm = to.new_comm("nccl" if CUDA else "gloo", torch.device("cuda" if CUDA else "cpu"), name="tp")
    rank, size, device = comm.get_rank(), comm.get_size(), comm.get_device()

    # The whole problem, the same on all ranks, and its result on one device.
    torch.manual_seed(0)
    full_x, full_up, full_down = (torch.randn(*s, dtype=torch.float64).to(device).requires_grad_()
                                  for s in ((ROWS, DIM), (HIDDEN, DIM), (DIM, HIDDEN)))  # fmt: skip
    full_y = torch.relu(full_x @ full_up.T) @ full_down.T
    full_y.square().sum().backward()

    # This rank's part: some rows of x, some columns of the hidden layer. Weights are [out, in], as in nn.Linear.
    def part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.detach().chunk(size, dim)[rank].contiguous().requires_grad_()

    x, up, down = part(full_x, 0), part(full_up, 0), part(full_down, 1)

    def layer(x: torch.Tensor) -> torch.Tensor:
        (hidden,), _ = to.ops.all_gather_matmul(x, [up], comm)  # [ROWS/n, DIM] -> [ROWS, HIDDEN/n]
        return to.ops.matmul_reduce_scatter(torch.relu(hidden), down, comm)  # -> [ROWS/n, DIM]

    y = layer(x)
    y.square().sum().backward()
    torch.testing.assert_close(y, full_y.chunk(size, 0)[rank])
    for mine, full, dim in ((x, full_x, 0), (up, full_up, 0), (down, full_down, 1)):
        torch.testing.assert_close(mine.grad, full.grad.chunk(size, dim)[rank])

    # The same under torch.compile.
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), y)

    print(f"rank {rank}: values and gradients of the parts equal the whole's", flush=True)
    comm.finalize()


if __name__ == "__main__":
    main()

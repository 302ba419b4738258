"""Data and a step for windows, captured by graphs: see test_windows.py and test_window_graphs.py."""

import torch

import torch_overlap as to

COUNT = 3001


def data(count, dtype, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (count,), device="cuda", generator=generator).to(dtype)


def put_around(window, ring, seed, steps, late=lambda step: None):
    """Sends every rank's data to its right neighbour, which signals back that it has read it; eager, sync and async
    are mixed. `late(step)` may delay a rank. The window is deregistered at the end."""
    rank, right, left = ring
    buffer, kept = window.get_tensor(), []
    for step in range(steps):
        if step > 0:
            window.wait_signal(right, async_op=False)  # was read
        late(step)
        window.put(data(COUNT, torch.float32, seed + 64 * step + rank), right, 0, async_op=step % 2 == 0)
        window.signal(right, async_op=step % 2 == 0)
        window.wait_signal(left, async_op=step % 3 == 0).wait()
        kept.append(buffer.clone())
        window.signal(left, async_op=False)
    for step, got in enumerate(kept):
        assert torch.equal(got, data(COUNT, torch.float32, seed + 64 * step + left)), step
    window.wait_signal(right, async_op=False)
    torch.cuda.synchronize()
    window.tensor_deregister()


class Ring:
    """The captured step: out = the x of the left neighbour, with a signal back once its bits are all set again,
    which is NaN or a number that no rank sends. `x` changes between replays."""

    def __init__(self, comm, ring, count=COUNT, dtype=torch.float32):
        self.comm, (self.rank, self.right, self.left) = comm, ring
        self.x, self.out = (torch.zeros(count, device="cuda").to(dtype) for _ in range(2))
        self.window = comm.new_window(to.symmetric_empty(count, dtype, comm))
        self.clear(self.window.get_tensor())
        self.window.signal(self.left, async_op=False)  # the buffer is free
        self.base = torch.arange(count, device="cuda") % 977

    def clear(self, tensor):
        tensor.view(torch.uint8).fill_(0xFF)

    def of(self, rank, step):
        return ((self.base + 3 * rank + 5 * step) % 101).to(self.x.dtype)

    def step(self, async_op=False):
        self.window.wait_signal(self.right, async_op).wait()
        self.window.put(self.x, self.right, 0, async_op)
        self.window.signal(self.right, async_op)
        self.window.wait_signal(self.left, async_op).wait()
        self.out.copy_(self.window.get_tensor())
        self.clear(self.window.get_tensor())
        self.window.signal(self.left, async_op)

    def capture(self, async_op=False):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(async_op)
        return graph

    def capture_counted(self):
        """Runs one replay: the next inputs, the step, and the comparison of its result; `wrong` counts differences."""
        self.turn, self.wrong = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.turn.add_(1).remainder_(64)
            self.fill(self.turn)
            self.step()
            self.wrong += self.off(self.turn)
        return graph

    def fill(self, step):
        self.x.copy_(self.of(self.rank, step))
        self.clear(self.out)

    def off(self, step):
        """Returns the number of bytes of the result that differ from those sent."""
        return (self.out.view(torch.uint8) != self.of(self.left, step).view(torch.uint8)).sum()

    def check(self, step):
        assert self.off(step) == 0, step

    def close(self):
        self.window.wait_signal(self.right, async_op=False)
        torch.cuda.synchronize()
        self.window.tensor_deregister()

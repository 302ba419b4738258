"""The communicator of the plug-in for vLLM, over the stand-in package: collectives captured in a CUDA graph."""

import gc
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "compat"))
from vllm_cases import plug_in, stand_in

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(scope="module")
def cpu_group():
    """Returns a gloo group. One for all tests: a second one would find what the first left in torchrun's store."""
    dist.init_process_group("gloo")
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


@pytest.fixture
def made(cpu_group):
    """Returns our communicator, of vLLM's interface, with a gloo group for the CPU as vLLM has it."""
    device = torch.device("cuda", torch.cuda.current_device())
    with stand_in():
        communicator = plug_in("communicator").OverlapCommunicator(
            cpu_group=cpu_group, device=device, unique_name="tp:gpu"
        )
        yield communicator
        gc.collect()
        communicator.destroy()


@pytest.mark.parametrize("num_rows", [8, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_captured_collectives(comm, made, num_rows, dtype):
    """The first call of this size is captured: the memory is that of the constructor."""
    rank, size = comm.get_rank(), comm.get_size()
    x = torch.zeros(num_rows, 256, dtype=dtype, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        total, rows = made.all_reduce(x), made.all_gather(x, 0)
        columns, part = made.all_gather(x), made.reduce_scatter(x, 0)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        parts = [torch.randint(-9, 10, x.shape, generator=generator).to("cuda", dtype) for _ in range(size)]
        x.copy_(parts[rank])
        graph.replay()
        wanted = torch.stack(parts).sum(0)
        for got, value in (
            (total, wanted),
            (rows, torch.cat(parts)),
            (columns, torch.cat(parts, 1)),
            (part, wanted.chunk(size)[rank]),
        ):
            torch.testing.assert_close(got, value, rtol=0, atol=0)
    assert made.calls == []
    del graph

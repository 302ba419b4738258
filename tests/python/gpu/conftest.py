"""Tests over NCCL. One process for each GPU runs the whole folder, all in step:

    torchrun --nproc_per_node 2 -m pytest tests/python/gpu -x

Plain pytest runs only test_torchrun.py, which starts that command. A test with gpu(n) is skipped on every rank if
there are fewer ranks.
"""

import gc
import os
import sys
from datetime import timedelta

import pytest

# No NVLink multicast in any form.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

HERE = os.path.dirname(__file__)
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "faults")]  # graph_cases, random_draws

IN_TORCHRUN = "LOCAL_RANK" in os.environ
SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def pytest_collection_modifyitems(items):
    for item in items:
        if os.path.dirname(__file__) != str(item.path.parent):
            continue
        if (item.path.name == "test_torchrun.py") == IN_TORCHRUN:
            item.add_marker(pytest.mark.skip(reason="inside torchrun" if IN_TORCHRUN else "test_torchrun.py runs it"))
        needed = item.get_closest_marker("gpu")
        if IN_TORCHRUN and needed and needed.args[0] > SIZE:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed.args[0]} ranks"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    try:
        return (yield)
    except NotImplementedError as error:  # an algorithm that is refused here, on all ranks alike
        if "ranks share a GPU" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def make_comm():
    """Returns a new_comm("nccl") that raises instead of ending the process, and is released at the end of the run."""
    import torch

    import torch_overlap as to

    made = []

    def make(name, **options):
        options = {"timeout": timedelta(seconds=60), "abort_process_on_timeout_or_error": False, **options}
        made.append(to.new_comm("nccl", torch.device("cuda"), name, **options))
        return made[-1]

    yield make
    # If one rank still has a graph that another has freed, the one would wait for the other's NCCL.
    gc.collect()
    for comm in made:
        if not comm.is_finalized() and not comm.is_aborted():
            comm.finalize()


@pytest.fixture(scope="session")
def comm(make_comm):
    return make_comm("gpu_tests")


@pytest.fixture(scope="session")
def nccl_comm(make_comm):
    """A communicator that leaves all to NCCL, including the calls of custom collectives."""
    return make_comm("without_custom", hints={"custom_collectives": "off"})


@pytest.fixture
def on(request):
    """Returns the communicator that a test's parameters name: "comm" or "nccl_comm"."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def ring(comm):
    """Returns this rank and its neighbours: (rank, right, left)."""
    rank, size = comm.get_rank(), comm.get_size()
    return rank, (rank + 1) % size, (rank - 1) % size


@pytest.fixture(scope="session")
def seed(comm):
    """Returns a seed, new in every run, equal on all ranks."""
    import torch

    value = torch.randint(2**31, (1,), device="cuda")
    comm.broadcast(value, 0, async_op=False)
    print(f"seed {value.item()}")
    return int(value.item())


@pytest.fixture(autouse=True)
def quiet_device(request):
    """The device is idle at the beginning and the end of a test, and no rank leaves it before all have arrived."""
    comm = request.getfixturevalue("comm") if IN_TORCHRUN else None
    yield
    if comm is not None:
        import torch

        comm.barrier(async_op=False)
        torch.cuda.synchronize()


@pytest.fixture
def sums_in_fp32():
    """Partial sums in 16 bits or tf32, which torch's settings may allow, make bounds useless."""
    import torch

    allowed = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(allowed, name) for name in names]
    for name in names:
        setattr(allowed, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(allowed, name, value)


@pytest.fixture
def gemm_draws(seed, sums_in_fp32):
    """Gives new data, and resets the counters and the tuning of products to their initial state."""
    import torch

    from torch_overlap import gemm

    torch.manual_seed(seed)
    gemm.reset_gemm_statistics()
    yield
    gemm.set_gemm_tuning("heuristic")

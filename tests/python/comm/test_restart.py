"""Bootstrap from torchrun, and names after a restart: keys that the previous attempt left in the store are not read."""

import os
import textwrap
from pathlib import Path

import pytest
from launcher import Launcher, free_port

from torch_overlap.testing import run_ranks


@pytest.mark.slow
def test_a_restarted_job_makes_its_communicators_again(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import os
        import sys
        import torch
        import torch_overlap as to

        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        rank = int(os.environ["RANK"])
        for generation in range(2):
            comm = to.new_comm("gloo", torch.device("cpu"), "same_name", abort_process_on_timeout_or_error=False)
            x = torch.tensor([float(10 * attempt + generation + comm.get_rank())])
            comm.all_reduce(x, to.ReduceOp.SUM, False).wait()
            assert x.item() == 2 * (10 * attempt + generation) + 1, x
            if attempt == 0 and generation == 1:
                os._exit(3)
            comm.finalize()
        print(f"rank {rank} attempt {attempt} ok", flush=True)
        """)
    )
    torchrun = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1")
    job = launcher.fork("-m", *torchrun, script)
    assert job.wait() == 0, job.printed()
    for rank in range(2):
        assert f"rank {rank} attempt 1 ok" in job.printed()


def run_from_environment(rank: int, size: int, store: object, names: dict[str, str], port: int) -> None:
    import torch

    import torch_overlap as to

    os.environ.update({key: value.format(rank=rank, size=size) for key, value in names.items()})
    os.environ["MASTER_PORT"] = str(port)
    if "SLURM_STEP_NODELIST" not in names:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    with to.new_comm("gloo", "cpu", "launched") as comm:
        assert (comm.get_rank(), comm.get_size()) == (rank, size)
        x = torch.tensor([rank])
        comm.all_reduce(x, to.ReduceOp.SUM, False).wait()
        assert x.item() == size * (size - 1) // 2


ASKED = "TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD"
LAUNCHERS = {
    "torchrun": {"RANK": "{rank}", "WORLD_SIZE": "{size}", "LOCAL_RANK": "{rank}"},
    "torchcomm": {"TORCHCOMM_RANK": "{rank}", "TORCHCOMM_SIZE": "{size}", "RANK": "7", "WORLD_SIZE": "9"},
    "open mpi": {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "{size}", "RANK": "7", "WORLD_SIZE": "9"},
    "mvapich": {"MV2_COMM_WORLD_RANK": "{rank}", "MV2_COMM_WORLD_SIZE": "{size}"},
    "pmi": {"PMI_RANK": "{rank}", "PMI_SIZE": "{size}"},
    "pals": {"PALS_RANKID": "{rank}", "PALS_SIZE": "{size}"},
    # Without MASTER_ADDR: the first host of the list.
    "slurm": {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "{size}", "SLURM_STEP_NODELIST": "localhost,elsewhere[1-3]"},
    "torchrun below mpi": {
        ASKED: "torchrun", "RANK": "{rank}", "WORLD_SIZE": "{size}",
        "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1",
    },
}  # fmt: skip
ALL_NAMES = {name for names in LAUNCHERS.values() for name in names} | {"MASTER_ADDR", "MASTER_PORT"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_and_size_come_from_the_launchers_variables(launcher: str) -> None:
    run_ranks(run_from_environment, 2, LAUNCHERS[launcher], free_port(), comm=False, env=dict.fromkeys(ALL_NAMES))

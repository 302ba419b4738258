"""Two nodes, which are one machine here: the rank of a process on its node differs from its rank."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launcher import Launcher, Program

from torch_overlap import _C

SCRIPT = """
import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_overlap as to

rank, size, local, of_node, node = (
    int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
)
assert (node, local) == divmod(rank, of_node) and size == 2 * of_node, os.environ
kind = os.environ["KIND"]

def check(comm, members):
    assert comm.get_ranks_in_world() == members
    assert comm.get_rank() == members.index(rank)
    x = torch.full((5,), float(rank), device=comm.get_device())
    comm.all_reduce(x, to.ReduceOp.SUM, False)
    assert x.tolist() == [float(sum(members))] * 5

comm = to.new_comm("nccl" if kind == "cuda" else "gloo", kind, "world")
if kind == "cuda":
    assert comm.get_device() == torch.device("cuda", local)
    assert torch.cuda.current_device() == local
check(comm, list(range(size)))
mine = [r for r in range(size) if r // of_node == node]
across = [r for r in range(size) if r % of_node == local]
with comm.split(mine, "node") as inside, comm.split(across, "across") as between:
    check(inside, mine)
    check(between, across)
    if kind == "cpu":  # all of one host, whatever the launcher calls its nodes
        for group, members in ((comm, list(range(size))), (between, across)):
            window = group.new_window(to.symmetric_empty(size, torch.float32, group))
            for peer in range(len(members)):
                assert window.get_attr(peer).access_type == to.TorchCommWinAccessType.WIN_ACCESS_TYPE_UNIFIED
                window.put(torch.tensor([float(rank)]), peer, rank, False, signal=True)
            for peer in range(len(members)):
                window.wait_signal(peer, False)
            assert window.get_tensor()[members].tolist() == [float(r) for r in members]
            window.tensor_deregister()
            xs = [torch.randn(2, 8, generator=torch.Generator().manual_seed(r)) for r in members]
            weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(99))
            (y,), _ = to.ops.all_gather_matmul(xs[group.get_rank()], [weight], group, algorithm="p2p")
            want = F.linear(torch.cat(xs).double(), weight.double())
            torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
comm.finalize()

dist.init_process_group("torch_overlap")
x = torch.full((3,), float(rank), device=kind)
dist.all_reduce(x)
assert x.tolist() == [float(sum(range(size)))] * 3
mesh = dist.device_mesh.init_device_mesh(kind, (2, of_node), mesh_dim_names=("node", "local"))
assert (mesh.get_local_rank("node"), mesh.get_local_rank("local")) == (node, local)
for name, members in (("node", across), ("local", mine)):
    x = torch.full((3,), float(rank), device=kind)
    dist.all_reduce(x, group=mesh.get_group(name))
    assert x.tolist() == [float(sum(members))] * 3
dist.destroy_process_group()
os.write(1, f"rank {rank} is {local} of node {node}\\n".encode())  # at once: ranks share the file
"""


def run_nodes(launcher: Launcher, path: Path, of_node: int, kind: str) -> None:
    """Runs torchrun on each of two nodes; on GPUs each node has GPUs of its own. They meet at a store of this
    process."""
    script = path / "nodes.py"
    script.write_text(SCRIPT)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{store.port}", "--rdzv_conf=is_host=0"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc_per_node={of_node}"]
    command += [*meet, "--rdzv_id=nodes", "--local_addr=127.0.0.1", str(script)]
    agents: list[Program | subprocess.Popen[str]] = []
    outputs = [path / f"agent{agent}" for agent in range(2)]
    for agent, output in enumerate(outputs):
        gpus = ",".join(str(agent * of_node + gpu) for gpu in range(of_node))
        if kind == "cpu":
            agents.append(launcher.fork(*command[1:], output=output.open("w+b"), KIND=kind))
        else:
            agents.append(launcher.start(command, gpu=True, output=output, KIND=kind, CUDA_VISIBLE_DEVICES=gpus))
    wait_until_over(agents, 240)
    printed = [output.read_text() for output in outputs]
    assert [agent.poll() for agent in agents] == [0, 0], "\n".join(printed)
    nodes = [sorted(re.findall(r"^rank \d+ is \d+ of node \d+$", text, re.MULTILINE)) for text in printed]
    assert sorted(nodes) == [
        [f"rank {node * of_node + local} is {local} of node {node}" for local in range(of_node)] for node in range(2)
    ]


def wait_until_over(agents: list[Program | subprocess.Popen[str]], seconds: float) -> None:
    """Waits until all have ended, one has failed, or the time is over: then processes that still run have no exit
    status."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        codes = [agent.poll() for agent in agents]
        if None not in codes or any(codes):
            return
        time.sleep(0.05)


@pytest.mark.slow
def test_two_nodes_of_two_ranks(launcher: Launcher, tmp_path: Path) -> None:
    run_nodes(launcher, tmp_path, 2, "cpu")


@pytest.mark.slow
@pytest.mark.gpu(2)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="each node has GPUs of its own")
def test_two_nodes_of_one_gpu(launcher: Launcher, tmp_path: Path) -> None:
    run_nodes(launcher, tmp_path, 1, "cuda")


@pytest.mark.slow
@pytest.mark.gpu(4)
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="each node has GPUs of its own")
def test_two_nodes_of_two_gpus(launcher: Launcher, tmp_path: Path) -> None:
    run_nodes(launcher, tmp_path, 2, "cuda")


# The first rank of the second of two nodes of two.
LAUNCHED = {
    "torchcomm": {"TORCHCOMM_RANK": "2", "TORCHCOMM_SIZE": "4", "LOCAL_RANK": "0"},
    "open mpi": {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    "mvapich": {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "0"},
    "pmi": {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"},
    "pals": {"PALS_RANKID": "2", "PALS_SIZE": "4", "PALS_LOCAL_RANKID": "0"},
    "torchrun": {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},
    "slurm": {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},
}


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_every_launcher_names_the_local_rank(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {name for names in LAUNCHED.values() for name in names}:
        monkeypatch.delenv(name, raising=False)
    for name, value in LAUNCHED[launcher].items():
        monkeypatch.setenv(name, value)
    found = _C._env.launcher()
    assert (found["rank"], found["size"], found["local_rank"]) == (2, 4, 0)

"""The processes of a run. torchrun starts them, and each makes the objects that all measurements share."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torch_overlap as to
from torch_overlap._gpus import gpu_of
from torch_overlap._timing import Stopwatch

# Multicast is off for all libraries, so that runs on different machines are comparable.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "OMP_NUM_THREADS": "1",
}
# Cycles to launch a graph of 50 collectives.
LEAD_CYCLES = 500_000
TIMEOUT = timedelta(seconds=120)


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Returns True in rank 0 of torchrun's processes."""
    return os.environ["RANK"] == "0"


def launch(arguments: Sequence[str], count: int) -> int:
    """Runs `python -m torch_overlap bench <arguments>` in `count` processes of this host, and returns the exit status:
    torchrun's, or else that which rank 0 leaves in the file of `--status`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    environment = {**ENVIRONMENT, **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        status = Path(folder) / "status"
        command += ["-m", "torch_overlap", "bench", *arguments, "--status", str(status)]
        returncode = subprocess.run(command, env=environment).returncode
        return returncode or (int(status.read_text()) if status.exists() else 0)


@dataclass
class Ranks:
    """This process's view of the ranks. `torch.distributed` is initialized too, for the libraries that use it."""

    comm: to.TorchComm
    device: torch.device
    captured: Stopwatch  # for graphs: the host is ahead of the device
    eager: Stopwatch  # for eager calls: includes host time if the host is slower than the device

    @property
    def rank(self) -> int:
        return self.comm.get_rank()

    @property
    def size(self) -> int:
        return self.comm.get_size()

    @staticmethod
    def start(device: str) -> Ranks:
        """Initializes this rank. Collective. device: "cuda" or "cpu"."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        backend = "nccl" if device == "cuda" else "gloo"
        place = torch.device(device)
        if device == "cuda":
            place = gpu_of(int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(place)
            # NCCL's copy-engine collectives refuse the legacy default stream.
            torch.cuda.set_stream(torch.cuda.Stream(place))
        dist.init_process_group(backend, device_id=place if device == "cuda" else None, timeout=TIMEOUT)
        comm = to.new_comm(backend, place, "bench", timeout=TIMEOUT, abort_process_on_timeout_or_error=False)
        torch.manual_seed(1 + comm.get_rank())
        meet: Callable[[], object] = partial(comm.barrier, async_op=False)
        ranks = Ranks(comm, place, Stopwatch(place, meet, LEAD_CYCLES), Stopwatch(place, meet))
        found: list[DeviceBarrier] = []
        if device == "cuda" and not ranks.try_on_all_ranks(lambda: found.append(DeviceBarrier.open(place))):
            ranks.captured, ranks.eager = Stopwatch(place, found[0], LEAD_CYCLES), Stopwatch(place, found[0])
        return ranks

    def stop(self) -> None:
        self.synchronize()
        self.comm.finalize()
        dist.destroy_process_group()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def all_gather_objects(self, mine: object) -> list[Any]:
        """Returns every rank's `mine`, in rank order. Collective."""
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine)
        return everyone

    def broadcast_value(self, value: Any) -> Any:
        """Returns rank 0's value. Collective."""
        values = [value]
        dist.broadcast_object_list(values, 0)
        return values[0]

    def try_on_all_ranks(self, action: Callable[[], object]) -> str:
        """Runs the action on all ranks. Returns the failure reason of the first rank that failed, or "". Collective."""
        reason = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                action()
            self.synchronize()
        except Exception as error:  # any exception of a peer is its reason
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        return next((failure for failure in self.all_gather_objects(reason) if failure), "")

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


@dataclass
class DeviceBarrier:
    """One torch kernel that acts as a barrier: all ranks leave it within about a microsecond."""

    pad: torch.Tensor
    handle: Any

    @staticmethod
    def open(device: torch.device) -> DeviceBarrier:
        import torch.distributed._symmetric_memory as symmetric

        world: Any = dist.group.WORLD
        pad = symmetric.empty(1024, dtype=torch.uint8, device=device)
        return DeviceBarrier(pad, symmetric.rendezvous(pad, world))

    def __call__(self) -> None:
        self.handle.barrier(0)

"""A training run that loses a rank in the middle and still finishes.

    python examples/07_survive_a_lost_rank.py     (starts three ranks, on NCCL if there are enough GPUs)

New here: reconfigure. The launcher serves the store, which thus outlives every rank, and publishes the survivors when a
rank dies. The survivors' operation raises; they reconfigure the communicator, load the last checkpoint and continue.
"""

import json
import multiprocessing
import os
import signal
import tempfile
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist

import torch_overlap as to

RANKS, STEPS, SAVE_EVERY, LOST_AT, GOAL = 3, 150, 20, 70, 1e-3


def train(worker: int, port: int, checkpoint: Path) -> None:
    backend, device = ("nccl", f"cuda:{worker}") if torch.cuda.device_count() >= RANKS else ("gloo", "cpu")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    comm = to.new_comm(backend, device, "train", store=store, rank=worker, size=RANKS,
                       timeout=timedelta(seconds=20), enable_reconfigure=True)  # fmt: skip
    handles = [""] * RANKS  # the ranks' handles, by which the survivors are named
    to.objcol.all_gather_object(comm, handles, comm.get_init_handle())

    truth = torch.randn(16, generator=torch.Generator().manual_seed(0)).to(device)
    weights, step, lost = torch.zeros(16, device=device), 0, 0
    while step < STEPS:
        try:
            x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1000 * step + comm.get_rank())).to(device)
            error = x @ (weights - truth)
            gradient = x.T @ error / len(x)  # wait_blocking raises before an incomplete gradient is used
            comm.all_reduce(gradient, to.ReduceOp.AVG, async_op=True).wait_blocking()
            weights -= 0.1 * gradient
            loss, step = error.square().mean().item(), step + 1
            if step % SAVE_EVERY == 0 and comm.get_rank() == 0:
                torch.save((step, weights), checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").rename(checkpoint)  # an atomic replacement
            if worker == RANKS - 1 and step == LOST_AT:
                os.kill(os.getpid(), signal.SIGKILL)
        except to.Error as failure:
            lost += 1
            survivors = json.loads(store.get(f"survivors/{lost}"))  # waits until the launcher has published it
            comm.reconfigure(lost, [handles[w] for w in survivors])
            print(f"worker {worker}: {type(failure).__name__} in step {step}; now {comm!r}", flush=True)
            step, weights = torch.load(checkpoint, map_location=device)
    print(f"worker {worker}: loss {loss:.1e} after {step} steps", flush=True)
    assert loss < GOAL
    comm.finalize()


def main() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint"
        alive = {worker: spawn.Process(target=train, args=(worker, store.port, file)) for worker in range(RANKS)}
        for process in alive.values():
            process.start()
        lost = 0
        while alive:
            connection.wait([process.sentinel for process in alive.values()])
            for worker in [w for w, process in alive.items() if process.exitcode is not None]:
                if (code := alive.pop(worker).exitcode) != 0:
                    lost += 1
                    print(f"worker {worker} is gone ({code})", flush=True)
                    store.set(f"survivors/{lost}", json.dumps(sorted(alive)))
    assert lost == 1


if __name__ == "__main__":
    main()

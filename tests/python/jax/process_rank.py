"""One process of a mesh: `process_rank.py <coordinator> <size> <rank> <seed> <checks>...`."""

from __future__ import annotations

import os
import sys

import jax


def main(coordinator: str, size: int, rank: int, seed: int, checks: list[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    on_gpus = os.environ["JAX_PLATFORMS"] == "cuda"
    jax.distributed.initialize(coordinator, size, rank, local_device_ids=[rank] if on_gpus else None)
    import jax_checks
    import numpy as np
    from jax.sharding import Mesh

    import torch_overlap_jax as toj

    mesh = Mesh(np.array(jax.devices()), ("tp",))
    captured = os.environ.get("CAPTURED") == "1"
    axis = toj.bootstrap(mesh, "tp", store="tcp://127.0.0.1", timeout=60, command_buffers=captured)
    assert axis.size == size
    for name in checks:
        jax_checks.run_check(name, mesh, seed)
        print(f"{name}: done", flush=True)
    axis.close()
    print("all checks are done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:5]), sys.argv[5:])

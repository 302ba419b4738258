"""A tensor-parallel MLP block in JAX, trained with overlapped products and with plain collectives.

    python examples/jax_mlp.py                 # one process with four CPU devices
    python examples/jax_mlp.py --processes 2   # two processes with one device each, started by this script

Both train the same weights on the same data, so their losses are equal. Tokens are split over the ranks between the
blocks, features inside of a block. It needs jax (pip install 'torch_overlap[jax]').
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import subprocess
import sys
from typing import Any

TOKENS, FEATURES, HIDDEN, BLOCKS = 64, 32, 128, 2


def make_step(mesh: Any, gather_matmul: Any, matmul_scatter: Any, learning_rate: float = 0.05) -> Any:
    """Returns a training step (weights, x, y) -> (weights, loss) over the given products."""
    import jax
    from jax.sharding import PartitionSpec as P

    weight_specs = [(P(None, "tp"), P("tp", None))] * BLOCKS

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(weight_specs, P("tp"), P("tp")), out_specs=P(), check_vma=False
    )
    def loss(weights: Any, x: Any, y: Any) -> Any:
        for up, down in weights:
            x = x + matmul_scatter(jax.nn.gelu(gather_matmul(x, up)), down)
        return jax.lax.pmean(((x - y) ** 2).mean(), "tp")

    @jax.jit
    def step(weights: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x, y)
        return jax.tree.map(lambda weight, grad: weight - learning_rate * grad, weights, grads), value

    return step


def train(steps: int) -> list[tuple[float, float]]:
    """Trains both ways; returns the losses of each step."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import torch_overlap_jax as toj

    mesh = Mesh(np.array(jax.devices()), ("tp",))
    axis = toj.bootstrap(mesh, "tp")
    overlapped = make_step(
        mesh, lambda x, w: toj.all_gather_matmul(x, w, "tp"), lambda x, w: toj.matmul_reduce_scatter(x, w, "tp")
    )
    plain = make_step(
        mesh,
        lambda x, w: jax.lax.all_gather(x, "tp", tiled=True) @ w,
        lambda x, w: jax.lax.psum_scatter(x @ w, "tp", tiled=True),
    )

    rng = np.random.default_rng(0)

    def spread(values: Any, spec: Any) -> Any:
        values = values.astype(np.float32)
        return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])

    weights = [
        (
            spread(rng.standard_normal((FEATURES, HIDDEN)) / FEATURES**0.5, P(None, "tp")),
            spread(rng.standard_normal((HIDDEN, FEATURES)) / HIDDEN**0.5, P("tp", None)),
        )
        for _ in range(BLOCKS)
    ]
    x, y = (spread(rng.standard_normal((TOKENS, FEATURES)), P("tp")) for _ in range(2))
    states, losses = [weights, weights], []
    for _ in range(steps):
        row = []
        for way, step in enumerate((overlapped, plain)):
            # Two programs in flight may use up XLA's threads for the CPU devices of one process.
            states[way], loss = jax.block_until_ready(step(states[way], x, y))
            row.append(float(loss))
        losses.append((row[0], row[1]))
    axis.close()
    return losses


def run(steps: int) -> None:
    import jax

    losses = train(steps)
    if jax.process_index() == 0:
        print("step  overlapped        plain")
        for number, (ours, theirs) in enumerate(losses):
            print(f"{number:4}  {ours:.8f}  {theirs:.8f}")
    for ours, theirs in losses:
        if abs(ours - theirs) > 1e-5 * abs(theirs):
            sys.exit(f"the losses differ: {ours} and {theirs}")
    if len(losses) > 1 and losses[-1][0] >= losses[0][0]:
        sys.exit("the loss did not fall")


def start_processes(count: int, steps: int) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    command = [sys.executable, __file__, "--steps", str(steps), "--coordinator", address, "--size", str(count)]
    started = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(count)]
    codes = [process.wait() for process in started]
    if any(codes):
        sys.exit(f"exit codes of the processes: {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--devices", type=int, default=4, help="CPU devices of a single process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--coordinator", help="address of process 0; with --size and --rank, for one of the processes")
    parser.add_argument("--size", type=int)
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"expected --steps from 1, got {options.steps}")
    for name, count in (("--devices", options.devices), ("--processes", options.processes)):
        if count < 1 or TOKENS % count or HIDDEN % count:
            parser.error(f"expected {name} to divide {TOKENS} tokens and {HIDDEN} features, got {count}")
    if (options.coordinator is None) != (options.size is None) or (options.size is None) != (options.rank is None):
        parser.error("expected --coordinator, --size and --rank together")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.processes > 1:
        return start_processes(options.processes, options.steps)
    if options.coordinator is None:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={options.devices}"
    else:
        import jax

        jax.distributed.initialize(options.coordinator, options.size, options.rank)
    run(options.steps)
    return None


if __name__ == "__main__":
    main()

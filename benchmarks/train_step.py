"""Measures the whole step of examples/train_gpt.py, compared with the planner's prediction.

    torchrun --nproc_per_node 4 benchmarks/train_step.py --meshes tp=4,dp=2:tp=2,dp=4 --out benchmarks/results

The example's own trainers and sizes: forward, backward, summed gradients, clipping, AdamW, in one CUDA graph; in bf16
with an fp32 residual stream. tp without dp is the model that communicates explicitly, with dp (dp=1 on one rank) the
plain one that torch_overlap.mesh shards. Meshes take turns in a round; a sample is that of the slowest rank.
"predicted": the planner's, with the cost model of H200s; only printed, since it changes with the planner. Without a GPU
it only checks, on gloo with --tiny, that it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt.model import Config
from gpt.plain import MeshTrainer
from gpt.text import Text
from gpt.training import EAGER_STEPS, Trainer

import torch_overlap as to
from torch_overlap._timing import interleave, slowest_rank, spread_of
from torch_overlap.mesh import Mesh
from torch_overlap.mesh.models import PRESETS, Transformer
from torch_overlap.mesh.transformer import predict
from torch_overlap.tools.bench import result
from torch_overlap.tools.bench.ranks import ENVIRONMENT, Ranks

LEAD_CYCLES = 1_000_000
BATCH = 16  # sequences, as in train_gpt.py


def make_trainer(axes: dict[str, int], model: Transformer, comm: to.TorchComm, algorithm: str) -> Trainer:
    """Returns a trainer whose step is on random tokens, and captured if there is a GPU."""
    cuda = comm.get_device().type == "cuda"
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.vocabulary, (1 << 20,), generator=generator, dtype=torch.uint8)
    kind = MeshTrainer if "dp" in axes else Trainer
    trainer = kind(
        Config(model.hidden, model.layers, model.heads, model.sequence), comm, Text(tokens, tokens, 1),
        batch_size=BATCH, steps=100, rate=1e-3, seed=0, dtype=torch.bfloat16 if cuda else torch.float32,
        algorithm=algorithm, graph=cuda, mesh=axes,
    )  # fmt: skip
    for step in range(EAGER_STEPS + 1):
        trainer.train_step(step)
    return trainer


def mesh_of(name: str) -> Mesh:
    """Returns the mesh of "dp=2:tp=2". The separator is not a comma, which separates meshes."""
    return Mesh.parse(name.replace(":", ","))


def model_of(name: str, *, tiny: bool) -> Transformer:
    model = PRESETS["train_gpt_mesh" if "dp" in mesh_of(name).axes else "train_gpt"]
    if tiny:
        model = dataclasses.replace(model, layers=1, hidden=64, heads=4, kv_heads=4, ffn=256, sequence=32)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", help="axes of each, as dp=2:tp=2,tp=4; default: tp over all ranks")
    parser.add_argument("--algorithm", default="auto", help="of the operators (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="the folder of the result; default: it is only printed")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, which measures nothing")
    args = parser.parse_args()
    ranks = Ranks.start("cuda" if torch.cuda.is_available() else "cpu")
    meshes = (args.meshes or f"tp={ranks.size}").split(",")
    watch = dataclasses.replace(ranks.captured, lead_cycles=LEAD_CYCLES)
    # One for each: a mesh has the name of its communicator.
    comms = {name: ranks.comm.split(list(range(ranks.size)), f"train_{i}") for i, name in enumerate(meshes)}
    models = {name: model_of(name, tiny=args.tiny) for name in meshes}
    trainers = {
        name: make_trainer(mesh_of(name).axes, models[name], comm, args.algorithm) for name, comm in comms.items()
    }
    samplers = {name: watch.sampler(partial(trainer.run_step, EAGER_STEPS + 1)) for name, trainer in trainers.items()}
    samples = slowest_rank(interleave(samplers, args.rounds), ranks.comm)
    rows: list[dict[str, Any]] = []
    for name in meshes:
        us, iqr = spread_of(samples[name])
        predicted = 1e6 * predict(models[name], mesh_of(name), batch=BATCH).seconds
        rows.append({"op": "train_step", "name": name, "algorithm": args.algorithm, "us": us, "iqr_us": iqr,
                     "peers": {}})  # fmt: skip
        tokens = BATCH * models[name].sequence / us
        ranks.say(f"{name:14s}{us:10.1f} us +- {iqr:.1f}  {tokens:.3f} Mtoken/s  predicted {predicted:.1f}"
                  f"  ({predicted / us - 1:+.1%})")  # fmt: skip
    if args.out is not None and ranks.rank == 0:
        environment = {name: os.environ.get(name, "") for name in ENVIRONMENT}
        print(result.write(result.result("train_step", rows, environment=environment), ranks.size, args.out))
    del samplers  # graphs must be freed before their communicators
    for trainer in trainers.values():
        trainer.graph = None
        if isinstance(trainer, MeshTrainer):
            trainer.mesh.close()
    for comm in comms.values():
        comm.finalize()
    ranks.stop()


if __name__ == "__main__":
    main()

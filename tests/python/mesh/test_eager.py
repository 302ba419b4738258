"""The planner's models of examples/train_gpt.py have the bytes that its training steps move."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from counted import Counted

import torch_overlap as to
from torch_overlap.mesh.models import PRESETS

DIM, SEQUENCE = 256, 128


def bytes_of_a_step(name: str, dp: int, layers: int, batch: int) -> float:
    """Returns the bytes of a step on one rank of `dp`, without the others: a small model, `batch` sequences per
    rank."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
    from gpt.model import Config
    from gpt.plain import MeshTrainer
    from gpt.text import Text
    from gpt.training import Trainer

    letters = torch.randint(256, (2, 5000)).to(torch.uint8)
    comm = to.new_comm("fake", torch.device("cpu"), name="counted", rank=0, size=dp)
    trainer = {"train_gpt": Trainer, "train_gpt_mesh": MeshTrainer}[name](
        Config(DIM, layers, 4, SEQUENCE), comm, Text(*letters, 1), batch_size=batch * dp, steps=2, rate=1e-3, seed=0,
        dtype=torch.bfloat16, algorithm="auto", graph=False, mesh={"dp": dp},
    )  # fmt: skip
    trainer.train_step(0)
    with Counted() as counted:
        trainer.run_step(1)
    if isinstance(trainer, MeshTrainer):
        trainer.mesh.close()
    comm.finalize()
    return counted.bytes


@pytest.mark.parametrize("name", ["train_gpt", "train_gpt_mesh"])
def test_a_preset_moves_what_the_example_does(name: str) -> None:
    eager = PRESETS[name].eager
    assert eager is not None
    count = {(n, batch): bytes_of_a_step(name, 1, n, batch) for n in (1, 2) for batch in (2, 4)}
    # Bytes of one more layer: the part that grows with the batch, and the rest.
    fewer, more = (count[2, batch] - count[1, batch] for batch in (2, 4))
    tokens = 2 * SEQUENCE * DIM
    parameters = 12 * DIM**2 + 2 * DIM
    assert (more - fewer) / tokens == pytest.approx(eager.layer, rel=0.005)
    assert (2 * fewer - more) / parameters == pytest.approx(eager.parameter, rel=0.02)
    if name == "train_gpt_mesh":
        over_ranks = bytes_of_a_step(name, 2, 2, 2) - bytes_of_a_step(name, 2, 1, 2)
        assert (over_ranks - fewer) / parameters == pytest.approx(eager.reduced, rel=0.01)

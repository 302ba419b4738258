"""benchmarks/llama_step.py runs without a GPU, beside torch's own tensor parallelism."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launcher import Launcher

PROGRAM = Path(__file__).parents[4] / "benchmarks" / "llama_step.py"
HOLDS_GRADIENTS = """
import sys
sys.path[:0] = [{benchmarks!r}, {examples!r}]
import torch
from gpt.text import Text
from torch_llama import TorchTrainer
from train_llama import TINY
import torch_overlap as to
from torch_overlap.tools.bench.ranks import Ranks

ranks = Ranks.start("cpu")
comm = to.new_comm("gloo", ranks.device, "holds_gradients")
tokens = torch.zeros(1 << 12, dtype=torch.uint8)
trainer = TorchTrainer(TINY, comm, Text(tokens, tokens, 1), algorithm="sequential", graph=False, async_tp=False,
                       accumulate=1, recompute=False, batch_size=1, steps=2, rate=1e-4, seed=0, dtype=torch.float32)
held = []
trainer.model.register_forward_pre_hook(lambda *_: held.extend(w.grad is not None for w in trainer.weights))
trainer.optimizer.register_step_pre_hook(lambda *_: held.extend(p.grad is not None for p in trainer.parameters))
for step in range(2):
    trainer.train_step(step)
assert trainer.losses.isfinite().all() and held and not any(held), held
comm.finalize()
ranks.stop()
"""


@pytest.mark.slow
def test_two_ranks_without_a_gpu(launcher: Launcher, tmp_path: Path) -> None:
    options = ("--tiny", "--rounds", 1, "--batch", 2, "--accumulate", 2, "--algorithms", "auto", "--out", tmp_path)
    code, output = launcher.run_ranks(2, PROGRAM, *options)
    assert code == 0, output
    assert "expected finalize()" not in output
    (path,) = tmp_path.glob("llama_step-cpu-tp2-*.json")
    content = json.loads(path.read_text())
    assert [row["algorithm"] for row in content["rows"]] == ["nccl", "auto", "torch compiled"]
    assert content["missing"] == {"torch async TP": "needs CUDA"}
    for row in content["rows"]:
        floor = row["floor"]
        assert min(row["us"], floor["layers_us"], floor["head_us"], floor["optimizer_us"]) > 0
        assert floor["us"] == pytest.approx(sum(floor.values()) - floor["us"], rel=1e-4)
        assert row["ratio_floor"] == pytest.approx(row["us"] / floor["us"], rel=1e-4)
        assert row["tokens_per_second"] == pytest.approx(1e6 * 2 * 64 / row["us"], rel=1e-4)


def test_torch_holds_one_gradient_of_a_parameter(launcher: Launcher, tmp_path: Path) -> None:
    """Its peak of memory has no gradients of the step before, and none in two dtypes."""
    program = tmp_path / "holds_gradients.py"
    folders = {name: str(PROGRAM.parents[1] / name) for name in ("benchmarks", "examples")}
    program.write_text(HOLDS_GRADIENTS.format(**folders))
    code, output = launcher.run_ranks(1, program)
    assert code == 0, output


def test_batch_that_does_not_divide(launcher: Launcher) -> None:
    code, output = launcher.run_ranks(1, PROGRAM, "--tiny", "--batch", 6, "--accumulate", 4)
    assert code != 0
    assert "expected --batch divisible by --accumulate 4, got 6" in output

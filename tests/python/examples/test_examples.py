"""Every numbered example is short, and runs on GPUs. On the CPU tests/docs runs all, as the tutorials show them."""

import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ALL = sorted(path.name for path in EXAMPLES.glob("[0-9]*.py"))
SURVIVE = "07_survive_a_lost_rank.py"  # starts its own ranks
LADDER = [name for name in ALL if name != SURVIVE]


def test_the_ladder_has_one_example_a_step():
    assert [name[:2] for name in ALL] == sorted({name[:2] for name in ALL})


@pytest.mark.parametrize("name", ALL)
def test_is_at_most_80_lines(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 80


def test_the_first_one_runs_under_torchrun_on_two_cpu_ranks(launcher):
    code, output = launcher.torchrun(2, LADDER[0])
    assert code == 0, output
    for rank in range(2):
        assert len(re.findall(rf"rank {rank}( of 2)?\b[^:]*:", output)) == 1, output


@pytest.mark.parametrize("name", [*LADDER, "train_gpt.py"])
def test_without_a_launcher_it_says_so_in_one_line(launcher, name):
    process = launcher.fork(EXAMPLES / name)
    assert process.wait() == 1, process.printed()
    # The bindings of Triton say what they leak at the end of a process.
    printed = process.printed().partition("nanobind: leaked")[0]
    assert re.fullmatch(r".*torchrun.*\n", printed), printed


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", LADDER)
def test_runs_on_two_gpus(launcher, name):
    code, output = launcher.torchrun(2, name, gpu=True)
    assert code == 0, output


@pytest.mark.gpu(3)
def test_a_lost_rank_is_survived_on_gpus(launcher):
    process = launcher.start([sys.executable, str(EXAMPLES / SURVIVE)], gpu=True)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "worker 2 is gone (-9)" in output
    for worker in (0, 1):
        assert re.search(rf"worker {worker}: .*now <torch_overlap.TorchComm 'train' nccl rank {worker} of 2 on",
                         output), output  # fmt: skip
        loss = re.search(rf"worker {worker}: loss (\S+) after 150 steps", output)
        assert loss is not None, output
        assert float(loss[1]) < 1e-3

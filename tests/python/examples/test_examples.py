"""Every numbered example runs, and is short."""

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LADDER = sorted(path.name for path in EXAMPLES.glob("[0-9]*.py"))


def test_the_ladder_is_complete():
    assert [name[:2] for name in LADDER] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("name", LADDER)
def test_is_at_most_80_lines(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 80


@pytest.mark.parametrize("name", LADDER)
def test_runs_on_two_cpu_ranks(launcher, name):
    code, output = launcher.torchrun(2, name)
    assert code == 0, output
    for rank in range(2):
        assert len(re.findall(rf"rank {rank}( of 2)?\b[^:]*:", output)) == 1, output


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", LADDER)
def test_runs_on_two_gpus(launcher, name):
    code, output = launcher.torchrun(2, name, gpu=True)
    assert code == 0, output

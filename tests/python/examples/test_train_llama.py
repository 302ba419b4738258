"""The llama example: short runs of the real program on real ranks."""

import re

import pytest
import torch
from launcher import EXAMPLES

from torch_overlap.testing import run_ranks

PROGRAM = "train_llama.py"


@pytest.mark.slow
@pytest.mark.parametrize(("options", "tolerance"),
                         [(("--recompute",), 1e-3), (("--dtype", "bfloat16", "--fp8", "current"), 0.1)])  # fmt: skip
def test_it_learns_as_on_one_rank(launcher, options, tolerance):
    code, output = launcher.run_ranks(2, PROGRAM, "--device", "cpu", "--steps", 12, "--check-steps", 6, *options)
    assert code == 0, output
    losses = [float(value) for value in re.findall(r"step +\d+/12 +loss ([0-9.]+)", output)]
    assert losses[0] > 5.0, "a byte is one of 256: ln 256 = 5.5 at first"
    assert losses[-1] < losses[0] - 1.0
    difference = re.search(r"6 steps equal within ([0-9.e+-]+) ", output)
    assert difference is not None, output
    assert float(difference[1]) <= tolerance
    assert "tokens/s after 5 steps" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch", 6, "--accumulate", 4), "expected --batch divisible by --accumulate 4, got 6"),
        (("--layers", 0), "expected --layers of at least 1, got 0"),
        (("--check-steps", -3), "expected --check-steps of at least 0, got -3"),
    ],
)
def test_options_that_do_not_fit(launcher, options, message):
    code, output = launcher.run_ranks(1, PROGRAM, "--device", "cpu", *options)
    assert code != 0
    assert message in output


def test_parameters_have_no_memory_of_other_ranks_parts(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from llama.model import Llama
    from train_llama import TINY

    def rank(comm):
        for dtype in (torch.float32, torch.bfloat16):
            weight = Llama(TINY, comm, seed=0, device=torch.device("cpu"), dtype=dtype).embedding.weight
            assert weight.untyped_storage().nbytes() == weight.nbytes

    run_ranks(rank, 2, backend="local")

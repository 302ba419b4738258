"""The training example: short runs of the real program on real ranks."""

import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from torch_overlap.testing import run_ranks

PROGRAM = "train_gpt.py"
SECONDS = 300  # for programs that were asked to end
TRAIN_GPT = Path(__file__).resolve().parents[3] / "examples" / PROGRAM
SMALL = ("--dim", 32, "--layers", 2, "--heads", 4, "--sequence", 64, "--batch", 4, "--sample", 20)
PNG = b"\x89PNG\r\n\x1a\n"


def losses_of(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"step +\d+/\d+ +loss ([0-9.]+)", output)]


def assert_trained_and_checked(code: int, output: str, out: Path, *, steps: int, tolerance: float) -> None:
    assert code == 0, output
    losses = losses_of(output)
    assert losses[0] > 5.0, "a byte is one of 256: ln 256 = 5.5 at first"
    assert losses[-1] < losses[0] - 1.0
    difference = re.search(rf"{steps} steps equal within ([0-9.e+-]+) ", output)
    assert difference is not None, output
    assert float(difference[1]) <= tolerance
    assert "--- sample" in output
    assert (out / "trace.json").stat().st_size > 0
    for name in ("loss.png", "timeline.png"):
        assert (out / name).read_bytes().startswith(PNG)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "algorithm", "dtype", "tolerance"),
    [(4, "sequential", "float32", 1e-3), (2, "pipelined", "bfloat16", 2e-2)],  # two ranks in float32: below
)
def test_trains_and_equals_one_rank(launcher, tmp_path, ranks, algorithm, dtype, tolerance):
    pytest.importorskip("matplotlib")
    arguments = ("--steps", 40, "--algorithm", algorithm, "--dtype", dtype, "--out", tmp_path)
    code, output = launcher.run_ranks(ranks, PROGRAM, *SMALL, *arguments)
    assert_trained_and_checked(code, output, tmp_path, steps=20, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["bulk", "pipelined", "p2p", "auto"])  # "none": in the other two tests
def test_every_way_to_overlap_trains_and_equals_one_rank(launcher, tmp_path, overlap):
    pytest.importorskip("matplotlib")
    arguments = ("--steps", 30, "--check-steps", 10, "--overlap", overlap, "--out", tmp_path)
    code, output = launcher.run_ranks(2, PROGRAM, *SMALL, *arguments)
    assert_trained_and_checked(code, output, tmp_path, steps=10, tolerance=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mesh", "dtype", "tolerance", "overlap"),
    [(4, "dp=2,tp=2", "float32", 1e-3, "none"), (2, "tp=2", "bfloat16", 2e-2, "p2p")],
)
def test_the_plain_model_on_a_mesh_equals_one_rank(launcher, tmp_path, ranks, mesh, dtype, tolerance, overlap):
    """The losses equal those of the model that communicates by hand, on one rank."""
    pytest.importorskip("matplotlib")
    arguments = ("--steps", 30, "--check-steps", 20, "--mesh", mesh, "--overlap", overlap, "--out", tmp_path)
    code, output = launcher.run_ranks(ranks, PROGRAM, *SMALL, "--dtype", dtype, *arguments)
    assert_trained_and_checked(code, output, tmp_path, steps=20, tolerance=tolerance)


AXES = ("dp",), ("tp",), ("dp", "tp")


def collectives_of_a_step(comm, mesh, dtype, keep_gathered=False):
    """Returns a training step's collectives, "all_reduce dp" on a mesh, and the losses."""
    sys.path.insert(0, str(TRAIN_GPT.parent))
    from gpt.model import Config
    from gpt.plain import MeshTrainer
    from gpt.text import Text
    from gpt.training import Trainer

    letters = torch.randint(256, (2, 5000), generator=torch.Generator().manual_seed(7)).to(torch.uint8)
    kind = Trainer if mesh is None else MeshTrainer
    trainer = kind(Config(64, 2, 4, 32), comm, Text(*letters, 1), batch_size=4, steps=3, rate=1e-3, seed=0,
                   dtype=dtype, algorithm="sequential", graph=False, keep_gathered=keep_gathered,
                   mesh=mesh)  # fmt: skip
    trainer.train_step(0)
    log: list[str] = []
    sets = [axes for axes in AXES if set(axes) <= set(mesh or ())]
    comms = {axes: trainer.mesh.group_comm(axes) for axes in sets} if mesh else {(): comm}
    for axes, over in comms.items():
        over.register_pre_hook(lambda name, *_, axes=axes: log.append(" ".join((name.name, *axes))))
    trainer.train_step(1)
    names = list(log)
    trainer.train_step(2)
    losses = trainer.losses.tolist()
    if mesh:
        trainer.mesh.close()
    return names, losses


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_mesh_puts_in_the_collectives_that_a_hand_does(dtype, tolerance):
    """A block has 4 forward and 4 backward collectives, a step one for all gradients: the same, in the same order."""
    by_hand, losses = run_ranks(collectives_of_a_step, 2, None, dtype, True)[0]
    on_mesh, mesh_losses = run_ranks(collectives_of_a_step, 2, {"tp": 2}, dtype)[0]
    assert mesh_losses == pytest.approx(losses, abs=tolerance)
    blocks = 2
    assert by_hand == [*["all_gather_single", "reduce_scatter_single"] * 4 * blocks, "all_reduce"]
    assert on_mesh == [f"{name} tp" for name in by_hand]


def test_inputs_that_are_not_kept_are_gathered_again():
    """Collectives for the gradients of the weights: two in each block."""
    sent, losses = run_ranks(collectives_of_a_step, 2, None, torch.float32)[0]
    _, kept_losses = run_ranks(collectives_of_a_step, 2, None, torch.float32, True)[0]
    assert losses == pytest.approx(kept_losses, abs=1e-6)
    gather, scatter, blocks = "all_gather_single", "reduce_scatter_single", 2
    assert sent == [*[gather, scatter] * 2 * blocks, *[gather, gather, scatter] * 2 * blocks, "all_reduce"]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_over_dp_and_tp_blocks_send_over_tp_alone(dtype, tolerance):
    """No weight is gathered, also if products cast it. Over dp only gradients are summed (those of sharded weights
    over dp, those of whole weights over both axes, with the loss; then the squares of the former, over tp)."""
    mesh, blocks = {"dp": 2, "tp": 2}, 2
    _, losses = run_ranks(collectives_of_a_step, 2, None, dtype, backend="local")[0]
    for sent, mesh_losses in run_ranks(collectives_of_a_step, 4, mesh, dtype, backend="local"):
        block = ["all_gather_single tp", "reduce_scatter_single tp"] * 4
        assert sent == [*block * blocks, "all_reduce dp", "all_reduce dp tp", "all_reduce tp"]
        assert mesh_losses == pytest.approx(losses, abs=tolerance)


def validation_loss(output: str) -> float:
    found = re.search(r"loss on files that were not trained on: ([0-9.]+)", output)
    assert found is not None, output
    return float(found[1])


@pytest.mark.slow
def test_training_on_8_bit_floats_ends_near_bfloat16(launcher, tmp_path):
    """The losses are within 0.15, less than the effect of some more training or of another seed."""
    sizes = (*SMALL, "--dim", 64)  # 32 features of each rank
    arguments = (*sizes, "--steps", 24, "--dtype", "bfloat16", "--check-steps", 10, "--out", tmp_path)
    losses = {}
    for fp8 in ("none", "current", "delayed", "mxfp8", "block"):
        code, output = launcher.run_ranks(2, PROGRAM, *arguments, "--fp8", fp8)
        assert code == 0, output
        assert "10 steps equal within" in output
        losses[fp8] = validation_loss(output)
    assert losses["none"] < 3.2
    for fp8 in ("current", "delayed", "mxfp8", "block"):
        assert losses[fp8] == pytest.approx(losses["none"], abs=0.15)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("fp8", ["current", "delayed", "mxfp8", "block"])
def test_trains_on_8_bit_floats_of_two_gpus(launcher, tmp_path, fp8):
    arguments = ("--device", "cuda", "--dim", 256, "--layers", 2, "--sequence", 256, "--steps", 60, "--out", tmp_path)
    code, output = launcher.torchrun(2, PROGRAM, *arguments, "--fp8", fp8, gpu=True)
    assert code == 0, output
    assert "20 steps equal within" in output


@pytest.mark.gpu(2)
@pytest.mark.parametrize("extra", [(), ("--no-graph",)], ids=["graph", "eager"])
def test_trains_on_two_gpus_and_equals_one(launcher, tmp_path, extra):
    pytest.importorskip("matplotlib")
    arguments = ("--device", "cuda", "--dim", 256, "--layers", 2, "--sequence", 256, "--steps", 60, "--out", tmp_path)
    code, output = launcher.torchrun(2, PROGRAM, *arguments, *extra, gpu=True)
    assert_trained_and_checked(code, output, tmp_path, steps=20, tolerance=2e-2)


@pytest.mark.slow
def test_fails_and_names_the_step_where_the_runs_part(launcher, tmp_path):
    """A learning rate at which every rounding error leads to another training."""
    arguments = ("--steps", 8, "--check-steps", 8, "--rate", 2, "--out", tmp_path)
    code, output = launcher.run_ranks(2, PROGRAM, *SMALL, *arguments)
    assert code != 0
    assert re.search(r"float32: expected loss \S+ within 0.001 at step \d, got \S+; ", output), output


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run(launcher, tmp_path):
    code, output = launcher.run_ranks(2, PROGRAM, *SMALL, "--steps", 8, "--rate", 1e30, "--out", tmp_path)
    assert code != 0
    assert re.search(r"train_gpt: expected finite losses, got (nan|inf) at step \d; lower --rate", output), output


@pytest.mark.slow
@pytest.mark.parametrize("after", ["import", "training"])
def test_ctrl_c_ends_torchrun_and_all_ranks(launcher, tmp_path, after):
    command = launcher.torchrun_command(2, PROGRAM, *SMALL, "--steps", 100_000, "--out", tmp_path)
    process = launcher.start(command)
    if after == "training":
        wait_for_line(process, r"step +1/")
    else:
        wait_until(lambda: len(launcher.running()) >= 3 or process.poll() is not None, SECONDS)
        assert process.poll() is None, process.stdout.read()
        time.sleep(1.0)  # the ranks have started to import torch
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert launcher.all_gone(seconds=60)
    assert PROGRAM not in "".join(re.findall(r'File ".*"', output)), f"a rank printed a traceback:\n{output}"


def start_two_ranks(launcher, out: Path):
    ranks = launcher.fork_ranks(2, PROGRAM, *SMALL, "--steps", 100_000, "--out", out)
    wait_until(lambda: re.search(r"^step +1/", ranks[0].printed(), re.MULTILINE))
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("at", ["once", "different times"])
def test_ctrl_c_ends_each_rank_with_130(launcher, tmp_path, at):
    ranks = start_two_ranks(launcher, tmp_path)
    if at == "once":
        for process in ranks:
            process.send_signal(signal.SIGINT)
    else:
        ranks[1].send_signal(signal.SIGINT)
        ranks[1].wait()  # rank 0 may notice that it has left before its own signal
        ranks[0].send_signal(signal.SIGINT)
    codes = [process.wait() for process in ranks]
    output = ranks[0].printed()
    assert codes == [130, 130], output
    assert "SIGINT: ending all ranks" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_rank_that_dies_is_an_error_of_the_other(launcher, tmp_path):
    ranks = start_two_ranks(launcher, tmp_path)
    ranks[1].kill()
    assert ranks[0].wait() not in (0, 130), ranks[0].printed()
    assert "rank 1" in ranks[0].printed()


def wait_for_line(process, pattern: str) -> None:
    seen = []
    for line in process.stdout:
        seen.append(line)
        if re.match(pattern, line):
            return
    raise AssertionError("the program ended:\n" + "".join(seen))


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)

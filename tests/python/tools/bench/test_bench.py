"""The command from end to end on two gloo ranks, and its handling of an algorithm that fails or is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_rows import check_rows
from command_line import run_here
from launcher import Launcher
from torch import Tensor

import torch_overlap as to
from torch_overlap._timing import Stopwatch
from torch_overlap.testing import run_ranks
from torch_overlap.tools.bench import measure, result
from torch_overlap.tools.bench.build import algorithm_names, build
from torch_overlap.tools.bench.cases import CLASS_OPS, COLLECTIVES, EXCHANGE_OPS, KNOWN_OPS, Case
from torch_overlap.tools.bench.libraries import NO_CUDA, Arena, Libraries
from torch_overlap.tools.bench.measure import sample_all, validate_variants
from torch_overlap.tools.bench.problem import Problem, algorithms
from torch_overlap.tools.bench.ranks import Ranks
from torch_overlap.tools.bench.trace import lane_of, spans_of

Done = subprocess.CompletedProcess[str]

PROGRAM = Path(__file__).with_name("few_calls.py")
sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
import overlap  # noqa: E402


def bench(*arguments: object) -> Done:
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "torch_overlap", "bench", *map(str, arguments)]
    return subprocess.run(command, env=outside, capture_output=True, text=True, timeout=280)


def bench_on_ranks(launcher: Launcher, *arguments: object) -> str:
    """Runs the command on two ranks that exist, and returns what it prints. test_ag_gemm has those that it starts."""
    code, output = launcher.run_ranks(2, PROGRAM, "bench", *arguments)
    assert code == 0, output
    return output


@pytest.fixture
def commands(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> list[Done]:
    """Commands that start bench run it in this process, and torchrun's ranks are forks, which take less time. Returns
    the commands that have ended. test_ag_gemm has no such replacement."""
    ended: list[Done] = []

    def run(command: Sequence[str], **_: Any) -> Done:
        words = command[command.index("torch_overlap") + 1 :]
        if "torch.distributed.run" in command:
            done = Done(command, 0, bench_on_ranks(launcher, *words[1:]))
        else:
            done = run_here(*words)
        ended.append(done)
        return done

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    return ended


def test_ag_gemm(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = bench("ag_gemm", "--shape", "64,96,32", "--device", "cpu", "--tp", 2, "--rounds", 2, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = result.read(path)
    check_rows(found)
    rows = {row["algorithm"]: row for row in found["rows"]}
    assert {"auto", "sequential", "pipelined"} <= set(rows)
    for row in rows.values():
        assert (row["op"], row["shape"], row["dtype"], row["tp"]) == ("ag_gemm", [64, 96, 32], "bf16", 2)
        assert (row["mode"], set(row["peers"])) == ("eager", {"gloo"})
        assert min(row["us"], row["gemm_us"], row["comm_us"], row["floor_us"]) > 0
    assert rows["auto"]["chosen"] in rows
    (missing,) = found["missing"].values()
    peers = ("nccl", "nccl symmetric", "nccl copy engine", "torch fused")
    assert [missing[name] for name in peers] == [NO_CUDA] * 4
    assert all(missing.values())
    assert (found["rounds"], found["left_out"]) == (2, [])
    assert found["command"] == ("python -m torch_overlap bench ag_gemm --shape 64,96,32 --device cpu --tp 2 --rounds 2")
    assert "not run: graph: needs CUDA" in done.stdout
    for name in ("ours auto", "peer gloo", "gemm alone", "floor"):
        assert name in done.stdout


WAYS = {
    "ag_gemm_classes": {"auto", "class ring", "class ring kernels", "class ring aggregate", "class ring atomic",
                        "gemm ring"},
    "gemm_rs_classes": {"auto", "class ring", "class ring atomic", "gemm ring", "class pipeline",
                        "class pipeline atomic", "gemm pipeline"},
    "bulk_ag": {"auto", "sequential", "pipelined", "bulk", "class bulk", "class bulk copy engine", "gemm bulk"},
    "bulk_rs": {"auto", "sequential", "pipelined", "bulk", "class bulk", "gemm bulk"},
    **{op: {"auto", "sequential", "pipelined", "p2p"} for op in EXCHANGE_OPS},
}  # fmt: skip


def test_classes_and_exchanges(launcher: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    output = bench_on_ranks(launcher, *CLASS_OPS, *EXCHANGE_OPS, "--set", "tiny", "--device", "cpu", "--rounds", 2,
                            "--json", path)  # fmt: skip
    found = result.read(path)
    check_rows(found)
    for op, ways in WAYS.items():
        rows = [row for row in found["rows"] if row["op"] == op]
        assert {row["algorithm"] for row in rows} == ways, found["missing"]
        assert ways <= set(algorithm_names(op))
        assert all(set(row["peers"]) == {"gloo"} for row in rows)
        assert f"{op} tiny: 64 96 64, bf16, eager" in output
    assert not [why for missing in found["missing"].values() for why in missing.values() if "wrong" in why]


@pytest.mark.parametrize(("what", "wanted"), [(["ag_gemm"], "fast"), (["all_reduce", "gemm_rs"], "auto,simple,quick")])
def test_an_unknown_algorithm_is_an_error_that_lists_the_known_ones(what: list[str], wanted: str) -> None:
    done = run_here("bench", *what, "--set", "tiny", "--device", "cpu", "--algorithm", wanted)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    head, _, got = line.partition(", got ")
    assert head.startswith("bench: expected --algorithm of auto, ")
    assert got == wanted.split(",")[-1]
    known = set(head.partition(" of ")[2].split(", "))
    assert {"auto", "sequential", "pipelined", "p2p"} <= known
    assert ("simple" in known) == ("all_reduce" in what)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_rows"])
def test_8_bit_floats_and_ways_by_name(launcher: Launcher, tmp_path: Path, dtype: str) -> None:
    classes = {"auto", "class ring atomic", "gemm ring"}
    operators = {"auto", "sequential", "pipelined", "p2p"}
    arguments = ("--shape", "64,96,64", "--dtype", dtype, "--algorithm", ",".join(classes | operators), "--rounds", 1)
    ops = {"ag_gemm_classes": classes, "gemm_rs_classes": classes, "gemm_ar": operators}
    bench_on_ranks(launcher, *ops, *arguments, "--device", "cpu", "--tp", 2, "--out", tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith(f"bench_{dtype}-cpu-tp2-")
    found = result.read(path)
    for op, ways in ops.items():
        assert {row["algorithm"] for row in found["rows"] if row["op"] == op} == ways, found["missing"]
    assert not [why for missing in found["missing"].values() for why in missing.values() if "wrong" in why]


def test_operators_and_classes_by_one_command(
    commands: list[Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    options = ("--set", "tiny", "--device", "cpu", "--algorithm", "auto", "--rounds", "1", "--json", str(path))
    monkeypatch.setattr(sys, "argv", ["overlap.py", *options])
    assert overlap.main() == 0
    assert len(commands) == 2
    rows = result.read(path)["rows"]
    assert {row["op"] for row in rows} == {"ag_gemm", "gemm_rs", *CLASS_OPS}
    monkeypatch.setattr(sys, "argv", ["overlap.py", "--set", "nothing"])
    assert overlap.main() == 2
    assert "invalid choice: 'nothing'" in commands[-1].stderr


@pytest.mark.slow
def test_everything_else(launcher: Launcher, tmp_path: Path) -> None:
    ops = ("gemm_rs", "gemm_ar", "gemm", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    bench_on_ranks(launcher, *ops, "--set", "tiny", "--device", "cpu", "--rounds", 1, "--out", tmp_path, "--timeline")
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("bench_tiny-cpu-tp2-")
    found = result.read(path)
    check_rows(found)
    assert {row["op"] for row in found["rows"]} == set(ops)
    for op in COLLECTIVES:
        ways = {row["algorithm"] for row in found["rows"] if row["op"] == op}
        assert ways == {"auto", "plain", "auto registered", "plain registered"}, found["missing"]
    assert all(row["peers"] for row in found["rows"])
    assert {line["op"] for line in found["timelines"]} == {"gemm_rs", "gemm_ar", "gemm"}
    assert all(span["us"] >= 0 for line in found["timelines"] for span in line["spans"])


@pytest.mark.gpu(2)
@pytest.mark.slow
def test_two_gpus(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = bench(*KNOWN_OPS, "--set", "tiny", "--tp", 2, "--rounds", 3, "--timeline", "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = result.read(path)
    check_rows(found)
    for op in KNOWN_OPS:
        rows = [row for row in found["rows"] if row["op"] == op]
        assert {row["mode"] for row in rows} == {"graph", "eager"}, op
        assert all("torch.mm" in row["peers"] or "nccl" in row["peers"] for row in rows)
    for visit, missing in found["missing"].items():
        for name, reason in missing.items():
            assert "wrong" not in reason, (visit, name, reason)
            assert NO_CUDA not in reason, (visit, name, reason)
    shown = {span["lane"] for line in found["timelines"] for span in line["spans"]}
    assert {"product", "communication"} <= shown


def test_a_budget_leaves_out_and_says_what(commands: list[Done], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = run_here("bench", "ag_gemm", "all_reduce", "--set", "tiny", "--device", "cpu", "--budget", "0",
                    "--json", str(path))  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    (ranks,) = commands
    assert "bench: measured nothing: all 3 cases were left out; give a larger --budget" in ranks.stdout
    assert "Error" not in done.stderr + ranks.stdout
    assert "left out, for want of time (0 s): ag_gemm tiny, eager; all_reduce 1 KiB, eager" in ranks.stdout
    left_out = json.loads(path.read_text())["left_out"]
    assert [(row["op"], row["name"], row["mode"], row["why"]) for row in left_out] == [
        ("ag_gemm", "tiny", "eager", "for want of time"), ("all_reduce", "1 KiB", "eager", "for want of time"),
        ("all_reduce", "64 KiB", "eager", "for want of time"),
    ]  # fmt: skip


def test_a_run_without_a_row_of_ours_fails(launcher: Launcher, tmp_path: Path) -> None:
    status = tmp_path / "status"  # that of the command: test_a_budget_leaves_out_and_says_what
    output = bench_on_ranks(launcher, "ag_gemm", "--set", "tiny", "--device", "cpu", "--algorithm", "fused",
                            "--rounds", 1, "--status", status)  # fmt: skip
    assert status.read_text() == "1", output
    assert "not run: fused: " in output
    assert "bench: measured nothing of ours: no variant could run" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "expected one of"),
        (("ag_gemm", "--shape", "65,64,64", "--device", "cpu"), "that 2 ranks share equally"),
        (("ag_gemm", "--mode", "graph", "--device", "cpu"), "needs CUDA"),
        (("ag_gemm", "--mode", "slow"), "expected --mode"),
        (("ag_gemm", "--tp", "0"), "expected --tp of one or more ranks, got 0"),
        (("ag_gemm", "--device", "cpu", "first", "--tp", "2", "second"), "or all, got first, second"),
        (("ag_gemm", "--plots", "gemm_rs"), "unrecognized arguments: --plots gemm_rs"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    done = run_here("bench", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def run_registered(rank: int, size: int, store: Any) -> None:
    ranks = make_ranks(rank, size, store)
    libraries = Libraries.open(ranks, [])
    problem = build(Case("all_gather", (4096,)), ranks, libraries, ["auto registered"])
    validate_variants(problem, ranks)
    ours = next(variant for variant in problem.variants if variant.role == "ours")
    assert (ours.name, problem.missing.get("auto registered")) == ("auto registered", None)
    tensors = ours.call.keywords["own"][:2]  # type: ignore[attr-defined]
    windows = [to.get_window(name) for name in to.window_names() if name.startswith("bench-test/")]
    assert [window.get_tensor().data_ptr() for window in windows] == [tensor.data_ptr() for tensor in tensors]
    for tensor in tensors:
        with pytest.raises(to.StateError, match="expected memory that is not registered"):
            ranks.comm.tensor_register(tensor)
    for end in problem.cleanups:
        end()
    for tensor, window in zip(tensors, windows, strict=True):
        ranks.comm.tensor_register(tensor)
        with pytest.raises(to.StateError, match="expected a window with a tensor"):
            window.get_tensor()
    ranks.stop()


def test_ours_from_and_into_registered_tensors() -> None:
    run_ranks(run_registered, 2, comm=False)


def make_ranks(rank: int, size: int, store: Any) -> Ranks:
    dist.init_process_group("gloo", store=dist.PrefixStore("c10d", store), rank=rank, world_size=size)
    cpu = torch.device("cpu")
    comm = to.new_comm("gloo", cpu, "bench-test", store=dist.PrefixStore("comm", store), rank=rank, size=size)
    watch = Stopwatch(cpu, partial(comm.barrier, async_op=False))
    return Ranks(comm, cpu, watch, watch)


def run_try_out(rank: int, size: int, store: Any) -> None:
    ranks = make_ranks(rank, size, store)
    truth = torch.randn(64, generator=torch.Generator().manual_seed(7))
    problem = Problem(Case("gemm_rs", (64, 64, 64)))
    calls: list[str] = []

    def fails_on_one(i: int) -> Tensor:
        if rank == 1:
            raise RuntimeError("no such kernel\nmore")
        return truth.clone()

    problem.add("reference", "peer", lambda i: truth.clone())
    problem.add(
        "right", "ours", lambda i: truth * (1 + 1e-3), before=lambda: calls.append("before"),
        tell=lambda: calls.append("asked") or "it",  # type: ignore[func-returns-value]
    )  # fmt: skip
    problem.add("wrong on one rank", "ours", lambda i: truth * (1.5 if rank == 0 else 1.0))
    shared = truth.clone()
    problem.add("writes", "peer", lambda i: shared.copy_(truth))
    problem.add("finds what another wrote", "ours", lambda i: shared)
    problem.add("not a number", "ours", lambda i: truth * float("nan"))
    problem.add("fails on one rank", "peer", fails_on_one)
    problem.add("product", "gemm", lambda i: 2 * truth)
    validate_variants(problem, ranks)
    assert [variant.name for variant in problem.variants] == ["reference", "right", "writes", "product"]
    assert problem.missing["fails on one rank"] == "no such kernel"
    assert problem.missing["wrong on one rank"] == "wrong: differs from reference by 5.0e-01"
    for name in ("not a number", "finds what another wrote"):
        assert problem.missing[name] == "wrong: differs from reference by inf"
    assert calls == ["before", "asked"]
    assert [variant.chosen for variant in problem.variants] == ["", "it", "", ""]
    assert truth.isfinite().all()
    assert ranks.broadcast_value(rank + 5) == 5
    ranks.stop()


def test_what_fails_or_is_wrong_is_not_timed() -> None:
    run_ranks(run_try_out, 2, comm=False)


def run_captured(rank: int, size: int, store: Any) -> None:
    ranks = make_ranks(rank, size, store)
    problem = Problem(Case("gemm_rs", (64, 64, 64)))
    inputs = [torch.randn(64) for _ in range(2)]
    out, own, sums = torch.empty(64), torch.empty(64), torch.randn(64)
    replaying: list[bool] = []

    def in_graph(call: Any) -> Any:
        def replay() -> None:
            replaying.append(True)
            call()
            replaying.clear()

        call()
        return replay

    def stale_on_one(i: int) -> Tensor:
        return own.copy_(inputs[0 if replaying and rank == 1 else i % 2])

    def in_place(i: int) -> Tensor:
        return sums.mul_(2)

    problem.add("right", "ours", lambda i: out.copy_(inputs[i % 2]))
    problem.add("in place", "ours", in_place, before=lambda: sums.fill_(rank + 1))
    problem.add("beyond its type", "comm", lambda i: out.fill_(float("inf")))
    problem.add("stale in a graph", "ours", stale_on_one)
    problem.add("writes nothing in a graph", "ours", lambda i: own if replaying else own.fill_(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "in_graph", in_graph)
        samples = sample_all(problem, ranks, "graph", 2)
    assert set(samples) == {"right", "in place", "beyond its type"} == {variant.name for variant in problem.variants}
    for name in ("stale in a graph", "writes nothing in a graph"):
        assert "in a graph: wrong: differs from a call outside by" in problem.missing[name]
    ranks.stop()


def test_what_is_wrong_in_a_graph_is_not_timed() -> None:
    run_ranks(run_captured, 2, comm=False)


def run_algorithms(comm: to.TorchComm) -> list[str]:
    x = torch.randn(8, 8)
    return algorithms("matmul_all_reduce", lambda name: to.ops.matmul_all_reduce(x, x, comm, algorithm=name))


def test_an_operator_says_which_algorithms_it_has() -> None:
    (names,) = run_ranks(run_algorithms, 1)
    assert names[0] == "auto"
    assert {"sequential", "pipelined", "p2p"} <= set(names)


@pytest.mark.parametrize("listed", ["auto, sequential, fused, got '?'", "auto sequential fused, got '?'"])
def test_names_of_an_error(listed: str) -> None:
    def call(name: str) -> None:
        raise to.InvalidValueError(f"some_op: expected algorithm to be one of {listed}")

    assert algorithms("some_op", call) == ["auto", "sequential", "fused"]
    with pytest.raises(RuntimeError, match="expected some_op to list"):
        algorithms("some_op", lambda name: None)


def test_an_arena_lends_parts_that_do_not_overlap() -> None:
    arena = Arena(torch.zeros(4096, dtype=torch.uint8))
    a, b = arena.empty((3, 5), torch.bfloat16), arena.empty((7,), torch.float32)
    a.fill_(1)
    b.fill_(2)
    assert a.eq(1).all()
    assert b.eq(2).all()
    assert (b.data_ptr() - a.data_ptr()) % 512 == 0
    with pytest.raises(RuntimeError, match="expected room for"):
        arena.empty((4096,), torch.uint8)
    arena.reset()
    assert arena.empty((4096,), torch.uint8).data_ptr() == a.data_ptr()


def test_lanes() -> None:
    names = {
        "nvjet_hsh_128x256_64x4_2x1_v_bz_TNT": "product",
        "void cutlass::device_kernel<gemm_kernel>": "product",
        "fused_all_gather_gemm": "product",
        **{
            f"void torch_overlap::cuda::fused_{name}_kernel<Config>": "product"
            for name in ("gather", "scatter", "scatter_sum", "all_reduce")
        },
        "ncclDevKernel_AllGather_RING_LL": "communication",
        "Memcpy PtoP (Device -> Device)": "communication",
        "void torch_overlap::cuda::simple_copy_kernel": "communication",
        "void torch_overlap::cuda::ll_norm_kernel": "communication",
        "void torch_overlap::cuda::copy_signal_kernel": "communication",
        "aten::mm": "product",
        "void at::native::vectorized_elementwise_kernel": "other",
    }
    assert {name: lane_of(name) for name in names} == names
    spans = spans_of([(100.0, 5.0, "nccl"), (103.0, 7.0, "gemm")])
    assert [(span["lane"], span["start_us"], span["us"]) for span in spans] == [
        ("communication", 0.0, 5.0), ("product", 3.0, 7.0)
    ]  # fmt: skip
    assert spans_of([]) == []

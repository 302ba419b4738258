"""Choices of "auto": the table, otherwise the cache (the same on all ranks), otherwise a rule; and the measuring
command."""

import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from command_line import run_here

import torch_overlap as to
from torch_overlap import _C, _tuning, ops
from torch_overlap.testing import run_ranks
from torch_overlap.tools import tune

pytestmark = pytest.mark.timeout(300)
ROWS, FEATURES, INNER = 512, 12, 8  # sizes of a rank for which the rule selects "pipelined" on a CPU


def entry(op, shape, algorithm, size=2, dtype="float32", library=None, **more):
    return {"op": op, "shape": list(shape), "dtype": dtype, "tp": size, "mode": "eager", "device": "cpu",
            "algorithm": algorithm, "library": _tuning.library() if library is None else library, **more}  # fmt: skip


def gather_shape(size):
    return ROWS * size, FEATURES * size, INNER


def reduce_shape(size):
    return ROWS * size, FEATURES, INNER * size


def entries_for(algorithm, size=2, **more):
    return [entry("all_gather_matmul", gather_shape(size), algorithm, size, **more),
            entry("matmul_reduce_scatter", reduce_shape(size), algorithm, size, **more),
            entry("matmul_all_reduce", reduce_shape(size), algorithm, size, **more)]  # fmt: skip


def spans(call):
    """Returns the names of the operator's spans."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    names = {event.name.removeprefix("torch_overlap::").partition("[")[0] for event in profile.events()}
    return names & {"chunk_gemm", "gemm", "wait"}


def expected_spans(algorithm, op):
    """Products in chunks are spans; "pipelined" also waits for works of the communicator."""
    if algorithm == "pipelined":
        return {"chunk_gemm"} if op == "matmul_all_reduce" else {"gemm", "wait"}
    return set() if algorithm == "sequential" else {"gemm"}


def check_auto(comm, algorithm, decided_by):
    """Checks that every operator selects this algorithm, that explain() agrees, and that results are right."""
    me, size = comm.get_rank(), comm.get_size()
    gen = torch.Generator().manual_seed(17)
    xs, ws = torch.randn(size, ROWS, INNER, generator=gen), torch.randn(size, FEATURES, INNER, generator=gen)
    hs = torch.randn(size, ROWS * size, INNER, generator=gen)
    total = sum(F.linear(h, w) for h, w in zip(hs, ws, strict=True))
    x, w, h = xs[me], ws[me], hs[me]
    results = {}
    for op, given in (("all_gather_matmul", (x, [w], comm)), ("matmul_reduce_scatter", (h, w, comm)),
                      ("matmul_all_reduce", (h, w, comm))):  # fmt: skip

        def call(op=op, given=given):
            results[op] = getattr(ops, op)(*given)

        call()  # creates the channels
        found = to.explain(op, *given)
        assert (found.algorithm, found.decided_by) == (algorithm, decided_by), found
        assert spans(call) == expected_spans(algorithm, op), op
    torch.testing.assert_close(results["all_gather_matmul"][0][0], F.linear(xs.flatten(0, 1), w))
    torch.testing.assert_close(results["matmul_reduce_scatter"], total.chunk(size)[me], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results["matmul_all_reduce"], total, rtol=1e-4, atol=1e-4)


@contextlib.contextmanager
def loaded():
    """Loads the files of the environment, in a process that outlives them."""
    tune.load()
    try:
        yield
    finally:
        _C._set_tuning("cache", {})


def auto_rank(comm, algorithm, decided_by):
    with loaded():
        check_auto(comm, algorithm, decided_by)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("algorithm", ["sequential", "pipelined", "p2p", "low_latency"])
def test_the_cache_decides(tmp_path, size, algorithm):
    path = tmp_path / "cache.json"
    tune.write(path, entries_for(algorithm, size))
    run_ranks(auto_rank, size, algorithm, "cache", env={"TORCH_OVERLAP_TUNE_CACHE": str(path)})


def backward_rank(comm, algorithm, measured):
    """The pass that was measured takes the algorithm, the other one that of the rule; gradients are right."""
    me, size = comm.get_rank(), comm.get_size()
    gen = torch.Generator().manual_seed(29)
    xs, ws = torch.randn(size, ROWS, INNER, generator=gen), torch.randn(size, FEATURES, INNER, generator=gen)
    grads = torch.randn(size, ROWS * size, FEATURES, generator=gen)
    x_grad = sum(g.double() @ w.double() for g, w in zip(grads, ws, strict=True)).chunk(size)[me]
    w_grad = grads[me].double().T @ xs.flatten(0, 1).double()

    def spans_of(asked, keeps):
        x, w = xs[me].clone().requires_grad_(), ws[me].clone().requires_grad_()
        (y,), _ = ops.all_gather_matmul(x, [w], comm, return_gathered=keeps, algorithm=asked)

        def backward():
            x.grad, w.grad = torch.autograd.grad(y, (x, w), grads[me], retain_graph=True)

        backward()  # creates the channels
        found = spans(backward)
        torch.testing.assert_close(x.grad.double(), x_grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(w.grad.double(), w_grad, rtol=1e-4, atol=1e-4)
        return found

    with loaded():
        for keeps in (False, True):
            is_measured = keeps == measured.endswith("_gathered")
            assert spans_of("auto", keeps) == spans_of(algorithm if is_measured else "pipelined", keeps), keeps


@pytest.mark.parametrize("measured", ["all_gather_matmul_backward", "all_gather_matmul_backward_gathered"])
@pytest.mark.parametrize("algorithm", ["sequential", "p2p", "bulk"])
def test_the_cache_decides_for_backward_passes(tmp_path, algorithm, measured):
    path = tmp_path / "cache.json"
    tune.write(path, [entry(measured, gather_shape(2), algorithm)])
    run_ranks(backward_rank, 2, algorithm, measured, env={"TORCH_OVERLAP_TUNE_CACHE": str(path)})


def bulk_rank(comm):
    """A forward pass has no "bulk"; biases and means stay what they are."""
    me, size = comm.get_rank(), comm.get_size()
    gen = torch.Generator().manual_seed(23)
    hs = torch.randn(size, ROWS * size, INNER, generator=gen)
    ws, bias = torch.randn(size, FEATURES, INNER, generator=gen), torch.randn(FEATURES, generator=gen)
    mean = sum(F.linear(h.double(), w.double()) for h, w in zip(hs, ws, strict=True)) / size + bias
    with loaded():
        assert to.explain("matmul_reduce_scatter", hs[me], ws[me], comm).algorithm == "bulk"
        for op, want in (("matmul_reduce_scatter", mean.chunk(size)[me]), ("matmul_all_reduce", mean)):
            got = getattr(ops, op)(hs[me], ws[me], comm, bias, op="avg")
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
        (got,), _ = ops.all_gather_matmul(hs[me], [ws[0]], comm, [bias])
        want = F.linear(hs.flatten(0, 1).double(), ws[0].double(), bias.double())
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_a_measured_bulk_is_for_gradients_alone(tmp_path):
    path = tmp_path / "cache.json"
    tune.write(path, entries_for("bulk", 2))
    run_ranks(bulk_rank, 2, env={"TORCH_OVERLAP_TUNE_CACHE": str(path)})


@pytest.mark.parametrize(
    "others",
    [
        {"library": "torch_overlap 0.0, torch 1.0"},
        {"dtype": "bfloat16"},
        {"size": 4},
        {"algorithm": "tree"},
        {"mode": "graph", "algorithm": "fused"},
    ],
    ids=str,
)
def test_what_was_measured_for_something_else_does_not(tmp_path, others):
    path = tmp_path / "cache.json"
    tune.write(path, entries_for(**{"algorithm": "sequential", **others}))
    run_ranks(auto_rank, 2, "pipelined", "rule", env={"TORCH_OVERLAP_TUNE_CACHE": str(path)})


def test_what_was_measured_in_graphs_counts_where_nothing_else_was(tmp_path):
    path = tmp_path / "cache.json"
    tune.write(path, entries_for("sequential", mode="graph"))
    run_ranks(auto_rank, 2, "sequential", "cache", env={"TORCH_OVERLAP_TUNE_CACHE": str(path)})
    tune.write(path, entries_for("p2p"))
    run_ranks(auto_rank, 2, "p2p", "cache", env={"TORCH_OVERLAP_TUNE_CACHE": str(path)})


def table_rank(comm):
    def chosen(algorithm):
        return {_tuning.key(e): e["algorithm"] for e in entries_for(algorithm)}

    _C._set_tuning("cache", chosen("sequential"))
    _C._set_tuning("table", chosen("p2p"))
    check_auto(comm, "p2p", "table")
    _C._set_tuning("table", {})
    check_auto(comm, "sequential", "cache")
    tune.load()
    check_auto(comm, "sequential", "cache")  # the agreement of the ranks stays


def test_the_table_comes_before_the_cache():
    run_ranks(table_rank, 2)


def prepared_rank(comm):
    """An eager call allocates the memory of the captured one, whatever its own algorithm is."""
    x, w = torch.randn(ROWS, INNER), torch.randn(FEATURES, INNER)
    eager = entry("all_gather_matmul", gather_shape(2), "sequential")
    for entries, is_there in (([eager], False), ([eager, {**eager, "mode": "graph", "algorithm": "p2p"}], True)):
        fresh = comm.split([0, 1], name=f"fresh_{is_there}")
        _C._set_tuning("table", {_tuning.key(e): e["algorithm"] for e in entries})
        ops.all_gather_matmul(x, [w], fresh)
        assert to.explain("all_gather_matmul", x, [w], fresh).algorithm == "sequential"
        comm.barrier(False)  # ranks may be threads
        pretence = _C._PretendUnreachable()  # applies to memory that is made from here on
        with contextlib.nullcontext() if is_there else pytest.raises(to.UnsupportedError):
            ops.all_gather_matmul(x, [w], fresh, algorithm="p2p")
        del pretence
        comm.barrier(False)
        fresh.finalize()
    tune.load()


def test_eager_calls_prepare_captures():
    run_ranks(prepared_rank, 2)


def differing_rank(comm):
    """Each rank has another cache: that of rank 0 is used."""
    mine = ["p2p", "sequential", "pipelined"][comm.get_rank()]
    _C._set_tuning("cache", {_tuning.key(e): e["algorithm"] for e in entries_for(mine, 3)})
    check_auto(comm, "p2p", "cache")
    _C._set_tuning("cache", {})


def test_all_ranks_take_the_cache_of_rank_0():
    run_ranks(differing_rank, 3)


def unreachable_rank(comm):
    """If the measured algorithm cannot run, the rule decides."""
    pretence = _C._PretendUnreachable()
    with loaded():
        check_auto(comm, "pipelined", "rule")
    del pretence


def test_an_algorithm_that_cannot_run_gives_way_to_the_rule(tmp_path):
    path = tmp_path / "cache.json"
    tune.write(path, entries_for("p2p"))
    run_ranks(unreachable_rank, 2, env={"TORCH_OVERLAP_TUNE_CACHE": str(path)})


def measure_rank(comm):
    for op in tune.OPERATORS:
        found = tune.measure(comm, op, (64, 64, 64), torch.float32, rounds=3, repeats=1)
        assert found["op"] == op
        low_latency = (
            {"low_latency"} if op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce") else set()
        )
        bulk = {"bulk"} if "_backward" in op else set()
        assert set(found["us"]) == {"sequential", "pipelined", "p2p"} | low_latency | bulk
        assert found["algorithm"] in found["us"]
        assert found["device"] == "cpu"
    with pytest.raises(ValueError, match="tune: expected m of all_gather_matmul divisible by the 2 ranks, got 3"):
        tune.measure(comm, "all_gather_matmul", (3, 4, 4), torch.float32)
    with pytest.raises(ValueError, match="tune: expected op to be one of"):
        tune.measure(comm, "all_reduce", (4, 4, 4), torch.float32)
    found["us"] = None  # times are local to a rank
    return found


def test_measure_finds_the_same_on_all_ranks():
    first, second = run_ranks(measure_rank, 2)
    assert first == second


def test_files(tmp_path):
    path = tmp_path / "folder" / "cache.json"
    tune.write(path, entries_for("p2p"))
    tune.write(path, [entry("all_gather_matmul", (ROWS * 2 + 1, FEATURES * 2, INNER), "pipelined")])  # the same bucket
    found = {e["op"]: e["algorithm"] for e in tune.read(path)}
    assert found == {"all_gather_matmul": "pipelined", "matmul_reduce_scatter": "p2p", "matmul_all_reduce": "p2p"}
    assert os.listdir(path.parent) == ["cache.json"]
    tune.write(path, [entry("all_gather_matmul", (8, 8, 8), "p2p", library="torch 1.0", us={"p2p": 1.5})])
    assert len(path.read_text().splitlines()) == 6  # a line for each entry
    assert {(e["device"], e["library"]) for e in tune.read(path)} == {("cpu", _tuning.library()), ("cpu", "torch 1.0")}
    assert not any("us" in e for e in tune.read(path))
    for text in ("", "{}", "[]", json.dumps({"format": 2, "entries": []}),
                 json.dumps({"format": 3, "entries": [{"op": "x"}]}),
                 json.dumps({"format": 3, "entries": [{**entries_for("p2p")[0], "mode": "fast"}]})):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ValueError, match=r"tune: expected measured algorithms of format 3 in .*cache.json"):
            tune.read(path)


def write_many(path, first):
    for i in range(first, first + 20):
        tune.write(path, [entry("all_gather_matmul", (2**i, 8, 8), "p2p")])


def test_writers_at_the_same_time_keep_each_others_entries(tmp_path):
    path = tmp_path / "cache.json"
    with ThreadPoolExecutor() as writers:
        list(writers.map(write_many, [path] * 3, (0, 20, 40)))
    assert sorted(e["shape"][0] for e in tune.read(path)) == [2**i for i in range(60)]
    assert os.listdir(tmp_path) == ["cache.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "cache.json"
    tune.write(path, entries_for("p2p"))
    before = path.read_text()

    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        tune.write(path, entries_for("pipelined"))
    assert os.listdir(tmp_path) == ["cache.json"]
    assert path.read_text() == before


def test_inputs_take_turns_beyond_the_cache():
    assert tune._num_input_sets((2048, 4096, 4096), torch.bfloat16, 4, 10) == 10
    assert tune._num_input_sets((8192, 10240, 8192), torch.bfloat16, 4, 10) == 2
    assert tune._num_input_sets((8192, 57344, 8192), torch.bfloat16, 4, 10) == 1
    assert tune._num_input_sets((64, 64, 64), torch.bfloat16, 4, 3) == 3


def test_a_file_that_cannot_be_read_is_left_out_with_a_warning(tmp_path, monkeypatch):
    path = tmp_path / "cache.json"
    path.write_text("{}")
    monkeypatch.setenv("TORCH_OVERLAP_TUNE_CACHE", str(path))
    with pytest.warns(UserWarning, match="the cache is not used"):
        tune.load()
    monkeypatch.delenv("TORCH_OVERLAP_TUNE_CACHE")
    tune.load()


@pytest.mark.parametrize("table", ["h100.json", "h200.json"])
def test_the_tables_that_are_shipped(table):
    entries = tune.read(_tuning.TABLES / table)
    assert {e["op"] for e in entries} <= set(tune.OPERATORS)
    for e in entries:
        assert e["algorithm"] in _C._algorithms()
        assert any(part.startswith("kernels ") for part in e["library"].split(", "))
        # Eager calls use nothing that waits with all SMs.
        keeps_all = e["op"].endswith("all_reduce") and 128 < e["shape"][0] <= 256
        assert not (e["mode"] == "eager" and keeps_all and e["algorithm"] == "fused")
    assert len({_tuning.key(e) for e in entries}) == len(entries)
    assert (_tuning.TABLES / table).read_text() == tune._text(entries), "one entry a line, as `tune.write` has it"


def test_outdated_entries_are_not_taken():
    """An entry is valid for the kernels with which it was measured."""

    def entry(device, algorithm, kernels, m=2048, op="all_gather_matmul"):
        return {"op": op, "shape": [m, 4096, 4096], "dtype": "bfloat16", "tp": 4, "mode": "graph", "device": device,
                "library": _tuning.library(kernels=kernels), "algorithm": algorithm}  # fmt: skip

    h100, h200, other = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "some GPU"
    now, old = tune.KERNELS, tune.KERNELS - 1
    found = tune.current([
        entry(h200, "low_latency", old), entry(h100, "fused", now),  # a GPU of the same architecture has one
        entry(h200, "low_latency", old, m=8192), entry(h100, "fused", old, m=8192),  # none has one
        entry(h200, "p2p", now, m=512), entry(h100, "fused", now, m=512),  # each has its own
        entry(other, "p2p", old), entry(other, "low_latency", now, m=512),
    ])  # fmt: skip
    assert {(e["device"], e["shape"][0]): e["algorithm"] for e in found} == {
        (h200, 2048): "fused", (h100, 2048): "fused", (h200, 512): "p2p", (h100, 512): "fused",
        (other, 512): "low_latency",
    }  # fmt: skip
    shipped = {(e["op"], *e["shape"], e["dtype"], e["tp"], e["mode"]): e["algorithm"]
               for e in tune.current(tune.shipped()) if e["device"] == h200}  # fmt: skip
    assert shipped["all_gather_matmul", 2048, 4096, 4096, "bfloat16", 4, "graph"] == "fused"


def test_entries_of_results(tmp_path):
    """Cases and modes of a result file; the simpler algorithm is selected unless the other is faster by 1 %."""
    rows = [
        {"op": op, "shape": shape[0] if shape else [64, 64, 64], "dtype": dtype, "tp": 2, "mode": mode,
         "algorithm": algorithm, "us": us}
        for op, dtype, mode, times, *shape in (
            ("gemm_rs", "bf16", "graph", {"auto": 1.0, "sequential": 20.0, "p2p": 10.0, "fused": 9.0}),
            ("gemm_rs", "bf16", "eager", {"sequential": 20.0, "p2p": 10.0, "fused": 5.0}),
            ("ag_gemm", "fp8", "eager", {"sequential": 20.0, "p2p": 10.0, "fused": 9.95}),
            ("gemm_ar", "bf16", "graph", {"sequential": 10.0, "p2p": 9.95}, [129, 64, 64]),
            ("gemm_ar", "bf16", "eager", {"sequential": 10.0, "fused": 5.0}, [129, 64, 64]),
            ("gemm_ar", "fp8", "eager", {"sequential": 10.0, "fused": 5.0}, [128, 64, 64]),
            ("all_reduce", "bf16", "graph", {"auto": 1.0}),
            # Cases with only some of the algorithms.
            ("a2a_gemm", "bf16", "graph", {"auto": 1.0, "p2p": 1.0}),
            ("gemm_rs", "bf16", "eager", {"fused": 1.0}, [1, 2, 3]),
            ("gemm_a2a", "bf16", "graph", {"sequential": 1.0}),
        )
        for algorithm, us in times.items()
    ]  # fmt: skip
    path, cache = tmp_path / "result.json", tmp_path / "cache.json"
    path.write_text(json.dumps({"gpu": "some GPU", "torch": "9.9", "rows": rows}))
    found = {(e["op"], e["mode"]): e["algorithm"] for e in tune.entries_of_results(path)}
    assert found == {
        ("matmul_reduce_scatter", "graph"): "fused",
        ("matmul_reduce_scatter", "eager"): "fused",
        ("scaled_all_gather_matmul", "eager"): "p2p",
        ("matmul_all_reduce", "graph"): "sequential",
        ("matmul_all_reduce", "eager"): "sequential",  # not the one that holds all SMs while it waits
        ("scaled_matmul_all_reduce", "eager"): "fused",  # its kernel of few rows leaves some SMs
    }
    done = run_here("tune", "--results", str(path), "--cache", str(cache))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote 6 entries to {cache}; programs read it with TORCH_OVERLAP_TUNE_CACHE={cache}\n"
    assert {(e["device"], e["library"].endswith("torch 9.9")) for e in tune.read(cache)} == {("some GPU", True)}
    assert len(tune.read(cache)) == 6


@pytest.mark.parametrize("is_xdg", [True, False])
def test_programs_read_by_default_what_the_command_writes_by_default(tmp_path, monkeypatch, is_xdg):
    rows = [{"op": "gemm_rs", "shape": [64, 64, 64], "dtype": "bf16", "tp": 2, "mode": "eager", "algorithm": algorithm,
             "us": us} for algorithm, us in (("sequential", 2.0), ("p2p", 1.0))]  # fmt: skip
    results = tmp_path / "result.json"
    results.write_text(json.dumps({"gpu": "cpu", "torch": torch.__version__, "kernels": tune.KERNELS, "rows": rows}))
    folder = tmp_path / ("folder" if is_xdg else ".cache")
    env = {"TORCH_OVERLAP_TUNE_CACHE": None, "XDG_CACHE_HOME": str(folder) if is_xdg else None, "HOME": str(tmp_path)}
    for name, value in env.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    done = run_here("tune", "--results", str(results))
    path = folder / "torch_overlap" / "tune.json"
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"wrote 1 entry to {path}\n")
    assert [e["algorithm"] for e in tune.read(path)] == ["p2p"]
    assert f"measured algorithms:   {path}" in run_here("info").stdout
    tune.write(path, entries_for("p2p"))
    run_ranks(auto_rank, 2, "p2p", "cache", env=env)


def test_the_command(launcher, tmp_path):
    path = tmp_path / "cache.json"
    code, output = launcher.run_ranks(2, "-m", "torch_overlap", "tune", "--shapes", "64x64x64", "32x16x16", "--ops",
                                      "all_gather_matmul", "matmul_all_reduce", "--dtype", "float32", "--rounds", 2,
                                      "--cache", path)  # fmt: skip
    assert code == 0, output
    assert output.count(" us") >= 8
    assert f"wrote 4 entries to {path}; programs read it with TORCH_OVERLAP_TUNE_CACHE={path}" in output
    assert len(tune.read(path)) == 4
    assert all(e["library"] == _tuning.library() and e["tp"] == 2 for e in tune.read(path))


def test_nothing_is_measured_for_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "other.json").write_text("{}")
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # no listener
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    for name, message in (("file/cache.json", "expected a file that can be written in --cache"),
                          ("other.json", "expected measured algorithms of format 3")):  # fmt: skip
        done = run_here("tune", "--shapes", "8x8x8", "--cache", str(tmp_path / name))
        assert done.returncode == 2, done.stderr
        assert message in done.stderr


def test_mistakes_of_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_OVERLAP_TUNE_CACHE", "")
    for args, message in (
        (["--shapes", "64x64"], "expected MxNxK, got '64x64'"),
        (["--shapes", "8x8x8"], "expected a file in --cache, TORCH_OVERLAP_TUNE_CACHE or the folder of XDG_CACHE_HOME"),
        (["--cache", str(tmp_path / "c")], "expected --shapes to measure, or --results to read, got none"),
        (["--shapes", "8x8x8", "--ops", "all_reduce"], "invalid choice"),
    ):
        done = run_here("tune", *args)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr


def test_one_rank_has_nothing_to_measure(launcher, tmp_path):
    code, output = launcher.run_ranks(1, "-m", "torch_overlap", "tune", "--shapes", "8x8x8", "--cache", tmp_path / "c")
    assert code == 2, output
    assert "two or more ranks, got one; start it with torchrun" in output

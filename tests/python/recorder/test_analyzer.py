"""PyTorch's own analyzer on dumps of several ranks."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_overlap as to
from torch_overlap.testing import run_ranks

PREFIX = "trace_rank_"


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The analyzer prints batches with `tabulate`, and fails if that is not installed."""
    from torch.distributed.flight_recorder.components import utils

    monkeypatch.setattr(utils, "tabulate", lambda *args, **kwargs: str(args), raising=False)


def analyze(folder: Path, *options: str) -> Any:
    """Returns the analyzer's database of the dumps in `folder`."""
    from torch.distributed.flight_recorder import fr_trace

    fr_trace.main([str(folder), "--prefix", PREFIX, "-o", str(folder / "database"), *options])
    with open(folder / "database", "rb") as file:
        return pickle.load(file)[1]


def read(folder: Path, rank: int) -> dict[str, Any]:
    with open(folder / f"{PREFIX}{rank}", "rb") as file:
        trace: dict[str, Any] = pickle.load(file)
    return trace


def all_operations(comm: to.TorchComm) -> None:
    size, rank = comm.get_size(), comm.get_rank()
    x = torch.ones(2, 3)
    rows, flat = [x.clone() for _ in range(size)], torch.cat([x] * size)
    uneven = [torch.ones(r + 1) for r in range(size)]
    comm.broadcast(x, 0, False)
    comm.all_reduce(x, to.ReduceOp.MAX, True).wait()
    comm.reduce(x, 1, to.ReduceOp.SUM, False)
    comm.all_gather(rows, x, False)
    comm.all_gather_v(uneven, torch.ones(rank + 1), False)
    comm.all_gather_single(flat, x, False)
    comm.reduce_scatter(x, rows, to.ReduceOp.SUM, False)
    comm.reduce_scatter_v(torch.ones(rank + 1), uneven, to.ReduceOp.SUM, False)
    comm.reduce_scatter_single(x, flat, to.ReduceOp.SUM, False)
    comm.all_to_all([row.clone() for row in rows], rows, False)
    comm.all_to_all_single(flat.clone(), flat, False)
    splits = [2 * size if r == rank else 0 for r in range(size)]
    comm.all_to_all_v_single(flat.clone(), flat, splits, splits, False)
    comm.scatter(x, rows if rank == 0 else [], 0, False)
    comm.gather(rows if rank == 0 else [], x, 0, False)
    comm.gather_single(flat if rank == 0 else None, x, 0, False)
    half = comm.split([r for r in reversed(range(size)) if r % 2 == rank % 2], name=f"half_{rank % 2}")
    assert half is not None
    half.all_reduce(x, to.ReduceOp.SUM, False)
    half.finalize()
    comm.barrier(False)


def all_operations_dumped(comm: to.TorchComm, folder: str) -> None:
    to.flight_recorder.reset()
    all_operations(comm)
    to.flight_recorder.dump(f"{folder}/{PREFIX}{comm.get_rank()}")


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_ranks_that_agree_match_in_every_operation(backend: str, tmp_path: Path) -> None:
    if backend == "local":  # one recorder for all ranks
        to.flight_recorder.reset()
        run_ranks(all_operations, 4, backend=backend)
        assert to.flight_recorder.dump(str(tmp_path / PREFIX)) == [str(tmp_path / f"{PREFIX}{r}") for r in range(4)]
    else:
        run_ranks(all_operations_dumped, 4, str(tmp_path), backend=backend)
    names = [entry["op"] for entry in read(tmp_path, 3)["entries"]]
    assert len(names) == 17
    database = analyze(tmp_path)
    assert [c.collective_name for c in database.collectives if not c.pass_check] == []
    assert len(database.collectives) == 16 + 2
    matched = [c for c in database.collectives if c.group_id.startswith("half")]
    assert {frozenset(c.expected_ranks) for c in matched} == {frozenset({0, 2}), frozenset({1, 3})}


def point_to_point(comm: to.TorchComm, folder: str) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    to.flight_recorder.reset()
    x = torch.ones(3)
    other = rank ^ 1
    for _ in range(2):  # its numbers are those of the surrounding collectives
        if rank < 2:
            comm.send(x, other, False) if rank == 0 else comm.recv(x, other, False)
        comm.all_reduce(x, to.ReduceOp.SUM, False)
    batch = comm.batch_op_create()
    batch.send(x, (rank + 1) % size)
    batch.recv(torch.empty(3), (rank - 1) % size)
    batch.issue(False)
    to.flight_recorder.dump(folder + "/" + PREFIX + str(rank))


def test_messages_and_batches_match(tmp_path: Path) -> None:
    run_ranks(point_to_point, 4, str(tmp_path))
    names = [entry["profiling_name"] for entry in read(tmp_path, 0)["entries"]]
    assert names == [
        *("nccl:send 0->1", "nccl:coalesced", "nccl:all_reduce") * 2,
        *("nccl:send 0->1", "nccl:recv 0<-3", "nccl:coalesced"),
    ]
    database = analyze(tmp_path)
    assert [c.collective_name for c in database.collectives if not c.pass_check] == []


def lonely(rank: int, size: int, store: object, folder: str, fault: str) -> None:
    """The ranks never communicate: the test defines what each of them records."""
    with to.new_comm("fake", torch.device("cpu"), name="tp", rank=rank, size=size) as comm:
        to.flight_recorder.reset()
        x = torch.ones(4)
        comm.all_reduce(x, to.ReduceOp.SUM, False)
        odd = rank == 2
        if fault == "operation" and odd:
            comm.broadcast(x, 0, False)
        elif fault == "size" and odd:
            comm.all_reduce(torch.ones(5), to.ReduceOp.SUM, False)
        elif fault == "dtype" and odd:
            comm.all_reduce(x.double(), to.ReduceOp.SUM, False)
        elif fault != "missing" or not odd:
            comm.all_reduce(x, to.ReduceOp.SUM, False)
        to.flight_recorder.dump(f"{folder}/{PREFIX}{rank}")
        to.flight_recorder.dump(f"{folder}/json/{rank}.json")


def pickled_json(folder: Path) -> Path:
    """Converts the JSON dumps to files that the analyzer loads."""
    for rank in range(4):
        trace = json.loads((folder / "json" / f"{rank}.json").read_text())
        (folder / "json" / f"{PREFIX}{rank}").write_bytes(pickle.dumps(trace))
    return folder / "json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pickle" / "json").mkdir(parents=True)
    return tmp_path / "pickle"


@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("operation", "COLLECTIVE_TYPE_MISMATCH"),
        ("size", "SIZE_OR_SYNTAX_MISMATCH"),
        ("dtype", "COLLECTIVE_DTYPE_MISMATCH"),
    ],
)
def test_a_rank_that_calls_something_else_is_named(fault: str, found: str, form: str, folder: Path) -> None:
    run_ranks(lonely, 4, str(folder), fault, comm=False)
    database = analyze(folder if form == "pickle" else pickled_json(folder))
    (wrong,) = [c for c in database.collectives if not c.pass_check]
    assert wrong.collective_seq_id == 2
    assert wrong.mismatch_collectives.keys() == {2}
    assert wrong.mismatch_collectives[2].type_of_mismatch.state.name == found


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_a_rank_that_does_not_call_is_named(form: str, folder: Path) -> None:
    run_ranks(lonely, 4, str(folder), "missing", comm=False)
    database = analyze(folder if form == "pickle" else pickled_json(folder))
    (late,) = [c for c in database.collectives if c.missing_ranks]
    assert late.missing_ranks == {2}
    assert late.collective_seq_id == 2


def lonely_after_another(rank: int, size: int, store: object, folder: str) -> None:
    if rank != 3:
        return lonely(rank, size, store, folder, "none")
    with to.new_comm("fake", torch.device("cpu"), name="tp", rank=rank, size=size) as earlier:
        pass
    lonely(rank, size, store, folder, "none")
    assert earlier.is_finalized()


def test_a_rank_that_holds_an_earlier_communicator_of_the_name_matches(folder: Path) -> None:
    run_ranks(lonely_after_another, 4, str(folder), comm=False)
    assert all(c.pass_check and not c.missing_ranks for c in analyze(folder).collectives)


def test_a_rank_without_a_dump_is_not_held_against_the_others(folder: Path) -> None:
    run_ranks(lonely, 4, str(folder), "none", comm=False)
    (folder / f"{PREFIX}3").unlink()
    with pytest.raises(AssertionError, match="Missing dump files"):
        analyze(folder)
    database = analyze(folder, "--allow-incomplete-ranks")
    assert not any(c.missing_ranks for c in database.collectives)

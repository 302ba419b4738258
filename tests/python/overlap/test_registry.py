"""Buffers by number: equal parameters give one buffer, numbers are never reused, threads and ranks agree."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from overlap_cases import AG, BULK, PIPELINE, RING, RS

import torch_overlap as to
from torch_overlap import CommOverlapHelper
from torch_overlap.testing import run_ranks

BASE: dict[str, Any] = {"comm_type": RS, "method": PIPELINE, "buffer_shape": (8, 16), "dtype": torch.float32}
# Parameters each of which gives another buffer.
CHANGES: list[dict[str, Any]] = [
    {"comm_type": AG, "method": BULK}, {"method": BULK}, {"method": RING}, {"buffer_shape": (16, 16)},
    {"buffer_shape": (8, 32)}, {"buffer_shape": (16, 8)}, {"dtype": torch.bfloat16}, {"dtype": torch.float64},
    {"num_splits": 3}, {"num_max_streams": 2}, {"comm_cga_size": 1}, {"gemm_priority": -1}, {"comm_priority": -1},
    {"num_comm_sm": 8}, {"set_sm_margin": False}, {"use_ce": True}, {"atomic_gemm": True},
    {"rs_overlap_first_gemm": True},
]  # fmt: skip


def create(comm: to.TorchComm, **changes: Any) -> int:
    return to.create_comm_overlap_buffer(comm, **{**BASE, **changes})


def run_equal(comm: to.TorchComm) -> None:
    before = set(to.comm_overlap_buffers())
    first = create(comm)
    assert first > 0
    assert create(comm) == first
    # Explicit defaults are equal to omitted parameters.
    assert create(comm, tp_size=comm.get_size(), num_splits=4, num_max_streams=3, use_ce=False) == first
    entry = to.comm_overlap_buffers()[first]
    assert (entry.comm, entry.holds) == (comm.get_name(), 3)
    assert entry.config == to.comm_overlap_buffer(first).config
    others = [create(comm, **change) for change in CHANGES]
    assert len({first, *others}) == len(CHANGES) + 1
    assert others == sorted(others)
    assert [create(comm, **change) for change in CHANGES] == others
    ways: list[dict[str, Any]] = [{}, {"aggregate_ag": True}, {"relay_ag": True}]
    ring = [create(comm, comm_type=AG, method=RING, **way) for way in ways]
    assert len({*ring, *others, first}) == len(CHANGES) + 4
    for id, change in zip(others, CHANGES, strict=True):
        buffer = to.comm_overlap_buffer(id)
        method = change.get("method", PIPELINE)
        assert buffer.config.buffer_shape == list(change.get("buffer_shape", (8, 16)))
        assert type(buffer) is (to.CommOverlapP2PBase if method == RING else to.CommOverlapBase)
        for name in change:
            if name not in ("comm_type", "method", "buffer_shape", "dtype"):
                assert getattr(buffer.config, name) == change[name]
    for _ in range(2):
        to.destroy_comm_overlap_buffer(first)
        assert to.comm_overlap_buffer(first) is to.comm_overlap_buffer(first)
    to.destroy_comm_overlap_buffer(first)
    assert first not in to.comm_overlap_buffers()
    again = create(comm)
    assert again > max(first, *others, *ring)
    for id in (*others, *others, *ring, again):
        to.destroy_comm_overlap_buffer(id)
    assert set(to.comm_overlap_buffers()) == before


@pytest.mark.parametrize("backend", ["gloo", "fake"])
def test_equal_parameters_are_one_buffer_and_any_other_is_another(backend: str) -> None:
    run_ranks(run_equal, 2, backend=backend)


def run_dead(comm: to.TorchComm) -> None:
    id = create(comm)
    buffer = to.comm_overlap_buffer(id)
    to.destroy_comm_overlap_buffer(id)
    for dead in (id, 0, -1, id + 1000, 1 << 60):
        why = ", which was destroyed" if dead == id else ""
        with pytest.raises(
            to.InvalidValueError,
            match=rf"destroy_comm_overlap_buffer: expected the id of a live buffer, got {dead}{why}",
        ):
            to.destroy_comm_overlap_buffer(dead)
        why = why or r"; make one with create_comm_overlap_buffer\(\)"
        with pytest.raises(
            to.InvalidValueError, match=rf"expected comm_overlap_id to be the id of a live buffer, got {dead}{why}$"
        ):
            to.comm_overlap_buffer(dead)
    # A holder of the object can still use it.
    out = torch.full((8 // comm.get_size(), 16), -1.0)
    buffer.split_overlap_rs(torch.ones(16, 4), True, torch.ones(8, 4), False, None, rs_output=out)
    assert (out == 4 * comm.get_size()).all()


def test_unknown_and_dead_numbers_are_named() -> None:
    run_ranks(run_dead, 2)


def run_all(comm: to.TorchComm) -> None:
    to.destroy_all_comm_overlap_buffers()
    half = comm.split([comm.get_rank()], f"half{comm.get_rank()}")
    ids = [create(one, **change) for one in (comm, half) for change in CHANGES[:5] for _ in range(2)]
    assert len(set(ids)) == 10
    names = {entry.comm for entry in to.comm_overlap_buffers().values()}
    assert names == {comm.get_name(), half.get_name()}
    assert all(entry.holds == 2 for entry in to.comm_overlap_buffers().values())
    to.destroy_all_comm_overlap_buffers()
    assert to.comm_overlap_buffers() == {}
    to.destroy_all_comm_overlap_buffers()
    with pytest.raises(to.InvalidValueError, match=rf"got {ids[0]}, which was destroyed"):
        to.destroy_comm_overlap_buffer(ids[0])
    later = create(comm)
    assert later > max(ids)
    to.destroy_comm_overlap_buffer(later)
    half.finalize()


def test_destroy_all() -> None:
    run_ranks(run_all, 2)


def run_comms(comm: to.TorchComm) -> None:
    """The same parameters on two communicators, and on one that has the name of another."""
    first = comm.split(list(range(comm.get_size())), "again")
    ids = [create(comm), create(first)]
    first.finalize()
    del first
    gc.collect()
    second = comm.split(list(range(comm.get_size())), "again")
    ids.append(create(second))
    assert len(set(ids)) == 3
    out = torch.full((8 // comm.get_size(), 16), -1.0)
    for id in (ids[0], ids[2]):
        to.comm_overlap_buffer(id).split_overlap_rs(
            torch.ones(16, 4), True, torch.ones(8, 4), False, None, rs_output=out
        )
        assert (out == 4 * comm.get_size()).all()
    with pytest.raises(to.StateError):
        to.comm_overlap_buffer(ids[1]).split_overlap_rs(
            torch.ones(16, 4), True, torch.ones(8, 4), False, None, rs_output=out
        )
    for id in ids:
        to.destroy_comm_overlap_buffer(id)
    id = create(second)
    second.finalize()
    with pytest.raises(
        to.StateError, match="CommOverlap: expected a live communicator, got 'again', which is finalized"
    ):
        create(second)
    to.destroy_comm_overlap_buffer(id)


def test_each_communicator_has_its_own() -> None:
    run_ranks(run_comms, 2)


def run_ranks_as_threads(comm: to.TorchComm) -> list[int]:
    """Ranks are threads of one process here: each has a buffer and a number of its own."""
    ids = [create(comm, num_max_streams=1 + i) for i in range(8)]
    assert [create(comm, num_max_streams=1 + i) for i in range(8)] == ids
    comm.barrier(async_op=False)
    out = torch.full((8 // comm.get_size(), 16), -1.0)
    for id in ids:
        to.comm_overlap_buffer(id).split_overlap_rs(
            torch.ones(16, 4), True, torch.ones(8, 4), False, None, rs_output=out
        )
        assert (out == 4 * comm.get_size()).all()
    for id in ids * 2:
        to.destroy_comm_overlap_buffer(id)
    return ids


def test_ranks_as_threads() -> None:
    ids = run_ranks(run_ranks_as_threads, 4, backend="local")
    assert len({id for own in ids for id in own}) == 32


def at_once(*bodies: Any) -> list[Any]:
    """Returns the results of functions that run concurrently."""
    barrier, results = threading.Barrier(len(bodies)), {}

    def run(i: int) -> None:
        barrier.wait()
        try:
            results[i] = bodies[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[i] for i in range(len(bodies))]


def run_threads(comm: to.TorchComm) -> None:
    """Many threads create an existing buffer, look it up, list all and destroy it, all concurrently."""
    mine = create(comm)

    def body(seed: int) -> None:
        for _ in range(200):
            assert create(comm) == mine
            assert to.comm_overlap_buffers()[mine].holds >= 2
            assert to.comm_overlap_buffer(mine).get_tp_size() == comm.get_size()
            with pytest.raises(to.InvalidValueError):
                to.destroy_comm_overlap_buffer(-seed)
            to.destroy_comm_overlap_buffer(mine)

    results = at_once(*[lambda i=i: body(i) for i in range(8)])
    assert results == [None] * 8, results
    assert to.comm_overlap_buffers()[mine].holds == 1
    to.destroy_comm_overlap_buffer(mine)


def test_threads() -> None:
    run_ranks(run_threads, 2)


def run_first_threads(comm: to.TorchComm) -> None:
    """Threads request a buffer that does not exist yet."""
    for turn in range(5):
        ids = at_once(*[lambda: create(comm, buffer_shape=(8, 16 + turn))] * 4)  # noqa: B023  (called here)
        assert set(ids) == {ids[0]}, ids
        assert to.comm_overlap_buffers()[ids[0]].holds == 4
        for id in ids:
            to.destroy_comm_overlap_buffer(id)


def test_equal_requests_at_once_get_one_buffer() -> None:
    run_ranks(run_first_threads, 2)
    run_ranks(run_first_threads, 1)


def run_threads_of_two_communicators(comm: to.TorchComm) -> None:
    """The threads of each rank run in another order."""
    comms = [comm, comm.split(list(range(comm.get_size())), "other")]
    order = comms if comm.get_rank() == 0 else comms[::-1]
    for _ in range(5):
        ids = at_once(*[lambda c=c: create(c) for c in order])
        assert all(isinstance(id, int) for id in ids), ids
        assert len(set(ids)) == 2
        for id in ids:
            to.destroy_comm_overlap_buffer(id)
    comms[1].finalize()


def test_threads_of_two_communicators_do_not_hold_each_other_up() -> None:
    run_ranks(run_threads_of_two_communicators, 2)


def run_helper(comm: to.TorchComm) -> None:
    off = CommOverlapHelper()
    assert not off.is_enabled
    assert off.create(comm) == 0
    helper = CommOverlapHelper(AG, RING, (8, 16), torch.float32, num_comm_sm=2, num_max_streams=5, atomic_gemm=True)
    assert helper.is_enabled
    id = helper.create(comm)
    assert helper.create(comm) == id
    config = to.comm_overlap_buffer(id).config
    assert (config.num_comm_sm, config.num_max_streams, config.atomic_gemm) == (2, 5, True)
    # The rest are the defaults of the method.
    assert (config.num_splits, config.use_ce, config.set_sm_margin, config.comm_cga_size) == (
        comm.get_size(),
        True,
        False,
        1,
    )
    assert "RING_EXCHANGE" in repr(config)
    assert repr(config.buffer_shape) in repr(config)
    pipeline = to.CommOverlapConfig(RS, PIPELINE, [8, 16], torch.float32, 2)
    assert (pipeline.num_splits, pipeline.use_ce, pipeline.set_sm_margin) == (4, False, True)
    assert (pipeline.num_comm_sm, pipeline.comm_cga_size) == (16, 2)
    assert pipeline != config
    # Only kernels have clusters: a gather with copy engines has no kernel, but a sum has one.
    for kind, use_ce, cluster in ((AG, True, 1), (AG, False, 2), (RS, True, 2), (to.CommOverlapType.NONE, True, 2)):
        bulk = to.CommOverlapConfig(kind, BULK, [8, 16], torch.float32, 2, use_ce=use_ce)
        assert (bulk.use_ce, bulk.comm_cga_size) == (use_ce, cluster)
    to.CommOverlapBase(comm, to.CommOverlapConfig(RS, BULK, [8, 16], torch.float32, 2, use_ce=True, comm_cga_size=4))
    to.destroy_comm_overlap_buffer(id)
    to.destroy_comm_overlap_buffer(id)


def test_helper() -> None:
    run_ranks(run_helper, 2)


def run_wrong(comm: to.TorchComm) -> None:
    before = to.comm_overlap_buffers().keys()
    with pytest.raises(to.InvalidValueError, match="CommOverlap: expected num_splits"):
        create(comm, num_splits=0)
    with pytest.raises(to.InvalidValueError, match="CommOverlap: expected the same on all ranks"):
        create(comm, num_splits=1 + comm.get_rank())
    with pytest.raises(to.InvalidValueError, match="CommOverlap: expected tp_size to be the size of the group"):
        create(comm, tp_size=7)
    with pytest.raises(TypeError):
        create(comm, dtype="float32")
    assert to.comm_overlap_buffers().keys() == before


def test_what_was_refused_has_no_number() -> None:
    run_ranks(run_wrong, 2)


def test_numbers_of_the_enums() -> None:
    """The numbers are those of Transformer Engine's JAX extension, and one more."""
    assert [(e.name, int(e)) for e in to.CommOverlapType] == [("NONE", 0), ("RS", 1), ("AG", 2)]
    assert [int(e) for e in to.CommOverlapMethod] == [0, 1, 2, 3]
    assert [e.name for e in to.CommOverlapMethod] == ["NONE", "BULK", "PIPELINE", "RING_EXCHANGE"]
    assert {e.name: int(e) for e in to.CommOverlapAlgo} == {
        "NO_OVERLAP": 0,
        "BULK_OVERLAP_AG": 1,
        "BULK_OVERLAP_RS": 2,
        "SPLIT_PIPELINED_AG_P2P": 3,
        "SPLIT_PIPELINED_RS": 4,
        "SPLIT_PIPELINED_RS_P2P": 5,
        "ATOMIC_GEMM_RS": 6,
        "ATOMIC_GEMM_AG_P2P": 7,
        "ATOMIC_GEMM_RS_P2P": 8,
        "EXTERNAL_BULK_OVERLAP_AG": 9,
    }


def run_algos(comm: to.TorchComm) -> None:
    size = comm.get_size()
    for algo in to.CommOverlapAlgo:
        if algo == to.CommOverlapAlgo.NO_OVERLAP:
            with pytest.raises(to.InvalidValueError, match="CommOverlapConfig: expected algo to be one that overlaps"):
                to.CommOverlapConfig.of_algo(algo, [8, 16], torch.float32, size)
            continue
        config = to.CommOverlapConfig.of_algo(algo, [8, 16], torch.float32, size)
        is_ring = config.method == RING
        assert config.atomic_gemm == algo.name.startswith("ATOMIC")
        assert config.comm_type == (AG if "_AG" in algo.name else RS)
        assert is_ring == algo.name.endswith("P2P")
        buffer = (to.CommOverlapP2PBase if is_ring else to.CommOverlapBase)(comm, config)
        assert algo in buffer.algos
        assert buffer.algos == config.algos
        assert (len(buffer.algos) > 1) == (algo.name in ("BULK_OVERLAP_AG", "EXTERNAL_BULK_OVERLAP_AG"))
    either = to.CommOverlapConfig(to.CommOverlapType.NONE, BULK, [8, 16], torch.float32, size)
    assert {algo.name for algo in either.algos} == {"BULK_OVERLAP_AG", "BULK_OVERLAP_RS", "EXTERNAL_BULK_OVERLAP_AG"}


def test_algorithms_make_buffers_that_have_them() -> None:
    run_ranks(run_algos, 2)

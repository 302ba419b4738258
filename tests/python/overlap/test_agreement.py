"""Parameters that differ between ranks: an error on all of them that shows both values, for every way to make a
buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from overlap_cases import AG, BULK, PIPELINE, RING, RS, Scatter, store_group

import torch_overlap as to
from torch_overlap import CommOverlapType as Type
from torch_overlap.testing import run_ranks

PIPELINED: dict[str, Any] = {"comm_type": RS, "method": PIPELINE, "buffer_shape": [8, 16], "dtype": torch.float32}
GATHERED = {**PIPELINED, "comm_type": AG, "method": RING}
BESIDE = {**PIPELINED, "comm_type": AG, "method": BULK}
# Every parameter: the value of all ranks but one, and the value of that one.
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "comm_type": (BESIDE, Type.NONE),
    "method": (PIPELINED, BULK),
    "buffer_shape": (PIPELINED, [8, 32]),
    "dtype": (PIPELINED, torch.float64),
    "num_splits": (PIPELINED, 2),
    "num_max_streams": (PIPELINED, 2),
    "comm_cga_size": (PIPELINED, 1),
    "gemm_priority": (PIPELINED, 1),
    "comm_priority": (PIPELINED, -1),
    "num_comm_sm": (PIPELINED, 8),
    "set_sm_margin": (PIPELINED, False),
    "use_ce": (PIPELINED, True),
    "atomic_gemm": (PIPELINED, True),
    "rs_overlap_first_gemm": (PIPELINED, True),
    "aggregate_ag": (GATHERED, True),
    "relay_ag": (GATHERED, True),
}


def config_of(size: int, parameters: dict[str, Any]) -> to.CommOverlapConfig:
    given = {"tp_size": size, **parameters}
    first = [given.pop(name) for name in ("comm_type", "method", "buffer_shape", "dtype", "tp_size")]
    return to.CommOverlapConfig(*first, **given)


def make_buffer(ranks: Any, parameters: dict[str, Any], by_number: bool) -> Any:
    if by_number:
        return to.create_comm_overlap_buffer(ranks, **parameters)
    config = config_of(ranks.get_size(), parameters)
    return (to.CommOverlapP2PBase if config.method == RING else to.CommOverlapBase)(ranks, config)


def shown(config: to.CommOverlapConfig, name: str) -> str:
    if name == "dtype":
        return f"buffer_dtype={config.buffer_dtype} "
    value = getattr(config, name)
    text = int(value) if isinstance(value, bool) else getattr(value, "name", value)
    return f"{name}={text} "


def check(ranks: Any, name: str, odd: int, seed: int, by_number: bool = False) -> None:
    """Rank `odd` has another value; afterwards the ranks match as before."""
    rank, size = ranks.get_rank(), ranks.get_size()
    base, value = CHANGES[name]
    changed = {**base, name: value}
    with pytest.raises(to.InvalidValueError, match=r"^CommOverlap: expected the same on all ranks, got ") as info:
        make_buffer(ranks, changed if rank == odd else base, by_number)
    first, other = str(info.value).removesuffix(f" on rank {odd or 1}").split(" on rank 0 and ")
    for text, parameters in zip((first, other), (base, changed) if odd else (changed, base), strict=True):
        assert shown(config_of(size, parameters), name) in text + " ", (name, text)
    Scatter(ranks, PIPELINE).step(seed)


def run_comm(comm: to.TorchComm, name: str, seed: int) -> None:
    before = to.comm_overlap_buffers().keys()
    for odd in (0, comm.get_size() - 1):
        for by_number in (False, True):
            check(comm, name, odd, seed, by_number)
    if comm.get_backend() != "local":  # threads of one process share the numbers
        assert to.comm_overlap_buffers().keys() == before


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("local", 4)])
@pytest.mark.parametrize("name", list(CHANGES))
def test_over_a_communicator(name: str, backend: str, size: int, seed: int) -> None:
    run_ranks(run_comm, size, name, seed, backend=backend)


def run_callbacks(rank: int, size: int, store: Any, seed: int) -> None:
    group = store_group(rank, size, store)
    for name in CHANGES:
        check(group, name, size - 1, seed)


def test_over_callbacks(seed: int) -> None:
    run_ranks(run_callbacks, 2, seed, comm=False, timeout=120)


def run_tp_size(comm: to.TorchComm, seed: int) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    last = size - 1
    for by_number in (False, True):
        told = "" if rank == last else f"rank {last} could not take part: CommOverlap: "
        match = f"^CommOverlap: {told}expected tp_size to be the size of the group, {size}, got {size + 1}; split"
        with pytest.raises(to.InvalidValueError, match=match):
            make_buffer(comm, {**PIPELINED, "tp_size": size + (rank == last)}, by_number)
        Scatter(comm, PIPELINE).step(seed)


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_the_number_of_ranks(backend: str, seed: int) -> None:
    run_ranks(run_tp_size, 2, seed, backend=backend)


def run_class(comm: to.TorchComm, seed: int) -> None:
    """The last rank uses the wrong class."""
    rank, size = comm.get_rank(), comm.get_size()
    for cls, parameters, got in (
        (to.CommOverlapBase, GATHERED, "CommOverlapBase: expected method BULK or PIPELINE, got RING_EXCHANGE; use"),
        (to.CommOverlapP2PBase, PIPELINED, "CommOverlapP2PBase: expected method RING_EXCHANGE, got PIPELINE; use"),
    ):
        told = "" if rank == size - 1 else f"CommOverlap: rank {size - 1} could not take part: "
        fitting = to.CommOverlapP2PBase if cls is to.CommOverlapBase else to.CommOverlapBase
        with pytest.raises(to.InvalidValueError, match=f"^{told}{got}"):
            (cls if rank == size - 1 else fitting)(comm, config_of(size, parameters))
        Scatter(comm, PIPELINE).step(seed)


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_the_class_of_a_method(backend: str, seed: int) -> None:
    run_ranks(run_class, 3, seed, backend=backend)


def test_every_parameter_is_here() -> None:
    """Parameters of create_comm_overlap_buffer and of the configuration."""
    config = to.CommOverlapConfig(RS, PIPELINE, [8, 16], torch.float32, 2)
    fields = {word.partition("=")[0] for word in repr(config).split()[1:] if "=" in word}
    assert fields == {"buffer_dtype" if name == "dtype" else name for name in CHANGES} | {"tp_size"}

"""Unsupported calls of a class, and invalid parameters of a buffer: refused on all ranks, with the same message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlap_cases import AG, BULK, PIPELINE, RING, RS, Scatter, make

import torch_overlap as to
from torch_overlap import CommOverlapMethod as Method
from torch_overlap import CommOverlapType as Type
from torch_overlap.testing import run_ranks

META = torch.device("meta")
Bad = tuple[Callable[[], Any], type[Exception], str]


def t(*shape: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, device=device).to(dtype)


# --- Support by class -----------------------------------------------------------------------------------------------

BUFFERS = [(Type.NONE, BULK), (AG, BULK), (RS, BULK), (RS, PIPELINE), (AG, RING), (RS, RING)]
SUPPORTED = {
    "bulk_overlap": [(Type.NONE, BULK), (AG, BULK), (RS, BULK), (RS, PIPELINE)],
    "bulk_overlap_external_ag": [(Type.NONE, BULK), (AG, BULK)],
    "split_overlap_ag": [(AG, RING)],
    "split_overlap_rs": [(RS, PIPELINE), (RS, RING)],
    "atomic_gemm_overlap_ag": [(AG, RING)],
    "atomic_gemm_overlap_rs": [(RS, PIPELINE), (RS, RING)],
}


def run_table(comm: to.TorchComm) -> None:
    for kind, method in BUFFERS:
        buffer = make(comm, kind, method, (8, 16), torch.float32)
        for name, supported in SUPPORTED.items():
            args: tuple[Any, ...] = (buffer,) if "external" in name else (t(16, 16), True, None, False, None)
            if (kind, method) not in supported:
                with pytest.raises(to.UnsupportedError, match=rf"^{name}: Operation not supported") as info:
                    getattr(buffer, name)(*args)
                assert method.name in str(info.value)
            elif "atomic" in name:
                match = (
                    f"{name}: expected a buffer made with atomic_gemm, got one without; use split_overlap_{name[-2:]}"
                )
                with pytest.raises(to.StateError, match=match):
                    getattr(buffer, name)(*args)
        assert buffer.is_p2p_overlap() is (method == RING)
        assert buffer.last_path() == ""


@pytest.mark.parametrize("backend", ["gloo", "local", "fake"])
def test_what_a_class_does_not_have_says_so(backend: str) -> None:
    run_ranks(run_table, 2, backend=backend)


def test_the_base_of_the_classes_is_not_made() -> None:
    assert issubclass(to.CommOverlapBase, to.CommOverlapCore)
    assert issubclass(to.CommOverlapP2PBase, to.CommOverlapCore)
    with pytest.raises(TypeError, match="CommOverlapCore: No constructor defined"):
        to.CommOverlapCore()


# --- Parameters of a buffer -----------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"comm_type": RS, "method": PIPELINE, "buffer_shape": [8, 16], "buffer_dtype": torch.float32}
CONFIGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "method": (
        {"method": Method.NONE},
        to.InvalidValueError,
        r"invalid method: expected BULK \(1\), PIPELINE \(2\) or RING_EXCHANGE \(3\), got 0",
    ),
    "type": (
        {"comm_type": Type.NONE},
        to.InvalidValueError,
        "invalid collective type: expected RS or AG for PIPELINE, got NONE",
    ),
    "ring type": (
        {"comm_type": Type.NONE, "method": RING},
        to.InvalidValueError,
        "invalid collective type: expected RS or AG for RING_EXCHANGE, got NONE",
    ),
    "pipeline ag": (
        {"comm_type": AG},
        to.UnsupportedError,
        "expected RS for PIPELINE, got AG. .*use RING_EXCHANGE or BULK",
    ),
    "one dimension": ({"buffer_shape": [8]}, to.InvalidValueError, r"to be \[tokens, features\], got \[8\]"),
    "three dimensions": ({"buffer_shape": [2, 8, 8]}, to.InvalidValueError, r"got \[2, 8, 8\]"),
    "none": ({"buffer_shape": []}, to.InvalidValueError, r"got \[\]"),
    "no tokens": (
        {"buffer_shape": [0, 8]},
        to.InvalidValueError,
        r"expected sizes in \[1, 2\^31\) in buffer_shape, got",
    ),
    "many tokens": ({"buffer_shape": [1 << 31, 8]}, to.InvalidValueError, r"expected sizes in \[1, 2\^31\)"),
    "many bytes": (
        {"buffer_shape": [1 << 30, 1 << 30], "buffer_dtype": torch.float64},
        to.InvalidValueError,
        r"expected a buffer of at most 2\^47 bytes, got buffer_shape \[1073741824, 1073741824\] of torch.float64",
    ),
    "negative": ({"buffer_shape": [8, -8]}, to.InvalidValueError, r"expected sizes in \[1, 2\^31\)"),
    "dtype": (
        {"buffer_dtype": torch.int64},
        to.InvalidTypeError,
        "expected buffer_dtype to be one of float64, .*got torch.int64",
    ),
    "bytes": (
        {"buffer_dtype": torch.uint8},
        to.InvalidTypeError,
        "expected a floating-point buffer_dtype for RS, got uint8",
    ),
    "tp_size 0": ({"tp_size": 0}, to.InvalidValueError, r"expected tp_size in \[1, 65536\], got 0"),
    "splits": ({"num_splits": 0}, to.InvalidValueError, r"expected num_splits in \[1, 64\], got 0"),
    "many splits": ({"num_splits": 65}, to.InvalidValueError, r"expected num_splits in \[1, 64\], got 65"),
    "streams": ({"num_max_streams": 33}, to.InvalidValueError, r"expected num_max_streams in \[1, 32\], got 33"),
    "cluster": ({"comm_cga_size": 9}, to.InvalidValueError, r"expected comm_cga_size in \[1, 8\], got 9"),
    "no SM": ({"num_comm_sm": 0}, to.InvalidValueError, r"expected num_comm_sm in \[1, 1024\], got 0"),
    "SMs of a cluster": (
        {"num_comm_sm": 6, "comm_cga_size": 4},
        to.InvalidValueError,
        "expected num_comm_sm to be a multiple of comm_cga_size 4, got 6",
    ),
    "cluster of copy engines": (
        {"method": RING, "comm_cga_size": 2, "num_comm_sm": 2, "use_ce": True},
        to.UnsupportedError,
        "expected comm_cga_size 1 where copy engines carry the data, got 2; use_ce=False moves it with kernels",
    ),
    "cluster of copy engines beside a product": (
        {"method": BULK, "comm_type": AG, "comm_cga_size": 4, "use_ce": True},
        to.UnsupportedError,
        "expected comm_cga_size 1 where copy engines carry the data, got 4; use_ce=False moves it with kernels",
    ),
    "aggregate": (
        {"aggregate_ag": True},
        to.InvalidValueError,
        "expected RING_EXCHANGE and AG with aggregate_ag, got PIPELINE",
    ),
    "aggregate rs": ({"aggregate_ag": True, "method": RING}, to.InvalidValueError, "got RING_EXCHANGE and RS"),
    "odd": (
        {"aggregate_ag": True, "method": RING, "comm_type": AG},
        to.InvalidValueError,
        "expected an even tp_size with aggregate_ag, got 3",
    ),
    "relay": ({"relay_ag": True}, to.InvalidValueError, "expected RING_EXCHANGE and AG with relay_ag, got PIPELINE"),
    "relay of pairs": (
        {"aggregate_ag": True, "relay_ag": True, "method": RING, "comm_type": AG, "tp_size": 2},
        to.UnsupportedError,
        "expected aggregate_ag or relay_ag, got both",
    ),
    "atomic bulk": (
        {"method": BULK, "atomic_gemm": True},
        to.InvalidValueError,
        "expected PIPELINE or RING_EXCHANGE with atomic_gemm, got BULK",
    ),
    "tp_size": (
        {"tp_size": 4},
        to.InvalidValueError,
        "expected tp_size to be the size of the group, 3, got 4; split the communicator first",
    ),
}


def config_of(comm: to.TorchComm, **changes: Any) -> to.CommOverlapConfig:
    return to.CommOverlapConfig(**{**GOOD, "tp_size": comm.get_size(), **changes})


def refuse_config(comm: to.TorchComm, changes: dict[str, Any], error: type[Exception], match: str) -> None:
    """Invalid on all ranks, then on the last one; a valid call follows at once."""
    config = config_of(comm, **changes)
    cls = to.CommOverlapP2PBase if config.method == RING else to.CommOverlapBase
    with pytest.raises(error, match=rf"^CommOverlap: .*{match}"):
        cls(comm, config)
    wrong = comm.get_rank() == comm.get_size() - 1
    told = match if wrong else f"rank {comm.get_size() - 1} could not take part: CommOverlap: .*{match}"
    with pytest.raises(error, match=rf"^CommOverlap: .*{told}"):
        cls(comm, config) if wrong else to.CommOverlapBase(comm, config_of(comm))


def run_configs(comm: to.TorchComm, seed: int, names: list[str]) -> None:
    for i, name in enumerate(names):
        try:
            refuse_config(comm, *CONFIGS[name])
            Scatter(comm, PIPELINE, torch.float32).step(seed + i)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_wrong_parameters_are_refused_on_all_ranks(backend: str, seed: int) -> None:
    run_ranks(run_configs, 3, seed, list(CONFIGS), backend=backend, timeout=120)

"""Effects of a buffer's options: the products, their streams and their order, read from the log."""

from __future__ import annotations

import copy
import pickle
import random
import re
from typing import Any

import torch
from overlap_cases import AG, PIPELINE, RING, RS, logged, make

import torch_overlap as to
from torch_overlap.testing import run_ranks

LOG = {"TORCH_OVERLAP_LOG_CHUNKS": "1"}
ROWS, K, N = 4, 8, 96  # rows of a rank


def log_of(comm: to.TorchComm, gathers: bool, method: Any, mapped: bool = True, **options: Any) -> list[str]:
    """Returns the operations of one call in order: "rows x columns on stream", "exchange" or "sum"."""
    size = comm.get_size()
    pretence = None if mapped else to._C._PretendUnreachable()
    tokens = ROWS * size
    buffer = make(comm, AG if gathers else RS, method, (tokens, K if gathers else N), torch.float64, **options)
    del pretence
    x, w = torch.ones(ROWS if gathers else tokens, K).double(), torch.ones(N, K).double()
    out = torch.empty(tokens if gathers else ROWS, N).double()
    if gathers:
        log = logged(lambda: buffer.split_overlap_ag(w, True, x, False, out))
    else:
        log = logged(lambda: buffer.split_overlap_rs(w, True, x, False, None, rs_output=out))
    assert (out == (K if gathers else K * size)).all()
    found = re.findall(r"product (\d+) x (\d+) x \d+ on stream (\d+)|(to rank)|(sum of)", log)
    return [
        "exchange" if moved else "sum" if summed else f"{m} x {n} on {stream}" for m, n, stream, moved, summed in found
    ]


def products(log: list[str]) -> list[str]:
    return [line for line in log if " on " in line]


def run_splits(comm: to.TorchComm) -> None:
    for splits in (1, 2, 3, 6):
        want = [f"{2 * ROWS} x {N // splits} on {i % 3}" for i in range(splits)]
        assert products(log_of(comm, False, PIPELINE, num_splits=splits)) == want
    # A piece has at least 8 columns, which products with block scales need: all ranks split alike.
    assert len(products(log_of(comm, False, PIPELINE, num_splits=64))) == -(-N // 8)
    for splits in (1, 5):  # one chunk per rank
        assert len(products(log_of(comm, True, RING, num_splits=splits))) == 2


def test_num_splits_is_the_number_of_products_of_a_pipeline() -> None:
    run_ranks(run_splits, 2, env=LOG)


def run_streams(comm: to.TorchComm) -> None:
    for streams in (1, 2, 3, 8):
        expected = [i % min(streams, 4) for i in range(4)]
        for gathers, method in ((True, RING), (False, RING), (False, PIPELINE)):
            log = products(log_of(comm, gathers, method, num_max_streams=streams))
            assert [int(line.split()[-1]) for line in log] == expected


def test_num_max_streams_is_how_many_products_run_side_by_side() -> None:
    run_ranks(run_streams, 4, env=LOG)


def run_aggregate(comm: to.TorchComm) -> None:
    for aggregate, count in ((False, 4), (True, 2)):
        log = log_of(comm, True, RING, aggregate_ag=aggregate)
        assert [line.split(" on ")[0] for line in products(log)] == [f"{4 // count * ROWS} x {N}"] * count
        assert log.count("exchange") == 3  # chunks are sent one by one


def test_aggregate_ag_makes_half_as_many_products_of_two_chunks() -> None:
    run_ranks(run_aggregate, 4, env=LOG)


def run_sums(comm: to.TorchComm) -> None:
    buffer = make(comm, RS, PIPELINE, (2 * ROWS, N), torch.float64, num_splits=3)
    x, w = torch.ones(2 * ROWS, K).double(), torch.ones(N, K).double()
    out = torch.empty(ROWS, N).double()
    log = logged(lambda: buffer.split_overlap_rs(w, True, x, False, None, rs_output=out))
    assert re.findall(r"sum of (\d+) parts of (\d+) x (\d+)", log) == [("2", str(ROWS), str(N // 3))] * 3
    assert len(re.findall("product", log)) == 3


def test_sums_from_the_memory_of_others_are_logged_too() -> None:
    run_ranks(run_sums, 2, env=LOG)


def run_first(comm: to.TorchComm) -> None:
    """Two ranks that do not sum from each other's memory have one exchange per piece; otherwise there are only sums."""
    for mapped in (False, True):
        orders = {}
        for first in (False, True):
            log = log_of(comm, False, PIPELINE, mapped, num_splits=4, rs_overlap_first_gemm=first)
            kinds = {"exchange": "R", "sum": "S"}
            orders[first] = "".join(kinds.get(line, "G") for line in log)
        wanted = {False: "GRGRGRGR", True: "GGRGRGRR"}
        assert orders == {k: v.replace("R", "S" if mapped else "RS") for k, v in wanted.items()}


def test_rs_overlap_first_gemm_issues_a_product_before_the_reduction_of_the_one_before_it() -> None:
    run_ranks(run_first, 2, env=LOG)


def test_a_configuration_is_copied_and_pickled(seed: int) -> None:
    rng = random.Random(seed)
    types, methods = list(to.CommOverlapType), list(to.CommOverlapMethod)
    flags = ("set_sm_margin", "use_ce", "atomic_gemm", "rs_overlap_first_gemm", "aggregate_ag", "relay_ag")
    numbers = ("num_splits", "num_max_streams", "comm_cga_size", "gemm_priority", "comm_priority", "num_comm_sm")
    for _ in range(20):
        options = {name: rng.random() < 0.5 for name in flags} | {name: rng.randrange(1, 9) for name in numbers}
        shape, dtype = [rng.randrange(999), rng.randrange(999)], rng.choice([torch.bfloat16, torch.uint8])
        config = to.CommOverlapConfig(rng.choice(types), rng.choice(methods), shape, dtype, 4, **options)  # type: ignore[arg-type]
        for again in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
            assert again == config
            assert repr(again) == repr(config)
            assert {name: getattr(again, name) for name in options} == options
            assert (again.buffer_shape, again.buffer_dtype, again.tp_size) == (shape, dtype, 4)
            assert (again.comm_type, again.method) == (config.comm_type, config.method)

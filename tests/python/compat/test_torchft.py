"""torchft's reconfigurable process group over our backend."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_overlap.testing import run_ranks


def reconfigured(rank: int, size: int, store: Any, seed: int) -> None:
    from torch_overlap.compat.torchft import process_group

    group = process_group(timedelta(seconds=30))
    assert group.getBackendName() == "torch_overlap"
    addresses = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    if addresses is not None:
        store.set("port", str(addresses.port))
    address = f"127.0.0.1:{int(store.get('port'))}"
    for quorum, ranks in ((1, size), (2, size - 1), (3, size)):
        if rank < ranks:
            group.configure(f"{address}/{quorum}", f"replica_{rank}", rank, ranks, quorum_id=quorum)
            x = torch.full((5,), float(rank + seed % 7), dtype=torch.float64)
            work = group.allreduce([x], dist.AllreduceOptions())
            work.wait()
            assert torch.equal(x, torch.full_like(x, float(sum(r + seed % 7 for r in range(ranks)))))
            assert group.size() == ranks
        store.add(f"done_{quorum}", 1)
        while store.add(f"done_{quorum}", 0) < size:
            pass
    group.shutdown()


def test_a_quorum_may_shrink_and_grow(seed: int) -> None:
    pytest.importorskip("torchft.process_group")
    run_ranks(reconfigured, 3, seed, comm=False, timeout=120)

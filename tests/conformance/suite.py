"""Runs torch's own test suite of c10d backends with process groups of the backend CONFORMANCE_BACKEND.

The suite (`torch.testing._internal.distributed.distributed_test`) reads the variable BACKEND when it is imported, to
select the tests that a backend runs, and again in tests, to make process groups. Here the first read gives the stock
backend whose tests are selected, the second the backend under test. The rest is torch's: the code of a rank, the
meaning of its exit code, timeouts.

Ranks are forked from this process, which has one thread and has imported everything, so a test starts within
milliseconds. torch spawns them instead, so the end of an interpreter is not tested here.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed import distributed_test

SELECTION = distributed_test.BACKEND
BACKEND = os.environ["CONFORMANCE_BACKEND"]

if BACKEND not in dist.Backend.backend_list:
    import torch_overlap  # noqa: F401  (registers the backend)

# The bodies of these tests choose the device of their tensors by comparing the module's BACKEND with names of stock
# backends. They make no process group.
BODY_READS_SELECTION = "test_accumulate_gradients_no_sync"


class ConformanceTest(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)

    def tearDown(self) -> None:
        processes = self.processes
        super().tearDown()
        for process in processes:  # torch's terminate() does not wait, and a rank that is stuck may outlive it
            process.join(5)
            process.kill()
            process.join()

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        os.environ["BACKEND"] = distributed_test.BACKEND = BACKEND
        distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]  # setUp() wrote the one of this test
        super()._run(*args, **kwargs)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        if test_name.startswith(BODY_READS_SELECTION):
            distributed_test.BACKEND = SELECTION
        super().run_test(test_name, parent_pipe)

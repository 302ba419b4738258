"""Arguments of the wrong form: the functions name the argument, and its correct form."""

from __future__ import annotations

import pytest
import torch

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.testing import run_ranks


def refused(comm):
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    one = r"expected weights as a list of tensors, got one of shape \[6, 8\]; write \[weight\]"
    pairs = r"expected pairs \(src, dst\) of ranks, got .*; write \[\(0, 1\), \(1, 0\)\]"
    wrong = {
        f"^all_gather_matmul: {one}": lambda: ops.all_gather_matmul(x, w, comm),
        f"^matmul_all_to_all: {one}": lambda: ops.matmul_all_to_all(x, w, comm),
        f"^scaled_all_gather_matmul: {one}": lambda: ops.scaled_all_gather_matmul(x, x, w, w, comm),
        f"^permute: {pairs}": lambda: ops.permute(x, comm, [0, 1]),
        f"^permute_async: {pairs}": lambda: ops.permute_async(x, comm, [(0, 1, 2)]),
    }
    for message, call in wrong.items():
        with pytest.raises(to.InvalidTypeError, match=message):
            call()
    ops.permute(x, comm, ((0, 1), (1, 0)))  # any iterable of pairs


def test_a_mistake_in_the_form_says_what_to_write():
    run_ranks(refused, 2, backend="fake")


def after_finalize(comm):
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    layer = to.nn.ColumnParallelLinear(8, 4, comm)
    comm.finalize()
    for call in (lambda: ops.all_reduce(x, comm), lambda: ops.all_gather_matmul(x, [w], comm), lambda: layer(x)):
        with pytest.raises(
            to.StateError, match=rf"expected a live communicator, got '{comm.get_name()}', which was fin"
        ):
            call()


def test_a_finalized_communicator_is_refused_as_such():
    run_ranks(after_finalize, 2, backend="local")

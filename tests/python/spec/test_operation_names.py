"""The operation classes by their names, and products of plain operands beside sharded ones."""

from __future__ import annotations

import pytest
import torch
from launcher import run_code

import torch_overlap as to
from torch_overlap.testing import run_ranks

NAMES = [
    "CollectiveOperation",
    "ShardOp",
    "ReshardOp",
    "AllReduceOp",
    "PMeanOp",
    "AllGatherOp",
    "GatherAllAxesOp",
    "ReduceScatterOp",
    "AllToAllOp",
    "PPermuteOp",
    "AxisIndexOp",
]


@pytest.mark.parametrize("name", NAMES)
def test_operation_classes_have_one_name_everywhere(name: str) -> None:
    kind = getattr(to, name)
    assert isinstance(kind, type)
    for module in (to.compat, to.mesh, to.mesh.communication):
        assert getattr(module, name) is kind


def test_unknown_operations_are_no_names() -> None:
    for module in (to, to.compat, to.mesh):
        assert not hasattr(module, "NoSuchOp")


def test_gemm_and_quantize_are_loaded_on_first_access() -> None:
    program = "import torch_overlap; torch_overlap.gemm.gemm; torch_overlap.quantize.quantize"
    done = run_code(program)
    assert done.returncode == 0, done.stderr


def run_products(comm: to.TorchComm, seed: int) -> None:
    mesh = to.mesh.connect(to.mesh.Mesh({"tp": comm.get_size()}), comm)
    generator = torch.Generator().manual_seed(seed)  # ranks are threads, which share torch's own generator
    x, w = (torch.randn(sizes, dtype=torch.float64, generator=generator) for sizes in ((4, 6), (6, 8)))
    columns = to.ShardOp()(w, mesh, to.mesh.P(None, "tp"))
    with pytest.raises(to.InvalidTypeError, match=r"got a plain tensor of shape \(4, 6\).*Call shard\(x, mesh\)"):
        x @ columns
    y = to.ShardOp()(x, mesh) @ columns  # column-parallel: no communication
    assert str(y.layout) == "[],[tp]"
    torch.testing.assert_close(to.ReshardOp()(y, to.mesh.P()).local, x @ w)
    rows = to.ShardOp()(x, mesh, to.mesh.P(None, "tp")) @ to.ShardOp()(w, mesh, to.mesh.P("tp", None))
    torch.testing.assert_close(to.ReshardOp()(rows, to.mesh.P()).local, x @ w)


def test_plain_operands_beside_sharded_ones_say_what_to_write(seed: int) -> None:
    run_ranks(run_products, 2, seed, backend="local")

"""`import torch_overlap` reads no launcher's variables, changes no state of torch, and loads what a program needs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import torch_overlap as to

# Variables of launchers, each by itself or invalid; and others that only some calls read.
ODD = {
    "WORLD_SIZE": "2",
    "PMI_RANK": "nobody",
    "SLURM_PROCID": "-3",
    "MASTER_PORT": "high",
    "TORCHCOMM_TIMEOUT_SECONDS": "soon",
    "TORCHCOMM_FR_DUMP_SIGNAL": "SIGKILL",
    "TORCHCOMM_ABORT_ON_ERROR": "0",
}
LAZY = ("compat", "device_mesh", "flight_recorder", "hooks", "mesh", "nn", "objcol", "tools")

IMPORTS = f"""
import signal, sys
import torch, torch.distributed

def public(module):
    return {{name: value for name, value in vars(module).items() if not name.startswith("_")}}

modules = [torch, torch.distributed, torch.distributed.distributed_c10d,
           torch.nn, torch.nn.functional, torch.autograd, torch.Tensor, torch.distributed.ProcessGroup]
import os
before = [public(module) for module in modules]
environment, loaded = dict(os.environ), set(sys.modules)
handlers = {{s: signal.getsignal(s) for s in signal.valid_signals()}}
import torch_overlap
for module, then in zip(modules, before):
    now = public(module)
    assert [name for name in then if now.get(name) is not then[name]] == [], module
assert dict(os.environ) == environment
assert {{s: signal.getsignal(s) for s in signal.valid_signals()}} == handlers
added = set(sys.modules) - loaded
lazy = {{f"torch_overlap.{{name}}" for name in {LAZY!r}}}
heavy = {{"torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "sympy",
         "statistics", "argparse"}}
assert added & (lazy | heavy) == set(), added & (lazy | heavy)
print("imported")
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.smoke
def test_import_loads_little_and_changes_nothing() -> None:
    done = run(IMPORTS, **ODD)
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr


def test_lazy_modules_are_attributes() -> None:
    code = "import torch_overlap as to\n" + "\n".join(
        f"assert to.{name} is __import__('torch_overlap.{name}', fromlist=['x'])" for name in LAZY
    )
    code += "\nfrom torch_overlap import nn, mesh\nassert {'nn', 'mesh', 'ops'} <= set(dir(to))\n"
    done = run(code)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        to.nothing  # noqa: B018


LAYERS = """
import sys
import torch_overlap, torch_overlap.mesh, torch_overlap.nn

def loaded(package):
    return [name for name in sys.modules if name.split(".")[:2] == ["torch_overlap", package]]

assert loaded("mesh") and not loaded("compat") and not loaded("tools") and not loaded("hooks")
from torch_overlap.mesh.communication import AllReduceOp
from torch_overlap import CommOverlapBase, SendOptions, hooks
from torch_overlap.compat import comm_overlap, communication, options
from torch_overlap.compat.hooks import AllReducePreHookArgs
assert AllReduceOp is communication.AllReduceOp and hooks.AllReducePreHookArgs is AllReducePreHookArgs
assert CommOverlapBase is comm_overlap.CommOverlapBase and SendOptions is options.SendOptions
assert not loaded("tools")
"""


def test_mesh_and_nn_load_neither_compat_nor_tools() -> None:
    done = run(LAYERS)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'NoOp'"):
        to.mesh.communication.NoOp  # noqa: B018


GIVEN = """
import os, threading, torch, torch.distributed as dist, torch_overlap as to
store = dist.HashStore()
dist.init_process_group("torch_overlap", store=store, rank=0, world_size=1)
x = torch.ones(2)
dist.all_reduce(x)
comm = to.new_comm("gloo", "cpu", name="given", store=dist.HashStore(), rank=0, size=1)
os.environ["TORCHCOMM_TIMEOUT_SECONDS"] = "soon"  # of no more use
comm.all_reduce(x, to.ReduceOp.SUM, False)
child = comm.split([0], name="child")
child.barrier(False)
to.flight_recorder.dump()
try:
    to.new_comm("gloo", "cpu", name="asked")
except to.InvalidValueError as error:
    print(error)
dist.destroy_process_group()
child.finalize()
comm.finalize()
"""


def test_variables_are_read_where_they_are_needed() -> None:
    odd = {name: value for name, value in ODD.items() if "TIMEOUT" not in name and "SIGNAL" not in name}
    done = run(GIVEN, **odd | {"PMI_RANK": ""})
    assert done.returncode == 0, done.stderr
    assert "environment variable TORCHCOMM_TIMEOUT_SECONDS: expected a number, got 'soon'" in done.stdout


ALONE = """
import torch, torch_overlap as to
class Mine(to.TorchCommBackend): pass
to.register_backend("Mine", Mine)
for name in ("fake", "mine"):
    comm = to.new_comm(name, "cpu")
    print(comm.get_rank(), comm.get_size())
    comm.finalize()
"""


def test_backends_without_peers_need_no_launcher() -> None:
    launchers = ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI_", "PALS_", "SLURM_", "TORCHCOMM_", "MASTER_")
    absent = {name: "" for name in os.environ if name.startswith(launchers)}
    done = run(ALONE, **absent)
    assert (done.returncode, done.stdout) == (0, "0 1\n0 1\n"), done.stderr
    half = run(ALONE, **absent | {"WORLD_SIZE": "2"})
    assert half.returncode == 1
    assert "expected both RANK and WORLD_SIZE in the environment, got only WORLD_SIZE=2" in half.stderr

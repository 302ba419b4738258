"""Runs torchcomms' own unit and hook tests on torch_overlap.compat.torchcomms, and writes torchcomms.json.

    python tests/conformance/run_torchcomms.py <torchcomms checkout>/comms/torchcomms

The tests are copied to a temporary folder beside a module named torchcomms, which has the names of ours. They run with
gloo on the CPU, on one rank. A test that fails and has no reason below fails the run, and so does a reason that no test
needs.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

RESULTS = Path(__file__).with_name("torchcomms.json")
FUNCTIONAL = "It tests torchcomms.functional, which patches torch.compile; here operators are torch.ops.torch_overlap."
IMPL = "It takes the backend object, which is not public here: get_backend() and get_native_handle() serve."
COPY = "It deep-copies a window, which would be collective; here a copy is the window itself."
# File, or file::test -> why it fails.
REASONS = {
    "test_param_parsing": FUNCTIONAL,
    "test_passes": FUNCTIONAL,
    "test_test_helpers": FUNCTIONAL,
    "test_wait_proxy_propagation": FUNCTIONAL,
    "test_factory::test_factory": IMPL,
    "test_python_backend::test_set_timeout": IMPL,
    "test_python_backend::test_send_recv": "It sends to its own rank outside of a batch, which would wait for itself.",
    "test_copy::test_window_deepcopy": COPY,
    "test_copy::test_window_deepcopy_with_tensor": COPY,
}
# It needs the package requests, and torch's debug server.
LEFT_OUT = ("DebugServerFlightRecorderTest.py",)

SHIM = """
import sys
if "torch" in sys.modules and not hasattr(sys.modules["torch"], "compile"):
    raise ImportError("torch looks for torchcomms while it is imported, and goes on without")
import types
import torch_overlap
import torch_overlap.hooks
import torch_overlap.compat.torchcomms as ours
_comms = types.ModuleType("torchcomms._comms")
for source in (torch_overlap.hooks, ours.hooks, ours):
    vars(_comms).update({name: getattr(source, name) for name in source.__all__})
_comms._BackendWrapper = torch_overlap._BackendWrapper
globals().update({name: getattr(ours, name) for name in ours.__all__})
sys.modules["torchcomms._comms"] = _comms
for name in ("hooks", "objcol", "device_mesh"):
    sys.modules["torchcomms." + name] = getattr(ours, name)
tests = types.ModuleType("torchcomms.tests")
tests.__path__ = [TESTS]
sys.modules["torchcomms.tests"] = tests
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(upstream: Path, folder: Path) -> dict[str, str]:
    """Returns the outcome of each test: passed, failed or skipped."""
    shim, tests = folder / "shim" / "torchcomms", folder / "tests"
    for made in (shim, tests):
        made.mkdir(parents=True)
    (shim / "__init__.py").write_text(f"TESTS = {str(upstream / 'tests')!r}\n{SHIM}")
    for file in (*upstream.glob("tests/unit/py/*.py"), *upstream.glob("hooks/*/tests/py/*.py")):
        if file.name not in ("__init__.py", *LEFT_OUT):
            shutil.copy(file, tests)
    package = Path(__file__).resolve().parents[2]
    environment = os.environ | {
        "PYTHONPATH": f"{shim.parent}{os.pathsep}{package}", "TEST_BACKEND": "gloo", "TEST_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "", "TORCHCOMM_GLOO_HOSTNAME": "localhost", "RANK": "0", "WORLD_SIZE": "1",
        "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    report = folder / "report.xml"
    names = sorted(file.name for file in tests.iterdir())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors",
               f"--junitxml={report}", *names]  # fmt: skip
    subprocess.run(command, cwd=tests, env=environment, check=False)
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = (case.get("classname") or case.get("name") or "").split(".")[0]
        name = f"{file}::{case.get('name')}" if case.get("classname") else file
        kinds = {child.tag for child in case}
        outcomes[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return outcomes


def main() -> int:
    upstream = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(upstream, Path(folder))
    failed = sorted(name for name, outcome in outcomes.items() if outcome == "failed")
    reason = {name: REASONS.get(name) or REASONS.get(name.partition("::")[0]) for name in failed}
    unused = [key for key in REASONS if not any(name == key or name.startswith(f"{key}::") for name in failed)]
    counts = {kind: list(outcomes.values()).count(kind) for kind in ("passed", "failed", "skipped")}
    RESULTS.write_text(json.dumps({**counts, "reasons": reason}, indent=2) + "\n")
    print(counts)
    unexpected = [name for name in failed if reason[name] is None]
    if unexpected or unused:
        print(f"without a reason: {unexpected}; reasons without a test: {unused}")
    return 1 if unexpected or unused else 0


if __name__ == "__main__":
    sys.exit(main())

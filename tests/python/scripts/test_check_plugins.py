"""scripts/check_plugins.py: the plug-ins against recorded signatures, sources with mistakes, installed packages."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
checks = runpy.run_path(str(ROOT / "scripts" / "check_plugins.py"))
RECORDS = ROOT / "tests" / "python" / "compat"
OURS = ROOT / "torch_overlap" / "compat" / "vllm"

# mistake -> source, what is replaced by what, the fault
MISTAKES = {
    "name of a parameter": (
        "communicator.py", "input_: Tensor, dim: int = -1", "x: Tensor, dim: int = -1",
        "OverlapCommunicator.all_gather overrides .*CudaCommunicator: parameters",
    ),
    "no default": (
        "communicator.py", "tensor: Tensor, dst: int | None = None", "tensor: Tensor, dst: int",
        "OverlapCommunicator.send overrides .*'dst' has no default",
    ),
    "order of parameters": (
        "communicator.py", "size: torch.Size, dtype: torch.dtype,", "dtype: torch.dtype, size: torch.Size,",
        "OverlapCommunicator.recv overrides",
    ),
    "call of a method of the base": (
        "communicator.py", "super().broadcast(tensor, src)", "super().broadcast(tensor, root=src)",
        "CudaCommunicator.broadcast: there is no parameter 'root'",
    ),
    "constructor of the base": (
        "fusion.py", "super().__init__(config)", "super().__init__()", "__init__: 'config' is not passed",
    ),
    "attribute of the base": ("communicator.py", "self.rank_in_group", "self.rank_of_group", "no 'rank_of_group'"),
    "method of the base": ("fusion.py", "self.dump_patterns(config, ", "self.dump_patterns(", "'pm_pass' is not"),
    "static method": ("fusion.py", "@VllmInductorPass.time_and_log", "@VllmInductorPass.timed", "no 'timed'"),
    "imported name": ("fusion.py", "get_tp_group", "get_group", "vllm.distributed has no 'get_group'"),
    "argument of a function": ("fusion.py", "check_compile=False", "checked=False", "there is no parameter 'checked'"),
    "missing argument": ("fusion.py", "rms_norm(summed, weight, epsilon)", "rms_norm(summed, weight)", "'epsilon'"),
    "constructor": ("fusion.py", "MatcherQuantFP8(kFp8", "MatcherQuantFP8(key=kFp8", "there is no parameter 'key'"),
    "attribute of an annotated parameter": (
        "platform.py", "parallel_config.enable_elastic_ep", "parallel_config.elastic_ep", "no 'elastic_ep'",
    ),
    "attribute of a local name": ("platform.py", "pass_config.fuse", "pass_config.no_fuse", "no 'no_fuse"),
    "constant of a module": ("communicator.py", "envs.VLLM_BATCH_INVARIANT", "envs.VLLM_X", "envs has no 'VLLM_X'"),
}  # fmt: skip


def record(package: str = "vllm") -> object:
    return checks["Record"](RECORDS / f"{package}_signatures.json")


@pytest.mark.parametrize("package", checks["PLUGINS"])
def test_plugins_have_the_recorded_signatures(package: str) -> None:
    assert checks["faults_of"](package, record(package)) == []


@pytest.mark.parametrize("package", checks["PLUGINS"])
def test_records_name_version_and_commit(package: str) -> None:
    content = record(package).content
    assert content["package"] == package
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?", content["version"])
    assert re.fullmatch(r"[0-9a-f]{40}", content["commit"])
    assert content["names"]
    assert content["members"]


@pytest.mark.parametrize("package", checks["PLUGINS"])
def test_the_version_is_that_of_the_extra(package: str) -> None:
    version = record(package).content["version"]
    assert f'{package} = ["{package}=={version}"]' in (ROOT / "pyproject.toml").read_text()
    assert f'SUPPORTED_VERSION = "{version}"' in (ROOT / f"torch_overlap_{package}.py").read_text()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str, tmp_path: Path) -> None:
    name, old, new, fault = MISTAKES[mistake]
    text = (OURS / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    found = checks["faults_of"]("vllm", record(), [tmp_path / name])
    assert found
    assert any(re.search(fault, line) for line in found), found


@pytest.mark.parametrize("package", checks["PLUGINS"])
def test_the_stand_in_has_the_recorded_signatures(package: str) -> None:
    stand_in = RECORDS / f"{package}_stand_in"
    assert checks["main"](["--package", package, "--against", str(stand_in)]) == 0


def test_a_changed_package_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "stand_in"
    shutil.copytree(RECORDS / "vllm_stand_in", folder)
    changed = folder / "vllm" / "distributed" / "device_communicators" / "cuda_communicator.py"
    text = changed.read_text().replace("def recv(self, size", "def receive(self, size")
    changed.write_text(text.replace("dim: int = -1", "axis: int = -1").replace("self.world_size", "self.num_ranks"))
    assert checks["main"](["--package", "vllm", "--against", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "CudaCommunicator.recv: expected kind 'function', as recorded, got nothing" in printed
    assert "as recorded, got (self, input_: Tensor, axis: int=-1)" in printed
    assert "has no 'world_size'" in printed


@pytest.mark.parametrize("package", checks["PLUGINS"])
def test_the_installed_package_has_the_recorded_signatures(package: str) -> None:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    folder = Path(next(iter(found.submodule_search_locations))).parent
    assert checks["main"](["--package", package, "--against", str(folder)]) == 0

"""Result files: the run's environment, and rows. The programs in benchmarks/ write the same format."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from torch_overlap import _tuning

# Keys of a file, with their types.
FILE = {
    "benchmark": str, "date": str, "gpu": str, "driver": str, "torch": str, "nccl": str, "commit": str, "command": str,
    "rows": list,
}  # fmt: skip
# Figures that a run reports and a file omits: no table, plot, goal or test reads them.
UNREAD = ("ratio_iqr", "ratio_peer_iqr", "best_peer", "gbps", "rounds", "gemm_iqr_us")
_DIGITS = 6  # significant digits of a figure: samples differ in the third
# Options for file locations and start times, which are not needed to repeat a run.
_PATHS = ("--out", "--json", "--library", "--loops", "--cutlass", "--began", "--status")


def git_commit() -> str:
    """Returns TORCH_OVERLAP_COMMIT, for a copy of the tree without its history, or else git's commit."""
    if commit := os.environ.get("TORCH_OVERLAP_COMMIT"):
        return commit
    return _output(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]) or "unknown"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def gpu_state() -> dict[str, str]:
    """Returns driver, clocks, power and ECC of GPU 0 at the moment."""
    keys = ("driver_version", "clocks.sm", "clocks.max.sm", "power.draw", "power.limit", "ecc.mode.current")
    line = _output(["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader", "-i", "0"])
    values = [value.strip() for value in line.split(",")]
    return dict(zip(keys, values, strict=True)) if len(values) == len(keys) else {}


def command_line() -> str:
    """Returns the command that repeats this run: program, ranks and options, without the paths of this machine."""
    asked = []
    skip = False
    for argument in sys.argv[1:]:
        if not skip and not argument.startswith(_PATHS):
            asked.append(argument)
        skip = argument in _PATHS
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return " ".join(["python -m torch_overlap", *asked])
    ranks = os.environ.get("WORLD_SIZE", "1")
    return " ".join(["torchrun --nproc_per_node", ranks, f"{program.resolve().parent.name}/{program.name}", *asked])


def result(benchmark: str, rows: list[dict[str, Any]], command: str | None = None, **more: Any) -> dict[str, Any]:
    """Returns the content of a result file. `more` precedes the rows."""
    cuda = torch.cuda.is_available()
    return {
        "benchmark": benchmark,
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(0) if cuda else "cpu",
        "gpus": torch.cuda.device_count() if cuda else 0,  # fewer than ranks if ranks share a GPU
        "driver": gpu_state().get("driver_version", "none"),
        "torch": str(torch.__version__),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none",
        "commit": git_commit(),
        "kernels": _tuning.KERNELS,
        "command": command or command_line(),
        **more,
        "rows": rows,
    }


def gpu_name(content: dict[str, Any]) -> str:
    return str(content["gpu"]).lower().replace("nvidia ", "").replace(" ", "-")


def write(content: dict[str, Any], tp: int, folder: Path) -> Path:
    """Writes `<benchmark>-<gpu>-tp<n>-<date>.json` and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{content['benchmark']}-{gpu_name(content)}-tp{tp}-{content['date']}.json"
    path.write_text(text(content))
    return path


def text(content: dict[str, Any]) -> str:
    """Returns the text of a result file: a line for each key, and for each entry of a list, such as a row."""
    lines = [f"{json.dumps(key)}: {_value(value)}" for key, value in compact(content).items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def compact(content: dict[str, Any]) -> dict[str, Any]:
    """Returns `content` without figures that nothing reads, with floats rounded to significant digits."""
    rows = [{key: value for key, value in row.items() if key not in UNREAD} for row in content["rows"]]
    return dict(_rounded(content | {"rows": rows}))


def _value(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        return "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value


def write_result(benchmark: str, tp: int, rows: list[dict[str, Any]], folder: Path) -> Path:
    """Calls `result` and `write`. Call it on rank 0."""
    return write(result(benchmark, rows), tp, folder)


def read(path: Path) -> dict[str, Any]:
    """Reads a result file.

    Raises:
        ValueError: the file is not a result, or lacks a required key.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"bench: expected a result file, got {path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"bench: expected a result file, got {path}: no object")
    for key, kind in FILE.items():
        if not isinstance(content.get(key), kind):
            raise ValueError(f"bench: expected a result file, got {path}: {key} = {content.get(key)!r}")
    return content

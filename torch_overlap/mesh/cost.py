"""Cost models as files: measured by `calibrate`, or written by hand.

    {"name": "h200",
     "links": {"nvlink": {"start_us": 9, "latency_us": 0.7, "bandwidth_gbps": 320,
                          "curves": [{"collective": "all_reduce", "ranks": 2, "bytes_us": [[16777216, 80.2], ...]}]}},
     "device": {"tflops": {"2": 790}, "flops_hot": 0.89, "memory_gbps": 3900, "processors": 132, "kernel_us": 5,
                "tiles": true},
     "overlap": {"contention": 0.03, "start_us": 12, "step_us": 5}}

The keys of `tflops` are bytes of an element; `bytes_us` increases in both. Missing or unknown keys are an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch_overlap.mesh._core import CostModel

__all__ = ["load_cost_model", "save_cost_model"]

# A model with one of everything: the structure that a file must have.
_FORM = {
    "name": str,
    "links": {
        "*": {
            "start_us": float,
            "latency_us": float,
            "bandwidth_gbps": float,
            "curves": [{"collective": str, "ranks": int, "bytes_us": [[float]]}],
        }
    },
    "device": {
        "tflops": {"*": float},
        "flops_hot": float,
        "memory_gbps": float,
        "processors": int,
        "kernel_us": float,
        "tiles": bool,
    },
    "overlap": {"contention": float, "start_us": float, "step_us": float},
}


def load_cost_model(path: str | Path) -> CostModel:
    """Reads a file of the form above.

    Raises:
        ValueError: the file does not have that form; the message names the position.
    """
    text = Path(path).read_text()
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"load_cost_model: expected JSON in {path}, got: {error}") from None
    _check(values, _FORM, str(path))
    return CostModel.from_dict(values)


def save_cost_model(model: CostModel, path: str | Path) -> None:
    """Writes a file that load_cost_model reads."""
    Path(path).write_text(json.dumps(model.to_dict(), indent=1) + "\n")


def _check(value: Any, form: Any, place: str) -> None:
    if isinstance(form, dict):
        if not isinstance(value, dict):
            raise ValueError(f"load_cost_model: expected an object at {place}, got {value!r}")
        if "*" not in form and value.keys() != form.keys():
            raise ValueError(f"load_cost_model: expected the keys {sorted(form)} at {place}, got {sorted(value)}")
        for key, item in value.items():
            _check(item, form.get("*", form.get(key)), f"{place}: {key}")
        return
    if isinstance(form, list):
        if not isinstance(value, list):
            raise ValueError(f"load_cost_model: expected a list at {place}, got {value!r}")
        for i, item in enumerate(value):
            _check(item, form[0], f"{place}[{i}]")
        return
    wanted = (int, float) if form is float else form
    if not isinstance(value, wanted) or (isinstance(value, bool) and form is not bool):
        raise ValueError(f"load_cost_model: expected {form.__name__} at {place}, got {value!r}")

"""Measured algorithms for "auto": the table that is shipped, and this machine's cache. See torch_overlap.tune."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_overlap import _C

Entry = dict[str, Any]

TABLES = Path(__file__).parent / "tables"
FORMAT = 2
MODES = ("eager", "graph")
# The version of the kernels that algorithms run. Counts up with every change of a kernel, or of how one is launched,
# that can change which algorithm is the quickest; measurements of an older version are then outdated.
KERNELS = 2
# GPUs of one architecture: an outdated entry of one gives way to a current one of another.
_SIBLINGS = (("NVIDIA H100 80GB HBM3", "NVIDIA H200"),)

_lock = threading.Lock()
_is_loaded = False


def library(torch_version: str = torch.__version__, kernels: int = KERNELS) -> str:
    return f"torch_overlap {_C.build_config['version']}, kernels {kernels}, torch {torch_version}"


def is_current(entry: Entry) -> bool:
    return f"kernels {KERNELS}" in str(entry.get("library")).split(", ")


def key(entry: Entry) -> str:
    dtype = getattr(torch, entry["dtype"])
    m, n, k = entry["shape"]
    in_graph = bool(MODES.index(entry["mode"]))
    return _C._tuning_key(entry["op"], m, n, k, dtype, entry["tp"], entry["device"], in_graph)


def read(path: str | os.PathLike[str]) -> list[Entry]:
    """The entries of a file. ValueError, naming the file, for one that holds something else."""
    try:
        content = json.loads(Path(path).read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}")
        entries: list[Entry] = [content.get("common", {}) | entry for entry in content["entries"]]
        for entry in entries:
            key(entry), str(entry["algorithm"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"tune: expected measured algorithms of format {FORMAT} in {path}, got {error!r}; delete or replace it"
        ) from error
    return entries


def chosen(entries: Iterable[Entry]) -> dict[str, str]:
    return {key(entry): entry["algorithm"] for entry in entries}


def shipped() -> list[Entry]:
    """The entries of the tables that come with the package."""
    return [entry for path in sorted(TABLES.glob("*.json")) for entry in read(path)]


def current(entries: Sequence[Entry]) -> list[Entry]:
    """The entries that were measured with the kernels of today.

    An outdated one is replaced by what another GPU of its architecture has for the same problem; without such an entry
    it is left out, and "auto" takes what its rule says.
    """
    by_key = {key(entry): entry for entry in entries if is_current(entry)}
    for entry in entries:
        for devices in _SIBLINGS:
            if is_current(entry) or entry["device"] not in devices:
                continue
            others = (by_key.get(key(entry | {"device": device})) for device in devices)
            if (other := next(filter(None, others), None)) is not None:
                by_key.setdefault(key(entry), entry | {"algorithm": other["algorithm"]})
    return list(by_key.values())


def load() -> None:
    """Reads the table and the cache again. A file that cannot be read is left out, with a warning.

    Communicators whose ranks have agreed on a cache already, at their first "auto", keep it.
    """
    global _is_loaded
    _is_loaded = True
    _C._set_tuning("table", chosen(current(shipped())))
    cache = _C._env.tune_cache()
    entries: list[Entry] = []
    if cache and Path(cache).exists():
        try:
            entries = [entry for entry in read(cache) if entry.get("library") == library()]
        except (OSError, ValueError) as error:
            warnings.warn(f"{error}; the cache is not used", stacklevel=2)
    _C._set_tuning("cache", chosen(entries))


def load_once() -> None:
    """load(), before the first communicator of the process is made."""
    with _lock:
        if not _is_loaded:
            load()

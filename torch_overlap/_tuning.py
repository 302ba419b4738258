"""Measured algorithms for "auto": the shipped table and this machine's cache. See torch_overlap.tools.tune."""

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
FORMAT = 3  # counts up with every change of the file's fields or of the algorithms' names
MODES = ("eager", "graph")
# Version of the kernels that the algorithms run. Increment it with every change of a kernel, or of its launch, that can
# change which algorithm is fastest. Measurements of an older version are then outdated.
KERNELS = 2
# GPUs of the same architecture. A current entry of one replaces an outdated entry of another.
_EQUIVALENT_DEVICES = (("NVIDIA H100 80GB HBM3", "NVIDIA H200"),)

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
    """Returns the entries of a file. Raises a ValueError that names the file if its content is invalid."""
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
    """Returns the entries of the shipped tables."""
    return [entry for path in sorted(TABLES.glob("*.json")) for entry in read(path)]


def current(entries: Sequence[Entry]) -> list[Entry]:
    """Returns the entries that were measured with the current kernels.

    An outdated entry is replaced by a current one of another GPU of the same architecture for the same problem. Without
    such an entry it is dropped, and "auto" follows its rule.
    """
    by_key = {key(entry): entry for entry in entries if is_current(entry)}
    for entry in entries:
        for devices in _EQUIVALENT_DEVICES:
            if is_current(entry) or entry["device"] not in devices:
                continue
            others = (by_key.get(key(entry | {"device": device})) for device in devices)
            if (other := next(filter(None, others), None)) is not None:
                by_key.setdefault(key(entry), entry | {"algorithm": other["algorithm"]})
    return list(by_key.values())


def load() -> None:
    """Reads the table and the cache again. An unreadable file is skipped, with a warning.

    Communicators whose ranks have already agreed on a cache, at their first "auto", keep it.
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
    """Calls load() once, before the first communicator of the process is made."""
    with _lock:
        if not _is_loaded:
            load()

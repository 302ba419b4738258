"""Measured algorithms for "auto": the table that is shipped, and this machine's cache. See torch_overlap.tune."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from torch_overlap import _C

Entry = dict[str, Any]

TABLES = Path(__file__).parent / "tables"
FORMAT = 2
MODES = ("eager", "graph")

_lock = threading.Lock()
_is_loaded = False


def library(torch_version: str = torch.__version__) -> str:
    return f"torch_overlap {_C.build_config['version']}, torch {torch_version}"


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
        entries: list[Entry] = content["entries"]
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
    return [entry for path in sorted(TABLES.glob("*.json")) for entry in read(path)]


def load() -> None:
    """Reads the table and the cache again. A file that cannot be read is left out, with a warning.

    Communicators whose ranks have agreed on a cache already, at their first "auto", keep it.
    """
    global _is_loaded
    _is_loaded = True
    _C._set_tuning("table", chosen(shipped()))
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

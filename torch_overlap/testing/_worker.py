"""Rank processes: `python -m torch_overlap.testing._worker <module>... <fd>` imports torch and the modules, and forks
one for each request from the socket. Each serves calls from its pipe until it closes."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_overlap.testing._body import Task, environment, run_body
from torch_overlap.testing._forkserver import serve_forks
from torch_overlap.testing._report import Outcome, pickled

_loaded: dict[str, tuple[float, ModuleType]] = {}


def load_module(name: str, file: str) -> ModuleType:
    """Returns the module under the parent's name for it, loaded from its file (again if the file has changed)."""
    changed = Path(file).stat().st_mtime
    if name in _loaded and _loaded[name][0] == changed:
        return _loaded[name][1]
    spec = importlib.util.spec_from_file_location("__mp_main__" if name == "__main__" else name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"run_ranks: expected a Python source file, got {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    _loaded[name] = (changed, module)
    return module


def run_task(task: Task) -> Outcome:
    import torch.distributed as c10d

    dist: Any = c10d
    try:
        sys.path[:] = task.path
        with environment(task.env):
            module = load_module(task.module, task.file)
            fn: Any = module
            for part in task.qualname.split("."):
                fn = getattr(fn, part)
            args = pickle.loads(task.args)
            store: Any = dist.TCPStore(
                "127.0.0.1", task.store_port, is_master=False, timeout=timedelta(seconds=task.job.timeout / 2)
            )
            return run_body(task.job, task.rank, dist.PrefixStore(task.job.name, store), fn, args)
    except BaseException:
        return Outcome(False, error=traceback.format_exc())


def serve(pipe: Connection[Any, Any]) -> None:
    import torch

    faulthandler.enable()
    # The parent requests the stacks of a hanging rank by this signal.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        data = pickled(run_task(task))
        sys.stdout.flush()
        pipe.send_bytes(data)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    *names, fd = sys.argv[1:]
    for name in names:
        importlib.import_module(name)
    serve_forks(int(fd), lambda _, fds: serve(Connection(fds[0])))


if __name__ == "__main__":
    main()

"""Runs Python programs for the launcher in forks of this process, which has imported what they all need."""

import os
import runpy
import signal
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

from torch_overlap.testing._forkserver import serve_forks


def run(request: dict[str, Any], fds: list[int]) -> None:
    """Runs what `python <argv>` does. The second file is for stderr."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    program, *arguments = sys.argv = request["argv"]
    for fd in fds:
        os.dup2(fd, 2)
        os.close(fd)
    if program == "-c":
        sys.argv = ["-c", *arguments[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
    elif program == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(program))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  (the first step of an optimizer does)

    with suppress(ImportError):
        import matplotlib.pyplot  # noqa: F401
    serve_forks(int(sys.argv[1]), run)

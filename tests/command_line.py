"""Runs the command line of the package, for tests of its output."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from torch_overlap.tools.cli import main


def run_here(*words: str) -> "subprocess.CompletedProcess[str]":
    """Runs `python -m torch_overlap <words>` in this process: a process of its own would import torch first."""
    code: object = 0
    with (
        mock.patch.object(sys, "argv", ["torch_overlap", *words]),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    assert code is None or isinstance(code, int), code
    return subprocess.CompletedProcess(words, code or 0, out.getvalue(), err.getvalue())

"""Runs `python -m torch_overlap` with two calls a sample: many more only make the times of a GPU exact."""

from torch_overlap.tools import cli
from torch_overlap.tools.bench import cases

if __name__ == "__main__":
    cases.MAX_CALLS = 2
    cli.main()

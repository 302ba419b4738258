"""The command line: `python -m torch_overlap info`."""

from __future__ import annotations

import argparse

from torch_overlap import __version__


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torch_overlap", description="torch_overlap on this machine")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, build options, backends, GPUs and their links")
    parser.parse_args()
    from torch_overlap import info

    print(info.report())


if __name__ == "__main__":
    main()

"""The command line: `python -m torch_overlap info`, `bench`, `plan` and `tune`."""

from __future__ import annotations

import argparse

from torch_overlap import __version__
from torch_overlap.tools import info, plan, tune
from torch_overlap.tools.bench import cli as bench

__all__ = ["main", "make_parser"]


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Returns the parser of the command line, and those of its commands by name."""
    parser = argparse.ArgumentParser(prog="python -m torch_overlap", description="torch_overlap on this machine")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    describing = commands.add_parser("info", help="versions, build options, backends, GPUs and their links")
    benching = commands.add_parser("bench", help="operators and collectives beside what else there is")
    bench.add_arguments(benching)
    planning = commands.add_parser("plan", help="predict the step time and traffic of a transformer on any mesh")
    plan.add_arguments(planning)
    tuning = commands.add_parser("tune", help="measure which algorithm of the fused operators is the quickest here")
    tune.add_arguments(tuning)
    return parser, {"info": describing, "bench": benching, "plan": planning, "tune": tuning}


def main() -> None:
    """Runs the command of `sys.argv` and exits with its status."""
    parser, _ = make_parser()
    args, behind = parser.parse_known_args()
    if behind and (args.command != "bench" or any(word.startswith("-") for word in behind)):
        parser.error(f"unrecognized arguments: {' '.join(behind)}")
    if args.command == "bench":
        # Argparse fills a positional list from one place only: this adds the words that follow an option.
        args.what += behind
    runs = {"bench": bench.run, "plan": plan.run, "tune": tune.run}
    if args.command in runs:
        try:
            status = runs[args.command](args)
        except ValueError as error:
            parser.exit(2, f"{error}\n")
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            what = f"expected a file that can be used, got {error.filename}: {error.strerror}"
            parser.exit(2, f"{args.command}: {what}\n")
        parser.exit(status)
    print(info.report())

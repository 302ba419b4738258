"""The command line: `python -m torch_overlap info`, `bench`, `plan` and `tune`."""

from __future__ import annotations

import argparse

from torch_overlap import __version__, tune
from torch_overlap.bench import cli
from torch_overlap.mesh import command


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torch_overlap", description="torch_overlap on this machine")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, build options, backends, GPUs and their links")
    bench = commands.add_parser("bench", help="operators and collectives beside what else there is")
    cli.add_arguments(bench)
    plan = commands.add_parser("plan", help="predict the step time and traffic of a transformer on any mesh")
    command.add_arguments(plan)
    tuning = commands.add_parser("tune", help="measure which algorithm of the fused operators is the quickest here")
    tune.add_arguments(tuning)
    args, behind = parser.parse_known_args()
    if behind and (args.command != "bench" or any(word.startswith("-") for word in behind)):
        parser.error(f"unrecognized arguments: {' '.join(behind)}")
    if args.command == "bench":
        # Argparse fills a positional list from one place only: this adds the words that follow an option.
        args.what += behind
    runs = {"bench": cli.run, "plan": command.run, "tune": tune.run}
    if args.command in runs:
        try:
            status = runs[args.command](args)
        except ValueError as error:
            parser.exit(2, f"{error}\n")
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            what = f"expected a file that can be used, got {error.filename}: {error.strerror}"
            parser.exit(2, f"{args.command}: {what}\n")
        parser.exit(status)
    from torch_overlap import info

    print(info.report())


if __name__ == "__main__":
    main()

"""The command line: `python -m torch_overlap info`, `bench`, `plan` and `tune`."""

from __future__ import annotations

import argparse

from torch_overlap import __version__
from torch_overlap.tools import info, plan, tune_command
from torch_overlap.tools.bench import cli as bench

__all__ = ["main", "make_parser"]

_DESCRIPTION = "Describes, measures and predicts overlapped communication on this machine."
_EPILOG = """\
Examples:
  python -m torch_overlap info                                  what is installed, and how the GPUs are connected
  python -m torch_overlap bench ag_gemm gemm_rs --tp 2          our operators beside NCCL and torch on two GPUs
  python -m torch_overlap plan --model llama3-8b --ranks 64     the fastest meshes of 64 ranks, as predicted
  torchrun --nproc-per-node 4 -m torch_overlap tune --shapes 8192x28672x4096
                                                                measures what algorithm="auto" selects here

`python -m torch_overlap COMMAND --help` explains the options and the output of a command. The exit status is 0 if
the command did what was asked, 2 if an argument is invalid, and 1 if bench measures nothing.
"""
# Name and one sentence of each command, and the function that adds its options.
_COMMANDS = {
    "info": ("Prints versions, build options, backends, GPUs and their links.", info.add_arguments),
    "bench": ("Measures operators and collectives beside those of NCCL and torch.", bench.add_arguments),
    "plan": ("Predicts the step time, memory and traffic of a transformer on any mesh.", plan.add_arguments),
    "tune": (
        'Measures which algorithm is the fastest for given shapes, for "auto" to select.',
        tune_command.add_arguments,
    ),
}


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Returns the parser of the command line, and those of its commands by name."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m torch_overlap", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=layout
    )
    parser.add_argument("--version", action="version", version=__version__, help="Prints the version and exits.")
    subparsers = parser.add_subparsers(dest="command", required=True)
    commands = {}
    for name, (summary, add_arguments) in _COMMANDS.items():
        commands[name] = subparsers.add_parser(name, help=summary, description=summary, formatter_class=layout)
        add_arguments(commands[name])
    return parser, commands


def main() -> None:
    """Runs the command of `sys.argv` and exits with its status."""
    parser, _ = make_parser()
    args, behind = parser.parse_known_args()
    if behind and (args.command != "bench" or any(word.startswith("-") for word in behind)):
        parser.error(f"unrecognized arguments: {' '.join(behind)}")
    if args.command == "bench":
        # Argparse fills a positional list from one place only: this adds the words that follow an option.
        args.what += behind
    runs = {"bench": bench.run, "plan": plan.run, "tune": tune_command.run}
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

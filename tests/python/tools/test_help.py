"""The help of the command line: sentences, examples that parse, and every column of the output."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest
from command_line import run_here

from torch_overlap.mesh import CostModel, Mesh
from torch_overlap.mesh.models import PRESETS
from torch_overlap.mesh.transformer import predict
from torch_overlap.tools.cli import make_parser
from torch_overlap.tools.plan import report

PARSER, COMMANDS = make_parser()


def options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    kinds = (argparse._HelpAction, argparse._SubParsersAction)
    return (a for a in parser._actions if not isinstance(a, kinds) and a.help != argparse.SUPPRESS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_in_a_sentence(name: str) -> None:
    for action in options(COMMANDS[name]):
        assert re.match(r"[A-Z].*\.$", action.help or ""), (name, action.dest, action.help)
    assert COMMANDS[name].description in run_here(name, "--help").stdout


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_examples_are_valid_commands(name: str) -> None:
    text = (COMMANDS[name] if name else PARSER).format_help()
    lines = text.partition("Example")[2].splitlines()
    examples = [line for line in lines if re.match(r"  (python -m|torchrun|bench|plan) ", line)]
    assert examples, text
    for line in examples:
        words = shlex.split(re.split(r"\s{3,}|> ", line.strip())[0])
        words = words[words.index("torch_overlap") + 1 :] if "torch_overlap" in words else words
        args = PARSER.parse_args(words)
        assert args.command == (name or args.command)


def test_plan_explains_every_column() -> None:
    found = [predict(PRESETS["llama3-8b"], Mesh({"pp": 2, "dp": 2, "tp": 2}), batch=8)]
    lines = report(PRESETS["llama3-8b"], found, CostModel.h200(), 141e9).splitlines()
    (head,) = (line for line in lines if line.startswith("mesh"))
    columns = re.findall(r"step ms|sent a rank|\S+", head)
    assert len(columns) == 11
    text = COMMANDS["plan"].format_help()
    assert [column for column in columns if not re.search(rf"^  {re.escape(column)} ", text, re.M)] == []


def test_info_explains_every_heading() -> None:
    text = COMMANDS["info"].format_help()
    headings = [line for line in run_here("info").stdout.splitlines() if line and not line.startswith(" ")]
    assert len(headings) >= 4
    assert [heading for heading in headings if not re.search(rf"^  {heading} ", text, re.M)] == []

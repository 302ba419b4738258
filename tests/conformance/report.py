"""The results of conformance.py: their names, results.json, and the tables of docs/reference/conformance.md."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from torch_overlap.testing import torch_is_before

HERE = Path(__file__).resolve().parent
RESULTS, EXCEPTIONS = HERE / "results.json", HERE / "exceptions.json"
DOCUMENT = HERE.parents[1] / "docs" / "reference" / "conformance.md"

BEGIN, END = "<!-- begin: make conformance -->", "<!-- end -->"

STOCK, OURS = "gloo", "torch_overlap"


@dataclass(frozen=True)
class Configuration:
    """The tests that torch selects for the stock backend `selection` on `ranks` ranks. Without `repeats`, these are
    the tests that the configurations before it skipped; with it, the tests that the configuration of this name ran."""

    name: str
    selection: str
    ranks: int
    variables: dict[str, str] = field(default_factory=dict)
    repeats: str = ""
    title: str = ""


CONFIGURATIONS = (
    Configuration("3-ranks", "gloo", 3, title="3 ranks"),
    Configuration("4-ranks", "gloo", 4, title="4 ranks: tests that need an even number"),
    Configuration("8-ranks", "gloo", 8, title="8 ranks: tests of subgroups"),
    Configuration("all-to-all", "mpi", 8, title="8 ranks: all-to-all, which torch tests on the CPU for MPI alone"),
    Configuration(
        "debug",
        "gloo",
        3,
        {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        repeats="3-ranks",
        title="3 ranks with TORCH_DISTRIBUTED_DEBUG=DETAIL, which wraps each group in torch's checks",
    ),
)


@dataclass
class Row:
    configuration: str
    test: str
    stock: str
    ours: str
    detail: str = ""


def reason(row: Row, exceptions: dict[str, str]) -> str | None:
    """Returns the reason why the test is expected to fail; None if it is expected to pass."""
    return exceptions.get(f"{row.configuration}: {row.test}") or exceptions.get(row.test)


def problems(rows: list[Row], exceptions: dict[str, str]) -> list[str]:
    """Lists the results that differ from `exceptions`."""
    found = []
    for row in rows:
        listed = reason(row, exceptions)
        name = f"{row.configuration}: {row.test}"
        if row.ours == "failed" and not listed:
            found.append(f"{name}: expected it to pass, or a reason in exceptions.json. It failed:\n{row.detail}")
        elif row.ours != "failed" and listed:
            found.append(f"{name}: expected it to fail, as exceptions.json says ({listed}). It {row.ours}.")
        elif row.ours == "absent":
            found.append(f"{name}: expected a test of this name in this torch, got none. Run `make conformance`.")
    return found


def unused(rows: list[Row], exceptions: dict[str, str]) -> list[str]:
    """Lists the exceptions that match no test of `rows`, the results of all configurations."""
    names = {row.test for row in rows} | {f"{row.configuration}: {row.test}" for row in rows}
    return [f"{name}: expected a test that some configuration runs, got none." for name in exceptions.keys() - names]


def read_exceptions() -> dict[str, str]:
    """Returns reasons by test, or by "<configuration>: <test>" if the test passes in other configurations.

    A reason that begins with "torch < x.y:" holds for earlier versions alone.
    """
    return {test: why for test, why in json.loads(EXCEPTIONS.read_text()).items() if _holds(why)}


def _holds(why: str) -> bool:
    before = re.match(r"torch < ([\d.]+):", why)
    return before is None or torch_is_before(before[1])


def read_results() -> tuple[str, list[Row]]:
    """Returns the version of torch, and the results."""
    record = json.loads(RESULTS.read_text())
    return record["torch"], [Row(*row) for row in record["results"]]


def write(torch_version: str, rows: list[Row], skipped: dict[str, list[str]], exceptions: dict[str, str]) -> None:
    """Writes the results, and replaces the tables between the marks of the document."""
    lines = ",\n".join(json.dumps([row.configuration, row.test, row.stock, row.ours]) for row in rows)
    RESULTS.write_text(f'{{"torch": "{torch_version}", "results": [\n{lines}\n]}}\n')
    before, begin, rest = DOCUMENT.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    DOCUMENT.write_text(before + begin + tables(torch_version, rows, skipped, exceptions) + end + after)


def tables(torch_version: str, rows: list[Row], skipped: dict[str, list[str]], exceptions: dict[str, str]) -> str:
    lines = [f"Results with torch {torch_version}:", ""]
    lines += [f"| configuration | tests | {STOCK} passes | {OURS} passes |", "|---|---|---|---|"]
    for configuration in CONFIGURATIONS:
        mine = [row for row in rows if row.configuration == configuration.name]
        stock = sum(row.stock == "passed" for row in mine)
        ours = sum(row.ours == "passed" for row in mine)
        lines.append(f"| {configuration.title} | {len(mine)} | {stock} | {ours} |")

    lines += ["", f"Tests that {OURS} fails:", ""]
    lines += [f"| test | configuration | {STOCK} | reason |", "|---|---|---|---|"]
    for row in rows:
        if row.ours == "failed":
            lines.append(f"| `{row.test}` | {row.configuration} | {row.stock} | {reason(row, exceptions)} |")

    # Most tests need CUDA devices or NCCL; torch has many messages for that.
    reasons = Counter(
        "needs CUDA devices, or is for NCCL" if re.search("cuda|nccl", str(why), re.IGNORECASE) else why[0]
        for why in skipped.values()
    )
    lines += ["", "Tests that are skipped in every configuration:", ""]
    lines += ["| reason | tests |", "|---|---|"]
    lines += [f"| {why} | {count} |" for why, count in reasons.most_common()]
    return "\n".join(["", "", *lines, "", ""])

"""Writes the tables of result files into docs/results.md, between its marks, and draws its plots.

    python benchmarks/results_page.py [RESULT.json ...] [--images FOLDER] [--document FILE]

Without files those that the document has, in its order.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import results_plots as plots
from results_tables import TITLES, groups_of, layer_table, table

from torch_overlap.tools.bench import result
from torch_overlap.tools.bench.cases import COLLECTIVES

BEGIN = "<!-- results: written by `benchmarks/results_page.py`, from here -->"
END = "<!-- to here -->"
# Operations to plot, from the first file that has them in bf16. The tables have every figure.
PICTURED = ("ag_gemm", "gemm_rs", "gemm_ar", "all_reduce", "all_gather", "reduce_scatter")
LAYERS = "layers.png"
_RESULTS = "benchmarks/results"


def update(paths: Sequence[Path], images: Path, document: Path) -> int:
    """Draws the plots and writes tables of the files into the document, between its two marks. Returns 0.

    Args:
        paths: the result files, in this order; by default those that the document has.
        images: the folder for the plots.
        document: the page to update.

    Raises:
        ValueError: a file is not a result, no file is given and the document has none, or it has no marks.
    """
    text = document.read_text() if document.exists() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        got = "another document" if text else "no such file"
        raise ValueError(
            f"results_page: expected {document} with the lines {BEGIN!r} and {END!r}, got {got}; "
            "give --document, or run it in the root of the repository"
        )
    before, rest = text.split(BEGIN)
    paths = paths or [Path(name) for name in re.findall(rf"^`({_RESULTS}/.*?)`:", rest.split(END)[0], re.MULTILINE)]
    if not paths:
        raise ValueError(f"results_page: expected result files, got none, and none is in {document}")
    contents = [(path, result.read(path)) for path in paths]
    pictured: set[str] = set()
    parts = [section(path.name, content, images, document, pictured) for path, content in contents]
    measured = [row for _, content in contents for row in layers_of(content)]
    if measured:
        image = images / LAYERS
        if plots.can_plot():
            plots.layers(measured, f"{TITLES['layer']}, bfloat16, in CUDA graphs", image)
        parts.insert(0, _image(image, document, TITLES["layer"]))
    document.write_text(f"{before}{BEGIN}\n\n{''.join(parts)}{END}{rest.split(END)[1]}")
    print(f"wrote {document}")
    return 0


def layers_of(content: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Returns the bfloat16 rows of whole layers by "auto" whose floor was measured, with labels."""
    gpu = result.gpu_name(content).upper()
    return [
        (f"{row['name']}, {row['tp']} {gpu}", row)
        for row in content["rows"]
        if row.get("op") == "layer"
        and row["algorithm"] == "auto"
        and row["mode"] == "graph"
        and row["dtype"] == "bfloat16"
        and "ratio_floor" in row
    ]


def section(name: str, content: dict[str, Any], images: Path, document: Path, pictured: set[str]) -> str:
    """Returns the section of one file: where and how it ran, then per operation a table, and a plot if it is the first
    with it.

    Args:
        name: the name of the file.
        content: the result.
        images: the folder for the plots.
        document: the page that links to them.
        pictured: operations that already have a plot; new ones are added.
    """
    gpu = result.gpu_name(content)
    if layers := [row for row in content["rows"] if row.get("op") == "layer"]:
        title = f"#### {TITLES['layer']}, {layers[0]['dtype']}"
        return f"{_head(name, content, layers[0]['tp'])}{title}\n\n{layer_table(layers)}\n\n"
    groups = groups_of(content["rows"])
    if not groups:
        raise ValueError(f"results_page: expected rows of operators, collectives or layers in {name}, got none")
    stem = Path(name).stem
    text = _head(name, content, groups[0].tp)
    for (op, dtype), same in groupby(groups, key=lambda group: (group.op, group.dtype)):
        cases = list(same)
        text += f"#### {TITLES[op]}, {dtype}\n\n"
        if op in PICTURED and dtype == "bf16" and op not in pictured and len(cases) > 1:
            pictured.add(op)
            image = images / f"{stem}-{op}-{dtype}.png"
            if plots.can_plot():
                draw = plots.lines if op in COLLECTIVES else plots.bars
                draw(cases, plots.title_of(cases[0], gpu.upper()), image)
            text += _image(image, document, TITLES[op])
        text += table(cases) + "\n\n"
    timelines = content.get("timelines", [])
    for key, step in groupby(timelines, key=lambda line: (line["op"], line["name"])):
        image = images / f"{stem}-{key[0]}-timeline.png"
        if plots.can_plot():
            plots.timeline(list(step), f"{TITLES[key[0]]}, {key[1]}: rank 0 of {groups[0].tp}", image)
        text += _image(image, document, f"{key[0]} {key[1]}, what ran when")
    return text


def _head(name: str, content: dict[str, Any], tp: int) -> str:
    return f"### {tp} {result.gpu_name(content).upper()}, {content['date']}\n\n{provenance(name, content)}\n\n"


def _image(path: Path, document: Path, title: str) -> str:
    if not path.exists():
        return ""
    return f"![{title}]({os.path.relpath(path, document.parent)})\n\n"


def provenance(name: str, content: dict[str, Any]) -> str:
    """Returns the conditions of a measurement, in one paragraph."""
    rates = content.get("rates")
    measured = (
        f" A copy to a peer while all send: {rates['link_gbps']:.0f} GB/s; within memory: "
        f"{rates['memory_gbps'] / 1000:.2f} TB/s." if rates else ""
    )  # fmt: skip
    return (
        f"`{_RESULTS}/{name}`: {content['gpu']}, driver {content['driver']}, torch {content['torch']}, "
        f"NCCL {content['nccl']}, commit {content['commit']}, `{content['command']}`.{measured}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("results", nargs="*", type=Path, help="the result files")
    add("--images", type=Path, default=Path("docs/images"), help="the folder of the plots (%(default)s)")
    add("--document", type=Path, default=Path("docs/results.md"), help="the page with the tables (%(default)s)")
    args = parser.parse_args()
    try:
        return update(args.results, args.images, args.document)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())

"""Rows of benchmarks/layer.py as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch_overlap.mesh import Mesh
from torch_overlap.mesh.models import PRESETS
from torch_overlap.mesh.transformer import predict_layer
from torch_overlap.tools.bench.tables import Row, markdown, number


def layer_table(rows: Sequence[Row]) -> str:
    """Returns a line per model: microseconds of all variants in the mode of the first row, and ratios of our first
    algorithm to the others."""
    rows = [row for row in rows if row["mode"] == rows[0]["mode"]]
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    peers = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    first = algorithms[0]
    head = ["layer (M, ffn, hidden)", *[f"ours, us: {first}", *algorithms[1:]], *peers, "predicted",
            *[f"{first} / {other}" for other in (*peers, "predicted")]]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for (name, *shape), same in groupby(rows, key=lambda row: [row["name"], *row["shape"]]):
        ours = {row["algorithm"]: row for row in same}
        row = ours[first]
        us = [ours.get(algorithm, {}).get("us") for algorithm in algorithms]
        us += [row["peers"].get(peer) for peer in peers]
        predicted = _predicted(row)
        ratios = [*[row.get(f"over_{peer}") for peer in peers], row["us"] / predicted if predicted else None]
        lines.append(
            [
                f"{name} {', '.join(map(str, shape))}", *[number(value, 0) for value in us],
                number(predicted, 0), *[number(value, 3) for value in ratios],
            ]
        )  # fmt: skip
    return markdown(lines)


def _predicted(row: Row) -> float | None:
    """Returns microseconds from the current planner, for a layer of exactly that size."""
    model, mesh = PRESETS.get(row["name"]), Mesh({"tp": row["tp"]})
    if model is None or row["shape"][0] % model.sequence != 0:
        return None
    batch = row["shape"][0] // model.sequence
    return 1e6 * predict_layer(model, mesh, batch=batch, overlap=row["algorithm"] != "sequential")

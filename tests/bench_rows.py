"""The keys of each row of a result of `python -m torch_overlap bench`, with their types."""

from typing import Any

ROW = {
    "op": str, "shape": (list, int), "dtype": str, "tp": int, "mode": str, "algorithm": str, "us": (int, float),
    "iqr_us": (int, float), "peers": dict,
}  # fmt: skip
GEMM_ROW = {"gemm_us": (int, float), "ratio_gemm": (int, float), "ratio_floor": (int, float)}


def check_rows(content: dict[str, Any]) -> None:
    for row in content["rows"]:
        wanted = ROW | (GEMM_ROW if isinstance(row.get("shape"), list) else {})
        assert {key: row.get(key) for key, kind in wanted.items() if not isinstance(row.get(key), kind)} == {}

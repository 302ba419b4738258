"""How the communicators of this process are."""

from __future__ import annotations

import json
from typing import Any

from torch_overlap._C import _health_json


def health() -> dict[str, Any]:
    """How this process's communicators are, as far as it knows itself: no device and no peer is asked.

    Returns:
        {"healthy": bool, "communicators": [{"name", "backend", "rank", "size", "state", "pending",
        "oldest_pending": None or {"op", "id", "state", "age_seconds", "timeout_seconds"}}]}. A state is "active",
        "late" (an operation is older than its timeout), "failed" (with "failure", the reason) or "aborted"; finalized
        communicators are not listed. Healthy is: all are active. The flight recorder supplies the operations: those
        that it no longer holds are not counted.

    torch's control plane serves the same as `torch_overlap_health`, and the recorder as
    `torch_overlap_flight_recorder`.
    """
    result: dict[str, Any] = json.loads(_health_json())
    return result

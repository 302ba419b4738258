"""State of the communicators of this process."""

from __future__ import annotations

import json
from typing import Any

from torch_overlap._C import _health_json


def health() -> dict[str, Any]:
    """Returns the state of this process's communicators, from local knowledge: no device and no peer is queried.

    Returns:
        {"healthy": bool, "communicators": [{"name", "backend", "rank", "size", "state", "pending",
        "oldest_pending": None or {"op", "id", "state", "age_seconds", "timeout_seconds"}}]}. A state is "active",
        "late" (an operation is older than its timeout), "failed" (with "failure", the reason) or "aborted"; finalized
        communicators are not listed. "healthy" is True if all are active. The operations come from the flight recorder:
        those that it no longer holds are not counted.

    torch's control plane serves the same as `torch_overlap_health`, and the recorder as
    `torch_overlap_flight_recorder`.
    """
    result: dict[str, Any] = json.loads(_health_json())
    return result

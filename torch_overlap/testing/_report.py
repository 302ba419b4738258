"""The outcomes of the ranks of one call, and the exception that reports them."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any


@dataclass
class Outcome:
    """The outcome of one rank: a value, or the text of an error."""

    ok: bool
    value: Any = None
    error: str = ""
    skipped: str = ""


def pickled(outcome: Outcome) -> bytes:
    """Returns the outcome for another process; an error if its value cannot be pickled."""
    try:
        return pickle.dumps(outcome)
    except Exception:
        return pickle.dumps(Outcome(False, error=f"its result cannot be pickled\n{traceback.format_exc()}"))


def unpickled(data: bytes) -> Outcome:
    """Returns the outcome that another process has pickled; an error if its value cannot be made here."""
    try:
        outcome: Outcome = pickle.loads(data)
    except Exception:
        outcome = Outcome(False, error=f"its result cannot be unpickled\n{traceback.format_exc()}")
    return outcome


class RanksFailed(AssertionError):
    """Some ranks raised, died or did not finish. `errors[rank]` is the rank's traceback, or what is known of its
    end."""

    def __init__(self, what: str, errors: dict[int, str]) -> None:
        self.errors = errors
        ranks = ", ".join(str(rank) for rank in sorted(errors))
        texts = "\n".join(f"---- rank {rank} ----\n{errors[rank].rstrip()}" for rank in sorted(errors))
        super().__init__(f"{what}: {'rank' if len(errors) == 1 else 'ranks'} {ranks} failed\n{texts}")


def values(what: str, outcomes: dict[int, Outcome]) -> list[Any]:
    """Returns the values in rank order. Raises RanksFailed if a rank failed, and skips the test if one was skipped."""
    errors = {rank: outcome.error for rank, outcome in outcomes.items() if not outcome.ok and not outcome.skipped}
    if errors:
        raise RanksFailed(what, errors)
    reasons = {outcome.skipped for outcome in outcomes.values() if outcome.skipped}
    if reasons:
        import pytest

        pytest.skip("; ".join(sorted(reasons)))
    return [outcomes[rank].value for rank in sorted(outcomes)]

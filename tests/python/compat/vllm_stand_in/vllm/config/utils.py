from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    start: int
    end: int

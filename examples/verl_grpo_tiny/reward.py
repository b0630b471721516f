"""The share of digits in the answer: a reward that a random model can learn within a few steps."""

from __future__ import annotations

from typing import Any


def compute_score(solution_str: str, **_: Any) -> float:
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))

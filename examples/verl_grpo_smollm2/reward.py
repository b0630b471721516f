"""One for the right number at the end; a tenth for any number there, which a small model has to learn first."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def compute_score(solution_str: str, ground_truth: str, **_: Any) -> float:
    """The last number of the answer's last line, against the truth."""
    lines = solution_str.strip().splitlines()
    numbers = _NUMBER.findall(lines[-1]) if lines else []
    if not numbers:
        return 0.0
    return 1.0 if float(numbers[-1].replace(",", "")) == float(ground_truth.replace(",", "")) else 0.1

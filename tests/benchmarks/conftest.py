"""The benchmarks are scripts; their modules are imported by name here, beside the tiny policy of the drafters' tests."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS.parent / "benchmarks"), str(_TESTS / "mtp"), str(_TESTS / "engine")]

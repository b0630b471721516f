"""The clock of vLLM's phases: every second belongs to one of them."""

from __future__ import annotations

import pytest
from vllm_phases import PHASES, Clock


class Worker:
    """Moves the time on by what it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def wait(self, seconds: float) -> float:
        self.now += seconds
        return self.now

    def outer(self) -> float:
        self.now += 1.0
        self.wait(10.0)
        self.now += 2.0
        return self.now

    def fail(self) -> None:
        self.now += 5.0
        raise ValueError("on purpose")


def test_what_a_phase_calls_is_not_its_own() -> None:
    worker = Worker()
    clock = Clock(lambda: worker.now)
    clock.watch(worker, "wait", "draft")
    clock.watch(worker, "outer", "engine")
    worker.now += 1000.0  # outside of all phases
    assert worker.outer() == 1113.0
    assert worker.wait(0.5) == 1113.5, "arguments and results go through"
    assert clock.seconds == {**dict.fromkeys(PHASES, 0.0), "engine": 3.0, "draft": 10.5}


def test_a_phase_ends_when_it_fails() -> None:
    worker = Worker()
    clock = Clock(lambda: worker.now)
    clock.watch(worker, "fail", "verify")
    with pytest.raises(ValueError, match="on purpose"):
        worker.fail()
    worker.now += 50.0
    with clock.phase("learn"):
        worker.now += 1.0
    assert (clock.seconds["verify"], clock.seconds["learn"]) == (5.0, 1.0)

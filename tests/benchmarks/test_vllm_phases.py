"""The clock of vLLM's phases: every second belongs to one of them."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_phases
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


def test_variants_that_are_in_the_file_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def submit(_: Any, drafter: str, *__: Any) -> Future[Any]:
        asked.append(drafter)
        if len(asked) == 2:
            raise KeyboardInterrupt
        done: Future[Any] = Future()
        done.set_result({"1": {"ms_per_step": {"forward": 2.0}, "tokens_per_step": 1.5}})
        return done

    monkeypatch.setattr(os, "environ", {**os.environ})  # main sets what vLLM reads
    file = tmp_path / "found.json"
    monkeypatch.setattr(vllm_phases, "ProcessPoolExecutor", lambda *_, **__: nullcontext(SimpleNamespace(submit=submit)))
    monkeypatch.setattr(vllm_phases, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda _: None))
    monkeypatch.setattr(vllm_phases, "load_prompts", lambda *_: [SimpleNamespace(token_ids=[1, 2, 3])])
    monkeypatch.setattr(sys, "argv", ["vllm_phases.py", "--model", "m", "--json", str(file), "--drafters", "suffix"])
    with pytest.raises(KeyboardInterrupt):
        vllm_phases.main()
    assert list(json.loads(file.read_text())["found"]) == ["none"]
    vllm_phases.main()
    assert list(json.loads(file.read_text())["found"]) == ["none", "suffix"]
    assert asked == ["none", "suffix", "suffix"]
    assert capsys.readouterr().out.count("1 requests: 1.50 tokens a step; ms: forward 2.0") == 3

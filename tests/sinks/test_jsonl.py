"""The event log: round trip, torn lines, a killed writer, threads."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import typing
from pathlib import Path

import pytest

from rollout_spec.events import (
    BudgetEvent,
    DrafterStaleEvent,
    Event,
    EventSink,
    PrefillEvent,
    RequestEvent,
    RoundEvent,
    SinkEvent,
    TrainEvent,
    WeightSyncEvent,
)
from rollout_spec.sinks import JsonlSink, MemorySink, TeeSink, read_events, read_log

ROUND = RoundEvent(
    round_index=3,
    num_requests=2,
    num_draft_tokens=8,
    num_accepted_tokens=5,
    num_emitted_tokens=7,
    drafted_by_depth=(2, 2, 1),
    accepted_by_depth=(2, 1, 0),
    mean_accept_prob_by_depth=(0.5, 0.25, 1 / 3),
    mean_entropy=2.3,
    draft_s=0.001,
    target_s=0.02,
    verify_s=0.003,
    other_s=0.0004,
    weights_version=1,
    drafter="suffix",
    verifier="block",
)
REQUEST = RequestEvent(
    request_id="a/0",
    finish_reason="error",
    num_prompt_tokens=4,
    num_tokens=0,
    num_rounds=0,
    num_draft_tokens=0,
    num_accepted_tokens=0,
    weights_version=0,
    error='NaN in "logits"\nof row 3 — é',
)
EVENTS: tuple[Event, ...] = (
    ROUND,
    REQUEST,
    dataclasses.replace(REQUEST, error=None),
    PrefillEvent(num_prompts=2, num_tokens=9, num_shared_tokens=5, target_s=0.5),
    WeightSyncEvent(role="target", version=2, num_tensors=272, checksum="beef", seconds=0.25),
    BudgetEvent(
        round_index=0,
        controller="auto",
        draft_lengths=(4, 0),
        reason="best",
        predicted_accept_by_depth=(0.5, 0.25),
        predicted_accepted_tokens=0.75,
        predicted_round_s=0.0625,
        predicted_gain=0.5,
    ),
    DrafterStaleEvent(round_index=9, drafter="mtp", weights_version=4, accept_prob=0.25, reference_accept_prob=0.5, mean_entropy=1.5),
    DrafterStaleEvent(round_index=40, drafter="mtp", weights_version=3, accept_prob=0.3, reference_accept_prob=0.5, mean_entropy=1.5),
    SinkEvent(sink="wandb", num_delivered=90, num_dropped=10, num_failed=1),
    TrainEvent(step=1, loss=0.5, metrics={"alpha_1": 0.25}),
)


def test_every_kind_of_event_is_tried() -> None:
    assert {type(event) for event in EVENTS} == set(typing.get_args(Event))


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "events.jsonl"
    before = time.time()
    sink: EventSink = JsonlSink(path)
    for event in EVENTS:
        sink.emit(event)
    sink.close()
    sink.close()
    assert read_events(path) == list(EVENTS)
    logged = list(read_log(path))
    assert before <= logged[0].time_s <= logged[-1].time_s <= time.time()
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["type"] for line in lines] == [type(event).__name__ for event in EVENTS]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_json_cannot_hold(tmp_path: Path, value: float) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    sink.emit(dataclasses.replace(ROUND, mean_entropy=value, mean_accept_prob_by_depth=(0.5, value)))
    sink.emit(TrainEvent(step=0, loss=value, metrics={"alpha": value}))
    sink.close()

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    a_round, a_step = read_events(path)
    assert isinstance(a_round, RoundEvent)
    assert isinstance(a_step, TrainEvent)
    assert math.isnan(a_round.mean_entropy)
    assert a_round.mean_accept_prob_by_depth[0] == 0.5
    assert math.isnan(a_round.mean_accept_prob_by_depth[1])
    assert math.isnan(a_step.loss)
    assert math.isnan(a_step.metrics["alpha"])


@pytest.mark.parametrize("torn", [b"{", b'{"type":"RoundEvent","time_s":1', b'{"type":"TrainEvent","x":"' + b"y" * 200_000])
def test_torn_last_line_is_left_out_and_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    sink.emit(ROUND)
    sink.close()
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert read_events(path) == [ROUND]
    sink = JsonlSink(path)
    sink.emit(REQUEST)
    sink.close()
    assert read_events(path) == [ROUND, REQUEST]
    assert path.read_bytes().startswith(whole)


def test_file_that_is_one_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"type"')
    assert read_events(path) == []
    sink = JsonlSink(path)
    sink.emit(REQUEST)
    sink.close()
    assert read_events(path) == [REQUEST]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "Expecting value"),
        ("[1, 2]", "not an object"),
        ('{"time_s": 1.0}', "type"),
        ('{"type": "Nonsense", "time_s": 1.0}', "unknown type 'Nonsense'"),
        ('{"type": "BudgetEvent", "time_s": 1.0, "round_index": 1}', "missing"),
        ('{"type": "TrainEvent", "time_s": 1.0, "step": 1, "loss": 1.0, "metrics": {}, "colour": 1}', "colour"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    sink.emit(ROUND)
    sink.close()
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=f"events.jsonl, line 2 is no event: .*{reason}"):
        read_events(path)


def test_emit_after_close_is_refused(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.emit(ROUND)


def test_killed_writer_loses_nothing_it_emitted(tmp_path: Path) -> None:
    """The writer says on stdout how many events it has emitted, then is killed without warning."""
    path = tmp_path / "events.jsonl"
    program = (
        "import sys\n"
        "from rollout_spec.events import TrainEvent\n"
        "from rollout_spec.sinks import JsonlSink\n"
        "sink = JsonlSink(sys.argv[1])\n"
        "for step in range(10**9):\n"
        "    sink.emit(TrainEvent(step=step, loss=0.5, metrics={}))\n"
        "    if step % 1000 == 0: print(step, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True, env=_environment()) as writer:
        assert writer.stdout is not None
        emitted = [int(writer.stdout.readline()) for _ in range(5)][-1]
        writer.send_signal(signal.SIGKILL)
    steps = [event.step for event in read_events(path) if isinstance(event, TrainEvent)]
    assert len(steps) > emitted >= 4000
    assert steps == list(range(len(steps)))


def test_threads_never_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)

    def emit_many(step: int) -> None:
        for _ in range(300):
            sink.emit(TrainEvent(step=step, loss=0.0, metrics={"x": 1.0}))

    threads = [threading.Thread(target=emit_many, args=(step,)) for step in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    steps = [event.step for event in read_events(path) if isinstance(event, TrainEvent)]
    assert sorted(steps) == sorted(list(range(4)) * 300)


class _Stubborn(MemorySink):
    closed = False

    def close(self) -> None:
        self.closed = True
        raise OSError("disk full")


def test_tee_hands_on_and_closes_all(tmp_path: Path) -> None:
    first, memory = _Stubborn(), MemorySink()
    path = tmp_path / "events.jsonl"
    tee: EventSink = TeeSink(first, memory, JsonlSink(path))
    tee.emit(ROUND)
    tee.emit(REQUEST)
    with pytest.raises(OSError, match="disk full"):
        tee.close()
    assert first.closed
    assert first.events == memory.events == read_events(path) == [ROUND, REQUEST]
    with pytest.raises(ValueError, match="closed"):
        tee.emit(ROUND)  # the file sink behind the failing one was closed too


def test_tee_of_nothing_drops() -> None:
    tee = TeeSink()
    tee.emit(ROUND)
    tee.close()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

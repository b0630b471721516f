"""A slow, failing or dead sink never slows or stops who emits, and what it loses is counted and said."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from streams import a_round

from rollout_spec.events import Event, SinkEvent
from rollout_spec.sinks import MemorySink
from rollout_spec.sinks.queued import QueuedSink
from rollout_spec.sinks.telemetry import Telemetry


class Blocked(MemorySink):
    """Blocks in its first emit until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.entered = threading.Event()

    def emit(self, event: Event) -> None:
        self.entered.set()
        self.let_go.wait()
        super().emit(event)


class Failing(MemorySink):
    def emit(self, event: Event) -> None:
        super().emit(event)
        if len(self.events) % 2:
            raise ConnectionError("the server is gone")


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    sink = Blocked()
    yield sink
    sink.let_go.set()  # or its thread would outlive the test


def test_everything_arrives_in_order_and_the_sink_is_closed_last() -> None:
    inner = MemorySink()
    closed: list[int] = []
    inner.close = lambda: closed.append(len(inner.events))  # type: ignore[method-assign]
    sink = QueuedSink("memory", inner)
    events = [a_round(index) for index in range(500)]
    for event in events:
        sink.emit(event)
    sink.close()
    sink.close()
    assert inner.events == events
    assert closed == [500]
    health = sink.health()
    assert (health.num_emitted, health.num_delivered, health.num_dropped, health.num_failed) == (500, 500, 0, 0)
    sink.emit(a_round())
    assert sink.health().num_dropped == 1


def test_a_sink_that_blocks_for_ever_costs_its_events_and_nothing_else(blocked: Blocked, caplog: pytest.LogCaptureFixture) -> None:
    sink = QueuedSink("blocked", blocked, capacity=8, close_timeout_s=0.05)
    sink.emit(a_round())
    assert blocked.entered.wait(10)
    began = time.perf_counter()
    for index in range(10_000):
        sink.emit(a_round(index))
    emitted_s = time.perf_counter() - began
    health = sink.health()
    assert health.num_dropped == 10_000 - 8
    # Events take 20 ms to make in a real round; waiting even once for the sink would be for ever.
    assert emitted_s < 30
    sink.close()
    health = sink.health()
    assert (health.num_emitted, health.num_delivered, health.num_dropped) == (10_001, 0, 10_001)
    assert "blocked did not end" in caplog.text


def test_a_failing_sink_is_counted_and_complains_once(caplog: pytest.LogCaptureFixture) -> None:
    inner = Failing()
    sink = QueuedSink("failing", inner)
    for index in range(10):
        sink.emit(a_round(index))
    sink.close()
    health = sink.health()
    assert (health.num_delivered, health.num_failed, health.num_dropped) == (5, 5, 0)
    assert caplog.text.count("its further errors are counted only") == 1


def test_losses_are_said_among_the_events(blocked: Blocked) -> None:
    record, other = MemorySink(), MemorySink()
    queued = [QueuedSink("blocked", blocked, capacity=1, close_timeout_s=0.05), QueuedSink("other", other)]
    telemetry = Telemetry(record, queued)
    telemetry.emit(a_round())
    assert blocked.entered.wait(10)
    for index in range(1, 100):
        telemetry.emit(a_round(index))
    said = [event for event in record.events if isinstance(event, SinkEvent)]
    losses = [event.num_dropped for event in said]
    assert {event.sink for event in said} == {"blocked"}
    assert losses[0] == 1
    assert all(later > 2 * earlier for earlier, later in itertools.pairwise(losses))
    assert len(losses) <= 8  # doubling, not one for each
    telemetry.close()
    last = {event.sink: event for event in record.events if isinstance(event, SinkEvent)}
    emitted = {health.name: health.num_emitted for health in telemetry.health()}
    assert last["blocked"].num_dropped == emitted["blocked"] > 100
    assert (last["other"].num_dropped, last["other"].num_delivered) == (0, emitted["other"])
    assert other.events == record.events[:-2]


def test_the_record_gets_every_event_before_anyone_else_is_asked() -> None:
    record = MemorySink()
    with closing(Telemetry(record)) as telemetry:
        for index in range(5):
            telemetry.emit(a_round(index))
            assert len(record.events) == index + 1


def test_a_queue_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="1 or more"):
        QueuedSink("none", MemorySink(), capacity=0)

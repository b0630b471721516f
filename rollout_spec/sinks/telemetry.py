"""Telemetry: a run's record and its further sinks as one, with what the latter lost among the events."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_spec.events import Event, EventSink, SinkEvent
from rollout_spec.sinks.queued import QueuedSink, SinkHealth


class Telemetry:
    """Hands every event to the record at once, and to the queued sinks without waiting for them.

    A SinkEvent goes to all of them when a queued sink first loses an event, then whenever its losses have doubled, and at the end.
    """

    def __init__(self, record: EventSink, queued: Sequence[QueuedSink] = ()) -> None:
        self._record, self._queued = record, queued
        self._said = dict.fromkeys((sink.name for sink in queued), 0)
        self._closed = False

    def emit(self, event: Event) -> None:
        self._record.emit(event)
        for sink in self._queued:
            sink.emit(event)
        for sink in self._queued:
            health = sink.health()
            lost = health.num_dropped + health.num_failed
            if lost > 2 * self._said[sink.name]:
                self._said[sink.name] = lost
                self._say(health)

    def close(self) -> None:
        """Close the queued sinks, each within its time limit, say what became of their events, and close the record."""
        if self._closed:
            return
        self._closed = True
        for sink in self._queued:
            sink.close()
        for sink in self._queued:
            self._record.emit(_event(sink.health()))
        self._record.close()

    def health(self) -> list[SinkHealth]:
        return [sink.health() for sink in self._queued]

    def _say(self, health: SinkHealth) -> None:
        event = _event(health)
        self._record.emit(event)
        for sink in self._queued:
            sink.emit(event)


def _event(health: SinkHealth) -> SinkEvent:
    return SinkEvent(sink=health.name, num_delivered=health.num_delivered, num_dropped=health.num_dropped, num_failed=health.num_failed)

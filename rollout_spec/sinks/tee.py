"""One event to several sinks."""

from __future__ import annotations

from contextlib import ExitStack

from rollout_spec.events import Event, EventSink


class TeeSink:
    """Hands every event to each of its sinks, in the order given; of none, it drops events."""

    def __init__(self, *sinks: EventSink) -> None:
        self._sinks = sinks

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink.emit(event)

    def close(self) -> None:
        """Close all of them, also when one fails to close (its error is raised at the end)."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)

"""Events kept in memory, for tests and for callers that read them in the same process."""

from __future__ import annotations

from rollout_spec.events import Event


class MemorySink:
    """Keeps every event, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        """Nothing to release; the events stay readable."""

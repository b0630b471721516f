"""QueuedSink: a slow, failing or dead sink never slows the rollouts; what it loses is counted."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass

from rollout_spec.events import Event, EventSink

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SinkHealth:
    """Of the events given to a sink so far. What is neither delivered, dropped nor failed is still in its queue."""

    name: str
    num_emitted: int
    num_delivered: int
    num_dropped: int  # the queue was full, or the sink was given up with them in it
    num_failed: int  # the sink raised an error


class QueuedSink:
    """Hands events to another sink from a thread of its own, through a bounded queue; a full queue drops the newest event.

    ``emit`` never waits and never raises. ``close`` waits ``close_timeout_s`` for the queue to empty, then gives the sink up (the thread
    is a daemon, so that a sink that blocks for ever cannot keep the process either) and counts what was left as dropped.
    """

    def __init__(
        self, name: str, sink: EventSink, *, capacity: int = 10_000, close_timeout_s: float = 10.0, interval_s: float = 0.5
    ) -> None:
        """interval_s: between two looks at the queue. Waking for every event would interrupt the rollouts' threads as often."""
        if capacity < 1:
            raise ValueError(f"the queue of sink {name} must hold 1 or more events, got {capacity}")
        self.name = name
        self._sink, self._close_timeout_s, self._interval_s = sink, close_timeout_s, interval_s
        self._queue: queue.Queue[Event | None] = queue.Queue(capacity)
        self._num_emitted = self._num_delivered = self._num_dropped = self._num_failed = 0
        self._given_up = False
        self._lock = threading.Lock()  # several threads may emit
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._deliver, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        with self._lock:
            self._num_emitted += 1
            if self._given_up:
                self._num_dropped += 1
                return
            try:
                self._queue.put_nowait(event)
            except queue.Full:
                self._num_dropped += 1

    def close(self) -> None:
        """Deliver what is queued and close the sink, within the time limit. Closing twice is allowed; events after it are dropped."""
        with self._lock:
            closing, self._given_up = not self._given_up, True
        if not closing:
            return
        self._ending.set()
        try:
            self._queue.put(None, timeout=self._close_timeout_s)
        except queue.Full:
            pass
        else:
            self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            with self._lock:
                left = self._num_emitted - self._num_delivered - self._num_dropped - self._num_failed
                self._num_dropped += left
            logger.warning("sink %s did not end within %.0f s: %d events were dropped", self.name, self._close_timeout_s, left)

    def health(self) -> SinkHealth:
        with self._lock:
            return SinkHealth(
                name=self.name,
                num_emitted=self._num_emitted,
                num_delivered=self._num_delivered,
                num_dropped=self._num_dropped,
                num_failed=self._num_failed,
            )

    def _deliver(self) -> None:
        while (event := self._queue.get()) is not None:
            failed = self._attempt(event)
            with self._lock:
                if failed:
                    self._num_failed += 1
                else:
                    self._num_delivered += 1
            if self._queue.empty():
                self._ending.wait(self._interval_s)
        try:
            self._sink.close()
        except Exception:  # as in _attempt
            logger.exception("sink %s failed to close", self.name)

    def _attempt(self, event: Event) -> bool:
        """True if the sink raised. Whatever a third party's client raises must not end the thread that empties the queue."""
        try:
            self._sink.emit(event)
        except Exception:
            if self._num_failed == 0:  # once: a sink that is down would fill the log
                logger.exception("sink %s failed; its further errors are counted only", self.name)
            return True
        return False

"""Events as JSON lines: one object a line, with its "type" and the time it was written.

Numbers that JSON cannot hold (NaN, infinities) are written as null and read back as NaN.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
import time
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_spec.events import Event

_EVENT_TYPES: dict[str, type] = {cls.__name__: cls for cls in typing.get_args(Event)}
_FIELD_TYPES: dict[str, dict[str, Any]] = {name: typing.get_type_hints(cls) for name, cls in _EVENT_TYPES.items()}


@dataclass(frozen=True, kw_only=True)
class LoggedEvent:
    """One line of a log."""

    time_s: float  # seconds since the epoch, when the event was written
    event: Event


class JsonlSink:
    """Appends events to a file, which it creates with its folder.

    Every event is one write of one whole line: a process that dies takes no emitted line with it, and readers beside it never wait for a
    buffer. (A write costs microseconds, a round milliseconds.) A line that an earlier run left torn is cut off before the first write.
    Safe to use from several threads, not from several processes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        self._lock = threading.Lock()
        whole = _size_of_whole_lines(self._path)
        if whole < self._path.stat().st_size:
            self._file.truncate(whole)

    def emit(self, event: Event) -> None:
        """Write one event. Raises ValueError when the sink is closed, OSError when the disk refuses."""
        fields = {field.name: _plain(getattr(event, field.name)) for field in dataclasses.fields(event)}
        record = {"type": type(event).__name__, "time_s": time.time(), **fields}
        line = memoryview(json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        with self._lock:
            while line:
                line = line[self._file.write(line) :]

    def close(self) -> None:
        """Make the log safe against power loss as well, and close it. Closing twice is allowed."""
        with self._lock:
            if not self._file.closed:
                os.fsync(self._file.fileno())
                self._file.close()


def read_log(path: str | os.PathLike[str]) -> Iterator[LoggedEvent]:
    """The events of a log, in order, while it may still be written: a torn last line is left out.

    Raises ValueError with file and line number for a whole line that is no event.
    """
    path = Path(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield _logged_event(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number} is no event: {error}") from error


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """All events of a log; see ``read_log``."""
    return [logged.event for logged in read_log(path)]


def _size_of_whole_lines(path: Path) -> int:
    """Bytes up to and including the last newline."""
    position = path.stat().st_size
    with path.open("rb") as file:
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            position = start
    return 0


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _logged_event(record: Any) -> LoggedEvent:
    if not isinstance(record, dict):
        raise ValueError("not an object")
    kind, time_s = record.pop("type"), record.pop("time_s")
    if kind not in _EVENT_TYPES:
        raise ValueError(f"unknown type {kind!r}")
    hints = _FIELD_TYPES[kind]
    fields = {name: _typed(value, hints.get(name)) for name, value in record.items()}
    return LoggedEvent(time_s=time_s, event=_EVENT_TYPES[kind](**fields))


def _typed(value: Any, hint: Any) -> Any:
    """JSON's value as the field's type: null in a float is NaN, lists are tuples."""
    if value is None and hint is float:
        return math.nan
    arguments = typing.get_args(hint)
    if isinstance(value, list):
        return tuple(_typed(item, arguments[0]) for item in value)
    if isinstance(value, dict):
        return {key: _typed(item, arguments[1]) for key, item in value.items()}
    return value

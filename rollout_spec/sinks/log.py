"""Reading event logs: strictly for whoever computes with them, tolerantly for whoever reports on them, and while they are being written."""

from __future__ import annotations

import json
import math
import os
import typing
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rollout_spec.events import Event
from rollout_spec.sinks.jsonl import full_parts

_EVENT_TYPES: dict[str, type] = {cls.__name__: cls for cls in typing.get_args(Event)}
_FIELD_TYPES: dict[str, dict[str, Any]] = {name: typing.get_type_hints(cls) for name, cls in _EVENT_TYPES.items()}


@dataclass(frozen=True, kw_only=True)
class LoggedEvent:
    """One line of a log."""

    time_s: float  # seconds since the epoch, when the event was written
    event: Event
    number: int  # of its line in its part
    unknown_fields: tuple[str, ...] = ()  # of another version; left out of the event


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A whole line that is no event this version knows."""

    path: Path
    number: int
    reason: str


def read_log(path: str | os.PathLike[str]) -> Iterator[LoggedEvent]:
    """The events of a log, in order, all its parts, while it may still be written: a torn last line is left out.

    Raises ValueError with file and line number for a whole line that is no event or has fields that this version does not know.
    """
    for item in scan_log(path):
        if isinstance(item, BadLine):
            raise ValueError(f"{item.path}, line {item.number} is no event: {item.reason}")
        if item.unknown_fields:
            raise ValueError(f"{path}, line {item.number} is no event: this version knows no {', '.join(item.unknown_fields)}")
        yield item


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """All events of a log; see ``read_log``."""
    return [logged.event for logged in read_log(path)]


def scan_log(path: str | os.PathLike[str]) -> Iterator[LoggedEvent | BadLine]:
    """As ``read_log``, but what is no event comes as a BadLine, and unknown fields are named and left out."""
    return LogTail(path).poll()


class LogTail:
    """Follows a log that grows: every ``poll`` yields what was written since the one before, over the starts of new parts."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._read: dict[bytes, tuple[int, int]] = {}  # a part's first line -> bytes and lines of it that were read

    def poll(self) -> Iterator[LoggedEvent | BadLine]:
        """New whole lines, oldest first. Raises FileNotFoundError if there is no part of the log."""
        with ExitStack() as stack:
            # The newest is opened before the others are listed: when it is renamed in between, it is listed as well, and read once.
            newest = stack.enter_context(self._path.open("rb")) if self._path.exists() else None
            parts = full_parts(self._path) if self._path.parent.is_dir() else []
            if newest is None and not parts:
                raise FileNotFoundError(f"no event log at {self._path}")
            for part in parts:
                with part.open("rb") as file:
                    yield from self._lines(file, part)
            if newest is not None:
                yield from self._lines(newest, self._path)

    def _lines(self, file: BinaryIO, path: Path) -> Iterator[LoggedEvent | BadLine]:
        first = file.readline()  # it has the time it was written: no two parts begin alike
        if not first.endswith(b"\n"):
            return
        position, number = self._read.get(first, (0, 0))
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                return
            position, number = position + len(line), number + 1
            self._read[first] = (position, number)
            try:
                yield _logged_event(json.loads(line), number)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                yield BadLine(path=path, number=number, reason=str(error))


def _logged_event(record: Any, number: int) -> LoggedEvent:
    if not isinstance(record, dict):
        raise ValueError("not an object")
    kind, time_s = record.pop("type"), record.pop("time_s")
    if kind not in _EVENT_TYPES:
        raise ValueError(f"unknown type {kind!r}")
    hints = _FIELD_TYPES[kind]
    unknown = tuple(name for name in record if name not in hints)
    fields = {name: _typed(value, hints[name]) for name, value in record.items() if name in hints}
    return LoggedEvent(time_s=time_s, number=number, event=_EVENT_TYPES[kind](**fields), unknown_fields=unknown)


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

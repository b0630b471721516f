"""Events as JSON lines: one object a line, with its "type" and the time it was written.

Numbers that JSON cannot hold (NaN, infinities) are written as null and read back as NaN. ``events.jsonl`` is the newest part of a log;
parts that reached their size stand beside it as ``events.0001.jsonl``, ``events.0002.jsonl``, ... (sinks.log reads all of them).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import threading
import time
import typing
from pathlib import Path

from rollout_spec.events import Event

_FIELDS = {kind: [field.name for field in dataclasses.fields(kind)] for kind in typing.get_args(Event)}
DEFAULT_MAX_BYTES = 256 * 1024 * 1024  # about 500,000 rounds


class JsonlSink:
    """Appends events to a file, which it creates with its folder, and starts a new one when that has reached ``max_bytes``.

    Every event is one write of one whole line: a process that dies takes no emitted line with it, and readers beside it never wait for a
    buffer. (A write costs microseconds, a round milliseconds.) A line that an earlier run left torn is cut off before the first write.
    Safe to use from several threads, not from several processes. ``keep_parts``: how many full parts are kept; None = all.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_MAX_BYTES, keep_parts: int | None = None) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be 1 or more, got {max_bytes}")
        if keep_parts is not None and keep_parts < 0:
            raise ValueError(f"keep_parts must be 0 or more, got {keep_parts}")
        self._path, self._max_bytes, self._keep_parts = Path(path), max_bytes, keep_parts
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = self._path.open("ab", buffering=0)
        self._size = _size_of_whole_lines(self._path)
        if self._size < self._path.stat().st_size:
            self._file.truncate(self._size)

    def emit(self, event: Event) -> None:
        """Write one event. Raises ValueError when the sink is closed, OSError when the disk refuses."""
        record: dict[str, object] = {"type": type(event).__name__, "time_s": time.time()}
        values = ((name, getattr(event, name)) for name in _FIELDS[type(event)])
        record |= {name: None if type(value) is float and not math.isfinite(value) else value for name, value in values}
        line = memoryview(_line(record))
        with self._lock:
            self._size += len(line)
            while line:
                line = line[self._file.write(line) :]
            if self._size >= self._max_bytes:
                self._rotate()

    def close(self) -> None:
        """Make the log safe against power loss as well, and close it. Closing twice is allowed."""
        with self._lock:
            if not self._file.closed:
                os.fsync(self._file.fileno())
                self._file.close()

    def _rotate(self) -> None:
        """Rename, then begin anew: whoever dies in between leaves a log without a newest part, which the next run begins."""
        os.fsync(self._file.fileno())
        self._file.close()
        parts = full_parts(self._path)
        number = int(parts[-1].suffixes[-2][1:]) + 1 if parts else 1
        self._path.rename(self._path.with_suffix(f".{number:04d}{self._path.suffix}"))
        self._file = self._path.open("ab", buffering=0)
        self._size = 0
        if self._keep_parts is not None:
            for part in full_parts(self._path)[: -self._keep_parts or None]:
                part.unlink()


def full_parts(path: Path) -> list[Path]:
    """The parts of a log that reached their size, oldest first."""
    numbered = re.compile(re.escape(path.stem) + r"\.(\d{4,})" + re.escape(path.suffix))
    found = [(int(match[1]), part) for part in path.parent.iterdir() if (match := numbered.fullmatch(part.name))]
    return [part for _, part in sorted(found)]


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


def _line(record: dict[str, object]) -> bytes:
    try:
        text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a NaN or an infinity within a list, which is rare
        text = json.dumps(_plain(record), allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value

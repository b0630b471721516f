"""Files that are whole or not there, whoever else writes them meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; it takes path's place when the block ends without an error.

    The name is this thread's own: of several that write the same file, the last one's stays, and none meets another's half.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file's text in one step."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")

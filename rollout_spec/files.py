"""Files that are whole or not there, whoever else writes them meanwhile, and where the kept ones lie."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/rollout_spec``, or ``~/.cache/rollout_spec``: converted models, trained drafters, measured costs, built kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout_spec"


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


def resumed(path: Path, about: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What an interrupted run has written to its JSON file so far, ``about`` alone where there is no file yet.

    ``about`` says what the run is, settings by section. ValueError names those that are others in the file: it is another run's.
    """
    wanted: dict[str, Any] = json.loads(json.dumps(about))  # tuples are lists there
    if not path.exists():
        return wanted
    held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    different = []
    for section, ours in wanted.items():
        theirs = held.get(section, {})
        names = [name for name in {**ours, **theirs} if name not in ours or name not in theirs or theirs[name] != ours[name]]
        different += [f"{name} {_shown(theirs, name)} there, {_shown(ours, name)} here" for name in names]
    if different:
        raise ValueError(f"{path} was made with other settings ({'; '.join(different)}): name another file, or delete it")
    return held


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "not set"

"""Runs from their folders: event logs (one a replica, several parts each), settings, and what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from rollout_spec.events import BudgetEvent, DrafterStaleEvent, RequestEvent, RoundEvent, SinkEvent, TrainEvent, WeightSyncEvent
from rollout_spec.report.bins import Bins
from rollout_spec.sinks.log import BadLine, LoggedEvent, LogTail

_PART = re.compile(r"\.\d{4,}$")
_NOT_LOGS = {"journal"}  # of finished samples, beside the events of an interrupted run
_MAX_KEPT = 2_000  # of the events that are listed one by one
_MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Marked:
    """An event and the round after which it came."""

    round_index: int
    event: Any


@dataclass(kw_only=True)
class Run:
    """What is known of one run; grows while its logs do."""

    name: str
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    bins: Bins = field(default_factory=Bins)
    drafters: set[str] = field(default_factory=set)
    verifiers: set[str] = field(default_factory=set)
    syncs: list[Marked] = field(default_factory=list)
    stale: list[Marked] = field(default_factory=list)
    trained: list[TrainEvent] = field(default_factory=list)
    sinks: dict[str, SinkEvent] = field(default_factory=dict)
    budget_reasons: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)  # messages of failed requests
    num_rounds: int = 0
    num_logs: int = 0
    num_bad_lines: int = 0
    num_unknown_fields: int = 0
    notes: list[str] = field(default_factory=list)  # what a reader must know before believing the figures

    def add(self, logged: LoggedEvent) -> None:
        event = logged.event
        if logged.unknown_fields:
            self.num_unknown_fields += 1
        if isinstance(event, RoundEvent):
            self.num_rounds += 1
            self.drafters.add(event.drafter)
            self.verifiers.add(event.verifier)
        elif isinstance(event, WeightSyncEvent):
            if event.role == "drafter":
                self.bins.drafter_version = event.version
            _keep(self.syncs, Marked(round_index=self.num_rounds, event=event))
        elif isinstance(event, DrafterStaleEvent):
            _keep(self.stale, Marked(round_index=self.num_rounds, event=event))
        elif isinstance(event, TrainEvent):
            _keep(self.trained, event)
        elif isinstance(event, SinkEvent):
            self.sinks[event.sink] = event
        elif isinstance(event, BudgetEvent):
            self.budget_reasons[event.reason] = self.budget_reasons.get(event.reason, 0) + 1
        elif isinstance(event, RequestEvent) and event.error is not None and len(self.errors) < _MAX_KEPT:
            self.errors[event.error] = self.errors.get(event.error, 0) + 1
        self.bins.add(event, logged.time_s)

    @property
    def drafts(self) -> bool:
        return any(part.totals.num_draft_tokens for part in self.bins.bins)

    @property
    def policy_versions(self) -> list[int]:
        return sorted({part.policy_version for part in self.bins.bins if part.policy_version >= 0})


class RunReader:
    """Reads a run's logs, again and again while they grow."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        if not path.exists():
            raise ValueError(f"{path} does not exist: give the folder of a run, or an event log")
        self._path = path
        folder = path if path.is_dir() else path.parent
        self.run = Run(name=name or (path.name if path.is_dir() else path.stem), folder=folder)
        self._tails: dict[Path, LogTail] = {}
        self._bad: list[BadLine] = []
        self._gone: set[str] = set()

    def poll(self) -> bool:
        """Take what is new; True if there was anything. A line that is no event is counted and named in the run's notes."""
        self.run.settings = _settings(self.run.folder)
        for log in logs_of(self._path):
            self._tails.setdefault(log, LogTail(log))
        self.run.num_logs = len(self._tails)
        new: list[LoggedEvent] = []
        for log, tail in self._tails.items():
            try:
                new.extend(self._sound(tail.poll()))
            except FileNotFoundError:
                self._gone.add(log.name)  # deleted while it was followed: what was read of it stays
        if len(self._tails) > 1:
            new.sort(key=attrgetter("time_s"))  # stable: a log's own order is kept among equals
        for logged in new:
            self.run.add(logged)
        self.run.notes = self._notes()
        return bool(new)

    def _sound(self, items: Iterable[LoggedEvent | BadLine]) -> Iterator[LoggedEvent]:
        for item in items:
            if isinstance(item, BadLine):
                self.run.num_bad_lines += 1
                if len(self._bad) < _MAX_NAMED:
                    self._bad.append(item)
            else:
                yield item

    def _notes(self) -> list[str]:
        run = self.run
        notes = []
        if run.num_logs == 0:
            notes.append(f"no event log in {self._path}: nothing was run there yet, or it was run without events")
        elif run.num_rounds == 0:
            notes.append("the event log holds no rounds: the run ended before its first, or has not begun")
        elif not run.drafts:
            notes.append("nothing was drafted in this run: there is no acceptance to show, and its times are those without speculation")
        if run.num_bad_lines:
            named = "; ".join(f"{bad.path.name} line {bad.number}: {bad.reason}" for bad in self._bad)
            notes.append(f"{run.num_bad_lines} lines are no events of this version and were left out ({named})")
        if self._gone:
            notes.append(f"deleted meanwhile: {', '.join(sorted(self._gone))}")
        if run.num_unknown_fields:
            notes.append(f"{run.num_unknown_fields} events have fields that this version does not know: the log was written by another")
        return notes


def read_run(path: Path, name: str | None = None) -> Run:
    """A run's folder (events.jsonl, or one log a replica) or a log. Raises ValueError if there is no such path."""
    reader = RunReader(path, name)
    reader.poll()
    return reader.run


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Several; names that are not unique get their parents' before them."""
    given = list(paths)
    return [read_run(path, name) for path, name in zip(given, unique_names(given), strict=True)]


def unique_names(paths: list[Path]) -> list[str]:
    resolved = [path.resolve() for path in paths]
    if len(set(resolved)) < len(resolved):
        raise ValueError("a run is given twice")
    names = [path.name if path.is_dir() else path.stem for path in resolved]
    for depth in range(2, 9):
        if len(set(names)) == len(names):
            return names
        names = ["/".join(path.parts[-depth:]) if names.count(name) > 1 else name for path, name in zip(resolved, names, strict=True)]
    return [str(path) for path in resolved]


def logs_of(path: Path) -> list[Path]:
    """The event logs of a folder: events.jsonl if it (or a part of it) is there, else every log in it, one level of folders included."""
    if path.is_file():
        return [path]
    found = {_PART.sub("", file.stem): file.with_name(_PART.sub("", file.stem) + ".jsonl") for file in path.glob("*.jsonl")}
    if "events" in found:
        return [found["events"]]
    inner = {file.with_name(_PART.sub("", file.stem) + ".jsonl") for file in path.glob("*/*.jsonl")}
    return sorted({log for name, log in found.items() if name not in _NOT_LOGS} | {log for log in inner if log.stem not in _NOT_LOGS})


def _settings(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "settings.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(kept: list[Any], item: Any) -> None:
    """Every one up to _MAX_KEPT, then every other one: the first and the last stay."""
    kept.append(item)
    if len(kept) > _MAX_KEPT:
        del kept[1:-1:2]

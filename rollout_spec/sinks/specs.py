"""Sinks by the words of a command line or a config: ``prometheus:9464``, ``tensorboard:DIR``, ``wandb:PROJECT``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout_spec.events import EventSink
from rollout_spec.sinks.prometheus import LOOPBACK, PrometheusSink
from rollout_spec.sinks.queued import QueuedSink
from rollout_spec.sinks.telemetry import Telemetry
from rollout_spec.sinks.tensorboard import TensorBoardWriter
from rollout_spec.sinks.wandb import WandbWriter
from rollout_spec.sinks.window import Axis, WindowSink

SINK_WORDS = "prometheus[:[HOST:]PORT], tensorboard[:DIR], wandb[:PROJECT]"


@dataclass(frozen=True, kw_only=True)
class SinkPlace:
    """Who reports, and where its files go."""

    folder: Path
    replica: str = "0"
    drafter: str = "none"
    axis: Axis = Axis.ROUND
    config: Mapping[str, object] = field(default_factory=dict)  # of the run, for wandb


def open_telemetry(record: EventSink, specs: Sequence[str], place: SinkPlace, further: Sequence[QueuedSink] = ()) -> Telemetry:
    """The record, the sinks that ``specs`` name, each behind its own queue, and ``further`` ones that are open already.

    Raises ValueError for an unknown word, a sink named twice, a package that is not installed and a port that is taken; sinks that were
    opened before are closed then.
    """
    queued = list(further)
    served: list[PrometheusSink] = []
    try:
        for spec in specs:
            kind, _, rest = spec.partition(":")
            if any(sink.name == kind for sink in queued):
                raise ValueError(f"sink {kind} is named twice")
            sink = _open(kind, rest, place)
            queued.append(QueuedSink(kind, sink))
            if isinstance(sink, PrometheusSink):
                served.append(sink)
    except ValueError:
        for opened in queued:
            opened.close()
        raise
    telemetry = Telemetry(record, queued)
    for sink in served:
        sink.watch(telemetry.health)
    return telemetry


def _open(kind: str, rest: str, place: SinkPlace) -> EventSink:
    if kind == "prometheus":
        host, port = parse_address(rest)
        targets = targets_file(place.folder, place.replica)
        return PrometheusSink(replica=place.replica, drafter=place.drafter, host=host, port=port, targets_file=targets)
    if kind == "tensorboard":
        folder = Path(rest) if rest else place.folder / "tensorboard"
        return WindowSink(TensorBoardWriter(folder / f"replica-{place.replica}"), axis=place.axis)
    if kind == "wandb":
        return WindowSink(WandbWriter(rest or "rollout_spec", place.folder, place.config, axis=place.axis), axis=place.axis)
    raise ValueError(f"unknown sink {kind!r}: give {SINK_WORDS}")


def targets_file(folder: Path, replica: str) -> Path:
    """Where a replica of the run in ``folder`` says what to scrape. Beside the runs, not in them: Prometheus looks into one folder only."""
    whole = folder.absolute()
    return whole.parent / "prometheus" / f"{whole.name}-{replica}.json"


def forget_targets(folder: Path) -> None:
    """Remove what numbered replicas of a run that is over left there: those that were killed could not do it."""
    name = folder.absolute().name
    for path in targets_file(folder, "").parent.glob("*.json"):
        run, _, replica = path.stem.rpartition("-")
        if run == name and replica.isdecimal():
            path.unlink(missing_ok=True)


def parse_address(text: str) -> tuple[str, int]:
    """ "HOST:PORT", "PORT" (loopback) or "" (loopback, a free port)."""
    host, _, port = text.rpartition(":")
    if not port:
        port = "0"
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address: give PORT or HOST:PORT, like 9464 or 0.0.0.0:9464")
    return host or LOOPBACK, int(port)

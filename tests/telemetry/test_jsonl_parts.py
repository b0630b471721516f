"""Logs of several parts: rotation, crashes around it, readers beside a writer, and a million events with a kill in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from streams import a_round

from rollout_spec.events import RoundEvent, TrainEvent
from rollout_spec.sinks import JsonlSink, read_events
from rollout_spec.sinks.jsonl import full_parts
from rollout_spec.sinks.log import BadLine, LoggedEvent, LogTail, scan_log


def steps(path: Path) -> list[int]:
    return [event.step for event in read_events(path) if isinstance(event, TrainEvent)]


def train(step: int) -> TrainEvent:
    return TrainEvent(step=step, loss=0.5, metrics={"alpha": 0.25})


def fill(path: Path, first: int, last: int, **settings: int) -> None:
    sink = JsonlSink(path, **settings)
    for step in range(first, last):
        sink.emit(train(step))
    sink.close()


def test_parts_are_read_as_one_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    fill(path, 0, 100, max_bytes=1000)
    parts = full_parts(path)
    assert [part.name for part in parts[:2]] == ["events.0001.jsonl", "events.0002.jsonl"]
    assert all(1000 <= part.stat().st_size < 1200 for part in parts)
    assert steps(path) == list(range(100))
    fill(path, 100, 150, max_bytes=1000)
    assert steps(path) == list(range(150))


def test_only_so_many_parts_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    fill(path, 0, 200, max_bytes=1000, keep_parts=2)
    assert len(full_parts(path)) == 2
    kept = steps(path)
    assert kept == list(range(kept[0], 200))
    assert kept[0] > 100
    fill(tmp_path / "none.jsonl", 0, 200, max_bytes=1000, keep_parts=0)
    assert full_parts(tmp_path / "none.jsonl") == []


def test_a_death_between_renaming_and_beginning_anew_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    fill(path, 0, 10)
    path.rename(tmp_path / "events.0001.jsonl")
    assert steps(path) == list(range(10))
    fill(path, 10, 20)
    assert steps(path) == list(range(20))


@pytest.mark.parametrize(("name", "value"), [("max_bytes", 0), ("keep_parts", -1)])
def test_wrong_sizes_are_refused(tmp_path: Path, name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        JsonlSink(tmp_path / "events.jsonl", **{name: value})


def test_a_tail_sees_every_event_once_over_rotations_and_torn_writes(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = LogTail(path)
    with pytest.raises(FileNotFoundError, match="no event log"):
        list(tail.poll())
    sink = JsonlSink(path, max_bytes=700)
    seen: list[int] = []
    for step in range(200):
        sink.emit(train(step))
        if step % 7 == 0:
            seen += [item.event.step for item in tail.poll() if isinstance(item, LoggedEvent) and isinstance(item.event, TrainEvent)]
            assert seen == list(range(step + 1))
    sink.close()
    with path.open("ab") as file:
        file.write(b'{"type":"TrainEvent","time_s":1')
    last = list(tail.poll())
    assert all(isinstance(item, LoggedEvent) for item in last)
    with path.open("ab") as file:
        file.write(b'.5,"step":200,"loss":null,"metrics":{}}\n')
    (item,) = tail.poll()
    assert isinstance(item, LoggedEvent)
    assert isinstance(item.event, TrainEvent)
    assert item.event.step == 200


def test_lines_of_other_versions_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    sink.emit(a_round())
    sink.close()
    line = path.read_text()
    newer = line.replace('"round_index":0', '"round_index":1,"colour":"red"')
    path.write_text(line + newer + '{"type":"FutureEvent","time_s":1}\n' + "\x00\x00torn{\n" + line)
    items = list(scan_log(path))
    assert [type(item) for item in items] == [LoggedEvent, LoggedEvent, BadLine, BadLine, LoggedEvent]
    assert isinstance(items[1], LoggedEvent)
    assert items[1].unknown_fields == ("colour",)
    assert isinstance(items[1].event, RoundEvent)
    assert items[1].event.round_index == 1
    assert isinstance(items[2], BadLine)
    assert (items[2].number, items[2].reason) == (3, "unknown type 'FutureEvent'")


@pytest.mark.slow
def test_a_million_events_and_a_kill_in_the_middle(tmp_path: Path) -> None:
    """The writer is killed after 10^6 events; every line is whole but for the last, and none before it is missing."""
    path = tmp_path / "events.jsonl"
    program = (
        "import sys\n"
        "from rollout_spec.events import TrainEvent\n"
        "from rollout_spec.sinks import JsonlSink\n"
        "sink = JsonlSink(sys.argv[1], max_bytes=16 * 1024 * 1024)\n"
        "for step in range(10**9):\n"
        "    sink.emit(TrainEvent(step=step, loss=0.5, metrics={}))\n"
        "    if step % 50_000 == 0: print(step, flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        while int(writer.stdout.readline()) < 1_000_000:
            pass
        writer.send_signal(signal.SIGKILL)
    assert len(full_parts(path)) > 3
    count = torn = 0
    for part in (*full_parts(path), path):
        with part.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    # The bytes of the fields that matter; parsing a million lines would be most of the test's time.
                    assert line.startswith(b'{"type":"TrainEvent","time_s":')
                    assert b',"step":%d,"loss":0.5,"metrics":{}' % count in line
                    count += 1
                else:
                    torn += 1
    assert count > 1_000_000
    assert torn <= 1
    fill(path, count, count + 1)
    assert path.read_bytes().count(b"\n") > 0
    assert b',"step":%d,"loss":0.5,"metrics":{"alpha":0.25}' % count in path.read_bytes().splitlines()[-1]

"""The report and the live page in a real browser: no error on the console, every panel there; and what they say of bad logs."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result
from streams import a_round, plain_round, story, write
from typer.testing import CliRunner

from rollout_spec.events import SinkEvent, TrainEvent, WeightSyncEvent
from rollout_spec.job import SCHEMA
from rollout_spec.report import live
from rollout_spec.report.live import Dashboard, Watcher
from rollout_spec.report.page import page_data, report_page
from rollout_spec.report.panels import panels
from rollout_spec.report.runs import RunReader, read_run, read_runs
from rollout_spec.sinks import JsonlSink
from rollout_spec_rl.compose import COMPOSITION, application

pytest.importorskip("plotly")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)")


def run_command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application(), [*map(str, arguments)], obj=COMPOSITION)


class Seen:
    """A page as the browser had it at the end."""

    def __init__(self, dom: str, log: str) -> None:
        self.dom = dom
        self.console = re.findall(r"CONSOLE.*", log)

    @property
    def num_plots(self) -> int:
        return self.dom.count('class="main-svg"') and len(re.findall(r'class="plot[^"]*js-plotly-plot', self.dom))

    def attribute(self, name: str) -> int:
        found = re.search(rf'<body[^>]*data-{name}="(\d+)"', self.dom)
        assert found is not None, f"the page never set {name}"
        return int(found[1])


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., Seen]:
    def open_page(address: str, *, height: int = 6000, budget_ms: int = 15_000, dark: bool = False) -> Seen:
        assert CHROMIUM is not None
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--virtual-time-budget={budget_ms}"]
        options += [f"--user-data-dir={tmp_path / 'browser'}", f"--window-size=1400,{height}"]
        options += ["--blink-settings=preferredColorScheme=0"] if dark else []
        done = subprocess.run([CHROMIUM, *options, "--dump-dom", address], capture_output=True, text=True, check=True)
        return Seen(done.stdout, done.stderr)

    return open_page


def with_samples(folder: Path) -> Path:
    """A run's folder with rollouts and settings beside the log."""
    write(folder / "events.jsonl", story(400, accept=[0.7, 0.7], entropy=[1.0, 1.5]))
    row = dict.fromkeys(SCHEMA.names)
    row |= {
        "prompt_id": "p",
        "sample_index": 0,
        "token_ids": [5, 6, 7, 8, 9],
        "processed_logprobs": [-0.5] * 5,
        "entropies": [1.25] * 5,
        "accepted_depths": [-1, 1, 2, -1, 0],
        "finish_reason": "stop",
        "num_rounds": 3,
    }
    pq.write_table(pa.Table.from_pylist([row], schema=SCHEMA), folder / "rollouts.parquet")
    (folder / "settings.json").write_text(json.dumps({"model": "</script><b>none</b>", "budget": "fixed:3"}))
    return folder


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_the_report_opens_without_a_complaint(tmp_path: Path, browse: Callable[..., Seen], dark: bool) -> None:
    first, second = with_samples(tmp_path / "first"), tmp_path / "second"
    write(second / "events.jsonl", story(400, accept=[0.3], entropy=[2.0]))
    done = run_command("report", first, second, "--out", tmp_path / "report.html", "--ids")
    assert done.exit_code == 0, done.output
    seen = browse(f"file://{tmp_path}/report.html", dark=dark)
    assert seen.console == []
    drawn = [panel for panel in panels(read_runs([first, second])) if not panel.record()["empty"]]
    assert len(drawn) >= 13
    assert seen.num_plots == seen.attribute("drawn") == len(drawn)
    assert f'data-theme="{"dark" if dark else "light"}"' in seen.dom
    assert "Speculation saved" in seen.dom
    # The viewer: how each token came, for the eye, for the hand, and for a reader of the page.
    kinds = re.findall(r'<span class="token (\w+)" title="([^"]*)"', seen.dom)
    assert [kind for kind, _ in kinds] == ["undrafted", "accepted", "accepted", "bonus", "recovered"]
    assert "accepted at depth 2; log-probability -0.5, entropy 1.25 nats" in kinds[2][1]
    assert "<b>none</b>" not in seen.dom


@pytest.mark.slow
@needs_chromium
def test_a_hundred_thousand_rounds_open_in_three_seconds(tmp_path: Path, browse: Callable[..., Seen]) -> None:
    folder = tmp_path / "long"
    write(folder / "events.jsonl", story(100_000, accept=[0.7] * 50, entropy=[1.0 + step / 25 for step in range(50)]))
    page = report_page([read_run(folder)])
    (tmp_path / "long.html").write_text(page, encoding="utf-8")
    assert len(page.encode()) < 10_000_000
    seen = browse(f"file://{tmp_path}/long.html", height=1000)
    assert seen.console == []
    # What fits a screen is drawn; docs/telemetry.md has the time on a quiet machine, here others may be at work.
    assert seen.attribute("drawn") >= 3
    assert seen.attribute("drawn-ms") < 30_000


@needs_chromium
def test_the_live_page_follows_a_run(tmp_path: Path, browse: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    """The browser's clock stands still while it waits for events: it shows what it had when the server went away."""
    path = tmp_path / "run" / "events.jsonl"
    sink = JsonlSink(path)
    sink.emit(a_round())
    watcher = Watcher([path.parent], every_s=0.05)
    server = Dashboard(watcher, host="127.0.0.1", port=0, token=None)
    followed = threading.Event()
    stream_events = live._Handler._stream
    monkeypatch.setattr(live._Handler, "_stream", lambda handler: (followed.set(), stream_events(handler)))

    def run_on() -> None:
        assert followed.wait(120)
        for index in range(1, 100):
            sink.emit(a_round(index))
            time.sleep(0.02)
        sink.close()
        while len(watcher.latest()[1]["panels"][0]["traces"][0]["x"]) < 100:
            time.sleep(0.05)
        time.sleep(2)  # for the last message to arrive
        server.stop()

    threads = [threading.Thread(target=server.serve, args=(lambda address: None,)), threading.Thread(target=run_on)]
    for thread in threads:
        thread.start()
    seen = browse(server.address, budget_ms=4_000)
    for thread in threads:
        thread.join()
    assert [line for line in seen.console if "ERR_" not in line] == []  # but for the server that went away
    assert seen.num_plots > 8
    assert "100 rounds</small>" in seen.dom
    assert "the server is gone; trying again" in seen.dom


def stream(address: str) -> Iterator[dict[str, object]]:
    with urllib.request.urlopen(address, timeout=30) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def test_events_are_pushed_as_the_log_grows(tmp_path: Path) -> None:
    sinks = [JsonlSink(tmp_path / name / "events.jsonl") for name in ("a", "b")]
    for sink in sinks:
        sink.emit(plain_round(0))
    server = Dashboard(Watcher([tmp_path / "a", tmp_path / "b"], every_s=0.05), host="127.0.0.1", port=0, token="secret")
    thread = threading.Thread(target=server.serve, args=(lambda address: None,))
    thread.start()
    try:
        base, query = server.address.split("?")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(base, timeout=10)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{base}events?token=wrong", timeout=10)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{base}etc/passwd?{query}", timeout=10)
        news = stream(f"{base}events?{query}")
        first = next(news)
        sinks[1].emit(a_round(1))
        second = next(news)
        news.close()  # type: ignore[attr-defined]
    finally:
        server.stop()
        thread.join()
        for sink in sinks:
            sink.close()
    assert [run["rounds"] for run in first["runs"]] == [1, 1]  # type: ignore[attr-defined]
    assert [run["rounds"] for run in second["runs"]] == [1, 2]  # type: ignore[attr-defined]


def test_a_foreign_name_for_this_machine_is_turned_away(tmp_path: Path) -> None:
    write(tmp_path / "run" / "events.jsonl", iter([a_round()]))
    server = Dashboard(Watcher([tmp_path / "run"]), host="127.0.0.1", port=0, token=None)
    thread = threading.Thread(target=server.serve, args=(lambda address: None,))
    thread.start()
    try:
        request = urllib.request.Request(server.address, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=30)
        with urllib.request.urlopen(server.address, timeout=30) as answer:
            assert answer.status == 200
    finally:
        server.stop()
        thread.join()


def test_a_log_that_is_deleted_under_watch_leaves_what_was_read(tmp_path: Path) -> None:
    path = write(tmp_path / "run" / "events.jsonl", iter([a_round()]))
    reader = RunReader(path.parent)
    assert reader.poll()
    path.unlink()
    assert not reader.poll()
    assert reader.run.num_rounds == 1
    assert "deleted meanwhile: events.jsonl" in reader.run.notes


def test_binding_elsewhere_needs_a_token(tmp_path: Path) -> None:
    write(tmp_path / "run" / "events.jsonl", iter([a_round()]))
    done = run_command("dashboard", tmp_path / "run", "--host", "0.0.0.0", "--port", "0")
    assert done.exit_code == 2
    assert "--token" in done.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run_command("dashboard", tmp_path / "run", "--port", str(taken.getsockname()[1]))
    assert done.exit_code == 2
    assert "cannot be used" in done.stderr


# What is wrong with a log is said, and what there is is shown


def notes(folder: Path) -> str:
    run = read_run(folder)
    data = page_data([run])
    json.dumps(data, allow_nan=False)  # and nothing in it is no number
    return " ".join(run.notes)


def test_a_torn_log_is_read_around_its_faults(tmp_path: Path) -> None:
    path = write(tmp_path / "run" / "events.jsonl", story(80, accept=[0.5], entropy=[1.0]))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:40], lines[40][:30] + "\n", "\x00\n", *lines[41:], lines[-1][:50]]))
    said = notes(path.parent)
    assert "2 lines are no events of this version and were left out (events.jsonl line 41" in said
    assert read_run(path.parent).num_rounds == 79


def test_logs_of_other_versions_are_told_and_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "run" / "events.jsonl", story(80, accept=[0.5], entropy=[1.0]))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        if line["type"] == "RoundEvent" and number % 2:  # the first version's rounds
            for name in [
                key for key in line if key.endswith("_context") or key.startswith("predicted") or key in ("draft_depth", "budget_s")
            ]:
                del line[name]
        elif line["type"] == "RoundEvent":
            line["colour"] = "red"  # a version to come
    lines.append({"type": "FutureEvent", "time_s": 1.0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = notes(path.parent)
    assert "40 events have fields that this version does not know" in said
    assert "unknown type 'FutureEvent'" in said
    assert read_run(path.parent).num_rounds == 80


def test_a_run_without_speculation_says_so(tmp_path: Path) -> None:
    write(tmp_path / "run" / "events.jsonl", iter([plain_round(index) for index in range(50)]))
    assert "nothing was drafted" in notes(tmp_path / "run")
    shown = {panel["name"]: panel["empty"] for panel in page_data([read_run(tmp_path / "run")])["panels"]}
    assert shown["acceptance"] == shown["depth"] == "Nothing was drafted."
    assert shown["time"] == shown["tokens"] == shown["entropy"] == ""


def test_an_empty_run_and_an_empty_folder_say_so(tmp_path: Path) -> None:
    write(tmp_path / "empty" / "events.jsonl", iter([]))
    (tmp_path / "nothing").mkdir()
    assert "holds no rounds" in notes(tmp_path / "empty")
    assert "no event log" in notes(tmp_path / "nothing")
    done = run_command("report", tmp_path / "empty", tmp_path / "nothing", "--out", tmp_path / "r.html")
    assert done.exit_code == 0
    assert done.output.count("There are no rounds to judge.") == 2
    done = run_command("report", tmp_path / "missing", "--out", tmp_path / "r.html")
    assert done.exit_code == 2
    assert "missing does not exist" in " ".join(done.stderr.split())


def test_replicas_are_one_run_in_the_order_of_time(tmp_path: Path) -> None:
    sinks = [JsonlSink(tmp_path / "events" / f"replica-{rank}.jsonl", max_bytes=2_000) for rank in range(3)]
    for index in range(30):
        sinks[index % 3].emit(a_round(index, weights_version=index // 10))
        time.sleep(0.001)
    for sink in sinks:
        sink.emit(WeightSyncEvent(role="target", version=3, num_tensors=1, checksum="x", seconds=0.1))
        sink.close()
    (tmp_path / "events" / "journal.jsonl").write_text("no events at all\n")
    run = read_run(tmp_path / "events")
    assert (run.num_logs, run.num_rounds, run.num_bad_lines) == (3, 30, 0)
    versions = [part.policy_version for part in run.bins.bins]
    assert versions == sorted(versions)
    assert len(run.syncs) == 3


def test_long_runs_are_merged_into_few_bins_and_lose_nothing(tmp_path: Path) -> None:
    write(tmp_path / "run" / "events.jsonl", iter([a_round(index) for index in range(3_333)]))
    run = read_run(tmp_path / "run")
    assert 100 < len(run.bins.bins) <= 200
    assert run.bins.width == 32
    assert all(part.totals.num_rounds == 32 for part in run.bins.bins[:-1])
    total = run.bins.total().totals
    assert (total.num_rounds, total.num_accepted_tokens) == (3_333, 6_666)


def test_what_the_trainer_and_the_sinks_say_is_shown(tmp_path: Path) -> None:
    events = [
        a_round(),
        TrainEvent(step=1, loss=0.5, metrics={"rollout_corr/rollout_is_mean": 1.25, "actor/lr": 1.0}),
        SinkEvent(sink="wandb", num_delivered=90, num_dropped=7, num_failed=3),
    ]
    write(tmp_path / "run" / "events.jsonl", iter(events))
    data = page_data([read_run(tmp_path / "run")])
    shown = {panel["name"]: panel["traces"] for panel in data["panels"]}
    assert [trace["y"] for trace in shown["importance"]] == [[1.25]]
    assert [(trace["x"], trace["y"]) for trace in shown["drops"]] == [(["wandb"], [7]), (["wandb"], [3])]
    assert "lost 10 of 100 events" in json.dumps(data["runs"][0]["verdict"])


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for epoch in ("epoch0", "epoch1"):
        write(tmp_path / epoch / "suffix" / "events.jsonl", iter([a_round()]))
    runs = read_runs([tmp_path / "epoch0" / "suffix", tmp_path / "epoch1" / "suffix"])
    assert [run.name for run in runs] == ["epoch0/suffix", "epoch1/suffix"]
    with pytest.raises(ValueError, match="given twice"):
        read_runs([tmp_path / "epoch0", tmp_path / "epoch0"])

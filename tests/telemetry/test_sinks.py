"""TensorBoard, wandb and Prometheus: what is written is what the metrics say, under the step it belongs to."""

from __future__ import annotations

import json
import re
import socket
import struct
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from streams import a_request, a_round, plain_round, story

from rollout_spec.events import PrefillEvent, TrainEvent, WeightSyncEvent
from rollout_spec.metrics import compute
from rollout_spec.sinks import MemorySink
from rollout_spec.sinks.queued import SinkHealth
from rollout_spec.sinks.specs import SinkPlace, open_telemetry, parse_address
from rollout_spec.sinks.summary import SummarySink
from rollout_spec.sinks.window import Axis, WindowSink


class Points:
    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float], list[int]]] = []
        self.trained: list[TrainEvent] = []
        self.closed = False

    def point(self, step: int, figures: dict[str, float], accepted_lengths: Sequence[int]) -> None:
        self.points.append((step, figures, list(accepted_lengths)))

    def train(self, event: TrainEvent) -> None:
        self.trained.append(event)

    def close(self) -> None:
        self.closed = True


def test_a_point_is_a_span_of_time() -> None:
    now = [0.0]
    points = Points()
    sink = WindowSink(points, every_s=10.0, clock=lambda: now[0])
    for index in range(25):
        now[0] = float(index)
        sink.emit(a_round(index))
    sink.close()
    assert points.closed
    assert [step for step, _, _ in points.points] == [10, 20, 24]
    assert [figures["num_rounds"] for _, figures, _ in points.points] == [11.0, 10.0, 4.0]
    assert points.points[0][1]["accept_length"] == pytest.approx(2.0)
    assert points.points[0][1]["accept_rate_by_depth_1"] == 0.5
    assert points.points[0][2] == [11, 0, 11, 0]


def test_a_point_never_mixes_two_policies() -> None:
    points = Points()
    sink = WindowSink(points, axis=Axis.GLOBAL_STEP, every_s=1e9)
    for event in story(90, accept=[0.8, 0.2, 0.5], entropy=[1.0, 1.0, 1.0]):
        sink.emit(event)
    sink.close()
    assert [step for step, _, _ in points.points] == [0, 1, 2]
    rates = [figures["accept_rate"] for _, figures, _ in points.points]
    assert rates[0] > rates[2] > rates[1]
    # What the first span learnt of rounds without a draft serves the next one from its first round on.
    assert all("speedup" in figures for _, figures, _ in points.points)


def test_tensorboard_holds_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place = SinkPlace(folder=tmp_path)
    telemetry = open_telemetry(MemorySink(), ["tensorboard"], place)
    events = list(story(64, accept=[0.6], entropy=[1.0]))
    totals = SummarySink()
    for event in events:
        telemetry.emit(event)
        totals.emit(event)
    telemetry.emit(TrainEvent(step=7, loss=0.25, metrics={"alpha_1": 0.5}))
    telemetry.close()
    held = EventAccumulator(str(tmp_path / "tensorboard" / "replica-0"))
    held.Reload()
    (point,) = held.Scalars("rollout_spec/accept_length")
    assert point.step == 63
    assert point.value == pytest.approx(compute(totals)["accept_length"])
    assert [(scalar.step, scalar.value) for scalar in held.Scalars("train_drafter/loss")] == [(7, 0.25)]
    (histogram,) = held.Histograms("rollout_spec/accepted_length")
    assert histogram.histogram_value.num == totals.num_request_rounds
    assert histogram.histogram_value.sum == totals.num_accepted_tokens


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Of an offline run's file: after 7 bytes, blocks of 32 KiB of (checksum 4, length 2, type 1, bytes) as in LevelDB's logs."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            yield parts
            parts = b""


def test_wandb_offline_plots_over_the_global_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    place = SinkPlace(folder=tmp_path, axis=Axis.GLOBAL_STEP, config={"drafter": "suffix"})
    telemetry = open_telemetry(MemorySink(), ["wandb:tests"], place)
    for event in story(60, accept=[0.6, 0.5], entropy=[1.0, 1.5]):
        telemetry.emit(event)
    telemetry.emit(TrainEvent(step=2, loss=0.25, metrics={}))
    telemetry.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows, axes = [], {}
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.history.item:
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
        if record.metric.glob_name or record.metric.step_metric:
            axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
    assert axes["rollout_spec/*"] == axes["train_policy/*"] == axes["train_drafter/*"] == "global_step"
    assert [row["global_step"] for row in rows] == [0, 2, 1]  # the last span ends with the run, after the trainer's step
    for row in (rows[0], rows[2]):
        assert row["rollout_spec/accept_length"] > 1
        assert row["rollout_spec/accepted_length_histogram/_type"] == "histogram"
    assert rows[1]["train_drafter/loss"] == 0.25


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[dict[str, float]]:
    """What Prometheus would get after a known stream."""
    pytest.importorskip("prometheus_client")
    telemetry = open_telemetry(MemorySink(), ["prometheus"], SinkPlace(folder=tmp_path / "run", replica="3", drafter="suffix"))
    with closing(telemetry):
        telemetry.emit(PrefillEvent(num_prompts=1, num_tokens=9, num_shared_tokens=4, target_s=0.5))
        for version in range(1, 6):
            telemetry.emit(WeightSyncEvent(role="target", version=version, num_tensors=2, checksum=f"c{version}", seconds=0.25))
        telemetry.emit(plain_round(0))
        telemetry.emit(a_round(1))
        telemetry.emit(a_round(2, mean_entropy=float("nan")))
        telemetry.emit(a_request(weights_version=2))
        telemetry.emit(TrainEvent(step=4, loss=0.1, metrics={"rollout_corr/rollout_is_mean": 1.01}, role="policy"))
        (targets,) = json.loads((tmp_path / "prometheus" / "run-3.json").read_text())
        assert targets["labels"] == {"engine": "rollout_spec", "replica": "3", "drafter": "suffix"}
        (address,) = targets["targets"]
        assert address.startswith("127.0.0.1:")
        while telemetry.health()[0].num_delivered < 11:
            pass
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        yield {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")}
    assert not (tmp_path / "prometheus" / "run-3.json").exists()


def at(scraped: dict[str, float], name: str, **labels: str) -> float:
    wanted = {"drafter": "suffix", "engine": "rollout_spec", "replica": "3", **labels}
    found = [
        value for key, value in scraped.items() if key.partition("{")[0] == name and dict(re.findall(r'(\w+)="([^"]*)"', key)) == wanted
    ]
    (value,) = found
    return value


def test_prometheus_serves_what_was_counted(scraped: dict[str, float]) -> None:
    for name, wanted in {
        "rounds": 3, "request_rounds": 6, "drafts": 4, "draft_tokens": 12, "accepted_tokens": 4, "emitted_tokens": 10,
        "undrafted_rounds": 1, "not_finite_rounds": 1, "entropy_nats_sum": 6.0, "entropy_tokens": 6, "policy_lag_versions_sum": 2,
        "policy_lag_requests": 1,
    }.items():  # fmt: skip
        assert at(scraped, f"rollout_spec_{name}_total") == pytest.approx(wanted), name
    assert at(scraped, "rollout_spec_drafted_at_depth_total", depth="2") == 2
    assert at(scraped, "rollout_spec_accepted_at_depth_total", depth="1") == 2
    assert at(scraped, "rollout_spec_request_rounds_by_context_total", context="64") == 4
    assert at(scraped, "rollout_spec_accepted_by_entropy_total", entropy="1.0") == 1
    assert at(scraped, "rollout_spec_seconds_total", part="prefill") == 0.5
    assert at(scraped, "rollout_spec_seconds_total", part="draft") == pytest.approx(0.004)
    assert at(scraped, "rollout_spec_prompt_tokens_total", source="shared") == 4
    assert at(scraped, "rollout_spec_requests_total", finish_reason="length") == 1
    # There before they first count: or the first fault would be no increase.
    assert at(scraped, "rollout_spec_requests_total", finish_reason="error") == 0
    assert at(scraped, "rollout_spec_drafter_stale_total") == 0
    assert at(scraped, "rollout_spec_off_seconds_total", draft_length="3") == pytest.approx(2 * 2 * 0.015)
    assert at(scraped, "rollout_spec_compared_seconds_total", draft_length="3") == pytest.approx(0.04)
    assert at(scraped, "rollout_spec_accepted_length_bucket", le="0.0") == 4
    assert at(scraped, "rollout_spec_accepted_length_sum") == 4
    assert at(scraped, "rollout_spec_importance_ratio", stat="mean") == 1.01
    assert at(scraped, "rollout_spec_sink_events_total", sink="prometheus", outcome="delivered") >= 11
    assert at(scraped, "rollout_spec_sink_events_total", sink="prometheus", outcome="dropped") == 0


def test_only_the_weights_in_use_have_a_label(scraped: dict[str, float]) -> None:
    info = [key for key in scraped if key.startswith("rollout_spec_weights_info")]
    assert len(info) == 1
    assert 'weights_version="5"' in info[0]
    assert 'checksum="c5"' in info[0]


def test_hundreds_of_versions_and_depths_leave_few_series(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from rollout_spec.sinks.prometheus import PrometheusSink

    sink = PrometheusSink()
    with closing(sink):
        for version in range(400):
            sink.emit(WeightSyncEvent(role="target", version=version, num_tensors=1, checksum=f"{version}", seconds=0.1))
            depth = version % 300 + 1
            sink.emit(
                a_round(
                    version,
                    drafted_by_depth=(1,) * depth,
                    accepted_by_depth=(1,) * depth,
                    mean_accept_prob_by_depth=(0.5,) * depth,
                    mean_entropy=float(version % 40),
                )
            )
        num_series = sum(len(family.samples) for family in sink.registry.collect())
    assert num_series < 1_200


def test_losses_show_even_when_the_queue_of_prometheus_itself_is_full(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from rollout_spec.sinks.prometheus import PrometheusSink

    sink = PrometheusSink()
    with closing(sink):
        sink.watch(lambda: [SinkHealth(name="prometheus", num_emitted=9, num_delivered=2, num_dropped=7, num_failed=0)])
        with urllib.request.urlopen(f"http://{sink.address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    assert re.search(r'rollout_spec_sink_events_total\{[^}]*outcome="dropped"[^}]*\} 7\.0', text)


def test_a_taken_port_is_one_clear_error(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
            open_telemetry(MemorySink(), [f"prometheus:{port}"], SinkPlace(folder=tmp_path))


@pytest.mark.parametrize(("text", "address"), [("", ("127.0.0.1", 0)), ("9464", ("127.0.0.1", 9464)), ("0.0.0.0:1", ("0.0.0.0", 1))])
def test_addresses_are_loopback_unless_said_otherwise(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("spec", "message"),
    [("graphite", "unknown sink 'graphite'"), ("prometheus:x", "'x' is no address"), ("prometheus:70000", "no address")],
)
def test_wrong_words(tmp_path: Path, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_telemetry(MemorySink(), [spec], SinkPlace(folder=tmp_path))


def test_a_sink_is_named_once(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with pytest.raises(ValueError, match="named twice"):
        open_telemetry(MemorySink(), ["prometheus", "prometheus"], SinkPlace(folder=tmp_path))


@pytest.mark.parametrize(
    ("module", "spec"), [("prometheus_client", "prometheus"), ("wandb", "wandb"), ("torch.utils.tensorboard", "tensorboard")]
)
def test_a_missing_package_is_named_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, spec: str) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ValueError, match=re.escape(f"pip install 'rollout-spec[{spec}]'")):
        open_telemetry(MemorySink(), [spec], SinkPlace(folder=tmp_path))

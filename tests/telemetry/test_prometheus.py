"""A real Prometheus: every panel of the Grafana dashboard has data from a real run, and every alarm is tried on its fault."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from rollout_spec.budget import Budget, BudgetSignals, FixedBudget
from rollout_spec.controllers.selection import accept_by_depth
from rollout_spec.drafters.self_draft import SelfConfig, SelfDrafter
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import make_runner
from rollout_spec.engine.request import Request
from rollout_spec.events import DrafterStaleEvent, TrainEvent, WeightSyncEvent
from rollout_spec.sinks import MemorySink
from rollout_spec.sinks.specs import SinkPlace, open_telemetry
from rollout_spec.sinks.telemetry import Telemetry

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DASHBOARD = CONFIGS / "grafana" / "rollout_spec.json"
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here (Debian: apt-get install prometheus)")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here (Debian: apt-get install prometheus)")


def test_the_dashboard_is_what_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("build_dashboard", CONFIGS / "grafana" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert json.loads(DASHBOARD.read_text(encoding="utf-8")) == build.dashboard(), "run python configs/grafana/build.py"


@needs_promtool
@pytest.mark.parametrize(
    "command", [("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml"), ("check", "config", "prometheus.yml")]
)
def test_promtool_agrees(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=CONFIGS / "prometheus", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alarm_is_tried_on_its_fault_and_on_a_healthy_replica() -> None:
    rules = yaml.safe_load((CONFIGS / "prometheus" / "rules.yml").read_text())
    alarms = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    tests = yaml.safe_load((CONFIGS / "prometheus" / "rules_test.yml").read_text())["tests"]
    tried = [case for test in tests for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in tried if case["exp_alerts"]} == alarms
    assert {case["alertname"] for case in tried if not case["exp_alerts"]} == alarms


class EveryOther:
    """Drafts three tokens in one round and none in the next, so that both sides of the speed-up are there, and tells what it expects."""

    name = "every_other"

    def __init__(self) -> None:
        self._count = itertools.count()

    def decide(self, signals: BudgetSignals, state: object) -> tuple[Budget, object]:
        budget, state = FixedBudget(draft_length=3 * (next(self._count) % 2)).decide(signals, state)
        expected = accept_by_depth(signals.forecast, budget.draft_lengths.numpy())
        return dataclasses.replace(budget, decision=dataclasses.replace(budget.decision, accept_by_depth=expected)), state


class RealRun:
    """Rollouts of a tiny model that go on in a thread, with the trainer's part of the events."""

    def __init__(self, telemetry: Telemetry) -> None:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=61,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                eos_token_id=2,
            )
        ).eval()
        self._runner = make_runner(model, max_context=128)
        self._telemetry = telemetry
        self._engine = Engine(
            self._runner,
            config=EngineConfig(max_batch=2, max_context=128),
            drafter=SelfDrafter(SelfConfig(temperature=0.7)),
            controller=EveryOther(),
            sink=telemetry,
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for step in itertools.count(1):
            prompts = [(3, 4, 5), tuple(range(3, 60))]
            self._engine.generate([Request(prompt_token_ids=prompt, max_new_tokens=40, ignore_eos=True) for prompt in prompts])
            self._engine.update_weights(dict(self._runner.named_weights()).items(), version=step)
            self._telemetry.emit(WeightSyncEvent(role="drafter", version=step, num_tensors=1, checksum="d", seconds=0.1))
            self._telemetry.emit(TrainEvent(step=step, loss=0.1, metrics={"rollout_corr/rollout_is_mean": 1.0}, role="policy"))
            self._telemetry.emit(
                DrafterStaleEvent(
                    round_index=0, drafter="self", weights_version=step, accept_prob=0.1, reference_accept_prob=0.5, mean_entropy=1.0
                )
            )
            if self._stop.wait(0.2):
                return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A Prometheus that scrapes what writes its address below tmp_path, every second, with the alarms loaded."""
    config = (CONFIGS / "prometheus" / "prometheus.yml").read_text()
    for theirs, ours in (
        ("../../runs/prometheus/*.json", str(tmp_path / "prometheus" / "*.json")),
        ("scrape_interval: 5s", "scrape_interval: 1s"),
        ("refresh_interval: 5s", "refresh_interval: 1s"),
        ("rules.yml", str(CONFIGS / "prometheus" / "rules.yml")),
    ):
        assert theirs in config
        config = config.replace(theirs, ours)
    (tmp_path / "prometheus.yml").write_text(config)
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL) as process:
        yield f"http://{address}"
        process.terminate()


def ask(server: str, path: str) -> Any:
    with urllib.request.urlopen(f"{server}/api/v1/{path}", timeout=10) as answer:
        return json.load(answer)["data"]


def queries() -> list[tuple[str, str]]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [(panel["title"], target["expr"].replace("$__rate_interval", "20s")) for panel in panels for target in panel["targets"]]


@needs_prometheus
def test_every_panel_has_data_from_a_real_run(server: str, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    telemetry = open_telemetry(MemorySink(), ["prometheus"], SinkPlace(folder=tmp_path / "run", drafter="self"))
    with closing(telemetry), RealRun(telemetry):
        deadline = time.monotonic() + 120  # the machine may be busy
        missing = queries()
        while missing and time.monotonic() < deadline:
            time.sleep(1)
            try:
                missing = [(title, query) for title, query in queries() if not _has_data(server, query)]
            except OSError:
                continue  # it has not begun to listen
        assert not missing
        (target,) = ask(server, "targets")["activeTargets"]
        assert target["health"] == "up"
        assert {key: target["labels"][key] for key in ("engine", "replica", "drafter")} == {
            "engine": "rollout_spec",
            "replica": "0",
            "drafter": "self",
        }
        rules = [rule for group in ask(server, "rules")["groups"] for rule in group["rules"]]
        assert rules
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}  # unknown: not evaluated yet


def _has_data(server: str, query: str) -> bool:
    found = ask(server, f"query?{urllib.parse.urlencode({'query': query})}")["result"]
    return any(sample["value"][1] != "NaN" for sample in found)

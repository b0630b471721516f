"""docs/metrics.md is what the code says now."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from rollout_spec.metrics import METRICS

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_metrics_are_documented_as_they_are() -> None:
    spec = importlib.util.spec_from_file_location("build_metrics", DOCS / "build_metrics.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    written = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert written == build.text(), "run python docs/build_metrics.py"
    assert {metric.name for metric in METRICS} <= set(re.findall(r"\| `(\w+)`", written))


def test_telemetry_names_commands_and_files_that_exist() -> None:
    import typer

    from rollout_spec_rl.compose import application

    text = (DOCS / "telemetry.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = typer.main.get_command(application()).commands  # type: ignore[attr-defined]
    named = re.findall(r"rollout-spec ([a-z][a-z-]*)([^\n`]*)", text)
    assert {name for name, _ in named} >= {"rollout", "report", "dashboard"}
    for name, rest in named:
        options = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= options, name
    files = set(re.findall(r"\]\(([^)#:]+)\)", text)) | {
        f"../{name}" for name in re.findall(r"`((?:configs|docs|rollout_spec|tests)/[\w./-]+)`", text)
    }
    assert {name for name in files if not (DOCS / name).exists()} == set()

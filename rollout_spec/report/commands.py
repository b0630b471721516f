"""The commands ``report`` and ``dashboard``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rollout_spec.console import clear_errors
from rollout_spec.report.live import Dashboard, Watcher
from rollout_spec.report.page import report_page
from rollout_spec.report.runs import Run, read_runs
from rollout_spec.report.samples import TextOf
from rollout_spec.report.verdict import sentences

_Paths = Annotated[list[Path], typer.Argument(help="Folders of runs, or event logs.", metavar="RUN...")]


def add_commands(app: typer.Typer) -> None:
    """Add this package's commands to the application."""
    app.command("report")(report)
    app.command("dashboard")(dashboard)


def report(
    paths: _Paths,
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file.")] = Path("report.html"),
    texts: Annotated[bool, typer.Option("--texts/--ids", help="Show tokens as text (loads each run's tokenizer) or as ids.")] = True,
) -> None:
    """Say of runs whether speculation pays, why not, and whether anything is stale or lost: one HTML file that needs no network."""
    with clear_errors():
        runs = read_runs(paths)
        page = report_page(runs, text_of=[_text_of(run) if texts else None for run in runs])
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
        told = sentences(runs)
    for run, said in zip(runs, told, strict=True):
        for line in (*(sentence.text for sentence in said), *(f"note: {note}" for note in run.notes)):
            typer.echo(f"{run.name}: {line}")
    typer.echo(f"report: {out}")


def _text_of(run: Run) -> TextOf | None:
    """Each token's text by the tokenizer of the run's model; None (and a note) when that is not there."""
    model = run.settings.get("model")
    if not isinstance(model, str) or not (run.folder / "rollouts.parquet").exists():
        return None
    from rollout_spec.engine.load import token_texts

    try:
        decode: Callable[..., list[str]] = token_texts(model)
    except (ValueError, OSError) as error:
        run.notes.append(f"tokens are shown as ids, for the tokenizer of {model} is not there ({error})")
        return None
    return decode


def dashboard(
    paths: _Paths,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 = a free one.")] = 8765,
    host: Annotated[str, typer.Option("--host", help="Anything but this machine needs --token.")] = "127.0.0.1",
    token: Annotated[str | None, typer.Option("--token", help="What the page's address must carry.")] = None,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks at the logs.")] = 2.0,
) -> None:
    """A page that follows runs while they go on."""
    with clear_errors():
        server = Dashboard(Watcher(paths, every_s=every), host=host, port=port, token=token)
        server.serve(lambda address: typer.echo(f"dashboard: {address}  (Ctrl-C ends it)"))

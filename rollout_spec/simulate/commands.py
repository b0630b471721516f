"""The command ``simulate``."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rollout_spec.console import clear_errors, console
from rollout_spec.files import write_text
from rollout_spec.simulate.recorded import recorded_world
from rollout_spec.simulate.run import Comparison, compare, num_runs
from rollout_spec.simulate.world import World
from rollout_spec.simulate.worlds import WORLDS


def add_commands(app: typer.Typer) -> None:
    """Add ``simulate`` to the application."""
    app.command("simulate")(simulate)


def simulate(
    world: Annotated[str, typer.Option("--world", help=f"{', '.join(WORLDS)}, all, or a run's folder or events.jsonl to replay.")] = "all",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Rolls every world out so often, and pools the rollouts.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the results go.")] = None,
) -> None:
    """Run budgets through worlds whose law of acceptance and costs are known, against an oracle that knows them too."""
    with clear_errors():
        worlds = worlds_of(world)
        results: list[Comparison] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("simulate", total=num_runs() * len(worlds) * seeds)
            for one in worlds:
                results += compare(one, lambda what: progress.update(task, advance=1, description=what), seeds=range(seeds))
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            write_text(json_path, json.dumps([dataclasses.asdict(result) for result in results], indent=2) + "\n")
    _print(worlds, results)


def worlds_of(name: str) -> list[World]:
    """The world of that name or log, or all that have a name. Raises ValueError if there is none."""
    if name == "all":
        return list(WORLDS.values())
    if name in WORLDS:
        return [WORLDS[name]]
    if Path(name).exists():
        return [recorded_world(Path(name))]
    raise ValueError(f"--world {name!r} is none of all, {', '.join(WORLDS)}, and no event log")


def _print(worlds: Sequence[World], results: Sequence[Comparison]) -> None:
    for world in worlds:
        table = Table("budget", "tokens/s", "of the oracle's", "of the best fixed", "rounds to react", title=f"{world.name}: {world.about}")
        for row in results:
            if row.world == world.name:
                reaction = "–" if row.rounds_to_react is None else str(row.rounds_to_react)
                ratios = (f"{row.ratio_to_oracle:.3f}", f"{row.ratio_to_best_fixed:.3f}")
                table.add_row(row.controller, f"{row.tokens_per_s:.0f}", *ratios, reaction)
        Console().print(table)

"""The commands that train, judge and hand over drafters: train-drafter, collect, eval-drafter, export-drafter."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rollout_spec.composition import Composition
from rollout_spec.console import clear_errors, console
from rollout_spec.files import write_text
from rollout_spec.prompts import load_prompts
from rollout_spec.session import set_threads

_Config = Annotated[Path, typer.Option("--config", "-c", help="YAML file, like configs/drafter/mtp_smollm2.yaml.")]
_Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the run; default: the config's.")]
_Set = Annotated[list[str] | None, typer.Option("--set", help="Override of one setting, like train.lr=3e-4; may be given several times.")]


class ConsoleDisplay:
    """Progress bars with the time left on standard error; in a log, a line at every tenth of the work."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def say(self, line: str) -> None:
        console.print(line, highlight=False, markup=False)

    def bar(self, name: str, total: int, done: int) -> Callable[[int, str], None]:
        task = self._progress.add_task(name, total=total, completed=done)
        began, tenth = time.perf_counter(), 10 * done // total

        def update(now: int, note: str) -> None:
            nonlocal tenth
            self._progress.update(task, completed=now, description=f"{name}  {note}")
            if not console.is_terminal and 10 * now // total > tenth:
                tenth = 10 * now // total
                passed = time.perf_counter() - began
                left = passed * (total - now) / max(now - done, 1)
                self.say(f"{name} {now}/{total}  {note}  {passed:.0f} s, about {max(left, 0):.0f} s left")

        return update


@contextmanager
def console_display() -> Iterator[ConsoleDisplay]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        yield ConsoleDisplay(progress)


@contextmanager
def _display() -> Iterator[ConsoleDisplay]:
    """A display, and one line instead of a traceback for what the user can mend."""
    with clear_errors(), console_display() as display:
        yield display


def add_commands(app: typer.Typer) -> None:
    """Add this package's commands to the application, which hands them its composition as the context's object."""
    app.command("train-drafter")(train_drafter)
    app.command("collect")(collect)
    app.command("eval-drafter")(eval_drafter)
    app.command("export-drafter")(export_drafter)


def _composition(context: typer.Context) -> Composition:
    composition = context.obj
    assert isinstance(composition, Composition)
    return composition


def train_drafter(
    context: typer.Context,
    config: _Config,
    out: _Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    overrides: _Set = None,
    show: Annotated[bool, typer.Option("--show-supervision", help="Print which tokens supervise which draft slots, and exit.")] = False,
) -> None:
    """Collect on-policy rollouts (unless they are there), train a drafter on them, and evaluate it."""
    from rollout_spec_mtp.training.config import load_config
    from rollout_spec_mtp.training.run import run_training, show_supervision

    with _display() as display:
        settings = load_config(config, overrides or ())
        folder = out or Path(settings.out)
        if show:
            for line in show_supervision(settings, folder, _composition(context).make_ops(), display):
                typer.echo(line)
            return
        report = run_training(settings, folder, _composition(context).make_ops(), display, resume=resume)
    if report:
        _print_report(report)
        console.print(f"drafter in {folder / 'drafter'}", highlight=False)


def collect(context: typer.Context, config: _Config, out: _Out = None, overrides: _Set = None) -> None:
    """Sample the rollouts of a training config, with the policy's states; may be interrupted and run again."""
    from rollout_spec_mtp.training.config import load_config
    from rollout_spec_mtp.training.run import collect_only

    with _display() as display:
        settings = load_config(config, overrides or ())
        set_threads(settings.threads)
        folder = (out or Path(settings.out)) / "rollouts"
        found = collect_only(settings, folder, _composition(context).make_ops(), display)
        console.print(f"{len(found)} sequences in {folder}", highlight=False)


def eval_drafter(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", "-m", help="smollm2-135m, a local Hugging Face directory, or a hub id.")],
    drafter: Annotated[Path, typer.Option("--drafter", "-d", help="Directory of a trained drafter.")],
    prompts: Annotated[str, typer.Option("--prompts", "-p", help="TASK:COUNT, a verl .parquet, or a .jsonl with 'prompt'.")],
    json_path: Annotated[Path, typer.Option("--json", help="Where the numbers go.")],
    temperature: Annotated[float, typer.Option("--temperature", "-t")] = 1.0,
    draft_length: Annotated[int | None, typer.Option("--draft-length", "-k", min=1, help="Default: what it was trained for.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 128,
    max_batch: Annotated[int, typer.Option("--max-batch", "-b", min=1)] = 8,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option("--seed")] = 0,
    threads: Annotated[int | None, typer.Option("--threads")] = None,
) -> None:
    """Acceptance of a drafter: teacher-forced, served, by depth and by entropy; refuses one that is served otherwise than trained."""
    from rollout_spec_mtp.kinds import kind_of
    from rollout_spec_mtp.serving import load_trained
    from rollout_spec_mtp.training.evaluation import evaluate_drafter
    from rollout_spec_mtp.training.run import open_workplace

    with _display() as display:
        set_threads(threads)
        workplace = open_workplace(model, dtype, _composition(context).make_ops(), display)
        policy, found = workplace.policy, load_prompts(prompts, workplace.loaded.tokenizer)
        trained = load_trained(drafter, policy)
        report = evaluate_drafter(
            trained,
            kind_of(trained.kind).serve(trained, policy, workplace.ops, None),
            policy=policy,
            runner=workplace.runner(found, max_new_tokens),
            prompts=found,
            temperature=temperature,
            draft_length=draft_length or trained.num_slots,
            max_new_tokens=max_new_tokens,
            max_batch=max_batch,
            seed=seed,
        )
        json_path.parent.mkdir(parents=True, exist_ok=True)
        write_text(json_path, json.dumps(report, indent=2) + "\n")
    _print_report(report)


def export_drafter(
    model: Annotated[str, typer.Option("--model", "-m", help="The policy: smollm2-135m, a local Hugging Face directory, or a hub id.")],
    drafter: Annotated[Path, typer.Option("--drafter", "-d", help="Directory of a trained drafter.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New directory.")],
) -> None:
    """Write a drafter as other engines read it: a DFlash directory, or the policy's checkpoint with an MTP head in it."""
    from rollout_spec.engine.load import load_model
    from rollout_spec_mtp.kinds import kind_of
    from rollout_spec_mtp.serving import load_trained
    from rollout_spec_mtp.training.protocol import PolicyParts

    with _display() as display:
        if out.exists():
            raise ValueError(f"--out {out} exists already: choose a new directory")
        loaded = load_model(model, "bfloat16", display.say)
        trained = load_trained(drafter, PolicyParts.of(loaded.module))
        export = kind_of(trained.kind).export
        if export is None:
            raise ValueError(f"drafters of kind {trained.kind} have no published layout")
        export(trained, loaded.path, out)
    console.print(f"{trained.kind} drafter in {out}", highlight=False)


def _print_report(report: dict[str, Any]) -> None:
    table = Table("measure", "value", "95 %")
    intervals = report.get("confidence_intervals", {})
    for name in ("served_acceptance_length", "teacher_forced_acceptance_length", "teacher_forced_rejection_length"):
        if name in report:
            low, high = intervals[name]
            table.add_row(name.replace("_", " "), f"{report[name]:.3f}", f"{low:.3f} to {high:.3f}")
    for depth, alpha in enumerate(report.get("alpha_by_depth", ()), start=1):
        low, high = intervals["alpha_by_depth"][depth - 1]
        table.add_row(f"acceptance at depth {depth}", f"{alpha:.3f}", f"{low:.3f} to {high:.3f}")
    for bucket in report.get("by_entropy", ()):
        upper = "" if bucket["entropy_to"] is None else f" to {bucket['entropy_to']:g}"
        name = f"entropy from {bucket['entropy_from']:g}{upper} ({bucket['num_positions']} positions)"
        table.add_row(name, f"{bucket['acceptance_length']:.3f}", f"acceptance at depth 1 {bucket['alpha']:.3f}")
    for name, value in report.get("held_out", {}).items():
        table.add_row(name.replace("_", " "), f"{value:.3f}", "")
    Console().print(table)

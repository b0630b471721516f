"""The command line. Reads options, shows progress, prints results; everything else is elsewhere."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rollout_spec import __version__, reports
from rollout_spec.bench import Bench, BenchSettings
from rollout_spec.budget import BudgetController
from rollout_spec.budget_state import prepared_pilot
from rollout_spec.composition import Composition
from rollout_spec.console import clear_errors, console
from rollout_spec.demo import run_demo
from rollout_spec.doctor import Status, diagnose
from rollout_spec.engine.baselines import Baseline, TransformersBaseline, VllmBaseline
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.models import models_dir
from rollout_spec.files import write_text
from rollout_spec.job import JobSettings, RolloutJob
from rollout_spec.pilot import BudgetPilot
from rollout_spec.sampling import SamplingParams
from rollout_spec.session import AUTO, Session, drafter_factory, open_session, parse_budget, parse_logit_bias, parse_scheme, parse_widths
from rollout_spec.sinks import JsonlSink
from rollout_spec.sinks.specs import SINK_WORDS, SinkPlace, open_telemetry

INTERRUPTED = 130
DRAFTER_NAMES = "none, ngram, suffix, self (self:T drafts at temperature T)"

Model = Annotated[str, typer.Option("--model", "-m", help="smollm2-135m, a local Hugging Face directory, or a hub id.")]
Prompts = Annotated[
    str,
    typer.Option("--prompts", "-p", help="TASK:COUNT (any reasoning-gym task, or humaneval), a verl .parquet, or a .jsonl with 'prompt'."),
]
DType = Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Compute threads; default: torch's choice.")]
DraftLength = Annotated[
    int,
    typer.Option("--draft-length", "-k", min=0, help="Deepest drafted token a round that --budget auto and entropy may choose; 0 = off."),
]
TreeWidth = Annotated[str, typer.Option("--tree-width", help="Children a node by depth, like 2,2,1; 1 = a chain.")]
Verifier = Annotated[
    str,
    typer.Option(
        "--verifier",
        help="auto, rejection, block, exact_match, gumbel, rejection_walk or traversal. "
        "auto: gumbel with --seed, else the best that is exact for the drafter.",
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 = greedy.")]
BudgetOption = Annotated[
    str,
    typer.Option(
        "--budget",
        help="Who drafts how deep: auto (most expected tokens a second, nothing where nothing pays), entropy, fixed:K, "
        "batch_table:FILE (JSON of requests to draft length) or off.",
    ),
]


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not sys.stderr.isatty())


def _say(line: str) -> None:
    console.print(line, highlight=False)


app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Exactly lossless speculative decoding for RL rollouts.", rich_markup_mode=None
)


def _composition(context: typer.Context) -> Composition:
    composition = context.obj
    assert isinstance(composition, Composition)
    return composition


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def rollout(
    context: typer.Context,
    model: Model,
    prompts: Prompts,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for rollouts.parquet, events.jsonl and summary.json.")],
    num_samples: Annotated[int, typer.Option("--num-samples", "-n", help="Samples a prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens")] = 128,
    temperature: Temperature = 1.0,
    top_p: Annotated[float, typer.Option("--top-p")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="0 = off.")] = 0,
    min_p: Annotated[float, typer.Option("--min-p")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option("--repetition-penalty")] = 1.0,
    presence_penalty: Annotated[float, typer.Option("--presence-penalty")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option("--frequency-penalty")] = 0.0,
    logit_bias: Annotated[str | None, typer.Option("--logit-bias", help="JSON object of token id to bias.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Stop string; may be given several times.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same tokens, with and without speculation.")] = None,
    drafter: Annotated[str, typer.Option("--drafter", "-d", help=f"{DRAFTER_NAMES}, or a drafter's directory.")] = "suffix",
    history: Annotated[
        Path | None,
        typer.Option("--history", help="suffix only: file that keeps earlier epochs' samples; read if there, written at the end."),
    ] = None,
    verifier: Verifier = "auto",
    draft_length: DraftLength = 8,
    tree_width: TreeWidth = "1",
    budget: BudgetOption = AUTO,
    max_batch: Annotated[int, typer.Option("--max-batch", "-b", help="Requests that run at once.")] = 16,
    dtype: DType = "float32",
    threads: Threads = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run in --out.")] = False,
    sinks: Annotated[list[str] | None, typer.Option("--sink", help=f"Also report to: {SINK_WORDS}. May be given several times.")] = None,
) -> None:
    """Generate rollouts for a set of prompts; may be interrupted and resumed."""
    with clear_errors():
        sampling = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=parse_logit_bias(logit_bias),
        )
        scheme, widths = parse_scheme(verifier), parse_widths(tree_width)
        controller = parse_budget(budget, draft_length, widths)
        session = open_session(
            _composition(context), model=model, prompts=prompts, dtype=dtype, threads=threads, max_new_tokens=max_new_tokens, report=_say
        )
        settings = JobSettings(
            model=model,
            prompts=prompts,
            num_samples=num_samples,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            drafter=drafter,
            verifier=verifier,
            budget=budget,
            draft_length=draft_length,
            tree_width=widths,
            seed=seed,
            stop=tuple(stop or ()),
            sampling={
                key: getattr(sampling, key)
                for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
            }
            | {"logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()}},
        )
        job = RolloutJob(out, settings, session.prompts, sampling, resume=resume)
        make = drafter_factory(
            _composition(context), session.loaded, scheme=scheme, seeded=seed is not None, tree_width=widths, history=history
        )
        made = make(drafter)
        place = SinkPlace(folder=out, drafter=drafter, config=asdict(settings))
        with closing(open_telemetry(JsonlSink(job.events_path), sinks or (), place)) as sink:
            engine = Engine(
                session.runner,
                config=EngineConfig(max_batch=max_batch, max_context=session.max_context, scheme=scheme),
                drafter=made,
                controller=BudgetPilot(controller) if made is None else _pilot(controller, session, max_batch),
                sink=sink,
                detokenize=session.loaded.detokenize,
            )
            summary = _run_job(job, engine)
        if history is not None and made is not None:
            made.save_history(history)  # type: ignore[attr-defined]
    reports.print_summary(Console(), out, summary)


def _pilot(controller: BudgetController, session: Session, max_batch: int) -> BudgetPilot:
    """The budget with the costs of this model on this machine, measured now if they never were."""
    with _progress() as progress:
        task = progress.add_task("measuring the machine", total=None, visible=False)
        return prepared_pilot(
            controller,
            session.runner,
            model=session.loaded.path,
            max_batch=max_batch,
            max_context=session.max_context,
            on_forward=lambda done, total: progress.update(task, completed=done, total=total, visible=True),
        )


def _run_job(job: RolloutJob, engine: Engine) -> dict[str, object]:
    learnt = job.out / "budget.json"
    if engine.drafter is not None and learnt.exists():  # of the same folder, interrupted
        engine.pilot.load(learnt)
    with _progress() as progress:
        task = progress.add_task("rollouts", total=job.total)
        try:
            return job.run(engine, lambda done: progress.update(task, completed=done))
        except KeyboardInterrupt:
            _say(f"interrupted; finished samples are kept in {job.out}: run the same command with --resume to go on")
            raise typer.Exit(INTERRUPTED) from None
        finally:
            if engine.drafter is not None:
                engine.pilot.save(learnt)


@app.command()
def bench(
    context: typer.Context,
    model: Model,
    prompts: Prompts,
    json_path: Annotated[Path, typer.Option("--json", help="Where the results go.")],
    drafters: Annotated[str, typer.Option("--drafters", help=f"Comma-separated: {DRAFTER_NAMES}, or directories.")] = "none,ngram,suffix",
    batch_sizes: Annotated[str, typer.Option("--batch-sizes")] = "1,4,16",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens")] = 64,
    dtype: DType = "float32",
    temperature: Temperature = 1.0,
    draft_length: DraftLength = 8,
    tree_width: TreeWidth = "1",
    budget: BudgetOption = AUTO,
    verifier: Verifier = "auto",
    against: Annotated[str, typer.Option("--against", help="Other engines on the same requests: hf, vllm.")] = "",
    repeats: Annotated[int, typer.Option("--repeats", "-r")] = 3,
    epochs: Annotated[int, typer.Option("--epochs", help="Passes over the same prompts with one drafter; the last is measured.")] = 1,
    threads: Threads = None,
) -> None:
    """Measure drafters (and other engines) side by side, interleaved in one run."""
    with clear_errors():
        scheme, widths = parse_scheme(verifier), parse_widths(tree_width)
        parse_budget(budget, draft_length, widths)  # what is wrong with it is said before the model is loaded
        sizes = tuple(_positive(part, "--batch-sizes") for part in batch_sizes.split(","))
        session = open_session(
            _composition(context), model=model, prompts=prompts, dtype=dtype, threads=threads, max_new_tokens=max_new_tokens, report=_say
        )
        settings = BenchSettings(
            model=model,
            prompts=prompts,
            drafters=tuple(drafters.split(",")),
            batch_sizes=sizes,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            temperature=temperature,
            budget=budget,
            draft_length=draft_length,
            tree_width=widths,
            verifier=verifier,
            against=tuple(name for name in against.split(",") if name),
            repeats=repeats,
            epochs=epochs,
            threads=threads or 0,
        )
        measure = Bench(
            settings,
            runner=session.runner,
            prompts=session.prompts,
            make_drafter=drafter_factory(_composition(context), session.loaded, scheme=scheme, seeded=False, tree_width=widths),
            make_pilot=lambda: BudgetPilot(parse_budget(budget, draft_length, widths)),
            scheme=scheme,
            baselines=[_baseline(name, _composition(context), session, dtype, max(sizes)) for name in settings.against],
            max_context=session.max_context,
        )
        with _progress() as progress:
            task = progress.add_task("bench", total=measure.num_runs)
            results = measure.run(lambda what: progress.update(task, advance=1, description=what))
        json_path.parent.mkdir(parents=True, exist_ok=True)
        write_text(json_path, json.dumps(results, indent=2) + "\n")
    reports.print_bench(Console(), json_path, results)


def _baseline(name: str, composition: Composition, session: Session, dtype: str, max_batch: int) -> Baseline:
    if name == "hf":
        return TransformersBaseline(session.loaded.module)
    if name == "vllm":
        return VllmBaseline(
            session.loaded.path, dtype=dtype, max_context=session.max_context, max_batch=max_batch, load=composition.load_vllm
        )
    raise ValueError(f"--against {name!r}: give hf or vllm")


@app.command()
def demo(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="A quarter of the work.")] = False,
    out: Annotated[Path, typer.Option("--out", "-o")] = Path("runs/demo"),
    budget: BudgetOption = AUTO,
    threads: Threads = None,
) -> None:
    """The real model, real prompts, with and without speculation: the same tokens, fewer rounds wherever drafting pays."""
    with clear_errors(), _progress() as progress:
        result = run_demo(_composition(context), out=out, quick=quick, budget=budget, threads=threads, progress=progress, report=_say)
    reports.print_demo(Console(), result)
    if not result.identical:
        raise typer.Exit(1)


@app.command()
def doctor(context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """What is installed, what would fail, and the mend."""
    findings = diagnose(environ=os.environ, cache_dir=models_dir(), further=_composition(context).findings())
    reports.print_findings(Console(), findings, as_json=as_json)
    if any(finding.status is Status.FAIL for finding in findings):
        raise typer.Exit(1)


def _positive(text: str, option: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{option}: {text!r} is not a positive number")
    return int(text)

"""Demo: two epochs of RL rollouts of a real model, with and without speculation, seeded so that the tokens can be compared.

A last run of each epoch drops that: with independent draws and block verification the tokens differ, their law does not, and more drafts
are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree

import pyarrow.parquet as pq
from rich.progress import Progress

from rollout_spec.composition import Composition
from rollout_spec.drafter import Drafter
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.job import JobSettings, RolloutJob
from rollout_spec.pilot import BudgetPilot
from rollout_spec.sampling import SamplingParams
from rollout_spec.session import Session, drafter_factory, open_session, parse_budget
from rollout_spec.sinks import JsonlSink
from rollout_spec.verify import Scheme

MODEL, TASK = "smollm2-135m", "gsm_symbolic"
NUM_SAMPLES, MAX_BATCH = 4, 4
LONGEST = 8  # draft
UNTRAINED = ("none", "ngram", "suffix")


@dataclass(frozen=True, kw_only=True)
class _Contestant:
    name: str
    drafter: Drafter | None
    pilot: BudgetPilot  # goes on learning from epoch to epoch
    scheme: Scheme | None = None  # None: Gumbel-coupled, as the requests are seeded


@dataclass(frozen=True, kw_only=True)
class DemoRow:
    """One run of one epoch."""

    epoch: int
    drafter: str
    folder: Path
    summary: Mapping[str, object]
    identical: bool | None  # every sample has the tokens of the run without speculation; None where only the law is the same


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    rows: Sequence[DemoRow]
    dtype: str
    out: Path

    @property
    def identical(self) -> bool:
        return all(row.identical is not False for row in self.rows)


def run_demo(
    composition: Composition, *, out: Path, quick: bool, budget: str, threads: int | None, progress: Progress, report: Callable[[str], None]
) -> DemoResult:
    """Epoch 0 and 1 of the same prompts with each drafter. In epoch 1 the suffix drafter knows epoch 0's samples."""
    make_pilot = partial(_pilot, budget)
    make_pilot()  # what is wrong with the budget is said before a drafter is trained
    num_prompts, length = (2, 48) if quick else (8, 96)
    # Tokens are compared bit by bit, which needs a forward whose rows do not depend on their neighbours (docs/engine.md).
    dtype = "bfloat16" if composition.make_ops().name != "torch" else "float32"
    trained = composition.demo_drafter(MODEL, quick=quick, threads=threads, progress=progress)
    session = open_session(
        composition, model=MODEL, prompts=f"{TASK}:{num_prompts}", dtype=dtype, threads=threads, max_new_tokens=length, report=report
    )
    if out.exists():
        rmtree(out)
    contestants = _contestants(composition, session, trained, make_pilot)
    task = progress.add_task("rollouts", total=2 * len(contestants) * num_prompts * NUM_SAMPLES)
    rows: list[DemoRow] = []
    for epoch in range(2):
        for contestant in contestants:
            folder, plain = out / f"epoch{epoch}-{contestant.name}", out / f"epoch{epoch}-{UNTRAINED[0]}"
            before = len(rows) * num_prompts * NUM_SAMPLES
            job = _job(folder, session, num_prompts, length, dtype, contestant, epoch)
            with closing(JsonlSink(job.events_path)) as sink:
                engine = Engine(
                    session.runner,
                    config=EngineConfig(max_batch=MAX_BATCH, max_context=session.max_context, scheme=contestant.scheme),
                    drafter=contestant.drafter,
                    controller=contestant.pilot,
                    sink=sink,
                    detokenize=session.loaded.detokenize,
                )
                summary = job.run(engine, lambda done, before=before: progress.update(task, completed=before + done))  # type: ignore[misc]
            identical = _tokens(folder) == _tokens(plain) if contestant.scheme is None else None
            rows.append(DemoRow(epoch=epoch, drafter=contestant.name, folder=folder, summary=summary, identical=identical))
    return DemoResult(rows=rows, dtype=dtype, out=out)


def _contestants(composition: Composition, session: Session, trained: Path, make_pilot: Callable[[], BudgetPilot]) -> list[_Contestant]:
    coupled, independent = (
        drafter_factory(composition, session.loaded, scheme=scheme, seeded=True, tree_width=(1,)) for scheme in (None, Scheme.BLOCK)
    )
    return [
        *(_Contestant(name=name, drafter=coupled(name), pilot=make_pilot()) for name in UNTRAINED),
        _Contestant(name="mtp", drafter=coupled(str(trained)), pilot=make_pilot()),
        _Contestant(name="mtp-block", drafter=independent(str(trained)), pilot=make_pilot(), scheme=Scheme.BLOCK),
    ]


def _pilot(budget: str) -> BudgetPilot:
    return BudgetPilot(parse_budget(budget, LONGEST, tree_width=(1,)))


def _job(folder: Path, session: Session, num_prompts: int, length: int, dtype: str, contestant: _Contestant, epoch: int) -> RolloutJob:
    settings = JobSettings(
        model=MODEL,
        prompts=f"{TASK}:{num_prompts}",
        num_samples=NUM_SAMPLES,
        max_new_tokens=length,
        dtype=dtype,
        drafter=contestant.name,
        verifier="auto" if contestant.scheme is None else contestant.scheme.value,
        budget=contestant.pilot.controller.name,
        draft_length=LONGEST,
        tree_width=(1,),
        seed=epoch,
        stop=(),
        sampling={"temperature": 1.0},
    )
    return RolloutJob(folder, settings, session.prompts, SamplingParams(temperature=1.0), resume=False)


def _tokens(folder: Path) -> list[list[int]]:
    column: list[list[int]] = pq.read_table(folder / "rollouts.parquet", columns=["token_ids"])["token_ids"].to_pylist()
    return column

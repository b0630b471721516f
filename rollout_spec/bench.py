"""Bench: every variant on the same requests, interleaved in one run after a warm-up; medians, spread, and the ratio to no speculation.

A variant is an engine with a drafter at a batch size, or another engine (transformers' generate, vLLM) at that batch size.
Requests ignore end-of-sequence tokens, so that all variants emit the same number of tokens.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from rollout_spec.drafter import Drafter
from rollout_spec.engine.baselines import Baseline
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.request import Request
from rollout_spec.engine.runner import ModelRunner
from rollout_spec.pilot import BudgetPilot
from rollout_spec.prompts import Prompt
from rollout_spec.sampling import SamplingParams
from rollout_spec.sinks.summary import SummarySink
from rollout_spec.verify import Scheme

OURS = "rollout_spec"


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    model: str
    prompts: str
    drafters: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    max_new_tokens: int
    dtype: str
    temperature: float
    budget: str
    draft_length: int
    tree_width: tuple[int, ...]
    verifier: str
    against: tuple[str, ...]
    repeats: int
    epochs: int
    threads: int

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.epochs < 1:
            raise ValueError("--repeats and --epochs must be 1 or more")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"--batch-sizes needs positive numbers, got {self.batch_sizes}")


@dataclass(kw_only=True)
class _Measured:
    """Repeats of one variant."""

    tokens_per_s: list[float] = field(default_factory=list)
    totals: SummarySink = field(default_factory=SummarySink)


class Bench:
    """``run`` measures; ``make_drafter`` gives a fresh drafter for a name (None for "none")."""

    def __init__(
        self,
        settings: BenchSettings,
        *,
        runner: ModelRunner,
        prompts: Sequence[Prompt],
        make_drafter: Callable[[str], Drafter | None],
        make_pilot: Callable[[], BudgetPilot],
        scheme: Scheme | None,
        baselines: Sequence[Baseline],
        max_context: int,
    ) -> None:
        if not prompts:
            raise ValueError("no prompts to measure with")
        self._settings, self._runner, self._prompts, self._make_drafter = settings, runner, prompts, make_drafter
        self._make_pilot, self._scheme, self._baselines, self._max_context = make_pilot, scheme, baselines, max_context
        # What a budget has learnt lives on from repeat to repeat, as it would in an engine that serves for long.
        self._pilots: dict[tuple[str, int], BudgetPilot] = {}
        self._measured: dict[tuple[str, str, int], _Measured] = {}

    @property
    def num_runs(self) -> int:
        variants = len(self._settings.drafters) + len(self._baselines)
        return variants * len(self._settings.batch_sizes) * (self._settings.repeats + 1)

    def run(self, on_run: Callable[[str], None]) -> dict[str, object]:
        """All variants of a repeat before the next repeat; the first one warms up and is not counted."""
        for repeat in range(-1, self._settings.repeats):
            for batch_size in self._settings.batch_sizes:
                requests = self._requests(batch_size, repeat)
                for drafter in self._settings.drafters:
                    on_run(f"{drafter} at batch {batch_size}")
                    self._run_ours(drafter, batch_size, requests, counted=repeat >= 0)
                for baseline in self._baselines:
                    on_run(f"{baseline.name} at batch {batch_size}")
                    self._run_baseline(baseline, batch_size, requests, counted=repeat >= 0)
        return {"machine": machine(), "settings": asdict(self._settings), "results": self._results()}

    def _requests(self, batch_size: int, repeat: int) -> list[Request]:
        """Each repeat takes the next prompts; the warm-up takes those of the first repeat but only a few tokens."""
        first = max(repeat, 0) * batch_size
        chosen = [self._prompts[(first + i) % len(self._prompts)] for i in range(batch_size)]
        length = self._settings.max_new_tokens if repeat >= 0 else min(8, self._settings.max_new_tokens)
        return [
            Request(
                prompt_token_ids=prompt.token_ids,
                max_new_tokens=length,
                sampling=SamplingParams(temperature=self._settings.temperature),
                ignore_eos=True,
                prompt_key=prompt.prompt_id,
            )
            for prompt in chosen
        ]

    def _run_ours(self, drafter_name: str, batch_size: int, requests: Sequence[Request], *, counted: bool) -> None:
        measured = self._measured.setdefault((OURS, drafter_name, batch_size), _Measured())
        drafter = self._make_drafter(drafter_name)
        pilot = self._pilots.setdefault((drafter_name, batch_size), self._make_pilot())
        for epoch in range(self._settings.epochs if drafter is not None else 1):
            last = epoch == self._settings.epochs - 1 or drafter is None
            engine = Engine(
                self._runner,
                config=EngineConfig(max_batch=batch_size, max_context=self._max_context, scheme=self._scheme),
                drafter=drafter,
                controller=pilot,
                sink=measured.totals if counted and last else None,
            )
            began = time.perf_counter()
            completions = engine.generate(requests)
            seconds = time.perf_counter() - began
            failed = next((c.error for c in completions if c.error), None)
            if failed is not None:
                raise ValueError(f"{drafter_name} at batch {batch_size}: {failed}")
            if counted and last:
                measured.tokens_per_s.append(sum(len(c.token_ids) for c in completions) / seconds)

    def _run_baseline(self, baseline: Baseline, batch_size: int, requests: Sequence[Request], *, counted: bool) -> None:
        measured = self._measured.setdefault((baseline.name, "none", batch_size), _Measured())
        began = time.perf_counter()
        num_tokens = baseline.generate(requests)
        if counted:
            measured.tokens_per_s.append(num_tokens / (time.perf_counter() - began))

    def _results(self) -> list[dict[str, object]]:
        rows = []
        for (engine, drafter, batch_size), measured in self._measured.items():
            reference = self._measured.get((OURS, "none", batch_size))
            ratios = [a / b for a, b in zip(measured.tokens_per_s, reference.tokens_per_s, strict=True)] if reference else []
            totals = measured.totals.summary()
            rows.append(
                {
                    "drafter": drafter,
                    "batch_size": batch_size,
                    "dtype": self._settings.dtype,
                    "engine": engine,
                    "tokens_per_s": spread(measured.tokens_per_s),
                    "ratio_to_none": spread(ratios) if ratios else None,
                    **{
                        key: totals[key] if engine == OURS else None
                        for key in ("acceptance_length_pooled", "acceptance_by_depth", "ms_per_round", "seconds")
                    },
                }
            )
        return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open() as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.processor())
    except FileNotFoundError:
        return platform.processor()

"""The sentences on top: does it pay, is it right, is it stale; each with the figures that it rests on.

Acceptance here is that of first drafted tokens (depth 1), which does not depend on how long the drafts are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from rollout_spec.acceptance import EntropyLaw, fit_entropy_law
from rollout_spec.metrics import BY_NAME
from rollout_spec.report.bins import Bin
from rollout_spec.report.runs import Run

# A change of acceptance is told when it is at least this large and this many standard errors (samples of one run depend on each other).
_MIN_CHANGE = 0.05
_MIN_ERRORS = 6.0
_MIN_SHARE = 0.05  # of all drafts, on either side of a change
_EXPLAINED, _UNEXPLAINED = 0.6, 0.3  # share of a change that the entropy law predicts
_EVEN = 0.02  # speed-ups this close to 1 are neither
_FEW = 0.2  # of the drafting time: with less of it compared, the figure is not used
_SHORT = 1.05  # tokens a draft, the bonus included


class Level(Enum):
    GOOD = "good"
    NEUTRAL = "neutral"
    BAD = "bad"


@dataclass(frozen=True, kw_only=True)
class Sentence:
    level: Level
    text: str


@dataclass(frozen=True, kw_only=True)
class Change:
    """Acceptance before and after the bin at which its mean changed most."""

    place: int  # first bin after
    before: float
    after: float
    entropy_before: float
    entropy_after: float
    explained: float  # part of ``after - before`` that the entropy law of the time before predicts; NaN if there is no law


def sentences(runs: Sequence[Run]) -> list[list[Sentence]]:
    """What is to be said of each run, the most important first."""
    return [[_pays(run, runs), *_changed(run), *_alarms(run)] for run in runs]


def _pays(run: Run, runs: Sequence[Run]) -> Sentence:
    if run.num_rounds == 0:
        return Sentence(level=Level.NEUTRAL, text="There are no rounds to judge.")
    total = run.bins.total().totals
    if not run.drafts:
        return Sentence(level=Level.NEUTRAL, text="This run did not speculate.")
    by_length = total.speed.by_length()
    drafted_s = sum(part.seconds for length, part in by_length.items() if length)
    compared_s = sum(part.compared_s for length, part in by_length.items() if length)
    speedup = total.speed.speedup()
    if math.isfinite(speedup) and compared_s >= _FEW * drafted_s:
        return _saved(speedup, "against its own rounds without a draft at the same batch size" + _partly(compared_s / drafted_s))
    reference = _reference(run, runs)
    if reference is not None:
        own, other = _speed(run), _speed(reference)
        basis = f"{own:.0f} tokens a second of engine time against {other:.0f} of the run {reference.name}, which did not speculate"
        return _saved(own / other, f"{basis}; as sure as the machine was equally busy")
    bound = total.speed.speedup_bound()
    level = Level.BAD if bound < 1 - _EVEN else Level.NEUTRAL
    worst = "it loses time" if level is Level.BAD else "run once with --budget off and report both to know"
    return Sentence(
        level=level,
        text="What speculation saves cannot be told from this run alone: hardly a round went without a draft. "
        f"At most {bound:.2f} times as fast as without: {worst}.",
    )


def _partly(share: float) -> str:
    return "" if share > 0.995 else f", which {share:.0%} of the drafted time could be compared with"


def _saved(speedup: float, basis: str) -> Sentence:
    if speedup > 1 + _EVEN:
        return Sentence(
            level=Level.GOOD, text=f"Speculation saved {1 - 1 / speedup:.0%} of the rollout time ({speedup:.2f} times as fast: {basis})."
        )
    if speedup < 1 - _EVEN:
        return Sentence(
            level=Level.BAD, text=f"Speculation cost {1 / speedup - 1:.0%} more rollout time ({speedup:.2f} times as fast: {basis})."
        )
    return Sentence(level=Level.NEUTRAL, text=f"Speculation neither saved nor cost time ({speedup:.2f} times as fast: {basis}).")


def _reference(run: Run, runs: Sequence[Run]) -> Run | None:
    """A run of the same work without speculation: known by its settings."""
    same = ("model", "prompts", "num_samples", "max_new_tokens", "dtype", "sampling")
    for other in runs:
        told = run.settings and other.settings and all(run.settings.get(key) == other.settings.get(key) for key in same)
        if other is not run and told and other.num_rounds and not other.drafts:
            return other
    return None


def _speed(run: Run) -> float:
    speed = BY_NAME["tokens_per_engine_s"].compute(run.bins.total().totals)
    assert isinstance(speed, float)
    return speed


def _changed(run: Run) -> list[Sentence]:
    change = find_change(run.bins.bins)
    if change is None:
        return []
    part = run.bins.bins[change.place]
    versions = run.policy_versions
    where = f"step {part.policy_version}" if len(versions) > 1 else f"round {change.place * run.bins.width}"
    rise = change.after > change.before
    text = f"Acceptance {'rose' if rise else 'fell'} at {where}, from {change.before:.2f} to {change.after:.2f}"
    if rise:
        return [Sentence(level=Level.GOOD, text=text + ".")]
    return [Sentence(level=Level.BAD, text=f"{text}, {_why(run, change, part)}.")]


def _why(run: Run, change: Change, part: Bin) -> str:
    entropy = f"(from {change.entropy_before:.2f} to {change.entropy_after:.2f} nats)"
    share = change.explained / (change.after - change.before)
    behind = part.policy_version > max(part.drafter_version, run.policy_versions[0])
    if share >= _EXPLAINED:
        return f"because entropy rose {entropy}, not because the drafter is stale"
    if run.stale or (behind and not share > _UNEXPLAINED):
        found = "; the monitor says so too" if run.stale else ""
        moved = (
            f"the policy is at version {part.policy_version} and the drafter at {part.drafter_version}"
            if part.drafter_version >= 0
            else f"the policy has moved to version {part.policy_version} and no update of the drafter is in the log"
        )
        return f"and entropy {entropy} does not explain it: the drafter is stale ({moved}{found})"
    if math.isnan(share):
        return f"and this run cannot tell whether entropy {entropy} is why: it varied too little before"
    if share > _UNEXPLAINED:
        return f"of which entropy {entropy} explains {share:.0%}"
    return f"and neither entropy {entropy} nor the weights' versions explain it: look at prompts, contexts and batch sizes"


def find_change(bins: Sequence[Bin]) -> Change | None:
    """The split of the bins with the largest sum of squares between its sides; None if that is no change worth telling."""
    used = [place for place, part in enumerate(bins) if part.totals.drafted_by_depth]
    drafts = [bins[place].totals.drafted_by_depth[0] for place in used]
    accepted = [bins[place].totals.accepted_by_depth[0] for place in used]
    total, kept = sum(drafts), sum(accepted)
    best, at = 0.0, 0
    left = left_kept = 0
    for i in range(len(used) - 1):
        left, left_kept = left + drafts[i], left_kept + accepted[i]
        if min(left, total - left) < _MIN_SHARE * total:
            continue
        between = left * (total - left) / total * (left_kept / left - (kept - left_kept) / (total - left)) ** 2
        if between > best:
            best, at = between, i + 1
    if at == 0:
        return None
    n_before, n_after = sum(drafts[:at]), sum(drafts[at:])
    before, after = sum(accepted[:at]) / n_before, sum(accepted[at:]) / n_after
    mean = kept / total
    error = math.sqrt(mean * (1 - mean) * (1 / n_before + 1 / n_after))
    if abs(after - before) < max(_MIN_CHANGE, _MIN_ERRORS * error):
        return None
    sides = [bins[place] for place in used[:at]], [bins[place] for place in used[at:]]
    entropies = [_entropy(side) for side in sides]
    law = entropy_law(sides[0])
    explained = math.nan if law is None else law.slope * (entropies[1] - entropies[0])
    return Change(
        place=used[at],
        before=before,
        after=after,
        entropy_before=entropies[0],
        entropy_after=entropies[1],
        explained=explained,
    )


def _entropy(bins: Sequence[Bin]) -> float:
    cells = [cell for part in bins for cell in part.entropy_cells.values()]
    drafts = sum(cell.num_drafts for cell in cells)
    return sum(cell.entropy_sum for cell in cells) / drafts if drafts else math.nan


def entropy_law(bins: Sequence[Bin]) -> EntropyLaw | None:
    """α = intercept + slope H over these bins' rounds, weighted by drafts; None if entropy hardly varies."""
    cells = [cell for part in bins for cell in part.entropy_cells.values() if cell.num_drafts]
    if not cells:
        return None
    drafts = torch.tensor([cell.num_drafts for cell in cells], dtype=torch.float64)
    entropies = torch.tensor([cell.entropy_sum for cell in cells], dtype=torch.float64) / drafts
    mean = (drafts * entropies).sum() / drafts.sum()
    spread = ((drafts * (entropies - mean) ** 2).sum() / drafts.sum()).sqrt()
    if float(spread) < 0.05:
        return None
    rates = torch.tensor([cell.num_accepted for cell in cells], dtype=torch.float64) / drafts
    return fit_entropy_law(entropies, rates, drafts)


def _alarms(run: Run) -> list[Sentence]:
    total = run.bins.total().totals
    out: list[str] = []
    length = BY_NAME["accept_length_when_drafted"].compute(total)
    if isinstance(length, float) and length < _SHORT:
        out.append(
            f"Hardly a draft is accepted ({length:.2f} tokens a draft, the bonus included): the drafter may be another model's, or its "
            "weights may never have arrived."
        )
    if total.num_not_finite_rounds:
        out.append(f"{total.num_not_finite_rounds} rounds have an entropy or acceptance probability that is no number.")
    if run.errors:
        worst = max(run.errors, key=lambda message: run.errors[message])
        out.append(f"{sum(run.errors.values())} requests failed; most often: {worst}.")
    for name, sink in run.sinks.items():
        lost = sink.num_dropped + sink.num_failed
        if lost:
            out.append(f"The sink {name} lost {lost} of {lost + sink.num_delivered} events: its figures are too low.")
    return [Sentence(level=Level.BAD, text=text) for text in out]

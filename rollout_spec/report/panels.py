"""The panels of a page, in reading order."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_spec.report import accept_panels, pay_panels, state_panels
from rollout_spec.report.runs import Run
from rollout_spec.report.traces import Panel


def panels(runs: Sequence[Run]) -> list[Panel]:
    """All of them, in reading order: does it pay, what is accepted and why, is it stale, is anything lost."""
    return [
        pay_panels.speedup(runs),
        accept_panels.acceptance(runs),
        accept_panels.by_depth(runs),
        accept_panels.entropy(runs),
        accept_panels.alpha_against_entropy(runs),
        pay_panels.budget(runs),
        pay_panels.chosen(runs),
        pay_panels.tokens_a_round(runs),
        pay_panels.time_a_round(runs),
        pay_panels.time_split(runs),
        accept_panels.by_context(runs),
        accept_panels.lengths(runs),
        state_panels.versions(runs),
        state_panels.lag(runs),
        state_panels.importance(runs),
        state_panels.drops(runs),
    ]

"""metrics.jsonl of verl's file logger -> summary.json: what a run did, in a few figures.

python summarise.py RUN_FOLDER
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

# Means over the steps; the largest for what must stay small.
MEANS = (
    "critic/rewards/mean",
    "rollout/spec_accept_rate",
    "rollout/spec_accept_length",
    "rollout_spec/entropy",
    "rollout_spec/ms_per_round",
    "rollout_spec/draft_tokens_per_round",
    "rollout_spec/tokens_per_round",
    "rollout_spec/engine_s",
    "training/off_policy/trajectory_staleness/mean",
    "perf/time_per_step",
)
LARGEST = ("rollout_spec/num_failed_requests", "rollout_spec/num_restarts")


def logprob_difference(step: dict[str, float]) -> float:
    """The largest |log p_trainer - log p_rollout| of a sampled token: both ends of the importance ratios."""
    return max(abs(math.log(step[f"rollout_corr/rollout_is_{end}"])) for end in ("max", "min"))


def comparable(step: dict[str, float]) -> bool:
    """Whether the trainer's probabilities of a step are those of the very policy that sampled: none of it is older."""
    return "rollout_corr/rollout_is_max" in step and step.get("training/off_policy/trajectory_staleness_worst/max", 0) == 0


def summarise(lines: list[str]) -> dict[str, object]:
    """Raises ValueError if no training step was logged."""
    steps = [record["data"] for record in map(json.loads, lines) if "training/global_step" in record["data"]]
    if not steps:
        raise ValueError("no training step was logged")
    seen = {name: [step[name] for step in steps if name in step] for name in (*MEANS, *LARGEST)}
    compared = [logprob_difference(step) for step in steps if comparable(step)]
    return {
        "num_steps": len(steps),
        "last_step": steps[-1]["training/global_step"],
        "reward_first": steps[0]["critic/rewards/mean"],
        "reward_last": steps[-1]["critic/rewards/mean"],
        "policy_versions": [step.get("rollout_spec/policy_version") for step in steps],
        "num_steps_compared": len(compared),
        "largest_logprob_difference": max(compared, default=None),
        "mean": {name: sum(seen[name]) / len(seen[name]) for name in MEANS if seen[name]},
        "largest": {name: max(seen[name]) for name in LARGEST if seen[name]},
    }


def main() -> None:
    folder = Path(sys.argv[1])
    summary = summarise((folder / "metrics.jsonl").read_text().splitlines())
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()

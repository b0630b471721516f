"""How soon a drafter is called stale when the policy jumps away from it, and what the budget makes of it.

    python benchmarks/stale_drafter.py --drafter runs/mtp/drafter --json FILE [--batch 8] [--steps 24] [--lr 1e-2]

Rollouts of gsm_symbolic with budget auto; in the middle of a wave of requests the policy's weights are replaced by those after some steps
of fine-tuning on other text (HumanEval's problems and solutions) at a large learning rate, while the drafter stays what it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from drafter_policies import MODEL, fine_tuned, other_text, weights_of
from torch import Tensor

from rollout_spec.composition import DrafterOptions
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import load_model, make_runner
from rollout_spec.engine.request import Request
from rollout_spec.events import DrafterStaleEvent, Event, RoundEvent
from rollout_spec.files import write_text
from rollout_spec.prompts import load_prompts
from rollout_spec.session import parse_budget
from rollout_spec.sinks.memory import MemorySink
from rollout_spec_rl.compose import make_drafter, make_ops

ROUNDS_BEFORE, ROUNDS_AFTER = 250, 150
LONGEST_DRAFT = 4


def jumped(steps: int, lr: float, tokenizer: Any) -> dict[str, Tensor]:
    """The policy's weights after the fine-tuning."""
    texts = other_text(tokenizer)
    model = load_model(MODEL).module.train()
    loss = fine_tuned(model, [texts[index % len(texts)] for index in range(4 * steps)], lr)
    print(f"policy after {steps} steps: loss on the other text {loss:.2f}", flush=True)
    return weights_of(model)


def summary(events: Sequence[Event], jump: int) -> dict[str, Any]:
    """``jump``: the rounds before the weights changed."""
    rounds = [event for event in events if isinstance(event, RoundEvent)]
    stale = [event for event in events if isinstance(event, DrafterStaleEvent)]

    def part(of: Sequence[RoundEvent]) -> dict[str, float]:
        drafted = sum(event.num_draft_tokens for event in of)
        asked = sum(event.num_requests for event in of)
        first = [event.mean_accept_prob_by_depth[0] for event in of if event.mean_accept_prob_by_depth]
        return {
            "draft_tokens_per_request_round": drafted / asked,
            "accepted_rate": sum(event.num_accepted_tokens for event in of) / drafted if drafted else float("nan"),
            "first_accept_prob": statistics.fmean(first) if first else float("nan"),
            "entropy": statistics.fmean(event.mean_entropy for event in of),
            "rounds_without_drafts": sum(event.num_draft_tokens == 0 for event in of) / len(of),
        }

    after = rounds[jump:]
    return {
        "before": part(rounds[jump - 100 : jump]),
        "after_20": part(after[:20]),
        "after_rest": part(after[20:]),
        "rounds_to_stale": stale[0].round_index - rounds[jump].round_index + 1 if stale else None,
        "false_alarms": sum(event.round_index < rounds[jump].round_index for event in stale),
        "accept_prob": stale[0].accept_prob if stale else None,
        "reference_accept_prob": stale[0].reference_accept_prob if stale else None,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    loaded, ops, sink = load_model(MODEL), make_ops(), MemorySink()
    prompts = load_prompts("gsm_symbolic:64", loaded.tokenizer)
    weights = jumped(options.steps, options.lr, loaded.tokenizer)
    engine = Engine(
        make_runner(loaded.module, max_context=512, ops=ops),
        config=EngineConfig(max_batch=options.batch, max_context=512, seed=0),
        drafter=make_drafter(DrafterOptions(spec=options.drafter, draw=None), loaded, ops),
        controller=parse_budget("auto", LONGEST_DRAFT, (1,)),
        sink=sink,
    )
    more = (Request(prompt_token_ids=prompt.token_ids, max_new_tokens=96) for prompt in itertools.cycle(prompts))
    for request in itertools.islice(more, 2 * options.batch):  # as many wait as run: the batch is never to run empty
        engine.add(request)
    num_rounds = 0
    while num_rounds < ROUNDS_BEFORE + ROUNDS_AFTER:
        for _ in engine.step():
            engine.add(next(more))
        num_rounds = sum(isinstance(event, RoundEvent) for event in sink.events)
        if num_rounds == ROUNDS_BEFORE and engine.weights_version == 0:
            engine.update_weights(weights.items(), 1)
    return {
        "batch": options.batch,
        "steps": options.steps,
        "lr": options.lr,
        "threads": torch.get_num_threads(),
        **summary(sink.events, ROUNDS_BEFORE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    result = run(options)
    write_text(options.json, json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

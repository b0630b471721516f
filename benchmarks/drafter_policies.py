"""What becomes of a trained drafter when the policy moves: with a frozen head, with a head that follows, and after refreshes of some steps.

    python benchmarks/drafter_policies.py --drafter runs/mtp/drafter --out runs/drafter_policies [--arms frozen follow_head]
        [--moves 8:2e-5 8:1e-4] [--prompts 48] [--tokens 96]

The policy is moved by real steps of fine-tuning on other text (HumanEval's problems and solutions), so many at a learning rate, one move
after the other. Acceptance is that of sampled chains of four under block verification on gsm_symbolic, on prompts that no refresh
has seen; a refresh trains on what the engine showed the drafter on other prompts. Results go to OUT/results.json and OUT/table.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollout_spec.budget import FixedBudget
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import LoadedModel, load_model, make_runner
from rollout_spec.engine.request import Request
from rollout_spec.events import RoundEvent
from rollout_spec.files import write_text
from rollout_spec.prompts import Prompt, load_prompts
from rollout_spec.sinks.memory import MemorySink
from rollout_spec_mtp.kinds import kind_of
from rollout_spec_mtp.online.recorder import RolloutBuffer, StateRecorder
from rollout_spec_mtp.online.trainer import OnlineTrainer, RefreshSettings
from rollout_spec_mtp.serving import load_trained
from rollout_spec_mtp.training.protocol import PolicyParts
from rollout_spec_rl.compose import make_ops

MODEL, DRAFT_LENGTH, TEXT_TOKENS = "smollm2-135m", 4, 128
ARMS = ("frozen", "follow_head")


@dataclass(frozen=True)
class Move:
    """Steps of fine-tuning at a learning rate."""

    steps: int
    lr: float

    @classmethod
    def parse(cls, text: str) -> Move:
        steps, _, lr = text.partition(":")
        return cls(int(steps), float(lr))

    def __str__(self) -> str:
        return f"{self.steps} steps at {self.lr:g}"


def fine_tuned(model: nn.Module, texts: Sequence[Sequence[int]], lr: float) -> float:
    """Train on the texts in place, four a step; returns the last step's loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for begin in range(0, len(texts), 4):
        batch = torch.tensor(texts[begin : begin + 4])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(loss.detach())


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def other_text(tokenizer: Any) -> list[list[int]]:
    """HumanEval's problems and solutions, all of one length."""
    texts = [tokenizer.encode(f"{prompt.text}{prompt.answer}") for prompt in load_prompts("humaneval:160", tokenizer)]
    return [text[:TEXT_TOKENS] for text in texts if len(text) >= TEXT_TOKENS]


def moved_policies(texts: Sequence[Sequence[int]], moves: Sequence[Move]) -> list[dict[str, Tensor]]:
    """The policy's weights after each of the moves, one after the other. ValueError if there are too few texts for them."""
    wanted = 4 * sum(move.steps for move in moves)
    if wanted > len(texts):
        raise ValueError(f"--moves take {wanted} texts of {TEXT_TOKENS} tokens, and there are {len(texts)}: name fewer steps")
    model = load_model(MODEL).module.train()
    out, taken = [], 0
    for move in moves:
        loss = fine_tuned(model, texts[taken : taken + 4 * move.steps], move.lr)
        taken += 4 * move.steps
        print(f"policy moved by {move}: loss on the other text {loss:.2f}", flush=True)
        out.append(weights_of(model))
    return out


class Bench:
    """An engine of the policy with a recorded drafter, asked for acceptance on the same prompts again and again."""

    def __init__(self, loaded: LoadedModel, drafter: Path, *, follow_head: bool, record_tokens: int) -> None:
        ops, self.parts = make_ops(), PolicyParts.of(loaded.module)
        own = self.parts if follow_head else self.parts.kept()
        model = load_trained(drafter, own)
        self.buffer, self.sink = RolloutBuffer(record_tokens), MemorySink()
        served = kind_of(model.kind).serve(model, own, ops, None)
        self.engine = Engine(
            make_runner(loaded.module, max_context=512, ops=ops),
            config=EngineConfig(max_batch=16, max_context=512, seed=0),
            drafter=StateRecorder(served, self.buffer, temperature=1.0),
            controller=FixedBudget(draft_length=DRAFT_LENGTH),
            sink=self.sink,
        )

    def acceptance(self, prompts: Sequence[Prompt], max_new_tokens: int) -> dict[str, Any]:
        """Accepted tokens a round without the bonus, and the mean acceptance probability by depth."""
        self.sink.events.clear()
        self.engine.generate([Request(prompt_token_ids=prompt.token_ids, max_new_tokens=max_new_tokens) for prompt in prompts])
        rounds = [event for event in self.sink.events if isinstance(event, RoundEvent)]
        depths = range(DRAFT_LENGTH)
        counts = [sum(e.drafted_by_depth[d] for e in rounds if d < len(e.drafted_by_depth)) for d in depths]
        sums = [sum(e.drafted_by_depth[d] * e.mean_accept_prob_by_depth[d] for e in rounds if d < len(e.drafted_by_depth)) for d in depths]
        return {
            "length": sum(e.num_accepted_tokens for e in rounds) / sum(e.num_requests for e in rounds),
            "by_depth": [total / count for total, count in zip(sums, counts, strict=True)],
            "entropy": sum(e.mean_entropy * e.num_emitted_tokens for e in rounds) / sum(e.num_emitted_tokens for e in rounds),
            "num_rounds": sum(e.num_requests for e in rounds),
            "draft_ms_per_round": 1e3 * sum(e.draft_s for e in rounds) / len(rounds),
        }


def compare(options: argparse.Namespace) -> dict[str, Any]:
    loaded = load_model(MODEL)
    held_out = load_prompts(f"gsm_symbolic:{options.prompts}@30000", loaded.tokenizer)
    training = load_prompts(f"gsm_symbolic:{options.training_prompts}@20000", loaded.tokenizer)
    moves = moved_policies(other_text(loaded.tokenizer), options.moves)
    results: dict[str, Any] = {"arms": {}, "refreshes": []}
    for arm in options.arms:
        loaded = load_model(MODEL)
        bench = Bench(loaded, options.drafter, follow_head=arm == "follow_head", record_tokens=options.buffer_tokens)
        rows = [bench.acceptance(held_out, options.tokens)]
        for version, weights in enumerate(moves, start=1):
            bench.engine.update_weights(weights.items(), version)
            rows.append(bench.acceptance(held_out, options.tokens))
        results["arms"][arm] = rows
        print(arm, [f"{row['length']:.3f}" for row in rows], flush=True)
    # The last bench's head follows: its drafter is the one that is refreshed.
    bench.buffer.clear()
    bench.engine.generate([Request(prompt_token_ids=prompt.token_ids, max_new_tokens=options.tokens) for prompt in training])
    for steps in options.steps:
        results["refreshes"].append(refresh(bench, options, steps, held_out))
        print(results["refreshes"][-1], flush=True)
    return results


def refresh(bench: Bench, options: argparse.Namespace, steps: int, held_out: Sequence[Prompt]) -> dict[str, Any]:
    """From the drafter as it was loaded, so many steps on the buffer; served acceptance afterwards."""
    recorded = bench.buffer.snapshot()
    origin = load_trained(options.drafter, bench.parts)
    trainer = OnlineTrainer(origin, bench.parts, RefreshSettings(max_steps=steps, max_seconds=1e6, lr=options.lr))
    began = time.perf_counter()
    refreshed = trainer.train(recorded, version=len(options.moves))
    assert refreshed is not None
    seconds = time.perf_counter() - began
    bench.engine.update_drafter(refreshed.tensors.items(), refreshed.version)
    return {
        "steps": refreshed.num_steps,
        "seconds": seconds,
        "num_tokens": refreshed.num_tokens,
        "held_out": [refreshed.length_before, refreshed.length_after],
        **bench.acceptance(held_out, options.tokens),
    }


def table(results: Mapping[str, Any], moves: Sequence[Move]) -> str:
    lines = ["| policy | drafter | accepted a round | by depth | entropy |", "| --- | --- | --- | --- | --- |"]

    def row(policy: str, drafter: str, found: Mapping[str, Any]) -> None:
        depths = " ".join(f"{alpha:.3f}" for alpha in found["by_depth"])
        lines.append(f"| {policy} | {drafter} | {found['length']:.3f} | {depths} | {found['entropy']:.2f} |")

    policies = ["as trained for", *(f"then {move}" for move in moves)]
    for place, policy in enumerate(policies):
        for arm, rows in results["arms"].items():
            row(policy, arm, rows[place])
    for found in results["refreshes"]:
        row(policies[-1], f"refreshed, {found['steps']} steps", found)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="the last one, follow_head, is refreshed")
    parser.add_argument("--moves", nargs="+", type=Move.parse, default=[Move(8, 2e-5), Move(8, 1e-4)], metavar="STEPS:LR")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--training-prompts", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--buffer-tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 40, 120])
    parser.add_argument("--lr", type=float, default=5e-4)
    options = parser.parse_args()
    if options.arms[-1] != "follow_head":
        parser.error("a refresh needs the head that follows the policy: name follow_head last")
    torch.manual_seed(0)
    results = {"settings": vars(options), **compare(options)}
    options.out.mkdir(parents=True, exist_ok=True)
    write_text(options.out / "results.json", json.dumps(results, indent=1, default=str) + "\n")
    write_text(options.out / "table.md", table(results, options.moves))
    print(table(results, options.moves))


if __name__ == "__main__":
    main()

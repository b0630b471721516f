"""Acceptance against the policy's entropy, with the temperature as the knob: Bebop's findings (arXiv 2606.12370) on a real model.

    python benchmarks/bebop.py --model smollm2-135m --drafter runs/mtp_smollm2/drafter --out runs/bebop
        [--prompts gsm_symbolic:16] [--temperatures .2,.4,.6,.8,1,1.2,1.4] [--figure docs/figures/entropy.svg]

At every temperature the engine rolls the prompts out twice with the drafter: rejection sampling with sampled drafts, and exact match with
greedy drafts. Both are lossless, so both texts are the policy's own. On every position of both, teacher-forced:

- sampled drafts, rejection:  α = sum_v min(p(v), q(v)), q the drafter at the policy's temperature;
- greedy drafts, exact match: p(argmax q), which cannot exceed the bound max_v p(v).

OUT/T.json holds a temperature (kept when run again with the same settings), OUT/summary.json and OUT/table.md the whole.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from acceptance_report import summarise, table
from progress import Lines
from torch import Tensor, nn

from rollout_spec.budget import FixedBudget
from rollout_spec.composition import draw_for
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.request import Completion, Request
from rollout_spec.files import write_text
from rollout_spec.job import sample_seed
from rollout_spec.prompts import Prompt, load_prompts
from rollout_spec.sampling import SamplingParams
from rollout_spec.session import set_threads
from rollout_spec.verify import Scheme
from rollout_spec_mtp.checkpoint import fingerprint
from rollout_spec_mtp.kinds import kind_of
from rollout_spec_mtp.losses import SlotStats
from rollout_spec_mtp.losses.objectives import rejection_length
from rollout_spec_mtp.serving import load_trained
from rollout_spec_mtp.training.evaluation import AGREEMENT, RecordingDrafter, TeacherForced, agreement, teacher_forced
from rollout_spec_mtp.training.packing import pack
from rollout_spec_mtp.training.protocol import PolicyParts
from rollout_spec_mtp.training.run import Workplace, open_workplace
from rollout_spec_mtp.training.shards import Rollout
from rollout_spec_rl.compose import make_ops

ARMS = (Scheme.REJECTION, Scheme.EXACT_MATCH)


@dataclass(frozen=True, kw_only=True)
class Study:
    """What all temperatures share."""

    workplace: Workplace
    model: Any  # the trained drafter
    prompts: Sequence[Prompt]
    draft_length: int
    max_new_tokens: int
    max_batch: int
    seed: int

    def run(self, temperature: float) -> list[dict[str, Any]]:
        """A record of every text of both arms."""
        return [record for arm in ARMS for record in self._run_arm(arm, temperature)]

    def _run_arm(self, arm: Scheme, temperature: float) -> list[dict[str, Any]]:
        policy = self.workplace.policy
        draw = draw_for(arm, seeded=False, wide=False)
        recorder = RecordingDrafter(kind_of(self.model.kind).serve(self.model, policy, self.workplace.ops, draw))
        runner = self.workplace.runner(self.prompts, self.max_new_tokens)
        room = max(len(prompt.token_ids) for prompt in self.prompts) + self.max_new_tokens
        engine = Engine(
            runner,
            config=EngineConfig(max_batch=self.max_batch, max_context=min(room, runner.max_position), scheme=arm),
            drafter=recorder,
            controller=FixedBudget(draft_length=self.draft_length),
        )
        sampling = SamplingParams(temperature=temperature)
        # In float32 whatever the policy's dtype: the laws are compared, not the rounding of their products.
        head = policy.head.float()
        exact = dataclasses.replace(policy, head=head)
        records, differences = [], []
        for completion in engine.generate([self._request(prompt, sampling) for prompt in self.prompts]):
            if completion.finish_reason == "error":
                raise ValueError(f"the rollout of prompt {completion.request_id} failed: {completion.error}")
            rollout = recorder.rollout(completion, head, temperature)
            if rollout is None:
                continue
            judged = judge(self.model, exact, rollout, temperature)
            differences.extend(agreement(recorder.reached[completion.request_id], judged.accept_probs(arm)))
            records.append({**served(completion, arm), **judged.record(self.draft_length)})
        check_served(differences, policy.head.dtype, temperature)
        return records

    def _request(self, prompt: Prompt, sampling: SamplingParams) -> Request:
        return Request(
            prompt_token_ids=prompt.token_ids,
            max_new_tokens=self.max_new_tokens,
            sampling=sampling,
            seed=sample_seed(self.seed, prompt.prompt_id, 0),
            request_id=prompt.prompt_id,
        )


def check_served(differences: Sequence[float], dtype: torch.dtype, temperature: float) -> None:
    """Raise ValueError if the engine did not accept with the probabilities that the texts were judged by (mean over slots)."""
    mean = sum(differences) / len(differences) if differences else math.nan
    # Logits are rounded before they are divided by the temperature.
    limit = AGREEMENT[dtype] / min(1.0, temperature)
    if not mean <= limit:
        raise ValueError(
            f"T = {temperature:g}: acceptance probabilities of the engine and of the texts differ by {mean:.4f} on average over "
            f"{len(differences)} slots; rounding explains {limit:.4f}"
        )


def served(completion: Completion, arm: Scheme) -> dict[str, Any]:
    return {
        "key": completion.request_id,
        "arm": arm.value,
        "num_tokens": len(completion.token_ids),
        "num_rounds": completion.num_rounds,
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """One text, teacher-forced, under both ways to draft. T anchors, G slots."""

    sampled: TeacherForced  # its statistics' overlap [T, G] is sum_v min(p, q)
    greedy: Tensor  # [T, G] p(argmax q); 0 at invalid slots
    matches: Tensor  # [T, G] bool: the text's token is argmax q
    bound: Tensor  # [T] max p at the first slot

    def accept_probs(self, arm: Scheme) -> TeacherForced:
        """The text with the acceptance probabilities that this arm's verification works with in the place of the overlaps."""
        if arm is Scheme.REJECTION:
            return self.sampled
        return dataclasses.replace(self.sampled, stats=dataclasses.replace(self.sampled.stats, overlap=self.greedy))

    def record(self, draft_length: int) -> dict[str, Any]:
        """Position by position at the first depth; expected lengths (no bonus) of draft_length drafts as sums over positions."""
        held: dict[str, Any] = {field.name: getattr(self.sampled.stats, field.name) for field in dataclasses.fields(SlotStats)}
        first: dict[str, Any] = {name: None if value is None else value[:, :draft_length] for name, value in held.items()}
        stats = SlotStats(**first)
        lengths = exact_match_length(self.greedy[:, :draft_length], self.matches[:, :draft_length])
        return {
            "entropies": self.sampled.entropies.tolist(),
            "bound": self.bound.tolist(),
            "greedy": self.greedy[:, 0].tolist(),
            "sampled": stats.overlap[:, 0].tolist(),
            "exact_match_length": float(lengths.sum()),
            "rejection_length": float(rejection_length(stats).sum()),
        }


@torch.no_grad()
def judge(model: Any, policy: PolicyParts, rollout: Rollout, temperature: float) -> Judged:
    """Both laws at every slot of the text's own draft layout."""
    batch = pack([[rollout]], policy.head.device)
    layout = model.layout(batch, 0)
    target_probs = torch.softmax(batch.hidden[-1][0].to(policy.head.dtype) @ policy.head.T / temperature, dim=-1)  # [L, V]
    ids = model.draft_token_ids
    draft_head = policy.head if ids is None else policy.head[ids]
    columns = (model(batch, layout).to(policy.head.dtype) @ draft_head.T).argmax(-1)
    drafts = columns if ids is None else ids[columns]  # [T, G]
    return Judged(
        sampled=teacher_forced(model, policy, rollout, temperature),
        greedy=torch.where(layout.valid, target_probs[layout.target_rows, drafts], 0.0),
        matches=drafts == batch.token_ids.flatten()[layout.token_rows],
        bound=target_probs.amax(-1)[layout.target_rows[:, 0]],
    )


def exact_match_length(greedy: Tensor, matches: Tensor) -> Tensor:
    """[T] unbiased estimate of the accepted length (no bonus) of greedy drafts under exact match, along texts drawn from the target.

    ``E[L] = sum_j E_{y~p}[prod_{i<j} 1{y_i = d_i} p_j(d_j)]``, d the greedy draft: as long as the text agrees with it, the drafter has
    seen what it drafted itself. greedy [T, G] p_j(d_j), 0 where there is no slot; matches [T, G] bool y_j = d_j.
    """
    reached = torch.cat([torch.ones_like(greedy[:, :1]), matches[:, :-1].cumprod(1).to(greedy.dtype)], dim=1)
    return (reached * greedy).sum(1)


def run_temperature(study: Study, temperature: float, settings: Mapping[str, object], out: Path) -> dict[str, Any]:
    """The temperature's file, made if it is not there. ValueError if it was made with other settings."""
    path = out / f"T{temperature:g}.json"
    if path.exists():
        record: dict[str, Any] = json.loads(path.read_text())
        if record["settings"] != settings:
            raise ValueError(f"{path} was made with other settings: choose another --out, or delete it")
        return record
    record = {"temperature": temperature, "settings": dict(settings), "texts": study.run(temperature)}
    write_text(path, json.dumps(record) + "\n")
    return record


def weights_hash(model: nn.Module) -> str:
    """Of all weights by name: a drafter that was trained again is another one, wherever it lies."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", default="gsm_symbolic:16")
    parser.add_argument("--temperatures", default=".2,.4,.6,.8,1,1.2,1.4")
    parser.add_argument("--draft-length", type=int, help="default: what the drafter was trained for")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", help="of the policy's forward")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--figure", type=Path, help="an .svg or .png; needs matplotlib")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    temperatures = [float(text) for text in arguments.temperatures.split(",")]
    set_threads(arguments.threads)
    workplace = open_workplace(arguments.model, arguments.dtype, make_ops(), Lines())
    model = load_trained(arguments.drafter, workplace.policy).eval()
    names = ("model", "prompts", "max_new_tokens", "max_batch", "dtype", "seed")
    settings = {name: getattr(arguments, name) for name in names} | {
        "draft_length": arguments.draft_length or model.num_slots,
        "drafter": {"kind": model.kind, "settings": json.loads(json.dumps(model.config_mapping())), "sha256": weights_hash(model)},
        "policy": fingerprint(workplace.policy),
    }
    study = Study(
        workplace=workplace,
        model=model,
        prompts=load_prompts(arguments.prompts, workplace.loaded.tokenizer),
        draft_length=settings["draft_length"],
        max_new_tokens=arguments.max_new_tokens,
        max_batch=arguments.max_batch,
        seed=arguments.seed,
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    update, records = Lines().bar("temperatures", len(temperatures), 0), []
    for done, temperature in enumerate(temperatures, start=1):
        records.append(run_temperature(study, temperature, settings, arguments.out))
        update(done, f"T = {temperature:g}")
    summary = summarise(records)
    write_text(arguments.out / "summary.json", json.dumps({"settings": settings, **summary}, indent=1) + "\n")
    write_text(arguments.out / "table.md", table(summary))
    print(table(summary))
    if arguments.figure is not None:
        from acceptance_figure import draw

        arguments.figure.parent.mkdir(parents=True, exist_ok=True)
        draw(summary, arguments.figure)


if __name__ == "__main__":
    main()

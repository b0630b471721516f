"""How good a drafter is: teacher-forced on the policy's own text, served by the engine, and whether the two agree.

They must: at a round that starts after token t, the acceptance probability at a depth that was reached is a function of the text alone,
whatever else was drafted. A drafter that is served otherwise than it was trained (wrong norm, wrong layer, wrong rope) shows here, and
nowhere else: the output stays right, it only comes slower.

Shape legend: L tokens of a sequence, T anchors, G slots, H hidden size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_spec.budget import Budget, FixedBudget
from rollout_spec.drafter import DraftContext, Drafter, DrafterNeeds, RequestView, TargetStates
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.request import Completion, Request
from rollout_spec.engine.runner import ModelRunner
from rollout_spec.job import sample_seed
from rollout_spec.prompts import Prompt
from rollout_spec.sampling import SamplingParams
from rollout_spec.tree import DraftTree
from rollout_spec.verdict import Verdict
from rollout_spec.verify import Scheme
from rollout_spec_mtp.losses import DraftBatch, Extra, SlotStats, chunked_stats
from rollout_spec_mtp.losses.objectives import block_length, rejection_length
from rollout_spec_mtp.training.collect import law_summary
from rollout_spec_mtp.training.packing import pack
from rollout_spec_mtp.training.protocol import PolicyParts
from rollout_spec_mtp.training.shards import Rollout

ENTROPY_EDGES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, math.inf)
# Mean difference of acceptance probabilities that rounding explains: served and teacher-forced forwards batch their rows differently,
# and bfloat16 states differ by 2^-8 of their size then.
AGREEMENT = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
_RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Reached:
    """One depth of one round that verification reached."""

    anchor: int  # tokens the request had when the round began
    depth: int  # from 1
    accept_prob: float


class RecordingDrafter:
    """Another drafter, with what was accepted and the states it was shown kept by request."""

    name = "recording"

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.vocab_size = inner.vocab_size
        layers = tuple(sorted({-1, *inner.needs.hidden_layers}))
        self.needs = DrafterNeeds(hidden_layers=layers, run_target=inner.needs.run_target, every_round=True, draws=inner.needs.draws)
        self.reached: dict[str, list[Reached]] = {}
        self._states: dict[str, list[Mapping[int, Tensor]]] = {}

    def start(self, request: RequestView) -> None:
        self.reached[request.request_id], self._states[request.request_id] = [], []
        self._inner.start(request)

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        assert isinstance(context.states, TargetStates)
        offsets = context.states.offsets.tolist()
        for request, begin, end in zip(context.requests, offsets, offsets[1:], strict=False):
            if end > begin:
                self._states[request.request_id].append({layer: rows[begin:end].clone() for layer, rows in context.states.hidden.items()})
        return self._inner.propose(context, budget)

    def observe(self, context: DraftContext, tree: DraftTree, verdict: Verdict) -> None:
        for request, probs in zip(context.requests, verdict.accept_probs.tolist(), strict=True):
            known = [
                Reached(anchor=len(request.token_ids), depth=d, accept_prob=p) for d, p in enumerate(probs, start=1) if not math.isnan(p)
            ]
            self.reached[request.request_id].extend(known)
        self._inner.observe(context, tree, verdict)

    def finish(self, request: RequestView) -> None:
        self._inner.finish(request)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._inner.update_weights(named_tensors, version)

    def target_updated(self, version: int) -> None:
        self._inner.target_updated(version)

    def rollout(self, completion: Completion, head: Tensor, temperature: float) -> Rollout | None:
        """The request's text as far as states of it were shown; None if that is too short to draft on."""
        parts = self._states[completion.request_id]
        hidden = {layer: torch.cat([part[layer] for part in parts]) for layer in self.needs.hidden_layers} if parts else {}
        tokens = torch.tensor([*completion.prompt_token_ids, *completion.token_ids])
        length, num_prompt = (hidden[-1].shape[0] + 1 if hidden else 0), len(completion.prompt_token_ids)
        if length <= num_prompt + 1:
            return None
        lse, entropies = law_summary(hidden[-1], head, temperature)
        return Rollout(
            key=completion.request_id,
            token_ids=tokens[:length],
            num_prompt_tokens=num_prompt,
            hidden=hidden,
            target_lse=lse,
            target_entropies=entropies,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherForced:
    """Slot statistics of one text, and where its anchors lie."""

    stats: SlotStats  # [T, G]
    anchors: Tensor  # [T] tokens known when the draft begins
    entropies: Tensor  # [T] nats of the law that the first slot is judged by


@torch.no_grad()
def teacher_forced(model: Any, policy: PolicyParts, rollout: Rollout, temperature: float) -> TeacherForced:
    """Statistics of every draft the model could start on the rollout's response."""
    batch = pack([[rollout]], policy.head.device)
    layout = model.layout(batch, 0)
    head = policy.head
    draft = DraftBatch(
        student_hidden=model(batch, layout).to(head.dtype),
        target_hidden=batch.hidden[-1].flatten(0, 1),
        target_rows=layout.target_rows,
        token_ids=batch.token_ids.flatten()[layout.token_rows],
        valid=layout.valid,
        student_head=head if model.draft_token_ids is None else head[model.draft_token_ids],
        target_head=head,
        draft_token_ids=model.draft_token_ids,
        temperature=temperature,
        target_lse=batch.target_lse.flatten(),
    )
    stats = chunked_stats(draft, frozenset({Extra.BLOCK_OVERLAP}), chunk_bytes=64 << 20)
    return TeacherForced(stats=stats, anchors=layout.token_rows[:, 0], entropies=batch.target_entropies.flatten()[layout.target_rows[:, 0]])


def agreement(reached: Sequence[Reached], text: TeacherForced) -> list[float]:
    """|served - teacher-forced| acceptance probability at every slot that both know."""
    row_of = {anchor: row for row, anchor in enumerate(text.anchors.tolist())}
    overlap, valid = text.stats.overlap.tolist(), text.stats.valid.tolist()
    differences = []
    for slot in reached:
        row = row_of.get(slot.anchor)
        if row is not None and slot.depth <= len(overlap[row]) and valid[row][slot.depth - 1]:
            differences.append(abs(slot.accept_prob - overlap[row][slot.depth - 1]))
    return differences


def check_agreement(differences: Sequence[float], dtype: torch.dtype) -> None:
    """Raise ValueError if the drafter is not served as it is trained (a mean over slots, so that single near-ties do not count)."""
    if not differences:
        raise ValueError("served and teacher-forced drafts have no slot in common: give more or longer prompts")
    mean = sum(differences) / len(differences)
    if mean > AGREEMENT[dtype]:
        raise ValueError(
            f"the drafter is served otherwise than it was trained: acceptance probabilities differ by {mean:.4f} on average over "
            f"{len(differences)} slots (rounding explains {AGREEMENT[dtype]}); was it trained for this policy, on these hidden layers?"
        )


def evaluate_drafter(
    model: Any,
    drafter: Drafter,
    *,
    policy: PolicyParts,
    runner: ModelRunner,
    prompts: Sequence[Prompt],
    temperature: float = 1.0,
    draft_length: int = 4,
    max_new_tokens: int = 128,
    max_batch: int = 8,
    seed: int = 0,
    scheme: Scheme = Scheme.BLOCK,
) -> dict[str, Any]:
    """One served run over the prompts, and the same text teacher-forced; lengths include the recovered or bonus token.

    Keys: alpha_by_depth (teacher-forced, over all positions), teacher_forced_acceptance_length (block verification, over all positions),
    teacher_forced_rejection_length, served_acceptance_length (tokens a round), confidence_intervals (95 %, over requests), by_entropy,
    agreement. Raises ValueError if served and teacher-forced acceptance disagree.
    """
    if not temperature > 0:
        raise ValueError("a greedy policy has no law to compare with: evaluate at a positive temperature")
    recorder = RecordingDrafter(drafter)
    room = max(len(prompt.token_ids) for prompt in prompts) + max_new_tokens
    engine = Engine(
        runner,
        config=EngineConfig(max_batch=max_batch, max_context=min(room, runner.max_position), scheme=scheme),
        drafter=recorder,
        controller=FixedBudget(draft_length=draft_length),
    )
    sampling = SamplingParams(temperature=temperature)
    requests = [
        Request(
            prompt_token_ids=prompt.token_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=sample_seed(seed, prompt.prompt_id, 0),
            request_id=prompt.prompt_id,
        )
        for prompt in prompts
    ]
    completions = engine.generate(requests)
    texts: list[TeacherForced] = []
    differences: list[float] = []
    for completion in completions:
        rollout = recorder.rollout(completion, policy.head, temperature) if completion.error is None else None
        if rollout is None:
            continue
        text = teacher_forced(model, policy, rollout, temperature)
        if text.anchors.numel():
            texts.append(text)
            differences.extend(agreement(recorder.reached[completion.request_id], text))
    check_agreement(differences, policy.head.dtype)
    return _report(completions, texts, differences, draft_length)


def _report(
    completions: Sequence[Completion], texts: Sequence[TeacherForced], differences: Sequence[float], draft_length: int
) -> dict[str, Any]:
    block = [(float((block_length(t.stats) + 1).sum()), t.anchors.numel()) for t in texts]
    rejection = [(float((rejection_length(t.stats) + 1).sum()), t.anchors.numel()) for t in texts]
    served = [(float(len(c.token_ids)), c.num_rounds) for c in completions if c.num_rounds]
    alphas = [
        [(float((t.stats.overlap[:, d] * t.stats.valid[:, d]).sum()), int(t.stats.valid[:, d].sum())) for t in texts]
        for d in range(min(draft_length, texts[0].stats.valid.shape[1]))
    ]
    return {
        "num_requests": len(completions),
        "num_tokens": sum(len(completion.token_ids) for completion in completions),
        "alpha_by_depth": [_ratio(pairs) for pairs in alphas],
        "teacher_forced_acceptance_length": _ratio(block),
        "teacher_forced_rejection_length": _ratio(rejection),
        "served_acceptance_length": _ratio(served),
        "confidence_intervals": {
            "alpha_by_depth": [_interval(pairs) for pairs in alphas],
            "teacher_forced_acceptance_length": _interval(block),
            "teacher_forced_rejection_length": _interval(rejection),
            "served_acceptance_length": _interval(served),
        },
        "by_entropy": _by_entropy(texts),
        "agreement": {
            "num_slots": len(differences),
            "mean_abs_difference": sum(differences) / len(differences),
            "max_abs_difference": max(differences),
        },
    }


def _by_entropy(texts: Sequence[TeacherForced]) -> list[dict[str, Any]]:
    entropies = torch.cat([text.entropies for text in texts])
    first = torch.cat([text.stats.overlap[:, 0] for text in texts])
    lengths = torch.cat([block_length(text.stats) + 1 for text in texts])
    buckets = []
    for low, high in itertools.pairwise(ENTROPY_EDGES):
        inside = (entropies >= low) & (entropies < high)
        if bool(inside.any()):
            buckets.append(
                {
                    "entropy_from": low,
                    "entropy_to": high if math.isfinite(high) else None,
                    "num_positions": int(inside.sum()),
                    "alpha": float(first[inside].mean()),
                    "acceptance_length": float(lengths[inside].mean()),
                }
            )
    return buckets


def _ratio(pairs: Sequence[tuple[float, int]]) -> float:
    """Ratio of sums: every position (or round) counts the same."""
    count = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / count if count else math.nan


def _interval(pairs: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """95 % bootstrap interval of the ratio of sums, resampling requests: positions of one text are not independent."""
    values = np.array(pairs, dtype=np.float64)
    rows = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    sums = values[rows].sum(axis=1)
    ratios = sums[:, 0] / np.maximum(sums[:, 1], 1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)

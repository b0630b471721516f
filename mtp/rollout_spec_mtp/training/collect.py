"""Collecting: the engine samples from the policy, a drafter that never drafts keeps the states it is shown.

Shape legend: L tokens of a sequence, R rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rollout_spec.budget import Budget, FixedBudget
from rollout_spec.drafter import DraftContext, DrafterNeeds, RequestView
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.request import Completion, Request
from rollout_spec.engine.runner import ModelRunner
from rollout_spec.job import sample_seed
from rollout_spec.prompts import Prompt
from rollout_spec.sampling import SamplingParams
from rollout_spec.tree import DraftTree
from rollout_spec.verdict import Verdict
from rollout_spec_mtp.training.protocol import PolicyParts
from rollout_spec_mtp.training.shards import Rollout, ShardWriter

_SHARD_TOKENS = 20_000
_LAW_ROWS = 256  # rows whose logits over the whole vocabulary are alive at once


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """``storage`` is the dtype states are kept in; the law's normaliser is computed from the states as they are kept."""

    prompts: str
    num_samples: int = 1  # of a prompt, one after the other: with max_tokens, more samples are fewer prompts
    max_new_tokens: int = 128
    temperature: float = 1.0
    max_batch: int = 16
    max_tokens: int | None = None  # stop when so many response tokens are there
    seed: int = 0
    dtype: str = "float32"  # of the policy's forward
    storage: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_new_tokens", "max_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"collect.{name} must be 1 or more, got {getattr(self, name)}")
        if not self.temperature > 0:
            raise ValueError(f"collect.temperature must be positive, got {self.temperature}: a greedy policy has no law to train on")
        for name in ("dtype", "storage"):
            if getattr(self, name) not in ("float32", "bfloat16"):
                raise ValueError(f"collect.{name} must be float32 or bfloat16, got {getattr(self, name)!r}")


class TapDrafter:
    """Drafts nothing; keeps every request's states until they are taken."""

    name = "tap"
    vocab_size: int | None = None

    def __init__(self, hidden_layers: tuple[int, ...]) -> None:
        self.needs = DrafterNeeds(hidden_layers=hidden_layers, every_round=True)
        self._states: dict[str, list[Mapping[int, Tensor]]] = {}
        self.newest: dict[str, RequestView] = {}  # of the last round

    def start(self, request: RequestView) -> None:
        self._states[request.request_id] = []

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:  # noqa: ARG002
        if context.states is not None and context.states.hidden:
            offsets = context.states.offsets.tolist()
            for request, begin, end in zip(context.requests, offsets, offsets[1:], strict=False):
                states = {layer: rows[begin:end].clone() for layer, rows in context.states.hidden.items()}
                self._states[request.request_id].append(states)
        self.newest = {request.request_id: request for request in context.requests}
        return DraftTree.empty(len(context.requests))

    def take(self, request_id: str) -> dict[int, Tensor]:
        """layer -> [states so far, H]; forgets them."""
        parts = [part for part in self._states.pop(request_id) if next(iter(part.values())).numel()]
        return {layer: torch.cat([part[layer] for part in parts]) for layer in self.needs.hidden_layers}

    def observe(self, context: DraftContext, tree: DraftTree, verdict: Verdict) -> None:
        pass

    def finish(self, request: RequestView) -> None:
        pass

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:  # noqa: ARG002
        raise ValueError("the collecting drafter has no weights")

    def target_updated(self, version: int) -> None:
        raise AssertionError(f"weights {version} arrived while rollouts of one policy were being collected")


class Collector:
    """Runs what is missing of a folder's rollouts. Sequences end with a stop token, or after max_new_tokens."""

    def __init__(
        self,
        config: CollectConfig,
        *,
        runner: ModelRunner,
        policy: PolicyParts,
        prompts: Sequence[Prompt],
        hidden_layers: tuple[int, ...],
        folder: Path,
        model: str,
    ) -> None:
        self._config = config
        # In float32, which is also faster than bfloat16 in products this large on most CPUs.
        self._head = policy.head.float()
        layers = tuple(sorted({-1, *hidden_layers}))
        settings = {
            "model": model,
            "hidden_layers": list(layers),
            **{name: getattr(config, name) for name in CollectConfig.__dataclass_fields__},
        }
        self._writer = ShardWriter(folder, settings)
        self._tap = TapDrafter(layers)
        self._stops = frozenset(runner.eos_token_ids)
        # The engine hands a token's state over in the round after it, so each request runs for one token more than is kept, and a
        # stop token must not end it: it is ended here, a round later.
        room = config.max_new_tokens + 1
        self._prompts = [prompt for prompt in prompts if 0 < len(prompt.token_ids) <= runner.max_position - room]
        if not self._prompts:
            raise ValueError(f"none of the {len(prompts)} prompts fits: {room} new tokens leave {runner.max_position - room} for a prompt")
        needed = max(len(prompt.token_ids) for prompt in self._prompts) + room
        self._engine = Engine(
            runner,
            config=EngineConfig(max_batch=config.max_batch, max_context=needed, max_tree_nodes=1),
            drafter=self._tap,
            controller=FixedBudget(draft_length=0),
        )

    @property
    def total(self) -> int:
        return len(self._prompts) * self._config.num_samples

    def run(self, on_progress: Callable[[int, int], None]) -> int:
        """Collect what is missing; on_progress gets sequences and response tokens of this run. Returns how many tokens it added."""
        assert self._writer.index is not None
        if self._writer.index["complete"]:
            return 0
        budget = self._config.max_tokens
        tokens = sum(sum(s["lengths"]) - sum(s["prompt_lengths"]) for s in self._writer.index["shards"])
        done, added = len(self._writer.keys), 0
        waiting: list[Rollout] = []
        for rollout in self._rollouts(self._writer.keys):
            waiting.append(rollout)
            done, added, tokens = done + 1, added + rollout.num_response_tokens, tokens + rollout.num_response_tokens
            on_progress(done, tokens)
            if sum(held.token_ids.numel() for held in waiting) >= _SHARD_TOKENS:
                self._writer.write(waiting)
                waiting = []
            if budget is not None and tokens >= budget:
                break
        self._writer.write(waiting)
        self._writer.finish()
        return added

    def _rollouts(self, finished: set[str]) -> Iterator[Rollout]:
        """Sequences in the order in which they end."""
        for request in self._requests(finished):
            self._engine.add(request)
        ending: set[str] = set()
        while self._engine.has_work:
            for completion in self._engine.step():
                if completion.finish_reason == "error":
                    raise ValueError(f"collecting failed at {completion.request_id}: {completion.error}")
                yield self._rollout(completion)
            for request_id, view in self._tap.newest.items():
                # The view is live: its newest token was emitted after the round's states were handed over.
                if request_id not in ending and self._ended_at(view.token_ids, view.num_prompt_tokens) < len(view.token_ids):
                    self._engine.abort(request_id)
                    ending.add(request_id)

    def _requests(self, finished: set[str]) -> Iterator[Request]:
        sampling = SamplingParams(temperature=self._config.temperature)
        # A prompt's samples follow one another: they share its prefill, which costs more than a short answer does.
        for prompt in self._prompts:
            for sample in range(self._config.num_samples):
                key = f"{prompt.prompt_id}/{sample}"
                if key not in finished:
                    yield Request(
                        prompt_token_ids=prompt.token_ids,
                        max_new_tokens=self._config.max_new_tokens + 1,
                        sampling=sampling,
                        seed=sample_seed(self._config.seed, prompt.prompt_id, sample),
                        ignore_eos=True,
                        request_id=key,
                        prompt_key=prompt.prompt_id,
                    )

    def _ended_at(self, tokens: Sequence[int], num_prompt: int) -> int:
        """Length of the sequence: up to and including the first stop token of the response, if one is there."""
        for place in range(num_prompt, len(tokens)):
            if tokens[place] in self._stops:
                return place + 1
        return len(tokens)

    def _rollout(self, completion: Completion) -> Rollout:
        tokens = [*completion.prompt_token_ids, *completion.token_ids]
        num_prompt = len(completion.prompt_token_ids)
        length = min(self._ended_at(tokens, num_prompt), num_prompt + self._config.max_new_tokens)
        states = self._tap.take(completion.request_id)
        storage = getattr(torch, self._config.storage)
        hidden = {layer: rows[: length - 1].to(storage) for layer, rows in states.items()}
        assert hidden[-1].shape[0] == length - 1, "the engine ended a request before its last state was handed over"
        lse, entropies = torch.zeros(length - 1), torch.zeros(length - 1)
        lse[num_prompt - 1 :], entropies[num_prompt - 1 :] = law_summary(hidden[-1][num_prompt - 1 :], self._head, self._config.temperature)
        return Rollout(
            key=completion.request_id,
            token_ids=torch.tensor(tokens[:length]),
            num_prompt_tokens=num_prompt,
            hidden=hidden,
            target_lse=lse,
            target_entropies=entropies,
        )


@torch.no_grad()
def law_summary(hidden: Tensor, head: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """logsumexp of the logits over the temperature, and entropy in nats, each [R] float32, of states hidden [R, H] under head [V, H]."""
    lse, entropies = torch.empty(2, hidden.shape[0]).unbind()
    for begin in range(0, hidden.shape[0], _LAW_ROWS):
        rows = slice(begin, begin + _LAW_ROWS)
        logits = (hidden[rows].to(head.dtype) @ head.T).to(torch.float32).div_(temperature)
        lse[rows] = logits.logsumexp(dim=-1)
        log_probs = logits.sub_(lse[rows, None])
        entropies[rows] = -torch.linalg.vecdot(log_probs.exp(), log_probs)
    return lse, entropies

"""NativeDrafter: vLLM's own proposer as a drafter of ours.

It drafts for the whole batch; what is handed on is cut to each request's budget. The cut depends on budgets alone, never on what was
drawn, so it is exact.

Shape legend: B requests of the runner's batch, A requests of a proposal, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext, DrafterNeeds, RequestView
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verdict import Verdict

_GREEDY = 1e-5  # temperatures below are greedy to vLLM


@dataclass(frozen=True, kw_only=True, eq=False)
class Drafted:
    """What vLLM's proposer made of a step."""

    token_ids: Tensor  # [B, K]
    draft_probs: Tensor | None  # [B, K, V] that they were drawn from; None: all are the likeliest tokens


@dataclass(kw_only=True, eq=False)
class Turn:
    """One step of the runner in which its proposer may run once."""

    run: Callable[[int], Drafted]  # at a length; 0 only reads the step's tokens into the proposer's K/V
    rows: Mapping[str, int]  # request id -> row of the batch
    room: int  # tokens that may be drafted before the longest request leaves what the proposer can read; below 0: it cannot run
    done: bool = field(default=False)

    def draft(self, length: int) -> Drafted:
        assert not self.done, "vLLM's proposer runs once a step"
        self.done = True
        return self.run(length)


class NativeDrafter:
    """A drafter with weights (rollout_spec.drafter.HasWeights) that live in vLLM."""

    vocab_size: int | None

    def __init__(
        self,
        proposer: Any,
        *,
        target: Any,
        method: str,
        draft_length: int,
        vocab_size: int,
        sampled: bool,
        keep_up: bool,
        reload: Callable[[Iterable[tuple[str, Tensor]]], Mapping[str, int]],
    ) -> None:
        """proposer, target: vLLM's. sampled: its drafts are draws; else they are its likeliest tokens.

        keep_up: with no draft asked for, it still reads every step's tokens; without, it never runs unless asked. reload: loads weights
        under the checkpoint's names and returns their checksums.
        """
        self.name, self.vocab_size = f"{method} of vLLM", vocab_size
        self.needs = DrafterNeeds(every_round=keep_up, draws=frozenset({Draw.SAMPLED if sampled else Draw.DETERMINISTIC}))
        self.weights_version = 0
        self.loaded: Mapping[str, int] = {}  # checksums of the weights that came last, by name
        self._proposer, self._target, self._reload = proposer, target, reload
        # A block is drafted at once, as long as it was trained to be.
        self._fixed_length = draft_length if method == "dflash" else None
        self._sampled, self._num_tokens = sampled, vocab_size
        self._turn: Turn | None = None

    def begin(self, turn: Turn) -> None:
        """The runner's step, for the ``propose`` that may follow."""
        self._turn = turn

    def end(self) -> None:
        """Nobody asks for drafts of the step any more: its tokens are read, if they were not."""
        turn, self._turn = self._turn, None
        if turn is not None and self.needs.every_round and not turn.done and turn.room >= 0:
            turn.draft(0)

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """Chains [A]. ValueError if the drafter's distribution is none."""
        turn = self._turn
        assert turn is not None, "a native drafter drafts inside a step of its runner"
        empty = DraftTree.empty(len(context.requests))
        if turn.room < 0:
            return empty
        depth = length = min(budget.max_depth, turn.room)
        if depth and self._fixed_length is not None:
            length = self._fixed_length if self._fixed_length <= turn.room else 0
        drafted = turn.draft(length)
        if length == 0:
            return empty
        rows = torch.tensor([turn.rows[request.request_id] for request in context.requests])
        token_ids = drafted.token_ids[rows, :depth].long()
        lengths = budget.draft_lengths.clamp_max(depth)
        if not self._sampled:
            return DraftTree.chains(token_ids, lengths, Draw.DETERMINISTIC)
        probs = self._probs(drafted, rows, token_ids, context.requests)
        return DraftTree.chains(token_ids, lengths, Draw.SAMPLED, draft_probs=probs)

    def _probs(self, drafted: Drafted, rows: Tensor, token_ids: Tensor, requests: Sequence[RequestView]) -> Tensor:
        """[A, K, V] float32 what each token was drawn from: vLLM takes the likeliest for greedy requests, whatever it says of them."""
        if drafted.draft_probs is None:
            probs = torch.zeros(*token_ids.shape, self._num_tokens)
            return probs.scatter_(2, token_ids[:, :, None], 1.0)
        if drafted.draft_probs.shape[2] != self._num_tokens:
            raise ValueError(f"vLLM's drafter has {drafted.draft_probs.shape[2]} tokens, the policy {self._num_tokens}: use one that fits")
        probs = drafted.draft_probs[rows, : token_ids.shape[1]]
        greedy = torch.tensor([request.sampling.temperature < _GREEDY for request in requests])
        if bool(greedy.any()):
            probs[greedy] = torch.zeros_like(probs[greedy]).scatter_(2, token_ids[greedy][:, :, None], 1.0)
        if not bool((probs.gather(2, token_ids[:, :, None]) > 0).all()):
            raise ValueError("vLLM's drafter drew tokens of probability 0 or NaN: check the weights of its last update")
        return probs

    def start(self, request: RequestView) -> None:
        """vLLM keeps what there is to know of a request."""

    def observe(self, context: DraftContext, tree: DraftTree, verdict: Verdict) -> None:
        """vLLM's proposer learns nothing from verdicts."""

    def finish(self, request: RequestView) -> None:
        """vLLM frees its K/V with the request's."""

    def target_updated(self, version: int) -> None:
        """What it shares with the target are the target's modules; K/V of old states stays until the prefix cache is reset."""

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """All of the checkpoint's weights; ValueError names what is wrong, and nothing is changed then."""
        self.loaded = self._reload(named_tensors)
        self.weights_version = version

    def named_weights(self) -> dict[str, Tensor]:
        """Its own tensors, by vLLM's names, as far as vLLM keeps them readable: on a CPU the weights of packed layers are gone."""
        return self._held(of_target=False)

    def borrowed_weights(self) -> dict[str, Tensor]:
        """Those of them that are the target's."""
        return self._held(of_target=True)

    def _held(self, *, of_target: bool) -> dict[str, Tensor]:
        shared = {id(tensor) for tensor in self._target.parameters()}
        own = self._proposer.model.named_parameters()
        return {name: tensor.detach() for name, tensor in own if tensor.numel() and (id(tensor) in shared) == of_target}

"""MTPDrafter: an MTP head as the engine's drafter, with its own K/V over the context.

The head's row t joins the target's state of token t with token t + 1. Of T committed tokens the target has states of 0..T-2, so the
rows 0..T-2 are known at every proposal and the last one gives the law of the first draft. Drafts are fed back one by one.

Shape legend: B requests, K drafted tokens, N tree nodes, W nodes of a level, R rows, H hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext, DrafterNeeds, RequestView
from rollout_spec.drafters.grow import TreeGrower
from rollout_spec.engine.draft_head import ChainDraws, NewRows
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.plan import AttentionPlan, mask_words
from rollout_spec.sampling import SamplingParams, process_logits
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verdict import Verdict
from rollout_spec_mtp.checkpoint import load_checked
from rollout_spec_mtp.mtp.model import MTPModel
from rollout_spec_mtp.mtp.packed import DraftSlots, pack_head
from rollout_spec_mtp.training.protocol import PolicyParts


class MTPDrafter:
    """``draw`` None: sampled chains, exact for rejection sampling and block verification."""

    name = "mtp"

    def __init__(self, model: MTPModel, policy: PolicyParts, ops: Ops, draw: Draw | None = None) -> None:
        self.vocab_size: int | None = policy.vocab_size
        self.needs = DrafterNeeds(hidden_layers=model.hidden_layers, draws=frozenset(Draw))
        self._model, self._ops, self._draw = model.requires_grad_(False), ops, Draw.SAMPLED if draw is None else draw
        self._head = pack_head(model, ops)
        self._slots = DraftSlots(model)
        self._lengths: dict[str, int] = {}  # rows of the target's own states, by request
        self._sampling: dict[str, SamplingParams] = {}  # the part of a request's parameters that a reduced vocabulary can follow
        self.weights_version = 0

    def start(self, request: RequestView) -> None:
        self._lengths[request.request_id] = 0
        own = request.sampling
        self._sampling[request.request_id] = SamplingParams(temperature=own.temperature, top_k=own.top_k, top_p=own.top_p, min_p=own.min_p)

    def finish(self, request: RequestView) -> None:
        self._slots.release(request.request_id)
        self._lengths.pop(request.request_id, None)
        self._sampling.pop(request.request_id, None)

    def observe(self, context: DraftContext, tree: DraftTree, verdict: Verdict) -> None:
        pass

    def target_updated(self, version: int) -> None:  # noqa: ARG002  # states come again from position 0; only the borrowed head is packed
        self._head = pack_head(self._model, self._ops)

    def named_weights(self) -> Mapping[str, Tensor]:
        return dict(self._model.named_parameters())

    def borrowed_weights(self) -> Mapping[str, Tensor]:
        return self._model.policy.borrowed(self._model.draft_token_ids)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """All of the head's own tensors, under the names of its checkpoint; ValueError names what is wrong and changes nothing."""
        load_checked(self._model, dict(named_tensors), f"drafter weights of version {version}")
        self._head = pack_head(self._model, self._ops)
        self.weights_version = version

    @torch.inference_mode()
    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        wide = max(budget.tree_width) > 1
        if self._draw is Draw.SAMPLED and wide:
            raise ValueError(
                "independent draws make chains only; for a wider tree draft without replacement (verifier rejection_walk or traversal)"
            )
        requests, rows = context.requests, self._new_rows(context)
        offsets, lengths = rows.plan.row_offsets.tolist(), budget.draft_lengths.tolist()
        if len(set(offsets)) < len(offsets):
            # A prompt of one token has no state yet when its first round begins.
            lengths = [length if last > first else 0 for length, first, last in zip(lengths, offsets, offsets[1:], strict=False)]
            budget = dataclasses.replace(budget, draft_lengths=torch.tensor(lengths))
        depth = max(lengths)
        self._ensure(requests, depth)
        if depth and not wide and self._draw in (Draw.SAMPLED, Draw.GUMBEL):
            return self._chains(requests, rows, budget.draft_lengths, depth)
        state = self._head.absorb(rows, self._slots.cache)
        return self._tree(requests, rows.plan, state, budget) if depth else DraftTree.empty(len(requests), state.device)

    def _new_rows(self, context: DraftContext) -> NewRows:
        """The rows whose target states arrived; once computed, every request has K/V of all but its newest token's row."""
        requests, states = context.requests, context.states
        assert states is not None
        offsets, positions = states.offsets.tolist(), states.positions.tolist()
        tokens: list[int] = []
        begins: list[int] = []
        for request, first, last in zip(requests, offsets, offsets[1:], strict=False):
            held = self._lengths[request.request_id]
            begin = positions[first] if last > first else held
            end = begin + last - first
            # Position 0 again: the policy's weights changed, or the request was preempted.
            if last > first and (begin not in (0, held) or end != len(request.token_ids) - 1):
                raise AssertionError(f"states {begin}:{end} of {request.request_id} do not join the {held} before")
            begins.append(begin)
            tokens.extend(request.token_ids[begin + 1 : end + 1])
            self._lengths[request.request_id] = end
        slots = [self._slots.acquire(request.request_id) for request in requests]
        nothing = self._model.policy.head[:0]
        return NewRows(
            taps=[states.hidden[layer].to(nothing) if tokens else nothing for layer in self._model.hidden_layers],
            token_ids=torch.tensor(tokens, dtype=torch.int64),
            plan=AttentionPlan(row_offsets=states.offsets, slots=torch.tensor(slots), context_lengths=torch.tensor(begins)),
        )

    def _ensure(self, requests: Sequence[RequestView], num_drafts: int) -> None:
        """Room behind every request's rows for so many drafted ones."""
        self._slots.ensure(max(self._lengths[request.request_id] for request in requests) + num_drafts)

    def _chains(self, requests: Sequence[RequestView], rows: NewRows, lengths: Tensor, depth: int) -> DraftTree:
        """One token a step, drawn from the very probabilities that are handed over, or with the target's own noise."""
        draws = ChainDraws(
            lengths=lengths,
            num_steps=depth,
            sampling=[self._sampling[request.request_id] for request in requests],
            seeds=[request.seed for request in requests],
            positions=[request.next_position for request in requests],
            coupled=self._draw is Draw.GUMBEL,
        )
        chains = self._head.draw_chains(rows, self._slots.cache, draws)
        ids = None if chains.probs is None else self._head.weights.token_ids
        return DraftTree.chains(chains.token_ids, lengths, self._draw, draft_probs=chains.probs, draft_token_ids=ids)

    def _tree(self, requests: Sequence[RequestView], absorbed: AttentionPlan, state: Tensor, budget: Budget) -> DraftTree:
        """Level by level: a level's nodes run once, each seeing the context and its ancestors, whose K/V the levels before left."""
        grower = TreeGrower(requests, budget, self._draw, self._head.weights.token_ids, self._ops.gumbel_noise)
        params = [self._sampling[request.request_id] for request in requests]
        states = state[:, None]  # [B, W, H] after the nodes of the level (at first the root)
        sees = torch.zeros(len(requests), 1, 0, dtype=torch.bool)  # [B, W, N] which of the nodes so far are the node or above it
        while True:
            width = states.shape[1]
            logits = process_logits(self._head.logits(states.flatten(0, 1)), [own for own in params for _ in range(width)])
            grower.extend(torch.log_softmax(logits, dim=-1).view(len(requests), width, -1))
            if grower.done:
                return grower.tree()
            tokens = grower.partial().token_ids[:, sees.shape[2] :]
            children = tokens.shape[1] // width
            itself = torch.eye(tokens.shape[1], dtype=torch.bool).expand(len(requests), -1, -1)
            sees = torch.cat([sees.repeat_interleave(children, dim=1), itself], dim=2)
            self._ensure(requests, sees.shape[2])
            states = self._run_level(absorbed, states.repeat_interleave(children, dim=1), tokens, sees)

    def _run_level(self, absorbed: AttentionPlan, given: Tensor, tokens: Tensor, sees: Tensor) -> Tensor:
        """[B, W, H] after the nodes of one level; given [B, W, H] stand for the target's states."""
        batch, width, num_nodes = sees.shape
        ends = absorbed.context_lengths + absorbed.rows_per_request
        plan = AttentionPlan(
            row_offsets=torch.arange(batch + 1) * width,
            slots=absorbed.slots,
            context_lengths=ends,
            ancestors=mask_words(sees).flatten(0, 1),
            num_earlier=num_nodes - width,
        )
        depths = sees.sum(2)
        positions = (ends[:, None] + depths - 1).flatten()
        return self._head.step(given.flatten(0, 1), tokens.flatten(), self._slots.cache, plan, positions).view(batch, width, -1)

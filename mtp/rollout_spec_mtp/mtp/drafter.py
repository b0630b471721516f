"""MTPDrafter: an MTP head as the engine's drafter, with its own K/V over the context.

The head's row t joins the target's state of token t with token t + 1. Of T committed tokens the target has states of 0..T-2, so the
rows 0..T-2 are known at every proposal and the last one gives the law of the first draft. Drafts are fed back one by one.

Shape legend: B requests, K drafted tokens, N tree nodes, W nodes of a level, R rows, H hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext, DrafterNeeds, RequestView, TargetStates
from rollout_spec.drafters.grow import TreeGrower
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.noise import Stream, uniforms
from rollout_spec.sampling import SamplingParams, process_logits
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verdict import Verdict
from rollout_spec.verify.categorical import inverse_cdf
from rollout_spec_mtp.checkpoint import load_checked
from rollout_spec_mtp.mtp.model import MTPModel
from rollout_spec_mtp.mtp.packed import DraftSlots, PackedHead
from rollout_spec_mtp.training.protocol import PolicyParts

# A chain's draws are keyed by where the round starts and, in the upper bits, by the step, so that a position drafted again in a later
# round gets fresh noise (drafters/grow.py has the reason).
_LANE = 1 << 40


@dataclasses.dataclass(kw_only=True, eq=False)
class _Round:
    """What the steps of one proposal share."""

    requests: Sequence[RequestView]
    sampling: list[SamplingParams]  # B: the part of a request's parameters that a reduced vocabulary can follow
    slots: Tensor  # [B]
    context_lengths: Tensor  # [B] rows of the target's own states
    row_offsets: Tensor  # [B + 1]: one row a request
    state: Tensor  # [B, H] after the last of them


class MTPDrafter:
    """``draw`` None: sampled chains, exact for rejection sampling and block verification."""

    name = "mtp"

    def __init__(self, model: MTPModel, policy: PolicyParts, ops: Ops, draw: Draw | None = None) -> None:
        self.vocab_size: int | None = policy.vocab_size
        self.needs = DrafterNeeds(hidden_layers=model.hidden_layers, draws=frozenset(Draw))
        self._model, self._draw = model.requires_grad_(False), Draw.SAMPLED if draw is None else draw
        self._head = PackedHead(model, ops)
        self._slots = DraftSlots(self._head, model)
        self._ids = model.draft_token_ids
        self._lengths: dict[str, int] = {}  # rows of the target's own states, by request
        self._sampling: dict[str, SamplingParams] = {}

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
        self._head.repack()

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """All of the head's own tensors, under the names of its checkpoint; ValueError names what is wrong and changes nothing."""
        load_checked(self._model, dict(named_tensors), f"drafter weights of version {version}")
        self._head.repack()

    @torch.inference_mode()
    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        wide = max(budget.tree_width) > 1
        if self._draw is Draw.SAMPLED and wide:
            raise ValueError(
                "independent draws make chains only; for a wider tree draft without replacement (verifier rejection_walk or traversal)"
            )
        now = self._absorb(context, budget.max_depth if not wide else 0)
        # A prompt of one token has no state yet when its first round begins.
        lengths = torch.where(now.context_lengths > 0, budget.draft_lengths, 0)
        budget = dataclasses.replace(budget, draft_lengths=lengths)
        if budget.max_depth == 0:
            return DraftTree.empty(len(now.requests), self._head.device)
        if self._draw is Draw.SAMPLED:
            return self._sampled_chains(now, budget)
        return self._grown_tree(now, budget, wide=wide)

    def _absorb(self, context: DraftContext, num_drafts: int) -> _Round:
        """Compute the rows whose target states arrived; afterwards every request has K/V of all but its newest token's row."""
        requests, states = context.requests, context.states
        assert states is not None
        offsets = states.offsets.tolist()
        first = states.positions[states.offsets[:-1].clamp(max=max(states.positions.numel() - 1, 0))].tolist() if offsets[-1] else []
        slots = torch.tensor([self._slots.acquire(request.request_id) for request in requests])
        fresh = [index for index in range(len(requests)) if offsets[index + 1] > offsets[index]]
        tokens: list[int] = []
        for index in fresh:
            request, begin = requests[index], first[index]
            end = begin + offsets[index + 1] - offsets[index]
            # Position 0 again: the policy's weights changed, or the request was preempted.
            if begin not in (0, self._lengths[request.request_id]) or end != len(request.token_ids) - 1:
                raise AssertionError(
                    f"states {begin}:{end} of {request.request_id} do not join the {self._lengths[request.request_id]} before"
                )
            tokens.extend(request.token_ids[begin + 1 : end + 1])
            self._lengths[request.request_id] = end
        context_lengths = torch.tensor([self._lengths[request.request_id] for request in requests])
        self._slots.ensure(int(context_lengths.max()) + num_drafts + 1)
        state = torch.zeros(len(requests), self._model.policy.hidden_size, dtype=self._head.dtype, device=self._head.device)
        if fresh:
            state[fresh] = self._run_rows(states, torch.tensor(tokens), slots[fresh], torch.tensor([first[i] for i in fresh]), fresh)
        return _Round(
            requests=requests,
            sampling=[self._sampling[request.request_id] for request in requests],
            slots=slots,
            context_lengths=context_lengths,
            row_offsets=torch.arange(len(requests) + 1),
            state=state,
        )

    def _run_rows(self, states: TargetStates, tokens: Tensor, slots: Tensor, begins: Tensor, fresh: list[int]) -> Tensor:
        """[number of fresh requests, H]: states after each one's last row."""
        counts = states.offsets.diff()[fresh]
        plan = AttentionPlan(row_offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]), slots=slots, context_lengths=begins)
        taps = [states.hidden[layer] for layer in self._model.hidden_layers]
        rotary = self._slots.rotary(states.positions)
        return self._head.step(self._head.fuse(taps), tokens, rotary, self._slots.kv, plan)[plan.row_offsets[1:] - 1]

    def _next(self, now: _Round, state: Tensor, tokens: Tensor, step: int) -> Tensor:
        """[B, H] after feeding drafted tokens [B] of step 1, 2, ... back."""
        plan = AttentionPlan(row_offsets=now.row_offsets, slots=now.slots, context_lengths=now.context_lengths + (step - 1))
        return self._head.step(state, tokens, self._slots.rotary(plan.context_lengths), self._slots.kv, plan)

    def _sampled_chains(self, now: _Round, budget: Budget) -> DraftTree:
        """One independent draw a step, from the very probabilities that are handed over."""
        depth, batch = budget.max_depth, len(now.requests)
        seeds = [request.seed for request in now.requests] * depth
        positions = [request.next_position + step * _LANE for step in range(depth) for request in now.requests]
        noise = uniforms(seeds, positions, Stream.DRAFT).view(depth, batch)
        state, drawn, laws = now.state, [], []
        for step in range(depth):
            probs = torch.softmax(process_logits(self._head.logits(state), now.sampling), dim=-1)
            columns = inverse_cdf(probs, noise[step])
            tokens = columns if self._ids is None else self._ids[columns]
            laws.append(probs)
            drawn.append(tokens)
            if step + 1 < depth:
                state = self._next(now, state, tokens, step + 1)
        return DraftTree.chains(
            torch.stack(drawn, dim=1), budget.draft_lengths, Draw.SAMPLED, draft_probs=torch.stack(laws, dim=1), draft_token_ids=self._ids
        )

    def _grown_tree(self, now: _Round, budget: Budget, *, wide: bool) -> DraftTree:
        """Level by level. A chain's steps extend the context; of a tree all nodes so far run again, each seeing its ancestors only."""
        grower = TreeGrower(now.requests, budget, self._draw, self._ids)
        states = now.state[:, None]  # [B, W, H] after the nodes of the level (at first the root)
        given: list[Tensor] = []  # per level [B, W, H]: what its nodes were given for the target's state
        while True:
            batch, width = states.shape[:2]
            logits = self._head.logits(states.flatten(0, 1))
            params = [own for own in now.sampling for _ in range(width)]
            level_size = grower.partial().max_nodes
            grower.extend(torch.log_softmax(process_logits(logits, params), dim=-1).view(batch, width, -1))
            if grower.done:
                return grower.tree()
            partial = grower.partial()
            children = (partial.max_nodes - level_size) // width
            given.append(states.repeat_interleave(children, dim=1))
            if not wide:
                states = self._next(now, states[:, 0], partial.token_ids[:, -1], len(given))[:, None]
            else:
                states = self._run_tree(now, partial, torch.cat(given, dim=1))[:, level_size:]

    def _run_tree(self, now: _Round, tree: DraftTree, given: Tensor) -> Tensor:
        """[B, N, H] after all nodes of a partial tree; given [B, N, H]."""
        batch, num_nodes = tree.token_ids.shape
        plan = AttentionPlan(
            row_offsets=now.row_offsets * num_nodes,
            slots=now.slots,
            context_lengths=now.context_lengths,
            ancestors=_ancestor_words(tree).flatten(0, 1),
        )
        self._slots.ensure(int(now.context_lengths.max()) + num_nodes)
        positions = now.context_lengths[:, None] + tree.depths() - 1
        rotary = self._slots.rotary(positions.flatten())
        states = self._head.step(given.flatten(0, 1), tree.token_ids.flatten(), rotary, self._slots.kv, plan)
        return states.view(batch, num_nodes, -1)


def _ancestor_words(tree: DraftTree) -> Tensor:
    """[B, N, words] int64: bit m of row n says that node m is n or above it."""
    batch, num_nodes = tree.token_ids.shape
    words = -(-num_nodes // 64)
    bits = torch.zeros(batch, num_nodes, words * 64, dtype=torch.int64)
    bits[:, :, :num_nodes] = tree.ancestors().long()
    # Bit 63 makes the sum wrap to a negative number: that is the word wanted.
    return (bits.view(batch, num_nodes, words, 64) << torch.arange(64)).sum(-1)

"""BlockDrafter: block diffusion in the engine's rounds, one pass a round for all requests.

Shape legend: B requests, R rows of new target states, K slots, W nodes of a level, N nodes of a tree, V draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext, DrafterNeeds, RequestView, TargetStates
from rollout_spec.drafters.ddtree import best_nodes, throughput_sizes
from rollout_spec.drafters.grow import TreeGrower
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.weights import checked
from rollout_spec.noise import LANE, Stream, uniforms
from rollout_spec.sampling import SamplingParams, process_logits
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verdict import Verdict
from rollout_spec.verify.categorical import inverse_cdf
from rollout_spec_mtp.block.context import ContextCache, request_slots
from rollout_spec_mtp.block.model import BlockModel
from rollout_spec_mtp.block.served import PackedBlock

_PROMISE_MEMORY = 200.0  # promised tokens that the rate of kept promises remembers
_FIRST_PROMISES = 20.0  # and how many it takes for kept at first


class BlockDrafter:
    """Proposes from the marginals of one block.

    The distribution of a slot does not depend on what is drawn at the others, so every way of drawing is exact: SAMPLED chains,
    trees WITHOUT_REPLACEMENT, GUMBEL-coupled chains and trees (all shaped by the budget's widths), and, DETERMINISTIC, the top-1 chain
    for a width of one or the best tree (DDTree) of as many nodes as the widths would give; ``tree_nodes`` sets that number directly.

    A request's temperature, top-k, top-p and min-p are applied to the drafts as to the target; its penalties, biases and masks are not.
    Deterministic drafts of a greedy request are ranked at temperature 1: a tree can then hold the runners-up. The whole block is always
    run, as in training, and cut to the budget afterwards.

    Context keys and values are computed once, when the target's states come. After ``update_weights`` requests that are running keep
    the context of the old drafter weights; their drafts stay exact and are judged as any other.
    """

    name = "block"

    def __init__(self, model: BlockModel, ops: Ops, draw: Draw | None = None, *, tree_nodes: int | None = None) -> None:
        if tree_nodes is not None and (tree_nodes < 1 or draw is not Draw.DETERMINISTIC):
            raise ValueError(f"tree_nodes {tree_nodes}: give 1 or more, and only with deterministic drafts")
        self._model, self._draw, self._tree_nodes = model.eval(), draw or Draw.SAMPLED, tree_nodes
        self._packed, self._noise = PackedBlock(model, ops), ops.gumbel_noise
        self._cache = ContextCache(self._packed.make_slots, margin=model.config.block_size)
        self._head = ops.pack_linear(self._head_weight(), None, torch.float32)
        self._sampling: dict[str, SamplingParams] = {}  # the part of each request's parameters that drafts follow
        self._promised = 0.0  # accepted tokens that the latest best trees' scores promise
        self._sums = (_FIRST_PROMISES, _FIRST_PROMISES)  # accepted, promised; faded
        self.vocab_size: int | None = model.policy.vocab_size
        self.needs = DrafterNeeds(hidden_layers=model.config.target_layers, draws=frozenset(Draw))
        self.weights_version = 0

    def _head_weight(self) -> Tensor:
        head, ids = self._model.policy.head, self._model.draft_token_ids
        return head if ids is None else head[ids]

    def start(self, request: RequestView) -> None:
        self._cache.open(request.request_id)
        own = request.sampling
        ranked = self._draw is Draw.DETERMINISTIC and own.temperature == 0
        self._sampling[request.request_id] = (
            SamplingParams() if ranked else SamplingParams(temperature=own.temperature, top_k=own.top_k, top_p=own.top_p, min_p=own.min_p)
        )

    def finish(self, request: RequestView) -> None:
        self._cache.close(request.request_id)
        del self._sampling[request.request_id]

    def observe(self, context: DraftContext, tree: DraftTree, verdict: Verdict) -> None:  # noqa: ARG002
        if self._promised:
            fade = math.exp(-self._promised / _PROMISE_MEMORY)
            self._sums = (self._sums[0] * fade + float(verdict.num_accepted.sum()), self._sums[1] * fade + self._promised)
            self._promised = 0.0

    @property
    def _kept_rate(self) -> float:
        """Accepted tokens for each that the scores of best trees promised."""
        return self._sums[0] / self._sums[1]

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        if self._draw is Draw.SAMPLED and max(budget.tree_width) > 1:
            raise ValueError(
                "independent draws make chains only; for a wider tree draft without replacement, deterministically or Gumbel-coupled"
            )
        assert context.states is not None
        self._take(context.requests, context.states)
        budget = dataclasses.replace(budget, draft_lengths=budget.draft_lengths.clamp(max=self._model.num_slots))
        if budget.max_depth == 0:
            return DraftTree.empty(len(context.requests))
        logits = self.logits(context.requests, budget.draft_lengths)
        if self._draw is Draw.SAMPLED:
            return self._sampled_chains(context.requests, logits, budget.draft_lengths)
        log_probs = logits.log_softmax(dim=-1)
        if self._draw is Draw.DETERMINISTIC and (self._tree_nodes is not None or max(budget.tree_width) > 1):
            return self._best_tree(log_probs, budget)
        grower = TreeGrower(context.requests, budget, self._draw, self._model.draft_token_ids, self._noise)
        depth = 0
        while not grower.done:
            grower.extend(log_probs[:, depth, None].expand(-1, grower.level.numel(), -1))
            depth += 1
        return grower.tree()

    @torch.inference_mode()
    def logits(self, requests: Sequence[RequestView], draft_lengths: Tensor) -> Tensor:
        """[B, K, V] float32 logits of the next K = max(draft_lengths) tokens, temperature and filters applied: their softmax is drawn from.

        Rows of requests with length 0 mean nothing.
        """
        active = draft_lengths.nonzero()[:, 0]
        chosen = [requests[index] for index in active.tolist()]
        for request in chosen:
            held, needed = self._cache.length(request.request_id), len(request.token_ids) - 1
            if held != needed:
                raise ValueError(f"request {request.request_id}: the block drafter holds target states of {held} tokens, not of {needed}")
        hidden = self._packed.forward(
            torch.tensor([request.token_ids[-1] for request in chosen]),
            torch.tensor([len(request.token_ids) - 1 for request in chosen]),
            request_slots(self._cache, [request.request_id for request in chosen]),
            self._cache.kv,
        )
        depth = int(draft_lengths.max())
        raw = self._head(hidden[:, :depth].flatten(0, 1))
        params = [self._sampling[request.request_id] for request in chosen for _ in range(depth)]
        processed = process_logits(raw, params).view(len(chosen), depth, -1)
        if len(chosen) == len(requests):
            return processed
        whole = processed.new_zeros(len(requests), *processed.shape[1:])
        whole[active] = processed
        return whole

    def _sampled_chains(self, requests: Sequence[RequestView], logits: Tensor, lengths: Tensor) -> DraftTree:
        """One independent draw a slot, from the very probabilities that are handed over."""
        batch, depth = logits.shape[:2]
        seeds = [request.seed for request in requests for _ in range(depth)]
        positions = [request.next_position + slot * LANE for request in requests for slot in range(depth)]
        noise = uniforms(seeds, positions, Stream.DRAFT)[:, 0].to(logits.device)
        probs, ids = logits.softmax(dim=-1), self._model.draft_token_ids
        columns = inverse_cdf(probs.flatten(0, 1), noise).view(batch, depth)
        tokens = columns if ids is None else ids[columns]
        return DraftTree.chains(tokens, lengths, Draw.SAMPLED, draft_probs=probs, draft_token_ids=ids)

    def _best_tree(self, log_probs: Tensor, budget: Budget) -> DraftTree:
        """As many nodes as set, else as pay by the budget's costs, else as the widths would give."""
        lengths, growth = budget.draft_lengths, budget.growth
        if self._tree_nodes is not None:
            num_nodes = torch.where(lengths > 0, self._tree_nodes, 0)
        elif growth is not None:
            num_nodes = torch.where(lengths > 0, growth.max_nodes, 0)
        else:
            num_nodes = torch.tensor([_full_tree(budget, depth) for depth in range(budget.max_depth + 1)])[lengths]
        top = log_probs.topk(min(int(num_nodes.max()), log_probs.shape[2]), dim=-1)
        ids = self._model.draft_token_ids
        nodes = best_nodes(top.values, num_nodes, lengths)
        sizes = nodes.num_nodes if growth is None or self._tree_nodes is not None else throughput_sizes(nodes, growth, self._kept_rate)
        kept = torch.arange(nodes.log_probs.shape[1]) < sizes[:, None]
        self._promised = float(nodes.log_probs.exp()[kept].sum())
        return nodes.tree(top.indices if ids is None else ids[top.indices], sizes)

    def _take(self, requests: Sequence[RequestView], states: TargetStates) -> None:
        """Keys and values of the states that came since the last round, into their requests' slots."""
        if states.positions.numel() == 0:
            return
        counts = states.offsets.diff()
        for request, begin, count in zip(requests, states.offsets.tolist(), counts.tolist(), strict=False):
            if count:
                self._cache.extend(request.request_id, int(states.positions[begin]), count)
        slots = request_slots(self._cache, [request.request_id for request in requests]).repeat_interleave(counts)
        self._cache.write(self._packed.context(states.hidden, states.positions), slots, states.positions)

    def named_weights(self) -> Mapping[str, Tensor]:
        """The drafter's own weights by their checkpoint names."""
        return dict(self._model.named_parameters())

    def borrowed_weights(self) -> Mapping[str, Tensor]:
        return self._model.policy.borrowed(self._model.draft_token_ids)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """All of the drafter's own weights. ValueError names what is unknown, missing, misshapen or not finite; nothing changes then."""
        own = self.named_weights()
        with torch.no_grad():
            for name, tensor in checked(named_tensors, own, {}, partial=False):
                own[name].copy_(tensor)
        self._packed.refresh()
        self.weights_version = version

    def target_updated(self, version: int) -> None:  # noqa: ARG002
        """The borrowed head and embedding changed, and with them every context: the engine hands all states over again."""
        self._head.update(self._head_weight(), None)
        self._cache.forget()


def _full_tree(budget: Budget, max_depth: int) -> int:
    """Nodes of a tree with the budget's widths down to max_depth."""
    total, level = 0, 1
    for depth in range(max_depth):
        level *= budget.width_at(depth)
        total += level
    return total

"""One round's rows: from draft trees to the forward's input, and from a verdict to the KV moves and emissions.

Shape legend: B requests, N nodes (padded), R rows (each request's root, then its nodes), D depth, W mask words.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_spec.engine.plan import AttentionPlan, mask_words
from rollout_spec.engine.runner import StepInput
from rollout_spec.engine.running import RECOVERED, UNDRAFTED, Emission
from rollout_spec.events import context_bucket
from rollout_spec.tree import DraftTree
from rollout_spec.verdict import Verdict


def round_input(
    tree: DraftTree,
    last_tokens: Tensor,  # [B]
    context_lengths: Tensor,  # [B]
    slots: Tensor,  # [B]
    tap_layers: tuple[int, ...] = (),
) -> StepInput:
    """Rows root, node 0, node 1, ... of every request; position = context + depth; a node sees its ancestors only."""
    if tree.max_nodes == 0:
        offsets = torch.arange(tree.batch_size + 1)
        plan = AttentionPlan(row_offsets=offsets, slots=slots, context_lengths=context_lengths)
        return StepInput(token_ids=last_tokens, positions=context_lengths, plan=plan, tap_layers=tap_layers)
    if tree.is_chain():
        return _chain_input(tree, last_tokens, context_lengths, slots, tap_layers)
    rows = tree.num_nodes + 1
    offsets = torch.cat([rows.new_zeros(1), rows.cumsum(0)])
    present = torch.arange(tree.max_nodes + 1) < rows[:, None]
    depths = torch.nn.functional.pad(tree.depths(), (1, 0))
    plan = AttentionPlan(row_offsets=offsets, slots=slots, context_lengths=context_lengths, ancestors=ancestor_words(tree)[present])
    token_ids = torch.cat([last_tokens[:, None], tree.token_ids], dim=1)[present]
    return StepInput(token_ids=token_ids, positions=(context_lengths[:, None] + depths)[present], plan=plan, tap_layers=tap_layers)


def _chain_input(tree: DraftTree, last_tokens: Tensor, context_lengths: Tensor, slots: Tensor, tap_layers: tuple[int, ...]) -> StepInput:
    """round_input for chains, on lists: half the time of a dozen operations on a few numbers."""
    lengths, drafted = tree.num_nodes.tolist(), tree.token_ids.tolist()
    token_ids: list[int] = []
    positions: list[int] = []
    offsets = [0]
    for last, context, length, chain in zip(last_tokens.tolist(), context_lengths.tolist(), lengths, drafted, strict=True):
        token_ids += [last, *chain[:length]]
        positions += range(context, context + length + 1)
        offsets.append(len(token_ids))
    plan = AttentionPlan(row_offsets=torch.tensor(offsets), slots=slots, context_lengths=context_lengths)
    return StepInput(token_ids=torch.tensor(token_ids), positions=torch.tensor(positions), plan=plan, tap_layers=tap_layers)


def ancestor_words(tree: DraftTree) -> Tensor:
    """[B, N + 1, W] int64: bit j of a row says that it sees row j of its request; row 0 is the root, row n + 1 node n."""
    batch, num_nodes = tree.token_ids.shape
    sees = torch.zeros(batch, num_nodes + 1, num_nodes + 1, dtype=torch.bool)
    sees[:, :, 0] = True
    sees[:, 1:, 1:] = tree.ancestors()
    return mask_words(sees)


def spread_tree(tree: DraftTree, requests: Tensor, batch_size: int) -> DraftTree:
    """The trees of some requests [A] of a batch, with trees without a node for the others."""

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(batch_size, *values.shape[1:]).index_copy_(0, requests, values)

    # Parents of padding are those of a chain, so that chains stay recognisable at a glance.
    parents = torch.arange(-1, tree.max_nodes - 1, device=tree.device).repeat(batch_size, 1).index_copy_(0, requests, tree.parents)
    return dataclasses.replace(
        tree,
        token_ids=spread(tree.token_ids),
        parents=parents,
        num_nodes=spread(tree.num_nodes),
        draft_probs=None if tree.draft_probs is None else spread(tree.draft_probs),
    )


def verdict_of(verdict: Verdict, requests: Tensor) -> Verdict:
    """The part of a verdict that concerns some requests [A]."""
    present = {name: value for name, value in vars(verdict).items() if value is not None}
    return dataclasses.replace(verdict, **{name: value[requests] for name, value in present.items()})


def emissions_of(tree: DraftTree, verdict: Verdict) -> list[list[Emission]]:
    """Per request: accepted draft tokens in order, then the recovered or bonus token."""
    assert verdict.raw_logprobs is not None
    assert verdict.processed_logprobs is not None
    assert verdict.entropies is not None
    raw, processed = verdict.raw_logprobs.tolist(), verdict.processed_logprobs.tolist()
    entropies, paths = verdict.entropies.tolist(), verdict.path.tolist()
    counts, following, bonus = verdict.num_accepted.tolist(), verdict.next_token_ids.tolist(), verdict.is_bonus.tolist()
    drafted = tree.token_ids.tolist()
    out = []
    for b, count in enumerate(counts):
        tokens = [drafted[b][node] for node in paths[b][:count]] + [following[b]]
        origins = [*range(1, count + 1), UNDRAFTED if bonus[b] else RECOVERED]
        out.append(
            [
                Emission(
                    token_id=token, logprob=raw[b][i], processed_logprob=processed[b][i], entropy=entropies[b][i], accepted_depth=origin
                )
                for i, (token, origin) in enumerate(zip(tokens, origins, strict=True))
            ]
        )
    return out


def kv_moves(tree: DraftTree, verdict: Verdict) -> Tensor | None:
    """[B, D + 1]: entry i is the row whose K/V belongs at row i (the root stays row 0), -1 = nothing to move; None when all lie right."""
    if tree.is_chain():
        return None
    rows = torch.where(verdict.path >= 0, verdict.path + 1, -1)
    sources = torch.cat([rows.new_full((rows.shape[0], 1), -1), rows], dim=1)
    in_place = (sources < 0) | (sources == torch.arange(sources.shape[1]))
    return None if bool(in_place.all()) else torch.where(in_place, -1, sources)


def draft_faults(tree: DraftTree, vocab_size: int, draft_lengths: Tensor) -> dict[int, str]:
    """Requests whose draft cannot be verified, with the reason: an unknown token, a wrong parent, more depth than was asked for."""
    if tree.max_nodes == 0 or _is_sound(tree, vocab_size, draft_lengths):
        return {}
    valid = tree.valid()
    unknown = valid & ((tree.token_ids < 0) | (tree.token_ids >= vocab_size))
    orphan = valid & ((tree.parents < -1) | (tree.parents >= torch.arange(tree.max_nodes)))
    faults = {
        int(b): f"draft token id {int(tree.token_ids[b, n])} is outside the vocabulary of {vocab_size}"
        for b, n in unknown.nonzero().tolist()
    }
    faults |= {
        int(b): f"draft node {n} names parent {int(tree.parents[b, n])}; parents come before their children"
        for b, n in orphan.nonzero().tolist()
    }
    if not faults:
        deepest = tree.num_nodes if tree.is_chain() else tree.depths().amax(1)
        faults = {
            int(b): f"draft of depth {int(deepest[b])} exceeds the budget of {int(draft_lengths[b])}"
            for b in (deepest > draft_lengths).nonzero()[:, 0].tolist()
        }
    return faults


def _is_sound(tree: DraftTree, vocab_size: int, draft_lengths: Tensor) -> bool:
    """True for chains without a fault, padding included: nearly all drafts. On lists, for tensor operations on a few numbers cost more."""
    if not tree.is_chain():
        return False
    in_vocabulary = all(min(row) >= 0 and max(row) < vocab_size for row in tree.token_ids.tolist())
    return in_vocabulary and all(map(operator.le, tree.num_nodes.tolist(), draft_lengths.tolist()))


def acceptance_counts(verdict: Verdict, live: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """By depth over the live requests: how many reached a drafted token, how many accepted one, and the mean acceptance probability."""
    num_accepted = [count for count, alive in zip(verdict.num_accepted.tolist(), live, strict=True) if alive]
    probs = [row for row, alive in zip(verdict.accept_probs.tolist(), live, strict=True) if alive]
    drafted: list[int] = []
    accepted: list[int] = []
    means: list[float] = []
    for depth, column in enumerate(zip(*probs, strict=True)):
        reached = [prob for prob in column if not math.isnan(prob)]
        if not reached:
            break
        drafted.append(len(reached))
        accepted.append(sum(count > depth for count in num_accepted))
        means.append(sum(reached) / len(reached))
    return tuple(drafted), tuple(accepted), tuple(means)


def counts_by_context(
    context_lengths: Sequence[int], live: Sequence[bool], num_drafted: Sequence[int], num_accepted: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """By ``context_bucket`` over the live requests: how many there are, their draft tokens, and how many of those they kept."""
    buckets = [context_bucket(length) for length in context_lengths]
    size = max((bucket for bucket, alive in zip(buckets, live, strict=True) if alive), default=-1) + 1
    rounds, drafted, accepted = [0] * size, [0] * size, [0] * size
    for bucket, alive, drafts, kept in zip(buckets, live, num_drafted, num_accepted, strict=True):
        if alive:
            rounds[bucket] += 1
            drafted[bucket] += drafts
            accepted[bucket] += kept
    return tuple(rounds), tuple(drafted), tuple(accepted)


def tree_depth(tree: DraftTree) -> int:
    """Depth of the deepest node of all requests; 0 when nothing was drafted."""
    if tree.max_nodes == 0:
        return 0
    return int(tree.num_nodes.max() if tree.is_chain() else torch.where(tree.valid(), tree.depths(), 0).max())

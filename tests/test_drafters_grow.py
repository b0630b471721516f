"""TreeGrower: the draws that verification relies on, and trees within their budgets."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.drafter import RequestView
from rollout_spec.drafters.grow import TreeGrower
from rollout_spec.noise import Stream, gumbel_noise
from rollout_spec.sampling import SamplingParams
from rollout_spec.tree import NO_PARENT, Draw

PROBS = torch.tensor([0.5, 0.3, 0.15, 0.05])


def views(num: int, length: int = 4) -> list[RequestView]:
    tokens = list(range(length))
    return [
        RequestView(request_id=str(i), prompt_key="p", token_ids=tokens, num_prompt_tokens=2, seed=i, sampling=SamplingParams())
        for i in range(num)
    ]


def grow(num: int, lengths: list[int], width: tuple[int, ...], draw: Draw, row: Tensor = PROBS, ids: Tensor | None = None) -> TreeGrower:
    grower = TreeGrower(views(num), Budget(draft_lengths=torch.tensor(lengths), tree_width=width), draw, ids)
    while not grower.done:
        grower.extend(row.log().expand(num, grower.level.numel(), -1))
    return grower


@pytest.mark.parametrize("draw", Draw)
@pytest.mark.parametrize("width", [(1,), (2, 1), (3, 2, 1)])
def test_trees_keep_to_each_requests_budget(draw: Draw, width: tuple[int, ...]) -> None:
    lengths = [0, 1, 3, 2]
    tree = grow(4, lengths, width, draw).tree()
    tree.check(4)
    assert tree.depths().amax(1).tolist() == lengths
    sizes = [1]
    for depth in range(3):
        sizes.append(sizes[-1] * width[min(depth, len(width) - 1)])
    assert tree.num_nodes.tolist() == [sum(sizes[1 : length + 1]) for length in lengths]


def test_siblings_are_drawn_without_replacement_in_order() -> None:
    """131 072 requests: the law of the ordered pair is p(a) p(b) / (1 - p(a)); a right sampler fails one seed in 10 000."""
    num = 1 << 17
    tree = grow(num, [1] * num, (2,), Draw.WITHOUT_REPLACEMENT).tree()
    pairs = tree.token_ids[:, 0] * 4 + tree.token_ids[:, 1]
    counts = torch.bincount(pairs, minlength=16).double()
    law = PROBS[:, None] * PROBS / (1 - PROBS[:, None])
    law.fill_diagonal_(0)
    wanted = law.flatten().double() * num
    seen = wanted > 0
    assert counts[~seen].sum() == 0
    assert stats.chisquare(counts[seen], wanted[seen] * counts[seen].sum() / wanted[seen].sum()).pvalue > 1e-4


def test_cousins_and_rounds_draw_independently() -> None:
    """Children of the two nodes of one depth, and of the same position in the next round: joint law is the product."""
    num = 1 << 15
    tree = grow(num, [2] * num, (2, 1), Draw.WITHOUT_REPLACEMENT).tree()
    cousins = torch.bincount(tree.token_ids[:, 2] * 4 + tree.token_ids[:, 3], minlength=16).double()
    first = grow(num, [2] * num, (1,), Draw.SAMPLED).tree().token_ids[:, 1]
    later = TreeGrower(views(num, length=5), Budget(draft_lengths=torch.ones(num, dtype=torch.int64)), Draw.SAMPLED)
    later.extend(PROBS.log().expand(num, 1, -1))
    rounds = torch.bincount(first * 4 + later.tree().token_ids[:, 0], minlength=16).double()
    product = (PROBS[:, None] * PROBS).flatten().double() * num
    for counts in (cousins, rounds):
        assert stats.chisquare(counts, product * counts.sum() / product.sum()).pvalue > 1e-4


def test_coupled_children_are_the_top_of_the_targets_noise() -> None:
    tree = grow(3, [2] * 3, (2, 1), Draw.GUMBEL).tree()
    for b in range(3):
        first, second = (gumbel_noise([b], [4 + depth], 4, Stream.TARGET)[0] + PROBS.log() for depth in (0, 1))
        assert tree.token_ids[b, :2].tolist() == first.topk(2).indices.tolist()
        assert tree.token_ids[b, 2:].tolist() == [int(second.argmax())] * 2
    assert tree.draft_probs is None


def test_a_reduced_vocabulary_is_coupled_by_target_token() -> None:
    ids = torch.tensor([7, 2, 30, 11])
    tree = grow(2, [1, 1], (1,), Draw.GUMBEL, ids=ids).tree()
    for b in range(2):
        scores = gumbel_noise([b], [4], 31, Stream.TARGET)[0][ids] + PROBS.log()
        assert tree.token_ids[b].tolist() == [int(ids[scores.argmax()])]
    sampled = grow(2, [1, 1], (1,), Draw.SAMPLED, ids=ids).tree()
    assert sampled.draft_token_ids is ids
    assert set(sampled.token_ids.flatten().tolist()) <= set(ids.tolist())


def test_draft_probs_are_those_that_were_drawn_from() -> None:
    tree = grow(2, [2, 1], (2, 1), Draw.WITHOUT_REPLACEMENT).tree()
    assert tree.draft_probs is not None
    torch.testing.assert_close(tree.draft_probs[0], PROBS.expand(4, -1))


def test_tokens_without_probability_are_not_drafted() -> None:
    """Fewer candidates than the width: the missing children are left out, and the places of the others closed up."""
    point = torch.tensor([0.0, 0.0, 1.0, 0.0])
    for draw in (Draw.WITHOUT_REPLACEMENT, Draw.GUMBEL, Draw.DETERMINISTIC):
        tree = grow(2, [2, 2], (3, 2), draw, row=point).tree()
        assert tree.num_nodes.tolist() == [2, 2]
        assert tree.token_ids.tolist() == [[2, 2]] * 2
        assert tree.parents.tolist() == [[NO_PARENT, 0]] * 2

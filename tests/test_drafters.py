"""What every model-free drafter must do: valid trees within the budget, from the context alone, with clean bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext, Drafter, RequestView
from rollout_spec.drafters.ngram import NGramConfig, NGramDrafter
from rollout_spec.drafters.suffix import SuffixConfig, SuffixDrafter
from rollout_spec.sampling import SamplingParams
from rollout_spec.tree import NO_PARENT, DraftTree, Draw

MakeDrafter = Callable[[], Drafter]
FACTORIES = [
    pytest.param(lambda: NGramDrafter(NGramConfig(min_n=1, max_nodes=20)), id="ngram"),
    pytest.param(lambda: SuffixDrafter(SuffixConfig(min_match_length=1, max_nodes=20, min_path_prob=1e-9)), id="suffix"),
]


def view(request_id: str, token_ids: Sequence[int], num_prompt_tokens: int = 1, seed: int = 0) -> RequestView:
    return RequestView(
        request_id=request_id,
        prompt_key="prompt of " + request_id,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        seed=seed,
        sampling=SamplingParams(),
    )


def propose(drafter: Drafter, views: Sequence[RequestView], lengths: Sequence[int], width: tuple[int, ...] = (1,)) -> DraftTree:
    context = DraftContext(requests=views, weights_version=0)
    return drafter.propose(context, Budget(draft_lengths=torch.tensor(lengths, dtype=torch.int64), tree_width=width))


def nodes(tree: DraftTree, request: int) -> list[tuple[int, int]]:
    """(token, parent) of a request's nodes."""
    num = int(tree.num_nodes[request])
    return list(zip(tree.token_ids[request, :num].tolist(), tree.parents[request, :num].tolist(), strict=True))


@pytest.mark.parametrize("make", FACTORIES)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4),
    data=st.data(),
    width=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
)
def test_trees_are_valid_and_within_the_budget(
    make: MakeDrafter, texts: list[list[int]], data: st.DataObject, width: tuple[int, ...]
) -> None:
    drafter = make()
    lengths = [data.draw(st.integers(0, 9)) for _ in texts]
    views = [view(str(index), text) for index, text in enumerate(texts)]
    for request in views:
        drafter.start(request)
    tree = propose(drafter, views, lengths, width)
    tree.check(vocab_size=4)
    assert tree.draw is Draw.DETERMINISTIC
    assert tree.max_nodes == int(tree.num_nodes.max())  # padded to the largest tree and no further
    depths = tree.depths()
    for row, length in enumerate(lengths):
        num_children: dict[int, int] = {}
        for _, parent in nodes(tree, row):
            num_children[parent] = num_children.get(parent, 0) + 1
        for parent, num in num_children.items():
            depth = 0 if parent == NO_PARENT else int(depths[row, parent])
            assert depth < length
            assert num <= width[min(depth, len(width) - 1)]
        assert len(nodes(tree, row)) <= 20


@pytest.mark.parametrize("make", FACTORIES)
@pytest.mark.parametrize("width", [(1,), (2, 1)])
@pytest.mark.parametrize("period", [1, 3, 7])
def test_periodic_text_gives_a_full_length_right_draft(make: MakeDrafter, period: int, width: tuple[int, ...]) -> None:
    text = (list(range(period)) * 8)[: 3 * period + 2]
    drafter = make()
    drafter.start(view("a", text))
    tree = propose(drafter, [view("a", text)], [8], width)
    path = [token for token, _ in nodes(tree, 0)]
    assert path == [(len(text) + i) % period for i in range(8)]
    assert tree.is_chain()


@pytest.mark.parametrize("make", FACTORIES)
def test_reading_piece_by_piece_equals_reading_at_once(make: MakeDrafter) -> None:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 4, (200,), generator=generator).tolist()
    pieces, at_once = make(), make()
    pieces.start(view("a", text[:10]))
    for end in (10, 11, 11, 14, 60, 61, 200):
        last = propose(pieces, [view("a", text[:end])], [6], (3, 2, 1))
    at_once.start(view("a", text[:10]))
    assert nodes(last, 0) == nodes(propose(at_once, [view("a", text)], [6], (3, 2, 1)), 0)


@pytest.mark.parametrize("make", FACTORIES)
def test_a_proposal_depends_on_tokens_only(make: MakeDrafter) -> None:
    """Same tokens, other seed, other neighbours: the same tree."""
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    alone, crowded = make(), make()
    alone.start(view("a", text, seed=1))
    views = [view("b", [5, 5, 5]), view("a", text, seed=2), view("c", [1])]
    for request in views:
        crowded.start(request)
    expected = nodes(propose(alone, [view("a", text, seed=1)], [4], (2, 1)), 0)
    assert nodes(propose(crowded, views, [4, 4, 4], (2, 1)), 1) == expected
    assert len(expected) > 0


@pytest.mark.parametrize("make", FACTORIES)
def test_no_requests_and_short_requests(make: MakeDrafter) -> None:
    drafter = make()
    assert propose(drafter, [], []).batch_size == 0
    drafter.start(view("a", [1]))
    tree = propose(drafter, [view("a", [1])], [5])
    assert (tree.batch_size, tree.max_nodes) == (1, 0)


@pytest.mark.parametrize("make", FACTORIES)
def test_a_request_must_be_running(make: MakeDrafter) -> None:
    drafter = make()
    with pytest.raises(ValueError, match="'a' was never started"):
        propose(drafter, [view("a", [1, 1])], [2])
    drafter.start(view("a", [1, 1]))
    drafter.finish(view("a", [1, 1, 1]))
    drafter.finish(view("a", [1, 1, 1]))  # an abort may cross a stop
    with pytest.raises(ValueError, match="has finished"):
        propose(drafter, [view("a", [1, 1, 1])], [2])


@pytest.mark.parametrize("make", FACTORIES)
def test_a_preempted_request_starts_again(make: MakeDrafter) -> None:
    text = [1, 2, 3, 1, 2]
    drafter, fresh = make(), make()
    drafter.start(view("a", text[:3]))
    propose(drafter, [view("a", text)], [3])
    drafter.start(view("a", text))
    fresh.start(view("a", text))
    assert nodes(propose(drafter, [view("a", text)], [3]), 0) == nodes(propose(fresh, [view("a", text)], [3]), 0)


@pytest.mark.parametrize("make", FACTORIES)
def test_weights_are_refused(make: MakeDrafter) -> None:
    with pytest.raises(ValueError, match="no weights"):
        make().update_weights([("head.weight", torch.zeros(1))], 1)


@pytest.mark.parametrize("make", FACTORIES)
def test_needs_nothing_of_the_target(make: MakeDrafter) -> None:
    drafter = make()
    assert drafter.vocab_size is None
    assert drafter.needs.hidden_layers == ()
    assert drafter.needs.draws == {Draw.DETERMINISTIC}

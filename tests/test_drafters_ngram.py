"""The n-gram drafter against a naive scan of the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext, RequestView
from rollout_spec.drafters.ngram import NGramConfig, NGramDrafter
from rollout_spec.sampling import SamplingParams
from rollout_spec.tree import DraftTree


def propose(config: NGramConfig, text: list[int], length: int, width: tuple[int, ...] = (1,)) -> DraftTree:
    drafter = NGramDrafter(config)
    request = RequestView(request_id="a", prompt_key="p", token_ids=text, num_prompt_tokens=1, seed=0, sampling=SamplingParams())
    drafter.start(request)
    context = DraftContext(requests=[request], weights_version=0)
    return drafter.propose(context, Budget(draft_lengths=torch.tensor([length]), tree_width=width))


def scan(text: list[int], max_n: int, min_n: int, length: int) -> list[list[int]]:
    """Continuations by definition: longest suffix first, then latest occurrence first, reading on in the draft past the end."""
    found, seen = [], set()
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(text) - 1, n - 1, -1):
            if len(text) > n and text[start - n : start] == text[-n:] and start not in seen:
                seen.add(start)
                extended = list(text)
                for offset in range(length):
                    extended.append(extended[start + offset])
                found.append(extended[len(text) :])
    return found


@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=60), length=st.integers(1, 12), data=st.data())
def test_chain_is_the_latest_continuation_of_the_longest_suffix(text: list[int], length: int, data: st.DataObject) -> None:
    min_n = data.draw(st.integers(1, 3))
    max_n = data.draw(st.integers(min_n, 6))
    tree = propose(NGramConfig(min_n=min_n, max_n=max_n), text, length)
    expected = scan(text, max_n, min_n, length)
    assert tree.is_chain()
    assert tree.token_ids[0].tolist() == (expected[0] if expected else [])


@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_an_unlimited_tree_is_the_trie_of_all_continuations(text: list[int]) -> None:
    config = NGramConfig(min_n=1, max_n=4, max_matches=1000, max_nodes=10_000)
    tree = propose(config, text, 4, width=(3,))
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids[0].tolist(), tree.parents[0].tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    expected = {tuple(path[:depth]) for path in scan(text, 4, 1, 4) for depth in range(1, 5)}
    assert set(paths) == expected
    assert len(paths) == len(set(paths))  # merged: no path twice


def test_the_longest_suffix_decides_and_shorter_ones_branch() -> None:
    text = [1, 2, 3, 50, 9, 2, 3, 60, 8, 3, 70, 1, 2, 3]
    assert propose(NGramConfig(), text, 1).token_ids.tolist() == [[50]]
    tree = propose(NGramConfig(min_n=1), text, 1, width=(3,))
    assert tree.token_ids.tolist() == [[50, 70, 60]] or tree.token_ids.tolist() == [[50, 60, 70]]
    assert tree.token_ids[0].tolist() == [path[0] for path in scan(text, 5, 1, 1)]


def test_a_narrow_level_keeps_the_first_branch() -> None:
    text = [1, 2, 5, 6, 1, 2, 7, 8, 1, 2]
    tree = propose(NGramConfig(), text, 2, width=(2, 1))
    assert tree.token_ids.tolist() == [[7, 8, 5, 6]]
    assert tree.parents.tolist() == [[-1, 0, -1, 2]]


@pytest.mark.parametrize("kwargs", [{"min_n": 0}, {"min_n": 4, "max_n": 3}, {"max_matches": 0}, {"max_nodes": 0}])
def test_bad_settings_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        NGramConfig(**kwargs)

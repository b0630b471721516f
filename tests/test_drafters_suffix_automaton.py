"""The suffix automaton against brute force over all substrings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.drafters import suffix_automaton
from rollout_spec.drafters.suffix_automaton import ROOT, SuffixAutomaton

texts_strategy = st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=4)


def occurrences(texts: list[list[int]], context: list[int]) -> list[tuple[int, int]]:
    """(text, end) of every occurrence of a non-empty context."""
    n = len(context)
    return [(index, end) for index, text in enumerate(texts) for end in range(n, len(text) + 1) if text[end - n : end] == context]


def walk(automaton: SuffixAutomaton, context: list[int]) -> int | None:
    state: int | None = ROOT
    for token in context:
        assert state is not None
        state = automaton.next_states[state].get(token)
        if state is None:
            return None
    return state


def build(texts: list[list[int]], order: list[int], weights: list[float]) -> tuple[SuffixAutomaton, list[int]]:
    """Insert token by token, the texts interleaved as ``order`` says. Returns the prefix state of each text."""
    automaton = SuffixAutomaton()
    last, num_written = [ROOT] * len(texts), [0] * len(texts)
    for choice in [*order, *(index for index, text in enumerate(texts) for _ in text)]:
        index = choice % len(texts)
        if num_written[index] < len(texts[index]):
            last[index] = automaton.extend(last[index], texts[index][num_written[index]], weights[index])
            num_written[index] += 1
    return automaton, last


@given(texts=texts_strategy, order=st.lists(st.integers(0, 3), max_size=40))
def test_contexts_counts_and_continuations(texts: list[list[int]], order: list[int]) -> None:
    weights = [1.0, 0.5, 2.0, 0.25][: len(texts)]
    automaton, _ = build(texts, order, weights)
    contexts = {tuple(text[i:j]) for text in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    for context in contexts:
        state = walk(automaton, list(context))
        assert state is not None
        assert automaton.weights[state] == sum(weights[index] for index, _ in occurrences(texts, list(context)))
        followers = {texts[index][end] for index, end in occurrences(texts, list(context)) if end < len(texts[index])}
        assert set(automaton.next_states[state]) == followers
        for token in {0, 1, 2} - followers:
            assert walk(automaton, [*context, token]) is None
    num_tokens = sum(map(len, texts))
    assert len(automaton.lengths) <= 2 * num_tokens + 1
    assert sum(map(len, automaton.next_states)) <= 3 * num_tokens


@given(texts=texts_strategy, order=st.lists(st.integers(0, 3), max_size=40))
def test_links_lead_through_the_suffixes_that_occur_elsewhere(texts: list[list[int]], order: list[int]) -> None:
    automaton, last = build(texts, order, [1.0] * len(texts))
    for text, state in zip(texts, last, strict=True):
        assert automaton.lengths[state] == len(text)
        suffix_lengths, places = [], len(occurrences(texts, text)) if text else 0
        for length in range(len(text) - 1, 0, -1):
            num = len(occurrences(texts, text[-length:]))
            if num > places:  # ends at more places than the longer suffix: a state of its own
                suffix_lengths.append(length)
                places = num
        visited = []
        state = automaton.links[state] if state != ROOT else ROOT
        while state != ROOT:
            visited.append(automaton.lengths[state])
            state = automaton.links[state]
        assert visited == suffix_lengths


def test_looping_text_stays_cheap_and_counts_its_long_contexts() -> None:
    num, counted = 1000, suffix_automaton._MAX_COUNTED_CONTEXTS
    automaton, (last,) = build([[7] * num], [], [1.0])
    assert len(automaton.lengths) == num + 1
    state = last
    for length in range(num, num - counted, -1):
        assert automaton.weights[state] == num - length + 1  # occurrences of `length` sevens among num
        state = automaton.links[state]
    assert automaton.weights[automaton.next_states[ROOT][7]] == counted  # the shortest context's count is what is given up


def test_scaled_weights_age_what_came_before() -> None:
    automaton = SuffixAutomaton()
    automaton.extend(ROOT, 1, 1.0)
    automaton.scale_weights(0.5)
    automaton.extend(ROOT, 1, 1.0)
    assert automaton.weights[automaton.next_states[ROOT][1]] == 1.5

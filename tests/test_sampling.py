"""process_logits against a slow float64 oracle, against transformers, and on the faults of PITFALLS.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from rollout_spec.noise import gumbel_noise
from rollout_spec.sampling import (
    RowHistory,
    SamplingParams,
    bad_rows,
    is_plain,
    log_target,
    needs_history,
    process_logits,
    sample,
)
from rollout_spec.truncation import truncate_, truncate_batched_

V = 23


def history(prompt: list[int] | None = None, output: list[int] | None = None, path: tuple[int, ...] = ()) -> RowHistory:
    return RowHistory(prompt_token_ids=prompt or [], output_token_ids=output or [], path_token_ids=path)


def oracle(logits: list[float], params: SamplingParams, row_history: RowHistory) -> list[float]:
    """The docstring of process_logits, one token at a time in Python floats. Returns probabilities."""
    prompt = list(row_history.prompt_token_ids)
    output = [*row_history.output_token_ids, *row_history.path_token_ids]
    counts = Counter(output)
    x = []
    for token, logit in enumerate(logits):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logit = -math.inf
        if token in params.banned_token_ids:
            logit = -math.inf
        logit += params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * counts[token]
        logit -= params.presence_penalty * (counts[token] > 0)
        x.append(logit)
    if params.temperature == 0:
        return [1.0 if token == x.index(max(x)) else 0.0 for token in range(len(x))]
    p = _normalise([math.exp((value - max(x)) / params.temperature) for value in x])
    p = _normalise([q if q >= params.min_p * max(p) else 0.0 for q in p])
    if params.top_k:
        kth = sorted(p, reverse=True)[min(params.top_k, len(p)) - 1]
        p = _normalise([q if q >= kth else 0.0 for q in p])
    if params.top_p < 1:
        kept, mass = set(), 0.0
        for token in sorted(range(len(p)), key=lambda t: (-p[t], t)):
            if mass >= params.top_p:
                break
            kept.add(token)
            mass += p[token]
        p = _normalise([q if token in kept else 0.0 for token, q in enumerate(p)])
    return p


def _normalise(weights: list[float]) -> list[float]:
    total = math.fsum(weights)
    return [w / total for w in weights]


tokens = st.integers(0, V - 1)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 7, V, V + 5]),
    # Odd values: a cumulative mass of equal logits (1/2, 2/3, ...) must not fall on the bound itself.
    top_p=st.sampled_from([1.0, 0.0137, 0.3517, 0.6091, 0.9013]),
    min_p=st.sampled_from([0.0, 0.0, 0.0511, 0.4007]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.31, -0.2]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-3.0, 1.5, 4.0]), max_size=3),
    allowed_token_ids=st.one_of(st.none(), st.lists(tokens, min_size=3, max_size=V, unique=True).map(tuple)),
    banned_token_ids=st.lists(tokens, max_size=2).map(tuple),  # fewer than are allowed
)
histories = st.builds(history, st.lists(tokens, max_size=8), st.lists(tokens, max_size=8), st.lists(tokens, max_size=4).map(tuple))


@given(data=st.data(), seed=st.integers(0, 10_000), num_rows=st.integers(1, 4))
def test_matches_the_oracle(data: st.DataObject, seed: int, num_rows: int) -> None:
    params = [data.draw(sampling_params) for _ in range(num_rows)]
    rows = [data.draw(histories) for _ in range(num_rows)]
    # Multiples of 1/4 make ties; float64 keeps a filter's bound from being decided by rounding.
    logits = torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(8).round().div(4)
    before = logits.clone()
    result = process_logits(logits, params, rows).softmax(-1)
    expected = torch.tensor([oracle(row.tolist(), p, h) for row, p, h in zip(logits, params, rows, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        (SamplingParams(temperature=0.6), hf.TemperatureLogitsWarper(0.6)),
        (SamplingParams(top_k=40), hf.TopKLogitsWarper(40)),
        (SamplingParams(top_p=0.83), hf.TopPLogitsWarper(0.83)),
        (SamplingParams(min_p=0.03), hf.MinPLogitsWarper(0.03)),
        (SamplingParams(repetition_penalty=1.3), hf.RepetitionPenaltyLogitsProcessor(1.3)),
    ],
)
def test_agrees_with_transformers(params: SamplingParams, warper: Any) -> None:
    logits = torch.randn(6, 5003, generator=torch.Generator().manual_seed(5)) * 3
    context = torch.randint(0, 5003, (6, 200), generator=torch.Generator().manual_seed(6))
    rows = [history(row[:120].tolist(), row[120:].tolist()) for row in context]
    torch.testing.assert_close(process_logits(logits, [params] * 6, rows), warper(context, logits.clone()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("vocab_size", [50, 257, 49_152])
@pytest.mark.parametrize(
    "kwargs", [{"top_p": 0.9}, {"top_p": 0.03}, {"top_k": 20}, {"min_p": 0.1}, {"min_p": 1e-4, "top_k": 30, "top_p": 0.7}]
)
def test_row_and_batched_truncation_agree(vocab_size: int, kwargs: dict[str, Any]) -> None:
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2
    logits[1] = logits[1].round()  # many ties
    logits[2, : vocab_size // 2] = -math.inf
    by_row, batched = truncate_(logits.clone(), **kwargs), truncate_batched_(logits.clone(), **kwargs)
    assert torch.equal(by_row, batched)
    assert torch.equal(by_row[by_row.isfinite()], logits[by_row.isfinite()])
    assert bool((by_row.isfinite().sum(-1) >= 1).all())


def test_top_p_keeps_the_smallest_sufficient_set_and_the_lowest_ids_on_ties() -> None:
    logits = torch.zeros(2, 10)
    logits[1, 4] = 3.0
    for truncated in (truncate_(logits.clone(), top_p=0.55), truncate_batched_(logits.clone(), top_p=0.55)):
        assert truncated[0].isfinite().nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]  # .5 < .55 <= .6
        assert truncated[1].isfinite().nonzero().flatten().tolist() == [4]  # e^3 / (e^3 + 9) = .69


def test_history_is_the_rows_own_path() -> None:
    """Two nodes of one tree share prompt and output and differ in their path only; neither sees the other's tokens."""
    prompt, output = [1, 2], [3]
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5)
    rows = [
        RowHistory(prompt_token_ids=prompt, output_token_ids=output, path_token_ids=path)  # the very same prompt and output objects
        for path in ((), (4,), (3, 5), (3, 3))
    ]
    result = process_logits(torch.full((4, 8), 2.0), [params] * 4, rows)
    twice, once, prompt_only, never = 1 - 1.0, 1 - 0.5, 1.0, 2.0
    thrice = 1 - 1.5
    assert result.tolist() == [
        [never, prompt_only, prompt_only, once, never, never, never, never],
        [never, prompt_only, prompt_only, once, once, never, never, never],
        [never, prompt_only, prompt_only, twice, never, once, never, never],
        [never, prompt_only, prompt_only, thrice, never, never, never, never],
    ]


def test_penalties_do_not_depend_on_how_output_and_path_are_split() -> None:
    """Penalties counted twice, or not for accepted tokens: a block of 8 gives what one token at a time gives."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    sequence = [7, 7, 9, 7, 1, 9, 2, 7]
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2)
    whole = process_logits(logits, [params], [history([7, 3], sequence)])
    for split in range(len(sequence)):
        assert torch.equal(process_logits(logits, [params], [history([7, 3], sequence[:split], tuple(sequence[split:]))]), whole)
    assert process_logits(logits, [params], [history([7, 3], sequence[:-1])])[0, 7] != whole[0, 7]


def test_user_processors_see_prompt_output_and_path_and_run_in_order() -> None:
    seen: list[list[int]] = []

    def record(tokens: Tensor, row: Tensor) -> Tensor:
        seen.append(tokens.tolist())
        return row + 1

    def double(tokens: Tensor, row: Tensor) -> Tensor:
        return row * 2

    params = SamplingParams(logits_processors=(record, double))
    logits = torch.zeros(2, 4)
    result = process_logits(logits, [params] * 2, [history([1], [2], (3,)), history([0], [])])
    assert seen == [[1, 2, 3], [0]]
    assert torch.equal(result, torch.full((2, 4), 2.0))
    assert torch.equal(logits, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="returned shape"):
        process_logits(logits, [SamplingParams(logits_processors=(lambda tokens, row: row[:2],))] * 2, [history()] * 2)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=0.3, top_p=0.9),
        SamplingParams(top_k=5, repetition_penalty=1.1),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.3),
    ]
    logits = torch.randn(6, 4999, generator=torch.Generator().manual_seed(1))
    rows = [history([1, 2], [3, row]) for row in range(6)]
    together = process_logits(logits, params, rows)
    for row in range(6):
        assert torch.equal(process_logits(logits[row : row + 1], params[row : row + 1], rows[row : row + 1])[0], together[row])
    pairs = process_logits(logits[[5, 1]], [params[5], params[1]], [rows[5], rows[1]])
    assert torch.equal(pairs, together[[5, 1]])


def test_equal_but_distinct_params_are_one_group_and_survive_pickling() -> None:
    one, other = (SamplingParams(top_p=0.5, logit_bias={3: 1.0, 1: 2.0}) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(2))
    assert torch.equal(process_logits(logits, [one, other]), process_logits(logits, [one, one]))


def test_rows_that_ask_for_nothing_cost_nothing() -> None:
    logits = torch.randn(3, V)
    assert process_logits(logits, [SamplingParams()] * 3) is logits


def test_greedy_is_a_point_mass_at_the_first_maximum() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert process_logits(logits, [SamplingParams(temperature=0)]).tolist() == [[-math.inf, 0.0, -math.inf, -math.inf]]
    assert sample(log_target(logits, [SamplingParams(temperature=0)]), torch.tensor([[9.0, -3.0, 9.0, 9.0]])).tolist() == [1]


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}, {"repetition_penalty": 1.1}])
@pytest.mark.parametrize("bad", [[0.0, math.nan, 1.0, 2.0], [-math.inf] * 4, [0.0, math.inf, 1.0, 0.0]])
def test_bad_rows_stay_bad(kwargs: dict[str, Any], bad: list[float]) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], bad])
    assert bad_rows(logits).tolist() == [False, True]
    processed = process_logits(logits, [SamplingParams(**kwargs)] * 2, [history([1], [2])] * 2)
    assert bad_rows(processed).tolist() == [False, True]
    batched = truncate_batched_(logits.clone(), top_k=2, top_p=0.9, min_p=0.1)
    assert bad_rows(batched).tolist() == [False, True]


def test_masks_and_bias() -> None:
    params = SamplingParams(allowed_token_ids=(0, 1, 2), banned_token_ids=(1,), logit_bias={0: 2.0, 3: 50.0})
    assert process_logits(torch.ones(1, 5), [params]).tolist() == [[3.0, -math.inf, 1.0, -math.inf, -math.inf]]


def test_sampling_follows_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    noise = gumbel_noise([11] * 8_000, list(range(8_000)), 5)
    counts = torch.bincount(sample(probs.log().expand(8_000, 5), noise), minlength=5)
    expected = probs[:4] * 8_000
    assert counts[4] == 0
    assert float(((counts[:4] - expected) ** 2 / expected).sum()) < 21.1  # chi-square with 3 degrees of freedom, p > 1e-4


def test_sample_takes_the_lowest_id_on_ties() -> None:
    assert sample(torch.tensor([[0.0, 1.0, 1.0]]), torch.zeros(1, 3)).tolist() == [1]


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": 1.0}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"logit_bias": {3: -math.inf}}, r"logit_bias\[3\]"),
        ({"logit_bias": {-3: 1.0}}, "token ids"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (1, 2), "banned_token_ids": (2, 1)}, "banned_token_ids"),
    ],
)
def test_bad_parameters_are_refused_by_name(kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SamplingParams(**kwargs)


def test_bad_calls_are_refused() -> None:
    logits = torch.zeros(1, 4)
    penalised = SamplingParams(repetition_penalty=1.1)
    with pytest.raises(ValueError, match="2 sampling parameters"):
        process_logits(logits, [SamplingParams()] * 2)
    with pytest.raises(ValueError, match="2 histories"):
        process_logits(logits, [SamplingParams()], [history()] * 2)
    with pytest.raises(ValueError, match="need the histories"):
        process_logits(logits, [penalised])
    with pytest.raises(ValueError, match="outside the vocabulary of 4"):
        process_logits(logits, [penalised], [history([1, 4])])
    with pytest.raises(ValueError, match="outside the vocabulary of 4"):
        process_logits(logits, [penalised], [history([1], [2], (-1,))])
    with pytest.raises(ValueError, match="banned_token_ids names token 9"):
        process_logits(logits, [SamplingParams(banned_token_ids=(9,))])
    with pytest.raises(ValueError, match="bfloat16"):
        process_logits(logits.bfloat16(), [SamplingParams()])


def test_parameters_are_copied() -> None:
    bias, banned = {1: 2.0}, [3]
    params = SamplingParams(logit_bias=bias, banned_token_ids=banned)  # type: ignore[arg-type]
    bias[1] = 7.0
    banned.append(4)
    assert params.logit_bias == {1: 2.0}
    assert params.banned_token_ids == (3,)


@pytest.mark.parametrize(
    "kwargs", [{"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}, {"logit_bias": {1: 1.0}}, {"presence_penalty": 1.0}, {"temperature": 0}]
)
def test_more_than_a_temperature_is_not_plain(kwargs: dict[str, Any]) -> None:
    assert not is_plain(SamplingParams(**kwargs))
    assert is_plain(SamplingParams(temperature=0.3))


def test_needs_history() -> None:
    assert needs_history(SamplingParams(repetition_penalty=1.1))
    assert needs_history(SamplingParams(presence_penalty=0.1))
    assert needs_history(SamplingParams(frequency_penalty=0.1))
    assert needs_history(SamplingParams(logits_processors=(lambda tokens, row: row,)))
    assert not needs_history(SamplingParams(top_p=0.5, temperature=0))

"""Counter-based noise: the bits are Philox4x64-10, the law is right, streams are independent, rows know no neighbours."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rollout_spec import noise
from rollout_spec.noise import Stream, gumbel_noise, uniforms, vocab_bits

MASK = 2**64 - 1
MIN_P_VALUE = 1e-4  # every test below draws fixed bits, so it passes always or never


def philox_reference(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 in Python integers, from section 4.3 of Salmon et al. 2011."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (second >> 64) ^ c1 ^ k0, second & MASK, (first >> 64) ^ c3 ^ k1, first & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return [c0, c1, c2, c3]


LITERAL_GUMBELS = [
    [-0.17666764557361603, -0.8373386263847351, 1.982664942741394],
    [0.8512203693389893, -0.5997974276542664, 0.463750422000885],
]
LITERAL_UNIFORMS = [[0.47131543477349913, 0.47835592657462433], [0.4405299922895869, 0.43614990974091117]]

# Random123's kat_vectors for philox4x64-10: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]),
    ((MASK,) * 4, (MASK,) * 2, [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6],
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_reference_gives_the_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], answer: list[int]) -> None:
    assert philox_reference(counter, key) == answer


seeds = st.one_of(st.integers(-(2**70), 2**70), st.sampled_from([0, -1, MASK]))
positions = st.one_of(st.integers(0, 5000), st.sampled_from([0, 1, MASK]))


@given(seed=seeds, position=positions, stream=st.sampled_from(Stream), num=st.integers(1, 70))
def test_bits_are_philox_of_seed_stream_position_and_block(seed: int, position: int, stream: Stream, num: int) -> None:
    blocks = [philox_reference((block, position, 0, 0), (seed & MASK, int(stream))) for block in range((num + 3) // 4)]
    words = list(itertools.chain(*blocks))[:num]
    few = uniforms([seed], [position], stream, num)
    many = uniforms([seed] * noise._MIN_VECTORISED_ROWS, [position] * noise._MIN_VECTORISED_ROWS, stream, num)
    assert few[0].tolist() == [(word >> 11) * 2.0**-53 for word in words]
    assert torch.equal(many, few.expand_as(many))
    halves = list(itertools.chain(*((word & 0xFFFFFFFF, word >> 32) for word in words)))
    assert vocab_bits(seed, stream, position, 2 * num - 1).tolist() == halves[: 2 * num - 1]


def test_literals() -> None:
    """Saved rollouts must stay reproducible: these numbers may never change."""
    torch.testing.assert_close(
        gumbel_noise([7, -3], [0, 41], 3),
        torch.tensor(LITERAL_GUMBELS),
        rtol=1e-6,  # logarithms differ by an ulp or two between math libraries
        atol=1e-6,
    )
    assert uniforms([7, -3], [0, 41], Stream.ACCEPT, 2).tolist() == LITERAL_UNIFORMS


def test_gumbel_is_the_formula_of_the_bits() -> None:
    bits = vocab_bits(5, Stream.TARGET, 9, 1001).astype(np.float64)
    exact = -np.log(-np.log1p(-np.minimum((bits + 0.5) / 2**32, 1 - 2.0**-24)))
    np.testing.assert_allclose(gumbel_noise([5], [9], 1001)[0].numpy(), exact, atol=2e-6)


def test_gumbel_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits set would round u to 1 and G to -inf: a point mass could then lose to a token of probability 0."""
    monkeypatch.setattr(noise._RowGenerator, "words", lambda self, seed, position, num: np.array([0, MASK], dtype=np.uint64))
    values = gumbel_noise([0], [0], 4)[0]
    assert bool(values.isfinite().all())
    np.testing.assert_allclose(values.numpy(), [33 * math.log(2)] * 2 + [-math.log(24 * math.log(2))] * 2, rtol=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 3, 61, 257, 4097, 49_152])
def test_a_row_does_not_depend_on_its_neighbours(vocab_size: int) -> None:
    row_seeds, row_positions = [3, 1, -7, 3, 2**63], [5, 0, 12, 6, 99]
    together = gumbel_noise(row_seeds, row_positions, vocab_size)
    for row in range(5):
        assert torch.equal(gumbel_noise([row_seeds[row]], [row_positions[row]], vocab_size)[0], together[row])
    reversed_rows = gumbel_noise(row_seeds[::-1], row_positions[::-1], vocab_size)
    assert torch.equal(reversed_rows.flip(0), together)


def test_a_smaller_vocabulary_or_count_is_a_prefix() -> None:
    assert torch.equal(gumbel_noise([4], [2], 100), gumbel_noise([4], [2], 1000)[:, :100])
    assert torch.equal(uniforms([4], [2], Stream.ACCEPT, 3), uniforms([4], [2], Stream.ACCEPT, 50)[:, :3])


@pytest.mark.parametrize("stream", Stream)
def test_gumbel_law(stream: Stream) -> None:
    values = gumbel_noise(list(range(20)), list(range(20)), 10_000, stream).flatten().double().numpy()
    assert stats.kstest(values, stats.gumbel_r.cdf).pvalue > MIN_P_VALUE
    num, variance = values.size, np.pi**2 / 6
    assert abs(values.mean() - np.euler_gamma) < 4 * (variance / num) ** 0.5
    assert abs(values.var() - variance) < 4 * variance * (4.4 / num) ** 0.5  # kurtosis 5.4: var(s^2) = sigma^4 (5.4 - 1) / n


def test_uniform_law() -> None:
    values = uniforms([9] * 5_000, list(range(5_000)), Stream.ACCEPT, 8).flatten().numpy()
    assert stats.kstest(values, stats.uniform.cdf).pvalue > MIN_P_VALUE
    assert values.min() >= 0
    assert values.max() < 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, Stream.TARGET, 7), (1, Stream.ACCEPT, 7)),
        ((1, Stream.TARGET, 7), (1, Stream.RECOVER, 7)),
        ((1, Stream.TARGET, 7), (1, Stream.DRAFT, 7)),
        ((1, Stream.RECOVER, 7), (1, Stream.DRAFT, 7)),
        ((1, Stream.TARGET, 7), (2, Stream.TARGET, 7)),
        ((1, Stream.TARGET, 7), (-1, Stream.TARGET, 7)),
        ((1, Stream.TARGET, 7), (1, Stream.TARGET, 8)),
        ((1, Stream.TARGET, 7), (7, Stream.TARGET, 1)),
    ],
)
def test_streams_seeds_and_positions_are_independent(one: tuple[int, Stream, int], other: tuple[int, Stream, int]) -> None:
    """Chi-square on the joint distribution of 8 x 8 cells, word by word and shifted by one block of words."""
    size = 60_000
    first, second = (vocab_bits(seed, stream, position, size) >> 29 for seed, stream, position in (one, other))
    for shift in (0, 8):
        table = np.bincount(first[: size - shift].astype(np.int64) * 8 + second[shift:], minlength=64)
        assert stats.chisquare(table).pvalue > MIN_P_VALUE


def test_words_of_one_row_are_independent_of_each_other() -> None:
    bits = vocab_bits(1, Stream.TARGET, 0, 60_000) >> 29
    for lag in (1, 2, 8):
        table = np.bincount(bits[:-lag].astype(np.int64) * 8 + bits[lag:], minlength=64)
        assert stats.chisquare(table).pvalue > MIN_P_VALUE


def test_no_rows() -> None:
    assert gumbel_noise([], [], 5).shape == (0, 5)
    assert uniforms([], [], Stream.ACCEPT, 3).shape == (0, 3)


@pytest.mark.parametrize("position", [-1, 2**64])
def test_positions_out_of_range_are_refused(position: int) -> None:
    with pytest.raises(ValueError, match="positions"):
        gumbel_noise([1], [position], 4)
    with pytest.raises(ValueError, match="positions"):
        uniforms([1], [position], Stream.ACCEPT)


def test_mismatching_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        gumbel_noise([1, 2], [3], 4)
    with pytest.raises(ValueError, match="2 seeds but 1 positions"):
        uniforms([1, 2], [3], Stream.ACCEPT)

"""Drawing tokens: the inverse CDF at its edges, the Gumbel race, and the noise of a round."""

from __future__ import annotations

import pytest
import torch

from rollout_spec.noise import Stream, gumbel_noise, uniforms
from rollout_spec.verify import CounterNoise
from rollout_spec.verify.categorical import gumbel_argmax, inverse_cdf, row_slices

LARGEST = 1 - 2.0**-53


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 5000, 49152, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_cdf_is_the_naive_one(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(6, vocab_size, generator=generator, dtype=dtype) ** 4
    weights[torch.rand(6, vocab_size, generator=generator) < 0.3] = 0.0
    weights[:, 0] += 1e-3
    uniform = torch.rand(6, generator=generator, dtype=torch.float64)
    cdf = weights.double().cumsum(-1)
    expected = (cdf <= (uniform * cdf[:, -1])[:, None]).sum(-1)
    assert torch.equal(inverse_cdf(weights, uniform), expected)


@pytest.mark.parametrize("where", [0, 255, 256, 49151])
@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST])
def test_a_point_mass_is_always_found(where: int, uniform: float) -> None:
    weights = torch.zeros(1, 49152)
    weights[0, where] = 1e-30
    assert inverse_cdf(weights, torch.tensor([uniform], dtype=torch.float64)).tolist() == [where]


def test_edges_never_give_a_token_without_weight() -> None:
    """Zeros at the front, at block seams and at the end, with normalisers that float32 rounds."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(200, 1000, generator=generator).mul(5).softmax(-1)
    weights[:, :300] = weights[:, 500:520] = weights[:, 700:] = 0.0
    for uniform in (0.0, 2.0**-53, 1e-9, 0.5, 1 - 1e-9, LARGEST):
        token = inverse_cdf(weights, torch.full((200,), uniform, dtype=torch.float64))
        assert bool((weights.gather(1, token[:, None]) > 0).all())
    first, last = (inverse_cdf(weights, torch.full((200,), u, dtype=torch.float64)) for u in (0.0, LARGEST))
    assert set(first.tolist()) == {300}
    assert bool((last >= 650).all())


def test_rows_without_mass_use_the_fallback_or_are_refused() -> None:
    weights = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    half = torch.full((2,), 0.5, dtype=torch.float64)
    assert inverse_cdf(weights, half, fallback=torch.tensor([[1.0, 0.0], [1.0, 0.0]])).tolist() == [0, 1]
    with pytest.raises(ValueError, match="no distribution"):
        inverse_cdf(weights, half)
    with pytest.raises(ValueError, match="no distribution"):
        inverse_cdf(torch.tensor([[torch.nan, 1.0]]), half[:1], fallback=torch.ones(1, 2))


def test_gumbel_race_never_gives_an_impossible_token() -> None:
    log_probs = torch.tensor([[0.0, -torch.inf, -torch.inf], [-torch.inf, -3.0, -0.05]])
    lost = torch.full((2, 3), -torch.inf)  # finite-precision noise can lose every race
    lost[:, 0] = torch.tensor([-torch.inf, 5.0])
    assert gumbel_argmax(log_probs, lost).tolist() == [0, 2]


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(0, 10), (1, 10), (1000, 49152), (3, 1 << 22)])
def test_slices_cover_all_rows_in_order(num_rows: int, vocab_size: int) -> None:
    parts = list(row_slices(torch.zeros(num_rows), vocab_size))
    assert [row for part in parts for row in range(num_rows)[part]] == list(range(num_rows))
    assert all(part.stop - part.start == 1 or (part.stop - part.start) * vocab_size <= 1 << 19 for part in parts)


def test_counter_noise_is_keyed_by_seed_and_place() -> None:
    seeds, positions, vocab_size = [5, 6, 5], [10, 10, 11], 33
    noise = CounterNoise(seeds, positions)
    requests, depths = torch.tensor([2, 0, 1]), torch.tensor([0, 1, 3])
    at = [11, 11, 13]
    level = torch.zeros(3, vocab_size)
    wanted = gumbel_noise([5, 5, 6], at, vocab_size, Stream.TARGET).argmax(-1)
    assert torch.equal(noise.gumbel_argmax(requests, depths, level), wanted)
    torch.testing.assert_close(noise.recover(requests, depths), uniforms([5, 5, 6], at, Stream.RECOVER)[:, 0], rtol=0, atol=0)


def test_acceptance_uniforms_are_never_used_twice() -> None:
    """All (depth, trial) of all rounds of a request are different numbers, in particular those of one token seen by two rounds."""
    rounds = [CounterNoise([7], [start]) for start in range(5)]
    seen = [
        float(noise.accept(torch.tensor([0]), torch.tensor([depth]), trial)) for noise in rounds for depth in range(6) for trial in range(5)
    ]
    assert len(set(seen)) == len(seen) == 150


def test_acceptance_uniforms_do_not_depend_on_the_order_of_asking() -> None:
    one, other = CounterNoise([7, 8], [3, 4]), CounterNoise([7, 8], [3, 4])
    both = torch.arange(2)
    early = one.accept(both, torch.zeros(2, dtype=torch.int64), 1)
    other.accept(both, torch.full((2,), 30), 9)  # grows the table
    assert torch.equal(early, other.accept(both, torch.zeros(2, dtype=torch.int64), 1))

"""Whole-vocabulary operations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from truncated_rows import TRUNCATED

from rollout_spec.noise import Stream, gumbel_noise, uniforms
from rollout_spec.sampling import SamplingParams, process_logits, truncations
from rollout_spec_kernels.cpu import CpuOps


def _normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 33, 4096, 49152, 50257])
def test_log_softmax_and_entropy(ops: CpuOps, dtype: torch.dtype, vocab_size: int) -> None:
    logits = 5 * _normal(4, vocab_size, seed=1, dtype=dtype)
    inverse = torch.tensor([1.0, 0.5, 3.0, 1.7])
    logits[1, ::3] = -math.inf
    logits[1, :4096] = -math.inf  # a whole piece of the reduction
    logits[1, -1] = 2.0
    exact = torch.log_softmax(logits.double() * inverse.double()[:, None], -1)
    plain = torch.log_softmax(logits.float() * inverse[:, None], -1)
    got = ops.log_softmax_stats(logits, inverse)
    finite = exact.isfinite()
    assert torch.equal(got.log_probs.isfinite(), finite)
    error, plain_error = ((t.double() - exact)[finite].abs().max() for t in (got.log_probs, plain))
    assert float(error) <= 2 * float(plain_error) + 1e-6  # the last term: one float32 rounding of a log-probability of -10
    entropies = torch.special.entr(exact.exp()).sum(-1)
    assert torch.allclose(got.entropies.double(), entropies, rtol=1e-6, atol=1e-6)


def test_point_mass_nan_and_no_support(ops: CpuOps) -> None:
    logits = torch.full((4, 5000), -math.inf)
    logits[0, 17] = 3.0
    logits[1], logits[2, 4999] = 0.0, math.nan
    got = ops.log_softmax_stats(logits, torch.ones(4))
    assert got.log_probs[0, 17] == 0
    assert got.entropies[0] == 0
    assert torch.allclose(got.entropies[1], torch.tensor(math.log(5000)))
    assert got.log_probs[2:].isnan().all()
    assert got.entropies[2:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 33, 1000, 49157])
@pytest.mark.parametrize("kind", ["random", "ties", "flat", "masked"])
def test_truncation_keeps_what_the_processors_keep(ops: CpuOps, dtype: torch.dtype, vocab_size: int, kind: str) -> None:
    """bfloat16 logits have many ties; "flat" rows have nothing else, so that only the order of ids decides."""
    logits = 3 * _normal(len(TRUNCATED), vocab_size, seed=vocab_size, dtype=dtype)
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros_like(logits)
    elif kind == "masked":
        logits[:, 1::2] = -math.inf
    got = ops.truncated_log_softmax(logits, truncations(TRUNCATED))
    processed = process_logits(logits.float(), TRUNCATED)
    assert torch.equal(got.log_probs > -math.inf, processed > -math.inf)
    exact = processed.double().log_softmax(-1)
    finite = exact.isfinite()
    assert float((got.log_probs.double() - exact)[finite].abs().max()) < 4e-6  # float32 roundings of values of up to 15
    torch.testing.assert_close(got.entropies.double(), torch.special.entr(exact.exp()).sum(-1), rtol=1e-6, atol=2e-6)


def test_truncated_rows_that_are_no_distribution(ops: CpuOps) -> None:
    logits = _normal(4, 200, seed=1)
    logits[0, 7], logits[1, 199], logits[2] = math.nan, math.inf, -math.inf
    got = ops.truncated_log_softmax(logits, truncations([SamplingParams(top_k=3, top_p=0.9)] * 4))
    assert got.entropies.isnan().tolist() == [True, True, True, False]
    assert got.log_probs[:3].isnan().all()
    alone = ops.truncated_log_softmax(logits[3:], truncations([SamplingParams(top_k=3, top_p=0.9)]))
    assert torch.equal(alone.log_probs[0], got.log_probs[3])


def test_rows_and_threads_do_not_matter(ops: CpuOps, restore_threads: None) -> None:
    logits, inverse = _normal(6, 20_000, seed=1), torch.linspace(0.5, 2, 6)
    torch.set_num_threads(2)
    together = ops.log_softmax_stats(logits, inverse)
    torch.set_num_threads(1)
    for i in range(6):
        alone = ops.log_softmax_stats(logits[i : i + 1], inverse[i : i + 1])
        assert torch.equal(alone.log_probs[0], together.log_probs[i])
        assert torch.equal(alone.entropies[0], together.entropies[i])


@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("vocab_size", [1, 15, 4097, 49152])
def test_gumbel_noise_comes_from_the_same_bits(ops: CpuOps, stream: Stream, vocab_size: int) -> None:
    seeds, positions = [0, 7, 2**63 + 5, -3], [0, 1, 2**40, 123]
    wanted, got = gumbel_noise(seeds, positions, vocab_size, stream), ops.gumbel_noise(seeds, positions, vocab_size, stream)
    # E = exp(-G) within 2 ulp, and G = -log(E) within 2 ulp of it: an error of 2^-22 in G, plus its own rounding. Another word of noise
    # would differ by about 1.
    assert torch.equal(got.isinf(), wanted.isinf())
    finite = wanted.isfinite()
    assert torch.all((got - wanted)[finite].abs() <= 2**-22 * wanted[finite].abs().clamp(min=1))


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 4099])
def test_noise_of_chosen_tokens_is_that_of_the_whole_vocabulary(ops: CpuOps, num_tokens: int) -> None:
    token_ids = torch.randperm(9_000, generator=torch.Generator().manual_seed(1))[:num_tokens]
    for ids in (token_ids, token_ids.sort().values):
        whole, core = ops.gumbel_noise([3, -4], [7, 2**40], 9_000), gumbel_noise([3, -4], [7, 2**40], 9_000)
        assert torch.equal(ops.gumbel_noise([3, -4], [7, 2**40], ids), whole[:, ids])
        assert torch.equal(gumbel_noise([3, -4], [7, 2**40], ids), core[:, ids])


def test_gumbel_noise_needs_a_position_for_each_seed(ops: CpuOps) -> None:
    with pytest.raises(ValueError, match="one length; got 2 and 1"):
        ops.gumbel_noise([1, 2], [0], 10)


@pytest.mark.parametrize("vocab_size", [1, 15, 64, 257, 1000, 49152])
def test_the_race_is_won_by_the_largest_sum_of_its_own_noise(ops: CpuOps, vocab_size: int) -> None:
    log_probs = torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(1)).mul_(3).log_softmax(-1)
    log_probs[2, : vocab_size // 2] = -torch.inf
    seeds, positions = [1, -5, 2**63, 4, 5, 6, 7], [0, 1, 2**40, 3, 4, 5, 6]
    wanted = (log_probs + ops.gumbel_noise(seeds, positions, vocab_size)).argmax(-1)
    assert torch.equal(ops.gumbel_argmax(log_probs, seeds, positions), wanted)
    point = torch.full((1, vocab_size), -torch.inf)
    point[0, vocab_size - 1] = 0.0
    assert ops.gumbel_argmax(point, [3], [9]).tolist() == [vocab_size - 1]


@pytest.mark.parametrize("vocab_size", [1, 15, 256, 257, 1000, 49152])
def test_inverse_cdf_agrees_with_a_float64_sum(ops: CpuOps, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(2)
    log_probs = torch.randn(200, vocab_size, generator=generator).mul_(3).log_softmax(-1)
    log_probs[:50, vocab_size // 3 : vocab_size // 2] = -torch.inf
    uniforms = torch.rand(200, generator=generator, dtype=torch.float64)
    tokens = ops.inverse_cdf(log_probs, uniforms)
    cumulative = log_probs.double().exp().cumsum(-1)
    level = uniforms * cumulative[:, -1]
    # float32 exponentials and block sums: the level may fall on the other side of an edge only within their rounding.
    slack = 1e-6 * cumulative[:, -1]
    above = cumulative.gather(1, tokens[:, None])[:, 0]
    below = above - log_probs.double().exp().gather(1, tokens[:, None])[:, 0]
    assert bool((below <= level + slack).all())
    assert bool((above >= level - slack).all())
    assert bool((log_probs.gather(1, tokens[:, None]) > -torch.inf).all())


def test_inverse_cdf_never_runs_off_either_end(ops: CpuOps) -> None:
    log_probs = torch.full((4, 700), -torch.inf)
    log_probs[:, 300:302] = torch.tensor([0.5, 0.5]).log()
    uniforms = torch.tensor([0.0, 0.49, 0.51, 1 - 2.0**-53], dtype=torch.float64)
    assert ops.inverse_cdf(log_probs, uniforms).tolist() == [300, 300, 301, 301]
    for bad in (torch.full((1, 9), -torch.inf), torch.full((1, 9), torch.nan)):
        with pytest.raises(ValueError, match="row 0 has no mass"):
            ops.inverse_cdf(bad, torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize(("stream", "num"), [(Stream.ACCEPT, 1), (Stream.RECOVER, 3), (Stream.DRAFT, 70)])
def test_uniforms_are_the_cores_bit_for_bit(ops: CpuOps, stream: Stream, num: int) -> None:
    seeds, positions = [0, -1, 2**63 + 5, 7], [0, 5, 2**41, 9]
    assert torch.equal(ops.uniforms(seeds, positions, stream, num), uniforms(seeds, positions, stream, num))

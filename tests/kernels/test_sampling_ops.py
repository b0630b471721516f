"""Whole-vocabulary operations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rollout_spec.noise import Stream, gumbel_noise
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


def test_gumbel_noise_needs_a_position_for_each_seed(ops: CpuOps) -> None:
    with pytest.raises(ValueError, match="one length; got 2 and 1"):
        ops.gumbel_noise([1, 2], [0], 10)

"""Min-p, top-k and top-p in Triton: which tokens of a row of logits stay, against the readable form.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from torch import Tensor
from truncated_rows import TRUNCATED

from rollout_spec.sampling import SamplingParams, process_logits, truncations
from rollout_spec.truncation import Truncations

pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollout-spec[triton]'")

from rollout_spec_kernels.triton.rows import RowStats, row_stats, truncates

# Triton's interpreter is numpy, which warns of the NaN and infinities that these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _stats(logits: Tensor, params: list[SamplingParams]) -> RowStats:
    given = truncations(params)
    moved = Truncations(**{field.name: getattr(given, field.name).to(DEVICE) for field in fields(given)})
    return row_stats(logits.to(DEVICE), moved)


def _kept(stats: RowStats, logits: Tensor) -> Tensor:
    """[R, V] what the support says of the logits."""
    assert stats.support is not None
    support = stats.support.cpu()
    least, tied = (support[:, i].contiguous().view(torch.float32)[:, None] for i in range(2))
    x, ids = logits.cpu().float(), torch.arange(logits.shape[1])
    return (x > tied) | ((x >= least) & (ids <= support[:, 2:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 33, 1000, 2500])
@pytest.mark.parametrize("kind", ["random", "ties", "flat", "masked"])
def test_the_support_is_the_readable_forms(dtype: torch.dtype, vocab_size: int, kind: str) -> None:
    """bfloat16 logits have many ties; "flat" rows have nothing else, so that only the order of ids decides."""
    logits = (3 * torch.randn(len(TRUNCATED), vocab_size, generator=torch.Generator().manual_seed(vocab_size))).to(dtype)
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros_like(logits)
    elif kind == "masked":
        logits[:, 1::2] = -math.inf
    stats = _stats(logits, TRUNCATED)
    processed = process_logits(logits.float(), TRUNCATED)
    assert torch.equal(_kept(stats, logits) & logits.isfinite(), processed.isfinite())
    exact = processed.double()
    torch.testing.assert_close(stats.log_normalisers.cpu().double(), exact.logsumexp(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(stats.raw_log_normalisers.cpu().double(), logits.double().logsumexp(-1), rtol=1e-6, atol=1e-6)
    entropies = torch.special.entr(exact.softmax(-1)).sum(-1)
    torch.testing.assert_close(stats.entropies.cpu().double(), entropies, rtol=1e-5, atol=2e-6)


def test_what_the_temperature_makes_equal_is_tied() -> None:
    """Neighbours that share a quotient, and the two zeros: the readable form compares quotients."""
    neighbours = torch.tensor(1.9).view(torch.int32) + torch.arange(6)
    logits = torch.full((6, 40), -5.0)
    logits[:4, torch.tensor([31, 4, 17, 8, 25, 12])] = neighbours.to(torch.int32).view(torch.float32)
    logits[4:, torch.tensor([3, 9, 21, 22])] = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    params = [SamplingParams(temperature=1.7, top_k=k) for k in range(1, 5)] + [SamplingParams(top_k=1), SamplingParams(top_p=0.6)]
    kept = _kept(_stats(logits, params), logits)
    assert torch.equal(kept, process_logits(logits, params).isfinite())
    assert bool((kept[:4].sum(1) > torch.arange(1, 5)).any())  # where two that share a quotient stand at the edge
    assert kept[4].nonzero()[:, 0].tolist() == [3, 9, 21, 22]
    assert kept[5].nonzero()[:, 0].tolist() == [3, 9, 21]


def test_rows_that_are_no_distribution_keep_everything() -> None:
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(1))
    logits[0, 7], logits[1, 199], logits[2] = math.nan, math.inf, -math.inf
    params = SamplingParams(top_k=3, top_p=0.9, min_p=0.1)
    stats = _stats(logits, [params] * 4)
    assert stats.entropies.isnan().tolist() == [True, True, True, False]
    assert bool(_kept(stats, logits.nan_to_num(0.0))[:3].all())
    alone = _stats(logits[3:], [params])
    assert torch.equal(_kept(alone, logits[3:])[0], _kept(stats, logits)[3])
    assert torch.equal(alone.log_normalisers[0], stats.log_normalisers[3])


def test_temperature_alone_is_no_truncation() -> None:
    assert not truncates(truncations([SamplingParams(temperature=0.3), SamplingParams()]))
    for one in (SamplingParams(top_k=1), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)):
        assert truncates(truncations([SamplingParams(), one]))

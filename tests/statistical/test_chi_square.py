"""Proof 3, chi-square over joint prefixes of 3 tokens: 131 072 requests, several rounds each, production noise.

Triton's interpreter decides fewer (NUM_IN_INTERPRETER).

p > 1e-4 for each: a correct verifier would fail one such test in 10 000.
"""

from __future__ import annotations

import pytest
from exactness.backends import READABLE, TRITON, Backend
from exactness.cases import Case
from exactness.models import Drafter
from exactness.registry import CHI_SQUARE
from exactness.sampling import (
    FALSE_ALARM_RATE,
    NUM_IN_INTERPRETER,
    NUM_REQUESTS,
    chi_square,
    counter_noise,
    dense_gumbel_noise,
    sample_prefixes,
)

from rollout_spec.verify import Scheme, VerifyFn


@pytest.mark.parametrize(("backend", "scheme", "case"), CHI_SQUARE.parameters())
def test_joint_prefixes(verify: VerifyFn, backend: Backend, scheme: Scheme, case: Case) -> None:
    length = case.length
    draft, target = case.draft(2 * length), case.target(2 * length)
    # The readable Gumbel noise is made for rows as wide as a vocabulary, not for 400 000 rows of three tokens; tests/test_noise.py has
    # its law, and the seeded proof runs on it.
    noise = dense_gumbel_noise if scheme is Scheme.GUMBEL and backend is READABLE else counter_noise
    num_requests = NUM_IN_INTERPRETER[length] if backend is TRITON else NUM_REQUESTS
    codes = sample_prefixes(
        verify, scheme, lambda model: Drafter(model, case.widths, case.draw), draft, target, length, noise, num_requests
    )
    assert chi_square(codes, target.joint(length)) > FALSE_ALARM_RATE

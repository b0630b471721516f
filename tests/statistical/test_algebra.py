"""Proof 1, algebra: the identities that make each scheme exact, on the very functions it is made of, without a sample."""

from __future__ import annotations

import pytest
import torch
from exactness.backends import Backend
from exactness.models import random_model
from exactness.registry import ALGEBRA, SPLIT, STOP
from torch import Tensor

from rollout_spec.verify import Scheme
from rollout_spec.verify.categorical import gumbel_argmax, inverse_cdf
from rollout_spec.verify.ratio import normalised, overlap, residual, stop_mass

TOLERANCE = 1e-14
NUM_ROWS = 7**3


def _laws(seed: int, vocab_size: int = 7) -> Tensor:
    """[R, V] random laws, some with impossible tokens, some nearly point masses."""
    rows = random_model(vocab_size, 4, seed, zeros=True).tables[3].clone()
    rows[::3] = rows[::3] ** 8
    return rows / rows.sum(-1, keepdim=True)


def _split(scheme: Scheme) -> None:
    target_probs, draft_probs = _laws(1), _laws(2)
    masses = (
        torch.rand(NUM_ROWS, dtype=torch.float64)
        if scheme in (Scheme.BLOCK, Scheme.TRAVERSAL)
        else torch.ones(NUM_ROWS, dtype=torch.float64)
    )
    scaled = masses[:, None] * target_probs
    # A drafted v is accepted with probability min(1, w p(v) / q(v)), which makes q(v) of drafting it into min(w p(v), q(v)).
    shared = overlap(scaled, draft_probs, None)
    accept = torch.where(draft_probs > 0, (scaled / draft_probs).clamp_max(1.0), 0.0)
    torch.testing.assert_close(shared, draft_probs * accept, rtol=0, atol=TOLERANCE)
    left = residual(scaled, draft_probs, None)
    torch.testing.assert_close(shared + left, scaled, rtol=0, atol=TOLERANCE)
    mass = left.sum(-1)
    again = normalised(left, mass, target_probs)
    torch.testing.assert_close(again.sum(-1), torch.ones_like(mass), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(shared + mass[:, None] * again, scaled, rtol=0, atol=TOLERANCE)


def _stop(scheme: Scheme) -> None:
    target_probs, draft_probs = _laws(1), _laws(2)
    scale = torch.linspace(0, 1, NUM_ROWS, dtype=torch.float64)
    mass = residual(scale[:, None] * target_probs, draft_probs, None).sum(-1)
    stop = stop_mass(mass, scale)
    assert bool(((stop >= 0) & (stop <= 1)).all())
    torch.testing.assert_close(stop + (1 - stop) * (scale - mass), scale, rtol=0, atol=TOLERANCE)


def _intervals(scheme: Scheme) -> None:
    """The uniforms that draw v are those between its cumulative edges: seen by drawing on both sides of every edge."""
    law = _laws(3)
    edges = law.cumsum(-1)
    margin = 1e-12
    for token in range(law.shape[1]):
        wide = law[:, token] > 1e-9
        below, above = edges[wide, token] - law[wide, token], edges[wide, token]
        for uniform, wins in ((below + margin, True), (above - margin, True), (below - margin, False), (above + margin, False)):
            inside = (uniform >= 0) & (uniform < 1)
            drawn = inverse_cdf(law[wide][inside], uniform[inside])
            assert bool(((drawn == token) == wins).all())


def _races(scheme: Scheme) -> None:
    """With the others' best value t, v wins iff G_v > t - log p(v); given exponential races that has probability p(v).

    The others' arrival min E_u / p_u is exponential with rate 1 - p(v) and v's with rate p(v), so P(v first) is the integral over t of
    (1 - p) exp(-(1 - p) t) (1 - exp(-p t)) = p. The threshold is taken from the production argmax, the integral by quadrature.
    """
    law = torch.tensor([0.15, 0.25, 0.6], dtype=torch.float64)
    arrivals = torch.linspace(1e-4, 40, 200_001, dtype=torch.float64)
    for token in range(3):
        rest = torch.tensor([other for other in range(3) if other != token])
        # Others arrive at time t together: G_u = -log(t p_u), so that log p_u + G_u = -log t.
        gumbel = torch.empty(arrivals.numel(), 3, dtype=torch.float64)
        gumbel[:, rest] = -(arrivals[:, None] * law[rest]).log()
        for side, wins in ((1 - 1e-9, True), (1 + 1e-9, False)):
            gumbel[:, token] = -(arrivals * law[token] * side).log()
            assert bool(((gumbel_argmax(law.log().expand_as(gumbel), gumbel) == token) == wins).all())
        rate = 1 - float(law[token])
        density = rate * torch.exp(-rate * arrivals) * (1 - torch.exp(-float(law[token]) * arrivals))
        assert float(torch.trapezoid(density, arrivals)) == pytest.approx(float(law[token]), abs=1e-6)


IDENTITIES = {SPLIT: _split, STOP: _stop, "uniforms that draw v measure p(v)": _intervals, "races that v wins measure p(v)": _races}


@pytest.mark.parametrize(("backend", "scheme", "case"), ALGEBRA.parameters())
def test_identity(backend: Backend, scheme: Scheme, case: str) -> None:
    IDENTITIES[case](scheme)


def test_a_node_reached_with_mass_one_always_stops() -> None:
    masses = torch.tensor([0.0, 1e-300, 1e-17, 1e-9, 0.5], dtype=torch.float64)
    assert bool((stop_mass(masses, torch.ones(5, dtype=torch.float64)) == 1).all())

"""The implementations of verify that the proofs are run on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from exactness.blackbox import Guide
from rollout_spec.sampling import SamplingParams, truncations
from rollout_spec.tree import DraftTree
from rollout_spec.verdict import Verdict
from rollout_spec.verify import CounterNoise, DenseTarget, Scheme, TargetRows, VerifyFn, VerifyNoise, verify
from rollout_spec_kernels.cpu import CpuOps, unavailable_reason
from rollout_spec_kernels.verify import verify_fused


@dataclass(frozen=True)
class Backend:
    name: str
    verify: VerifyFn
    tolerance: float  # how far a measured law may be from the target's: what rounding leaves
    guide: Guide | None = None  # for a slow one's enumeration
    unavailable_reason: Callable[[], str | None] = lambda: None

    def __str__(self) -> str:
        return self.name


def _fused(tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict:
    """The C++ verifier on the same laws in float32, its own Gumbel noise included; it must not leave the answer to the readable one."""
    assert isinstance(target, DenseTarget)
    if tree.draft_probs is not None:
        tree = replace(tree, draft_probs=tree.draft_probs.float())
    if scheme is Scheme.GUMBEL:
        assert isinstance(noise, CounterNoise)
        noise = CounterNoise(noise.seeds, noise.positions, CpuOps())
    verdict = verify_fused(tree, DenseTarget(target.target_probs.float()), noise, scheme)
    assert verdict is not None
    return verdict


def _triton_unavailable() -> str | None:
    return None if importlib.util.find_spec("triton") is not None else "Triton is not installed: pip install 'rollout-spec[triton]'"


def _triton(tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict:
    """Triton's verifier from logits, which draws a CounterNoise itself and is handed any other."""
    from rollout_spec_kernels.triton.verify import verify_logits

    assert isinstance(target, DenseTarget)
    batch, num_rows, _ = target.target_probs.shape
    if tree.draft_probs is not None:
        tree = replace(tree, draft_probs=tree.draft_probs.float())
    rows, own = target.target_probs.unique(dim=0, return_inverse=True)  # requests that differ in their noise only share their rows
    with np.errstate(all="ignore"):  # the interpreter is numpy, which warns of a quotient 0 / 0 though a select drops it
        return verify_logits(tree, rows.float().log().flatten(0, 1), own * num_rows, truncations([SamplingParams()] * batch), noise, scheme)


# Bisection to 2**-48 leaves 4e-15 a step, and no case has more than a hundred steps.
READABLE = Backend("readable", verify, 1e-12)
# A float32 probability is rounded by 6e-8 of itself, its logarithm and exponential by as much; a planted bug shifts a law by 1e-4.
FUSED = Backend("fused", _fused, 1e-6, unavailable_reason=unavailable_reason)
# In Triton's interpreter, where there is no GPU, a verdict takes some 30 ms; a step that the guide shows is known to 2e-6.
TRITON = Backend("triton", _triton, 5e-6, Guide(verify), unavailable_reason=_triton_unavailable)
BACKENDS = (READABLE, FUSED, TRITON)

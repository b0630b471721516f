"""The implementations of verify that the proofs are run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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


# Bisection to 2**-48 leaves 4e-15 a step, and no case has more than a hundred steps.
READABLE = Backend("readable", verify, 1e-12)
# A float32 probability is rounded by 6e-8 of itself, its logarithm and exponential by as much; a planted bug shifts a law by 1e-4.
FUSED = Backend("fused", _fused, 1e-6, unavailable_reason)

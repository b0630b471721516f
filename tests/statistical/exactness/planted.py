"""Planted bugs: wrong verifiers, drafters and noise that every suite of proofs must catch.

Each wraps the verify function from outside, so the same bugs can be planted in any backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exactness.cases import with_target
from exactness.models import Drafter, TableModel
from rollout_spec.noise import Stream, uniforms
from rollout_spec.tree import DraftTree
from rollout_spec.verdict import Verdict
from rollout_spec.verify import CounterNoise, Scheme, TargetRows, VerifyFn, VerifyNoise
from rollout_spec.verify.categorical import inverse_cdf


@dataclass(frozen=True)
class _Wrapped:
    """Noise with one of its three sources replaced."""

    accept: Callable[[Tensor, Tensor, int], Tensor]
    recover: Callable[[Tensor, Tensor], Tensor]
    gumbel: Callable[[Tensor, Tensor], Tensor]


def lenient(verify: VerifyFn) -> VerifyFn:
    """Accepts as if every ratio were 5 % larger."""

    def buggy(tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict:
        easy = _Wrapped(lambda requests, depths, trial: noise.accept(requests, depths, trial) / 1.05, noise.recover, noise.gumbel_argmax)
        return verify(tree, target, easy, scheme)

    return buggy


def lenient_match(verify: VerifyFn) -> VerifyFn:
    """The exact-match form of lenience: a target that leans 5 % towards the first drafted token below the root."""

    def buggy(tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict:
        every = torch.arange(tree.batch_size)

        def lean(target_probs: Tensor) -> Tensor:
            leaning = target_probs.clone()
            leaning[every, 0, tree.token_ids[:, 0]] *= 1.05
            return leaning / leaning.sum(-1, keepdim=True)

        return with_target(verify, lean)(tree, target, noise, scheme)

    return buggy


def residual_from_target(verify: VerifyFn) -> VerifyFn:
    """Draws recovered tokens from the target instead of the residual."""

    def buggy(tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict:
        verdict = verify(tree, target, noise, scheme)
        wrong = (~verdict.is_bonus).nonzero()[:, 0]
        if wrong.numel():
            depths = verdict.num_accepted[wrong]
            nodes = torch.nn.functional.pad(verdict.path, (1, 0), value=-1)[wrong, depths]
            verdict.next_token_ids[wrong] = inverse_cdf(target.log_probs(wrong, nodes).exp(), noise.recover(wrong, depths))
        return verdict

    return buggy


def rounded_target(verify: VerifyFn) -> VerifyFn:
    """Verifies against target probabilities rounded to two decimals."""

    def rounded(target_probs: Tensor) -> Tensor:
        coarse = (target_probs * 100).round() / 100
        return coarse / coarse.sum(-1, keepdim=True)

    return with_target(verify, rounded)


class PruningDrafter(Drafter):
    """Drops a chain's token, and all behind it, when the drafter itself gave it less than a threshold."""

    def __init__(self, drafter: Drafter, threshold: float) -> None:
        super().__init__(drafter.model, (), drafter.draw)
        self.parents, self.threshold = drafter.parents, threshold

    def _tree(self, token_ids: Tensor, rows: list[Tensor]) -> DraftTree:
        tree = super()._tree(token_ids, rows)
        assert tree.draft_probs is not None
        sure = tree.draft_probs.gather(2, token_ids[:, :, None])[:, :, 0] >= self.threshold
        return DraftTree.chains(token_ids, sure.long().cumprod(1).sum(1), tree.draw, tree.draft_probs)


def pruning(make: Callable[[TableModel], Drafter], threshold: float = 0.25) -> Callable[[TableModel], Drafter]:
    return lambda model: PruningDrafter(make(model), threshold)


def shared_with_recovery(seeds: list[int], positions: list[int], vocab_size: int, draft_uniforms: Tensor) -> VerifyNoise:
    """Recovered tokens are drawn with the uniform that drew the root's first child."""
    noise = CounterNoise(seeds, positions)
    return _Wrapped(noise.accept, lambda requests, depths: draft_uniforms[requests, 0], noise.gumbel_argmax)


def shared_with_acceptance(seeds: list[int], positions: list[int], vocab_size: int, draft_uniforms: Tensor) -> VerifyNoise:
    """Acceptance is tested with the uniform that drew the root's first child."""
    noise = CounterNoise(seeds, positions)
    return _Wrapped(lambda requests, depths, trial: draft_uniforms[requests, 0], noise.recover, noise.gumbel_argmax)


def keyed_by_token(seeds: list[int], positions: list[int], vocab_size: int, draft_uniforms: Tensor) -> VerifyNoise:
    """Acceptance keyed by the absolute position of the token under test, so that rounds test the same uniforms again."""
    noise = CounterNoise(seeds, positions)

    def accept(requests: Tensor, depths: Tensor, trial: int) -> Tensor:
        at = [(seeds[row], positions[row] + depth) for row, depth in zip(requests.tolist(), depths.tolist(), strict=True)]
        return uniforms([seed for seed, _ in at], [position for _, position in at], Stream.ACCEPT, trial + 1)[:, trial]

    return _Wrapped(accept, noise.recover, noise.gumbel_argmax)

"""Verification of draft trees: six exact schemes, batched, pure, with target rows and noise passed in.

Shape legend: B requests, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from rollout_spec.tree import DraftTree
from rollout_spec.verdict import Verdict
from rollout_spec.verify.chain import block, rejection
from rollout_spec.verify.match import exact_match, gumbel
from rollout_spec.verify.randomness import CounterNoise, DenseNoise, VerifyNoise
from rollout_spec.verify.scheme import EXACT_ON, RATIO_SCHEMES, Scheme, check_pairing, default_scheme
from rollout_spec.verify.target import AllRows, DenseTarget, TargetRows, TokenScores
from rollout_spec.verify.trace import with_scores
from rollout_spec.verify.traversal import traversal
from rollout_spec.verify.walk import rejection_walk

VerifyFn = Callable[[DraftTree, TargetRows, VerifyNoise, Scheme], Verdict]  # what engines take, and what the proofs are about

SCHEMES: dict[Scheme, Callable[[DraftTree, TargetRows, VerifyNoise], Verdict]] = {
    Scheme.REJECTION: rejection,
    Scheme.BLOCK: block,
    Scheme.EXACT_MATCH: exact_match,
    Scheme.GUMBEL: gumbel,
    Scheme.REJECTION_WALK: rejection_walk,
    Scheme.TRAVERSAL: traversal,
}


def verify(tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict:
    """The scheme's verdict on a batch of trees, scored if the target can score.

    The law of what is emitted (accepted path, then one token) is the target's own, provided the tree was drawn as ``tree.draw``
    says. Trees without nodes are plain decoding under every scheme.

    Raises ValueError if the scheme is not exact on such a tree, the batch sizes differ, or an id, parent or draft probability
    cannot be right; the message names the request and node.
    """
    if tree.batch_size != target.batch_size:
        raise ValueError(f"{tree.batch_size} draft trees for {target.batch_size} requests")
    check_pairing(scheme, tree)
    tree.check(target.vocab_size)
    return with_scores(SCHEMES[scheme](tree, target, noise), tree, target)


__all__ = [
    "AllRows",
    "CounterNoise",
    "DenseNoise",
    "DenseTarget",
    "EXACT_ON",
    "RATIO_SCHEMES",
    "SCHEMES",
    "Scheme",
    "TargetRows",
    "TokenScores",
    "VerifyFn",
    "VerifyNoise",
    "block",
    "check_pairing",
    "default_scheme",
    "exact_match",
    "gumbel",
    "rejection",
    "rejection_walk",
    "traversal",
    "verify",
    "with_scores",
]

"""Following a tree with the target's own draws: exact match and its Gumbel-coupled form.

Shape legend: B requests, N nodes, D depth of the deepest node, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollout_spec.tree import NO_PARENT, DraftTree
from rollout_spec.verdict import Verdict
from rollout_spec.verify.randomness import VerifyNoise
from rollout_spec.verify.target import TargetRows
from rollout_spec.verify.trace import Trace

# (requests [R], depths [R], target log-probabilities [R, V]) -> the target's tokens [R]
_DrawTokens = Callable[[Tensor, Tensor, Tensor], Tensor]


def exact_match(tree: DraftTree, target: TargetRows, noise: VerifyNoise) -> Verdict:
    """Draw y ~ p at every node of the walk, emit it, and go on to the child that holds y, if there is one.

    The output is the target's own sample whatever the tree holds, as long as tree and draws are independent. The expected number of
    accepted tokens is sum over nodes of p(path to the node), the most any lossless scheme reaches on a deterministic tree.
    """

    def draw(requests: Tensor, depths: Tensor, log_probs: Tensor) -> Tensor:
        return target.draw(log_probs, noise.recover(requests, depths))

    return _follow(tree, target, draw, realised=False)


def gumbel(tree: DraftTree, target: TargetRows, noise: VerifyNoise) -> Verdict:
    """Exact match with y = argmax(log p + G), G keyed by (seed, absolute position).

    The output is the same tokens as seeded sampling without a draft, whatever was drafted. A drafter that takes the top-k of
    log q + G with the same G is right with probability sum_x 1 / sum_u max(p_u / p_x, q_u / q_x) >= (1 - TV) / (1 + TV) for k = 1.
    """

    return _follow(tree, target, noise.gumbel_argmax, realised=True)


def _follow(tree: DraftTree, target: TargetRows, draw: _DrawTokens, *, realised: bool) -> Verdict:
    """Walk from the root along the drawn tokens. realised: accept_probs are the 0 or 1 that happened, not the children's p."""
    trace = Trace(tree)
    valid = tree.valid()
    requests = torch.arange(tree.batch_size, device=tree.device)
    nodes = torch.full_like(requests, NO_PARENT)
    depth = 0
    while requests.numel():
        log_probs = target.log_probs(requests, nodes)
        token_ids = draw(requests, torch.full_like(requests, depth), log_probs)
        if depth == trace.path.shape[1]:
            trace.emit(requests, token_ids, is_bonus=True)
            break
        is_child = (tree.parents[requests] == nodes[:, None]) & valid[requests]  # [R, N]
        matches = is_child & (tree.token_ids[requests] == token_ids[:, None])
        drafted, found = is_child.any(1), matches.any(1)
        if realised:
            accept_probs = found.double()
        else:
            drafted_log_probs = log_probs.gather(1, torch.where(is_child, tree.token_ids[requests], 0))
            accept_probs = torch.where(is_child, drafted_log_probs.double().exp(), 0.0).sum(1).clamp_max(1.0)
        trace.accept_probs[requests, depth] = torch.where(drafted, accept_probs, torch.nan)
        trace.emit(requests[~found], token_ids[~found], ~drafted[~found])
        requests, nodes = requests[found], matches.long().argmax(1)[found]
        trace.accept(requests, depth, nodes)
        depth += 1
    return trace.verdict()

"""Trace: the verdict while it is being reached, and its scores afterwards.

Shape legend: B requests, N nodes, D depth of the deepest node, R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rollout_spec.tree import NO_NODE, NO_PARENT, DraftTree
from rollout_spec.verdict import Verdict
from rollout_spec.verify.target import TargetRows


class Trace:
    """What has been decided so far, request by request."""

    def __init__(self, tree: DraftTree) -> None:
        batch, max_depth, device = tree.batch_size, tree.max_depth(), tree.device
        self.path = torch.full((batch, max_depth), NO_NODE, dtype=torch.int64, device=device)
        self.num_accepted = torch.zeros(batch, dtype=torch.int64, device=device)
        self.next_token_ids = torch.zeros(batch, dtype=torch.int64, device=device)
        self.is_bonus = torch.zeros(batch, dtype=torch.bool, device=device)
        self.accept_probs = torch.full((batch, max_depth), torch.nan, dtype=torch.float64, device=device)

    def accept(self, requests: Tensor, depth: int, nodes: Tensor) -> None:
        """nodes [R] are the accepted ones at 0-based depth."""
        self.path[requests, depth] = nodes
        self.num_accepted[requests] = depth + 1

    def emit(self, requests: Tensor, token_ids: Tensor, is_bonus: Tensor | bool) -> None:
        """token_ids [R] end the requests' walks."""
        self.next_token_ids[requests] = token_ids
        self.is_bonus[requests] = is_bonus

    def verdict(self) -> Verdict:
        return Verdict(
            path=self.path,
            num_accepted=self.num_accepted,
            next_token_ids=self.next_token_ids,
            is_bonus=self.is_bonus,
            accept_probs=self.accept_probs,
        )


def with_scores(verdict: Verdict, tree: DraftTree, target: TargetRows) -> Verdict:
    """The verdict with raw and processed log-probabilities and entropies of every emitted token, if the target knows them."""
    batch, max_depth = verdict.path.shape
    steps = torch.arange(max_depth + 1, device=tree.device)
    requests, depths = (steps <= verdict.num_accepted[:, None]).nonzero(as_tuple=True)
    before = torch.nn.functional.pad(verdict.path, (1, 0), value=NO_PARENT)[requests, depths]
    token_ids = verdict.emitted(tree)[requests, depths]
    scores = target.score(requests, before, token_ids)
    if scores is None:
        return verdict

    def spread(values: Tensor) -> Tensor:
        out = torch.full((batch, max_depth + 1), torch.nan, dtype=values.dtype, device=values.device)
        out[requests, depths] = values
        return out

    return replace(
        verdict,
        raw_logprobs=spread(scores.raw_logprobs),
        processed_logprobs=spread(scores.processed_logprobs),
        entropies=spread(scores.entropies),
    )

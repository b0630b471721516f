"""Rejection walk over children drawn without replacement (RRSw/o).

Shape legend: B requests, N nodes, D depth of the deepest node, W most siblings, R rows, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec.tree import NO_NODE, NO_PARENT, DraftTree
from rollout_spec.verdict import Verdict
from rollout_spec.verify.categorical import inverse_cdf, row_slices, take_rows
from rollout_spec.verify.randomness import VerifyNoise
from rollout_spec.verify.ratio import DraftRows, normalised, residual
from rollout_spec.verify.target import TargetRows
from rollout_spec.verify.trace import Trace


def rejection_walk(tree: DraftTree, target: TargetRows, noise: VerifyNoise) -> Verdict:
    """Recursive rejection sampling without replacement (Jeon 2024, "Recursive speculative decoding"; Yang 2024).

    At a node start with p' = p and q' = q. For each child x in the order drawn: accept and descend if u < p'(x) / q'(x); else
    p' = norm((p' - q')+), and q' loses x and is renormalised. If none is accepted emit from p'; at a leaf emit from p (bonus).
    """
    draft, trace = DraftRows(tree, target.vocab_size), Trace(tree)
    children = tree.children()
    requests = torch.arange(tree.batch_size, device=tree.device)
    nodes = torch.full_like(requests, NO_PARENT)
    depth = 0
    while requests.numel():
        log_probs = target.log_probs(requests, nodes)
        siblings = children[requests, nodes + 1]  # [R, W]
        drafted = siblings[:, 0] != NO_NODE
        step = _Step(tree, draft, noise, depth)
        parts = row_slices(requests, log_probs.shape[1])
        chosen = torch.cat([step.run(trace, requests[part], siblings[part], log_probs[part]) for part in parts])
        if depth < trace.path.shape[1]:
            trace.accept_probs[requests, depth] = torch.where(drafted, (chosen != NO_NODE).double(), torch.nan)
        requests, nodes = requests[chosen != NO_NODE], chosen[chosen != NO_NODE]
        if requests.numel():
            trace.accept(requests, depth, nodes)
        depth += 1
    return trace.verdict()


@dataclass(frozen=True)
class _Step:
    """One depth of the walk."""

    tree: DraftTree
    draft: DraftRows
    noise: VerifyNoise
    depth: int

    def run(self, trace: Trace, requests: Tensor, siblings: Tensor, log_probs: Tensor) -> Tensor:
        """[R] the accepted ones of siblings [R, W], NO_NODE where the walk ends; there the last token is emitted."""
        target_probs = self.draft.widen(log_probs)
        chosen = self._try_children(requests, siblings, target_probs)
        stopped = chosen == NO_NODE
        ended = requests[stopped]
        if ended.numel():
            uniforms = self.noise.recover(ended, torch.full_like(ended, self.depth))
            trace.emit(ended, inverse_cdf(take_rows(target_probs, stopped.nonzero()[:, 0]), uniforms), siblings[stopped, 0] == NO_NODE)
        return chosen

    def _try_children(self, requests: Tensor, siblings: Tensor, target_probs: Tensor) -> Tensor:
        """[R] accepted children or NO_NODE. target_probs [R, V] is overwritten with p' once children were refused."""
        chosen = torch.full_like(requests, NO_NODE)
        for trial in range(siblings.shape[1]):
            rows = ((chosen == NO_NODE) & (siblings[:, trial] != NO_NODE)).nonzero()[:, 0]
            if not rows.numel():
                break
            asked, nodes = requests[rows], siblings[rows, trial]
            draft_probs = self.draft.remaining(asked, siblings[rows], torch.full_like(rows, trial))
            drafted_probs = draft_probs.gather(1, self.draft.columns(asked, nodes)[:, None])[:, 0]
            drafted_target_probs = target_probs[rows, self.tree.token_ids[asked, nodes]]
            uniforms = self.noise.accept(asked, torch.full_like(asked, self.depth), trial)
            accepted = uniforms * drafted_probs < drafted_target_probs
            chosen[rows[accepted]] = nodes[accepted]
            refused = rows[~accepted]
            if refused.numel():
                current = take_rows(target_probs, refused)
                left = residual(current, take_rows(draft_probs, (~accepted).nonzero()[:, 0]), self.draft.token_ids)
                target_probs[refused] = normalised(left, left.sum(-1), current)
        return chosen

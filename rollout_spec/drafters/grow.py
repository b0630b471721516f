"""Growing a draft tree level by level from a drafter's distributions, with the draws that keep verification exact.

Shape legend: B requests, W nodes of one level (padded, the same for all requests), w children a node, N nodes, V columns of the
drafter's distribution (its own vocabulary if reduced).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.drafter import RequestView
from rollout_spec.noise import LANE, Stream, gumbel_noise
from rollout_spec.tree import NO_PARENT, DraftTree, Draw


class TokenNoise(Protocol):
    """noise.gumbel_noise, or a kernel's."""

    def __call__(self, seeds: Sequence[int], positions: Sequence[int], tokens: int | Tensor, stream: Stream) -> Tensor: ...


class TreeGrower:
    """Collects levels of drawn children. Call ``extend`` with the level's distributions until ``done``, then ``tree``.

    Number and place of the children depend on the budget and on the support of the distributions, never on what was drawn.
    """

    def __init__(
        self,
        requests: Sequence[RequestView],
        budget: Budget,
        draw: Draw,
        draft_token_ids: Tensor | None = None,
        noise: TokenNoise = gumbel_noise,
    ) -> None:
        self._requests, self._budget, self._draw, self._ids, self._noise = requests, budget, draw, draft_token_ids, noise
        batch = len(requests)
        self._tokens = torch.empty(batch, 0, dtype=torch.int64)
        self._parents = torch.empty(batch, 0, dtype=torch.int64)
        self._alive = torch.empty(batch, 0, dtype=torch.bool)
        self._log_probs: list[Tensor] = []  # per level [B, W, V]
        self._source: list[Tensor] = []  # per level [W w]: which of the level's distributions a child was drawn from
        self._depth = 0
        self._level = torch.full((1,), NO_PARENT)  # [W] nodes whose children come next
        self._level_alive = budget.draft_lengths[:, None] > 0  # [B, W]

    @property
    def done(self) -> bool:
        return not bool(self._level_alive.any())

    @property
    def level(self) -> Tensor:
        """[W] node indices (NO_PARENT = the root) that ``extend`` wants distributions for."""
        return self._level

    @property
    def level_alive(self) -> Tensor:
        """[B, W]: where False, whatever distribution is given is ignored."""
        return self._level_alive

    def extend(self, log_probs: Tensor) -> None:
        """Draw the children of the level from log_probs [B, W, V], the drafter's log-distribution after each of its nodes."""
        batch, width = len(self._requests), self._budget.width_at(self._depth)
        num_parents = self._level.numel()
        width = min(width, log_probs.shape[-1])
        columns = self._draw_columns(log_probs, width)
        drawn = log_probs.gather(2, columns)
        self._depth += 1
        alive = self._level_alive[:, :, None] & (drawn > -torch.inf)
        first = self._tokens.shape[1]
        tokens = columns if self._ids is None else self._ids[columns]
        self._tokens = torch.cat([self._tokens, tokens.reshape(batch, -1)], dim=1)
        self._parents = torch.cat([self._parents, self._level.repeat_interleave(width).expand(batch, -1)], dim=1)
        self._alive = torch.cat([self._alive, alive.reshape(batch, -1)], dim=1)
        if self._draw in (Draw.SAMPLED, Draw.WITHOUT_REPLACEMENT):
            self._log_probs.append(log_probs)
            self._source.append(torch.arange(num_parents).repeat_interleave(width))
        self._level = torch.arange(first, self._tokens.shape[1])
        self._level_alive = alive.reshape(batch, -1) & (self._budget.draft_lengths[:, None] > self._depth)

    def partial(self) -> DraftTree:
        """All nodes so far, dead ones included (they keep their places), without probabilities: to run a model on."""
        num = torch.full((len(self._requests),), self._tokens.shape[1])
        return DraftTree(token_ids=self._tokens, parents=self._parents, num_nodes=num, draw=Draw.DETERMINISTIC)

    def tree(self) -> DraftTree:
        """The tree without dead nodes."""
        order = (~self._alive).int().argsort(dim=1, stable=True)
        num_nodes = self._alive.sum(1)
        most = int(num_nodes.max()) if num_nodes.numel() else 0
        new_place = torch.empty_like(self._parents).scatter_(1, order, torch.arange(self._tokens.shape[1]).expand_as(self._parents))
        order = order[:, :most]
        parents = self._parents.gather(1, order)
        parents = torch.where(parents >= 0, new_place.gather(1, parents.clamp_min(0)), NO_PARENT)
        return DraftTree(
            token_ids=self._tokens.gather(1, order),
            parents=parents,
            num_nodes=num_nodes,
            draw=self._draw,
            draft_probs=self._probs(order) if self._log_probs and most else None,
            draft_token_ids=self._ids if self._log_probs and most else None,
        )

    def _probs(self, order: Tensor) -> Tensor:
        """[B, N, V]: the distribution each kept node was drawn from."""
        levels = [log_probs.exp()[:, source] for log_probs, source in zip(self._log_probs, self._source, strict=True)]
        whole = torch.cat(levels, dim=1)
        if order.shape[1] == whole.shape[1] and torch.equal(order, torch.arange(whole.shape[1]).expand_as(order)):
            return whole
        return whole.gather(1, order[:, :, None].expand(-1, -1, whole.shape[2]))

    def _draw_columns(self, log_probs: Tensor, width: int) -> Tensor:
        """[B, W, w] columns in draw order: Gumbel-top-k is sampling without replacement, and w = 1 plain sampling."""
        if self._draw is Draw.DETERMINISTIC:
            return log_probs.topk(width, dim=-1).indices
        batch, _, columns = log_probs.shape
        coupled = self._draw is Draw.GUMBEL
        # Coupled noise is the target's, by target token; a sampler of its own draws by column.
        tokens = columns if not coupled or self._ids is None else self._ids
        stream = Stream.TARGET if coupled else Stream.DRAFT
        # Coupled noise belongs to the absolute position: all parents of a depth see the same.
        offsets = [self._depth] if coupled else [(node + 1) * LANE for node in self._level.tolist()]
        seeds = [request.seed for request in self._requests for _ in offsets]
        positions = [request.next_position + offset for request in self._requests for offset in offsets]
        noise = self._noise(seeds, positions, tokens, stream).to(log_probs.device).view(batch, -1, columns)
        return (log_probs + noise).topk(width, dim=-1).indices

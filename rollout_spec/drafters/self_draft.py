"""SelfDrafter: the target drafts for itself. For diagnosis: it costs more than it saves, but shows what a perfect drafter would do.

Shape legend: B requests, W nodes of a level, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext, DrafterNeeds, RequestView
from rollout_spec.drafters.grow import TreeGrower
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class SelfConfig:
    """``draw`` must fit the verifier; ``temperature`` None drafts from the very distribution the target samples from."""

    draw: Draw = Draw.SAMPLED
    temperature: float | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")


class SelfDrafter:
    name = "self"
    vocab_size: int | None = None

    def __init__(self, config: SelfConfig | None = None) -> None:
        self._config = SelfConfig() if config is None else config
        self.needs = DrafterNeeds(run_target=True, draws=frozenset(Draw))

    def start(self, request: RequestView) -> None:
        pass

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        assert context.run_target is not None
        if self._config.draw is Draw.SAMPLED and max(budget.tree_width) > 1:
            raise ValueError(
                "independent draws make chains only; for a wider tree draft without replacement (verifier rejection_walk or traversal)"
            )
        grower = TreeGrower(context.requests, budget, self._config.draw)
        batch = len(context.requests)
        while not grower.done:
            target = context.run_target(grower.partial(), self._config.temperature)
            nodes = grower.level.repeat(batch)
            requests = torch.arange(batch).repeat_interleave(grower.level.numel())
            grower.extend(target.log_probs(requests, nodes).view(batch, grower.level.numel(), -1))
        return grower.tree()

    def observe(self, context: DraftContext, tree: DraftTree, verdict: Verdict) -> None:
        pass

    def finish(self, request: RequestView) -> None:
        pass

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:  # noqa: ARG002
        raise ValueError("the self drafter has no weights of its own: update the target's")

    def target_updated(self, version: int) -> None:
        pass

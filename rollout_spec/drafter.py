"""The Drafter protocol and what a drafter sees.

Shape legend: B running requests, T tokens of a request so far, R rows the target computed last round, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.sampling import SamplingParams
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verdict import Verdict
from rollout_spec.verify import TargetRows


@dataclass(frozen=True, kw_only=True)
class RequestView:
    """One running request as a drafter sees it. ``token_ids`` is prompt + output so far; do not modify."""

    request_id: str
    prompt_key: str  # the same for all samples of a prompt, in every epoch
    token_ids: Sequence[int]  # [T]
    num_prompt_tokens: int
    seed: int
    sampling: SamplingParams

    @property
    def next_position(self) -> int:
        """Absolute position of the next token to emit: the key of its noise."""
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetStates:
    """Hidden states of tokens whose target state was committed since this drafter's last ``propose``, request by request.

    ``hidden[layer][offsets[b]:offsets[b + 1]]`` are the states of request b's tokens at ``positions`` of the same slice.
    """

    hidden: Mapping[int, Tensor]  # layer -> [R, H]; layer i is the output of decoder layer i, -1 the final norm's output
    positions: Tensor  # [R] int64
    offsets: Tensor  # [B + 1] int64


class RunTarget(Protocol):
    """Runs the target itself on a partial tree (one full forward; diagnosis, not speed)."""

    def __call__(self, tree: DraftTree, temperature: float | None) -> TargetRows:
        """The target's processed distributions at the root and every node, at another temperature if one is given."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftContext:
    requests: Sequence[RequestView]  # B
    weights_version: int  # of the target
    states: TargetStates | None = None  # present when the drafter's needs name hidden layers
    run_target: RunTarget | None = None  # present when the drafter's needs ask for it


@dataclass(frozen=True, kw_only=True)
class DrafterNeeds:
    """What the engine must hand over for this drafter."""

    hidden_layers: tuple[int, ...] = ()
    run_target: bool = False
    every_round: bool = False  # propose is called for all requests of every round; else only for those, and when, a budget is above 0
    draws: frozenset[Draw] = field(default_factory=lambda: frozenset({Draw.DETERMINISTIC}))  # kinds of trees it can make


class Drafter(Protocol):
    """Proposes trees. A drafter may be stateful by request; the engine tells it when requests start and end."""

    name: str
    vocab_size: int | None  # None = any; otherwise it must equal the target's
    needs: DrafterNeeds

    def start(self, request: RequestView) -> None:
        """A request begins to run (also after a preemption)."""

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """Trees for the context's requests, within the budget (0 nodes where the budget or the drafter says so).

        Requests whose budget is 0 are left out, with the states that they would bring; these come together the next time.
        """

    def observe(self, context: DraftContext, tree: DraftTree, verdict: Verdict) -> None:
        """What became of the proposal; context is the one given to ``propose``."""

    def finish(self, request: RequestView) -> None:
        """A request ended (stop, length or abort); token_ids holds all it emitted."""

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """New drafter weights. Drafters without weights refuse with ValueError."""

    def target_updated(self, version: int) -> None:
        """The target's weights changed: caches keyed by them may have to go."""


@runtime_checkable
class HasWeights(Drafter, Protocol):
    """A drafter with weights of its own. What it borrows from the target (embedding, output head) is not among them."""

    weights_version: int  # of the policy that its own weights were last trained for; 0 as loaded

    def named_weights(self) -> Mapping[str, Tensor]:
        """Its own weights by the names that ``update_weights`` takes."""

    def borrowed_weights(self) -> Mapping[str, Tensor]:
        """The target's tensors that it uses, as it uses them now."""

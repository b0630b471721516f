"""What the command line needs from above the core: how a drafter's name becomes a drafter, and which operations run the forward.

The core cannot import kernels or trained drafters; rollout_spec_rl.compose fills this in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollout_spec.doctor import Finding
from rollout_spec.drafter import Drafter
from rollout_spec.tree import Draw
from rollout_spec.verify import Scheme

if TYPE_CHECKING:
    from rich.progress import Progress

    from rollout_spec.engine.load import LoadedModel
    from rollout_spec.engine.ops import Ops


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """What a drafter is asked to be: its name or directory, and how its trees must be drawn for the verifier in use."""

    spec: str  # none | ngram | suffix | self | self:TEMPERATURE | a directory
    draw: Draw | None = None  # None: the drafter's own choice
    history: Path | None = None  # suffix only: file of earlier epochs
    follow_head: bool = True  # trained drafters only: borrowed embedding and head follow the policy's; else they stay as when loaded


class DemoDrafter(Protocol):
    def __call__(self, model: str, *, quick: bool, threads: int | None, progress: Progress) -> Path:
        """Directory of a small drafter trained for the model, with progress shown; at once if it was trained before."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    make_drafter: Callable[[DrafterOptions, LoadedModel, Ops], Drafter | None]  # for this model, on these operations
    make_ops: Callable[[], Ops]
    load_vllm: Callable[[], Any]  # the vllm module; ValueError with the mend when it is not installed
    findings: Callable[[], Sequence[Finding]]  # for `rollout-spec doctor`
    demo_drafter: DemoDrafter


def draw_for(scheme: Scheme | None, *, seeded: bool, wide: bool) -> Draw:
    """The kind of draw a sampling drafter must make so that the scheme is exact on its trees.

    Without a scheme: coupled for seeded requests, else independent chains or siblings without replacement.
    """
    if scheme is Scheme.GUMBEL or (scheme is None and seeded):
        return Draw.GUMBEL
    if scheme is Scheme.EXACT_MATCH:
        return Draw.DETERMINISTIC
    if wide or scheme in (Scheme.REJECTION_WALK, Scheme.TRAVERSAL):
        return Draw.WITHOUT_REPLACEMENT
    return Draw.SAMPLED

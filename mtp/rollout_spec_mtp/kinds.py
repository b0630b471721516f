"""The kinds of drafters that can be trained and served: the one table to extend."""

from __future__ import annotations

from rollout_spec_mtp.block.kind import BLOCK_KIND
from rollout_spec_mtp.mtp.kind import MTP
from rollout_spec_mtp.training.protocol import DrafterKind

KINDS: dict[str, DrafterKind] = {kind.name: kind for kind in (MTP, BLOCK_KIND)}


def kind_of(name: object) -> DrafterKind:
    """The kind of that name; ValueError names the known ones."""
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"drafter kind {name!r} is not known: give one of {', '.join(KINDS)}")
    return KINDS[name]

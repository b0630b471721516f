"""Scheme: the six verifiers, and the table that says on which drafts each of them is exact."""

from __future__ import annotations

import enum

from rollout_spec.tree import DraftTree, Draw


class Scheme(enum.Enum):
    REJECTION = "rejection"  # Leviathan 2023, Chen 2023: token by token along a chain
    BLOCK = "block"  # Sun 2024: a whole chain at once, never shorter in expectation than rejection
    EXACT_MATCH = "exact_match"  # the target draws on its own and follows the tree as long as it can
    GUMBEL = "gumbel"  # the same with noise keyed by (seed, position): the tokens of seeded decoding
    REJECTION_WALK = "rejection_walk"  # RRSw/o: siblings drawn without replacement are tried in draw order
    TRAVERSAL = "traversal"  # arXiv 2505.12398: leaf to root over such a tree


# A scheme is exact on drafts chosen in these ways and on no others.
EXACT_ON: dict[Scheme, frozenset[Draw]] = {
    Scheme.REJECTION: frozenset({Draw.SAMPLED}),
    Scheme.BLOCK: frozenset({Draw.SAMPLED}),
    # The draft's noise must be independent of the target's, which a Gumbel-coupled draft's is not.
    Scheme.EXACT_MATCH: frozenset({Draw.DETERMINISTIC, Draw.SAMPLED, Draw.WITHOUT_REPLACEMENT}),
    # The output is a function of the target's noise alone, whatever was drafted.
    Scheme.GUMBEL: frozenset(Draw),
    # A SAMPLED chain is a tree of width one, where drawing with and without replacement is the same.
    Scheme.REJECTION_WALK: frozenset({Draw.WITHOUT_REPLACEMENT, Draw.SAMPLED}),
    Scheme.TRAVERSAL: frozenset({Draw.WITHOUT_REPLACEMENT, Draw.SAMPLED}),
}

# These divide by draft_probs, so siblings must have been drawn without replacement: a SAMPLED draft has to be a chain.
RATIO_SCHEMES = frozenset({Scheme.REJECTION, Scheme.BLOCK, Scheme.REJECTION_WALK, Scheme.TRAVERSAL})


def default_scheme(draw: Draw, *, seeded: bool, is_chain: bool) -> Scheme:
    """The scheme to use when none was asked for: the longest accepted length among those exact on the draft."""
    if seeded or draw is Draw.GUMBEL:
        return Scheme.GUMBEL
    if draw is Draw.WITHOUT_REPLACEMENT:
        return Scheme.TRAVERSAL
    if draw is Draw.SAMPLED and is_chain:
        return Scheme.BLOCK
    return Scheme.EXACT_MATCH


def check_pairing(scheme: Scheme, tree: DraftTree) -> None:
    """Raise ValueError, saying what to change, if the scheme is not exact on the tree. Trees without nodes suit every scheme."""
    if tree.max_nodes == 0:
        return
    if tree.draw not in EXACT_ON[scheme]:
        mend = default_scheme(tree.draw, seeded=False, is_chain=tree.is_chain())
        wanted = ", ".join(sorted(draw.value for draw in EXACT_ON[scheme]))
        raise ValueError(
            f"verifying with '{scheme.value}' is not exact on '{tree.draw.value}' drafts: "
            f"use '{mend.value}', or a drafter whose draws are {wanted}"
        )
    if tree.draw is Draw.SAMPLED and scheme in RATIO_SCHEMES and not tree.is_chain():
        raise ValueError(
            f"verifying with '{scheme.value}' is not exact on 'sampled' drafts with siblings: draft a chain, draw siblings without "
            f"replacement and use 'traversal', or use 'exact_match'"
        )

"""The cases every scheme is proved on: kinds of drafts, shapes, vocabularies and special laws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from exactness.models import Drafter, TableModel, random_model, tree_parents, without_token
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verify import DenseTarget, Scheme, TargetRows, Verdict, VerifyFn, VerifyNoise


@dataclass(frozen=True)
class Case:
    draw: Draw
    widths: tuple[int, ...]  # children of each node by depth; all ones = a chain
    vocab_size: int
    kind: str = "random"  # random | zeros (impossible tokens in p and q) | equal (p = q) | narrow (q never draws token 1)

    def __str__(self) -> str:
        shape = "x".join(str(width) for width in self.widths)
        return f"{self.draw.value} {shape} V={self.vocab_size} {self.kind}"

    @property
    def in_minutes(self) -> bool:
        """True if Triton's interpreter enumerates it in a minute: some ten drafts."""
        possible = self.vocab_size - (self.kind == "zeros")
        return self.draw in (Draw.DETERMINISTIC, Draw.GUMBEL) or possible ** len(tree_parents(self.widths)) <= 3**2

    @property
    def length(self) -> int:
        """Longest output of a round."""
        return len(self.widths) + 1

    def target(self, length: int | None = None) -> TableModel:
        return random_model(self.vocab_size, length or self.length, seed=11, zeros=self.kind == "zeros")

    def draft(self, length: int | None = None) -> TableModel:
        seed = 11 if self.kind == "equal" else 12
        model = random_model(self.vocab_size, length or self.length, seed=seed, zeros=self.kind == "zeros")
        return without_token(model, 1) if self.kind == "narrow" else model

    def drafter(self) -> Drafter:
        return Drafter(self.draft(), self.widths, self.draw)


def _cases(draw: Draw, *shapes: tuple[tuple[int, ...], int, str]) -> list[Case]:
    return [Case(draw, widths, vocab_size, kind) for widths, vocab_size, kind in shapes]


CHAINS = _cases(
    Draw.SAMPLED,
    ((1,), 4, "random"),
    ((1, 1), 3, "random"),
    ((1, 1, 1), 3, "random"),
    ((1, 1, 1), 3, "zeros"),
    ((1, 1), 3, "equal"),
)
SIBLINGS = _cases(
    Draw.WITHOUT_REPLACEMENT,
    ((2,), 3, "random"),
    ((3,), 4, "random"),
    ((2, 1), 3, "random"),
    ((2, 2), 3, "random"),
    ((1, 2), 3, "zeros"),
    ((2, 1, 1), 3, "random"),
    ((2, 1), 3, "equal"),
)
TOP_K = _cases(Draw.DETERMINISTIC, ((1, 1, 1), 3, "random"), ((2, 2), 3, "random"), ((3, 2, 1), 4, "random"), ((2, 2), 3, "zeros"))
COUPLED = _cases(Draw.GUMBEL, ((1, 1, 1), 3, "random"), ((2, 2), 3, "random"))

CASES: dict[Scheme, list[Case]] = {
    Scheme.REJECTION: CHAINS,
    Scheme.BLOCK: CHAINS,
    Scheme.EXACT_MATCH: [*TOP_K, *CHAINS[:3], *SIBLINGS[:4]],
    Scheme.GUMBEL: [*TOP_K, *COUPLED, *CHAINS[:3], *SIBLINGS[:4]],
    Scheme.REJECTION_WALK: [*CHAINS[:3], *SIBLINGS],
    Scheme.TRAVERSAL: [*CHAINS[:3], *SIBLINGS],
}

# Few enough boxes of noise for Triton's interpreter.
IN_INTERPRETER: dict[Scheme, list[Case]] = {
    Scheme.REJECTION: [CHAINS[0]],
    Scheme.BLOCK: [CHAINS[0]],
    Scheme.EXACT_MATCH: [TOP_K[1], TOP_K[3], CHAINS[0]],
    Scheme.GUMBEL: [TOP_K[1], TOP_K[3], COUPLED[1], CHAINS[0]],
    Scheme.REJECTION_WALK: [SIBLINGS[0], SIBLINGS[4]],
    Scheme.TRAVERSAL: [SIBLINGS[4]],
}

# Small enough to follow every branch of several rounds.
ROUNDS: dict[Scheme, Case] = {
    Scheme.REJECTION: Case(Draw.SAMPLED, (1, 1), 2),
    Scheme.BLOCK: Case(Draw.SAMPLED, (1, 1), 2),
    Scheme.EXACT_MATCH: Case(Draw.DETERMINISTIC, (1, 1), 2),
    Scheme.GUMBEL: Case(Draw.DETERMINISTIC, (2, 1), 3),
    Scheme.REJECTION_WALK: Case(Draw.WITHOUT_REPLACEMENT, (2, 1), 2),
    Scheme.TRAVERSAL: Case(Draw.WITHOUT_REPLACEMENT, (2, 1), 2),
}

NARROW: dict[Scheme, list[Case]] = {
    Scheme.REJECTION: [Case(Draw.SAMPLED, (1, 1), 3, "narrow")],
    Scheme.BLOCK: [Case(Draw.SAMPLED, (1, 1), 3, "narrow")],
    Scheme.REJECTION_WALK: [Case(Draw.WITHOUT_REPLACEMENT, (2, 1), 3, "narrow")],
    Scheme.TRAVERSAL: [Case(Draw.WITHOUT_REPLACEMENT, (2, 1), 3, "narrow")],
}


def with_reduced_vocabulary(verify: VerifyFn) -> VerifyFn:
    """The verifier handed the same drafts in a reduced vocabulary: the columns in reverse order, without tokens that q never draws."""

    def reduced(tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict:
        assert tree.draft_probs is not None
        used = (tree.draft_probs > 0).flatten(0, 1).any(0).nonzero()[:, 0].flip(0)
        assert used.numel() < target.vocab_size
        return verify(replace(tree, draft_probs=tree.draft_probs[:, :, used], draft_token_ids=used), target, noise, scheme)

    return reduced


Rewrite = Callable[[torch.Tensor], torch.Tensor]


def with_target(verify: VerifyFn, rewrite: Rewrite) -> VerifyFn:
    """The verifier with every target row rewritten before it is looked at. For dense targets."""

    def rewritten(tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict:
        assert isinstance(target, DenseTarget)
        return verify(tree, DenseTarget(rewrite(target.target_probs)), noise, scheme)

    return rewritten

"""Every proof and the cases it is run on: what the tests are parametrised with, and what docs/exactness.md lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pytest

from exactness.cases import CASES, NARROW, ROUNDS, Case
from rollout_spec.tree import Draw
from rollout_spec.verify import EXACT_ON, RATIO_SCHEMES, Scheme


@dataclass(frozen=True)
class Proof:
    """A proof, or a planted bug that must make one fail. The parameters' ids name scheme and case."""

    title: str
    cases: tuple[tuple[Scheme, object], ...]

    def parameters(self) -> Sequence[object]:
        """For pytest.mark.parametrize(("scheme", "case"), ...)."""
        return [pytest.param(scheme, case, id=f"{scheme.value}-{case}", marks=pytest.mark.proof(self.title)) for scheme, case in self.cases]

    def count(self, scheme: Scheme) -> int:
        return sum(one is scheme for one, _ in self.cases)


def _proof(title: str, cases: Mapping[Scheme, Iterable[object]]) -> Proof:
    return Proof(title, tuple((scheme, case) for scheme in Scheme for case in cases.get(scheme, [])))


def _made_for(chain: tuple[int, ...], tree: tuple[int, ...], vocab_size: int) -> dict[Scheme, list[Case]]:
    """One case a scheme, of the draw it is made for."""
    made_for = {
        Scheme.REJECTION: (Draw.SAMPLED, chain),
        Scheme.BLOCK: (Draw.SAMPLED, chain),
        Scheme.EXACT_MATCH: (Draw.DETERMINISTIC, tree),
        Scheme.GUMBEL: (Draw.GUMBEL, tree),
        Scheme.REJECTION_WALK: (Draw.WITHOUT_REPLACEMENT, tree),
        Scheme.TRAVERSAL: (Draw.WITHOUT_REPLACEMENT, tree),
    }
    return {scheme: [Case(draw, widths, vocab_size)] for scheme, (draw, widths) in made_for.items()}


def _every_draw(schemes: Iterable[Scheme]) -> dict[Scheme, list[Case]]:
    """One case for each draw that a scheme is exact on, at a size where sequences rarely coincide by chance."""
    return {
        scheme: [Case(draw, (1, 1, 1) if draw is Draw.SAMPLED else (2, 2), 48) for draw in Draw if draw in EXACT_ON[scheme]]
        for scheme in schemes
    }


SPLIT = "min(wp, q) + (wp - q)+ = wp"
STOP = "h + (1 - h)(w - Z) = w"
ALGEBRA = _proof(
    "algebraic identity",
    {
        Scheme.REJECTION: [SPLIT],
        Scheme.BLOCK: [SPLIT, STOP],
        Scheme.EXACT_MATCH: ["uniforms that draw v measure p(v)"],
        Scheme.GUMBEL: ["races that v wins measure p(v)"],
        Scheme.REJECTION_WALK: [SPLIT],
        Scheme.TRAVERSAL: [SPLIT, STOP],
    },
)
BRANCHES = _proof("enumeration, one round", CASES)
REDUCED = _proof("enumeration, reduced draft vocabulary", NARROW)
SEVERAL_ROUNDS = _proof("enumeration, several rounds", {scheme: [case] for scheme, case in ROUNDS.items()})
CHI_SQUARE = _proof("chi-square, several rounds", _made_for((1, 1), (2, 1), 3))
SEEDED = _proof("seeded decoding, token by token", _every_draw([Scheme.EXACT_MATCH, Scheme.GUMBEL]))
GREEDY = _proof("greedy decoding, token by token", _every_draw(Scheme))
PROOFS = (ALGEBRA, BRANCHES, REDUCED, SEVERAL_ROUNDS, CHI_SQUARE, SEEDED, GREEDY)

_RATIO = [scheme for scheme in Scheme if scheme in RATIO_SCHEMES]
LENIENT = _proof("acceptance 5 % too lenient", {scheme: ["enumeration", "chi-square"] for scheme in _RATIO})
LENIENT_MATCH = _proof("target leaning 5 % towards the draft", {Scheme.EXACT_MATCH: ["enumeration"], Scheme.GUMBEL: ["seeded decoding"]})
RESIDUAL = _proof("residual from the target", {scheme: ["enumeration"] for scheme in _RATIO})
SHARED_RECOVERY = _proof("draft noise shared with recovery", {scheme: ["chi-square"] for scheme in _RATIO})
SHARED_ACCEPTANCE = _proof("draft noise shared with acceptance", {scheme: ["chi-square"] for scheme in _RATIO})
PRUNING = _proof("sampled-token pruning", {scheme: ["enumeration"] for scheme in _RATIO})
ROUNDED = _proof(
    "target rounded to 2 decimals",
    {scheme: ["seeded decoding" if scheme is Scheme.GUMBEL else "enumeration"] for scheme in Scheme},
)
KEYED_BY_TOKEN = _proof("acceptance noise keyed by token, not by round", {Scheme.BLOCK: ["chi-square"]})
DRAFT_KEYED_BY_TOKEN = _proof("draft noise keyed by token, not by round", {Scheme.BLOCK: ["chi-square"]})
OTHER_Q = _proof("ratio with other numbers than were sampled from (bfloat16)", {scheme: ["enumeration"] for scheme in _RATIO})
BUGS = (
    LENIENT,
    LENIENT_MATCH,
    RESIDUAL,
    SHARED_RECOVERY,
    SHARED_ACCEPTANCE,
    PRUNING,
    ROUNDED,
    KEYED_BY_TOKEN,
    DRAFT_KEYED_BY_TOKEN,
    OTHER_Q,
)


def table() -> str:
    """The two Markdown tables of docs/exactness.md."""
    lines = ["| scheme | " + " | ".join(proof.title for proof in PROOFS) + " |", "|---" * (len(PROOFS) + 1) + "|"]
    for scheme in Scheme:
        counts = [str(proof.count(scheme)) if proof.count(scheme) else "–" for proof in PROOFS]
        lines.append(f"| `{scheme.value}` | " + " | ".join(counts) + " |")
    lines += ["", "| planted bug | " + " | ".join(f"`{scheme.value}`" for scheme in Scheme) + " |", "|---" * (len(Scheme) + 1) + "|"]
    for bug in BUGS:
        caught = [", ".join(str(case) for one, case in bug.cases if one is scheme) or "–" for scheme in Scheme]
        lines.append(f"| {bug.title} | " + " | ".join(caught) + " |")
    return "\n".join(lines)

"""Every proof and the cases it is run on: what the tests are parametrised with, and what docs/exactness.md lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pytest

from exactness.backends import BACKENDS, FUSED, READABLE, TRITON, Backend
from exactness.cases import CASES, IN_INTERPRETER, NARROW, ROUNDS, Case
from rollout_spec.tree import Draw
from rollout_spec.verify import EXACT_ON, RATIO_SCHEMES, Scheme


@dataclass(frozen=True)
class Proof:
    """A proof, or a planted bug that must make one fail. The parameters' ids name backend, scheme and case."""

    title: str
    cases: tuple[tuple[Scheme, object], ...]
    fused_cases: tuple[tuple[Scheme, object], ...] = ()
    triton_cases: tuple[tuple[Scheme, object], ...] = ()
    slow_triton_cases: tuple[tuple[Scheme, object], ...] = ()  # more than ten seconds in Triton's interpreter

    def cases_of(self, backend: Backend) -> tuple[tuple[Scheme, object], ...]:
        return {READABLE: self.cases, FUSED: self.fused_cases, TRITON: self.triton_cases + self.slow_triton_cases}[backend]

    def parameters(self) -> Sequence[object]:
        """For pytest.mark.parametrize(("backend", "scheme", "case"), ...)."""
        return [
            pytest.param(backend, scheme, case, id=f"{backend}-{scheme.value}-{case}", marks=self._marks(backend, scheme, case))
            for backend in BACKENDS
            for scheme, case in self.cases_of(backend)
        ]

    def _marks(self, backend: Backend, scheme: Scheme, case: object) -> list[pytest.MarkDecorator]:
        is_slow = backend is TRITON and (scheme, case) in self.slow_triton_cases
        return [pytest.mark.proof(self.title), *([pytest.mark.slow] if is_slow else [])]

    def count(self, scheme: Scheme, backend: Backend = READABLE) -> int:
        return sum(one is scheme for one, _ in self.cases_of(backend))


def _proof(
    title: str,
    cases: Mapping[Scheme, Iterable[object]],
    fused: Mapping[Scheme, Iterable[object]] | None = None,
    triton: Mapping[Scheme, Iterable[object]] | None = None,
    slow_triton: Mapping[Scheme, Iterable[object]] | None = None,
) -> Proof:
    given = (cases, fused or {}, triton or {}, slow_triton or {})
    return Proof(title, *(tuple((scheme, case) for scheme in Scheme for case in of.get(scheme, [])) for of in given))


def _handed(cases: Mapping[Scheme, Iterable[object]]) -> dict[Scheme, Iterable[object]]:
    """The cases that the fused verifier decides from uniforms that are handed to it; it draws the noise of races itself."""
    return {scheme: of for scheme, of in cases.items() if scheme is not Scheme.GUMBEL}


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


CHAIN_SCHEMES = (Scheme.REJECTION, Scheme.BLOCK)
TREE_SCHEMES = (Scheme.REJECTION_WALK, Scheme.TRAVERSAL)
_DRAWN_BY_TARGET = (Scheme.EXACT_MATCH, Scheme.GUMBEL)


def _only(schemes: Iterable[Scheme], cases: Mapping[Scheme, Iterable[object]]) -> dict[Scheme, Iterable[object]]:
    return {scheme: cases[scheme] for scheme in schemes}


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
BRANCHES = _proof(
    "enumeration, one round",
    CASES,
    _handed(CASES),
    IN_INTERPRETER,
    {scheme: [case for case in cases if case not in IN_INTERPRETER[scheme] and case.in_minutes] for scheme, cases in CASES.items()},
)
REDUCED = _proof("enumeration, reduced draft vocabulary", NARROW, _handed(NARROW), slow_triton=NARROW)
_ROUNDS = {scheme: [case] for scheme, case in ROUNDS.items()}
SEVERAL_ROUNDS = _proof(
    "enumeration, several rounds",
    _ROUNDS,
    _handed(_ROUNDS),
    _only(_DRAWN_BY_TARGET, _ROUNDS),
    _only((*CHAIN_SCHEMES, *TREE_SCHEMES), _ROUNDS),
)
_PREFIXES = _made_for((1, 1), (2, 1), 3)
CHI_SQUARE = _proof("chi-square, several rounds", _PREFIXES, _PREFIXES, _made_for((1,), (2,), 3), _PREFIXES)
_ONE_EACH = _made_for((1, 1, 1), (2, 2), 48)
SEEDED = _proof(
    "seeded decoding, token by token",
    _every_draw(_DRAWN_BY_TARGET),
    _every_draw(_DRAWN_BY_TARGET),
    {scheme: _ONE_EACH[scheme] for scheme in _DRAWN_BY_TARGET},
)
GREEDY = _proof("greedy decoding, token by token", _every_draw(Scheme), _every_draw(Scheme), _ONE_EACH)
PROOFS = (ALGEBRA, BRANCHES, REDUCED, SEVERAL_ROUNDS, CHI_SQUARE, SEEDED, GREEDY)


def _ratio_bug(title: str, *caught_by: str) -> Proof:
    """A bug of acceptance or recovery, planted wherever these are decided by draft_probs.

    In Triton's interpreter by its first proof; trees and chi-squares take more than ten seconds there.
    """
    on = {scheme: caught_by for scheme in Scheme if scheme in RATIO_SCHEMES}
    quick = {scheme: caught_by[:1] for scheme in CHAIN_SCHEMES if caught_by[0] == "enumeration"}
    return _proof(title, on, on, quick, {scheme: caught_by[:1] for scheme in on if scheme not in quick})


LENIENT = _ratio_bug("acceptance 5 % too lenient", "enumeration", "chi-square")
LENIENT_MATCH = _proof(
    "target leaning 5 % towards the draft",
    {Scheme.EXACT_MATCH: ["enumeration"], Scheme.GUMBEL: ["seeded decoding"]},
    triton={Scheme.EXACT_MATCH: ["enumeration"]},
)
RESIDUAL = _ratio_bug("residual from the target", "enumeration")
SHARED_RECOVERY = _ratio_bug("draft noise shared with recovery", "chi-square")
SHARED_ACCEPTANCE = _ratio_bug("draft noise shared with acceptance", "chi-square")
PRUNING = _ratio_bug("sampled-token pruning", "enumeration")
ROUNDED = _proof(
    "target rounded to 2 decimals",
    {scheme: ["seeded decoding" if scheme is Scheme.GUMBEL else "enumeration"] for scheme in Scheme},
    {scheme: ["enumeration"] for scheme in Scheme if scheme in RATIO_SCHEMES},
    {scheme: ["enumeration"] for scheme in (*CHAIN_SCHEMES, Scheme.EXACT_MATCH)},
    {scheme: ["enumeration"] for scheme in TREE_SCHEMES},
)
KEYED_BY_TOKEN = _proof("acceptance noise keyed by token, not by round", {Scheme.BLOCK: ["chi-square"]}, {Scheme.BLOCK: ["chi-square"]})
DRAFT_KEYED_BY_TOKEN = _proof("draft noise keyed by token, not by round", {Scheme.BLOCK: ["chi-square"]})
OTHER_Q = _ratio_bug("ratio with other numbers than were sampled from (bfloat16)", "enumeration")
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
    """The two Markdown tables of docs/exactness.md: proofs of each verifier, and planted bugs."""
    lines = ["| scheme | " + " | ".join(proof.title for proof in PROOFS) + " |", "|---" * (len(PROOFS) + 1) + "|"]
    for backend, suffix in ((READABLE, ""), (FUSED, ", fused"), (TRITON, ", Triton")):
        for scheme in Scheme:
            counts = [str(proof.count(scheme, backend) or "–") for proof in PROOFS]
            lines.append(f"| `{scheme.value}`{suffix} | " + " | ".join(counts) + " |")
    lines += ["", "| planted bug | " + " | ".join(f"`{scheme.value}`" for scheme in Scheme) + " |", "|---" * (len(Scheme) + 1) + "|"]
    for bug in BUGS:
        caught = [
            ", ".join(
                [str(case) for one, case in bug.cases if one is scheme]
                + [f"{name} too" for name, backend in (("fused", FUSED), ("Triton", TRITON)) if bug.count(scheme, backend)]
            )
            or "–"
            for scheme in Scheme
        ]
        lines.append(f"| {bug.title} | " + " | ".join(caught) + " |")
    return "\n".join(lines)

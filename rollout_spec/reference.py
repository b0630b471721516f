"""The six schemes again, one request at a time in float64 Python: slow, readable, and independent of ``rollout_spec.verify``.

An oracle is written once, against a ``Chance`` that decides coins and draws. ``output_law`` runs it along every branch of every
decision and so gives the exact law of the output for a given tree; ``replay`` runs it along the branch that given noise takes, with
the same noise conventions as ``rollout_spec.verify``.

Shape legend: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout_spec.tree import NO_PARENT, DraftTree

Law = Sequence[float]  # [V] probabilities
Target = Callable[[tuple[int, ...]], Law]  # tokens emitted so far this round -> the target's law of the next one


@dataclass(frozen=True, kw_only=True)
class ReferenceTree:
    """One request's draft tree as plain numbers."""

    token_ids: tuple[int, ...]  # [N]
    parents: tuple[int, ...]  # [N]
    draft_laws: tuple[Law, ...]  # [N] over the target's vocabulary; empty for trees without draft_probs

    @staticmethod
    def of(tree: DraftTree, request: int, vocab_size: int) -> ReferenceTree:
        """Request ``request`` of a batch, with a reduced draft vocabulary spread over the whole one."""
        num_nodes = int(tree.num_nodes[request])
        laws = []
        for node in range(num_nodes if tree.draft_probs is not None else 0):
            assert tree.draft_probs is not None
            row = tree.draft_probs[request, node].double().tolist()
            ids = range(vocab_size) if tree.draft_token_ids is None else tree.draft_token_ids.tolist()
            law = [0.0] * vocab_size
            for token, prob in zip(ids, row, strict=True):
                law[token] = prob
            laws.append(tuple(law))
        return ReferenceTree(
            token_ids=tuple(tree.token_ids[request, :num_nodes].tolist()),
            parents=tuple(tree.parents[request, :num_nodes].tolist()),
            draft_laws=tuple(laws),
        )

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path_to(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to ``node``."""
        return () if node == NO_PARENT else (*self.path_to(self.parents[node]), node)

    def prefix(self, node: int) -> tuple[int, ...]:
        """Tokens on the path to ``node``."""
        return tuple(self.token_ids[n] for n in self.path_to(node))


@dataclass(frozen=True)
class Output:
    """What a round did: accepted nodes, and the tokens it emitted (one more)."""

    path: tuple[int, ...]
    token_ids: tuple[int, ...]


class Chance(Protocol):
    """Where an oracle's decisions come from; depth and trial say which noise decides in ``rollout_spec.verify``."""

    def coin(self, probability: float, depth: int, trial: int) -> bool:
        """True with the probability (clamped to 1)."""

    def draw(self, weights: Law, depth: int) -> int:
        """A token with probability proportional to its weight."""


Oracle = Callable[[ReferenceTree, Target, Chance], Output]


def rejection(tree: ReferenceTree, target: Target, chance: Chance) -> Output:
    """Leviathan 2023, algorithm 1."""
    for node in range(len(tree.token_ids)):
        token, draft = tree.token_ids[node], tree.draft_laws[node]
        law = target(tree.prefix(node - 1))
        if not chance.coin(law[token] / draft[token], node, 0):
            return _end(tree, node - 1, chance.draw(_residual(1.0, law, draft), node))
    last = len(tree.token_ids) - 1
    return _end(tree, last, chance.draw(target(tree.prefix(last)), last + 1))


def block(tree: ReferenceTree, target: Target, chance: Chance) -> Output:
    """Sun 2024, algorithm 2."""
    num_nodes = len(tree.token_ids)
    weights = [1.0]
    for node in range(num_nodes):
        token = tree.token_ids[node]
        weights.append(min(1.0, weights[-1] * target(tree.prefix(node - 1))[token] / tree.draft_laws[node][token]))
    accepted = 0
    for i in range(1, num_nodes + 1):
        if i < num_nodes:
            stop = _stop(sum(_positive(weights[i], target(tree.prefix(i - 1)), tree.draft_laws[i])), weights[i])
        else:
            stop = weights[i]
        if chance.coin(stop, i - 1, 0):
            accepted = i
    law = target(tree.prefix(accepted - 1))
    if accepted < num_nodes:
        law = _residual(weights[accepted], law, tree.draft_laws[accepted])
    return _end(tree, accepted - 1, chance.draw(law, accepted))


def exact_match(tree: ReferenceTree, target: Target, chance: Chance) -> Output:
    """Draw from the target and follow the tree as long as it holds what was drawn. The Gumbel-coupled scheme has the same law."""
    node, depth = NO_PARENT, 0
    while True:
        token = chance.draw(target(tree.prefix(node)), depth)
        child = next((child for child in tree.children(node) if tree.token_ids[child] == token), None)
        if child is None:
            return _end(tree, node, token)
        node, depth = child, depth + 1


def rejection_walk(tree: ReferenceTree, target: Target, chance: Chance) -> Output:
    """RRSw/o: siblings in draw order, each against what is left of p and q."""
    node, depth = NO_PARENT, 0
    while True:
        law = list(target(tree.prefix(node)))
        accepted = None
        children = tree.children(node)
        draft = list(tree.draft_laws[children[0]]) if children else []
        for trial, child in enumerate(children):
            token = tree.token_ids[child]
            if chance.coin(law[token] / draft[token], depth, trial):
                accepted = child
                break
            law = _residual(1.0, law, draft)
            draft = _without(draft, token)
        if accepted is None:
            return _end(tree, node, chance.draw(law, depth))
        node, depth = accepted, depth + 1


def traversal(tree: ReferenceTree, target: Target, chance: Chance) -> Output:
    """arXiv 2505.12398, algorithm 1, as the recursion it is: a subtree is refused leaf by leaf before its own root is tried."""
    tested = 0

    def visit(node: int, mass: float) -> Output | None:
        nonlocal tested
        law = list(target(tree.prefix(node)))
        children = tree.children(node)
        draft = list(tree.draft_laws[children[0]]) if children else []
        for child in children:
            if mass == 0:
                break  # neither this node nor anything below it can be accepted
            token = tree.token_ids[child]
            output = visit(child, min(1.0, mass * law[token] / draft[token]))
            if output is not None:
                return output
            left = _positive(mass, law, draft)
            law, mass = _normalised(left, law), _stop(sum(left), mass)
            draft = _without(draft, token)
        tested += 1
        accepted = chance.coin(mass, 0, tested - 1)
        return _end(tree, node, chance.draw(law, len(tree.path_to(node)))) if accepted else None

    output = visit(NO_PARENT, 1.0)
    assert output is not None, "the root is reached with mass 1"
    return output


ORACLES: dict[str, Oracle] = {
    "rejection": rejection,
    "block": block,
    "exact_match": exact_match,
    "gumbel": exact_match,
    "rejection_walk": rejection_walk,
    "traversal": traversal,
}


def output_law(oracle: Oracle, tree: ReferenceTree, target: Target) -> dict[Output, float]:
    """The probability of every output of a round on this tree, by running the oracle along every branch."""
    law: dict[Output, float] = {}
    script: list[_Choice] | None = []
    while script is not None:
        branch = _Branch(script)
        output = oracle(tree, target, branch)
        law[output] = law.get(output, 0.0) + branch.probability()
        script = branch.next_script()
    return law


def expected_accepted(oracle: Oracle, tree: ReferenceTree, target: Target) -> float:
    """Expected number of accepted tokens on this tree, not counting the recovered or bonus token."""
    return sum(prob * len(output.path) for output, prob in output_law(oracle, tree, target).items())


def replay(
    oracle: Oracle, tree: ReferenceTree, target: Target, accept: Callable[[int, int], float], recover: Callable[[int], float]
) -> Output:
    """The output that uniforms accept(depth, trial) and recover(depth) lead to."""
    return oracle(tree, target, _Noise(accept, recover))


@dataclass
class _Choice:
    """One decision on a branch: which of the options is taken, and how likely each is."""

    options: list[tuple[int, float]]
    taken: int = 0


class _Branch:
    """Takes the scripted options, then the first possible one of every new decision."""

    def __init__(self, script: list[_Choice]) -> None:
        self._choices, self._next = script, 0

    def coin(self, probability: float, depth: int, trial: int) -> bool:  # noqa: ARG002 - a branch needs no noise
        head = min(1.0, probability)
        return self._choose([(1, head), (0, 1.0 - head)]) == 1

    def draw(self, weights: Law, depth: int) -> int:  # noqa: ARG002 - a branch needs no noise
        total = sum(weights)
        return self._choose([(token, weight / total) for token, weight in enumerate(weights)])

    def probability(self) -> float:
        product = 1.0
        for choice in self._choices:
            product *= choice.options[choice.taken][1]
        return product

    def next_script(self) -> list[_Choice] | None:
        """The branch after this one in depth-first order, None after the last."""
        script = list(self._choices)
        while script and script[-1].taken + 1 == len(script[-1].options):
            script.pop()
        if not script:
            return None
        script[-1] = _Choice(script[-1].options, script[-1].taken + 1)
        return script

    def _choose(self, options: list[tuple[int, float]]) -> int:
        if self._next == len(self._choices):
            self._choices.append(_Choice([option for option in options if option[1] > 0]))
        choice = self._choices[self._next]
        self._next += 1
        return choice.options[choice.taken][0]


class _Noise:
    def __init__(self, accept: Callable[[int, int], float], recover: Callable[[int], float]) -> None:
        self._accept, self._recover = accept, recover

    def coin(self, probability: float, depth: int, trial: int) -> bool:
        return self._accept(depth, trial) < probability

    def draw(self, weights: Law, depth: int) -> int:
        level, below = self._recover(depth) * sum(weights), 0.0
        for token, weight in enumerate(weights):
            below += weight
            if below > level:
                return token
        return max(token for token, weight in enumerate(weights) if weight > 0)


def _positive(scale: float, law: Law, draft: Law) -> list[float]:
    """(w p - q)+"""
    return [max(scale * p - q, 0.0) for p, q in zip(law, draft, strict=True)]


def _residual(scale: float, law: Law, draft: Law) -> list[float]:
    """norm((w p - q)+), or p where that is empty."""
    return _normalised(_positive(scale, law, draft), law)


def _normalised(left: Law, law: Law) -> list[float]:
    """left / its sum, or the law where nothing is left."""
    mass = sum(left)
    return [weight / mass for weight in left] if mass > 0 else list(law)


def _stop(mass: float, scale: float) -> float:
    """h = Z / (Z + 1 - w), 0/0 = 1."""
    return mass / (mass + (1.0 - scale)) if mass + (1.0 - scale) > 0 else 1.0


def _without(draft: Law, token: int) -> list[float]:
    """norm(q without the token); q itself if nothing is left, as no further child can have been drawn then."""
    left = [0.0 if other == token else prob for other, prob in enumerate(draft)]
    mass = sum(left)
    return [prob / mass for prob in left] if mass > 0 else left


def _end(tree: ReferenceTree, node: int, token: int) -> Output:
    return Output(tree.path_to(node), (*tree.prefix(node), token))

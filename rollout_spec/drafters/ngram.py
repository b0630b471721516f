"""Prompt lookup: continue as the request itself continued the last time its latest tokens occurred.

Shape legend: B requests, T tokens of a request so far, N nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext, DrafterNeeds, RequestView
from rollout_spec.drafters.nodes import Nodes, pack
from rollout_spec.tree import NO_PARENT, DraftTree
from rollout_spec.verdict import Verdict

_NO_MATCH = 0  # continuations start at position 1 or later


@dataclass(frozen=True, kw_only=True)
class NGramConfig:
    """Settings of the n-gram drafter."""

    max_n: int = 5  # longest suffix looked up
    min_n: int = 2  # shortest: single tokens match everywhere and predict little
    max_matches: int = 8  # earlier occurrences of one suffix that may contribute branches to a tree
    max_nodes: int = 64  # of one request's tree

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise ValueError(f"n-gram lengths need 1 <= min_n <= max_n, got min_n = {self.min_n}, max_n = {self.max_n}")
        if self.max_matches < 1 or self.max_nodes < 1:
            raise ValueError(f"max_matches and max_nodes must be positive, got {self.max_matches} and {self.max_nodes}")


class NGramDrafter:
    """Drafts from each request's own tokens: the continuation of the latest earlier occurrence of its longest suffix of max_n to
    min_n tokens (Saxena 2023, "Prompt lookup decoding"). With a width, other occurrences and shorter suffixes add branches.

    A continuation that reaches the end of the text goes on reading its own draft, so text of period s drafts s, 2 s, ... tokens
    rightly. What is proposed is a function of the request's tokens alone.
    """

    name = "ngram"
    vocab_size: int | None = None

    def __init__(self, config: NGramConfig | None = None) -> None:
        self.config = config or NGramConfig()
        self.needs = DrafterNeeds()
        self._indices: dict[str, _NGramIndex] = {}

    def start(self, request: RequestView) -> None:
        index = self._indices[request.request_id] = _NGramIndex(self.config)
        index.read(request.token_ids)

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """[B, N] deterministic trees. ValueError for a request that was not started. Cost: O(max_n) a new token, none for old ones."""
        proposals = []
        for request, length in zip(context.requests, budget.draft_lengths.tolist(), strict=True):
            index = self._indices.get(request.request_id)
            if index is None:
                raise ValueError(f"request {request.request_id!r} was never started with the n-gram drafter, or has finished")
            index.read(request.token_ids)
            proposals.append(index.draft(length, budget) if length > 0 else Nodes())
        return pack(proposals, budget.draft_lengths.device)

    def observe(self, context: DraftContext, tree: DraftTree, verdict: Verdict) -> None:
        """Nothing to learn: the next ``propose`` reads the committed tokens."""

    def finish(self, request: RequestView) -> None:
        self._indices.pop(request.request_id, None)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:  # noqa: ARG002
        raise ValueError("the n-gram drafter has no weights to update")

    def target_updated(self, version: int) -> None:
        """Nothing to do: a request's own tokens stay its own."""


class _NGramIndex:
    """Where each n-gram of one request continues: a table of the latest place, and from each place a link to the one before."""

    def __init__(self, config: NGramConfig) -> None:
        self._config = config
        self._tokens: list[int] = []  # [T]
        sizes = range(config.min_n, config.max_n + 1)
        self._latest: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in sizes}
        self._earlier: dict[int, list[int]] = {n: [] for n in sizes}  # [T]: by start of the continuation

    def read(self, token_ids: Sequence[int]) -> None:
        """Index the tokens that are new since the last call."""
        tokens = self._tokens
        start = len(tokens)
        tokens.extend(token_ids[start:])
        for n, latest in self._latest.items():
            earlier = self._earlier[n]
            for position in range(start, len(tokens)):
                if position < n:
                    earlier.append(_NO_MATCH)
                    continue
                gram = tuple(tokens[position - n : position])
                earlier.append(latest.get(gram, _NO_MATCH))
                latest[gram] = position

    def draft(self, length: int, budget: Budget) -> Nodes:
        """Up to ``length`` tokens deep, as wide as the budget says, max_nodes in all."""
        length = min(length, self._config.max_nodes)
        if max(budget.tree_width) == 1:
            start = next(self._matches(), _NO_MATCH)
            return Nodes.chain(self._continuation(start, length)) if start != _NO_MATCH else Nodes()
        nodes = Nodes()
        children: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        num_children: dict[int, int] = {}
        for start in self._matches():
            parent = NO_PARENT
            for depth, token in enumerate(self._continuation(start, length)):
                node = children.get((parent, token))
                if node is None:
                    if len(nodes) == self._config.max_nodes or num_children.get(parent, 0) == budget.width_at(depth):
                        break
                    node = children[parent, token] = nodes.add(token, parent)
                    num_children[parent] = num_children.get(parent, 0) + 1
                parent = node
        return nodes

    def _matches(self) -> Iterator[int]:
        """Starts of continuations, each once: longest suffix first, then latest first."""
        seen: set[int] = set()
        for n in reversed(self._latest):
            if len(self._tokens) < n:
                continue
            start = self._latest[n].get(tuple(self._tokens[-n:]), _NO_MATCH)
            for _ in range(self._config.max_matches):
                if start == _NO_MATCH:
                    break
                if start not in seen:
                    seen.add(start)
                    yield start
                start = self._earlier[n][start]

    def _continuation(self, start: int, length: int) -> list[int]:
        """``length`` tokens from ``start``; past the end of the text the continuation repeats with the period it implies."""
        tokens = self._tokens[start : start + length]
        period = len(tokens)
        while len(tokens) < length:
            tokens.extend(tokens[:period][: length - len(tokens)])
        return tokens

"""Tiny targets and drafters whose whole joint law fits in a table, and every draft they can make.

Shape legend: M drafts, R rows, N nodes, V vocabulary, L length of a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec.tree import NO_PARENT, DraftTree, Draw


@dataclass(frozen=True)
class TableModel:
    """A language model as tables: ``tables[d][code]`` is the law of the next token after the d tokens that ``code`` spells in base V."""

    tables: tuple[Tensor, ...]  # tables[d]: [V**d, V] float64

    @property
    def vocab_size(self) -> int:
        return self.tables[0].shape[1]

    @property
    def max_length(self) -> int:
        return len(self.tables)

    def after(self, prefix: Sequence[int]) -> TableModel:
        """The model as it goes on after a prefix."""
        code = 0
        for token in prefix:
            code = code * self.vocab_size + token
        rest = self.tables[len(prefix) :]
        return TableModel(tuple(table.view(self.vocab_size ** len(prefix), -1, self.vocab_size)[code] for table in rest))

    def continuation(self, start: int, length: int) -> Tensor:
        """[V**start, V**(length - start)] law of the tokens start .. length - 1 given the first start ones."""
        law = torch.ones(self.vocab_size**start, 1, dtype=torch.float64)
        for depth in range(start, length):
            step = self.tables[depth].view(self.vocab_size**start, -1, self.vocab_size)
            law = (law[:, :, None] * step).flatten(1)
        return law

    def joint(self, length: int) -> Tensor:
        """[V**length] law of the first tokens."""
        return self.continuation(0, length)[0]

    def law(self, prefix: tuple[int, ...]) -> list[float]:
        """[V] the next token's law, as plain numbers."""
        row: list[float] = self.after(prefix).tables[0][0].tolist()
        return row


def random_model(vocab_size: int, length: int, seed: int, *, zeros: bool = False) -> TableModel:
    """Dirichlet(1) rows; with zeros, one token of every row is impossible."""
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for depth in range(length):
        rows = -torch.rand(vocab_size**depth, vocab_size, generator=generator, dtype=torch.float64).log()
        if zeros:
            rows[torch.arange(rows.shape[0]), torch.randint(vocab_size, (rows.shape[0],), generator=generator)] = 0.0
        tables.append(rows / rows.sum(-1, keepdim=True))
    return TableModel(tuple(tables))


def without_token(model: TableModel, token: int) -> TableModel:
    """The model with one token impossible everywhere."""
    tables = []
    for table in model.tables:
        rows = table.clone()
        rows[:, token] = 0.0
        tables.append(rows / rows.sum(-1, keepdim=True))
    return TableModel(tuple(tables))


def tree_parents(widths: Sequence[int]) -> list[int]:
    """Parents of the full tree with ``widths[d]`` children for each node of depth d, breadth first."""
    parents: list[int] = []
    layer = [NO_PARENT]
    for width in widths:
        first = len(parents)
        parents += [node for node in layer for _ in range(width)]
        layer = list(range(first, len(parents)))
    return parents


class Drafter:
    """Drafts trees of one shape from a table model, either every possible one or one for each row of uniforms."""

    def __init__(self, model: TableModel, widths: Sequence[int], draw: Draw) -> None:
        self.model, self.draw, self.parents = model, draw, tree_parents(widths)

    def every_draft(self) -> tuple[DraftTree, Tensor]:
        """All drafts with positive probability, and [M] their probabilities."""
        token_ids, probs = torch.zeros(1, 0, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
        rows: list[Tensor] = []
        for node in range(len(self.parents)):
            left = self._left(token_ids, node)  # [M, V]
            if self.draw in (Draw.DETERMINISTIC, Draw.GUMBEL):
                left = torch.nn.functional.one_hot(left.argmax(-1), left.shape[1]).double()
            index, token = left.nonzero(as_tuple=True)
            probs = probs[index] * left[index, token]
            token_ids = torch.cat([token_ids[index], token[:, None]], dim=1)
            rows = [row[index] for row in rows]
            rows.append(self._row(token_ids, node))
        return self._tree(token_ids, rows), probs

    def sample(self, uniforms: Tensor) -> DraftTree:
        """One tree for each row of uniforms [R, N]."""
        token_ids = torch.zeros(uniforms.shape[0], 0, dtype=torch.int64)
        rows: list[Tensor] = []
        for node in range(len(self.parents)):
            cdf = self._left(token_ids, node).cumsum(-1)
            token = (cdf <= (uniforms[:, node] * cdf[:, -1])[:, None]).sum(-1)
            rows.append(self._row(token_ids, node))
            token_ids = torch.cat([token_ids, token[:, None]], dim=1)
        return self._tree(token_ids, rows)

    def target_rows(self, target: TableModel, tree: DraftTree) -> Tensor:
        """[M, N + 1, V] the target after the root and after every node."""
        rows = [target.tables[0].expand(tree.batch_size, -1)]
        for node in range(len(self.parents)):
            path = [*self._path(self.parents[node]), node]
            rows.append(target.tables[len(path)][self._code(tree.token_ids, path)])
        return torch.stack(rows, dim=1)

    def _path(self, node: int) -> list[int]:
        return [] if node == NO_PARENT else [*self._path(self.parents[node]), node]

    def _code(self, token_ids: Tensor, path: Sequence[int]) -> Tensor:
        code = torch.zeros(token_ids.shape[0], dtype=torch.int64)
        for node in path:
            code = code * self.model.vocab_size + token_ids[:, node]
        return code

    def _row(self, token_ids: Tensor, node: int) -> Tensor:
        """[M, V] the drafter's law at the node's parent."""
        path = self._path(self.parents[node])
        return self.model.tables[len(path)][self._code(token_ids, path)]

    def _left(self, token_ids: Tensor, node: int) -> Tensor:
        """[M, V] the law that the node is drawn from: earlier siblings are taken out."""
        law = self._row(token_ids, node).clone()
        for sibling in range(node):
            if self.parents[sibling] == self.parents[node]:
                law[torch.arange(law.shape[0]), token_ids[:, sibling]] = 0.0
        return law / law.sum(-1, keepdim=True)

    def _tree(self, token_ids: Tensor, rows: list[Tensor]) -> DraftTree:
        num_drafts, num_nodes = token_ids.shape
        return DraftTree(
            token_ids=token_ids,
            parents=torch.tensor(self.parents, dtype=torch.int64).expand(num_drafts, -1),
            num_nodes=torch.full((num_drafts,), num_nodes),
            draw=self.draw,
            draft_probs=torch.stack(rows, dim=1) if rows else None,
        )

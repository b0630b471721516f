"""From cells to laws of fixed-length prefixes, and what they must equal.

Shape legend: M drafts, C cells, V vocabulary, L length of a prefix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from exactness.blackbox import Cells, Guide, gumbel_cells, partition
from exactness.models import Drafter, TableModel
from rollout_spec.reference import ORACLES, Output, ReferenceTree, output_law
from rollout_spec.verify import Scheme, VerifyFn

MakeDrafter = Callable[[TableModel], Drafter]  # a drafter for what follows a prefix


def round_cells(verify: VerifyFn, scheme: Scheme, drafter: Drafter, target: TableModel, guide: Guide | None = None) -> tuple[Cells, Tensor]:
    """All verdicts on all drafts of one round, and [C] their probabilities over draft and noise."""
    tree, draft_weights = drafter.every_draft()
    target_probs = drafter.target_rows(target, tree)
    if scheme is Scheme.GUMBEL:
        length = int(tree.depths().max()) + 1
        cells = gumbel_cells(verify, tree, target_probs, target.joint(length), length)
    else:
        cells = partition(verify, tree, target_probs, scheme, guide)
    return cells, cells.weights * draft_weights[cells.drafts]


def prefix_law(cells: Cells, weights: Tensor, target: TableModel, length: int) -> Tensor:
    """[V**L] law of the first L tokens when a round's output is cut at L, or continued by the target itself up to L."""
    vocab_size = target.vocab_size
    law = torch.zeros(vocab_size**length, dtype=torch.float64)
    num_tokens = (cells.verdict.num_accepted + 1).clamp_max(length)
    for emitted in num_tokens.unique().tolist():
        rows = num_tokens == emitted
        code = torch.zeros(int(rows.sum()), dtype=torch.int64)
        for depth in range(emitted):
            code = code * vocab_size + cells.token_ids[rows, depth]
        by_prefix = torch.zeros(vocab_size**emitted, dtype=torch.float64).index_add_(0, code, weights[rows])
        law += (by_prefix[:, None] * target.continuation(emitted, length)).flatten()
    return law


def law_error(cells: Cells, weights: Tensor, target: TableModel) -> float:
    """Largest error of one round's output law, over all prefixes as long as the longest output."""
    length = cells.token_ids.shape[1]
    return float((prefix_law(cells, weights, target, length) - target.joint(length)).abs().max())


def many_rounds_law(
    verify: VerifyFn, scheme: Scheme, make: MakeDrafter, draft: TableModel, target: TableModel, length: int, guide: Guide | None = None
) -> Tensor:
    """[V**L] law of the first L tokens when rounds follow one another, each drafting after what the ones before emitted."""
    vocab_size = target.vocab_size
    if length == 0:
        return torch.ones(1, dtype=torch.float64)
    cells, weights = round_cells(verify, scheme, make(draft), target, guide)
    by_output: dict[tuple[int, ...], float] = defaultdict(float)
    for row, count, weight in zip(cells.token_ids.tolist(), (cells.verdict.num_accepted + 1).tolist(), weights.tolist(), strict=True):
        by_output[tuple(row[: min(count, length)])] += weight
    law = torch.zeros((vocab_size,) * length, dtype=torch.float64)
    for output, weight in by_output.items():
        if weight > 0:
            rest = many_rounds_law(verify, scheme, make, draft.after(output), target.after(output), length - len(output), guide)
            law[output] += weight * rest.view((vocab_size,) * (length - len(output)))
    return law.flatten()


def oracle_error(cells: Cells, scheme: Scheme, drafter: Drafter, target: TableModel, max_drafts: int = 24) -> float:
    """Largest difference, over drafts and outputs, between the black box's law on one draft and the reference's."""
    tree, _ = drafter.every_draft()
    laws: dict[int, dict[Output, float]] = defaultdict(lambda: defaultdict(float))
    path = cells.verdict.path.tolist()
    for row, (draft, weight, count) in enumerate(
        zip(cells.drafts.tolist(), cells.weights.tolist(), cells.verdict.num_accepted.tolist(), strict=True)
    ):
        output = Output(tuple(path[row][:count]), tuple(cells.token_ids[row, : count + 1].tolist()))
        laws[draft][output] += weight
    worst = 0.0
    for draft in range(0, tree.batch_size, max(1, tree.batch_size // max_drafts)):
        expected = output_law(ORACLES[scheme.value], ReferenceTree.of(tree, draft, target.vocab_size), target.law)
        for output in expected.keys() | laws[draft].keys():
            worst = max(worst, abs(expected.get(output, 0.0) - laws[draft].get(output, 0.0)))
    return worst

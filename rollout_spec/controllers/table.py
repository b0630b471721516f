"""BatchTableBudget: a draft length by the number of running requests, from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rollout_spec.budget import Budget, BudgetSignals, Decision, check_widths, useful_lengths


@dataclass(frozen=True, kw_only=True)
class BatchTableBudget:
    """``table``: (largest number of requests, draft length), ascending; more requests than the last entry says are not drafted for."""

    table: tuple[tuple[int, int], ...]
    tree_width: tuple[int, ...] = (1,)
    name: str = "batch_table"

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.table]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1 or min(length for _, length in self.table) < 0:
            raise ValueError(f"a batch table needs ascending numbers of requests, each with a draft length of 0 or more; got {self.table}")
        check_widths(self.tree_width)

    @classmethod
    def load(cls, path: Path, tree_width: tuple[int, ...] = (1,)) -> BatchTableBudget:
        """From a JSON object of number of requests to draft length: {"4": 4, "16": 1} drafts 4 up to 4 requests, 1 up to 16, else none.

        Raises ValueError that says what is wrong with the file.
        """
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            pairs = sorted((int(size), int(length)) for size, length in given.items())
        except (OSError, ValueError, TypeError, AttributeError) as error:
            wanted = 'give a JSON object of requests to draft length, like {"4": 4, "16": 1}'
            raise ValueError(f"batch table {path}: {wanted} ({error})") from None
        return cls(table=tuple(pairs), tree_width=tree_width)

    def decide(self, signals: BudgetSignals, state: object) -> tuple[Budget, object]:
        length = next((length for size, length in self.table if signals.remaining.numel() <= size), 0)
        return Budget(
            draft_lengths=useful_lengths(signals, length), tree_width=self.tree_width, decision=Decision(reason="table", holds=True)
        ), state

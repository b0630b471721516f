"""RequestRows: some numbers for each running request, in arrays, so that a round takes a few operations and no loop.

Shape legend: B requests in a round.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class RequestRows:
    """A number of each kind for every running request, in arrays."""

    FIELDS = 5
    # Mean entropy over the batch's, tokens it rests on; sum and number of residuals; first-depth observations since the policy's update.
    ENTROPY, TOKENS, RESIDUAL, COUNT, SEEN = range(FIELDS)

    def __init__(self) -> None:
        self.values: Array = np.zeros((8, self.FIELDS))
        self._row_of: dict[str, int] = {}
        self._free = list(range(8))
        self._last: tuple[tuple[str, ...], Ints] = ((), np.empty(0, np.int64))

    def of(self, request_ids: tuple[str, ...]) -> Ints:
        """[B] rows, new ones zeroed."""
        if request_ids == self._last[0]:
            return self._last[1]
        found = np.array([self._row(request_id) for request_id in request_ids], dtype=np.int64)
        self._last = (request_ids, found)
        return found

    def _row(self, request_id: str) -> int:
        row = self._row_of.get(request_id)
        if row is None:
            if not self._free:
                size = len(self.values)
                self.values = np.concatenate([self.values, np.zeros_like(self.values)])
                self._free = list(range(size, 2 * size))
            row = self._row_of[request_id] = self._free.pop()
            self.values[row] = 0.0
        return row

    def drop(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            self._last = ((), np.empty(0, np.int64))

"""LogitsTarget: the target distribution of a round, computed only at the rows a verifier reaches.

Shape legend: B requests, R rows of the round's forward, Q rows asked for, V vocabulary.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_spec.engine.kv import KVSlots
from rollout_spec.engine.rounds import round_input
from rollout_spec.engine.runner import ModelRunner
from rollout_spec.engine.running import RunningRequest, last_tokens, slot_indices
from rollout_spec.sampling import RowHistory, is_plain, needs_history, only_truncates, process_logits, truncations
from rollout_spec.tree import DraftTree
from rollout_spec.verify import AllRows, TokenScores

# Up to this many rows the head costs at most twice what one row costs (its weights are read once), so one call for all rows of a round
# beats one call for each depth that is reached.
EAGER_ROWS = 24


class LogitsTarget:
    """Rows of one round: row_offsets[b] is request b's root, row_offsets[b] + 1 + n its node n.

    A request whose logits are not finite is listed in ``failed``; its rows read as a point mass on token 0 so that the others go on.
    """

    def __init__(
        self,
        *,
        hidden: Tensor,  # [R, H]
        runner: ModelRunner,
        row_offsets: Tensor,  # [B + 1]
        tree: DraftTree,
        running: Sequence[RunningRequest],  # B
        temperature: float | None = None,  # instead of the requests' own
    ) -> None:
        self.batch_size, self.vocab_size = len(running), runner.vocab_size
        self.head_s = 0.0
        self.failed: set[int] = set()
        self._hidden, self._head, self._row_offsets, self._tree = hidden, runner.logits, row_offsets, tree
        self._ops = runner.ops
        self._running = running
        self._histories: dict[int, RowHistory] = {}  # of the requests' roots
        self._sampling = [request.request.sampling for request in running]
        self._is_plain = all(request.is_plain for request in running)
        if temperature is not None:
            self._sampling = [dataclasses.replace(params, temperature=temperature) for params in self._sampling]
            self._is_plain = all(is_plain(params) for params in self._sampling)
        self._only_truncates = all(only_truncates(params) for params in self._sampling)
        self._raw_is_processed = self._is_plain and all(params.temperature == 1.0 for params in self._sampling)
        # Rows are computed all at once, or in chunks as verifiers ask; chunks are never concatenated (a row is V numbers wide).
        self._raw: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self._entropies: list[Tensor] = []
        self._is_whole = False  # one chunk holds all rows in order
        self._chunk = self._index = torch.empty(0, dtype=torch.int64)  # [R] which chunk holds a row (-1 = none yet), and where in it

    def log_probs(self, requests: Tensor, nodes: Tensor) -> Tensor:
        """[Q, V] float32 log-probabilities of the processed target after the nodes (NO_PARENT = the root)."""
        rows = self._row_offsets[requests] + nodes + 1
        chunks, index = self._locate(rows)
        if len(chunks) == 1:
            return _take(self._log_probs[chunks[0]], index)
        out = torch.empty(rows.numel(), self.vocab_size)
        for chunk in chunks:
            asked = self._chunk[rows] == chunk
            out[asked] = self._log_probs[chunk][index[asked]]
        return out

    def all_rows(self, *, needed: bool) -> AllRows | None:
        """Every row, computed now if there are few or all are needed; None if that would be wasteful, or the rows lie scattered."""
        num_rows = self._hidden.shape[0]
        if not self._log_probs and (needed or num_rows <= EAGER_ROWS):
            self._compute(range(num_rows))
        if not self._is_whole:
            return None
        entropies = self._entropies[0] if self._raw_is_processed else None
        return AllRows(log_probs=self._log_probs[0], roots=self._row_offsets[:-1], entropies=entropies)

    def draw(self, log_probs: Tensor, uniforms: Tensor) -> Tensor:
        """[R] int64 tokens by inverse CDF, on the model's operations."""
        return self._ops.inverse_cdf(log_probs, uniforms)

    def score(self, requests: Tensor, nodes: Tensor, token_ids: Tensor) -> TokenScores:
        """Log-probabilities of tokens sampled at the nodes, and the entropy there, each [Q] float32."""
        rows = self._row_offsets[requests] + nodes + 1
        chunks, index = self._locate(rows)
        if len(chunks) == 1:
            return self._score_chunk(chunks[0], index, token_ids)
        raw, processed, entropies = torch.empty(3, rows.numel()).unbind()
        for chunk in chunks:
            asked = self._chunk[rows] == chunk
            scores = self._score_chunk(chunk, index[asked], token_ids[asked])
            raw[asked], processed[asked], entropies[asked] = scores.raw_logprobs, scores.processed_logprobs, scores.entropies
        return TokenScores(raw_logprobs=raw, processed_logprobs=processed, entropies=entropies)

    def _score_chunk(self, chunk: int, index: Tensor, token_ids: Tensor) -> TokenScores:
        processed = raw = self._log_probs[chunk][index, token_ids]
        if not self._raw_is_processed:
            logits = _take(self._raw[chunk], index).float()
            raw = logits.gather(1, token_ids[:, None])[:, 0] - logits.logsumexp(dim=-1)
        return TokenScores(raw_logprobs=raw, processed_logprobs=processed, entropies=self._entropies[chunk][index])

    def _locate(self, rows: Tensor) -> tuple[list[int], Tensor]:
        """The chunks that hold the rows [Q], computed if need be, and [Q] where each row lies in its own."""
        num_rows = self._hidden.shape[0]
        if not self._log_probs and num_rows <= EAGER_ROWS:
            self._compute(range(num_rows))
        if self._is_whole:
            return [0], rows
        if not self._chunk.numel():
            self._chunk, self._index = torch.full((num_rows,), -1), torch.zeros(num_rows, dtype=torch.int64)
        missing = rows[self._chunk[rows] < 0].unique()
        if missing.numel():
            self._chunk[missing], self._index[missing] = len(self._log_probs), torch.arange(missing.numel())
            self._compute(missing.tolist())
        chunks: list[int] = [0] if len(self._log_probs) == 1 else self._chunk[rows].unique().tolist()
        return chunks, self._index[rows]

    def _compute(self, rows: Sequence[int]) -> None:
        """Logits and processed log-probabilities of more rows, in ascending order: the next chunk."""
        self._is_whole = len(rows) == self._hidden.shape[0]
        began = time.perf_counter()
        logits = self._head(self._hidden if self._is_whole else self._hidden[rows])
        self.head_s += time.perf_counter() - began
        offsets = self._row_offsets.tolist()
        requests = [bisect.bisect_right(offsets, row) - 1 for row in rows]
        # Rows that only divide by a temperature and truncate skip the processors: the kernel does all in one pass.
        params = [self._sampling[request] for request in requests]
        if self._is_plain:
            stats = self._ops.log_softmax_stats(logits, torch.tensor([1.0 / row.temperature for row in params]))
        elif self._only_truncates:
            stats = self._ops.truncated_log_softmax(logits, truncations(params))
        else:
            histories = [self._history(request, row - offsets[request] - 1) for request, row in zip(requests, rows, strict=True)]
            stats = self._ops.log_softmax_stats(process_logits(logits.float(), params, histories), torch.ones(len(rows)))
        log_probs, finite = stats.log_probs, stats.entropies.isfinite()
        if not bool(finite.all()):
            self.failed |= {request for request, fine in zip(requests, finite.tolist(), strict=True) if not fine}
            log_probs[~finite] = torch.nn.functional.one_hot(torch.tensor(0), self.vocab_size).log()
        self._log_probs.append(log_probs)
        self._entropies.append(stats.entropies)
        self._raw.append(logits)

    def _history(self, request: int, node: int) -> RowHistory:
        """Prompt, output so far, and the path to this node: what this row's processors see."""
        known = self._histories.get(request)
        if known is None:
            running = self._running[request]
            if needs_history(running.request.sampling):
                known = RowHistory(prompt_token_ids=running.tokens[: running.num_prompt], output_token_ids=running.output)
            else:
                known = RowHistory(prompt_token_ids=(), output_token_ids=())
            self._histories[request] = known
        path: list[int] = []
        while node >= 0:
            path.append(int(self._tree.token_ids[request, node]))
            node = int(self._tree.parents[request, node])
        # The same prompt and output objects for every node: penalties count them once a request, not once a row.
        return dataclasses.replace(known, path_token_ids=path[::-1]) if path else known


def _take(chunk: Tensor, index: Tensor) -> Tensor:
    """chunk[index] without a copy when that is the whole chunk in order."""
    if index.numel() == chunk.shape[0] and torch.equal(index, torch.arange(chunk.shape[0])):
        return chunk
    return chunk[index]


class TargetAccess:
    """Lets a drafter run the target on a partial tree of this round (drafter.RunTarget).

    The nodes' K/V go where verification will overwrite them.
    """

    def __init__(self, runner: ModelRunner, kv: KVSlots, running: Sequence[RunningRequest], context_lengths: Tensor) -> None:
        self._runner, self._kv, self._running, self._context_lengths = runner, kv, running, context_lengths

    def __call__(self, tree: DraftTree, temperature: float | None) -> LogitsTarget:
        step = round_input(tree, last_tokens(self._running), self._context_lengths, slot_indices(self._running))
        return LogitsTarget(
            hidden=self._runner.forward(step, self._kv).hidden,
            runner=self._runner,
            row_offsets=step.plan.row_offsets,
            tree=tree,
            running=self._running,
            temperature=temperature,
        )

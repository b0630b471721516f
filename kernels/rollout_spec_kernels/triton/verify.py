"""Verification from the model's logits in Triton: temperature, truncation, softmax and acceptance without a row of probabilities.

One kernel takes each row's normaliser, entropy and support (rows.py); then chains (rejection, block: chains.py) have a program a row for
what target and draft share and one a request for the decision; on trees (exact match, its Gumbel-coupled form: match.py; rejection walk,
traversal: trees.py) there is one a request. Rows with penalties, biases or masks are csrc/verify.cu's, which takes log-probabilities.

Shape legend: B requests, N nodes, D depth of the deepest node, R rows, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from rollout_spec.tree import DraftTree
from rollout_spec.truncation import Truncations
from rollout_spec.verdict import Verdict
from rollout_spec.verify import RATIO_SCHEMES, CounterNoise, DenseNoise, Scheme, VerifyNoise, check_pairing
from rollout_spec.verify.ratio import SUM_TOLERANCE
from rollout_spec_kernels.triton import chains, match, trees
from rollout_spec_kernels.triton.rows import CHUNK, RowStats, row_stats, truncates
from rollout_spec_kernels.uniforms import Uniforms


def verify_logits(
    tree: DraftTree,
    logits: Tensor,  # [R, V] of any float dtype: request b's root is row roots[b], its node n row roots[b] + 1 + n
    roots: Tensor,  # [B] int64
    truncations: Truncations,  # B, on the CPU, of all rows of a request (requests that share rows share these): sampling.truncations
    noise: VerifyNoise,
    scheme: Scheme,
) -> Verdict:
    """The scheme's verdict on softmax(logits / temperature) over the support of min-p, top-k and top-p (truncation.truncate_).

    A CounterNoise is drawn in the kernels, from its keys; of any other noise the uniforms are handed to them, and Gumbel noise if it is
    a DenseNoise. rollout_spec.verify.verify has the laws and their proofs. Raises ValueError for a scheme that is not exact on the tree,
    for sizes that do not fit, for draft_probs that do not sum to 1, and for rows that define no distribution.
    """
    batch = tree.batch_size
    if not truncations.temperatures.numel() == roots.numel() == batch:
        raise ValueError(f"{batch} trees need as many roots and truncations; got {roots.numel()} and {truncations.temperatures.numel()}")
    if batch and float(truncations.temperatures.min()) <= 0:
        raise ValueError("temperature 0 is no softmax: greedy rows are verified from log-probabilities")
    check_pairing(scheme, tree)
    tree.check(logits.shape[1])
    tree = replace(tree, token_ids=tree.token_ids.contiguous(), parents=tree.parents.contiguous(), num_nodes=tree.num_nodes.contiguous())
    drawn = _Noise.of(tree, noise, scheme, logits)
    rows = _Rows.of(tree, logits.contiguous(), roots, truncations)
    work = _Work.empty(tree)
    if batch and scheme in RATIO_SCHEMES and tree.max_nodes > 0:
        _decide_by_ratio(work, tree, rows, drawn, scheme)
    elif batch:
        match.follow[(batch,)](
            tree.token_ids, tree.parents, tree.num_nodes, *rows.pointers, drawn.seeds, drawn.positions, drawn.recover, drawn.gumbels,
            *work.pointers, tree.max_nodes, logits.shape[1],
            block_nodes=triton.next_power_of_2(max(tree.max_nodes, 1)), races=scheme is Scheme.GUMBEL, chunk=CHUNK,
        )  # fmt: skip
    if bool((work.next_token_ids < 0).any()):
        raise ValueError(f"no distribution to draw from: request {int((work.next_token_ids < 0).nonzero()[0, 0])} has a row without one")
    return work.verdict(tree, rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Noise:
    """A round's noise as the kernels take it: keys, and what is handed over instead of being drawn from them."""

    seeds: Tensor  # [B] int64
    positions: Tensor  # [B] int64
    accept: Tensor | None = None  # [B, N + 1] float64 (Uniforms)
    recover: Tensor | None = None  # [B, N + 1] float64 (Uniforms)
    gumbels: Tensor | None = None  # [B, N + 1, V] float32, by depth

    @staticmethod
    def of(tree: DraftTree, noise: VerifyNoise, scheme: Scheme, logits: Tensor) -> _Noise:
        if isinstance(noise, CounterNoise):
            if len(noise.seeds) != tree.batch_size:
                raise ValueError(f"{tree.batch_size} trees need as many seeds and positions; got {len(noise.seeds)}")
            keys = ([_signed(value) for value in values] for values in (noise.seeds, noise.positions))
            seeds, positions = (torch.tensor(values, dtype=torch.int64, device=logits.device) for values in keys)
            return _Noise(seeds=seeds, positions=positions)
        seeds = positions = torch.zeros(tree.batch_size, dtype=torch.int64, device=logits.device)
        if scheme is Scheme.GUMBEL:
            if not isinstance(noise, DenseNoise) or noise.gumbel is None:
                raise ValueError("races run inside the kernel: hand over a CounterNoise, or a DenseNoise with Gumbel noise")
            gumbels = torch.zeros(tree.batch_size, tree.max_nodes + 1, logits.shape[1], device=logits.device)
            given = noise.gumbel[:, : tree.max_nodes + 1]
            gumbels[:, : given.shape[1]] = given
            return _Noise(seeds=seeds, positions=positions, gumbels=gumbels)
        uniforms = Uniforms.of(tree, noise, scheme)
        assert uniforms is not None, "tree.check lets no such parents pass"
        return _Noise(seeds=seeds, positions=positions, accept=uniforms.accept, recover=uniforms.recover)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """The target's rows and what is known of each."""

    logits: Tensor  # [R, V]
    roots: Tensor  # [B] int64
    inverse: Tensor  # [B] float32, of the temperatures
    stats: RowStats

    @staticmethod
    def of(tree: DraftTree, logits: Tensor, roots: Tensor, truncations: Truncations) -> _Rows:
        """Rows that belong to no request are read at temperature 1 and kept whole."""
        device, num_rows = logits.device, tree.num_nodes + 1
        requests = torch.repeat_interleave(torch.arange(tree.batch_size, device=device), num_rows)
        order = torch.arange(requests.numel(), device=device) - torch.nn.functional.pad(num_rows.cumsum(0), (1, 0))[requests]
        own = roots[requests] + order

        def spread(values: Tensor, neutral: float) -> Tensor:
            values = values.to(device)
            return values.new_full(logits.shape[:1], neutral).index_copy(0, own, values[requests])

        of_rows = Truncations(
            temperatures=spread(truncations.temperatures, 1.0),
            top_k=spread(truncations.top_k, 0),
            top_p=spread(truncations.top_p, 1.0),
            min_p=spread(truncations.min_p, 0.0),
        )
        stats = row_stats(logits, of_rows, may_truncate=truncates(truncations))
        return _Rows(logits=logits, roots=roots, inverse=truncations.temperatures.to(device).reciprocal(), stats=stats)

    @property
    def pointers(self) -> tuple[Tensor | None, ...]:
        return self.logits, self.roots, self.inverse, self.stats.log_normalisers, self.stats.support


@dataclass(frozen=True, kw_only=True, eq=False)
class _Work:
    """What the kernels write."""

    path: Tensor  # [B, N] int64
    num_accepted: Tensor  # [B] int64
    next_token_ids: Tensor  # [B] int64, -1 where there was no distribution
    is_bonus: Tensor  # [B] int8
    accept_probs: Tensor  # [B, N] float64

    @staticmethod
    def empty(tree: DraftTree) -> _Work:
        shape, device = (tree.batch_size, tree.max_nodes), tree.device
        return _Work(
            path=torch.full(shape, -1, dtype=torch.int64, device=device),
            num_accepted=torch.empty(tree.batch_size, dtype=torch.int64, device=device),
            next_token_ids=torch.empty(tree.batch_size, dtype=torch.int64, device=device),
            is_bonus=torch.empty(tree.batch_size, dtype=torch.int8, device=device),
            accept_probs=torch.full(shape, torch.nan, dtype=torch.float64, device=device),
        )

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        return self.path, self.num_accepted, self.next_token_ids, self.is_bonus, self.accept_probs

    def verdict(self, tree: DraftTree, of: _Rows) -> Verdict:
        """The verdict with the scores of every emitted token, cut to the deepest node."""
        depth, stats = tree.max_depth(), of.stats
        path = self.path[:, :depth]
        verdict = Verdict(
            path=path,
            num_accepted=self.num_accepted,
            next_token_ids=self.next_token_ids,
            is_bonus=self.is_bonus.bool(),
            accept_probs=self.accept_probs[:, :depth],
        )
        rows = of.roots[:, None] + torch.nn.functional.pad(path, (1, 0), value=-1) + 1  # [B, D + 1]
        emitted = torch.arange(depth + 1, device=path.device) <= self.num_accepted[:, None]
        rows = torch.where(emitted, rows, of.roots[:, None])
        chosen = of.logits[rows, verdict.emitted(tree).clamp_min(0)].float()

        def spread(values: Tensor) -> Tensor:
            return torch.where(emitted, values, torch.nan)

        return Verdict(
            path=path,
            num_accepted=verdict.num_accepted,
            next_token_ids=verdict.next_token_ids,
            is_bonus=verdict.is_bonus,
            accept_probs=verdict.accept_probs,
            raw_logprobs=spread(chosen - stats.raw_log_normalisers[rows]),
            processed_logprobs=spread(chosen * of.inverse[:, None] - stats.log_normalisers[rows]),
            entropies=spread(stats.entropies[rows]),
        )


def _decide_by_ratio(work: _Work, tree: DraftTree, rows: _Rows, noise: _Noise, scheme: Scheme) -> None:
    """The schemes that divide by q: chains with every row's sums side by side and then the decisions, trees step by step."""
    assert tree.draft_probs is not None
    batch, num_nodes, vocab_size, device = tree.batch_size, tree.max_nodes, rows.logits.shape[1], rows.logits.device
    draft_probs, names = tree.draft_probs.float().contiguous(), tree.draft_token_ids
    column_of = torch.full((1 if names is None else vocab_size,), -1, dtype=torch.int32, device=device)
    if names is not None:
        column_of[names] = torch.arange(names.numel(), dtype=torch.int32, device=device)
    elif draft_probs.shape[2] != vocab_size:
        raise ValueError(f"draft_probs have {draft_probs.shape[2]} columns, the vocabulary {vocab_size}: name them in draft_token_ids")
    _check_tokens(tree, draft_probs, None if names is None else column_of)
    stages = torch.empty(batch, num_nodes + 1, 3, dtype=torch.float32, device=device)
    stage_tokens = torch.empty(batch, num_nodes + 1, dtype=torch.int64, device=device)
    draft_sums = torch.ones(batch, num_nodes, dtype=torch.float64, device=device)  # of the rows that are looked at
    drawn = (noise.seeds, noise.positions, noise.accept, noise.recover)
    sizes = (num_nodes, vocab_size, draft_probs.shape[2])
    # Without fused multiply-adds: w p - min(w p, q) must be 0 where q is the larger.
    options = {"has_names": names is not None, "chunk": CHUNK, "enable_fp_fusion": False}
    if scheme in (Scheme.REJECTION_WALK, Scheme.TRAVERSAL):
        kernel = trees.walk if scheme is Scheme.REJECTION_WALK else trees.traverse
        kernel[(batch,)](
            tree.token_ids, tree.parents, tree.num_nodes, draft_probs, column_of, *rows.pointers, *drawn, stages, stage_tokens, draft_sums,
            *work.pointers, *sizes, block_nodes=triton.next_power_of_2(num_nodes), **options,
        )  # fmt: skip
        _check_sums(tree, draft_sums)
        return
    common = (tree.token_ids, tree.num_nodes, draft_probs, column_of, *rows.pointers)
    shared, rest, weights = torch.zeros(3, batch, num_nodes, dtype=torch.float64, device=device)
    is_block = scheme is Scheme.BLOCK
    chains.chain_rows[(batch, num_nodes)](*common, shared, rest, draft_sums, weights, *sizes, is_block=is_block, **options)
    _check_sums(tree, draft_sums)
    chains.finish_chain[(batch,)](
        *common, shared, rest, weights, *drawn, stages, stage_tokens, *work.pointers, *sizes, is_block=is_block, **options
    )


def _check_tokens(tree: DraftTree, draft_probs: Tensor, column_of: Tensor | None) -> None:
    columns = tree.token_ids if column_of is None else column_of[tree.token_ids.clamp(0, column_of.numel() - 1)].long()
    held = draft_probs.gather(2, columns.clamp_min(0)[:, :, None])[:, :, 0]
    bad = tree.valid() & ~((columns >= 0) & (held > 0))
    if bool(bad.any()):
        request, node = bad.nonzero()[0].tolist()
        raise ValueError(f"draft tree: request {request}, node {node} holds a token that its own draft_probs give no probability")


def _check_sums(tree: DraftTree, draft_sums: Tensor) -> None:
    off = tree.valid() & ~((draft_sums - 1).abs() <= SUM_TOLERANCE)
    if bool(off.any()):
        request, node = off.nonzero()[0].tolist()
        raise ValueError(
            f"draft tree: request {request}, node {node} has draft_probs that sum to {float(draft_sums[request, node])}: "
            f"normalise them in float32 and sample from those very numbers"
        )


def _signed(value: int) -> int:
    """The value modulo 2**64 as torch's int64 holds it."""
    low = value & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low

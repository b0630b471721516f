"""DraftHead: one decoder layer that drafts from a target's states and is then fed its own output, over any Ops.

``u = W [norm_e(emb(x_{t+1})); norm_h(h_t)]``, ``g = norm(layer(u))``; the output head on g is the law of x_{t+2}. The next step takes g
for h and the drafted token for x (DeepSeek-V3, arXiv 2412.19437, section 2.2, with one module for all steps). With several tapped target
layers ``h_t = W_t [norm_1(tap_1); norm_2(tap_2); ...]``. The readable form of what a kernel does in one call a round.

Shape legend: B requests, R rows, T tapped layers, K steps, H hidden size, d head size, V vocabulary, Vd draft vocabulary, S slots,
Hkv key/value heads, C slot capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.stack import DecoderLayer, Linear
from rollout_spec.noise import LANE, Stream
from rollout_spec.sampling import SamplingParams, first_argmax, process_logits
from rollout_spec.verify.categorical import inverse_cdf

if TYPE_CHECKING:
    from rollout_spec.engine.ops import Ops


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadWeights:
    """Everything in the dtype the head computes in; only the output head gives float32: the draft's law is what is sampled from."""

    tap_norms: tuple[Tensor, ...]  # T of [H]; empty: the only tap is the state as it is
    tap_fc: Linear | None  # [T H] -> [H], with tap_norms
    embed_norm: Tensor  # [H]
    hidden_norm: Tensor  # [H]
    fc: Linear  # [2 H] -> [H]: the token's embedding, then the state
    layer: DecoderLayer
    final_norm: Tensor  # [H]
    head: Linear  # [H] -> [Vd] float32
    embedding: Tensor  # [V, H], read at each call
    token_ids: Tensor | None  # [Vd] int64 target token of each column; None: Vd = V
    head_dim: int
    eps: float


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadCache:
    """The layer's K/V, and the rotary table of every index of a slot, which is a position."""

    k: Tensor  # [1, S, Hkv, C, d]
    v: Tensor  # [1, S, Hkv, C, d]
    cos: Tensor  # [C, d]
    sin: Tensor  # [C, d]


@dataclass(frozen=True, kw_only=True, eq=False)
class NewRows:
    """Rows to compute from the target's own states; a request may have none."""

    taps: Sequence[Tensor]  # T of [R, H]: the target's states of the rows
    token_ids: Tensor  # [R] the tokens after them
    plan: AttentionPlan  # of B requests


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainDraws:
    """How many tokens each request wants drafted, from which law, and with which noise.

    Independent draws take the uniform of stream DRAFT at positions[b] + k LANE for step k (noise.LANE says why) through the inverse CDF;
    coupled ones run the race of ``log q + G`` with the target's own noise at positions[b] + k.
    """

    lengths: Tensor  # [B] int64; 0 where a request has no new row
    num_steps: int  # K, the largest of them
    sampling: Sequence[SamplingParams]  # B: temperature and truncation; the rest cannot follow a reduced vocabulary
    seeds: Sequence[int]  # B
    positions: Sequence[int]  # B: absolute position of each request's first draft
    coupled: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Chains:
    """Entries behind a request's own length mean nothing."""

    token_ids: Tensor  # [B, K] int64, of the target
    probs: Tensor | None  # [B, K, Vd] float32: the numbers that independent draws were made from; None for coupled ones


class DraftHead:
    """The operations one after the other. A kernel overrides ``absorb`` and ``draw_chains``."""

    def __init__(self, ops: Ops, weights: HeadWeights) -> None:
        self.weights, self._ops = weights, ops
        self._stack = ops.decoder_stack(
            [weights.layer], weights.final_norm, head_dim=weights.head_dim, eps=weights.eps, scale=weights.head_dim**-0.5
        )

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """[R, H]: what a step takes for the target's state, from its tapped layers [R, H] each."""
        if self.weights.tap_fc is None:
            return taps[0]
        pairs = zip(taps, self.weights.tap_norms, strict=True)
        return self.weights.tap_fc(torch.cat([self._ops.rms_norm(tap, norm, self.weights.eps) for tap, norm in pairs], dim=-1))

    def step(self, state: Tensor, token_ids: Tensor, cache: HeadCache, plan: AttentionPlan, positions: Tensor | None = None) -> Tensor:
        """[R, H] states after rows of states [R, H] and the tokens after them [R]; their K/V are stored.

        Positions [R] are the rows' places in their slots unless given.
        """
        own, eps, indices = self.weights, self.weights.eps, plan.row_indices()
        embedded = self._ops.rms_norm(own.embedding[token_ids], own.embed_norm, eps)
        mixed = own.fc(torch.cat([embedded, self._ops.rms_norm(state, own.hidden_norm, eps)], dim=-1))
        at = indices if positions is None else positions
        return self._stack(mixed, cache.cos[at], cache.sin[at], cache.k, cache.v, plan, plan.row_slots(), indices).hidden

    def logits(self, state: Tensor) -> Tensor:
        """[R, Vd] float32."""
        return self.weights.head(state)

    def absorb(self, rows: NewRows, cache: HeadCache) -> Tensor:
        """[B, H]: the state after each request's last new row, zeros where it has none."""
        ends = rows.plan.row_offsets[1:]
        state = self.weights.embedding.new_zeros(ends.numel(), self.weights.embedding.shape[1])
        if rows.plan.num_rows:
            some = rows.plan.rows_per_request > 0
            state[some] = self.step(self.fuse(rows.taps), rows.token_ids, cache, rows.plan)[ends[some] - 1]
        return state

    def draw_chains(self, rows: NewRows, cache: HeadCache, draws: ChainDraws) -> Chains:
        """Absorb the new rows, then draft: each step's token is drawn from the head's law and fed back.

        Raises ValueError if a law is no distribution (NaN, or no mass).
        """
        state, plan = self.absorb(rows, cache), rows.plan
        drawn, laws = list[Tensor](), list[Tensor]()
        end = plan.context_lengths + plan.rows_per_request
        single = torch.arange(plan.slots.numel() + 1)
        for step in range(draws.num_steps):
            if step:
                fed = AttentionPlan(row_offsets=single, slots=plan.slots, context_lengths=end + (step - 1))
                state = self.step(state, drawn[-1], cache, fed)
            logits = process_logits(self.logits(state), draws.sampling)
            if draws.coupled:
                columns = self._race(logits, draws, step)
            else:
                uniforms = self._ops.uniforms(draws.seeds, [at + step * LANE for at in draws.positions], Stream.DRAFT)
                laws.append(torch.softmax(logits, dim=-1))
                columns = inverse_cdf(laws[-1], uniforms[:, 0].to(logits.device))
            drawn.append(columns if self.weights.token_ids is None else self.weights.token_ids[columns])
        if not drawn:
            return Chains(token_ids=end.new_empty(end.numel(), 0), probs=None)
        return Chains(token_ids=torch.stack(drawn, dim=1), probs=torch.stack(laws, dim=1) if laws else None)

    def _race(self, logits: Tensor, draws: ChainDraws, step: int) -> Tensor:
        """[B] columns argmax_v (logits + G), G of the columns' target tokens."""
        tokens = logits.shape[1] if self.weights.token_ids is None else self.weights.token_ids
        noise = self._ops.gumbel_noise(draws.seeds, [at + step for at in draws.positions], tokens, Stream.TARGET)
        scores = logits + noise.to(logits.device)
        if bool((scores.isnan() | (scores == torch.inf)).any()):
            raise ValueError("no distribution to draw from: the draft head's logits are not finite")
        return first_argmax(scores)

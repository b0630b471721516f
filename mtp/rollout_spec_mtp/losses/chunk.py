"""One chunk of slots: statistics from logits and, by closed formulas, the gradient back to the drafter's logits.

Nothing here keeps a graph: the backward pass needs two tensors of the size of the chunk's logits (q and p), which live only
as long as the chunk. With z the drafter's logits over the temperature and q = softmax(z):

* overlap (Bebop, arXiv 2606.12370), ``s = sum_{q<=p} q``:       d alpha / dz_v = q_v ([q_v <= p_v] - s)
* with a credit c, ``S = sum_{e^c q <= p} e^c q``:               dB / dz_v = e^c q_v [e^c q_v <= p_v] - S q_v,  dB / dc = S
* KL with target mass m in the draft vocabulary:                 d KL / dz_v = m q_v - p_v
* log-probability of the rollout's token y:                      d log q(y) / dz_v = [v = y] - q_v

Shape legend: C anchors of the chunk, G slots, N valid slots of the chunk, U distinct target rows they need, V vocabulary,
Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec_mtp.losses.density import log_ratios, prefix_weights
from rollout_spec_mtp.losses.stats import Extra, SlotStats

NO_COLUMN = -1  # draft column of a token outside the draft vocabulary


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkLayout:
    """Which slots the rows of a chunk are; row n is the n-th True of ``valid`` in row-major order."""

    valid: Tensor  # [C, G] bool
    token_ids: Tensor  # [N] int64 rollout tokens, target vocabulary
    columns: Tensor  # [N] int64 their columns in the drafter's logits, or NO_COLUMN
    target_rows: Tensor  # [N] int64 row of the target logits that each slot is judged by

    def to_slots(self, rows: Tensor, neutral: float | bool) -> Tensor:
        """rows [N] placed at their slots [C, G], ``neutral`` at invalid ones."""
        slots = torch.full(self.valid.shape, neutral, dtype=rows.dtype, device=rows.device)
        slots[self.valid] = rows
        return slots


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownNormaliser:
    """What is known of a target law whose logits were computed at the draft vocabulary alone."""

    lse: Tensor  # [U] log-sum-exp of the whole row of logits over the temperature
    token_logits: Tensor  # [N] logit of the rollout's token at each slot


@dataclass(frozen=True, kw_only=True, eq=False)
class _TargetLaw:
    probs: Tensor  # [U, Vd]
    log_probs: Tensor  # [U, Vd]; meaningful if the KL was asked for
    token_logprobs: Tensor  # [N]
    entropies: Tensor | None  # [N]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkForward:
    """Statistics of a chunk and what its backward pass needs."""

    stats: SlotStats  # [C, G]
    layout: ChunkLayout
    temperature: float
    draft_probs: Tensor  # [N, Vd]
    target_probs: Tensor  # [N, Vd]
    target_mass: Tensor | float  # [N] of p inside the draft vocabulary; 1 if that is the whole vocabulary
    credit: Tensor | None  # [N] e^credit of each slot, if block_overlap was asked for


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotGrads:
    """d loss / d statistic, all [C, G]; None is zero."""

    overlap: Tensor | None = None
    draft_logprobs: Tensor | None = None
    kl: Tensor | None = None
    block_overlap: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Softmax:
    """One formula for both laws, so that equal logits give equal probabilities to the last bit and no gradient."""

    probs: Tensor  # [rows, vocabulary]
    peak: Tensor  # [rows] largest logit
    log_normaliser: Tensor  # [rows]

    @staticmethod
    def of(logits: Tensor) -> _Softmax:
        peak = logits.amax(dim=-1)
        probs = (logits - peak[:, None]).exp_()
        total = probs.sum(dim=-1)
        return _Softmax(probs=probs.div_(total[:, None]), peak=peak, log_normaliser=peak + total.log())


@torch.no_grad()
def chunk_forward(
    draft_logits: Tensor,
    target_logits: Tensor,
    layout: ChunkLayout,
    *,
    temperature: float,
    draft_token_ids: Tensor | None,
    extras: frozenset[Extra],
    known: KnownNormaliser | None = None,
) -> ChunkForward:
    """Statistics of one chunk.

    draft_logits [N, Vd] and target_logits [U, V] in float32 or float64 are overwritten. draft_token_ids [Vd] names the
    target token of every draft column, None if Vd = V. With ``known``, target_logits are [U, Vd]: the draft vocabulary's alone.
    """
    rows = layout.target_rows
    law = (
        _whole_law(target_logits, layout, temperature, draft_token_ids, extras)
        if known is None
        else _known_law(target_logits, layout, temperature, known)
    )
    draft = _Softmax.of(draft_logits.div_(temperature))
    target_probs = law.probs[rows]
    in_vocab = layout.columns != NO_COLUMN
    token_logits = draft_logits.gather(1, layout.columns.clamp(min=0)[:, None])[:, 0]
    draft_token_logprobs = torch.where(in_vocab, token_logits - draft.log_normaliser, -torch.inf)

    kl: Tensor | None = None
    mass: Tensor | float = 1.0
    if Extra.KL in extras:
        mass = 1.0 if draft_token_ids is None else target_probs.sum(dim=-1)
        kl = _kl(law.log_probs[rows], target_probs, draft_logits.sub_(draft.log_normaliser[:, None]), mass)
    slot_draft_logprobs = layout.to_slots(draft_token_logprobs, 0.0)
    slot_target_logprobs = layout.to_slots(law.token_logprobs, 0.0)
    credit = block_overlap = None
    if Extra.BLOCK_OVERLAP in extras:
        credit = _log_credit(slot_draft_logprobs, slot_target_logprobs)[layout.valid].exp()
        block_overlap = layout.to_slots(_overlap(draft.probs * credit[:, None], target_probs), 1.0)
    stats = SlotStats(
        valid=layout.valid,
        overlap=layout.to_slots(_overlap(draft.probs, target_probs), 1.0),
        draft_logprobs=slot_draft_logprobs,
        target_logprobs=slot_target_logprobs,
        draft_correct=layout.to_slots(in_vocab & (token_logits == draft.peak), True),
        kl=None if kl is None else layout.to_slots(kl, 0.0),
        block_overlap=block_overlap,
        target_entropies=None if law.entropies is None else layout.to_slots(law.entropies, 0.0),
    )
    return ChunkForward(
        stats=stats,
        layout=layout,
        temperature=temperature,
        draft_probs=draft.probs,
        target_probs=target_probs,
        target_mass=mass,
        credit=credit,
    )


@torch.no_grad()
def chunk_backward(forward: ChunkForward, grads: SlotGrads) -> Tensor:
    """d loss / d draft_logits [N, Vd] (before the temperature) from d loss / d statistics [C, G]."""
    layout, draft_probs, target_probs = forward.layout, forward.draft_probs, forward.target_probs
    result = torch.zeros_like(draft_probs)
    along_probs = torch.zeros_like(draft_probs[:, 0])  # [N] coefficient of q_v, which every softmax derivative has
    logprob_grads = grads.draft_logprobs

    if grads.overlap is not None:
        grad = grads.overlap[layout.valid]
        kept = draft_probs.masked_fill(draft_probs > target_probs, 0.0)
        along_probs -= grad * kept.sum(dim=-1)
        result.addcmul_(kept, grad[:, None])
    if grads.block_overlap is not None:
        assert forward.credit is not None
        grad = grads.block_overlap[layout.valid]
        kept = draft_probs * forward.credit[:, None]
        kept = kept.masked_fill_(kept > target_probs, 0.0)
        total = grad * kept.sum(dim=-1)
        along_probs -= total
        result.addcmul_(kept, grad[:, None])
        through_credit = _credit_grad(forward.stats, layout.to_slots(total, 0.0))
        logprob_grads = through_credit if logprob_grads is None else logprob_grads + through_credit
    if grads.kl is not None:
        grad = grads.kl[layout.valid]
        along_probs += grad * forward.target_mass
        result.addcmul_(target_probs, grad[:, None], value=-1.0)
    if logprob_grads is not None:
        # A token outside the draft vocabulary has log-probability -inf whatever the drafter does.
        grad = torch.where(layout.columns != NO_COLUMN, logprob_grads[layout.valid], 0.0)
        along_probs -= grad
        result.scatter_add_(1, layout.columns.clamp(min=0)[:, None], grad[:, None])
    return result.addcmul_(draft_probs, along_probs[:, None]).div_(forward.temperature)


def _whole_law(
    logits: Tensor, layout: ChunkLayout, temperature: float, draft_token_ids: Tensor | None, extras: frozenset[Extra]
) -> _TargetLaw:
    """The target's law from its whole rows of logits [U, V], which are overwritten."""
    rows = layout.target_rows
    softmax = _Softmax.of(logits.div_(temperature))
    token_logprobs = logits[rows, layout.token_ids] - softmax.log_normaliser[rows]
    entropies = _entropies(softmax, logits)[rows] if Extra.TARGET_ENTROPIES in extras else None
    log_probs = logits.sub_(softmax.log_normaliser[:, None]) if Extra.KL in extras else logits
    if draft_token_ids is None:
        return _TargetLaw(probs=softmax.probs, log_probs=log_probs, token_logprobs=token_logprobs, entropies=entropies)
    return _TargetLaw(
        probs=softmax.probs.index_select(1, draft_token_ids),
        log_probs=log_probs.index_select(1, draft_token_ids) if Extra.KL in extras else log_probs,
        token_logprobs=token_logprobs,
        entropies=entropies,
    )


def _known_law(logits: Tensor, layout: ChunkLayout, temperature: float, known: KnownNormaliser) -> _TargetLaw:
    """The target's law at the draft vocabulary from logits [U, Vd], which are overwritten, and the whole rows' normaliser."""
    log_probs = logits.div_(temperature).sub_(known.lse[:, None])
    token_logprobs = known.token_logits / temperature - known.lse[layout.target_rows]
    return _TargetLaw(probs=log_probs.exp(), log_probs=log_probs, token_logprobs=token_logprobs, entropies=None)


def _entropies(target: _Softmax, logits: Tensor) -> Tensor:
    """[U] nats: log normaliser - sum_v p logit; tokens with p = 0 count 0."""
    return target.log_normaliser - torch.where(target.probs > 0, target.probs * logits, 0.0).sum(dim=-1)


def _overlap(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """[N] sum_v min(p, q). Sums of rounded probabilities can exceed 1 by an ulp; no acceptance rate does."""
    return torch.minimum(draft_probs, target_probs).sum(dim=-1).clamp_(max=1.0)


def _kl(target_log_probs: Tensor, target_probs: Tensor, draft_log_probs: Tensor, mass: Tensor | float) -> Tensor:
    """[N] m KL(p / m || q) = sum_v p (log p - log q) - m log m, tokens with p = 0 counting 0; target_log_probs is overwritten."""
    difference = target_log_probs.sub_(draft_log_probs).masked_fill_(target_probs == 0, 0.0)
    total = difference.mul_(target_probs).sum(dim=-1)
    if isinstance(mass, Tensor):
        total -= torch.xlogy(mass, mass)
    return total.clamp_(min=0.0)


def _log_credit(draft_logprobs: Tensor, target_logprobs: Tensor) -> Tensor:
    """[C, G] credit before each slot under block verification."""
    return prefix_weights(log_ratios(draft_logprobs, target_logprobs), carry_credit=True).log_credit


def _credit_grad(stats: SlotStats, grad: Tensor) -> Tensor:
    """d loss / d draft_logprobs [C, G] through the credits, from d loss / d credit [C, G]; autograd over C * G scalars."""
    with torch.enable_grad():
        logprobs = stats.draft_logprobs.detach().requires_grad_()
        log_credit = _log_credit(logprobs, stats.target_logprobs)
        if not log_credit.requires_grad:  # a single slot: its credit is the constant 0
            return torch.zeros_like(logprobs)
        return torch.autograd.grad(log_credit, logprobs, grad)[0]

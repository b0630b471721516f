"""Fused losses against the readable oracle: values and gradients, float64, odd sizes and awkward laws.

Shape legend: T anchors, G slots, V vocabulary, Vd draft vocabulary, H hidden size, R target rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout_spec_mtp.losses import (
    DraftBatch,
    Extra,
    FirstErrorFocal,
    LossConfig,
    LossOutput,
    PositionWeight,
    SlotCounts,
    chunked_loss,
    chunked_stats,
    compute_loss,
    reference,
)
from rollout_spec_mtp.losses.chunk import ChunkLayout, SlotGrads, chunk_backward, chunk_forward
from rollout_spec_mtp.losses.reference import LogitBatch

ANCHORS, SLOTS, VOCAB, HIDDEN = 7, 3, 13, 5
DRAFT_IDS = torch.tensor([11, 2, 3, 7, 0, 8, 12])
ALL_EXTRAS = frozenset(Extra)

CONFIGS = {
    "ce": LossConfig(ce=1.0),
    "kl": LossConfig(kl=0.7),
    "tv": LossConfig(tv=1.0),
    "hybrid": LossConfig(hybrid=1.0),
    "e2e_tv": LossConfig(e2e_tv=1.0),
    "rejection_length": LossConfig(rejection_length=1.0),
    "block_length": LossConfig(block_length=1.0),
    "chain": LossConfig(chain=1.0),
    "position_weight": LossConfig(ce=1.0, kl=0.5, position_weight=PositionWeight(decay=2.0)),
    "first_error_focal": LossConfig(first_error_focal=FirstErrorFocal(weight=0.5, exponent=1.5)),
    "everything": LossConfig(
        ce=0.1,
        kl=0.2,
        tv=0.3,
        hybrid=0.4,
        e2e_tv=0.5,
        rejection_length=0.6,
        block_length=0.7,
        chain=0.8,
        first_error_focal=FirstErrorFocal(weight=0.9),
        position_weight=PositionWeight(decay=7.0),
    ),
}


def make_batch(
    *, reduced: bool = False, temperature: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64, vocab: int = VOCAB
) -> DraftBatch:
    """A packed sequence in which slot j of anchor t is judged by state t + j; two slots and one whole anchor invalid, with NaN there."""
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    valid = torch.ones(ANCHORS, SLOTS, dtype=torch.bool)
    valid[1, 1] = valid[2, 2] = False
    valid[4] = False
    target_rows = torch.arange(ANCHORS)[:, None] + torch.arange(SLOTS)
    target_hidden = normal(ANCHORS + SLOTS, HIDDEN)
    target_head = normal(vocab, HIDDEN)
    # Drafters resemble their target: overlaps of every size, some slots correct and some not.
    student_hidden = target_hidden[target_rows] + 0.7 * normal(ANCHORS, SLOTS, HIDDEN)
    student_hidden[~valid] = torch.nan
    target_rows = torch.where(valid, target_rows, -1000)
    token_ids = torch.randint(vocab, (ANCHORS, SLOTS), generator=noise)
    token_ids[0] = DRAFT_IDS[:SLOTS]
    token_ids = torch.where(valid, token_ids, -1000)
    return DraftBatch(
        student_hidden=student_hidden.to(dtype).requires_grad_(),
        target_hidden=target_hidden.to(dtype).requires_grad_(),
        target_rows=target_rows,
        token_ids=token_ids,
        valid=valid,
        student_head=(target_head[DRAFT_IDS] if reduced else target_head).to(dtype).detach().clone().requires_grad_(),
        target_head=target_head.to(dtype).requires_grad_(),
        draft_token_ids=DRAFT_IDS if reduced else None,
        temperature=temperature,
    )


def logit_batch(batch: DraftBatch, hidden: Tensor) -> LogitBatch:
    """The same batch with full logits, differentiable in hidden [T, G, H]."""
    rows = torch.where(batch.valid, batch.target_rows, 0)
    return LogitBatch(
        student_logits=hidden @ batch.student_head.detach().T,
        target_logits=(batch.target_hidden[rows] @ batch.target_head.T).detach(),
        token_ids=batch.token_ids,
        valid=batch.valid,
        draft_token_ids=batch.draft_token_ids,
        temperature=batch.temperature,
    )


def oracle_loss(batch: LogitBatch, config: LossConfig) -> Tensor:
    decay = None if config.position_weight is None else config.position_weight.decay
    terms = [
        getattr(config, name) * reference.mean_over_slots(per_slot(batch), batch.valid, decay)
        for name, per_slot in reference.SLOT_LOSSES.items()
    ]
    terms += [
        getattr(config, name) * reference.mean_over_anchors(per_anchor(batch), batch.valid)
        for name, per_anchor in reference.ANCHOR_LOSSES.items()
    ]
    if config.first_error_focal is not None:
        focal = reference.first_error_focal_per_anchor(batch, config.first_error_focal.exponent)
        terms.append(config.first_error_focal.weight * reference.mean_over_anchors(focal, batch.valid))
    return torch.stack(terms).sum()


def grad_of(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


def three_anchors_bytes(batch: DraftBatch) -> int:
    """A chunk limit that cuts the batch into pieces of three anchors, the last one smaller."""
    one_row = next(size for size in range(1, 10**5) if batch.max_rows(size) > SLOTS) // (SLOTS + 1)
    return one_row * SLOTS * 3


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("name", CONFIGS)
def test_value_and_gradient_equal_the_oracle(name: str, reduced: bool, temperature: float) -> None:
    batch, config = make_batch(reduced=reduced, temperature=temperature), CONFIGS[name]
    expected = oracle_loss(logit_batch(batch, batch.student_hidden), config)
    expected_grad = grad_of(expected, batch.student_hidden)
    one_chunk = chunked_loss(batch, config)
    chunks = chunked_loss(batch, config, chunk_bytes=three_anchors_bytes(batch))
    recomputed = compute_loss(chunked_stats(batch, config.extras, chunk_bytes=three_anchors_bytes(batch)), config)
    assert expected_grad.abs().max() > 1e-3
    for output in (one_chunk, chunks, recomputed):
        torch.testing.assert_close(output.loss, expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(grad_of(output.loss, batch.student_hidden), expected_grad, rtol=0, atol=1e-13)


def test_chunks_are_really_cut() -> None:
    batch = make_batch()
    assert batch.max_rows(three_anchors_bytes(batch)) // SLOTS == 3


def test_the_policy_gets_no_gradient_and_the_drafter_does() -> None:
    batch = make_batch()
    (3.0 * chunked_loss(batch, CONFIGS["everything"]).loss).backward()
    assert batch.student_hidden.grad is not None
    assert batch.student_hidden.grad[batch.valid].abs().sum(dim=-1).gt(0).all()
    for policy in (batch.target_hidden, batch.target_head, batch.student_head):
        assert policy.grad is None
    stats = chunked_stats(batch, ALL_EXTRAS)
    compute_loss(stats, CONFIGS["everything"]).loss.backward()
    assert not stats.target_logprobs.requires_grad
    for policy in (batch.target_hidden, batch.target_head, batch.student_head):
        assert policy.grad is None


def test_incoming_gradient_scales_the_stored_one() -> None:
    batch = make_batch()
    once = grad_of(chunked_loss(batch, CONFIGS["e2e_tv"]).loss, batch.student_hidden)
    thrice = grad_of(3.0 * chunked_loss(batch, CONFIGS["e2e_tv"]).loss, batch.student_hidden)
    torch.testing.assert_close(thrice, 3.0 * once)


def test_invalid_slots_get_exactly_zero_gradient() -> None:
    batch = make_batch()
    grad = grad_of(chunked_loss(batch, CONFIGS["everything"]).loss, batch.student_hidden)
    assert torch.equal(grad[~batch.valid], torch.zeros_like(grad[~batch.valid]))
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", CONFIGS)
def test_empty_mask_gives_zero_loss_and_zero_gradient(name: str) -> None:
    batch, config = make_batch(), CONFIGS[name]
    empty = replace(batch, valid=torch.zeros_like(batch.valid))
    for output in (chunked_loss(empty, config), compute_loss(chunked_stats(empty, config.extras), config)):
        assert output.loss.item() == 0.0
        assert torch.equal(grad_of(output.loss, batch.student_hidden), torch.zeros_like(batch.student_hidden))
        assert all(torch.equal(value, torch.zeros_like(value)) for value in output.metrics.values())


def test_no_gradient_is_kept_without_one_to_give() -> None:
    batch = make_batch()
    with torch.no_grad():
        assert not chunked_loss(batch, CONFIGS["ce"]).loss.requires_grad
    frozen = replace(batch, student_hidden=batch.student_hidden.detach())
    assert not chunked_loss(frozen, CONFIGS["ce"]).loss.requires_grad


@pytest.mark.parametrize("name", ["position_weight", "everything"])
def test_shares_of_shards_add_up_to_the_whole(name: str) -> None:
    batch, config = make_batch(), CONFIGS[name]
    whole = chunked_loss(batch, config)
    parts = [
        replace(
            batch, student_hidden=batch.student_hidden[rows], **{n: getattr(batch, n)[rows] for n in ("target_rows", "token_ids", "valid")}
        )
        for rows in (slice(0, 2), slice(2, ANCHORS))
    ]
    counts = SlotCounts.of(parts[0].valid) + SlotCounts.from_tensor(SlotCounts.of(parts[1].valid).to_tensor())
    shares: list[LossOutput] = [chunked_loss(part, config, counts) for part in parts]
    total = shares[0].loss + shares[1].loss
    torch.testing.assert_close(total, whole.loss)
    torch.testing.assert_close(grad_of(total, batch.student_hidden), grad_of(whole.loss, batch.student_hidden))
    for key, value in whole.metrics.items():
        torch.testing.assert_close(shares[0].metrics[key] + shares[1].metrics[key], value)


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_statistics_by_definition(reduced: bool) -> None:
    batch = make_batch(reduced=reduced, temperature=0.8)
    stats = chunked_stats(batch, ALL_EXTRAS)
    logits = logit_batch(batch, batch.student_hidden.detach())
    both = reference.laws(logits)
    valid = batch.valid
    full_target = (torch.where(valid[..., None], logits.target_logits, 0.0) / 0.8).softmax(-1)
    torch.testing.assert_close(stats.overlap[valid], torch.minimum(both.draft_probs, both.target_probs).sum(-1)[valid])
    torch.testing.assert_close(stats.draft_logprobs[valid], both.token_draft_logprobs[valid])
    torch.testing.assert_close(stats.target_logprobs[valid], both.token_target_probs[valid].log())
    assert stats.target_entropies is not None
    assert stats.kl is not None
    assert stats.block_overlap is not None
    torch.testing.assert_close(stats.target_entropies[valid], torch.special.entr(full_target).sum(-1)[valid])
    torch.testing.assert_close(stats.kl[valid], reference.kl_per_slot(logits)[valid])
    ids = torch.arange(VOCAB) if batch.draft_token_ids is None else batch.draft_token_ids
    assert torch.equal(stats.draft_correct[valid], (ids[both.draft_probs.argmax(-1)] == batch.token_ids)[valid])
    assert 0 < stats.draft_correct[valid].sum() < valid.sum()
    for tensor, neutral in (
        (stats.overlap, 1),
        (stats.draft_logprobs, 0),
        (stats.kl, 0),
        (stats.block_overlap, 1),
        (stats.draft_correct, 1),
    ):
        assert (tensor[~valid] == neutral).all()
    if reduced:
        assert torch.isneginf(stats.draft_logprobs).any()


def test_logprobs_of_tokens_outside_the_draft_vocabulary_pass_no_gradient() -> None:
    batch = make_batch(reduced=True)
    logprobs = chunked_stats(batch).draft_logprobs
    outside = torch.isneginf(logprobs)
    assert 0 < outside.sum() < batch.valid.sum()
    grad = grad_of(logprobs.sum(), batch.student_hidden)
    assert torch.equal(grad[outside], torch.zeros_like(grad[outside]))
    assert grad[batch.valid & ~outside].abs().sum(dim=-1).gt(0).all()


def test_gradcheck_of_every_statistic() -> None:
    batch = make_batch(temperature=1.3)
    rows = slice(0, 3)
    valid = batch.valid[rows]
    small = replace(
        batch,
        valid=valid,
        student_hidden=torch.where(valid[..., None], batch.student_hidden[rows], 0.0).detach(),
        target_rows=batch.target_rows[rows],
        token_ids=batch.token_ids[rows],
    )

    def differentiable(hidden: Tensor) -> tuple[Tensor, ...]:
        stats = chunked_stats(replace(small, student_hidden=hidden), ALL_EXTRAS)
        assert stats.kl is not None
        assert stats.block_overlap is not None
        return stats.overlap, stats.draft_logprobs, stats.kl, stats.block_overlap

    assert torch.autograd.gradcheck(differentiable, small.student_hidden.clone().requires_grad_(), atol=1e-7)


def test_closed_form_of_the_e2e_tv_gradient() -> None:
    """ALGORITHMS 2: dL/dz = W_m q_v (s_m - 1 + [q_v > p_v]), W_m = (1/gamma) (prod_{i<m} alpha_i) S_m, S_m = 1 + alpha_{m+1} S_{m+1}."""
    noise = torch.Generator().manual_seed(3)
    student, target = torch.randn(2, SLOTS, VOCAB, generator=noise, dtype=torch.float64)
    q, p = student.softmax(-1), target.softmax(-1)
    alpha = torch.minimum(q, p).sum(-1)
    s = torch.where(q <= p, q, 0.0).sum(-1)
    after = torch.ones(SLOTS, dtype=torch.float64)
    for m in reversed(range(SLOTS - 1)):
        after[m] = 1 + alpha[m + 1] * after[m + 1]
    before = torch.cat([torch.ones(1, dtype=torch.float64), alpha.cumprod(0)[:-1]])
    expected = (before * after / SLOTS)[:, None] * q * (s[:, None] - 1 + (q > p).double())

    identity = torch.eye(VOCAB, dtype=torch.float64)
    hidden = student[None].clone().requires_grad_()
    batch = DraftBatch(
        student_hidden=hidden,
        target_hidden=target,
        target_rows=torch.arange(SLOTS)[None],
        token_ids=torch.zeros(1, SLOTS, dtype=torch.int64),
        valid=torch.ones(1, SLOTS, dtype=torch.bool),
        student_head=identity,
        target_head=identity,
    )
    output = chunked_loss(batch, LossConfig(e2e_tv=1.0))
    torch.testing.assert_close(output.loss, 1 - alpha.cumprod(0).sum() / SLOTS)
    torch.testing.assert_close(grad_of(output.loss, hidden)[0], expected, rtol=0, atol=1e-15)


INF = torch.inf
AWKWARD = {
    "minus infinity in both": ([0.3, -INF, 1.0, -0.5], [1.0, 0.2, -INF, 0.1], 0),
    "point mass target": ([0.3, 0.1, 1.0, -0.5], [-INF, 0.0, -INF, -INF], 1),
    "point mass drafter": ([-INF, -INF, 0.0, -INF], [0.3, 0.1, 1.0, -0.5], 2),
    "same point mass": ([-INF, 0.0, -INF, -INF], [-INF, 2.0, -INF, -INF], 1),
    "disjoint": ([0.0, 0.4, -INF, -INF], [-INF, -INF, 0.1, 0.2], 3),
    "all tied": ([0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], 2),
    "some tied": ([1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0], 0),
    "far apart": ([300.0, 0.0, -300.0, 2.0], [-300.0, 0.0, 300.0, 1.0], 1),
}


@pytest.mark.parametrize("case", AWKWARD)
@pytest.mark.parametrize("extra", ["overlap", "draft_logprobs", "kl", "block_overlap"])
def test_awkward_laws(case: str, extra: str) -> None:
    """Slot 2 of two is the awkward one; slot 1 is over-drafted so that block verification carries a credit into it."""
    student_row, target_row, token = AWKWARD[case]
    student = torch.tensor([[2.0, 0.0, 0.0, 0.0], student_row], dtype=torch.float64)
    target = torch.tensor([[0.0, 0.0, 0.0, 0.0], target_row], dtype=torch.float64)
    token_ids = torch.tensor([0, token])
    layout = ChunkLayout(valid=torch.ones(1, 2, dtype=torch.bool), token_ids=token_ids, columns=token_ids, target_rows=torch.arange(2))
    forward = chunk_forward(student.clone(), target.clone(), layout, temperature=1.0, draft_token_ids=None, extras=ALL_EXTRAS)
    weights = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    grad = chunk_backward(forward, SlotGrads(**{extra: weights}))

    leaf = student[None].clone().requires_grad_()
    batch = LogitBatch(student_logits=leaf, target_logits=target[None], token_ids=token_ids[None], valid=layout.valid)
    both = reference.laws(batch)
    if extra == "overlap":
        value = reference.overlap(both.draft_probs, both.target_probs)[0, 1]
    elif extra == "draft_logprobs":
        value = both.token_draft_logprobs[0, 1]
    elif extra == "kl":
        value = reference.kl_per_slot(batch)[0, 1]
    else:
        credit = both.token_draft_logprobs[0, 0].exp() / both.token_target_probs[0, 0]
        assert credit > 1
        value = reference.overlap(credit * both.draft_probs[0, 1], both.target_probs[0, 1])
    torch.testing.assert_close(getattr(forward.stats, extra)[0, 1], value.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(grad, grad_of(value, leaf)[0], rtol=0, atol=1e-13)
    assert grad.isfinite().all()


def test_a_drafter_equal_to_its_target_is_at_rest() -> None:
    """Equal logits give equal probabilities to the last bit, so every acceptance objective has value and gradient exactly 0."""
    logits = 3 * torch.randn(SLOTS, 1001, generator=torch.Generator().manual_seed(5))
    token_ids = torch.arange(SLOTS)
    layout = ChunkLayout(
        valid=torch.ones(1, SLOTS, dtype=torch.bool), token_ids=token_ids, columns=token_ids, target_rows=torch.arange(SLOTS)
    )
    forward = chunk_forward(logits.clone(), logits.clone(), layout, temperature=0.7, draft_token_ids=None, extras=ALL_EXTRAS)
    ones = torch.ones(1, SLOTS)
    assert torch.equal(forward.draft_probs, forward.target_probs)
    torch.testing.assert_close(forward.stats.overlap, ones)
    grad = chunk_backward(forward, SlotGrads(overlap=ones, block_overlap=ones, kl=ones))
    assert grad.abs().max() < 1e-6


def double_batch(batch: DraftBatch) -> DraftBatch:
    """The same numbers in float64."""
    return replace(
        batch,
        **{name: getattr(batch, name).detach().double() for name in ("target_hidden", "target_head", "student_head")},
        student_hidden=batch.student_hidden.detach().double().requires_grad_(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["hybrid", "e2e_tv", "block_length"])
def test_low_precision_errs_at_most_twice_as_much_as_eager(name: str, dtype: torch.dtype) -> None:
    """Both compute logits in the heads' dtype and softmaxes in float32; the float64 oracle on the same rounded inputs is the truth."""
    config = CONFIGS[name]
    value_errors, grad_errors = [], []
    for seed in range(4):
        batch = make_batch(dtype=dtype, seed=seed, vocab=1001)
        exact = double_batch(batch)
        truth = oracle_loss(logit_batch(exact, exact.student_hidden), config)
        plain = logit_batch(batch, batch.student_hidden)
        plain = replace(plain, student_logits=plain.student_logits.float(), target_logits=plain.target_logits.float())
        fused = chunked_loss(batch, config).loss
        assert fused.dtype == torch.float32
        losses = [oracle_loss(plain, config), fused]
        value_errors.append([(loss - truth).abs().item() for loss in losses])
        grads = [grad_of(loss, batch.student_hidden) for loss in losses]
        assert grads[1].dtype == dtype
        truth_grad = grad_of(truth, exact.student_hidden)
        grad_errors.append([(grad.double() - truth_grad).norm().item() for grad in grads])
    eager_value, fused_value = torch.tensor(value_errors).norm(dim=0).tolist()
    eager_grad, fused_grad = torch.tensor(grad_errors).norm(dim=0).tolist()
    # An ulp of the result on top: over four losses an eager error may be 0 by luck.
    assert fused_value <= 2 * eager_value + torch.finfo(torch.float32).eps
    assert 0 < fused_grad <= 2 * eager_grad


def test_autocast_does_not_change_the_numbers() -> None:
    batch, config = make_batch(dtype=torch.float32), CONFIGS["everything"]
    plain = chunked_loss(batch, config)
    plain_grad = grad_of(plain.loss, batch.student_hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = chunked_loss(batch, config)
        recomputed = compute_loss(chunked_stats(batch, config.extras), config)
    assert torch.equal(cast.loss, plain.loss)
    assert torch.equal(grad_of(cast.loss, batch.student_hidden), plain_grad)
    torch.testing.assert_close(grad_of(recomputed.loss, batch.student_hidden), plain_grad)


def test_half_precision_gradients_survive_until_the_loss_scale() -> None:
    """Means over a large batch give gradients below float16's smallest number, 6e-8; the loss scale comes only afterwards."""
    batch = make_batch(dtype=torch.float16)
    small = grad_of(2.0**30 * chunked_loss(batch, LossConfig(e2e_tv=2.0**-30)).loss, batch.student_hidden)
    usual = grad_of(chunked_loss(batch, LossConfig(e2e_tv=1.0)).loss, batch.student_hidden)
    assert small.dtype == torch.float16
    torch.testing.assert_close(small, usual)
    exact = double_batch(batch)
    truth = grad_of(chunked_loss(exact, LossConfig(e2e_tv=1.0)).loss, exact.student_hidden)
    torch.testing.assert_close(usual.double(), truth, rtol=0, atol=5e-3 * truth.abs().max().item())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"student_hidden": torch.zeros(4, HIDDEN)}, r"\[T, G, H\]"),
        ({"student_hidden": torch.zeros(4, 0, HIDDEN)}, "one or more slots"),
        ({"token_ids": torch.zeros(ANCHORS, 1, dtype=torch.int64)}, "token_ids must be"),
        ({"valid": torch.ones(ANCHORS, SLOTS)}, "valid must be bool"),
        ({"student_head": torch.zeros(VOCAB, HIDDEN + 1)}, "student_hidden has 5 features but student_head takes 6"),
        ({"target_hidden": torch.zeros(9, HIDDEN + 1)}, "target_hidden has 6 features"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": float("nan")}, "temperature must be positive"),
        ({"student_head": torch.zeros(7, HIDDEN)}, "draft_token_ids must map"),
        ({"student_head": torch.zeros(6, HIDDEN), "draft_token_ids": DRAFT_IDS}, "one token for each of the 6 rows"),
        ({"student_head": torch.zeros(7, HIDDEN), "draft_token_ids": torch.tensor([0, 0, 1, 1, 2, 2, 3])}, "not offsets"),
        ({"student_head": torch.zeros(2, HIDDEN), "draft_token_ids": torch.tensor([0, VOCAB])}, "below 13"),
    ],
)
def test_misshapen_batches_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_batch(), **changes)

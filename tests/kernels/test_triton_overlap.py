"""The fused overlap against the losses' eager oracle, in value and gradient; run by Triton's interpreter where there is no GPU.

Shape legend: T anchors, G slots, H hidden size, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollout_spec_mtp.losses.reference import LogitBatch, e2e_tv_per_anchor, tv_per_slot

pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollout-spec[triton]'")

from rollout_spec_kernels.triton import overlap as fused
from rollout_spec_kernels.triton.overlap import Head, overlap

# Triton's interpreter is numpy, which warns of the infinities that these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
T, G, H = 5, 3, 12


def _case(vocab_size: int, draft_vocab: int | None, seed: int = 1) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    names = None if draft_vocab is None else torch.randperm(vocab_size, generator=generator)[:draft_vocab]
    columns = draft_vocab or vocab_size
    tensors = {
        "hidden": torch.randn(T * G, H, generator=generator),
        "weight": torch.randn(columns, H, generator=generator) * 0.5,
        "bias": torch.randn(columns, generator=generator) * 0.1,
        "target_hidden": torch.randn(T * G, H + 2, generator=generator),
        "target_weight": torch.randn(vocab_size, H + 2, generator=generator) * 0.5,
    }
    moved: dict[str, Tensor | None] = {name: tensor.double().to(DEVICE) for name, tensor in tensors.items()}
    return moved | {"names": None if names is None else names.to(DEVICE)}


def _fused(case: dict[str, Tensor | None], temperature: float) -> tuple[Tensor, list[Tensor]]:
    leaves = [case[name].float().detach().requires_grad_() for name in ("hidden", "weight", "bias")]  # type: ignore[union-attr]
    target_hidden, target_weight = case["target_hidden"].float(), case["target_weight"].float()  # type: ignore[union-attr]
    head, target_head = Head(weight=leaves[1], bias=leaves[2]), Head(weight=target_weight)
    return overlap(leaves[0], head, target_hidden, target_head, case["names"], temperature), leaves


def _eager(case: dict[str, Tensor | None], temperature: float) -> tuple[LogitBatch, list[Tensor]]:
    """The oracle's batch in float64, all slots valid, and the leaves its logits come from."""
    leaves = [case[name].detach().requires_grad_() for name in ("hidden", "weight", "bias")]  # type: ignore[union-attr]
    logits = torch.nn.functional.linear(*leaves).view(T, G, -1)
    target_logits = (case["target_hidden"] @ case["target_weight"].T).view(T, G, -1)  # type: ignore[operator, union-attr]
    valid = torch.ones(T, G, dtype=torch.bool, device=DEVICE)
    tokens = torch.zeros(T, G, dtype=torch.int64, device=DEVICE)
    return LogitBatch(
        student_logits=logits,
        target_logits=target_logits,
        token_ids=tokens,
        valid=valid,
        draft_token_ids=case["names"],
        temperature=temperature,
    ), leaves


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("vocab_size", "draft_vocab"), [(3, None), (130, 47), (2051, None)])
def test_end_to_end_tv_in_value_and_gradient(
    vocab_size: int, draft_vocab: int | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_CHUNK_BYTES", 4 * 4 * (vocab_size + (draft_vocab or vocab_size)))  # four rows: the last chunk has three
    case = _case(vocab_size, draft_vocab)
    alpha, leaves = _fused(case, temperature)
    loss = 1 - alpha.view(T, G).cumprod(1).mean(1)
    batch, exact_leaves = _eager(case, temperature)
    exact = e2e_tv_per_anchor(batch)
    torch.testing.assert_close(loss.double(), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(1 - alpha.double().view(T, G), tv_per_slot(batch), rtol=0, atol=1e-6)
    upstream = torch.linspace(-1, 2, T, device=DEVICE)
    loss.backward(upstream)
    exact.backward(upstream.double())
    for leaf, exact_leaf in zip(leaves, exact_leaves, strict=True):
        assert leaf.grad is not None
        assert exact_leaf.grad is not None
        # float32 logits carry 1e-6 of themselves, and a token whose p and q are that close may fall on either side.
        torch.testing.assert_close(leaf.grad.double(), exact_leaf.grad, rtol=1e-4, atol=2e-5)


def test_equal_laws_and_point_masses() -> None:
    hidden = torch.randn(4, H, generator=torch.Generator().manual_seed(2)).to(DEVICE).requires_grad_()
    weight = torch.randn(70, H, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    alpha = overlap(hidden, Head(weight=weight), hidden.detach(), Head(weight=weight))
    assert alpha.detach().cpu().tolist() == pytest.approx([1.0] * 4, abs=1e-6)
    alpha.sum().backward()
    assert hidden.grad is not None
    assert float(hidden.grad.abs().max()) < 1e-5  # the maximum is flat
    sure = torch.full((70,), -torch.inf, device=DEVICE)
    sure[9] = 0.0
    apart = overlap(hidden.detach(), Head(weight=weight), hidden.detach(), Head(weight=torch.zeros_like(weight), bias=sure))
    wanted = torch.nn.functional.linear(hidden.detach(), weight).softmax(-1)[:, 9]
    torch.testing.assert_close(apart, wanted, rtol=1e-5, atol=1e-7)


def test_only_what_asks_for_a_gradient_gets_one() -> None:
    case = _case(40, None)
    hidden, weight = (case[name].float().detach() for name in ("hidden", "weight"))  # type: ignore[union-attr]
    target_hidden = case["target_hidden"].float().requires_grad_()  # type: ignore[union-attr]
    target_weight = case["target_weight"].float().requires_grad_()  # type: ignore[union-attr]
    hidden.requires_grad_()
    overlap(hidden, Head(weight=weight), target_hidden, Head(weight=target_weight)).sum().backward()
    assert hidden.grad is not None
    assert bool((hidden.grad != 0).any())
    assert weight.grad is target_hidden.grad is target_weight.grad is None


def test_sizes_that_do_not_fit_are_refused() -> None:
    hidden, weight = torch.zeros(4, H, device=DEVICE), torch.zeros(10, H, device=DEVICE)
    head = Head(weight=weight)
    with pytest.raises(ValueError, match="4 rows of the drafter but 3 of the target"):
        overlap(hidden, head, hidden[:3], head)
    with pytest.raises(ValueError, match="10 columns for 6 tokens"):
        overlap(hidden, head, hidden, head, torch.arange(6, device=DEVICE))
    with pytest.raises(ValueError, match="temperature must be > 0"):
        overlap(hidden, head, hidden, head, temperature=0.0)

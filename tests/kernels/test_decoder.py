from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.stack import DecoderLayer, LayerStack
from rollout_spec_kernels.cpu import CpuOps, PackedLinear
from rollout_spec_kernels.decoder import DecoderStack

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS, SLOTS, CAPACITY, EPS = 40, 4, 2, 16, 56, 3, 3, 64, 1e-5


def _normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _layer(ops: CpuOps, index: int, dtype: torch.dtype) -> DecoderLayer:
    seeds = iter(range(100 * index, 100 * index + 99))

    def linear(num_out: int, num_in: int, with_bias: bool) -> PackedLinear:
        bias = _normal(num_out, seed=next(seeds), dtype=dtype) if with_bias else None
        return ops.pack_linear(_normal(num_out, num_in, seed=next(seeds), dtype=dtype) / num_in**0.5, bias)

    has_norms = index == 1  # layers differ, so that a mixed-up pointer shows
    return DecoderLayer(
        input_norm=_normal(HIDDEN, seed=next(seeds), dtype=dtype),
        post_norm=_normal(HIDDEN, seed=next(seeds), dtype=dtype),
        q_norm=_normal(HEAD_DIM, seed=next(seeds), dtype=dtype) if has_norms else None,
        k_norm=_normal(HEAD_DIM, seed=next(seeds), dtype=dtype) if has_norms else None,
        qkv=linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, with_bias=True),
        out=linear(HIDDEN, HEADS * HEAD_DIM, with_bias=False),
        gate_up=linear(2 * WIDTH, HIDDEN, with_bias=False),
        down=linear(HIDDEN, WIDTH, with_bias=False),
        sliding_window=8 if index == 2 else 0,
    )


def _one_by_one(
    ops: CpuOps, layers: list[DecoderLayer], final: Tensor, residual: Tensor, step: dict[str, Tensor], plan: AttentionPlan
) -> list[Tensor]:
    """The final hidden states, then the residual after each layer: the operations called from Python."""
    stack = LayerStack(ops, layers, final, eps=EPS, scale=HEAD_DIM**-0.5)
    positions = (step["cos"], step["sin"], step["k"], step["v"])
    out = stack(residual, *positions, plan, step["slots"], step["indices"], tap_layers=range(len(layers)))
    return [out.hidden, *out.taps.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stack_equals_its_operations_bit_for_bit(ops: CpuOps, dtype: torch.dtype) -> None:
    layers, final = [_layer(ops, i, dtype) for i in range(LAYERS)], _normal(HIDDEN, seed=7, dtype=dtype)
    stack = ops.decoder_stack(layers, final, head_dim=HEAD_DIM, eps=EPS, scale=HEAD_DIM**-0.5)
    plan = AttentionPlan(row_offsets=torch.tensor([0, 3, 18]), slots=torch.tensor([2, 0]), context_lengths=torch.tensor([20, 5]))
    cache = _normal(2, LAYERS, SLOTS, KV_HEADS, CAPACITY, HEAD_DIM, seed=8, dtype=dtype)
    embedded = _normal(18, HIDDEN, seed=9, dtype=dtype)
    step = {
        "cos": _normal(18, HEAD_DIM, seed=10, dtype=dtype),
        "sin": _normal(18, HEAD_DIM, seed=11, dtype=dtype),
        "slots": plan.row_slots(),
        "indices": plan.row_indices(),
    }
    k, v = cache.clone()
    wanted = _one_by_one(ops, layers, final, embedded, step | {"k": k, "v": v}, plan)
    stack_k, stack_v = cache.clone()
    before = embedded.clone()
    got = stack(embedded, step["cos"], step["sin"], stack_k, stack_v, plan, step["slots"], step["indices"], tap_layers=(-1, 0, 2))
    assert torch.equal(got.hidden, wanted[0])
    assert sorted(got.taps) == [0, 2]
    assert torch.equal(got.taps[0], wanted[1])
    assert torch.equal(got.taps[2], wanted[3])
    assert torch.equal(stack_k, k)
    assert torch.equal(stack_v, v)
    assert torch.equal(embedded, before)


def test_updated_weights_are_used(ops: CpuOps) -> None:
    layers, final = [_layer(ops, 0, torch.float32)], torch.ones(HIDDEN)
    stack = DecoderStack(layers, final, head_dim=HEAD_DIM, eps=EPS, scale=1.0)
    plan = AttentionPlan(row_offsets=torch.tensor([0, 1]), slots=torch.tensor([0]), context_lengths=torch.tensor([0]))
    embedded, cos = torch.ones(1, HIDDEN), torch.ones(1, HEAD_DIM)

    def forward() -> Tensor:
        k, v = torch.zeros(2, 1, 1, KV_HEADS, 4, HEAD_DIM)
        return stack(embedded, cos, cos, k, v, plan, plan.row_slots(), plan.row_indices()).hidden

    old = forward()
    layers[0].down.update(torch.zeros(HIDDEN, WIDTH), None)
    layers[0].out.update(torch.zeros(HIDDEN, HEADS * HEAD_DIM), None)
    assert not torch.equal(forward(), old)
    assert torch.equal(forward(), ops.rms_norm(embedded, final, EPS))  # nothing is added to the residual any more


def test_layers_and_caches_that_do_not_fit_are_refused(ops: CpuOps) -> None:
    layer = dataclasses.replace(_layer(ops, 0, torch.float32), down=ops.pack_linear(torch.zeros(HIDDEN + 1, WIDTH), None))
    with pytest.raises(ValueError, match=r"layer 0: down must be \(40, 56\)"):
        DecoderStack([layer], torch.ones(HIDDEN), head_dim=HEAD_DIM, eps=EPS, scale=1.0)
    stack = DecoderStack([_layer(ops, 0, torch.float32)], torch.ones(HIDDEN), head_dim=HEAD_DIM, eps=EPS, scale=1.0)
    plan = AttentionPlan(row_offsets=torch.tensor([0, 1]), slots=torch.tensor([0]), context_lengths=torch.tensor([0]))
    one, cache = torch.ones(1, HEAD_DIM), torch.zeros(1, 1, KV_HEADS, 4, HEAD_DIM)
    with pytest.raises(ValueError, match="is not of 1 layers of 2 heads of 16"):
        stack(torch.ones(1, HIDDEN), one, one, cache[:, :, :1], cache[:, :, :1], plan, plan.row_slots(), plan.row_indices())
    with pytest.raises(ValueError, match="inside the cache of 1 slots of 4 tokens"):
        stack(torch.ones(1, HIDDEN), one, one, cache, cache.clone(), plan, plan.row_slots(), torch.tensor([4]))

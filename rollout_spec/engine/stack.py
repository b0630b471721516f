"""A decoder's layers, one operation after the other, over any Ops: the readable form of what a kernel may do in one call.

Shape legend: R rows, H hidden size, d head size, L layers, S slots, Hkv key/value heads, C slot capacity.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rollout_spec.engine.plan import AttentionPlan


class Linear(Protocol):
    """y = x Wᵀ + b with the weight in whatever layout is fastest."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor: ...

    def update(self, weight: Tensor, bias: Tensor | None) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderLayer:
    """The weights of one Llama-like layer; norms [H] or [d], the projections of one input fused."""

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    sliding_window: int  # 0 = none


@dataclass(frozen=True, kw_only=True, eq=False)
class StackOutput:
    """The final norm's output, and the residual stream after each layer that was asked for."""

    hidden: Tensor  # [R, H]
    taps: dict[int, Tensor]  # layer -> [R, H]


class LayerOps(Protocol):
    """The operations of a layer; rollout_spec.engine.ops.Ops says what they compute."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def qkv_rope_store(
        self,
        qkv: Tensor,  # [R, (heads + 2 Hkv) d]
        cos: Tensor,  # [R, d]
        sin: Tensor,  # [R, d]
        q_norm: Tensor | None,  # [d]
        k_norm: Tensor | None,  # [d]
        eps: float,
        k_cache: Tensor,  # [S, Hkv, C, d]
        v_cache: Tensor,  # [S, Hkv, C, d]
        slots: Tensor,  # [R] int64
        indices: Tensor,  # [R] int64
    ) -> Tensor: ...  # q [R, heads, d]

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float, sliding_window: int = 0
    ) -> Tensor: ...  # [R, heads d]

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...  # [R, 2I] -> [R, I]


class LayerStack:
    """The layers and the final norm. It keeps the layers' tensors: they may be updated in place only."""

    def __init__(self, ops: LayerOps, layers: Sequence[DecoderLayer], final_norm: Tensor, *, eps: float, scale: float) -> None:
        self._ops, self._layers, self._eps, self._scale = ops, layers, eps, scale
        # The norm that follows a layer's output is the next layer's first, or the final one.
        self._following = [*(layer.input_norm for layer in layers[1:]), final_norm]

    def __call__(
        self,
        embedded: Tensor,  # [R, H]
        cos: Tensor,  # [R, d]
        sin: Tensor,  # [R, d]
        k_cache: Tensor,  # [L, S, Hkv, C, d]
        v_cache: Tensor,  # [L, S, Hkv, C, d]
        plan: AttentionPlan,
        row_slots: Tensor,  # [R] int64
        row_indices: Tensor,  # [R] int64
        tap_layers: Collection[int] = (),
    ) -> StackOutput:
        """Rows of embedded tokens -> hidden states; K and V of every layer go to cells (layer, row_slots, :, row_indices)."""
        ops, eps, residual, taps = self._ops, self._eps, embedded, dict[int, Tensor]()
        normed = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, (layer, following) in enumerate(zip(self._layers, self._following, strict=True)):
            keys, values = k_cache[index], v_cache[index]
            q = ops.qkv_rope_store(layer.qkv(normed), cos, sin, layer.q_norm, layer.k_norm, eps, keys, values, row_slots, row_indices)
            mixed = layer.out(ops.attention(q, keys, values, plan, self._scale, layer.sliding_window))
            normed, residual = ops.add_rms_norm(mixed, residual, layer.post_norm, eps)
            mixed = layer.down(ops.silu_mul(layer.gate_up(normed)))
            normed, residual = ops.add_rms_norm(mixed, residual, following, eps)
            if index in tap_layers:
                taps[index] = residual
        return StackOutput(hidden=normed, taps=taps)

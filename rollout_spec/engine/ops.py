"""The tensor operations a decoder forward is made of, and their torch implementation.

``rollout_spec_kernels`` has the same operations in C++ (CpuOps); the engine takes either as an argument.

Shape legend: M or R rows, K input features, N output features, H query heads, Hkv key/value heads, d head size, S slots,
C slot capacity, B requests, I MLP width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout_spec.engine import gated_delta
from rollout_spec.engine.draft_head import DraftHead, HeadWeights
from rollout_spec.engine.gated_delta import GatedDelta
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.stack import DecoderLayer, LayerOps, LayerStack, Linear, StackOutput
from rollout_spec.noise import Stream, gumbel_noise
from rollout_spec.tree import DraftTree
from rollout_spec.truncation import Truncations
from rollout_spec.verdict import Verdict
from rollout_spec.verify import Scheme, TargetRows, VerifyNoise, verify
from rollout_spec.verify.categorical import draw_tokens
from rollout_spec.verify.randomness import KeyedNoise, NumpyNoise


class Stack(Protocol):
    """All layers of a decoder (LayerStack says what it computes)."""

    def __call__(
        self,
        embedded: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: AttentionPlan,
        row_slots: Tensor,
        row_indices: Tensor,
        tap_layers: Collection[int] = (),
    ) -> StackOutput: ...


class LogSoftmaxStats(Protocol):
    @property
    def log_probs(self) -> Tensor: ...  # [R, V] float32
    @property
    def entropies(self) -> Tensor: ...  # [R] float32, nats; NaN for a row that defines no distribution


class Ops(LayerOps, KeyedNoise, Protocol):
    name: str
    gated_delta: GatedDelta  # of layers with a recurrent state

    def pack_linear(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Linear: ...

    def decoder_stack(self, layers: Sequence[DecoderLayer], final_norm: Tensor, *, head_dim: int, eps: float, scale: float) -> Stack: ...

    def draft_head(self, weights: HeadWeights) -> DraftHead: ...

    def commit(
        self, k_cache: Tensor, v_cache: Tensor, slots: Tensor, context_lengths: Tensor, moves: Tensor
    ) -> None: ...  # caches [L, S, Hkv, C, d], moves [B, D + 1]: row whose K/V goes to row i, -1 = none

    def gumbel_noise(
        self, seeds: Sequence[int], positions: Sequence[int], tokens: int | Tensor, stream: Stream = Stream.TARGET
    ) -> Tensor: ...  # [R, V] of all tokens (their number) or of some (their ids): noise.gumbel_noise

    def log_softmax_stats(self, logits: Tensor, inv_temperatures: Tensor) -> LogSoftmaxStats: ...  # [R, V] any float, [R]

    def truncated_log_softmax(
        self, logits: Tensor, truncations: Truncations
    ) -> LogSoftmaxStats: ...  # of logits [R, V] over their temperatures, in their support

    def inverse_cdf(self, log_probs: Tensor, uniforms: Tensor) -> Tensor: ...  # [R, V] float32, [R] float64 -> [R] tokens

    def verify(self, tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict: ...  # a verify.VerifyFn


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchLogSoftmaxStats:
    log_probs: Tensor  # [R, V] float32
    entropies: Tensor  # [R] float32


class TorchLinear:
    """A linear layer on torch; on CPU with prepacked weights where this torch has the operator.

    Packed products are row-invariant (a row's bits do not depend on the other rows), which MKL's unpacked float32 ones are not.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._out_dtype = weight.dtype if out_dtype is None else out_dtype
        self.update(weight, bias)

    def update(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.detach(), bias
        self._packed: Tensor | None = None
        self._kind = ""
        if weight.device.type != "cpu":
            return
        if weight.dtype == torch.float32 and torch._C.has_mkl:
            self._kind, self._packed = "mkl", torch.ops.mkl._mkl_reorder_linear_weight(self._weight, 8)
        elif weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self._kind, self._packed = "mkldnn", torch.ops.mkldnn._reorder_linear_weight(self._weight, 8)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x).to(self._out_dtype)

    def _product(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self._weight, self._bias)
        if self._kind == "mkl":
            return torch.ops.mkl._mkl_linear(x, self._packed, self._weight, self._bias, x.shape[0])  # type: ignore[no-any-return]
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")  # type: ignore[no-any-return]


class TorchOps(NumpyNoise):
    """Every operation in plain torch; the reference the kernels are checked against."""

    name = "torch"
    gated_delta: GatedDelta = gated_delta

    def __init__(self) -> None:
        self._mask_of: tuple[AttentionPlan, int, Tensor] | None = None

    def pack_linear(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Linear:
        return TorchLinear(weight, bias, out_dtype)

    def decoder_stack(
        self,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        *,
        head_dim: int,  # noqa: ARG002 - kernels need it, tensors here know it
        eps: float,
        scale: float,
    ) -> Stack:
        return LayerStack(self, layers, final_norm, eps=eps, scale=scale)

    def draft_head(self, weights: HeadWeights) -> DraftHead:
        return DraftHead(self, weights)

    def gumbel_noise(self, seeds: Sequence[int], positions: Sequence[int], tokens: int | Tensor, stream: Stream = Stream.TARGET) -> Tensor:
        return gumbel_noise(seeds, positions, tokens, stream)

    def log_softmax_stats(self, logits: Tensor, inv_temperatures: Tensor) -> LogSoftmaxStats:
        log_probs = (logits.float() * inv_temperatures[:, None]).log_softmax(dim=-1)
        # 0 · −inf is 0 here: a masked token adds nothing to the entropy.
        finite = log_probs.clamp_min(torch.finfo(log_probs.dtype).min)
        return TorchLogSoftmaxStats(log_probs=log_probs, entropies=-torch.linalg.vecdot(log_probs.exp(), finite))

    def truncated_log_softmax(self, logits: Tensor, truncations: Truncations) -> LogSoftmaxStats:
        return self.log_softmax_stats(truncations.apply(logits), torch.ones(logits.shape[0], device=logits.device))

    def inverse_cdf(self, log_probs: Tensor, uniforms: Tensor) -> Tensor:
        return draw_tokens(log_probs, uniforms)

    def verify(self, tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict:
        return verify(tree, target, noise, scheme)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * (wide * scale).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def qkv_rope_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        indices: Tensor,
    ) -> Tensor:
        num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        q = q if q_norm is None else self.rms_norm(q, q_norm, eps)
        k = k if k_norm is None else self.rms_norm(k, k_norm, eps)
        k_cache[slots, :, indices] = _rotate(k, cos, sin)
        v_cache[slots, :, indices] = v
        return _rotate(q, cos, sin)

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float, sliding_window: int = 0) -> Tensor:
        rows = plan.rows_per_request
        if int(rows.max()) * rows.numel() <= 2 * plan.num_rows and rows.numel() > 1:
            return self._attend_batch(q, k_cache, v_cache, plan, scale, sliding_window)
        out = torch.empty_like(q)
        for request in range(rows.numel()):
            begin, end = int(plan.row_offsets[request]), int(plan.row_offsets[request + 1])
            if end == begin:
                continue
            slot = int(plan.slots[request])
            mask = _window(plan.visible(request), sliding_window)
            total = mask.shape[1]
            out[begin:end] = _attend(
                q[None, begin:end], k_cache[slot : slot + 1, :, :total], v_cache[slot : slot + 1, :, :total], mask[None], scale
            )[0]
        return out.flatten(1)

    def _attend_batch(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float, window: int) -> Tensor:
        """All requests in one padded product; the mask is built once a forward, not once a layer."""
        rows = plan.rows_per_request
        most = int(rows.max())
        if self._mask_of is None or self._mask_of[0] is not plan or self._mask_of[1] != window:
            self._mask_of = (plan, window, _batch_mask(plan, most, window))
        mask = self._mask_of[2]
        length = min(mask.shape[2], k_cache.shape[2])
        keys, values = _rows_of(k_cache, plan.slots, length), _rows_of(v_cache, plan.slots, length)
        if int(rows.min()) == most:
            return _attend(q.view(rows.numel(), most, *q.shape[1:]), keys, values, mask[..., :length], scale).flatten(0, 1).flatten(1)
        where = torch.arange(most) < rows[:, None]
        padded = q.new_zeros(rows.numel(), most, *q.shape[1:])
        padded[where] = q
        return _attend(padded, keys, values, mask[..., :length], scale)[where].flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def commit(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor, context_lengths: Tensor, moves: Tensor) -> None:
        request, step = (moves >= 0).nonzero(as_tuple=True)
        slot, context = slots[request], context_lengths[request]
        source, target = context + moves[request, step], context + step
        for cache in (k_cache, v_cache):
            cache[:, slot, :, target] = cache[:, slot, :, source]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [R, heads, d] with cos and sin [R, d] (rotate-half layout)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [B, n, H, d], keys and values [B, Hkv, L, d], mask [B, n, L] -> [B, n, H, d]; a group's heads share each load of K/V."""
    batch, num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    folded = (
        q.view(batch, num_rows, num_kv_heads, group, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(batch, num_kv_heads, group * num_rows, head_dim)
    )
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask[:, None].repeat(1, 1, group, 1), scale=scale)
    return out.view(batch, num_kv_heads, group, num_rows, head_dim).permute(0, 3, 1, 2, 4).reshape(batch, num_rows, num_heads, head_dim)


def _rows_of(cache: Tensor, slots: Tensor, length: int) -> Tensor:
    """cache[slots, :, :length], as a view when the slots are neighbours."""
    first, count = int(slots[0]), slots.numel()
    if torch.equal(slots, torch.arange(first, first + count)):
        return cache[first : first + count, :, :length]
    return cache[slots, :, :length]


def _window(mask: Tensor, window: int) -> Tensor:
    """Restrict mask [rows, keys] to the last ``window`` keys that a row sees (0 = no limit): they come in order of position, one each."""
    return mask if window <= 0 else mask & (mask.flip(1).cumsum(1).flip(1) <= window)


def _batch_mask(plan: AttentionPlan, most: int, window: int) -> Tensor:
    """[B, most, L] bool for the padded batch; L is rounded up so that a row's sum does not depend on its neighbours' lengths."""
    rows = plan.rows_per_request
    longest = int((plan.context_lengths + rows).max()) + plan.num_earlier
    mask = torch.zeros(rows.numel(), most, -(-longest // 64) * 64, dtype=torch.bool)
    mask[:, :, 0] = True  # padding rows need something to attend to
    for request in range(rows.numel()):
        visible = _window(plan.visible(request), window)
        mask[request, : visible.shape[0], : visible.shape[1]] = visible
    return mask

"""CpuOps: the engine's tensor operations in C++, row-invariant and close to the speed of memory.

Row-invariant: a row's result is bitwise the same whatever the other rows of the batch, its place among them and the number of
threads. ``rollout_spec.engine.ops.TorchOps`` is the readable reference of the same signatures.

Shape legend: M or R rows, K input features, N output features, H query heads, Hkv key/value heads, d head size, S slots,
C slot capacity, B requests, D moves, I MLP width, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec.engine.draft_head import DraftHead, HeadWeights
from rollout_spec.engine.gated_delta import GatedDelta
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.stack import DecoderLayer
from rollout_spec.tree import DraftTree
from rollout_spec.truncation import Truncations
from rollout_spec.verdict import Verdict
from rollout_spec.verify import Scheme, TargetRows, VerifyNoise
from rollout_spec_kernels import gated_delta
from rollout_spec_kernels.decoder import DecoderStack
from rollout_spec_kernels.draft import FusedDraftHead
from rollout_spec_kernels.library import checked, is_bfloat16, unavailable_reason
from rollout_spec_kernels.linear import PackedLinear
from rollout_spec_kernels.noise import CpuNoise
from rollout_spec_kernels.verify import verify

__all__ = ["CpuOps", "LogSoftmaxStats", "PackedLinear", "unavailable_reason"]


@dataclass(frozen=True, kw_only=True)
class LogSoftmaxStats:
    """Log-probabilities of some logits at a temperature, and the entropy of each row."""

    log_probs: Tensor  # [R, V] float32
    entropies: Tensor  # [R] float32, nats


class CpuOps(CpuNoise):
    """The engine's operations (rollout_spec.engine.ops.Ops) in C++. Raises BuildError when built where `unavailable_reason` is not None."""

    name = "cpu"
    gated_delta: GatedDelta = gated_delta

    def __init__(self) -> None:
        super().__init__()
        self._max_head_dim: int = self._library.rs_max_head_dim()

    def pack_linear(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> PackedLinear:
        """A linear layer with weight [N, K] and bias [N]; bfloat16 layers can give float32 (``out_dtype``), as an LM head wants."""
        return PackedLinear(weight, bias, out_dtype)

    def decoder_stack(self, layers: Sequence[DecoderLayer], final_norm: Tensor, *, head_dim: int, eps: float, scale: float) -> DecoderStack:
        """All layers (their projections packed by `pack_linear`) and the final norm as one call, bitwise equal to the operations below."""
        return DecoderStack(layers, final_norm, head_dim=head_dim, eps=eps, scale=scale)

    def draft_head(self, weights: HeadWeights) -> DraftHead:
        """A recurrent draft head (its projections packed by `pack_linear`) whose chains take one call a round."""
        return FusedDraftHead(self, weights)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [M, H], weight [H] -> weight * cast(x / sqrt(mean(x²) + eps)), the norm in float32 (transformers' rounding order)."""
        is_bf16, shape = is_bfloat16("x", x), x.shape
        weight = checked("weight", weight, x.dtype, shape[-1:])
        x = x.contiguous()
        normed = torch.empty_like(x)
        self._library.rs_add_rms_norm(
            is_bf16,
            x.data_ptr(),
            None,
            weight.data_ptr(),
            normed.data_ptr(),
            None,
            shape[:-1].numel(),
            shape[-1],
            eps,
            torch.get_num_threads(),
        )
        return normed

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(residual + x), residual + x), the sum rounded to its dtype; all [M, H]."""
        is_bf16, shape = is_bfloat16("x", x), x.shape
        residual, weight = checked("residual", residual, x.dtype, shape), checked("weight", weight, x.dtype, shape[-1:])
        x = x.contiguous()
        normed, total = torch.empty_like(x), torch.empty_like(x)
        self._library.rs_add_rms_norm(
            is_bf16,
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            normed.data_ptr(),
            total.data_ptr(),
            shape[:-1].numel(),
            shape[-1],
            eps,
            torch.get_num_threads(),
        )
        return normed, total

    def qkv_rope_store(
        self,
        qkv: Tensor,  # [R, (H + 2 Hkv) d]
        cos: Tensor,  # [R, d]
        sin: Tensor,  # [R, d]
        q_norm: Tensor | None,  # [d]
        k_norm: Tensor | None,  # [d]
        eps: float,
        k_cache: Tensor,  # [S, Hkv, C, d]
        v_cache: Tensor,  # [S, Hkv, C, d]
        slots: Tensor,  # [R] int64
        indices: Tensor,  # [R] int64
    ) -> Tensor:
        """q [R, H, d], normed (if the norms are given) and rotated; k, treated alike, and v go to cache cells (slot, :, index, :)."""
        is_bf16, dtype, num_rows = is_bfloat16("qkv", qkv), qkv.dtype, qkv.shape[0]
        num_slots, num_kv_heads, capacity, head_dim = self._check_caches(k_cache, v_cache, dtype)
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        qkv = checked("qkv", qkv, dtype, (num_rows, (max(num_heads, 1) + 2 * num_kv_heads) * head_dim))
        cos, sin = checked("cos", cos, dtype, (num_rows, head_dim)), checked("sin", sin, dtype, (num_rows, head_dim))
        slots, indices = checked("slots", slots, torch.int64, (num_rows,)), checked("indices", indices, torch.int64, (num_rows,))
        norms = [None if norm is None else checked("q_norm and k_norm", norm, dtype, (head_dim,)) for norm in (q_norm, k_norm)]
        q = torch.empty(num_rows, num_heads, head_dim, dtype=dtype)
        done = self._library.rs_qkv_rope_store(
            is_bf16,
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            *(None if norm is None else norm.data_ptr() for norm in norms),
            eps,
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slots.data_ptr(),
            indices.data_ptr(),
            num_rows,
            num_heads,
            num_kv_heads,
            head_dim,
            k_cache.stride(0),
            k_cache.stride(1),
            num_slots,
            capacity,
            torch.get_num_threads(),
        )
        if not done:
            raise ValueError(f"slots and indices must lie inside the cache of {num_slots} slots of {capacity} tokens")
        return q

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float, sliding_window: int = 0) -> Tensor:
        """softmax(scale q Kᵀ) V of q [R, H, d] over the cells [S, Hkv, C, d] that the plan lets each row see -> [R, H d]; float32 inside.

        ``sliding_window`` > 0 hides keys whose position is that much or more before the row's own.
        """
        is_bf16, (num_rows, num_heads, head_dim) = is_bfloat16("q", q), q.shape
        num_slots, num_kv_heads, capacity, cache_dim = self._check_caches(k_cache, v_cache, q.dtype)
        if cache_dim != head_dim or num_heads % num_kv_heads:
            raise ValueError(f"q {tuple(q.shape)} does not fit a cache of {num_kv_heads} heads of {cache_dim}")
        q, num_requests, ancestors = q.contiguous(), plan.slots.shape[0], plan.ancestors
        offsets = checked("row_offsets", plan.row_offsets, torch.int64, (num_requests + 1,))
        slots = checked("slots", plan.slots, torch.int64, (num_requests,))
        contexts = checked("context_lengths", plan.context_lengths, torch.int64, (num_requests,))
        if ancestors is not None:
            ancestors = checked("ancestors", ancestors, torch.int64, (num_rows, ancestors.shape[1]))
        out = torch.empty(num_rows, num_heads * head_dim, dtype=q.dtype)
        done = self._library.rs_attention(
            is_bf16,
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            out.data_ptr(),
            offsets.data_ptr(),
            slots.data_ptr(),
            contexts.data_ptr(),
            None if ancestors is None else ancestors.data_ptr(),
            0 if ancestors is None else ancestors.shape[1],
            num_requests,
            num_heads,
            num_kv_heads,
            head_dim,
            k_cache.stride(0),
            k_cache.stride(1),
            num_rows,
            num_slots,
            capacity,
            scale,
            sliding_window,
            torch.get_num_threads(),
        )
        if not done:
            raise ValueError(f"the plan must cover {num_rows} rows and stay inside the cache of {num_slots} slots of {capacity} tokens")
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[M, 2 I], gate beside up -> silu(gate) * up [M, I]."""
        is_bf16, (num_rows, width) = is_bfloat16("gate_up", gate_up), gate_up.shape
        if width % 2:
            raise ValueError(f"gate_up must be [M, 2 I]; got {tuple(gate_up.shape)}")
        gate_up = gate_up.contiguous()
        out = torch.empty(num_rows, width // 2, dtype=gate_up.dtype)
        self._library.rs_silu_mul(is_bf16, gate_up.data_ptr(), out.data_ptr(), num_rows, width // 2, torch.get_num_threads())
        return out

    def commit(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor, context_lengths: Tensor, moves: Tensor) -> None:
        """In every layer, cell context + i takes what cell context + moves[b, i] holds (negative: nothing).

        Caches [L, S, Hkv, C, d], moves [B, D]. An accepted path's rows ascend, so moves[b, i] >= i and the rows move in place.
        """
        num_layers, num_slots, num_kv_heads, capacity = k_cache.shape[:4]
        if v_cache.shape != k_cache.shape or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
            raise ValueError("k_cache and v_cache must be contiguous and of one shape [L, S, Hkv, C, d]")
        num_requests, num_moves = moves.shape
        moves = checked("moves", moves, torch.int64, (num_requests, num_moves))
        slots, contexts = (
            checked("slots", slots, torch.int64, (num_requests,)),
            checked("context_lengths", context_lengths, torch.int64, (num_requests,)),
        )
        size = k_cache.element_size()
        done = self._library.rs_commit(
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            *(k_cache.stride(axis) * size for axis in range(4)),
            num_layers,
            num_kv_heads,
            slots.data_ptr(),
            contexts.data_ptr(),
            moves.data_ptr(),
            num_requests,
            num_moves,
            num_slots,
            capacity,
            torch.get_num_threads(),
        )
        if not done:
            raise ValueError(f"slots and moves must lie inside the cache of {num_slots} slots of {capacity} tokens")

    def log_softmax_stats(self, logits: Tensor, inv_temperatures: Tensor) -> LogSoftmaxStats:
        """log softmax of logits [R, V] times inv_temperatures [R], and its entropy; float32 whatever the logits."""
        is_bf16, (num_rows, vocab_size) = is_bfloat16("logits", logits), logits.shape
        inverse = checked("inv_temperatures", inv_temperatures, torch.float32, (num_rows,))
        logits = logits.contiguous()
        log_probs, entropies = torch.empty(num_rows, vocab_size), torch.empty(num_rows)
        self._library.rs_log_softmax_stats(
            is_bf16,
            logits.data_ptr(),
            inverse.data_ptr(),
            log_probs.data_ptr(),
            entropies.data_ptr(),
            num_rows,
            vocab_size,
            torch.get_num_threads(),
        )
        return LogSoftmaxStats(log_probs=log_probs, entropies=entropies)

    def truncated_log_softmax(self, logits: Tensor, truncations: Truncations) -> LogSoftmaxStats:
        """log softmax of logits [R, V] over their temperatures, in the support of min-p, top-k and top-p (truncation.truncate_).

        The supports are the same, ties included, unless a nucleus' mass is within float32 rounding of top_p.
        """
        is_bf16, (num_rows, vocab_size) = is_bfloat16("logits", logits), logits.shape
        logits = logits.contiguous()
        held = [
            checked("temperatures", truncations.temperatures, torch.float32, (num_rows,)),
            checked("top_k", truncations.top_k, torch.int64, (num_rows,)),
            checked("top_p", truncations.top_p, torch.float64, (num_rows,)),
            checked("min_p", truncations.min_p, torch.float64, (num_rows,)),
        ]
        log_probs, entropies = torch.empty(num_rows, vocab_size), torch.empty(num_rows)
        self._library.rs_truncated_log_softmax(
            is_bf16,
            logits.data_ptr(),
            *(of.data_ptr() for of in held),
            log_probs.data_ptr(),
            entropies.data_ptr(),
            num_rows,
            vocab_size,
            torch.get_num_threads(),
        )
        return LogSoftmaxStats(log_probs=log_probs, entropies=entropies)

    def inverse_cdf(self, log_probs: Tensor, uniforms: Tensor) -> Tensor:
        """[R] int64: the first token whose cumulative probability exceeds uniforms [R] of the total; log_probs [R, V] float32.

        Raises ValueError if a row has no mass or holds a NaN (rollout_spec.verify.categorical.inverse_cdf).
        """
        num_rows, vocab_size = log_probs.shape
        log_probs = checked("log_probs", log_probs, torch.float32, (num_rows, vocab_size)).contiguous()
        uniforms = checked("uniforms", uniforms, torch.float64, (num_rows,)).contiguous()
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        self._library.rs_inverse_cdf(
            log_probs.data_ptr(), uniforms.data_ptr(), token_ids.data_ptr(), num_rows, vocab_size, torch.get_num_threads()
        )
        if num_rows and int(token_ids.min()) < 0:
            raise ValueError(f"no distribution to draw from: row {int(token_ids.argmin())} has no mass, or a NaN")
        return token_ids

    def verify(self, tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict:
        """rollout_spec.verify.verify, chains in one call."""
        return verify(tree, target, noise, scheme)

    def _check_caches(self, k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype) -> tuple[int, int, int, int]:
        """(S, Hkv, C, d) of a layer's caches, whose tokens must be contiguous within a head."""
        num_slots, num_kv_heads, capacity, head_dim = k_cache.shape
        alike = v_cache.shape == k_cache.shape and v_cache.stride() == k_cache.stride() and k_cache.dtype is v_cache.dtype is dtype
        if not (alike and k_cache.is_cpu and v_cache.is_cpu and k_cache.stride()[2:] == (head_dim, 1)):
            raise ValueError(f"k_cache and v_cache must be alike, {dtype} [S, Hkv, C, d] on the CPU with contiguous tokens")
        if head_dim % 8 or head_dim > self._max_head_dim:
            raise ValueError(f"the head size must be a multiple of 8, at most {self._max_head_dim}; got {head_dim}")
        return num_slots, num_kv_heads, capacity, head_dim

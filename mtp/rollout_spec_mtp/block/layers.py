"""The parts of a block drafter under the names of the published DFlash checkpoints (Qwen3's decoder layer, not causal).

Shape legend: F flat context rows, T anchors, B block size, H hidden size, Hkv key/value heads, d head size, N target layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollout_spec_mtp.block.attention import Span, attend_spans
from rollout_spec_mtp.block.config import PER_LAYER, BlockConfig


class RMSNorm(nn.Module):
    """``weight * cast(x / sqrt(mean(x²) + eps))``, the norm in float32 (transformers' rounding order)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed: Tensor = self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return normed


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Float32 cos and sin [..., d] of positions [...]: the angles ``position / theta^(2 i / d)``, once for each half of the head."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., heads, d] with cos and sin [..., d], in x's dtype (rotate-half layout)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype)[..., None, :], sin.to(x.dtype)[..., None, :]
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class BlockAttention(nn.Module):
    """Queries from the block; keys and values from context and block, by the same projections unless the config says per_layer."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        if config.fusion == PER_LAYER:
            self.context_k_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
            self.context_v_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self._has_context_proj = config.fusion == PER_LAYER

    def context_weight(self) -> Tensor:
        """[2 Hkv d, H] key and value projections of the context."""
        if self._has_context_proj:
            return torch.cat([self.context_k_proj.weight, self.context_v_proj.weight])
        return torch.cat([self.k_proj.weight, self.v_proj.weight])

    def forward(
        self, x: Tensor, context: Tensor, block_rope: tuple[Tensor, Tensor], context_rope: tuple[Tensor, Tensor], spans: list[Span]
    ) -> Tensor:
        """x [T, B, H], context [F, H], cos and sin [T, B, d] and [F, d] -> [T, B, H]."""
        k_context, v_context = (self._heads(part) for part in F.linear(context, self.context_weight()).chunk(2, dim=-1))
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        mixed = attend_spans(
            rotate(self.q_norm(q), *block_rope),
            rotate(self.k_norm(k), *block_rope),
            v,
            rotate(self.k_norm(k_context), *context_rope),
            v_context,
            spans,
        )
        out: Tensor = self.o_proj(mixed.flatten(-2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[..., heads d] -> [..., heads, d]."""
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)


class BlockMLP(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class ContextFusion(nn.Module):
    """DFlare's context of one draft layer: ``RMSNorm(sum_t softmax(weights)_t h_t)``."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(len(config.target_layers)))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states: Tensor) -> Tensor:
        """States [F, N, H] -> [F, H]."""
        normed: Tensor = self.norm(torch.einsum("fnh,n->fh", states, self.weights.softmax(0).to(states.dtype)))
        return normed


class BlockLayer(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = BlockMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.context_fusion = ContextFusion(config) if config.fusion == PER_LAYER else None

    def forward(
        self, x: Tensor, context: Tensor, block_rope: tuple[Tensor, Tensor], context_rope: tuple[Tensor, Tensor], spans: list[Span]
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, block_rope, context_rope, spans)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

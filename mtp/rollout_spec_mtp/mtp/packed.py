"""The MTP head in the form that serves: packed projections on the engine's operations, K/V in slots.

Shape legend: R rows, H hidden size, d head size, Vd draft vocabulary, S slots, C capacity.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from rollout_spec.engine.kv import KVSlots
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.stack import DecoderLayer, Linear
from rollout_spec_mtp.mtp.model import MTPModel

_CAPACITY_STEP = 256


class PackedHead:
    """Weights of one MTPModel in the policy's dtype. ``repack`` after they, or the policy's head, changed."""

    def __init__(self, model: MTPModel, ops: Ops) -> None:
        policy = model.policy
        self._model, self._ops, self._policy = model, ops, policy
        self.dtype, self.device = policy.head.dtype, policy.head.device
        self._eps: float = policy.config.rms_norm_eps
        attention: Any = model.layer.self_attn
        self.head_dim: int = attention.head_dim
        self.num_kv_heads: int = attention.k_proj.out_features // self.head_dim
        self.repack()

    @torch.no_grad()
    def repack(self) -> None:
        ops, model = self._ops, self._model
        layer: Any = model.layer
        attention, mlp = layer.self_attn, layer.mlp
        q_norm, k_norm = (self._norm(getattr(attention, name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm"))
        packed = DecoderLayer(
            input_norm=self._norm(layer.input_layernorm),
            post_norm=self._norm(layer.post_attention_layernorm),
            q_norm=q_norm,
            k_norm=k_norm,
            qkv=self._linear(attention.q_proj, attention.k_proj, attention.v_proj),
            out=self._linear(attention.o_proj),
            gate_up=self._linear(mlp.gate_proj, mlp.up_proj),
            down=self._linear(mlp.down_proj),
            sliding_window=model.window,
        )
        self._stack = ops.decoder_stack([packed], self._norm(model.norm), head_dim=self.head_dim, eps=self._eps, scale=self.head_dim**-0.5)
        self._fc = self._linear(model.fc)
        self._tap_fc = None if model.tap_fc is None else self._linear(model.tap_fc)
        self._tap_norms = [] if model.tap_norms is None else [self._norm(norm) for norm in model.tap_norms]
        self._embed_norm, self._hidden_norm = self._norm(model.embed_norm), self._norm(model.hidden_norm)
        ids = model.draft_token_ids
        head = self._policy.head if ids is None else self._policy.head[ids].contiguous()
        # In float32 as the engine's own logits are: the draft's law is what is sampled from.
        self._head = ops.pack_linear(head, None, torch.float32)

    def _linear(self, *linears: Any) -> Linear:
        weight = torch.cat([linear.weight.detach() for linear in linears]).to(self.dtype)
        biases = [linear.bias for linear in linears]
        bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases]).to(self.dtype)
        return self._ops.pack_linear(weight, bias)

    def _norm(self, norm: Any) -> Tensor:
        weight: Tensor = norm.weight.detach().to(self.dtype)
        return weight

    def fuse(self, taps: list[Tensor]) -> Tensor:
        """[R, H] what a step takes for the target's state, from its tapped layers [R, H] each."""
        if self._tap_fc is None:
            return taps[0].to(self.dtype)
        normed = [self._ops.rms_norm(tap.to(self.dtype), norm, self._eps) for tap, norm in zip(taps, self._tap_norms, strict=True)]
        return self._tap_fc(torch.cat(normed, dim=-1))

    def step(
        self,
        state: Tensor,  # [R, H]
        token_ids: Tensor,  # [R]
        rotary: tuple[Tensor, Tensor],  # cos and sin [R, d]
        kv: KVSlots,
        plan: AttentionPlan,
    ) -> Tensor:
        """[R, H] states after the rows; their K/V are stored."""
        embedded = self._ops.rms_norm(self._policy.embedding[token_ids], self._embed_norm, self._eps)
        mixed = self._fc(torch.cat([embedded, self._ops.rms_norm(state, self._hidden_norm, self._eps)], dim=-1))
        return self._stack(mixed, *rotary, kv.k, kv.v, plan, plan.row_slots(), plan.row_indices()).hidden

    def logits(self, state: Tensor) -> Tensor:
        """[R, Vd] float32."""
        return self._head(state)


class DraftSlots:
    """K/V slots of one layer that grow with what is asked of them, and the rotary table for their positions."""

    def __init__(self, head: PackedHead, model: MTPModel) -> None:
        self._head, self._model = head, model
        self._slot_of: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._num_slots = 0
        self.kv: KVSlots
        self._grow(1, _CAPACITY_STEP)

    def acquire(self, owner: Hashable) -> int:
        """The owner's slot; a new one on the first call."""
        slot = self._slot_of.get(owner)
        if slot is None:
            if not self._free:
                self._grow(max(1, 2 * self._num_slots), self.kv.capacity)
            slot = self._slot_of[owner] = self._free.pop()
        return slot

    def release(self, owner: Hashable) -> None:
        slot = self._slot_of.pop(owner, None)
        if slot is not None:
            self._free.append(slot)

    def ensure(self, capacity: int) -> None:
        """Room for so many rows in every slot."""
        if capacity > self.kv.capacity:
            self._grow(self._num_slots, -(-max(capacity, 3 * self.kv.capacity // 2) // _CAPACITY_STEP) * _CAPACITY_STEP)

    def _grow(self, num_slots: int, capacity: int) -> None:
        head = self._head
        kv = KVSlots(
            num_layers=1,
            num_slots=num_slots,
            num_kv_heads=head.num_kv_heads,
            capacity=capacity,
            head_dim=head.head_dim,
            dtype=head.dtype,
            device=head.device,
        )
        if self._num_slots:
            kv.k[:, : self._num_slots, :, : self.kv.capacity] = self.kv.k
            kv.v[:, : self._num_slots, :, : self.kv.capacity] = self.kv.v
        self._free.extend(range(self._num_slots, num_slots))
        self._num_slots, self.kv = num_slots, kv
        positions = torch.arange(capacity, device=head.device)[None]
        cos, sin = self._model.policy.module.model.rotary_emb(torch.empty(1, dtype=head.dtype, device=head.device), positions)
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [R, d] at positions [R]."""
        return self._cos[positions], self._sin[positions]

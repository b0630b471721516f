"""The MTP head in the form that serves: packed projections on the engine's operations, K/V in slots.

Shape legend: H hidden size, d head size, S slots, C capacity.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from rollout_spec.engine.draft_head import DraftHead, HeadCache, HeadWeights
from rollout_spec.engine.kv import KVSlots
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.stack import DecoderLayer, Linear
from rollout_spec_mtp.mtp.model import MTPModel

_CAPACITY_STEP = 256


def pack_head(model: MTPModel, ops: Ops) -> DraftHead:
    """The model in the policy's dtype, with the policy's output head as it is now: pack again after either changed."""
    layer: Any = model.layer
    attention, mlp, policy, ids = layer.self_attn, layer.mlp, model.policy, model.draft_token_ids
    dtype = policy.head.dtype

    def linear(*parts: Any) -> Linear:
        weight = torch.cat([part.weight.detach() for part in parts]).to(dtype)
        bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts]).to(dtype)
        return ops.pack_linear(weight, bias)

    def norm(part: Any) -> Tensor:
        weight: Tensor = part.weight.detach().to(dtype)
        return weight

    q_norm, k_norm = (norm(getattr(attention, name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm"))
    return ops.draft_head(
        HeadWeights(
            tap_norms=() if model.tap_norms is None else tuple(norm(part) for part in model.tap_norms),
            tap_fc=None if model.tap_fc is None else linear(model.tap_fc),
            embed_norm=norm(model.embed_norm),
            hidden_norm=norm(model.hidden_norm),
            fc=linear(model.fc),
            layer=DecoderLayer(
                input_norm=norm(layer.input_layernorm),
                post_norm=norm(layer.post_attention_layernorm),
                q_norm=q_norm,
                k_norm=k_norm,
                qkv=linear(attention.q_proj, attention.k_proj, attention.v_proj),
                out=linear(attention.o_proj),
                gate_up=linear(mlp.gate_proj, mlp.up_proj),
                down=linear(mlp.down_proj),
                sliding_window=model.window,
            ),
            final_norm=norm(model.norm),
            # In float32 as the engine's own logits are: the draft's law is what is sampled from.
            head=ops.pack_linear(policy.head if ids is None else policy.head[ids].contiguous(), None, torch.float32),
            embedding=policy.embedding,
            token_ids=ids,
            head_dim=attention.head_dim,
            eps=policy.config.rms_norm_eps,
        )
    )


class DraftSlots:
    """K/V slots of one layer that grow with what is asked of them, and the rotary table for their positions."""

    def __init__(self, model: MTPModel) -> None:
        self._model = model
        self._slot_of: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._num_slots = self._capacity = 0
        self.cache: HeadCache
        self._grow(1, _CAPACITY_STEP)

    def acquire(self, owner: Hashable) -> int:
        """The owner's slot; a new one on the first call."""
        slot = self._slot_of.get(owner)
        if slot is None:
            if not self._free:
                self._grow(2 * self._num_slots, self._capacity)
            slot = self._slot_of[owner] = self._free.pop()
        return slot

    def release(self, owner: Hashable) -> None:
        slot = self._slot_of.pop(owner, None)
        if slot is not None:
            self._free.append(slot)

    def ensure(self, capacity: int) -> None:
        """Room for so many rows in every slot."""
        if capacity > self._capacity:
            self._grow(self._num_slots, -(-max(capacity, 3 * self._capacity // 2) // _CAPACITY_STEP) * _CAPACITY_STEP)

    def _grow(self, num_slots: int, capacity: int) -> None:
        layer: Any = self._model.layer
        policy, attention = self._model.policy, layer.self_attn
        dtype, device, head_dim = policy.head.dtype, policy.head.device, attention.head_dim
        kv = KVSlots(
            num_layers=1,
            num_slots=num_slots,
            num_kv_heads=attention.k_proj.out_features // head_dim,
            capacity=capacity,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )
        if self._num_slots:
            kv.k[:, : self._num_slots, :, : self._capacity] = self.cache.k
            kv.v[:, : self._num_slots, :, : self._capacity] = self.cache.v
        self._free.extend(range(self._num_slots, num_slots))
        self._num_slots, self._capacity = num_slots, capacity
        positions = torch.arange(capacity, device=device)[None]
        cos, sin = policy.module.model.rotary_emb(torch.empty(1, dtype=dtype, device=device), positions)
        self.cache = HeadCache(k=kv.k, v=kv.v, cos=cos[0].contiguous(), sin=sin[0].contiguous())

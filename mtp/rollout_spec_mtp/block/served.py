"""PackedBlock: a BlockModel's weights packed for inference, run with the engine's operations.

Shape legend: R rows, B block size, H hidden size, D draft layers, N target layers, Hkv key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec.engine.kv import KVSlots
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.stack import DecoderLayer, Linear
from rollout_spec_mtp.block.config import SHARED
from rollout_spec_mtp.block.layers import BlockLayer, rotary, rotate
from rollout_spec_mtp.block.model import BlockModel


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextKeys:
    """Keys (normed and rotated) and values of context rows for every draft layer."""

    k: Tensor  # [R, D, Hkv, d]
    v: Tensor  # [R, D, Hkv, d]


class PackedBlock:
    """Copies of the model's weights in the policy's dtype; ``refresh`` after the model's weights changed."""

    def __init__(self, model: BlockModel, ops: Ops) -> None:
        self._model, self._ops, self._config = model, ops, model.config
        self.dtype, self.device = model.policy.embedding.dtype, model.policy.embedding.device
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        layers = [layer for layer in self._model.layers if isinstance(layer, BlockLayer)]
        config, final_norm = self._config, self._cast(self._model.norm.weight)
        self._stack = self._ops.decoder_stack(
            [self._pack(layer) for layer in layers],
            final_norm,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
        )
        self._k_norms = self._cast(torch.stack([layer.self_attn.k_norm.weight for layer in layers]))[:, None]  # [D, 1, d]
        self._no_scale = torch.ones(config.head_dim, dtype=self.dtype, device=self.device)
        self._cos = self._sin = torch.empty(0, config.head_dim, dtype=self.dtype, device=self.device)
        if config.fusion == SHARED:
            self._fc = self._linear(self._model.fc.weight)
            self._hidden_norm = self._cast(self._model.hidden_norm.weight)
            # One product for all layers' keys and values: new context rows are few, and a call a layer would cost more than its work.
            self._context_kv = [self._linear(torch.cat([layer.self_attn.context_weight() for layer in layers]))]
        else:
            fusions = [layer.context_fusion for layer in layers if layer.context_fusion is not None]
            self._mix = self._cast(torch.stack([fusion.weights.softmax(0) for fusion in fusions]))  # [D, N]
            self._context_norms = [self._cast(fusion.norm.weight) for fusion in fusions]
            self._context_kv = [self._linear(layer.self_attn.context_weight()) for layer in layers]

    def _pack(self, layer: BlockLayer) -> DecoderLayer:
        attention, mlp = layer.self_attn, layer.mlp
        return DecoderLayer(
            input_norm=self._cast(layer.input_layernorm.weight),
            post_norm=self._cast(layer.post_attention_layernorm.weight),
            q_norm=self._cast(attention.q_norm.weight),
            k_norm=self._cast(attention.k_norm.weight),
            qkv=self._linear(torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])),
            out=self._linear(attention.o_proj.weight),
            gate_up=self._linear(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])),
            down=self._linear(mlp.down_proj.weight),
            sliding_window=0,
        )

    def _cast(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.device, self.dtype, copy=True)

    def _linear(self, weight: Tensor) -> Linear:
        return self._ops.pack_linear(self._cast(weight), None)

    def make_slots(self, num_slots: int, capacity: int) -> KVSlots:
        return KVSlots(
            num_layers=self._config.num_layers,
            num_slots=num_slots,
            num_kv_heads=self._config.num_kv_heads,
            capacity=capacity,
            head_dim=self._config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def context(self, states: Mapping[int, Tensor], positions: Tensor) -> ContextKeys:
        """Keys and values of context rows from the target's states (layer -> [R, H]) at positions [R]; R is 1 or more."""
        eps, num_layers = self._config.rms_norm_eps, self._config.num_layers
        taps = [states[layer].to(self.dtype) for layer in self._config.target_layers]
        if self._config.fusion == SHARED:
            fused = self._ops.rms_norm(self._fc(torch.cat(taps, dim=1)), self._hidden_norm, eps)
            kv = self._context_kv[0](fused)
        else:
            mixed = torch.einsum("dn,nrh->drh", self._mix, torch.stack(taps))
            parts = zip(mixed, self._context_norms, self._context_kv, strict=True)
            kv = torch.cat([linear(self._ops.rms_norm(layer_mix.contiguous(), norm, eps)) for layer_mix, norm, linear in parts], dim=1)
        k, v = kv.view(kv.shape[0], num_layers, 2, self._config.num_kv_heads, self._config.head_dim).unbind(2)
        cos, sin = self._rope(positions)
        k = self._k_norms * self._ops.rms_norm(k.contiguous(), self._no_scale, eps)
        return ContextKeys(k=rotate(k.flatten(1, 2), cos, sin).view_as(k), v=v)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor, kv: KVSlots) -> Tensor:
        """[requests, B - 1, H] states for the head, of blocks that start from token_ids at positions (both [requests]).

        Each request's context of ``positions`` rows lies at the start of its slot; the block's rows are stored behind it.
        """
        block, num_requests = self._config.block_size, token_ids.shape[0]
        plan = AttentionPlan(
            row_offsets=torch.arange(num_requests + 1) * block,
            slots=slots,
            context_lengths=positions,
            # Not causal: every row of a block sees all of them.
            ancestors=torch.full((num_requests * block, 1), (1 << block) - 1),
        )
        # A row's position is the place it is stored at: the context is every token before the block.
        indices = (positions[:, None] + torch.arange(block)).flatten()
        out = self._stack(self._embed(token_ids), *self._rope(indices), kv.k, kv.v, plan, slots.repeat_interleave(block), indices)
        return out.hidden.view(num_requests, block, -1)[:, 1:]

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[requests * B, H]; read from the policy at every call, whose embedding may have been updated."""
        first = self._model.policy.embedding[token_ids]
        mask = self._model.mask_vector().detach().to(self.dtype).expand(token_ids.shape[0], self._config.num_slots, -1)
        return torch.cat([first[:, None], mask], dim=1).flatten(0, 1)

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        needed = int(positions.max()) + 1
        if needed > self._cos.shape[0]:
            cos, sin = rotary(torch.arange(2 * needed, device=self.device), self._config.head_dim, self._config.rope_theta)
            self._cos, self._sin = cos.to(self.dtype), sin.to(self.dtype)
        return self._cos[positions], self._sin[positions]

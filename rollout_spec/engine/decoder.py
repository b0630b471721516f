"""FusedDecoder: Llama, Qwen2, Qwen3 and Mistral forwards with fused projections and as few operations a layer as possible.

Shape legend: R rows, H query heads, Hkv key/value heads, d head size, I MLP width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rollout_spec.engine.kv import KVSlots
from rollout_spec.engine.module_runner import ModuleRunner
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.runner import CausalLM, StepInput, StepOutput
from rollout_spec.engine.stack import DecoderLayer

FUSED_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def is_fusable(config: object) -> bool:
    """True if FusedDecoder computes this architecture: plain SiLU MLP, no attention bias it does not know, static rope."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        getattr(config, "model_type", "") in FUSED_MODEL_TYPES
        and getattr(config, "hidden_act", "silu") == "silu"
        and not getattr(config, "mlp_bias", False)
        and rope.get("rope_type", "default") in ("default", "linear", "llama3")
    )


class FusedDecoder(ModuleRunner):
    """Runs a transformers causal LM by its weights, not by its modules; the module stays the owner of the weights."""

    def __init__(self, model: CausalLM, ops: Ops, max_context: int) -> None:
        config = model.config
        if not is_fusable(config):
            raise ValueError(f"model type {config.model_type!r} is not one that FusedDecoder computes; use TransformersRunner")
        super().__init__(model, ops)
        self._eps: float = config.rms_norm_eps
        self._windows_by_layer = config.model_type != "mistral"
        positions = torch.arange(min(max_context, self.max_position), device=model.device)[None]
        probe = torch.empty(1, dtype=self.dtype, device=model.device)
        cos, sin = model.model.rotary_emb(probe, positions)
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        self._layers = [self._pack(layer) for layer in model.model.layers]
        self._stack = ops.decoder_stack(
            self._layers, model.model.norm.weight.detach(), head_dim=self._head_dim, eps=self._eps, scale=self._head_dim**-0.5
        )
        # Logits in float32 whatever the weights' dtype: rounding them again would only blur what is sampled from.
        self._head = ops.pack_linear(model.lm_head.weight.detach(), model.lm_head.bias, torch.float32)

    def _pack(self, layer: Any) -> DecoderLayer:
        attention, mlp = layer.self_attn, layer.mlp
        norm_of = {name: getattr(attention, name).weight.detach() if hasattr(attention, name) else None for name in ("q_norm", "k_norm")}
        # Qwen keeps the window at each layer, Mistral in the config for all of them.
        window = getattr(attention, "sliding_window", None) if self._windows_by_layer else self._model.config.sliding_window
        return DecoderLayer(
            input_norm=layer.input_layernorm.weight.detach(),
            post_norm=layer.post_attention_layernorm.weight.detach(),
            q_norm=norm_of["q_norm"],
            k_norm=norm_of["k_norm"],
            qkv=self.ops.pack_linear(*_fused(attention.q_proj, attention.k_proj, attention.v_proj)),
            out=self.ops.pack_linear(*_fused(attention.o_proj)),
            gate_up=self.ops.pack_linear(*_fused(mlp.gate_proj, mlp.up_proj)),
            down=self.ops.pack_linear(*_fused(mlp.down_proj)),
            sliding_window=window or 0,
        )

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: KVSlots) -> StepOutput:
        plan = step.plan
        requests = plan.row_requests()
        slots, indices = plan.slots[requests], plan.context_lengths[requests] + torch.arange(requests.numel()) - plan.row_offsets[requests]
        embedded = self._model.model.embed_tokens.weight[step.token_ids]
        cos, sin = self._cos[step.positions], self._sin[step.positions]
        out = self._stack(embedded, cos, sin, kv.k, kv.v, plan, slots, indices, step.tap_layers)
        taps = out.taps | ({-1: out.hidden} if -1 in step.tap_layers else {})
        return StepOutput(hidden=out.hidden, taps=taps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden)
        return logits

    def _repack(self) -> None:
        for packed, layer in zip(self._layers, self._model.model.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            packed.qkv.update(*_fused(attention.q_proj, attention.k_proj, attention.v_proj))
            packed.out.update(*_fused(attention.o_proj))
            packed.gate_up.update(*_fused(mlp.gate_proj, mlp.up_proj))
            packed.down.update(*_fused(mlp.down_proj))
        self._head.update(self._model.lm_head.weight.detach(), self._model.lm_head.bias)


def _fused(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """One weight and bias for several projections of the same input."""
    weight = torch.cat([linear.weight.detach() for linear in linears]) if len(linears) > 1 else linears[0].weight.detach()
    if linears[0].bias is None:
        return weight, None
    return weight, torch.cat([linear.bias.detach() for linear in linears])

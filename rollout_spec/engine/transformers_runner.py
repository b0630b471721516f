"""TransformersRunner: any decoder-only model whose attention goes through transformers' attention interface.

The model runs unchanged on all rows as one sequence [1, R]; our attention function, registered under ATTENTION_NAME, stores K/V in
the slots and attends by the plan. Models that keep other state between tokens (recurrent layers) are HybridRunner's, or refused.

Shape legend: R rows, H query heads, Hkv key/value heads, d head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rollout_spec.engine.kv import KVSlots
from rollout_spec.engine.module_runner import ModuleRunner
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.runner import CausalLM, StepInput, StepOutput

ATTENTION_NAME = "rollout_spec"


def _attention(
    module: CausalLM,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - the interface; the plan says what each row sees
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, R, d], key and value [1, Hkv, R, d] -> [1, R, H, d]."""
    ops, kv, plan = kwargs["rollout_ops"], kwargs["rollout_kv"], kwargs["rollout_plan"]
    assert isinstance(plan, AttentionPlan)
    assert isinstance(kv, KVSlots)
    unsupported = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if unsupported:
        raise ValueError(f"attention argument {unsupported[0]} of {type(module).__name__} is not supported by the embedded engine")
    k_cache, v_cache = kv.of_layer(module.layer_idx)
    slots, indices = plan.row_slots(), plan.row_indices()
    k_cache[slots, :, indices] = key[0].transpose(0, 1)
    v_cache[slots, :, indices] = value[0].transpose(0, 1)
    q = query[0].transpose(0, 1).contiguous()
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = ops.attention(q, k_cache, v_cache, plan, scale, kwargs.get("sliding_window") or 0)
    return out.view(1, q.shape[0], q.shape[1], q.shape[2]), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)


class TransformersRunner(ModuleRunner):
    """Runs the module's own forward with our attention in it."""

    def __init__(self, model: CausalLM, ops: Ops) -> None:
        config = model.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if not kinds <= {"full_attention", "sliding_attention"}:
            raise ValueError(f"{config.model_type}: layers of kind {sorted(kinds)} keep state that the embedded engine cannot roll back")
        super().__init__(model, ops)
        model.set_attn_implementation(ATTENTION_NAME)

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: KVSlots) -> StepOutput:
        out = self._model.model(
            input_ids=step.token_ids[None],
            position_ids=step.positions[None],
            use_cache=False,
            output_hidden_states=bool(set(step.tap_layers) - {-1}),
            rollout_ops=self.ops,
            rollout_kv=kv,
            rollout_plan=step.plan,
        )
        # transformers' hidden_states[i + 1] is layer i's output, but its last entry is already normed.
        taps = {layer: out.hidden_states[layer + 1][0] for layer in step.tap_layers if layer not in (-1, self.num_layers - 1)}
        if self.num_layers - 1 in step.tap_layers:
            raise ValueError(f"layer {self.num_layers - 1}: transformers returns the last layer only after the final norm; tap -1 instead")
        hidden = out.last_hidden_state[0]
        return StepOutput(hidden=hidden, taps=taps | ({-1: hidden} if -1 in step.tap_layers else {}))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.lm_head(hidden)
        return logits

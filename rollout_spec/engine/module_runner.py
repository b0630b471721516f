"""ModuleRunner: what all runners of a transformers module share: its sizes, its KV slots, its weights by name.

Shape legend: B requests, D depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from rollout_spec.engine.kv import KVSlots
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.runner import CausalLM


class ModuleRunner:
    """Base of the runners; the module stays the owner of the weights."""

    def __init__(self, model: CausalLM, ops: Ops) -> None:
        config = model.config
        self._model, self.ops = model, ops
        self.vocab_size: int = config.vocab_size
        self.max_position: int = config.max_position_embeddings
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.dtype: torch.dtype = model.dtype
        self.eos_token_ids = eos_token_ids(model)
        self._num_kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def make_slots(self, num_slots: int, capacity: int) -> KVSlots:
        return KVSlots(
            num_layers=self.num_layers,
            num_slots=num_slots,
            num_kv_heads=self._num_kv_heads,
            capacity=capacity,
            head_dim=self._head_dim,
            dtype=self.dtype,
            device=self._model.device,
        )

    @torch.inference_mode()
    def commit(self, kv: KVSlots, plan: AttentionPlan, paths: Tensor, moves: Tensor | None) -> None:  # noqa: ARG002 - K/V know no path
        """plan of B requests, paths [B, D], moves [B, D + 1] (rounds.kv_moves)."""
        if moves is not None:
            self.ops.commit(kv.k, kv.v, plan.slots, plan.context_lengths, moves)

    def named_weights(self) -> Mapping[str, Tensor]:
        return dict(self._model.named_parameters())

    def tied_names(self) -> Mapping[str, str]:
        """Names of parameters that are another one's storage -> the name under which named_parameters lists it."""
        first = {id(parameter): name for name, parameter in self._model.named_parameters()}
        every = self._model.named_parameters(remove_duplicate=False)
        return {name: first[id(parameter)] for name, parameter in every if name != first[id(parameter)]}

    @torch.inference_mode()
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> int:
        own = self.named_weights()
        count = 0
        for name, tensor in named_tensors:
            own[name].copy_(tensor)
            count += 1
        self._repack()
        return count

    def _repack(self) -> None:
        """Refresh whatever was made from the weights."""


def eos_token_ids(model: nn.Module) -> tuple[int, ...]:
    """End-of-sequence ids of the generation config, else of the model's config."""
    module: CausalLM = model
    found = getattr(module.generation_config, "eos_token_id", None)
    found = module.config.eos_token_id if found is None else found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)

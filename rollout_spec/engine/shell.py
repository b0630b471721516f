"""A causal LM without a body: what drafters borrow of a policy that another engine runs.

Shape legend: V vocabulary, H hidden size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rollout_spec.engine.runner import CausalLM


def policy_shell(model: str, *, embedding: Tensor, head: Tensor, final_norm: Tensor) -> CausalLM:
    """The transformers module of a checkpoint directory with these very tensors (no copies) for its ends.

    embedding, head [V, H], final_norm [H]. Of the body only the last layer and the rotary table are there, the layer's weights zero:
    a drafter takes its class and shapes from it. Raises ValueError if the tensors are not of the checkpoint's shapes.
    """
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=embedding.dtype)
    last = module.model.layers[-1].to_empty(device=embedding.device)
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    module.model.layers = nn.ModuleList([last])
    module.model.rotary_emb = type(module.model.rotary_emb)(config=config).to(embedding.device)
    for name, owner, tensor in (
        ("embedding", module.get_input_embeddings(), embedding),
        ("head", module.get_output_embeddings(), head),
        ("final norm", module.model.norm, final_norm),
    ):
        if owner.weight.shape != tensor.shape:
            raise ValueError(f"the {name} is {tuple(tensor.shape)}, that of {model} {tuple(owner.weight.shape)}")
        owner.weight = nn.Parameter(tensor.detach(), requires_grad=False)
    return module.requires_grad_(False).eval()

"""What the tests ask servers for, and the weights they send them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

PROMPT = list(range(3, 19))
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def perturbed(policy: Path | str) -> dict[str, Tensor]:
    """The policy after a step of training, by Hugging Face names."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    return {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in model.state_dict().items()}

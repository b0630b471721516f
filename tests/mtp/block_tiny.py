"""A tiny policy, its rollouts as packed batches, and block models on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from rollout_spec_mtp.block.config import BlockConfig
from rollout_spec_mtp.block.model import BlockModel
from rollout_spec_mtp.losses import DraftBatch
from rollout_spec_mtp.training.packing import pack
from rollout_spec_mtp.training.protocol import PackedBatch, PolicyParts, SlotLayout
from rollout_spec_mtp.training.shards import Rollout

VOCAB = 61
MASK_ID = 60
BLOCK = 5
DRAFT_IDS = torch.tensor([31, 2, 3, 7, 40, 8, 12, 50, 21, 33, 59, 1])


def tiny_policy(*, tied: bool = False) -> nn.Module:
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return model


def block_model(policy: nn.Module, draft_token_ids: Tensor | None = None, *, seed: int = 5, **changes: object) -> BlockModel:
    """A block model whose random weights are large enough for every part of it to show in the logits."""
    torch.manual_seed(seed)
    values = {"mask_token_id": MASK_ID, "block_size": BLOCK, "num_layers": 2, "target_layers": 3, **changes}
    parts = PolicyParts.of(policy)
    model = BlockModel(BlockConfig.from_mapping(values, parts), parts, draft_token_ids)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return model


@torch.no_grad()
def rollout(policy: nn.Module, token_ids: Sequence[int], num_prompt_tokens: int, layers: Sequence[int]) -> Rollout:
    tokens = torch.tensor(token_ids)
    out = policy.model(tokens[None], output_hidden_states=True)
    hidden = {layer: out.hidden_states[layer + 1][0, :-1] for layer in layers if layer >= 0} | {-1: out.last_hidden_state[0, :-1]}
    log_probs = policy.lm_head(hidden[-1])
    return Rollout(
        key="r",
        token_ids=tokens,
        num_prompt_tokens=num_prompt_tokens,
        hidden=hidden,
        target_lse=log_probs.logsumexp(-1),
        target_entropies=torch.zeros(len(tokens) - 1),
    )


def packed(policy: nn.Module, model: BlockModel, lengths: Sequence[Sequence[tuple[int, int]]], seed: int = 0) -> PackedBatch:
    """Rows of sequences of (prompt, response) lengths with random tokens."""
    generator = torch.Generator().manual_seed(seed)

    def random_rollout(prompt: int, response: int) -> Rollout:
        tokens = torch.randint(3, VOCAB - 1, (prompt + response,), generator=generator)
        return rollout(policy, tokens.tolist(), prompt, model.hidden_layers)

    return pack([[random_rollout(*sizes) for sizes in row] for row in lengths])


def draft_batch(model: BlockModel, batch: PackedBatch, layout: SlotLayout) -> DraftBatch:
    ids, head = model.draft_token_ids, model.policy.head
    return DraftBatch(
        student_hidden=model(batch, layout),
        target_hidden=batch.hidden[-1].flatten(0, 1),
        target_rows=layout.target_rows,
        token_ids=batch.token_ids.flatten()[layout.token_rows],
        valid=layout.valid,
        student_head=head if ids is None else head[ids],
        target_head=head,
        draft_token_ids=ids,
    )

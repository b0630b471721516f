"""BlockModel: the block-diffusion drafter as it is trained.

Shape legend: P packed rows, L tokens of a row, F = P L flat rows, T anchors, B block size, G = B - 1 slots, H hidden size, N target layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rollout_spec_mtp.block.anchors import block_layout
from rollout_spec_mtp.block.attention import make_spans
from rollout_spec_mtp.block.config import LEARNED, SHARED, BlockConfig
from rollout_spec_mtp.block.layers import BlockLayer, RMSNorm, rotary
from rollout_spec_mtp.training.protocol import PackedBatch, PolicyParts, SlotLayout

_INIT_STD = 0.02


class BlockModel(nn.Module):
    """DFlash (arXiv 2602.06036) or, with fusion per_layer, DFlare. Implements training.protocol.TrainableDrafter.

    A block is ``[anchor token, mask × (B - 1)]``; slot i is filled from the last layer's row i + 1. No row depends on another's token,
    so the slots' distributions are marginals: independent of what is drawn at the others.
    """

    kind = "block"
    sequential = False

    def __init__(self, config: BlockConfig, policy: PolicyParts, draft_token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.policy, self.draft_token_ids = config, policy, draft_token_ids
        self.num_slots = config.num_slots
        self.hidden_layers = config.target_layers
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.fusion == SHARED:
            self.fc = nn.Linear(len(config.target_layers) * config.hidden_size, config.hidden_size, bias=False)
            self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.mask == LEARNED:
            self.mask_embedding = nn.Parameter(policy.embedding[config.mask_token_id].detach().float().clone())
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=_INIT_STD)
        # The borrowed head expects states on the scale of the policy's own final norm.
        self.norm.weight.data.copy_(policy.final_norm)

    def layout(self, batch: PackedBatch, seed: int) -> SlotLayout:
        """num_anchors random anchors of each sequence; in evaluation mode every anchor there is."""
        num_anchors = self.config.num_anchors if self.training else batch.token_ids.shape[1]
        return block_layout(batch, self.config.num_slots, num_anchors, seed)

    def forward(self, batch: PackedBatch, layout: SlotLayout) -> Tensor:
        """[T, G, H] states that the head is applied to."""
        config, flat_positions = self.config, batch.positions.flatten()
        tokens, positions = batch.token_ids.flatten()[layout.anchors], flat_positions[layout.anchors]
        spans = make_spans(layout.anchors, positions, config.block_size, config.attention_rows)
        states = torch.stack([batch.hidden[layer].flatten(0, 1) for layer in config.target_layers], dim=1).to(self.norm.weight.dtype)
        context_rope = rotary(flat_positions, config.head_dim, config.rope_theta)
        block_positions = positions[:, None] + torch.arange(config.block_size, device=positions.device)
        block_rope = rotary(block_positions, config.head_dim, config.rope_theta)
        x = self.embed(tokens)
        shared = self.shared_context(states) if config.fusion == SHARED else None
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            context = shared if layer.context_fusion is None else layer.context_fusion(states)
            x = layer(x, context, block_rope, context_rope, spans)
        normed: Tensor = self.norm(x[:, 1:])
        return normed

    def embed(self, tokens: Tensor) -> Tensor:
        """[T, B, H] inputs of the blocks that start from tokens [T]."""
        first = self.policy.embedding[tokens].to(self.norm.weight.dtype)
        mask = self.mask_vector().expand(tokens.shape[0], self.num_slots, -1)
        return torch.cat([first[:, None], mask], dim=1)

    def mask_vector(self) -> Tensor:
        """[H] input of the slots to be filled."""
        if self.config.mask == LEARNED:
            return self.mask_embedding
        return self.policy.embedding[self.config.mask_token_id].to(self.norm.weight.dtype)

    def shared_context(self, states: Tensor) -> Tensor:
        """[F, H] fused context from states [F, N, H]."""
        context: Tensor = self.hidden_norm(self.fc(states.flatten(1)))
        return context

    def config_mapping(self) -> dict[str, object]:
        return self.config.to_mapping()

"""MTPModel: one decoder layer of the policy's own kind that predicts the token after next, applied to its own output for later ones.

``u = W [norm_e(emb(x_{t+1})); norm_h(h_t)]``, ``g = norm(layer(u))``; the policy's head on g is the law of x_{t+2}. Step k > 1 takes g of
step k - 1 for h and x_{t+k} for the token (DeepSeek-V3, arXiv 2412.19437, section 2.2, with one module for all steps).

What a row sees is the same in training and serving. Step 1 of position t sees step-1 rows of positions <= t: the target's states of the
whole context. Step k of a draft from t sees those too, and of the later steps only its own draft's steps 2..k: when serving, the rows that
earlier drafts left behind are overwritten by step-1 rows as soon as the target's states are known.

Shape legend: P packed rows, L tokens of a row, A anchors of a row (padded), T anchors of all rows, G draft length, H hidden size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rollout_spec.engine.decoder import is_fusable
from rollout_spec_mtp.configs import to_mapping
from rollout_spec_mtp.mtp.config import MTPConfig
from rollout_spec_mtp.training.protocol import PADDING, PackedBatch, PolicyParts, SlotLayout


class MTPModel(nn.Module):
    """Holds the head's own parameters in float32; embedding, output head and rotary table are the policy's, borrowed."""

    kind = "mtp"
    sequential = True

    def __init__(self, config: MTPConfig, policy: PolicyParts, draft_token_ids: Tensor | None) -> None:
        super().__init__()
        if not is_fusable(policy.config):
            raise ValueError(
                f"an MTP head for model type {policy.config.model_type!r} cannot be served: its layer is not one the engine fuses"
            )
        self.config, self.num_slots, self.hidden_layers = config, config.draft_length, config.hidden_layers
        num_layers: int = policy.config.num_hidden_layers
        if max(config.hidden_layers) >= num_layers:
            raise ValueError(f"drafter.hidden_layers {config.hidden_layers}: the policy has layers 0 to {num_layers - 1}")
        hidden, eps = policy.hidden_size, policy.config.rms_norm_eps
        # In a tuple: as an attribute the policy would become a submodule, trained and saved with the head.
        self._borrowed = (policy,)
        self.embed_norm, self.hidden_norm, self.norm = (_Norm(hidden, eps=eps) for _ in range(3))
        self.tap_norms = nn.ModuleList(_Norm(hidden, eps=eps) for _ in config.hidden_layers) if len(config.hidden_layers) > 1 else None
        self.tap_fc = nn.Linear(len(config.hidden_layers) * hidden, hidden, bias=False) if self.tap_norms is not None else None
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = _new_layer(policy)
        self.window = sliding_window(policy)
        self.register_buffer("draft_token_ids", draft_token_ids, persistent=False)
        self.draft_token_ids: Tensor | None
        self.to(device=policy.head.device, dtype=torch.float32)
        self._start(config, policy)

    @property
    def policy(self) -> PolicyParts:
        return self._borrowed[0]

    def config_mapping(self) -> dict[str, object]:
        mapping: dict[str, object] = to_mapping(self.config)
        return mapping

    @torch.no_grad()
    def _start(self, config: MTPConfig, policy: PolicyParts) -> None:
        """Start near the policy: the state passes through unchanged, the token adds a little, the layer reads as the policy's last one.

        The layer adds nothing yet. What the policy's own layer would add was made for its last states, not for these, and unlearning
        it takes longer than learning (SmolLM2, 320 steps: acceptance .36 with it, .43 without).
        """
        hidden = policy.hidden_size
        self.norm.weight.copy_(policy.final_norm)
        self.fc.weight.normal_(std=0.5 * hidden**-0.5)
        self.fc.weight[:, hidden:] += torch.eye(hidden, device=self.fc.weight.device)
        if self.tap_fc is not None:
            self.tap_fc.weight.normal_(std=0.3 * self.tap_fc.in_features**-0.5)
            place = config.hidden_layers.index(max(config.hidden_layers, key=lambda layer: (layer == -1, layer)))
            self.tap_fc.weight[:, place * hidden : (place + 1) * hidden] += torch.eye(hidden, device=self.fc.weight.device)
        if config.start_from_policy:
            self.layer.load_state_dict(policy.module.model.layers[-1].state_dict())
        layer: Any = self.layer
        for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
            out.weight.zero_()

    def layout(self, batch: PackedBatch, seed: int) -> SlotLayout:  # noqa: ARG002  # every anchor is taken: nothing is random here
        """A draft starts from every state whose first drafted token is the policy's own: x_{t+2} of a response."""
        num_rows, length = batch.token_ids.shape
        steps = torch.arange(2, self.num_slots + 2, device=batch.token_ids.device)
        ahead = torch.arange(length, device=steps.device)[:, None] + steps  # [L, G] place of the token that slot k predicts
        inside = (ahead < length).expand(num_rows, -1, -1)
        ahead = ahead.clamp(max=length - 1)
        same = batch.sequence_ids[:, ahead] == batch.sequence_ids[:, :, None]
        valid = inside & same & batch.is_response[:, ahead] & (batch.sequence_ids != PADDING)[:, :, None]
        anchors = valid[..., 0].flatten().nonzero()[:, 0]
        token_rows = (ahead + torch.arange(num_rows, device=steps.device)[:, None, None] * length).flatten(0, 1)[anchors]
        return SlotLayout(anchors=anchors, token_rows=token_rows, target_rows=token_rows - 1, valid=valid.flatten(0, 1)[anchors])

    def forward(self, batch: PackedBatch, layout: SlotLayout) -> Tensor:
        """[T, G, H] states g of every slot of the layout, teacher-forced; G may be less than num_slots."""
        length = batch.token_ids.shape[1]
        rows, places = layout.anchors // length, layout.anchors % length
        rank = _rank_in_group(rows)
        index = places.new_zeros(batch.token_ids.shape[0], int(rank.max()) + 1 if rank.numel() else 1)
        index[rows, rank] = places  # [P, A]
        cache = _DraftCache()
        visible = self._visible(batch)
        following = torch.nn.functional.pad(batch.token_ids[:, 1:], (0, 1))
        state = self._step(self._fuse(batch), following, batch.positions, visible[:, None], cache)
        state = _take(state, index)
        outputs = [state]
        own = torch.eye(index.shape[1], dtype=torch.bool, device=index.device).expand(index.shape[0], -1, -1)
        for step in range(2, layout.valid.shape[1] + 1):
            # Padded and invalid slots repeat the row's last token; nothing valid sees them.
            tokens = batch.token_ids.gather(1, (index + step).clamp(max=length - 1))
            positions = batch.positions.gather(1, index) + step - 1
            context = visible.gather(1, index[:, :, None].expand(-1, -1, length))
            if self.window:
                context = context & (batch.positions[:, None, :] > positions[:, :, None] - self.window)
            mask = torch.cat([context, own.repeat(1, 1, step - 1)], dim=2)
            state = self._step(state, tokens, positions, mask[:, None], cache)
            outputs.append(state)
        return torch.stack([output[rows, rank] for output in outputs], dim=1)

    def _fuse(self, batch: PackedBatch) -> Tensor:
        """[P, L, H] what step 1 takes for the target's state."""
        taps = [batch.hidden[layer].to(torch.float32) for layer in self.hidden_layers]
        if self.tap_norms is None or self.tap_fc is None:
            return taps[0]
        fused: Tensor = self.tap_fc(torch.cat([norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True)], dim=-1))
        return fused

    def _step(self, state: Tensor, token_ids: Tensor, positions: Tensor, mask: Tensor, cache: _DraftCache) -> Tensor:
        """One application of the head: state, token_ids [P, Q, ...], mask [P, 1, Q, keys so far] -> [P, Q, H]."""
        embedded = torch.nn.functional.embedding(token_ids, self.policy.embedding).to(torch.float32)
        mixed = self.fc(torch.cat([self.embed_norm(embedded), self.hidden_norm(state)], dim=-1))
        rotary = self.policy.module.model.rotary_emb(mixed, positions)
        out = self.layer(mixed, attention_mask=mask, position_embeddings=rotary, past_key_values=cache, use_cache=True)
        normed: Tensor = self.norm(out)
        return normed

    def _visible(self, batch: PackedBatch) -> Tensor:
        """[P, L, L] bool: step-1 rows that a row of the same sequence sees; padding sees padding."""
        places = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
        visible = (places <= places[:, None]) & (batch.sequence_ids[:, None, :] == batch.sequence_ids[:, :, None])
        if self.window:
            visible = visible & (batch.positions[:, None, :] > batch.positions[:, :, None] - self.window)
        return visible


class _Norm(nn.RMSNorm):
    """In float32 whatever comes in, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class _DraftCache:
    """Keys and values of the steps so far, with their gradients; as much of transformers' cache as a decoder layer calls."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self._keys.append(keys)
        self._values.append(values)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)


def sliding_window(policy: PolicyParts) -> int:
    """Window of the policy's last layer, 0 = none. Qwen keeps it at each layer, Mistral in the config for all of them."""
    if policy.config.model_type == "mistral":
        return policy.config.sliding_window or 0
    attention = policy.module.model.layers[-1].self_attn
    return getattr(attention, "sliding_window", None) or 0


def _new_layer(policy: PolicyParts) -> nn.Module:
    config = copy.deepcopy(policy.config)
    # The mask is a free one, which flash attention does not take.
    config._attn_implementation = "sdpa"  # noqa: SLF001  # transformers has no public setter on a config
    last = policy.module.model.layers[-1]
    layer: nn.Module = type(last)(config, layer_idx=config.num_hidden_layers - 1)
    return layer


def _rank_in_group(groups: Tensor) -> Tensor:
    """[T] how many earlier entries of the ascending groups [T] are equal."""
    places = torch.arange(groups.shape[0], device=groups.device)
    return places - torch.searchsorted(groups, groups)


def _take(states: Tensor, index: Tensor) -> Tensor:
    """states [P, L, H] at index [P, A] -> [P, A, H]."""
    return states.gather(1, index[:, :, None].expand(-1, -1, states.shape[2]))

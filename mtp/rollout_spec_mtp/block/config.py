"""BlockConfig: sizes and choices of a block-diffusion drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_spec_mtp.training.protocol import PolicyParts

SHARED, PER_LAYER = "shared", "per_layer"
TOKEN, LEARNED = "token", "learned"
_CHOICES = {"fusion": (SHARED, PER_LAYER), "mask": (TOKEN, LEARNED)}


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sizes default to the policy's in ``from_mapping``.

    ``fusion`` "shared" is DFlash: the states of all target layers concatenated, one projection, one norm, and every draft layer's own
    k_proj and v_proj on the result. "per_layer" is DFlare: every draft layer weighs the target layers itself and has projections of its
    own for the context.
    ``mask`` "token" feeds the policy's own embedding of ``mask_token_id`` to the slots that are to be filled, as the published
    checkpoints do; "learned" trains that one vector, starting there.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    vocab_size: int
    num_policy_layers: int
    target_layers: tuple[int, ...]  # decoder layers of the policy whose outputs are the context
    block_size: int  # the last committed token and block_size - 1 slots to fill
    mask_token_id: int  # a token that rollouts never hold
    mask: str = TOKEN
    fusion: str = SHARED
    num_anchors: int = 128  # of each sequence, in training
    attention_rows: int = 256  # block rows that attend to the context in one product in training: bounds its mask

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position", "vocab_size")
        for name in (*sizes, "num_anchors", "attention_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(
                f"{self.num_heads} heads of {self.head_dim} do not go with {self.num_kv_heads} key/value heads and rotary positions"
            )
        if not 2 <= self.block_size <= 32:
            raise ValueError(f"block_size must be from 2 to 32, got {self.block_size}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        distinct = sorted(set(self.target_layers))
        if not distinct or len(distinct) != len(self.target_layers) or distinct[0] < 0 or distinct[-1] >= self.num_policy_layers:
            raise ValueError(f"target_layers {self.target_layers} must be distinct layers of the policy's {self.num_policy_layers}")

        if self.fusion == PER_LAYER and len(distinct) == 1:
            raise ValueError("fusion per_layer weighs several target_layers: name two or more, or take fusion shared")

    @property
    def num_slots(self) -> int:
        return self.block_size - 1

    def to_mapping(self) -> dict[str, object]:
        """Plain JSON values; ``from_mapping`` gives the same config back."""
        return {**dataclasses.asdict(self), "target_layers": list(self.target_layers)}

    @staticmethod
    def from_mapping(values: Mapping[str, Any], policy: PolicyParts) -> BlockConfig:
        """The config that values describe, sizes they leave out taken from the policy.

        ``target_layers`` may be a count: that many layers spread as the DFlash checkpoints have them (``spread_layers``).
        Raises ValueError for unknown keys, a missing mask_token_id, and sizes that do not fit the policy.
        """
        known = {field.name for field in dataclasses.fields(BlockConfig)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"block drafter: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
        if "mask_token_id" not in values:
            raise ValueError(
                "block drafter: mask_token_id is missing: name a token that never occurs in rollouts (an unused special token)"
            )
        merged = {**_policy_sizes(policy), "num_layers": 4, "block_size": 8, "target_layers": 5, **values}
        layers = merged["target_layers"]
        num_policy_layers = merged["num_policy_layers"]
        merged["target_layers"] = spread_layers(num_policy_layers, layers) if isinstance(layers, int) else tuple(layers)
        config = BlockConfig(**merged)
        own = _policy_sizes(policy)
        for name in ("hidden_size", "vocab_size", "num_policy_layers"):
            if getattr(config, name) != own[name]:
                raise ValueError(f"block drafter: {name} {getattr(config, name)} does not fit the policy's {own[name]}")
        return config


def spread_layers(num_policy_layers: int, count: int) -> tuple[int, ...]:
    """``round(1 + i (L - 4) / (count - 1))`` for i < count (DFlash, arXiv 2602.06036): from layer 1 to layer L - 3; one: the middle."""
    if count == 1:
        return (num_policy_layers // 2,)
    if not 1 <= count <= num_policy_layers - 3:
        raise ValueError(
            f"target_layers {count}: a policy of {num_policy_layers} layers has {max(num_policy_layers - 3, 1)} to spread them over"
        )
    return tuple(round(1 + i * (num_policy_layers - 4) / (count - 1)) for i in range(count))


def _policy_sizes(policy: PolicyParts) -> dict[str, Any]:
    config = policy.config
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "hidden_size": policy.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "max_position": config.max_position_embeddings,
        "vocab_size": policy.vocab_size,
        "num_policy_layers": config.num_hidden_layers,
    }

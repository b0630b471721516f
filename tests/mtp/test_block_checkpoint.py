"""The published DFlash layout: written by name, read back, and every fault named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_tiny import BLOCK, DRAFT_IDS, MASK_ID, block_model, packed, tiny_policy
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout_spec_mtp.block.checkpoint import CONFIG, MASK, WEIGHTS, is_dflash, load_dflash, save_dflash
from rollout_spec_mtp.block.model import BlockModel

LAYER_NAMES = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
}
# What z-lab/Qwen3-4B-DFlash-b16 holds, and vLLM's qwen3_dflash.py loads.
PUBLISHED_NAMES = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {f"layers.{i}.{name}" for i in range(2) for name in LAYER_NAMES}
PUBLISHED_KEYS = {
    "architectures",
    "attention_bias",
    "block_size",
    "dflash_config",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_target_layers",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
}


def same_outputs(ours: BlockModel, theirs: BlockModel) -> bool:
    batch = packed(tiny_policy(), ours, [[(3, 6), (2, 9)]])
    layout = ours.layout(batch, seed=0)
    return torch.equal(ours(batch, layout), theirs(batch, layout))


@pytest.mark.parametrize("ids", [None, DRAFT_IDS], ids=["whole", "reduced"])
@pytest.mark.parametrize("mask", ["token", "learned"])
def test_round_trip(tmp_path: Path, mask: str, ids: Tensor | None) -> None:
    policy = tiny_policy()
    model = block_model(policy, ids, mask=mask)
    save_dflash(model, tmp_path, torch.float32)
    assert is_dflash(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    assert set(tensors) == PUBLISHED_NAMES | (set() if ids is None else {"d2t", "lm_head.weight"})
    again = load_dflash(tmp_path, model.policy)
    assert again.config == model.config
    assert same_outputs(model, again)
    if ids is None:
        assert again.draft_token_ids is None
    else:
        assert again.draft_token_ids is not None
        assert again.draft_token_ids.tolist() == ids.tolist()
        # Offsets, not ids: vLLM adds the column to them.
        assert (tensors["d2t"] + torch.arange(len(ids))).tolist() == ids.tolist()
        assert torch.equal(tensors["lm_head.weight"], model.policy.head[ids])


def test_config_is_what_hosts_read(tmp_path: Path) -> None:
    model = block_model(tiny_policy(), DRAFT_IDS, mask="learned")
    save_dflash(model, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert set(config) >= PUBLISHED_KEYS
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"mask_token_id": MASK_ID, "target_layer_ids": [1, 3, 5]}
    assert (config["block_size"], config["num_hidden_layers"], config["num_target_layers"]) == (BLOCK, 2, 8)
    assert config["layer_types"] == ["full_attention"] * 2
    assert (config["draft_vocab_size"], config["vocab_size"], config["dtype"]) == (12, 61, "bfloat16")
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in load_file(tmp_path / WEIGHTS).items() if name != "d2t")
    mask = torch.load(tmp_path / MASK, weights_only=True)
    assert mask["mask_token_id"] == MASK_ID
    assert torch.equal(mask["embedding"], model.mask_embedding.to(torch.bfloat16))


def test_older_spellings_are_read(tmp_path: Path) -> None:
    """rope_theta alone, block_size inside dflash_config, no dtype or num_target_layers, copies of the policy's embedding and head."""
    policy = tiny_policy()
    model = block_model(policy)
    save_dflash(model, tmp_path, torch.float32)
    change_config(
        tmp_path, lambda config: [config.pop(name) for name in ("rope_parameters", "block_size", "num_target_layers", "layer_types")]
    )
    change_config(tmp_path, lambda config: config["dflash_config"].update(block_size=BLOCK))
    copies = {"embed_tokens.weight": model.policy.embedding.clone(), "lm_head.weight": model.policy.head.clone()}
    change_weights(tmp_path, lambda tensors: tensors.update(copies))
    assert same_outputs(model, load_dflash(tmp_path, model.policy))


def change_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((directory / CONFIG).read_text())
    change(config)
    (directory / CONFIG).write_text(json.dumps(config))


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


BROKEN_WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda tensors: tensors.pop("layers.1.self_attn.k_norm.weight"), "missing tensor layers.1.self_attn.k_norm.weight"),
    "unexpected": (
        lambda tensors: tensors.update({"layers.2.input_layernorm.weight": torch.ones(32)}),
        "unknown tensor layers.2.input_layernorm",
    ),
    "misshapen": (lambda tensors: tensors.update({"fc.weight": torch.ones(32, 64)}), "fc.weight has shape"),
    "not finite": (lambda tensors: tensors["norm.weight"].fill_(torch.inf), "norm.weight holds NaN or infinity"),
    "own head": (lambda tensors: tensors.update({"lm_head.weight": torch.randn(61, 32)}), "lm_head.weight is not the policy's"),
    "other head": (lambda tensors: tensors.update({"lm_head.weight": torch.randn(60, 32)}), "lm_head.weight has shape"),
    "stray map": (lambda tensors: tensors.update({"d2t": torch.arange(5)}), "draft_vocab_size 61, the weights hold 5"),
}
BROKEN_CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no layers": (lambda config: config["dflash_config"].pop("target_layer_ids"), "no dflash_config.target_layer_ids"),
    "no mask": (lambda config: config["dflash_config"].pop("mask_token_id"), "no dflash_config.mask_token_id"),
    "window": (lambda config: config.update(layer_types=["sliding_attention"] * 2), "layer_types other than full_attention"),
    "causal": (lambda config: config["dflash_config"].update(causal=True), "dflash_config.causal"),
    "bias": (lambda config: config.update(attention_bias=True), "attention_bias"),
    "rope": (lambda config: config.update(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "a rope other than the default"),
    "width": (lambda config: config.update(hidden_size=64), "hidden_size 64 does not fit the policy's 32"),
    "policy": (lambda config: config.update(num_target_layers=9), "num_policy_layers 9 does not fit the policy's 8"),
    "vocabulary": (lambda config: config.update(draft_vocab_size=12), "draft_vocab_size 12, the weights hold 61"),
}


@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_broken_weights_are_named(tmp_path: Path, name: str) -> None:
    model = block_model(tiny_policy())
    save_dflash(model, tmp_path)
    change, message = BROKEN_WEIGHTS[name]
    change_weights(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_dflash(tmp_path, model.policy)


@pytest.mark.parametrize("name", BROKEN_CONFIGS)
def test_broken_configs_are_named(tmp_path: Path, name: str) -> None:
    model = block_model(tiny_policy())
    save_dflash(model, tmp_path)
    change, message = BROKEN_CONFIGS[name]
    change_config(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_dflash(tmp_path, model.policy)


def test_a_map_of_ids_in_place_of_offsets_is_refused(tmp_path: Path) -> None:
    model = block_model(tiny_policy(), DRAFT_IDS)
    save_dflash(model, tmp_path)
    change_weights(tmp_path, lambda tensors: tensors.update({"d2t": DRAFT_IDS.clone()}))
    with pytest.raises(ValueError, match="d2t does not give distinct token ids below 61"):
        load_dflash(tmp_path, model.policy)


def test_a_mask_embedding_of_another_token_is_refused(tmp_path: Path) -> None:
    model = block_model(tiny_policy(), mask="learned")
    save_dflash(model, tmp_path)
    change_config(tmp_path, lambda config: config["dflash_config"].update(mask_token_id=7))
    with pytest.raises(ValueError, match=f"is for mask_token_id {MASK_ID}, the config says 7"):
        load_dflash(tmp_path, model.policy)


def test_saving_again_without_a_learned_mask_leaves_no_old_one(tmp_path: Path) -> None:
    policy = tiny_policy()
    save_dflash(block_model(policy, mask="learned"), tmp_path)
    model = block_model(policy)
    save_dflash(model, tmp_path, torch.float32)
    assert same_outputs(model, load_dflash(tmp_path, model.policy))


def test_what_the_layout_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="per_layer has no published DFlash layout"):
        save_dflash(block_model(tiny_policy(), fusion="per_layer"), tmp_path)
    assert not is_dflash(tmp_path)
    save_dflash(block_model(tiny_policy()), tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"no \.safetensors file"):
        load_dflash(tmp_path, block_model(tiny_policy()).policy)

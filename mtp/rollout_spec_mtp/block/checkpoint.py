"""The published DFlash layout: what z-lab's checkpoints hold, and vLLM and SGLang serve.

A directory with ``config.json`` (a Qwen3 config plus ``block_size`` and ``dflash_config``) and ``model.safetensors`` with our own parameter
names. Embedding and head are the target's and not in it, except with a reduced vocabulary: ``lm_head.weight`` then holds its rows and
``d2t`` their ids as offsets (``id = column + d2t[column]``). A trained mask embedding lies beside it in ``mask_embedding.pt``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout_spec.engine.weights import checked
from rollout_spec_mtp.block.config import LEARNED, SHARED, TOKEN, BlockConfig
from rollout_spec_mtp.block.model import BlockModel
from rollout_spec_mtp.training.protocol import PolicyParts

ARCHITECTURE = "DFlashDraftModel"
WEIGHTS, CONFIG, MASK = "model.safetensors", "config.json", "mask_embedding.pt"
_MASK_NAME, _OFFSETS, _HEAD, _EMBEDDING = "mask_embedding", "d2t", "lm_head.weight", "embed_tokens.weight"
# A copied head drifts from the policy's as that is trained; one that is this far off (relative norm) was trained by itself.
_MAX_HEAD_DRIFT = 0.1


def is_dflash(directory: Path) -> bool:
    """True if the directory's config.json is one of the published layout."""
    path = directory / CONFIG
    return path.is_file() and ARCHITECTURE in (json.loads(path.read_text()).get("architectures") or [])


def save_dflash(model: BlockModel, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model in the published layout. ValueError for fusion per_layer, which that layout does not have."""
    if model.config.fusion != SHARED:
        raise ValueError("fusion per_layer has no published DFlash layout: train with fusion shared to serve the drafter elsewhere")
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().to(dtype).contiguous() for name, value in model.named_parameters() if name != _MASK_NAME}
    ids = model.draft_token_ids
    if ids is not None:
        tensors[_HEAD] = model.policy.head[ids].detach().cpu().to(dtype).contiguous()
        tensors[_OFFSETS] = (ids - torch.arange(ids.numel(), device=ids.device)).cpu()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    mask_path = directory / MASK
    if model.config.mask == LEARNED:
        content = {"embedding": model.mask_embedding.detach().cpu().to(dtype), "mask_token_id": model.config.mask_token_id}
        torch.save(content, mask_path)
    else:
        mask_path.unlink(missing_ok=True)
    (directory / CONFIG).write_text(json.dumps(public_config(model, dtype), indent=2) + "\n")


def public_config(model: BlockModel, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the published layout."""
    config, ids = model.config, model.draft_token_ids
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layers)},
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": config.max_position,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_target_layers": config.num_policy_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }
    return values if ids is None else {**values, "draft_vocab_size": ids.numel()}


def load_dflash(directory: Path, policy: PolicyParts) -> BlockModel:
    """The model that a directory of the published layout holds, in float32.

    Raises ValueError that names what is missing, unexpected, misshapen or not finite in it, or what this drafter does not compute.
    """
    values = json.loads((directory / CONFIG).read_text())
    tensors = _read(directory)
    mask_path = directory / MASK
    config = BlockConfig.from_mapping(_own_config(values, LEARNED if mask_path.is_file() else TOKEN), policy)
    offsets = tensors.pop(_OFFSETS, None)
    ids = None if offsets is None else offsets.long() + torch.arange(offsets.numel())
    _check_vocabulary(values, ids, policy)
    _check_borrowed(tensors, policy, ids)
    if config.mask == LEARNED:
        tensors[_MASK_NAME] = _read_mask(mask_path, config.mask_token_id)
    model = BlockModel(config, policy, None if ids is None else ids.to(policy.head.device))
    own = dict(model.named_parameters())
    try:
        pairs = checked(tensors.items(), own, {}, partial=False)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    with torch.no_grad():
        for name, tensor in pairs:
            own[name].copy_(tensor)
    return model


def _read(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} holds a config.json but no .safetensors file")
    return {name: tensor for path in files for name, tensor in load_file(path).items() if name != "t2d"}


def _read_mask(path: Path, mask_token_id: int) -> Tensor:
    """[H] from a tensor, or a mapping that names its token."""
    held = torch.load(path, weights_only=True)
    if isinstance(held, Mapping):
        if held.get("mask_token_id", mask_token_id) != mask_token_id:
            raise ValueError(f"{path} is for mask_token_id {held['mask_token_id']}, the config says {mask_token_id}")
        held = held["embedding"]
    assert isinstance(held, Tensor)
    return held.reshape(-1)


def _own_config(values: Mapping[str, Any], mask: str) -> dict[str, Any]:
    """BlockConfig's values from the published config's."""
    nested = values.get("dflash_config") or {}
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    missing = [name for name in ("target_layer_ids", "mask_token_id") if name not in {**values, **nested}]
    if missing:
        raise ValueError(f"config.json has no dflash_config.{missing[0]}")
    unsupported = {
        "attention_bias": values.get("attention_bias", False),
        "layer_types other than full_attention": set(values.get("layer_types") or ["full_attention"]) - {"full_attention"},
        "dflash_config.causal": nested.get("causal", False),
        "dflash_config.use_swa": nested.get("use_swa", False),
        "a rope other than the default": rope.get("rope_type", rope.get("type", "default")) != "default",
        "hidden_act other than silu": values.get("hidden_act", "silu") != "silu",
        "final_logit_softcapping": nested.get("final_logit_softcapping", values.get("final_logit_softcapping")),
    }
    found = [name for name, value in unsupported.items() if value]
    if found:
        raise ValueError(f"config.json asks for {found[0]}, which the block drafter does not compute")
    heads = values["num_attention_heads"]
    own = {
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["intermediate_size"],
        "num_layers": values["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": values["num_key_value_heads"],
        "head_dim": values.get("head_dim") or values["hidden_size"] // heads,
        "rms_norm_eps": values["rms_norm_eps"],
        "rope_theta": float(rope.get("rope_theta", values.get("rope_theta", 10000.0))),
        "max_position": values["max_position_embeddings"],
        "vocab_size": values["vocab_size"],
        "target_layers": nested.get("target_layer_ids", values.get("target_layer_ids")),
        "block_size": nested.get("block_size", values.get("block_size", 16)),
        "mask_token_id": nested.get("mask_token_id", values.get("mask_token_id")),
        "mask": mask,
    }
    if "num_target_layers" in values:
        own["num_policy_layers"] = values["num_target_layers"]
    return own


def _check_vocabulary(values: Mapping[str, Any], ids: Tensor | None, policy: PolicyParts) -> None:
    wanted = values.get("draft_vocab_size") or policy.vocab_size
    held = policy.vocab_size if ids is None else ids.numel()
    if held != wanted:
        raise ValueError(f"config.json says draft_vocab_size {wanted}, the weights hold {held} (d2t)")
    if ids is not None and (int(ids.min()) < 0 or int(ids.max()) >= policy.vocab_size or torch.unique(ids).numel() != ids.numel()):
        raise ValueError(f"d2t does not give distinct token ids below {policy.vocab_size}: it must hold offsets, id - column")


def _check_borrowed(tensors: dict[str, Tensor], policy: PolicyParts, ids: Tensor | None) -> None:
    """Take copies of the policy's embedding and head out of tensors; ValueError if one is not a copy: it would be lost."""
    for name, own in ((_HEAD, policy.head if ids is None else policy.head[ids.to(policy.head.device)]), (_EMBEDDING, policy.embedding)):
        copy = tensors.pop(name, None)
        if copy is None:
            continue
        if copy.shape != own.shape:
            raise ValueError(f"{name} has shape {tuple(copy.shape)}, the policy's rows are {tuple(own.shape)}")
        own = own.float().cpu()
        if not float((copy.float() - own).norm()) <= _MAX_HEAD_DRIFT * float(own.norm()):
            raise ValueError(f"{name} is not the policy's: the block drafter borrows embedding and head and cannot use others")

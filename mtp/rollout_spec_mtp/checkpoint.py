"""Drafters on disk: a directory with config.json and model.safetensors, written whole or not at all.

config.json says which kind of drafter it is, its settings, and which policy it was trained for.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rollout_spec_mtp.training.protocol import PolicyParts

FORMAT_VERSION = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
VOCABULARY = "draft_token_ids"  # the reduced vocabulary, as ids of the policy's tokens (not offsets)
# What of a policy's config decides whether a drafter's layer, states and tokens mean the same.
_ARCHITECTURE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
)


def fingerprint(policy: PolicyParts) -> dict[str, object]:
    """Which policy a drafter belongs to: its sizes, and a hash over its architecture (not its weights: those move in training)."""
    config = policy.config.to_dict()
    architecture = json.dumps({name: config.get(name) for name in _ARCHITECTURE}, sort_keys=True)
    return {
        "vocab_size": policy.vocab_size,
        "hidden_size": policy.hidden_size,
        "config_sha256": hashlib.sha256(architecture.encode()).hexdigest(),
    }


def save_drafter(
    directory: Path,
    model: Any,
    policy: PolicyParts,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    about: Mapping[str, object] | None = None,
) -> None:
    """Write a trainable drafter (``tensors`` instead of its own weights, if given); ``about`` is kept in config.json for the reader."""
    weights = dict(model.state_dict() if tensors is None else tensors)
    weights = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()}
    if model.draft_token_ids is not None:
        weights[VOCABULARY] = model.draft_token_ids.to(device="cpu", dtype=torch.int64)
    config = {
        "format_version": FORMAT_VERSION,
        "kind": model.kind,
        "settings": model.config_mapping(),
        "num_draft_tokens": None if model.draft_token_ids is None else model.draft_token_ids.numel(),
        "policy": fingerprint(policy),
        "about": dict(about or {}),
    }
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        save_file(weights, part / WEIGHTS)
        (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        part.chmod(0o755)
        replace_directory(part, directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def replace_directory(new: Path, target: Path) -> None:
    """Put ``new`` in the place of ``target``. Between the two renames the old one is beside it, under its name with a dot before it."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def read_json(directory: Path) -> Any:
    """What a directory's config.json holds. ValueError if there is none, or it is no JSON."""
    path = directory / CONFIG
    old = directory.with_name(f".{directory.name}.old")
    if not path.exists():
        hint = f"; an interrupted save left the earlier one in {old}" if old.exists() else ""
        raise ValueError(f"{directory} is no drafter's directory: it has no {CONFIG}{hint}")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None


def read_config(directory: Path) -> dict[str, Any]:
    """A drafter directory's config.json. ValueError if it is not one."""
    config, path = read_json(directory), directory / CONFIG
    if not isinstance(config, dict) or "kind" not in config or "format_version" not in config:
        raise ValueError(f"{path} does not describe a drafter (no kind and format_version)")
    if config["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{path} is of format version {config['format_version']}; this program reads {FORMAT_VERSION}")
    return config


def check_policy(directory: Path, config: Mapping[str, Any], policy: PolicyParts) -> None:
    """Raise ValueError if the drafter was trained for a policy of another architecture."""
    own, wanted = fingerprint(policy), config["policy"]
    different = [f"{name} {wanted.get(name)!r} there, {value!r} here" for name, value in own.items() if wanted.get(name) != value]
    if different:
        raise ValueError(f"{directory} was trained for another policy ({'; '.join(different)}): train a drafter for this model")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A safetensors file's tensors; ValueError if there is none or it is cut."""
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from error
    return tensors


def load_checked(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Load all of a module's weights, widened to its own dtype. ValueError names every faulty tensor, and nothing is changed then."""
    expected = model.state_dict()
    faults = {
        "missing": sorted(set(expected) - set(tensors)),
        "unexpected": sorted(set(tensors) - set(expected)),
        "misshapen": [
            f"{name} {tuple(tensors[name].shape)} for {tuple(expected[name].shape)}"
            for name in expected
            if name in tensors and tensors[name].shape != expected[name].shape
        ],
        "not finite": [name for name, tensor in tensors.items() if tensor.is_floating_point() and not bool(tensor.isfinite().all())],
        # A bias may well be zero; a weight matrix or norm that is was never trained.
        "all zero": [name for name, tensor in tensors.items() if not name.endswith("bias") and tensor.numel() and not bool(tensor.any())],
    }
    found = [f"{what}: {', '.join(names)}" for what, names in faults.items() if names]
    if found:
        raise ValueError(f"{where}: the drafter's tensors do not fit ({'; '.join(found)})")
    model.load_state_dict({name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()})


def check_vocabulary(directory: Path, ids: Tensor, vocab_size: int) -> None:
    if (
        ids.dtype != torch.int64
        or ids.ndim != 1
        or ids.unique().numel() != ids.numel()
        or int(ids.min()) < 0
        or int(ids.max()) >= vocab_size
    ):
        raise ValueError(f"{directory}: {VOCABULARY} must be distinct int64 token ids below {vocab_size} (ids, not offsets)")

"""MTP heads inside a policy's checkpoint, under the names that published models use.

| layout   | as in                     | names                                                                    |
|----------|---------------------------|--------------------------------------------------------------------------|
| mtp      | Qwen3-Next, Qwen3.5       | mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.layers.0.*, mtp.norm |
| mimo     | MiMo                      | model.mtp_layers.0.* with token_layernorm, hidden_layernorm, input_proj, final_layernorm |
| deepseek | DeepSeek-V3               | model.layers.{L}.* with enorm, hnorm, eh_proj, shared_head.norm (L = number of layers) |

MiMo joins state before embedding, the others and we embedding before state: the two halves of its projection change places.
Only the first MTP module is read: it is applied recursively, as engines do that serve more steps than a checkpoint has modules.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollout_spec.files import write_text
from rollout_spec_mtp.checkpoint import load_checked
from rollout_spec_mtp.mtp.config import MTPConfig
from rollout_spec_mtp.mtp.model import MTPModel
from rollout_spec_mtp.training.protocol import PolicyParts

_OWN_NAMES = ("embed_norm", "hidden_norm", "fc", "norm")
_NAMES: dict[str, tuple[str, ...]] = {
    "mtp": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "mimo": tuple(f"model.mtp_layers.0.{name}" for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
    "deepseek": tuple(f"model.layers.{{L}}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
}
_LAYER = {"mtp": "mtp.layers.0.", "mimo": "model.mtp_layers.0.", "deepseek": "model.layers.{L}."}
# Copies of the policy's own embedding and head that some checkpoints repeat beside the head.
_SHARED = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")
LAYOUTS = tuple(_NAMES)


def to_published(model: MTPModel, layout: str) -> dict[str, Tensor]:
    """The head's tensors under a layout's names. ValueError for a head that the layout has no names for."""
    if layout not in _NAMES:
        raise ValueError(f"layout {layout!r} is not known: give one of {', '.join(LAYOUTS)}")
    if model.tap_fc is not None or model.hidden_layers != (-1,):
        raise ValueError(f"published MTP heads read the final state alone; this one reads layers {model.hidden_layers}")
    if model.draft_token_ids is not None:
        raise ValueError("published MTP heads have no reduced vocabulary: drop draft_token_ids first (the weights do not depend on it)")
    number = model.policy.config.num_hidden_layers
    return {_published_name(name, layout, number): _halves(name, tensor, layout) for name, tensor in model.state_dict().items()}


def from_published(tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The first MTP head's tensors under MTPModel's names. ValueError if there is none."""
    layout = layout_of(tensors, num_layers)
    if layout is None:
        raise ValueError("no MTP head: no tensor is named mtp.*, model.mtp_layers.0.* or like DeepSeek's model.layers.{L}.eh_proj")
    by_published = {name.replace("{L}", str(num_layers)): own for name, own in zip(_NAMES[layout], _OWN_NAMES, strict=True)}
    prefix = _LAYER[layout].replace("{L}", str(num_layers))
    found = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if stem in by_published:
            own = f"{by_published[stem]}.{kind}"
            found[own] = _halves(own, tensor, layout)
        elif name.startswith(prefix) and not name.endswith(_SHARED):
            found[f"layer.{name.removeprefix(prefix)}"] = tensor
    return found


def layout_of(names: Mapping[str, object], num_layers: int) -> str | None:
    """Which layout's projection is among the names; None if there is none."""
    for layout, published in _NAMES.items():
        if f"{published[_OWN_NAMES.index('fc')]}.weight".replace("{L}", str(num_layers)) in names:
            return layout
    return None


def is_published(directory: Path) -> bool:
    """True if the directory is a model checkpoint with an MTP head inside."""
    config = directory / "config.json"
    if not config.exists():
        return False
    settings = json.loads(config.read_text())
    number = settings.get("num_hidden_layers") if isinstance(settings, dict) else None
    return number is not None and layout_of(_files_by_name(directory), number) is not None


def load_published(directory: Path, policy: PolicyParts) -> MTPModel:
    """The head inside a model checkpoint of this policy. ValueError names tensors that are missing or do not fit."""
    number: int = policy.config.num_hidden_layers
    tensors = {}
    for name, file in _files_by_name(directory).items():
        if name.startswith(("mtp.", "model.mtp_layers.0.", f"model.layers.{number}.")):
            with safe_open(directory / file, framework="pt") as opened:
                tensors[name] = opened.get_tensor(name)
    model = MTPModel(MTPConfig(), policy, None)
    load_checked(model, from_published(tensors, number), str(directory))
    return model


def write_published(model: MTPModel, layout: str, directory: Path) -> None:
    """Put the head beside a sharded or single-file checkpoint of the policy, as one more file that its index names."""
    files = _files_by_name(directory)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in to_published(model, layout).items()}
    taken = sorted(set(tensors) & set(files))
    if taken:
        raise ValueError(f"{directory} already holds {', '.join(taken)}")
    save_file(tensors, directory / "mtp.safetensors", metadata={"format": "pt"})
    sizes = sum((directory / file).stat().st_size for file in {*files.values(), "mtp.safetensors"})
    index = {"metadata": {"total_size": sizes}, "weight_map": {**files, **dict.fromkeys(tensors, "mtp.safetensors")}}
    write_text(directory / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def copy_with_head(model: MTPModel, checkpoint: Path, out: Path, layout: str = "mtp") -> None:
    """A copy of the policy's checkpoint with the head in it, over the whole vocabulary: a reduced one only chooses rows of the head.

    ValueError for a head that reads other states than the final one.
    """
    whole = MTPModel(model.config, model.policy, None)
    whole.load_state_dict(model.state_dict())
    to_published(whole, layout)  # refuses before anything is written
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(checkpoint, part)
    write_published(whole, layout, part)
    part.rename(out)


def _published_name(name: str, layout: str, num_layers: int) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _OWN_NAMES:
        published = f"{_NAMES[layout][_OWN_NAMES.index(stem)]}.{kind}"
    else:
        published = _LAYER[layout] + name.removeprefix("layer.")
    return published.replace("{L}", str(num_layers))


def _halves(own_name: str, tensor: Tensor, layout: str) -> Tensor:
    """The projection's two input halves in the other order where the layout has it so."""
    return torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1) if layout == "mimo" and own_name == "fc.weight" else tensor


def _files_by_name(directory: Path) -> dict[str, str]:
    """Tensor name -> file of a checkpoint's safetensors, by its index if it has one."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return files
    found: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            found |= dict.fromkeys(opened.keys(), path.name)
    return found

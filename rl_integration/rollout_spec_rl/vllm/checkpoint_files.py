"""Checkpoints on disk: the tensors of a safetensors file or folder, and the names and shapes they have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

NamedTensor = tuple[str, Tensor]


def read_tensors(place: Path) -> Iterator[NamedTensor]:
    """Tensors of a safetensors file, or of all those of a folder. ValueError if there is none."""
    from safetensors import safe_open

    for file in _files(place):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                yield name, opened.get_tensor(name)


def checkpoint_names(place: Path, *, tied: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Names with shapes (meta tensors) of a checkpoint folder, and other names of tied ones -> the checkpoint's."""
    from safetensors import safe_open

    own: dict[str, Tensor] = {}
    for file in _files(place):
        with safe_open(file, framework="pt") as opened:
            own |= {name: torch.empty(opened.get_slice(name).get_shape(), device="meta") for name in opened.keys()}  # noqa: SIM118
    ends = ("lm_head.weight", "model.embed_tokens.weight")
    if not tied:
        return own, {}
    held = next(name for name in ends if name in own)
    other = next(name for name in ends if name != held)
    own.pop(other, None)
    return own, {other: held}


def _files(place: Path) -> list[Path]:
    found = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    if not found:
        raise ValueError(f"{place} holds no safetensors")
    return found

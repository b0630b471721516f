"""Weights by version: names checked, checksums before and after, tied tensors following their owner.

A sync that leaves a tensor out, or brings one that is not there, is an error that names it: the outputs of a half-updated model look right.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class WeightsReport:
    version: int
    num_tensors: int
    checksum: str  # of all tensors after the update
    tensor_checksums: Mapping[str, int]


def tensor_checksum(tensor: Tensor) -> int:
    """CRC-32 of the tensor's bytes in row-major order."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)


def checksums(named: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor_checksum(tensor) for name, tensor in named.items()}


def combine(tensor_checksums: Mapping[str, int]) -> str:
    """One short digest of all names and checksums, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(tensor_checksums):
        digest.update(f"{name}={tensor_checksums[name]};".encode())
    return digest.hexdigest()[:16]


def checked(
    incoming: Iterable[tuple[str, Tensor]], own: Mapping[str, Tensor], aliases: Mapping[str, str], partial: bool
) -> list[tuple[str, Tensor]]:
    """The incoming tensors under our own names, or ValueError naming every one that is unknown, missing, misshapen or not finite.

    ``aliases`` maps names of tied tensors to their owner's name; when both come they must be equal.
    """
    taken: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, tensor in incoming:
        owner = aliases.get(name, name)
        if owner not in own:
            problems.append(f"unknown tensor {name}")
        elif tensor.shape != own[owner].shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, the model's is {tuple(own[owner].shape)}")
        elif owner in taken and not torch.equal(taken[owner], tensor):
            problems.append(f"{name} is tied to {owner} but brings other values")
        elif not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name} holds NaN or infinity")
        else:
            taken[owner] = tensor
    if not partial:
        problems += [f"missing tensor {name}" for name in own if name not in taken]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ValueError(f"weights refused, nothing was changed: {shown}")
    return list(taken.items())

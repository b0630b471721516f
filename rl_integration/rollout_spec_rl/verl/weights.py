"""Weights on their way from the trainer to an engine: in buckets, every tensor with a checksum, checked where they arrive.

Tensors travel in the trainer's precision under Hugging Face names. The sender counts what it sent, so that a bucket that got lost is an
error before anything is loaded; what the engine holds afterwards is compared with what came, in the engine's own precision.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_spec.engine.weights import WeightsReport, tensor_checksum

NamedTensor = tuple[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightBucket:
    """Some named tensors of one version, on the CPU and owned by the bucket."""

    version: int
    tensors: tuple[NamedTensor, ...]
    checksums: tuple[int, ...]  # CRC-32 of each, taken by the sender

    @staticmethod
    def pack(version: int, tensors: Iterable[NamedTensor]) -> WeightBucket:
        # The trainer goes on to change its own tensors, so the bucket takes copies.
        own = tuple((name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in tensors)
        return WeightBucket(version=version, tensors=own, checksums=tuple(tensor_checksum(tensor) for _, tensor in own))

    def __reduce__(self) -> tuple[Any, ...]:
        """As arrays, which Ray lays into shared memory and maps where they are read; a tensor would be copied on both sides."""
        arrays = [(name, tensor.view(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape) for name, tensor in self.tensors]
        return _from_arrays, (self.version, arrays, self.checksums)

    def checked(self) -> tuple[NamedTensor, ...]:
        """The tensors, or ValueError that names those that are not what was sent."""
        changed = [name for (name, tensor), sent in zip(self.tensors, self.checksums, strict=True) if tensor_checksum(tensor) != sent]
        if changed:
            raise ValueError(f"weights version {self.version}: {', '.join(changed[:8])} arrived with other bytes than were sent")
        return self.tensors


def _from_arrays(
    version: int, arrays: Iterable[tuple[str, np.ndarray[Any, np.dtype[np.uint8]], torch.dtype, torch.Size]], checksums: tuple[int, ...]
) -> WeightBucket:
    with warnings.catch_warnings():
        # Mapped memory is read-only, and nobody writes to a bucket.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        tensors = tuple((name, torch.from_numpy(array).view(dtype).view(shape)) for name, array, dtype, shape in arrays)
    return WeightBucket(version=version, tensors=tensors, checksums=checksums)


async def buckets(tensors: AsyncIterator[NamedTensor], version: int, bucket_bytes: int) -> AsyncIterator[WeightBucket]:
    """Consecutive tensors in buckets of at most bucket_bytes; a larger tensor gets one of its own."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket size must be positive, got {bucket_bytes} bytes")
    held: list[NamedTensor] = []
    size = 0
    async for name, tensor in tensors:
        if held and size + tensor.nbytes > bucket_bytes:
            yield WeightBucket.pack(version, held)
            held, size = [], 0
        # A sharded parameter is gathered tensor by tensor; holding references would keep all of them.
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield WeightBucket.pack(version, held)


class WeightInbox:
    """Collects the buckets of one version until all are there."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._tensors: list[NamedTensor] = []

    def add(self, bucket: WeightBucket) -> None:
        """Take a bucket. A bucket of another version starts over: its predecessor's sender died on the way."""
        if bucket.version != self._version:
            self._version, self._tensors = bucket.version, []
        self._tensors.extend(bucket.checked())

    def take(self, version: int, num_tensors: int) -> list[NamedTensor]:
        """All tensors of the version, at most once. Raises ValueError if some are missing."""
        tensors, held = self._tensors, self._version
        self._version, self._tensors = None, []
        if held != version or len(tensors) != num_tensors:
            came = f"{len(tensors)} tensors of version {held}"
            raise ValueError(f"weights version {version}: {num_tensors} tensors were sent, {came} arrived; nothing was changed")
        return tensors


def check_held(sent: Iterable[NamedTensor], held: WeightsReport, own: Mapping[str, torch.dtype], aliases: Mapping[str, str]) -> None:
    """Raise RuntimeError if the engine does not hold what came, tensor by tensor, in its own precision.

    ``own`` are the engine's names and precisions, ``aliases`` other names of tied tensors -> the engine's.
    """
    wrong = []
    for name, tensor in sent:
        owner = aliases.get(name, name)
        if tensor_checksum(tensor.to(own[owner])) != held.tensor_checksums[owner]:
            wrong.append(name)
    if wrong:
        raise RuntimeError(f"weights version {held.version}: after the update the engine holds other values of {', '.join(wrong[:8])}")

"""Rollouts with the policy's states, on disk: safetensors shards and an index.

A sequence is prompt and response; token l has a state unless it is the last one. A shard holds its sequences one after another:
``tokens`` [sum of lengths], and for rows with a state ``hidden.{layer}``, ``target_lse``, ``target_entropies``.

Shape legend: L tokens of a sequence, H hidden size.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollout_spec.files import write_text

INDEX = "index.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One sequence. lse and entropy are of the law of the next token at the collection's temperature, over the whole vocabulary."""

    key: str  # prompt id / sample number
    token_ids: Tensor  # [L] int64
    num_prompt_tokens: int
    hidden: Mapping[int, Tensor]  # layer -> [L - 1, H]
    target_lse: Tensor  # [L - 1] float32; 0 before the last prompt token
    target_entropies: Tensor  # [L - 1] float32; 0 before the last prompt token

    @property
    def num_response_tokens(self) -> int:
        return self.token_ids.numel() - self.num_prompt_tokens


class ShardWriter:
    """Appends shards to a folder; the index is replaced after each one, so that a kill loses at most the shard being written."""

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        """Raises ValueError if the folder holds rollouts of other settings."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.index = read_index(folder)
        if self.index is None:
            self.index = {"format_version": FORMAT_VERSION, "complete": False, "settings": json.loads(json.dumps(settings)), "shards": []}
        held = self.index["settings"]
        different = [
            f"{key}: {held.get(key)!r} then, {value!r} now"
            for key, value in json.loads(json.dumps(settings)).items()
            if held.get(key) != value
        ]
        if different:
            raise ValueError(f"{folder} holds rollouts of other settings ({'; '.join(different)}): use another folder, or delete it")

    @property
    def keys(self) -> set[str]:
        """Sequences that are there already."""
        assert self.index is not None
        return {key for shard in self.index["shards"] for key in shard["keys"]}

    def write(self, rollouts: Sequence[Rollout]) -> None:
        if not rollouts:
            return
        assert self.index is not None
        name = f"shard-{len(self.index['shards']):05d}.safetensors"
        layers = sorted(rollouts[0].hidden)
        tensors = {
            "tokens": torch.cat([rollout.token_ids for rollout in rollouts]),
            "target_lse": torch.cat([rollout.target_lse for rollout in rollouts]),
            "target_entropies": torch.cat([rollout.target_entropies for rollout in rollouts]),
            **{f"hidden.{layer}": torch.cat([rollout.hidden[layer] for rollout in rollouts]) for layer in layers},
        }
        part = self.folder / f"{name}.part"
        save_file(tensors, part)
        part.replace(self.folder / name)
        self.index["shards"].append(
            {
                "file": name,
                "keys": [rollout.key for rollout in rollouts],
                "lengths": [rollout.token_ids.numel() for rollout in rollouts],
                "prompt_lengths": [rollout.num_prompt_tokens for rollout in rollouts],
            }
        )
        self._write_index()

    def finish(self) -> None:
        assert self.index is not None
        self.index["complete"] = True
        self._write_index()

    def _write_index(self) -> None:
        write_text(self.folder / INDEX, json.dumps(self.index, indent=1) + "\n")


def read_index(folder: Path) -> dict[str, Any] | None:
    """The folder's index, None if it has none. Raises ValueError for one of another format."""
    path = folder / INDEX
    if not path.exists():
        return None
    index: dict[str, Any] = json.loads(path.read_text())
    if index.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path} is of format version {index.get('format_version')}, not {FORMAT_VERSION}: collect again")
    return index


class RolloutSet(Sequence[Rollout]):
    """The sequences of a folder, in a fixed order (by key): neither interruptions nor the order in which samples ended show."""

    def __init__(self, folder: Path) -> None:
        index = read_index(folder)
        if index is None or not index["shards"]:
            raise ValueError(f"{folder} holds no rollouts: run `rollout-spec collect` first")
        self.settings: dict[str, Any] = index["settings"]
        self.complete: bool = index["complete"]
        self._files: list[Any] = [safe_open(folder / shard["file"], framework="pt") for shard in index["shards"]]
        self.hidden_layers = tuple(
            sorted(int(name.removeprefix("hidden.")) for name in self._files[0].keys() if name.startswith("hidden."))  # noqa: SIM118
        )
        self._places: list[tuple[str, int, int]] = sorted(
            (key, number, place) for number, shard in enumerate(index["shards"]) for place, key in enumerate(shard["keys"])
        )
        self._lengths = [shard["lengths"] for shard in index["shards"]]
        self._prompt_lengths = [shard["prompt_lengths"] for shard in index["shards"]]
        self._starts = [list(itertools.accumulate(lengths, initial=0)) for lengths in self._lengths]

    def __len__(self) -> int:
        return len(self._places)

    def length(self, number: int) -> int:
        """Tokens of a sequence, without reading it."""
        _, shard, place = self._places[number]
        return int(self._lengths[shard][place])

    def prompt_length(self, number: int) -> int:
        _, shard, place = self._places[number]
        return int(self._prompt_lengths[shard][place])

    def key(self, number: int) -> str:
        return self._places[number][0]

    def __getitem__(self, number: int) -> Rollout:  # type: ignore[override]  # slices are not needed
        key, shard, place = self._places[number]
        begin, end = self._starts[shard][place : place + 2]
        file = self._files[shard]
        # Each earlier sequence has one state fewer than tokens.
        states = slice(begin - place, end - place - 1)
        return Rollout(
            key=key,
            token_ids=file.get_slice("tokens")[begin:end],
            num_prompt_tokens=int(self._prompt_lengths[shard][place]),
            hidden={layer: file.get_slice(f"hidden.{layer}")[states] for layer in self.hidden_layers},
            target_lse=file.get_slice("target_lse")[states],
            target_entropies=file.get_slice("target_entropies")[states],
        )


def first_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of sequence numbers, taken in ``order``, each row's lengths summing to capacity or less (a longer sequence has one alone).

    A sequence goes into the fullest row that still has room, or opens a row.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room left, row), ascending
    for number in order:
        place = bisect.bisect_left(room, (lengths[number], -1))
        if place == len(room):
            rows.append([number])
            left, row = capacity - lengths[number], len(rows) - 1
        else:
            left, row = room.pop(place)
            rows[row].append(number)
            left -= lengths[number]
        bisect.insort(room, (left, row))
    return rows

"""Samples of earlier epochs by prompt: bounded, aged by weights version, kept across processes.

Shape legend: M samples in the store, L tokens of one sample.
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rollout_spec.files import replacing

_FORMAT = 1
_ARRAYS = ("prompt_keys", "prompts", "lengths", "versions", "counts", "token_ids")


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One distinct output of a prompt."""

    token_ids: np.ndarray  # [L] int32, without the prompt
    version: int  # of the target's weights when it was last sampled
    count: int  # times it was sampled


@dataclass(kw_only=True)
class _Outputs:
    """Of one prompt. Samples are found by their tokens: a prompt of a long training has thousands of them."""

    samples: dict[bytes, Sample] = field(default_factory=dict)  # in the order in which they were last added
    lengths: Counter[int] = field(default_factory=Counter)  # how many samples have each
    num_tokens: int = 0

    def prefixes_of(self, token_ids: np.ndarray) -> list[Sample]:
        """Samples that an output begins with, itself included."""
        lengths = sorted(length for length in self.lengths if length <= len(token_ids))
        found = (self.samples.get(token_ids[:length].tobytes()) for length in lengths)
        return [sample for sample in found if sample is not None]

    def put(self, sample: Sample) -> None:
        self.samples[sample.token_ids.tobytes()] = sample
        self.lengths[len(sample.token_ids)] += 1
        self.num_tokens += len(sample.token_ids)

    def take(self, sample: Sample) -> None:
        length = len(sample.token_ids)
        del self.samples[sample.token_ids.tobytes()]
        self.num_tokens -= length
        self.lengths[length] -= 1
        if not self.lengths[length]:
            del self.lengths[length]


class HistoryStore:
    """Outputs by prompt key, at most ``max_tokens`` in all and ``max_tokens_per_prompt`` for one prompt.

    When full, samples of the oldest weights version go first; among those, the ones of the prompt that was used (added to or
    looked up) least recently. A sample that was seen before is counted, not stored again; one that an earlier, cut-short sample
    is a prefix of (a request aborted and resumed) takes its place.
    """

    def __init__(self, *, max_tokens: int, max_tokens_per_prompt: int) -> None:
        if max_tokens < 0 or max_tokens_per_prompt < 0:
            raise ValueError(f"token bounds must be 0 or more, got {max_tokens} and {max_tokens_per_prompt}")
        self.max_tokens = max_tokens
        self.max_tokens_per_prompt = max_tokens_per_prompt
        self._prompts: OrderedDict[str, _Outputs] = OrderedDict()  # least recently used first
        self._tokens_by_version: dict[int, int] = {}

    @property
    def num_tokens(self) -> int:
        return sum(self._tokens_by_version.values())

    def prompt_keys(self) -> list[str]:
        """Least recently used first."""
        return list(self._prompts)

    def samples(self, prompt_key: str) -> list[Sample]:
        """The prompt's samples, oldest weights version first; counts as use."""
        if prompt_key not in self._prompts:
            return []
        self._prompts.move_to_end(prompt_key)
        return sorted(self._prompts[prompt_key].samples.values(), key=lambda sample: sample.version)

    def add(self, prompt_key: str, token_ids: Sequence[int] | np.ndarray, version: int, count: int = 1) -> None:
        """Record an output [L] sampled ``count`` times at a weights version."""
        new = np.asarray(token_ids, dtype=np.int32)
        if not len(new):
            return
        outputs = self._prompts.setdefault(prompt_key, _Outputs())
        for sample in outputs.prefixes_of(new):
            outputs.take(sample)
            self._account(sample, -1)
            if len(sample.token_ids) == len(new):
                count += sample.count
                version = max(version, sample.version)
        added = Sample(token_ids=new, version=version, count=count)
        outputs.put(added)
        self._account(added, +1)
        self._prompts.move_to_end(prompt_key)
        self._trim_prompt(prompt_key)
        self._trim()

    def save(self, path: Path) -> None:
        """Write everything to one .npz file, all or nothing (written beside it, then renamed)."""
        keys = list(self._prompts)
        rows = [(index, sample) for index, key in enumerate(keys) for sample in self._prompts[key].samples.values()]
        with replacing(path) as beside, beside.open("wb") as file:
            np.savez(
                file,
                format=np.array(_FORMAT),
                prompt_keys=np.frombuffer(json.dumps(keys).encode(), dtype=np.uint8),
                prompts=np.array([index for index, _ in rows], dtype=np.int64),  # [M]
                lengths=np.array([len(sample.token_ids) for _, sample in rows], dtype=np.int64),  # [M]
                versions=np.array([sample.version for _, sample in rows], dtype=np.int64),  # [M]
                counts=np.array([sample.count for _, sample in rows], dtype=np.int64),  # [M]
                token_ids=np.concatenate([sample.token_ids for _, sample in rows] or [np.empty(0, np.int32)]),
            )

    def load(self, path: Path, current_version: int) -> None:
        """Add what ``save`` wrote. ValueError if the file is damaged or of another format.

        A new process may count its weights versions from 0 again: if the file's newest version is ahead of ``current_version``,
        all are shifted so that it is equal to it; ages among them stay.
        """
        data = _read(path)
        versions = data["versions"]
        shift = min(0, current_version - int(versions.max(initial=current_version)))
        keys = json.loads(data["prompt_keys"].tobytes().decode())
        outputs = np.split(data["token_ids"], np.cumsum(data["lengths"])[:-1]) if len(versions) else []
        for prompt, output, version, count in zip(data["prompts"], outputs, versions, data["counts"], strict=True):
            self.add(keys[prompt], output, int(version) + shift, int(count))

    def _account(self, sample: Sample, sign: int) -> None:
        tokens = self._tokens_by_version.get(sample.version, 0) + sign * len(sample.token_ids)
        if tokens:
            self._tokens_by_version[sample.version] = tokens
        else:
            del self._tokens_by_version[sample.version]

    def _trim_prompt(self, prompt_key: str) -> None:
        outputs = self._prompts[prompt_key]
        while outputs.num_tokens > self.max_tokens_per_prompt:
            self._drop(prompt_key, min(outputs.samples.values(), key=lambda sample: sample.version))

    def _trim(self) -> None:
        while self.num_tokens > self.max_tokens:
            oldest = min(self._tokens_by_version)
            of_all = ((key, sample) for key, outputs in self._prompts.items() for sample in outputs.samples.values())
            self._drop(*next((key, sample) for key, sample in of_all if sample.version == oldest))

    def _drop(self, prompt_key: str, sample: Sample) -> None:
        self._account(sample, -1)
        outputs = self._prompts[prompt_key]
        outputs.take(sample)
        if not outputs.samples:
            del self._prompts[prompt_key]


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a saved history, their names and format checked."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            data = {name: np.lib.format.read_array(archive.open(f"{name}.npy"), allow_pickle=False) for name in ("format", *_ARRAYS)}
    except (zipfile.BadZipFile, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a history file, or is damaged: {error}") from error
    if int(data["format"]) != _FORMAT:
        raise ValueError(f"{path} is a history of format {int(data['format'])}; this version reads format {_FORMAT}")
    return data

"""New weights in a running vLLM engine: the policy's and the drafter's, each by version, checked before anything changes.

Tensors have the checkpoint's names and shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_spec.drafter import HasWeights
from rollout_spec.engine.weights import checked, checksums, combine
from rollout_spec.events import WeightSyncEvent
from rollout_spec_rl.vllm.proposer import SpecProposer

NamedTensor = tuple[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What an engine took; the checksum is over all names and CRC-32 sums of the tensors that came."""

    version: int
    num_tensors: int
    checksum: str
    tensor_checksums: Mapping[str, int]


def update_policy(runner: Any, proposer: SpecProposer, tensors: Iterable[NamedTensor], version: int) -> SyncReport:
    """All of the policy's weights under the names of its checkpoint; the drafter's own stay as they are.

    ValueError names what is unknown, missing, misshapen or not finite, and nothing is changed then. RuntimeError if the drafter changed.
    """
    began = time.perf_counter()
    own, aliases = _checkpoint_names(Path(runner.model_config.model), tied=bool(runner.get_model().config.tie_word_embeddings))
    taken = checked(tensors, own, aliases, partial=False)
    with following(proposer, version) as report:
        reload_layers(runner, taken)
    return report(checksums(dict(taken)), time.perf_counter() - began)


@contextmanager
def following(proposer: SpecProposer, version: int) -> Iterator[Callable[[Mapping[str, int], float], SyncReport]]:
    """Around a change of the policy's weights, whoever makes it: the drafter's own must stay, what it borrows must follow.

    Gives a function that reports the change, once it is made, from the checksums of what came and the seconds it took. RuntimeError
    names weights of the drafter that changed.
    """
    drafter = proposer.speculator.drafter
    before = checksums(drafter.named_weights()) if isinstance(drafter, HasWeights) else {}
    yield lambda sums, seconds: _report(proposer, "target", version, sums, seconds)
    if proposer.borrowed is not None:
        proposer.borrowed.refresh()
    proposer.speculator.target_updated(version)
    if isinstance(drafter, HasWeights):
        after = checksums(drafter.named_weights())
        changed = [name for name, value in after.items() if before[name] != value]
        if changed:
            raise RuntimeError(f"policy weights of version {version} changed the drafter's own {', '.join(changed[:8])}")
        _report(proposer, "drafter_head", version, checksums(drafter.borrowed_weights()), 0.0)


def update_drafter(proposer: SpecProposer, tensors: Iterable[NamedTensor], version: int) -> SyncReport:
    """All of the drafter's own weights, under the names of its checkpoint.

    ValueError names what is wrong, and nothing is changed then; also for a drafter without weights.
    """
    began = time.perf_counter()
    drafter = proposer.speculator.drafter
    drafter.update_weights(tensors, version)
    assert isinstance(drafter, HasWeights)
    proposer.speculator.drafter_updated()
    return _report(proposer, "drafter", version, checksums(drafter.named_weights()), time.perf_counter() - began)


def reload_layers(runner: Any, tensors: Iterable[NamedTensor]) -> None:
    """vLLM's way to load into layers that were packed after the first loading."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

    model = runner.get_model()
    with set_current_vllm_config(runner.vllm_config):
        initialize_layerwise_reload(model)
        model.load_weights(iter(tensors))
        finalize_layerwise_reload(model, runner.vllm_config.model_config)


def read_tensors(place: Path) -> Iterator[NamedTensor]:
    """Tensors of a safetensors file, or of all those of a folder. ValueError if there is none."""
    from safetensors import safe_open

    for file in _files(place):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                yield name, opened.get_tensor(name)


def _checkpoint_names(place: Path, *, tied: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
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


def _report(proposer: SpecProposer, role: str, version: int, sums: Mapping[str, int], seconds: float) -> SyncReport:
    digest = combine(sums)
    event = WeightSyncEvent(role=role, version=version, num_tensors=len(sums), checksum=digest, seconds=seconds)
    proposer.speculator.sink.emit(event)
    return SyncReport(version=version, num_tensors=len(sums), checksum=digest, tensor_checksums=sums)

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

from rollout_spec.drafter import HasWeights
from rollout_spec.engine.weights import checked, checksums, combine
from rollout_spec.events import WeightSyncEvent
from rollout_spec_rl.vllm.checkpoint_files import NamedTensor, checkpoint_names
from rollout_spec_rl.vllm.driver import EngineDriver
from rollout_spec_rl.vllm.layerwise import load_into
from rollout_spec_rl.vllm.native import NativeDrafter


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What an engine took; the checksum is over all names and CRC-32 sums of the tensors that came."""

    version: int
    num_tensors: int
    checksum: str
    tensor_checksums: Mapping[str, int]


def update_policy(runner: Any, proposer: EngineDriver, tensors: Iterable[NamedTensor], version: int) -> SyncReport:
    """All of the policy's weights under the names of its checkpoint; the drafter's own stay as they are.

    ValueError names what is unknown, missing, misshapen or not finite, and nothing is changed then. RuntimeError if the drafter changed.
    """
    began = time.perf_counter()
    own, aliases = checkpoint_names(Path(runner.model_config.model), tied=bool(runner.get_model().config.tie_word_embeddings))
    taken = checked(tensors, own, aliases, partial=False)
    with following(proposer, version) as report:
        load_into(runner.get_model(), taken, runner.vllm_config, runner.model_config)
    return report(checksums(dict(taken)), time.perf_counter() - began)


@contextmanager
def following(proposer: EngineDriver, version: int) -> Iterator[Callable[[Mapping[str, int], float], SyncReport]]:
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


def update_drafter(proposer: EngineDriver, tensors: Iterable[NamedTensor], version: int) -> SyncReport:
    """All of the drafter's own weights, under the names of its checkpoint.

    ValueError names what is wrong, and nothing is changed then; also for a drafter without weights.
    """
    began = time.perf_counter()
    drafter = proposer.speculator.drafter
    drafter.update_weights(tensors, version)
    assert isinstance(drafter, HasWeights)
    proposer.speculator.drafter_updated()
    # vLLM does not keep its drafters' weights readable: their sums are of what came.
    sums = drafter.loaded if isinstance(drafter, NativeDrafter) else checksums(drafter.named_weights())
    return _report(proposer, "drafter", version, sums, time.perf_counter() - began)


def _report(proposer: EngineDriver, role: str, version: int, sums: Mapping[str, int], seconds: float) -> SyncReport:
    digest = combine(sums)
    event = WeightSyncEvent(role=role, version=version, num_tensors=len(sums), checksum=digest, seconds=seconds)
    proposer.speculator.sink.emit(event)
    return SyncReport(version=version, num_tensors=len(sums), checksum=digest, tensor_checksums=sums)

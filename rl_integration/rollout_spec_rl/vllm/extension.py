"""RolloutSpecExtension: what ``collective_rpc`` may ask of a vLLM worker that runs our proposer.

llm.collective_rpc("rollout_spec_metrics")
llm.collective_rpc("rollout_spec_update_policy", args=("runs/policy", 1))
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from rollout_spec_rl.verl.metrics import named

Source = str | Iterable[tuple[str, Tensor]]  # a safetensors file or folder of the worker's machine, or the tensors themselves


class RolloutSpecExtension:
    """Mixed into vLLM's worker class, whose ``model_runner`` it uses. Methods have a prefix: vLLM refuses names that it has itself."""

    model_runner: Any

    def __new__(cls, **settings: Any) -> Self:
        """vLLM makes its worker: where its own proposer is to be driven the runner is patched now. ValueError if it cannot be driven."""
        from rollout_spec_rl.vllm import native_driver

        if "vllm_config" in settings:
            native_driver.prepare(settings["vllm_config"])
        return super().__new__(cls)

    def rollout_spec_metrics(self) -> dict[str, float]:
        """Since they were last asked for, by the names they have in verl's logger (docs/verl.md): acceptance, entropy, budget, seconds."""
        return named(proposer_of(self.model_runner).totals.take())

    def rollout_spec_requests(self) -> list[dict[str, Any]]:
        """Records (reporting.RequestRecord) of requests that finished since they were last asked for, by the user's request id."""
        return [dataclasses.asdict(record) for record in proposer_of(self.model_runner).speculator.reporter.take_records()]

    def rollout_spec_totals(self) -> bytes:
        """The sums that these come from, a pickled StepTotals (vLLM's messages carry plain values only), to be merged over engines."""
        return pickle.dumps(proposer_of(self.model_runner).totals.take())

    def rollout_spec_update_policy(self, source: Source, version: int) -> str:
        """New weights of the policy (sync.update_policy); returns their checksum. vLLM's prefix cache must be reset as well."""
        from rollout_spec_rl.vllm import sync

        return sync.update_policy(self.model_runner, proposer_of(self.model_runner), _tensors(source), version).checksum

    def rollout_spec_update_drafter(self, source: Source, version: int) -> str:
        """New weights of the drafter; returns their checksum."""
        from rollout_spec_rl.vllm import sync

        return sync.update_drafter(proposer_of(self.model_runner), _drafter_tensors(source), version).checksum

    def rollout_spec_close(self) -> None:
        """Deliver what sinks still hold, and close them."""
        proposer_of(self.model_runner).speculator.sink.close()


def proposer_of(runner: Any) -> Any:
    """The runner's EngineDriver. ValueError if it has none."""
    from rollout_spec_rl.vllm.patches import driver_of

    driver = driver_of(runner)
    if driver is None:
        raise ValueError("this engine does not run rollout_spec's proposer: start it with rollout_spec_rl.vllm.engine_args(...)")
    return driver


def _tensors(source: Source) -> Iterable[tuple[str, Tensor]]:
    from rollout_spec_rl.vllm.checkpoint_files import read_tensors

    return read_tensors(Path(source)) if isinstance(source, str) else source


def _drafter_tensors(source: Source) -> Iterable[tuple[str, Tensor]]:
    from rollout_spec_mtp.checkpoint import VOCABULARY

    # The file also holds the reduced vocabulary, which an update cannot change.
    return [(name, tensor) for name, tensor in _tensors(source) if name != VOCABULARY]

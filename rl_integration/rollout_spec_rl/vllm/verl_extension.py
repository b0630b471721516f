"""VerlExtension: verl's own worker extension for vLLM, whose weight syncs our drafter notices. verl fills vLLM's one place for it."""

from __future__ import annotations

import time
from typing import Any, Self

from torch import Tensor
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from rollout_spec.engine.weights import checksums
from rollout_spec_rl.vllm.extension import RolloutSpecExtension, proposer_of
from rollout_spec_rl.vllm.native_options import UNDER_VERL
from rollout_spec_rl.vllm.sync import following


class VerlExtension(vLLMColocateWorkerExtension, RolloutSpecExtension):
    """Versions count syncs from 0, the one before the first step, as verl's steps do."""

    def __new__(cls, **settings: Any) -> Self:
        from vllm.platforms import current_platform

        from rollout_spec_rl.vllm import native_driver, patches

        if native_driver.is_asked(settings["vllm_config"]):
            raise ValueError(UNDER_VERL)
        if current_platform.is_cpu():
            for patch in patches.UNDER_VERL_ON_CPU:
                patch.apply()
        instance: Self = super().__new__(cls, **settings)
        instance.rollout_spec_version = -1
        return instance

    def update_weights_from_ipc(self, *args: Any, **settings: Any) -> None:
        """verl's, between two steps of the engine."""
        self.rollout_spec_sums: dict[str, int] = {}
        began = time.perf_counter()
        with following(proposer_of(self.model_runner), self.rollout_spec_version + 1) as report:
            super().update_weights_from_ipc(*args, **settings)
        report(self.rollout_spec_sums, time.perf_counter() - began)
        self.rollout_spec_version += 1

    def _update_weights(self, weights: list[tuple[str, Tensor]], *args: Any, **settings: Any) -> None:
        # A bucket's memory is written again by the next one.
        self.rollout_spec_sums |= checksums(dict(weights))
        super()._update_weights(weights, *args, **settings)

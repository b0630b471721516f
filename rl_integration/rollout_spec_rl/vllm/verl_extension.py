"""VerlExtension: verl's own worker extension for vLLM, whose weight syncs our drafter notices. verl fills vLLM's one place for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
        """verl's, between two steps of the engine. ValueError if a tied tensor brought other values than the one it is tied to."""
        from vllm.model_executor.models.utils import AutoWeightsLoader

        self.rollout_spec_sums: dict[str, int] = {}
        self.rollout_spec_tied: dict[str, str] = AutoWeightsLoader(self.model_runner.get_model()).aliased_params
        began = time.perf_counter()
        with following(proposer_of(self.model_runner), self.rollout_spec_version + 1) as report:
            super().update_weights_from_ipc(*args, **settings)
            # Not before: verl's sender would wait for ever for the answer to a bucket that was refused.
            check_tied(self.rollout_spec_sums, self.rollout_spec_tied)
        report(self.rollout_spec_sums, time.perf_counter() - began)
        self.rollout_spec_version += 1

    def _update_weights(self, weights: list[tuple[str, Tensor]], *args: Any, **settings: Any) -> None:
        # A bucket's memory is written again by the next one.
        self.rollout_spec_sums |= checksums(dict(weights))
        # vLLM loads a tied head by the embedding's name, and refuses the head's where the embedding is not in the same bucket.
        super()._update_weights([(name, tensor) for name, tensor in weights if name not in self.rollout_spec_tied], *args, **settings)


def check_tied(sums: Mapping[str, int], tied: Mapping[str, str]) -> None:
    """sums: CRC-32 by name of the tensors that came; tied: names that are not loaded -> those that are loaded for them.

    ValueError names a tensor that came with other bytes than the one it is tied to, or without it.
    """
    for name, owner in tied.items():
        if name in sums and sums[name] != sums.get(owner):
            what = "brings other values" if owner in sums else f"{owner} did not come"
            raise ValueError(
                f"weights refused: {name} is tied to {owner} in vLLM but {what}; train the policy with tie_word_embeddings, "
                "or set it to false in the config.json of its checkpoint"
            )

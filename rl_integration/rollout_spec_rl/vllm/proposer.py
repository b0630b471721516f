"""SpecProposer: what vLLM's V1 runner knows as its custom proposer, and the sampler in place of its own.

vLLM makes it (``method="custom_class"``); patches.py hands it the runner, every step's hidden states, and the logits to sample from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_spec.composition import DrafterOptions
from rollout_spec.drafter import Drafter, HasWeights
from rollout_spec.engine.weights import checksums, combine
from rollout_spec.events import WeightSyncEvent
from rollout_spec_rl.compose import DRAFTERS, make_ops
from rollout_spec_rl.vllm import patches
from rollout_spec_rl.vllm.borrowed import BorrowedEnds
from rollout_spec_rl.vllm.driver import EngineDriver, check_host
from rollout_spec_rl.vllm.options import KEY, VllmOptions

FINAL = -1  # DrafterNeeds.hidden_layers: the final norm's output


class SpecProposer(EngineDriver):
    """Drives our drafters."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises ValueError with the mend for an untested vLLM, wrong options, and settings that these drafts do not go with."""
        patches.check_version()
        super().__init__(VllmOptions.parse((vllm_config.additional_config or {}).get(KEY)), vllm_config)
        check_settings(self.options, vllm_config)
        # check_settings lets CPUs through only.
        for patch in (*patches.IN_THE_RUNNER, *patches.IN_THE_RUNNER_ON_CPU):
            patch.apply()

    def load_model(self, target_model: Any) -> None:
        """The drafter, for vLLM's model. ValueError if it does not fit."""
        ops = make_ops()
        drafter = self._make_drafter(target_model, ops)
        self.start(drafter, ops)
        if isinstance(drafter, HasWeights):
            sums = checksums(drafter.named_weights())
            event = WeightSyncEvent(role="drafter", version=0, num_tensors=len(sums), checksum=combine(sums), seconds=0.0)
            self.speculator.sink.emit(event)

    def _make_drafter(self, target_model: Any, ops: Any) -> Drafter:
        options = self.options
        if options.is_model_free:
            drafter = DRAFTERS[options.drafter](DrafterOptions(spec=options.drafter))
            assert drafter is not None
            return drafter
        from rollout_spec_mtp.serving import load_drafter

        self.borrowed = BorrowedEnds(target_model, self._config.model_config.model)
        return load_drafter(Path(options.drafter).expanduser(), self.borrowed.module, ops, options.draw)

    def attach(self, runner: Any) -> None:
        """Ask the target for the layers whose states the drafter reads."""
        super().attach(runner)
        taps = tuple(layer + 1 for layer in sorted(self._layers) if layer != FINAL)
        if not taps:
            return
        model = runner.get_model()
        if not hasattr(model, "set_aux_hidden_state_layers"):
            raise ValueError(
                f"the drafter reads layers {self._layers}, and vLLM's {type(model).__name__} hands none out: use another drafter"
            )
        model.set_aux_hidden_state_layers(taps)
        runner.use_aux_hidden_state_outputs = True

    @property
    def _layers(self) -> tuple[int, ...]:
        return self.speculator.drafter.needs.hidden_layers

    def _states(self, hidden: Tensor, taps: Sequence[Tensor] | None) -> dict[int, Tensor]:
        layers = [layer for layer in sorted(self._layers) if layer != FINAL]
        states = dict(zip(layers, taps or (), strict=True))
        return states | {FINAL: hidden} if FINAL in self._layers else states

    @torch.inference_mode()
    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        """[B] drafted tokens for the next step, as many as the budget allows; vLLM's other arguments say nothing more."""
        return self.speculator.propose(self._take_step(), self._runner.requests, sampled_token_ids)


def check_settings(options: VllmOptions, vllm_config: Any) -> None:
    """Raise ValueError, with the mend, for what of vLLM's own settings does not go with these drafts."""
    check_host(options, vllm_config)
    parallel = vllm_config.parallel_config
    if options.is_native:
        raise ValueError(f"drafter={options.drafter} goes with vLLM's own methods: pass their speculative_config to engine_args")
    if not options.is_model_free and (parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1):
        raise ValueError("a trained drafter runs beside a whole policy: set tensor and pipeline parallel sizes to 1, or use drafter=suffix")

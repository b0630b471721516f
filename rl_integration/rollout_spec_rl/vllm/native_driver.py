"""NativeDriver: our budgets, verification and telemetry around a proposer of vLLM's own.

vLLM makes the proposer and feeds it; we say in every step how long its drafts are, and what of them is verified.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch

from rollout_spec.budget import FixedBudget
from rollout_spec.engine.weights import combine
from rollout_spec.events import WeightSyncEvent
from rollout_spec_rl.compose import make_ops
from rollout_spec_rl.vllm import native_weights, patches
from rollout_spec_rl.vllm.driver import EngineDriver, check_host
from rollout_spec_rl.vllm.native import Drafted, NativeDrafter, Turn
from rollout_spec_rl.vllm.native_options import NATIVE, PROBABILISTIC, check_native
from rollout_spec_rl.vllm.options import KEY, VllmOptions

ATTRIBUTE = "rollout_spec_driver"  # where a runner keeps its driver
_EXTRA = 1  # query tokens that a proposer may put behind a request's last one before it drafts
_READ = (
    "method",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "disable_padded_drafter_batch",
    "use_heterogeneous_vocab",
    "parallel_drafting",
    "rejection_sample_method",
    "draft_sample_method",
)


def is_asked(vllm_config: Any) -> bool:
    """Whether this engine's own proposer is to be driven."""
    given = (vllm_config.additional_config or {}).get(KEY)
    return isinstance(given, Mapping) and given.get("drafter") == NATIVE


def prepare(vllm_config: Any) -> None:
    """Before the worker is made: patch its runner if this engine asks for it. ValueError with the mend for what cannot be driven."""
    if not is_asked(vllm_config):
        return
    patches.check_version()
    options = VllmOptions.parse(vllm_config.additional_config[KEY])
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if spec is None:
        raise ValueError(f"drafter={NATIVE} drives vLLM's own speculation, and none is configured: give engine_args a speculative_config")
    check_native({name: getattr(spec, name) for name in _READ}, options.scheme)
    check_host(options, vllm_config)
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        raise ValueError("vLLM's own drafters are driven in one process a model: set tensor, pipeline and data parallel sizes to 1")
    # check_host lets CPUs through only.
    for patch in (*patches.IN_THE_RUNNER, *patches.IN_THE_RUNNER_ON_CPU):
        patch.apply()


class NativeDriver(EngineDriver):
    """Drives the runner's own ``drafter``."""

    def __init__(self, runner: Any) -> None:
        """Raises ValueError for a proposer that steps by rules of its own."""
        from vllm.v1.spec_decode.dflash import DFlashProposer
        from vllm.v1.spec_decode.draft_model import DraftModelProposer
        from vllm.v1.spec_decode.eagle import EagleProposer

        config = runner.vllm_config
        super().__init__(VllmOptions.parse(config.additional_config[KEY]), config)
        proposer, spec = runner.drafter, config.speculative_config
        if type(proposer) not in (DFlashProposer, DraftModelProposer, EagleProposer):
            raise ValueError(f"vLLM drafts for this model with {type(proposer).__name__}, which our budgets do not drive")
        self._limit: int = runner.effective_drafter_max_model_len
        drafter = NativeDrafter(
            proposer,
            target=runner.get_model(),
            method=spec.method,
            draft_length=self.options.draft_length,
            vocab_size=config.model_config.get_vocab_size(),
            sampled=spec.draft_sample_method == PROBABILISTIC,
            keep_up=self.options.controller() != FixedBudget(draft_length=0),
            reload=functools.partial(native_weights.reload, runner),
        )
        self.start(drafter, make_ops())
        self.attach(runner)
        drafter.loaded = native_weights.on_disk(spec, config.model_config)
        event = WeightSyncEvent(role="drafter", version=0, num_tensors=len(drafter.loaded), checksum=combine(drafter.loaded), seconds=0.0)
        self.speculator.sink.emit(event)

    @torch.inference_mode()
    def draft(self, plain: Any, scheduled: Any, sampled: Any, attention: Any) -> list[list[int]]:
        """[B] drafted tokens for the next step, as many as the budget allows."""
        step, runner = self._take_step(), self._runner
        drafter = self.speculator.drafter
        assert isinstance(drafter, NativeDrafter)

        def run(length: int) -> Drafted:
            own = copy.copy(scheduled)
            own.num_spec_tokens_to_schedule = length
            return Drafted(token_ids=plain(own), draft_probs=runner.drafter.take_last_draft_probs())

        rows = {request_id: row for row, request_id in enumerate(step.request_ids)}
        drafter.begin(Turn(run=run, rows=rows, room=self._limit - attention.max_seq_len - _EXTRA))
        # A prompt that goes on was sampled for, too, and what came of it is dropped.
        dropped = runner.discard_request_mask.np[: len(rows)].tolist()
        kept = [[] if drop else [token for token in tokens if token >= 0] for tokens, drop in zip(sampled.tolist(), dropped, strict=True)]
        proposed = self.speculator.propose(step, runner.requests, kept, recorded=False)
        drafter.end()
        return proposed


def drive(runner: Any) -> None:
    """Give a runner that has loaded its models the driver that its configuration asks for, if it asks for one."""
    if is_asked(runner.vllm_config):
        setattr(runner, ATTRIBUTE, NativeDriver(runner))

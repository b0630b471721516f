"""EngineDriver: what our speculation is to vLLM's runner, whoever drafts: the sampler in place of its own, and telemetry.

patches.py finds the runner's driver and hands it every step and the logits to sample from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_spec.drafter import Drafter
from rollout_spec.engine.ops import Ops
from rollout_spec.events import EventSink
from rollout_spec.pilot import BudgetPilot
from rollout_spec.sinks import JsonlSink
from rollout_spec.sinks.queued import QueuedSink
from rollout_spec.sinks.specs import SinkPlace, open_telemetry
from rollout_spec_rl.verl.metrics import StepSink
from rollout_spec_rl.vllm.borrowed import BorrowedEnds
from rollout_spec_rl.vllm.options import VllmOptions
from rollout_spec_rl.vllm.requests import TrackedRequests
from rollout_spec_rl.vllm.rows import StepRows, process
from rollout_spec_rl.vllm.speculator import Speculator, Step
from rollout_spec_rl.vllm.states import StateLedger


class EngineDriver:
    """One engine's; ``speculator`` is there once the target is loaded."""

    def __init__(self, options: VllmOptions, vllm_config: Any) -> None:
        self.options = options
        self.totals = StepSink()
        self.borrowed: BorrowedEnds | None = None
        self.speculator: Speculator
        self._config = vllm_config
        self._runner: Any = None
        self._step: Step | None = None

    def start(self, drafter: Drafter, ops: Ops) -> None:
        """The target is loaded, and this is who drafts for it."""
        options, cache = self.options, self._config.cache_config
        max_tokens = options.state_cache_tokens if cache.enable_prefix_caching else 0
        self.speculator = Speculator(
            drafter=drafter,
            pilot=BudgetPilot(options.controller()),
            scheme=options.scheme,
            ops=ops,
            tracked=TrackedRequests(max_model_len=self._config.model_config.max_model_len),
            ledger=StateLedger(drafter.needs.hidden_layers, block_size=cache.block_size, max_tokens=max_tokens),
            sink=self._open_sink(Path(drafter.name if options.is_native else options.drafter).name),
        )

    def _open_sink(self, drafter: str) -> EventSink:
        options = self.options
        if options.events is None:
            return self.totals
        folder = Path(options.events)
        log = QueuedSink("log", JsonlSink(folder / f"replica-{options.replica}.jsonl"))
        return open_telemetry(self.totals, options.sinks, SinkPlace(folder=folder, replica=options.replica, drafter=drafter), [log])

    def attach(self, runner: Any) -> None:
        """The runner has loaded the target, and is to draft in every step.

        vLLM gives up drafting for a whole batch when one request comes near the end of what the drafter can read; that is ours to decide.
        """
        self._runner = runner
        runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens + 1

    def see(self, scheduled: Any, hidden: Tensor, taps: Sequence[Tensor] | None, spec: Any) -> None:
        """What the runner did in this step, for the drafts that follow."""
        batch = self._runner.input_batch
        ids = tuple(batch.req_ids)
        self._step = Step(
            request_ids=ids,
            first_positions=batch.num_computed_tokens_cpu[: len(ids)].tolist(),
            num_rows=[scheduled.num_scheduled_tokens[request_id] for request_id in ids],
            num_drafted=[0] * len(ids) if spec is None else list(spec.num_draft_tokens),
            hidden=self._states(hidden, taps),
        )

    def _states(self, hidden: Tensor, taps: Sequence[Tensor] | None) -> dict[int, Tensor]:  # noqa: ARG002  # for drafters that read them
        """layer -> [R, H] the states that the drafter is to be handed."""
        return {}

    def draft(self, plain: Callable[[Any], Any], scheduled: Any, sampled: Any, attention: Any) -> Any:  # noqa: ARG002
        """Drafts for the step that ``see`` saw; plain: vLLM's own way, given ``scheduled``."""
        return plain(scheduled)

    def _take_step(self) -> Step:
        step, self._step = self._step, None
        assert step is not None, "vLLM called for drafts without its patched runner"
        return step

    def close(self) -> None:
        """The engine ends; one that did not come up has nothing to close."""
        if self._runner is not None:
            self.speculator.close()

    @torch.inference_mode()
    def sample(self, logits: Tensor, spec: Any, plain: Callable[[Tensor, Any], Any]) -> Any:
        """vLLM's SamplerOutput for the step's rows; plain: its own way, for what we do not offer."""
        from vllm.v1.outputs import SamplerOutput

        runner = self._runner
        metadata = runner.input_batch.sampling_metadata
        if spec is None and (metadata.logprob_token_ids or metadata.max_num_logprobs == -1):
            return plain(logits, spec)
        ids = list(runner.input_batch.req_ids)
        drafts = [[] for _ in ids] if spec is None else _split(spec.draft_token_ids.tolist(), spec.num_draft_tokens)
        roots = _roots([len(tokens) + 1 for tokens in drafts])
        rows = StepRows(logits, process(logits, spec, metadata, runner.rejection_sampler), roots, self.speculator.ops)
        tokens = self.speculator.verify(ids, runner.requests, rows, drafts)
        wide = 1 if spec is None else spec.max_spec_len + 1
        tokens = torch.nn.functional.pad(tokens, (0, wide - tokens.shape[1]), value=-1)
        logprobs = None if metadata.max_num_logprobs is None else self._logprobs(rows, roots, tokens, metadata.max_num_logprobs)
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32), logprobs_tensors=logprobs)

    def _logprobs(self, rows: StepRows, roots: Tensor, tokens: Tensor, num_logprobs: int) -> Any:
        """vLLM's LogprobsTensors of tokens [B, D + 1], request by request; where there is none the entry means nothing."""
        sampler = self._runner.sampler
        at = (roots[:, None] + torch.arange(tokens.shape[1])).flatten().clamp_max(rows.num_rows - 1)
        return sampler.gather_logprobs(rows.values(at, sampler.logprobs_mode), num_logprobs, tokens.flatten().clamp_min(0))


def check_host(options: VllmOptions, vllm_config: Any) -> None:
    """Raise ValueError, with the mend, for what of vLLM's own settings goes with none of our ways."""
    spec = vllm_config.speculative_config
    if spec.num_speculative_tokens != options.draft_length:
        raise ValueError(
            f"num_speculative_tokens is {spec.num_speculative_tokens}, draft_length {options.draft_length}: "
            "make them equal (engine_args does)"
        )
    device = vllm_config.device_config.device_type
    if device != "cpu":
        raise ValueError(f"our budgets and drafters run in vLLM on a CPU, not on {device}: use vLLM's own speculation alone there")
    if vllm_config.model_config.logprobs_mode == "processed_logits":
        raise ValueError("logprobs_mode=processed_logits is not offered with our speculation: use processed_logprobs")


def _split(flat: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    parts, begin = [], 0
    for count in counts:
        parts.append(list(flat[begin : begin + count]))
        begin += count
    return parts


def _roots(counts: Sequence[int]) -> Tensor:
    """[B] each request's first row."""
    ends = torch.tensor(counts).cumsum(0)
    return ends - torch.tensor(counts)

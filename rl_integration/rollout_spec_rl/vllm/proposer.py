"""SpecProposer: what vLLM's V1 runner knows as its custom proposer, and the sampler in place of its own.

vLLM makes it (``method="custom_class"``); patches.py hands it the runner, every step's hidden states, and the logits to sample from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_spec.composition import DrafterOptions
from rollout_spec.drafter import Drafter, HasWeights
from rollout_spec.engine.weights import checksums, combine
from rollout_spec.events import EventSink, WeightSyncEvent
from rollout_spec.pilot import BudgetPilot
from rollout_spec.sinks import JsonlSink
from rollout_spec.sinks.queued import QueuedSink
from rollout_spec.sinks.specs import SinkPlace, open_telemetry
from rollout_spec_rl.compose import DRAFTERS, make_ops
from rollout_spec_rl.verl.metrics import StepSink
from rollout_spec_rl.vllm import patches
from rollout_spec_rl.vllm.borrowed import BorrowedEnds
from rollout_spec_rl.vllm.options import KEY, VllmOptions
from rollout_spec_rl.vllm.requests import TrackedRequests
from rollout_spec_rl.vllm.rows import StepRows, process
from rollout_spec_rl.vllm.speculator import Speculator, Step
from rollout_spec_rl.vllm.states import StateLedger

FINAL = -1  # DrafterNeeds.hidden_layers: the final norm's output


class SpecProposer:
    """One engine's; ``speculator`` is there once the target is loaded."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises ValueError with the mend for an untested vLLM, wrong options, and settings that these drafts do not go with."""
        patches.check_version()
        self.options = VllmOptions.parse((vllm_config.additional_config or {}).get(KEY))
        check_settings(self.options, vllm_config)
        # check_settings lets CPUs through only.
        for patch in (*patches.IN_THE_RUNNER, *patches.IN_THE_RUNNER_ON_CPU):
            patch.apply()
        self.totals = StepSink()
        self.borrowed: BorrowedEnds | None = None
        self.speculator: Speculator
        self._config = vllm_config
        self._runner: Any = None
        self._step: Step | None = None

    def load_model(self, target_model: Any) -> None:
        """The drafter, for vLLM's model. ValueError if it does not fit."""
        ops, options = make_ops(), self.options
        drafter = self._make_drafter(target_model, ops)
        cache = self._config.cache_config
        max_tokens = options.state_cache_tokens if cache.enable_prefix_caching else 0
        self.speculator = Speculator(
            drafter=drafter,
            pilot=BudgetPilot(options.controller()),
            scheme=options.scheme,
            ops=ops,
            tracked=TrackedRequests(max_model_len=self._config.model_config.max_model_len),
            ledger=StateLedger(drafter.needs.hidden_layers, block_size=cache.block_size, max_tokens=max_tokens),
            sink=self._open_sink(),
        )
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

    def _open_sink(self) -> EventSink:
        options = self.options
        if options.events is None:
            return self.totals
        folder = Path(options.events)
        log = QueuedSink("log", JsonlSink(folder / f"replica-{options.replica}.jsonl"))
        place = SinkPlace(folder=folder, replica=options.replica, drafter=Path(options.drafter).name)
        return open_telemetry(self.totals, options.sinks, place, [log])

    def attach(self, runner: Any) -> None:
        """The target is loaded: ask it for the layers whose states the drafter reads."""
        self._runner = runner
        # vLLM gives up drafting for a whole batch when one request comes near the end of what the drafter can read; ours reads on.
        runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens + 1
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

    def see(self, scheduled: Any, hidden: Tensor, taps: Sequence[Tensor] | None, spec: Any) -> None:
        """What the runner did in this step, for the ``propose`` that follows."""
        batch = self._runner.input_batch
        ids = tuple(batch.req_ids)
        layers = [layer for layer in sorted(self._layers) if layer != FINAL]
        states = dict(zip(layers, taps or (), strict=True))
        if FINAL in self._layers:
            states[FINAL] = hidden
        self._step = Step(
            request_ids=ids,
            first_positions=batch.num_computed_tokens_cpu[: len(ids)].tolist(),
            num_rows=[scheduled.num_scheduled_tokens[request_id] for request_id in ids],
            num_drafted=[0] * len(ids) if spec is None else list(spec.num_draft_tokens),
            hidden=states,
        )

    @torch.inference_mode()
    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        """[B] drafted tokens for the next step, as many as the budget allows; vLLM's other arguments say nothing more."""
        step, self._step = self._step, None
        assert step is not None, "vLLM called propose without its patched runner"
        return self.speculator.propose(step, self._runner.requests, sampled_token_ids)

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


def check_settings(options: VllmOptions, vllm_config: Any) -> None:
    """Raise ValueError, with the mend, for what of vLLM's own settings does not go with these drafts."""
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if spec.num_speculative_tokens != options.draft_length:
        raise ValueError(
            f"num_speculative_tokens is {spec.num_speculative_tokens}, draft_length {options.draft_length}: "
            "make them equal (engine_args does)"
        )
    if not options.is_model_free and (parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1):
        raise ValueError("a trained drafter runs beside a whole policy: set tensor and pipeline parallel sizes to 1, or use drafter=suffix")
    device = vllm_config.device_config.device_type
    if device != "cpu":
        raise ValueError(f"these drafters run in vLLM on a CPU, not on {device}: use vLLM's own speculative methods there")
    if vllm_config.model_config.logprobs_mode == "processed_logits":
        raise ValueError("logprobs_mode=processed_logits is not offered with these drafts: use processed_logprobs")


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

"""The embedded engine: draft -> verify -> commit rounds over a running batch.

Shape legend: B requests in the round, R rows of the forward.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rollout_spec.budget import BudgetController
from rollout_spec.controllers import ThroughputBudget
from rollout_spec.drafter import Drafter
from rollout_spec.engine import weights as weight_sync
from rollout_spec.engine.drafter_sync import DrafterSync
from rollout_spec.engine.load import load_model, make_runner
from rollout_spec.engine.loop import RoundLoop
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.request import Completion, Request, prompt_key
from rollout_spec.engine.runner import ModelRunner
from rollout_spec.engine.running import Detokenize, RunningRequest
from rollout_spec.engine.scheduler import PrefillChunk, Scheduler
from rollout_spec.engine.states import StateBuffer
from rollout_spec.errors import RequestError
from rollout_spec.events import Event, EventSink, PrefillEvent, RequestEvent, WeightSyncEvent
from rollout_spec.pilot import BudgetPilot
from rollout_spec.sinks import TeeSink
from rollout_spec.tree import Draw
from rollout_spec.verify import EXACT_ON, Scheme, VerifyFn


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and choices that hold for the engine's life."""

    max_batch: int = 16  # requests that run at once: the number of KV slots
    max_context: int = 2048  # prompt + output tokens of one request
    prefill_chunk: int = 512  # prompt tokens computed between two rounds
    max_tree_nodes: int = 128  # room kept behind the context for draft nodes
    scheme: Scheme | None = None  # None: by the drafter's kind of tree (verify.default_scheme)
    seed: int | None = None  # of the seeds that requests without one get; None = from the operating system

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_context", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")


class Engine:
    """Generates completions with exact speculative decoding. Not thread-safe: AsyncEngine puts a thread around it."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        config: EngineConfig | None = None,
        drafter: Drafter | None = None,
        controller: BudgetController | BudgetPilot | None = None,  # None: ThroughputBudget; a pilot brings what it has learnt
        sink: EventSink | None = None,
        detokenize: Detokenize | None = None,
        verify: VerifyFn | None = None,  # None: that of the runner's operations
    ) -> None:
        self.config = EngineConfig() if config is None else config
        if self.config.max_context > runner.max_position:
            raise ValueError(f"max_context {self.config.max_context} is more than the model's {runner.max_position} positions")
        if drafter is not None and drafter.vocab_size not in (None, runner.vocab_size):
            raise ValueError(
                f"drafter {drafter.name} is for a vocabulary of {drafter.vocab_size}; the model's has {runner.vocab_size}: "
                "train or choose one for this model"
            )
        if drafter is not None and self.config.scheme is not None:
            check_drafter(self.config.scheme, drafter.name, drafter.needs.draws)
        self.runner, self.drafter, self.detokenize = runner, drafter, detokenize
        self.tokenizer: PreTrainedTokenizerBase | None = None  # set by from_pretrained
        self.weights_version = 0
        self._sink: EventSink = TeeSink() if sink is None else sink
        self._drafter_sync = DrafterSync(drafter, runner, self._sink)
        self._kv = runner.make_slots(self.config.max_batch, self.config.max_context + self.config.max_tree_nodes)
        self._scheduler = Scheduler(self._kv, self.config.prefill_chunk)
        self._states = StateBuffer(drafter.needs.hidden_layers if drafter is not None else ())
        self._loop = RoundLoop(
            runner=runner,
            kv=self._kv,
            states=self._states,
            drafter=drafter,
            pilot=controller if isinstance(controller, BudgetPilot) else BudgetPilot(controller or ThroughputBudget()),
            scheme=self.config.scheme,
            verify=runner.ops.verify if verify is None else verify,
            max_tree_nodes=self.config.max_tree_nodes,
            sink=self._sink,
        )
        self._finished: list[Completion] = []
        self._aborts: set[str] = set()
        self._seed_source = None if self.config.seed is None else torch.Generator().manual_seed(self.config.seed)

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        dtype: str = "float32",
        config: EngineConfig | None = None,
        drafter: Drafter | None = None,
        controller: BudgetController | BudgetPilot | None = None,
        sink: EventSink | None = None,
        ops: Ops | None = None,
    ) -> Engine:
        """An engine for ``smollm2-135m``, a local Hugging Face directory, or a hub id; dtype float32 or bfloat16."""
        config = EngineConfig() if config is None else config
        loaded = load_model(model, dtype)
        engine = cls(
            make_runner(loaded.module, max_context=config.max_context, ops=ops),
            config=config,
            drafter=drafter,
            controller=controller,
            sink=sink,
            detokenize=loaded.detokenize,
        )
        engine.tokenizer = loaded.tokenizer
        return engine

    @property
    def pilot(self) -> BudgetPilot:
        """The budget's controller with its entropy monitor (``pilot.monitor.stale``) and costs."""
        return self._loop.pilot

    # Requests in, completions out

    def add(self, request: Request) -> str:
        """Queue a request; returns its id. Raises RequestError if it can never be served."""
        running = self._make_running(request)
        self._scheduler.waiting.append(running)
        return running.request_id

    def abort(self, request_id: str) -> None:
        """End a request before the next round; its completion holds what it has, and Request.resume continues it."""
        self._aborts.add(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run the requests to their ends; completions in the order of the requests. A refused one has finish_reason "error"."""
        ids: list[str] = []
        done: dict[str, Completion] = {}
        for request in requests:
            named = request if request.request_id is not None else dataclasses.replace(request, request_id=secrets.token_hex(8))
            assert named.request_id is not None
            refused = self.try_add(named)
            if refused is None:
                ids.append(named.request_id)
            else:
                # Its id may be that of another request: keep the refusal under one of its own.
                ids.append(secrets.token_hex(8))
                done[ids[-1]] = refused
        while self.has_work:
            done |= {completion.request_id: completion for completion in self.step()}
        return [done[request_id] for request_id in ids]

    def try_add(self, request: Request) -> Completion | None:
        """Queue a request; one that can never be served comes back at once with finish_reason "error"."""
        try:
            self.add(request)
        except RequestError as error:
            return self._refuse(request, str(error))
        return None

    def step(self) -> list[Completion]:
        """One prefill chunk if a prompt waits for it, and one round of all requests that are ready. Returns what finished."""
        self._take_aborts()
        self._scheduler.admit()
        chunk = self._scheduler.next_chunk()
        if chunk is not None:
            self._prefill(chunk)
        ready = self._scheduler.ready()
        if ready:
            self._loop.run(ready, self.weights_version, self.detokenize)
            for running in ready:
                if running.finish_reason is not None:
                    self._finish(running)
        finished, self._finished = self._finished, []
        return finished

    # Weights

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, *, partial: bool = False
    ) -> weight_sync.WeightsReport:
        """Replace the target's weights between two rounds. Running requests go on from their tokens with new K/V.

        Every weight must come (``partial`` lifts that), under the checkpoint's names; tied ones may. Raises ValueError that names
        what is unknown, missing, misshapen or not finite, and changes nothing then.
        """
        began = time.perf_counter()
        own = self.runner.named_weights()
        tensors = weight_sync.checked(named_tensors, own, self.runner.tied_names(), partial)
        self.runner.load_weights(tensors)
        sums = weight_sync.checksums(self.runner.named_weights())
        report = weight_sync.WeightsReport(
            version=version, num_tensors=len(tensors), checksum=weight_sync.combine(sums), tensor_checksums=sums
        )
        self.weights_version = version
        self._scheduler.restart()
        self._states.clear()
        self._sink.emit(
            WeightSyncEvent(
                role="target", version=version, num_tensors=len(tensors), checksum=report.checksum, seconds=time.perf_counter() - began
            )
        )
        self._drafter_sync.target_updated(version)
        self.pilot.target_updated()
        return report

    def update_drafter(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> weight_sync.WeightsReport:
        """Replace the drafter's own weights, trained for the policy of ``version``, between two rounds. Running requests go on.

        Raises ValueError if there is no drafter with weights of its own, or a tensor is unknown, missing, misshapen or not finite (it is
        named, and nothing is changed then); RuntimeError if a weight of the target is another afterwards.
        """
        report = self._drafter_sync.update(named_tensors, version)
        self.pilot.drafter_updated()
        return report

    def emit(self, event: Event) -> None:
        """An event of whoever serves the engine, among its own."""
        self._sink.emit(event)

    # One step's parts

    def _make_running(self, request: Request) -> RunningRequest:
        prompt = [int(token) for token in request.prompt_token_ids]
        limit = self.config.max_context
        if not prompt:
            raise RequestError("empty prompt: give at least one token (a beginning-of-sequence token will do)")
        if len(prompt) + request.max_new_tokens > limit:
            raise RequestError(
                f"prompt of {len(prompt)} tokens + max_new_tokens {request.max_new_tokens} exceed the context of {limit}: "
                "shorten the prompt, lower max_new_tokens or raise max_context"
            )
        outside = next((token for token in prompt if not 0 <= token < self.runner.vocab_size), None)
        if outside is not None:
            raise RequestError(f"prompt token id {outside} is outside the vocabulary of {self.runner.vocab_size}")
        if request.stop and self.detokenize is None:
            raise RequestError("stop strings need a tokenizer: build the engine with detokenize, or use stop_token_ids")
        running = RunningRequest(
            request=request,
            request_id=request.request_id or secrets.token_hex(8),
            prompt_key=request.prompt_key or prompt_key(prompt),
            seed=self._random_seed() if request.seed is None else request.seed,
            stop_token_ids=frozenset(request.stop_token_ids)
            | (frozenset() if request.ignore_eos else frozenset(self.runner.eos_token_ids)),
            tokens=prompt,
            num_prompt=len(prompt),
        )
        if any(other.request_id == running.request_id for other in (*self._scheduler.waiting, *self._scheduler.running)):
            raise RequestError(f"request id {running.request_id!r} is already in use")
        if request.resume is not None:
            running.take_up(request.resume)
        return running

    def _random_seed(self) -> int:
        if self._seed_source is None:
            return secrets.randbits(63)
        return int(torch.randint(1 << 62, (1,), generator=self._seed_source))

    def _refuse(self, request: Request, message: str) -> Completion:
        completion = Completion.refused(request, request.request_id or secrets.token_hex(8), message)
        self._report(completion)
        return completion

    def _finish(self, running: RunningRequest) -> None:
        self._scheduler.remove(running)
        self._states.drop(running.request_id)
        self.pilot.finish(running.request_id)
        if self.drafter is not None and running.drafter_knows:
            self.drafter.finish(running.view)
        completion = running.completion(self.detokenize)
        self._finished.append(completion)
        self._report(completion)

    def _report(self, completion: Completion) -> None:
        self._sink.emit(
            RequestEvent(
                request_id=completion.request_id,
                finish_reason=completion.finish_reason,
                num_prompt_tokens=len(completion.prompt_token_ids),
                num_tokens=len(completion.token_ids),
                num_rounds=completion.num_rounds,
                num_draft_tokens=completion.num_draft_tokens,
                num_accepted_tokens=completion.num_accepted_tokens,
                weights_version=self.weights_version,
                error=completion.error,
                oldest_weights_version=completion.weights_versions[0].weights_version if completion.weights_versions else -1,
            )
        )

    def _take_aborts(self) -> None:
        if not self._aborts:
            return
        for running in [*self._scheduler.waiting, *self._scheduler.running]:
            if running.request_id in self._aborts:
                running.finish_reason = "aborted"
                self._finish(running)
        self._aborts.clear()

    def _prefill(self, chunk: PrefillChunk) -> None:
        began = time.perf_counter()
        step = chunk.step(self._states.layers)
        out = self.runner.forward(step, self._kv)
        self._scheduler.filled(chunk)
        self._states.add_prefill(chunk, step, out)
        self._sink.emit(
            PrefillEvent(
                num_prompts=len(chunk.requests),
                num_tokens=step.plan.num_rows,
                num_shared_tokens=self._scheduler.take_shared_count(),
                target_s=time.perf_counter() - began,
            )
        )


def check_drafter(scheme: Scheme, name: str, draws: frozenset[Draw]) -> None:
    """Raise ValueError, at the start and not at the first draft, if the scheme is exact on no tree this drafter can make."""
    if draws & EXACT_ON[scheme]:
        return
    fitting = ", ".join(f"'{other.value}'" for other, exact_on in EXACT_ON.items() if draws & exact_on)
    made = " and ".join(sorted(draw.value for draw in draws))
    raise ValueError(f"verifying with '{scheme.value}' is not exact on the {made} drafts of {name}: use {fitting}")

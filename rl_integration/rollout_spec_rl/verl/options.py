"""What a user may say about our rollouts in verl's config, checked before anything starts.

Ours stand under ``actor_rollout_ref.rollout.custom.rollout_spec``; the rest is verl's own rollout config, of which the embedded engine
honours a part. Anything it cannot honour is refused with the mend. Nothing here imports verl.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_spec.budget import BudgetController
from rollout_spec.composition import draw_for
from rollout_spec.session import AUTO, parse_budget, parse_scheme
from rollout_spec.tree import Draw
from rollout_spec.verify import Scheme
from rollout_spec_rl.compose import DRAFTERS
from rollout_spec_rl.verl import BACKEND

WHERE = "actor_rollout_ref.rollout.custom.rollout_spec"
_ROLLOUT = "actor_rollout_ref.rollout"
FOLLOW_HEAD, FROZEN = "follow_head", "frozen"
_MISSING = "???"  # OmegaConf's mark of a value that has to be given
_DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
_LOGPROBS = ("processed_logprobs", "raw_logprobs")


@dataclass(frozen=True, kw_only=True)
class RolloutSpecOptions:
    """Our own options. ``seed``: the same run gives the same tokens with and without speculation (Gumbel-coupled verification)."""

    drafter: str = "none"  # none | ngram | suffix | self | self:T | the directory of a trained drafter
    verifier: str = "auto"  # auto | a scheme's name
    draft_length: int = 8  # the deepest that budget auto and entropy choose
    tree_width: tuple[int, ...] = (1,)
    budget: str = AUTO  # auto | entropy | fixed:K | batch_table:FILE | off
    seed: int | None = None
    max_batch: int = 16  # requests that run at once in a replica: KV slots
    prefill_chunk: int = 512
    threads: int | None = None  # compute threads of a replica; None: torch's choice
    events: str | None = None  # folder for one event log a replica; None: none are written
    sinks: tuple[str, ...] = ()  # further sinks of every replica, in rollout_spec.sinks.specs' words; they need ``events`` for their files
    # Of trained drafters, while the policy learns
    drafter_policy: str = FOLLOW_HEAD  # the embedding and output head that it borrows: follow_head | frozen
    refresh_before_rl: bool = False  # train it before the first step, by drafter_config on the run's own policy and prompts
    drafter_config: str | None = None  # of `rollout-spec train-drafter`
    drafter_cache: str | None = None  # folder of drafters trained so; None: ~/.cache/rollout_spec/drafters ($XDG_CACHE_HOME)
    refresh_every: int | None = None  # weight versions from one refresh to the next
    refresh_when_stale: bool = False  # refresh when the entropy monitor calls it stale
    refresh_steps: int = 40  # at most, of a refresh
    refresh_seconds: float = 30.0  # at most, of a refresh
    refresh_lr: float = 5e-4
    refresh_buffer_tokens: int = 32768  # of the newest rollouts, prompts included, whose states a replica keeps
    drafter_dir: str | None = None  # where refreshed drafters are kept for a trainer that is started again; None: nowhere

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree_width", tuple(self.tree_width))
        object.__setattr__(self, "sinks", tuple(self.sinks))
        if self.sinks and self.events is None:
            raise ValueError(f"{WHERE}.sinks needs {WHERE}.events as well: the folder for the event logs and the sinks' files")
        known = self.drafter in DRAFTERS or self.drafter.startswith("self:") or self.is_untrained
        if self.drafter == _MISSING and not known:
            raise ValueError(f"{WHERE}.drafter is not set: give the directory of a trained drafter, {WHERE}.drafter=runs/mtp/drafter")
        if not known and not Path(self.drafter).expanduser().is_dir():
            raise ValueError(
                f"{WHERE}.drafter={self.drafter!r} is neither one of {', '.join(DRAFTERS)} nor a directory on this machine: "
                "train one with `rollout-spec train-drafter` and give its folder"
            )
        for name in ("max_batch", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{WHERE}.{name} must be 1 or more, got {getattr(self, name)}")
        if self.threads is not None and not 1 <= self.threads <= (os.cpu_count() or 1):
            raise ValueError(f"{WHERE}.threads must be from 1 to the {os.cpu_count()} cores there are, got {self.threads}")
        schemes = [scheme.value for scheme in Scheme]
        if self.verifier not in (AUTO, *schemes):
            raise ValueError(f"{WHERE}.verifier={self.verifier!r} is not one of {AUTO}, {', '.join(schemes)}")
        try:
            self.controller()
        except ValueError as error:
            raise ValueError(f"{WHERE}: {error}") from None
        self._check_policy()
        if self.seed is not None and self.scheme not in (None, Scheme.GUMBEL):
            raise ValueError(
                f"{WHERE}.seed asks for the same tokens with and without speculation, which verifier={self.verifier!r} does not give: "
                "leave the seed out, or use verifier=gumbel (or auto)"
            )

    def _check_policy(self) -> None:
        """What is said of trained drafters must fit together, and be said of one."""
        if self.drafter_policy not in (FOLLOW_HEAD, FROZEN):
            raise ValueError(f"{WHERE}.drafter_policy={self.drafter_policy!r} is not one of {FOLLOW_HEAD}, {FROZEN}")
        model_free = not self.is_untrained and not Path(self.drafter).expanduser().is_dir()
        asked = [name for name in ("refresh_every", "refresh_when_stale") if getattr(self, name)]
        asked += ["drafter_policy"] if self.drafter_policy == FROZEN else []
        if model_free and asked:
            raise ValueError(f"{WHERE}.{asked[0]} is for trained drafters; drafter={self.drafter!r} has no weights: leave it out")
        if self.refreshes and self.drafter_policy == FROZEN:
            raise ValueError(
                f"{WHERE}.{asked[0]} trains the drafter towards the policy's present head, drafter_policy={FROZEN} keeps an old one: "
                f"use {FOLLOW_HEAD}"
            )
        for name in ("refresh_every", "refresh_steps", "refresh_buffer_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{WHERE}.{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("refresh_seconds", "refresh_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{WHERE}.{name} must be positive, got {getattr(self, name)}")
        if self.refresh_before_rl:
            self._check_training_before()
        elif self.drafter_config is not None:
            raise ValueError(f"{WHERE}.drafter_config is read by refresh_before_rl only: set it to true, or leave the config out")

    def _check_training_before(self) -> None:
        if self.drafter != _MISSING:
            raise ValueError(f"{WHERE}.refresh_before_rl trains a drafter, and drafter={self.drafter!r} names one: leave one of them out")
        if self.drafter_config is None:
            raise ValueError(f"{WHERE}.refresh_before_rl needs to know what to train: give drafter_config=configs/drafter/mtp_smollm2.yaml")
        if not Path(self.drafter_config).expanduser().is_file():
            raise ValueError(f"{WHERE}.drafter_config={self.drafter_config!r} is no file on this machine")

    @property
    def is_untrained(self) -> bool:
        """The drafter is still to be trained, before the first step."""
        return self.refresh_before_rl and self.drafter == _MISSING

    @property
    def refreshes(self) -> bool:
        """The drafter is trained further while the policy learns."""
        return self.refresh_every is not None or self.refresh_when_stale

    @property
    def scheme(self) -> Scheme | None:
        return parse_scheme(self.verifier)

    @property
    def draw(self) -> Draw:
        """How a sampling drafter must draw so that the verifier is exact on its drafts."""
        return draw_for(self.scheme, seeded=self.seed is not None, wide=max(self.tree_width) > 1)

    def controller(self) -> BudgetController:
        return parse_budget(self.budget, self.draft_length, self.tree_width)

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> RolloutSpecOptions:
        """From the mapping under ``custom.rollout_spec``. Raises ValueError for an unknown key and a value of a wrong type."""
        fields = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(given or {}) - fields)
        if unknown:
            raise ValueError(f"unknown option {WHERE}.{unknown[0]}: known are {', '.join(sorted(fields))}")
        for name, value in (given or {}).items():
            wanted, fits = _TYPES[name]
            if value != _MISSING and not fits(value):
                raise ValueError(f"{WHERE}.{name} must be {wanted}, got {value!r}")
        return cls(**(given or {}))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_widths(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(_is_int(width) for width in value)


_TYPES = {
    "drafter": ("a name or a directory", _is_text),
    "verifier": ("a name", _is_text),
    "draft_length": ("a whole number", _is_int),
    "tree_width": ("a list of whole numbers, like [2,1]", _is_widths),
    "budget": ("a name like auto or fixed:4", _is_text),
    "seed": ("null or a whole number", lambda value: value is None or _is_int(value)),
    "max_batch": ("a whole number", _is_int),
    "prefill_chunk": ("a whole number", _is_int),
    "threads": ("null or a whole number", lambda value: value is None or _is_int(value)),
    "events": ("null or a folder", lambda value: value is None or _is_text(value)),
    "sinks": ("a list of names, like [prometheus]", lambda value: isinstance(value, list | tuple) and all(map(_is_text, value))),
    "drafter_policy": ("a name", _is_text),
    "refresh_before_rl": ("true or false", lambda value: isinstance(value, bool)),
    "drafter_config": ("null or a file", lambda value: value is None or _is_text(value)),
    "drafter_cache": ("null or a folder", lambda value: value is None or _is_text(value)),
    "refresh_every": ("null or a whole number", lambda value: value is None or _is_int(value)),
    "refresh_when_stale": ("true or false", lambda value: isinstance(value, bool)),
    "refresh_steps": ("a whole number", _is_int),
    "refresh_seconds": ("a number", _is_number),
    "refresh_lr": ("a number", _is_number),
    "refresh_buffer_tokens": ("a whole number", _is_int),
    "drafter_dir": ("null or a folder", lambda value: value is None or _is_text(value)),
}


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """Our options and the part of verl's rollout config that the embedded engine follows."""

    options: RolloutSpecOptions
    dtype: str
    prompt_length: int
    response_length: int
    max_context: int
    ignore_eos: bool
    temperature: float  # of training rollouts
    raw_logprobs: bool  # hand over the model's own log-probabilities instead of the sampled law's


def plan_rollouts(rollout: Mapping[str, Any], *, before_training: bool = False) -> RolloutPlan:
    """Check verl's rollout config, given as a mapping, for our backend. ``before_training``: its drafter may still have to be trained.

    Raises ValueError that names the setting and the mend for everything the embedded engine cannot do.
    """
    options = RolloutSpecOptions.parse((rollout.get("custom") or {}).get(BACKEND))
    if options.is_untrained and not before_training:
        raise ValueError(
            f"{WHERE}.refresh_before_rl trains when a single run starts, and nothing has: a sweep's jobs take a trained one, drafter=FOLDER"
        )
    for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        if rollout.get(name, 1) != 1:
            raise ValueError(
                f"{_ROLLOUT}.{name}={rollout[name]}: an embedded engine runs in one process; set it to 1 and use more replicas"
            )
    dtype = _DTYPES.get(str(rollout["dtype"]))
    if dtype is None:
        raise ValueError(f"{_ROLLOUT}.dtype={rollout['dtype']!r}: the embedded engine runs float32 or bfloat16")
    if rollout.get("free_cache_engine"):
        raise ValueError(f"{_ROLLOUT}.free_cache_engine=True: the embedded engine keeps its memory between rollouts; set it to False")
    mode = rollout.get("logprobs_mode") or _LOGPROBS[0]
    if mode not in _LOGPROBS:
        raise ValueError(f"{_ROLLOUT}.logprobs_mode={mode!r}: the embedded engine gives {' or '.join(_LOGPROBS)}")
    temperature = float(rollout["temperature"])
    if mode == "raw_logprobs" and temperature != 1.0 and rollout.get("calculate_log_probs"):
        raise ValueError(
            f"{_ROLLOUT}.logprobs_mode=raw_logprobs at temperature {temperature}: verl's actor divides logits by the temperature, so the "
            "importance ratio would be wrong; use processed_logprobs"
        )
    if not temperature > 0 and (options.refreshes or options.refresh_before_rl):
        raise ValueError(
            f"{_ROLLOUT}.temperature={temperature}: a greedy policy has no law to train a drafter on; sample, or do not refresh"
        )
    for name, why in (("quantization", "weights are not quantised"), ("enable_rollout_routing_replay", "no expert routes are recorded")):
        if rollout.get(name):
            raise ValueError(f"{_ROLLOUT}.{name}={rollout[name]!r}: {why} by the embedded engine; leave it out")
    prompt_length, response_length = int(rollout["prompt_length"]), int(rollout["response_length"])
    max_context = int(rollout.get("max_model_len") or prompt_length + response_length)
    return RolloutPlan(
        options=options,
        dtype=dtype,
        prompt_length=prompt_length,
        response_length=response_length,
        max_context=max_context,
        ignore_eos=bool(rollout.get("ignore_eos")),
        temperature=temperature,
        raw_logprobs=mode == "raw_logprobs",
    )

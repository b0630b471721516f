"""What a user may say about speculation in vLLM, checked before the engine starts. Nothing here imports vLLM.

The options travel to the worker in vLLM's ``additional_config`` under ``rollout_spec``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_spec.budget import BudgetController, FixedBudget
from rollout_spec.composition import draw_for
from rollout_spec.controllers.table import BatchTableBudget
from rollout_spec.session import AUTO, parse_budget, parse_scheme
from rollout_spec.tree import Draw
from rollout_spec.verify import Scheme
from rollout_spec_rl.vllm.native_options import NATIVE, check_native, native_config

WHERE = "additional_config.rollout_spec"
KEY = "rollout_spec"
MODEL_FREE = ("ngram", "suffix")
_PROPOSER = "rollout_spec_rl.vllm.proposer.SpecProposer"
_EXTENSION = "rollout_spec_rl.vllm.extension.RolloutSpecExtension"
_SCHEMES = (Scheme.BLOCK, Scheme.REJECTION, Scheme.EXACT_MATCH, Scheme.GUMBEL)


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """One engine's options. Drafts are chains: vLLM verifies no trees."""

    drafter: str  # ngram | suffix | the directory of a trained drafter | vllm: whatever vLLM's own speculative_config names
    draft_length: int = 4  # the deepest that budget auto and entropy choose; vLLM's num_speculative_tokens
    budget: str = AUTO  # auto | entropy | fixed:K | batch_table:FILE | off
    verifier: str = AUTO  # auto | block | rejection | exact_match | gumbel
    state_cache_tokens: int = 16384  # prompt tokens whose states are kept for requests that share them through the prefix cache
    events: str | None = None  # folder of the event log; None: none is written
    sinks: tuple[str, ...] = ()  # further sinks, in rollout_spec.sinks.specs' words; they need ``events`` for their files
    replica: str = "0"  # names this engine in logs and metrics

    def __post_init__(self) -> None:
        object.__setattr__(self, "sinks", tuple(self.sinks))
        if self.drafter not in (*MODEL_FREE, NATIVE) and not Path(self.drafter).expanduser().is_dir():
            raise ValueError(
                f"{WHERE}.drafter={self.drafter!r} is neither one of {', '.join(MODEL_FREE)} nor a directory on this machine: "
                "train one with `rollout-spec train-drafter` and give its folder"
            )
        if not 1 <= self.draft_length <= 32:
            raise ValueError(f"{WHERE}.draft_length must be from 1 to 32, got {self.draft_length} (no drafts: budget=off)")
        if self.state_cache_tokens < 0:
            raise ValueError(f"{WHERE}.state_cache_tokens must be 0 or more, got {self.state_cache_tokens}")
        if self.sinks and self.events is None:
            raise ValueError(f"{WHERE}.sinks needs {WHERE}.events as well: the folder for the event log and the sinks' files")
        names = (AUTO, *(scheme.value for scheme in _SCHEMES))
        if self.verifier not in names:
            raise ValueError(f"{WHERE}.verifier={self.verifier!r} is not one of {', '.join(names)}: in vLLM drafts are chains")
        if self.is_model_free and self.scheme in (Scheme.BLOCK, Scheme.REJECTION):
            raise ValueError(
                f"{WHERE}.verifier={self.verifier!r} needs sampled drafts, and those of {self.drafter} are not: use exact_match or auto"
            )
        try:
            deepest = _deepest(self.controller())
        except ValueError as error:
            raise ValueError(f"{WHERE}: {error}") from None
        if deepest > self.draft_length:
            raise ValueError(
                f"{WHERE}.budget={self.budget!r} drafts up to {deepest} tokens, and vLLM is given room for {self.draft_length}: "
                "give as many as draft_length (num_speculative_tokens of vLLM's own drafters)"
            )

    @property
    def is_model_free(self) -> bool:
        return self.drafter in MODEL_FREE

    @property
    def is_native(self) -> bool:
        """vLLM drafts; lengths, verification and telemetry are ours."""
        return self.drafter == NATIVE

    @property
    def scheme(self) -> Scheme | None:
        """None: the best that is exact for the drafter."""
        return parse_scheme(self.verifier)

    @property
    def draw(self) -> Draw:
        """How a trained drafter must draw so that the verifier is exact on its drafts."""
        return draw_for(self.scheme, seeded=False, wide=False)

    def controller(self) -> BudgetController:
        return parse_budget(self.budget, self.draft_length, (1,))

    @classmethod
    def parse(cls, given: object) -> VllmOptions:
        """From the mapping under ``additional_config``. Raises ValueError for an unknown key and a value of a wrong type."""
        if not isinstance(given, Mapping):
            raise ValueError(f"{WHERE} is missing: start vLLM with rollout_spec_rl.vllm.engine_args(drafter=...), which fills it in")
        unknown = sorted(set(given) - set(_TYPES))
        if unknown:
            raise ValueError(f"unknown option {WHERE}.{unknown[0]}: known are {', '.join(sorted(_TYPES))}")
        if "drafter" not in given:
            raise ValueError(f"{WHERE}.drafter is not set: give ngram, suffix or the directory of a trained drafter")
        for name, value in given.items():
            wanted, kinds = _TYPES[name]
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ValueError(f"{WHERE}.{name} must be {wanted}, got {value!r}")
        return cls(**given)


def _deepest(controller: BudgetController) -> int:
    """The longest draft that a budget names; 0 for one that keeps to the length it was made with."""
    if isinstance(controller, FixedBudget):
        return controller.draft_length
    return max(length for _, length in controller.table) if isinstance(controller, BatchTableBudget) else 0


_TEXT, _TEXT_OR_NONE, _NUMBER = (str,), (str, type(None)), (int,)
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "drafter": ("a name or a directory", _TEXT),
    "draft_length": ("a whole number", _NUMBER),
    "budget": ("a name like auto or fixed:4", _TEXT),
    "verifier": ("a name", _TEXT),
    "state_cache_tokens": ("a whole number", _NUMBER),
    "events": ("null or a folder", _TEXT_OR_NONE),
    "sinks": ("a list of names, like [prometheus]", (list, tuple)),
    "replica": ("a name", _TEXT),
}


def engine_args(*, speculative_config: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Arguments of vLLM's ``LLM`` (and, as JSON, options of ``vllm serve``) that turn our speculation on.

    Takes the options of VllmOptions, and instead of ``drafter`` a ``speculative_config`` as vLLM knows it: then vLLM drafts, by its own
    draft_model, eagle, eagle3, mtp or dflash, and we decide how deep and verify. ValueError with the mend for what is wrong.
    """
    if speculative_config is None:
        own = VllmOptions.parse(options)
        if own.is_native:
            raise ValueError(
                f"{WHERE}.drafter={NATIVE} goes with vLLM's own speculative_config: give engine_args that instead of a drafter"
            )
        config: dict[str, Any] = {"method": "custom_class", "model": _PROPOSER, "num_speculative_tokens": own.draft_length}
    else:
        if "drafter" in options or "draft_length" in options:
            raise ValueError("a speculative_config names the drafter and its length: leave drafter and draft_length out")
        config = native_config(speculative_config)
        own = VllmOptions.parse({**options, "drafter": NATIVE, "draft_length": config["num_speculative_tokens"]})
        check_native(config, own.scheme)
    return {
        "speculative_config": config,
        "additional_config": {KEY: {**dataclasses.asdict(own), "sinks": list(own.sinks)}},
        "worker_extension_cls": _EXTENSION,
    }

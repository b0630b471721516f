"""Between verl's words and the engine's: sampling parameters in, token outputs out. Nothing here imports verl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_spec.engine.request import Completion, Request
from rollout_spec.errors import RequestError
from rollout_spec.sampling import SamplingParams
from rollout_spec_rl.verl.options import RolloutPlan

_SAMPLING = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_LIMITS = ("max_tokens", "max_new_tokens")  # vLLM's word and SGLang's
_OTHERS = ("top_k", "logprobs", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias")


def make_request(plan: RolloutPlan, prompt: Sequence[int], given: Mapping[str, Any], request_id: str) -> Request:
    """The engine's request for verl's sampling parameters.

    Raises RequestError for a parameter that the engine does not know (dropping it would sample another law) and for a prompt that
    leaves no room.
    """
    unknown = sorted(set(given) - {*_SAMPLING, *_LIMITS, *_OTHERS})
    if unknown:
        raise RequestError(f"sampling parameter {unknown[0]!r} is not known to the embedded engine")
    room = plan.max_context - len(prompt)
    if room < 1:
        raise RequestError(f"prompt of {len(prompt)} tokens leaves no room in a context of {plan.max_context}: raise rollout.max_model_len")
    limit = next((int(given[name]) for name in _LIMITS if given.get(name) is not None), None)
    if limit is None:
        limit = min(plan.response_length, plan.prompt_length + plan.response_length - len(prompt))
    stop = given.get("stop") or ()
    return Request(
        prompt_token_ids=tuple(prompt),
        max_new_tokens=max(1, min(limit, room)),
        sampling=SamplingParams(
            temperature=_number(given, "temperature", 1.0),
            top_k=max(0, int(given.get("top_k", 0))),  # verl says "off" with -1
            top_p=_number(given, "top_p", 1.0),
            min_p=_number(given, "min_p", 0.0),
            repetition_penalty=_number(given, "repetition_penalty", 1.0),
            presence_penalty=_number(given, "presence_penalty", 0.0),
            frequency_penalty=_number(given, "frequency_penalty", 0.0),
            logit_bias={int(token): float(bias) for token, bias in (given.get("logit_bias") or {}).items()},
        ),
        seed=given.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(given.get("stop_token_ids") or ()),
        ignore_eos=bool(given.get("ignore_eos", plan.ignore_eos)),
        request_id=request_id,
    )


def _number(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name)
    return default if value is None else float(value)


def output_fields(plan: RolloutPlan, completion: Completion, *, logprobs: bool, version: int) -> dict[str, Any]:
    """What verl's TokenOutput is made of.

    ``global_steps`` is the version that an answer without a token would have come from; a trajectory's span of versions is in
    ``rollout_spec_versions``. The ``spec_*`` counts are those verl's own metrics take. Raises RequestError for a request that failed.
    """
    if completion.finish_reason == "error":
        raise RequestError(completion.error or "the request failed")
    chosen = completion.logprobs if plan.raw_logprobs else completion.processed_logprobs
    spans = [(span.weights_version, span.start, span.end) for span in completion.weights_versions]
    return {
        "token_ids": list(completion.token_ids),
        "log_probs": list(chosen) if logprobs else None,
        "stop_reason": "aborted" if completion.finish_reason == "aborted" else "completed",
        "extra_fields": {
            "global_steps": spans[-1][0] if spans else version,
            "min_global_steps": spans[0][0] if spans else version,
            "max_global_steps": spans[-1][0] if spans else version,
            "spec_num_draft_tokens": completion.num_draft_tokens,
            "spec_num_accepted_tokens": completion.num_accepted_tokens,
            "spec_num_verify_steps": completion.num_rounds,
            "rollout_spec_versions": spans,
        },
    }

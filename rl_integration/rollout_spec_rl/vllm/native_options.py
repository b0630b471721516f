"""Which of vLLM's own speculative methods we drive, and with which of their settings. Nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_spec.verify import Scheme
from rollout_spec.verify.scheme import RATIO_SCHEMES

NATIVE = "vllm"  # the name of vLLM's own drafters among ours
PROBABILISTIC = "probabilistic"
# Their drafts are chains of any length up to the one that was set, which may be cut behind any token.
DRIVEN = ("draft_model", "eagle", "eagle3", "mtp", "dflash")
UNDER_VERL = (
    "vLLM's own drafters are not driven under verl, which starts vLLM on dummy weights and sends it the policy's alone: "
    "use drafter=suffix or a trained drafter's folder"
)
_MENDS = {
    "ngram": "ours does the same: drafter=ngram",
    "ngram_gpu": "ours does the same: drafter=ngram",
    "suffix": "ours does the same: drafter=suffix",
    "custom_class": "name one of vLLM's own methods, or one of our drafters",
}
_REFUSED = {
    "num_speculative_tokens_per_batch_size": "two budgets would decide: leave it out, or use budget=batch_table:FILE",
    "disable_padded_drafter_batch": "drafts are taken where vLLM makes them for padded batches: leave it out",
    "use_heterogeneous_vocab": "use a draft model with the policy's vocabulary",
}


def native_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """A user's ``speculative_config``, with probabilistic drafts where nothing else is said. Raises ValueError like ``check_native``."""
    config = {"draft_sample_method": PROBABILISTIC, **given}
    check_native(config, None)
    return config


def check_native(config: Mapping[str, Any], scheme: Scheme | None) -> None:
    """Raise ValueError, with the mend, for what of vLLM's speculative settings our budgets and verifiers do not go with.

    scheme: the verifier that was asked for, None for what suits the drafts.
    """
    method = config.get("method")
    if method not in DRIVEN:
        mend = _MENDS.get(str(method), "it is not driven by our budgets: run it without rollout_spec")
        raise ValueError(f"speculative_config.method={method!r} is none of {', '.join(DRIVEN)}: {mend}")
    for name, mend in _REFUSED.items():
        if config.get(name):
            raise ValueError(f"speculative_config.{name} does not go with our budgets: {mend}")
    if config.get("parallel_drafting") and method != "dflash":
        raise ValueError("speculative_config.parallel_drafting drafts a fixed number of tokens: leave it out, or use method=dflash")
    if config.get("rejection_sample_method", "standard") != "standard":
        raise ValueError("speculative_config.rejection_sample_method would be vLLM's: leave it out, and choose with our option verifier")
    length = config.get("num_speculative_tokens")
    if not isinstance(length, int) or isinstance(length, bool):
        raise ValueError(f"speculative_config.num_speculative_tokens must say how deep drafts may go, got {length!r}")
    if config.get("draft_sample_method") != PROBABILISTIC and scheme in RATIO_SCHEMES:
        assert scheme is not None
        raise ValueError(
            f"verifier={scheme.value} needs sampled drafts: set speculative_config.draft_sample_method={PROBABILISTIC}, "
            "or verifier to exact_match or auto"
        )

"""Every wrong setting is refused before anything starts, with the name of the setting and the mend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_spec.budget import FixedBudget
from rollout_spec.tree import Draw
from rollout_spec.verify import Scheme
from rollout_spec_rl.verl.options import RolloutSpecOptions, plan_rollouts
from rollout_spec_rl.vllm import VllmOptions

Rollout = Callable[..., dict[str, Any]]


def test_without_options_there_is_no_speculation(rollout: Rollout) -> None:
    plan = plan_rollouts(rollout())
    assert plan.options == RolloutSpecOptions()
    assert plan.options.drafter == "none"
    assert (plan.max_context, plan.raw_logprobs, plan.dtype) == (40, False, "float32")


def test_what_is_given_is_taken(rollout: Rollout, tmp_path: Path) -> None:
    given = {"drafter": str(tmp_path), "draft_length": 3, "tree_width": [2, 1], "max_batch": 5, "budget": "fixed:3"}
    plan = plan_rollouts(rollout(given, max_model_len=99, dtype="bf16", logprobs_mode="raw_logprobs", ignore_eos=True))
    assert plan.options.tree_width == (2, 1)
    assert plan.options.controller() == FixedBudget(draft_length=3, tree_width=(2, 1))
    assert plan.options.draw is Draw.WITHOUT_REPLACEMENT
    assert (plan.max_context, plan.dtype, plan.raw_logprobs, plan.ignore_eos) == (99, "bfloat16", True, True)


def test_a_seed_asks_for_coupled_drafts() -> None:
    options = RolloutSpecOptions(drafter="self", seed=7)
    assert options.draw is Draw.GUMBEL
    assert RolloutSpecOptions(drafter="self").draw is Draw.SAMPLED
    assert RolloutSpecOptions(verifier="block").scheme is Scheme.BLOCK


@pytest.mark.parametrize(
    ("custom", "said"),
    [
        ({"draftlength": 4}, "unknown option .*draftlength: known are budget, draft_length"),
        ({"drafter": "???"}, "drafter is not set: give the directory"),
        ({"drafter": "/nowhere/drafter"}, "neither one of none, ngram, suffix, self nor a directory"),
        ({"drafter": 3}, "drafter must be a name or a directory, got 3"),
        ({"draft_length": "4"}, "draft_length must be a whole number, got '4'"),
        ({"draft_length": True}, "draft_length must be a whole number"),
        ({"draft_length": -1}, "draft_length must be 0 or more"),
        ({"tree_width": 2}, "tree_width must be a list of whole numbers"),
        ({"tree_width": [0]}, "tree_width needs one or more positive widths"),
        ({"verifier": "lenient"}, "verifier='lenient' is not one of auto, rejection, block"),
        ({"verifier": "block", "seed": 1}, "seed asks for the same tokens .* use verifier=gumbel"),
        ({"budget": "fixed"}, "give off, fixed:K"),
        ({"budget": None}, "budget must be a name like auto or fixed:4, got None"),
        ({"budget": "batch_table:/nowhere/table.json"}, "batch table /nowhere/table.json"),
        ({"max_batch": 0}, "max_batch must be 1 or more"),
        ({"prefill_chunk": 0}, "prefill_chunk must be 1 or more"),
        ({"threads": 0}, "threads must be from 1 to"),
        ({"threads": 10**6}, "threads must be from 1 to"),
        ({"seed": 1.5}, "seed must be null or a whole number"),
        ({"events": 1}, "events must be null or a folder"),
        ({"sinks": "prometheus"}, "sinks must be a list of names"),
        ({"sinks": ["prometheus"]}, "sinks needs"),
    ],
)
def test_wrong_options_of_ours(rollout: Rollout, custom: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_rollouts(rollout(custom))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size=2: .* set it to 1 and use more replicas"),
        ({"data_parallel_size": 2}, "data_parallel_size=2"),
        ({"dtype": "float16"}, "dtype='float16': the embedded engine runs float32 or bfloat16"),
        ({"free_cache_engine": True}, "free_cache_engine=True: .* set it to False"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode='raw_logits': .* processed_logprobs or raw_logprobs"),
        ({"logprobs_mode": "raw_logprobs", "temperature": 0.6}, "importance ratio would be wrong; use processed_logprobs"),
        ({"quantization": "fp8"}, "quantization='fp8'"),
        ({"enable_rollout_routing_replay": True}, "no expert routes are recorded"),
    ],
)
def test_settings_of_verl_that_the_engine_cannot_follow(rollout: Rollout, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_rollouts(rollout(**changes))


def test_raw_logprobs_at_another_temperature_are_fine_if_nobody_trains_on_them(rollout: Rollout) -> None:
    assert plan_rollouts(rollout(logprobs_mode="raw_logprobs", temperature=0.6, calculate_log_probs=False)).raw_logprobs


def test_configs_set_options_that_exist(repository_root: Path) -> None:
    """Every file of the group names known options, and switches on one of two backends."""
    import yaml

    files = sorted((repository_root / "configs" / "verl" / "rollout_spec").glob("*.yaml"))
    assert [path.stem for path in files] == ["block", "mtp", "off", "suffix", "vllm_block", "vllm_mtp", "vllm_suffix"]
    for path in files[:4]:
        text = path.read_text(encoding="utf-8")
        assert text.startswith("# @package _global_\n"), path
        config = yaml.safe_load(text)
        given = config["actor_rollout_ref"]["rollout"]["custom"]["rollout_spec"]
        RolloutSpecOptions.parse({**given, "drafter": "none"} if given["drafter"] == "???" else given)
        assert config["defaults"] == ["/rollout_spec_engine"], path
    for path in files[4:]:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        given = config["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]["additional_config"]["rollout_spec"]
        VllmOptions.parse(given | {"drafter": "suffix"})
        assert config["defaults"] == ["/rollout_spec_vllm"], path

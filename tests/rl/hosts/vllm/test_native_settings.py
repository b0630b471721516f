"""What vLLM is set to is looked at before its worker is made: its own drafters are driven, left alone, or refused with the mend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollout_spec_rl.vllm import engine_args
from rollout_spec_rl.vllm.native_driver import NativeDriver, drive, is_asked, prepare

EAGLE = {"method": "eagle", "model": "heads/eagle", "num_speculative_tokens": 3}
SPEC = {
    **EAGLE,
    "num_speculative_tokens_per_batch_size": None,
    "disable_padded_drafter_batch": False,
    "use_heterogeneous_vocab": False,
    "parallel_drafting": False,
    "rejection_sample_method": "standard",
    "draft_sample_method": "probabilistic",
}


def config(*, asked: bool = True, spec: dict[str, Any] | None = SPEC, device: str = "cpu", **changes: Any) -> SimpleNamespace:
    own = {**engine_args(speculative_config=EAGLE)["additional_config"]["rollout_spec"], **changes.pop("own", {})}
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1} | changes
    return SimpleNamespace(
        additional_config={"rollout_spec": own} if asked else {},
        speculative_config=None if spec is None else SimpleNamespace(**spec),
        parallel_config=SimpleNamespace(**parallel),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(logprobs_mode="raw_logprobs"),
    )


def test_vllms_own_speculation_is_left_alone_where_nobody_asks_for_ours() -> None:
    alone = config(asked=False, spec={"method": "ngram"}, device="cuda", tensor_parallel_size=8)
    assert not is_asked(alone)
    prepare(alone)
    runner = SimpleNamespace(vllm_config=alone)
    drive(runner)
    assert vars(runner) == {"vllm_config": alone}


def test_what_engine_args_gives_is_driven() -> None:
    assert is_asked(config())
    prepare(config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spec": None}, "none is configured: give engine_args a speculative_config"),
        ({"spec": SPEC | {"method": "medusa"}}, "it is not driven by our budgets"),
        ({"spec": SPEC | {"num_speculative_tokens": 4}}, "num_speculative_tokens is 4, draft_length 3: make them equal"),
        ({"spec": SPEC | {"draft_sample_method": "greedy"}, "own": {"verifier": "block"}}, "needs sampled drafts"),
        ({"spec": SPEC | {"rejection_sample_method": "block"}}, "choose with our option verifier"),
        ({"tensor_parallel_size": 2}, "set tensor, pipeline and data parallel sizes to 1"),
        ({"data_parallel_size": 2}, "set tensor, pipeline and data parallel sizes to 1"),
        ({"device": "cuda"}, "on a CPU, not on cuda: use vLLM's own speculation alone there"),
        ({"own": {"budgets": "auto"}}, "unknown option additional_config.rollout_spec.budgets"),
    ],
)
def test_what_cannot_be_driven_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(config(**changes))


def test_a_proposer_with_steps_of_its_own_is_refused() -> None:
    class Gemma4Proposer: ...

    with pytest.raises(ValueError, match="drafts for this model with Gemma4Proposer, which our budgets do not drive"):
        NativeDriver(SimpleNamespace(vllm_config=config(), drafter=Gemma4Proposer()))


def test_under_verl_they_are_refused() -> None:
    from rollout_spec_rl.vllm.verl_extension import VerlExtension

    with pytest.raises(ValueError, match="not driven under verl, which starts vLLM on dummy weights"):
        VerlExtension(vllm_config=config())

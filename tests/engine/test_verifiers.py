"""An engine with the fused verifier and one with the readable one say the same of every token."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

from rollout_spec.budget import FixedBudget
from rollout_spec.drafter import Drafter
from rollout_spec.drafters.ngram import NGramDrafter
from rollout_spec.drafters.self_draft import SelfConfig, SelfDrafter
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import make_runner
from rollout_spec.engine.ops import TorchOps
from rollout_spec.engine.request import Completion, Request
from rollout_spec.events import RoundEvent
from rollout_spec.sampling import SamplingParams
from rollout_spec.sinks import MemorySink
from rollout_spec.tree import Draw
from rollout_spec.verify import Scheme, VerifyFn, verify
from rollout_spec_kernels.cpu import CpuOps, unavailable_reason

PLAIN, WARM, FILTERED = SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=0.9, top_k=12, presence_penalty=0.4)
TRUNCATED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)


def _run(
    verifier: VerifyFn | None, drafter: Drafter | None, scheme: Scheme, sampling: SamplingParams
) -> tuple[list[Completion], list[RoundEvent]]:
    sink = MemorySink()
    engine = Engine(
        make_runner(tiny_model(), max_context=96, ops=CpuOps()),
        config=EngineConfig(max_batch=8, max_context=96, scheme=scheme, seed=5),
        drafter=drafter,
        controller=FixedBudget(draft_length=3),
        sink=sink,
        verify=verifier,
    )
    requests = [
        Request(prompt_token_ids=range(3 + i, 9 + 2 * i), max_new_tokens=20 + i, sampling=sampling, ignore_eos=True, request_id=str(i))
        for i in range(8)
    ]
    return engine.generate(requests), [event for event in sink.events if isinstance(event, RoundEvent)]


@pytest.mark.skipif(unavailable_reason() is not None, reason="no CPU kernels here")
@pytest.mark.parametrize("sampling", [PLAIN, WARM, FILTERED, TRUNCATED], ids=["plain", "warm", "filtered", "truncated"])
@pytest.mark.parametrize("scheme", [Scheme.REJECTION, Scheme.BLOCK, Scheme.EXACT_MATCH, Scheme.GUMBEL])
@pytest.mark.parametrize("drafted", [True, False])
def test_tokens_scores_and_counts_are_the_same(scheme: Scheme, sampling: SamplingParams, drafted: bool) -> None:
    """8 requests of 4 rows a round are more than the engine's head computes at once unless it must, as rounds shrink they are not."""

    def drafter() -> Drafter | None:
        if not drafted:
            return None
        draw = Draw.SAMPLED if scheme in (Scheme.REJECTION, Scheme.BLOCK) else Draw.DETERMINISTIC
        return NGramDrafter() if scheme is Scheme.GUMBEL else SelfDrafter(SelfConfig(draw=draw, temperature=1.2))

    (fused, rounds), (readable, readable_rounds) = (_run(which, drafter(), scheme, sampling) for which in (None, verify))
    assert [one.token_ids for one in fused] == [one.token_ids for one in readable]
    assert [one.accepted_depths for one in fused] == [one.accepted_depths for one in readable]
    for one, other in zip(fused, readable, strict=True):
        for name in ("logprobs", "processed_logprobs", "entropies"):
            torch.testing.assert_close(torch.tensor(getattr(one, name)), torch.tensor(getattr(other, name)), rtol=1e-6, atol=1e-6)
    for name in ("num_accepted_tokens", "num_emitted_tokens", "drafted_by_depth", "accepted_by_depth"):
        assert [getattr(event, name) for event in rounds] == [getattr(event, name) for event in readable_rounds], name
    for event, other_event in zip(rounds, readable_rounds, strict=True):
        assert event.mean_accept_prob_by_depth == pytest.approx(other_event.mean_accept_prob_by_depth, abs=1e-6)
        assert event.mean_entropy == pytest.approx(other_event.mean_entropy, abs=1e-6)
    assert not drafted or scheme is Scheme.GUMBEL or any(event.num_accepted_tokens for event in rounds)


@pytest.mark.skipif(unavailable_reason() is not None, reason="no CPU kernels here")
def test_truncation_in_the_kernel_is_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens and scores that the readable form of the operation gives."""
    drafter = SelfDrafter(SelfConfig(draw=Draw.SAMPLED, temperature=1.2))
    fused, _ = _run(None, drafter, Scheme.BLOCK, TRUNCATED)
    monkeypatch.setattr(CpuOps, "truncated_log_softmax", TorchOps.truncated_log_softmax)
    processed, _ = _run(None, drafter, Scheme.BLOCK, TRUNCATED)
    assert [one.token_ids for one in fused] == [one.token_ids for one in processed]
    for one, other in zip(fused, processed, strict=True):
        for name in ("logprobs", "processed_logprobs", "entropies"):
            torch.testing.assert_close(torch.tensor(getattr(one, name)), torch.tensor(getattr(other, name)), rtol=1e-5, atol=1e-5)

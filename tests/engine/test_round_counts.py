"""What a round counts by context length adds up to what it counts in all, and to what its requests say at their ends."""

from __future__ import annotations

import pytest
import torch
from tiny import ScriptedDrafter, oracle, tiny_model

from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import make_runner
from rollout_spec.engine.request import Request
from rollout_spec.engine.rounds import counts_by_context, tree_depth
from rollout_spec.events import RequestEvent, RoundEvent, context_bucket, context_edge
from rollout_spec.sinks import MemorySink
from rollout_spec.tree import DraftTree, Draw


@pytest.mark.parametrize(("length", "bucket"), [(0, 0), (1, 0), (64, 0), (65, 1), (128, 1), (129, 2), (256, 2), (257, 3), (131_072, 11)])
def test_contexts_fall_into_doubling_buckets(length: int, bucket: int) -> None:
    assert context_bucket(length) == bucket
    assert length <= context_edge(bucket)
    assert bucket == 0 or length > context_edge(bucket - 1)


def test_requests_that_failed_count_nowhere() -> None:
    counts = counts_by_context([10, 70, 200, 300], [True, True, True, False], [3, 4, 0, 5], [1, 2, 0, 5])
    assert counts == ((1, 1, 1), (3, 4, 0), (1, 2, 0))
    assert counts_by_context([10], [False], [1], [0]) == ((), (), ())


def test_the_depth_is_that_of_the_deepest_node_drafted() -> None:
    chains = DraftTree(
        token_ids=torch.zeros(2, 4, dtype=torch.int64),
        parents=torch.tensor([[-1, 0, 1, 2]] * 2),
        num_nodes=torch.tensor([1, 3]),
        draw=Draw.DETERMINISTIC,
    )
    assert tree_depth(chains) == 3
    wide = DraftTree(
        token_ids=torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]),
        parents=torch.tensor([[-1, -1, 0, 1], [-1, -1, 1, 2]]),  # the second one's last two are padding
        num_nodes=torch.tensor([4, 2]),
        draw=Draw.DETERMINISTIC,
    )
    assert tree_depth(wide) == 2
    assert tree_depth(DraftTree.empty(3)) == 0


def test_the_counts_of_a_run_add_up() -> None:
    prompts = [tuple(range(3, 3 + n)) for n in (5, 50)] + [(7,) * 127]
    requests = [Request(prompt_token_ids=prompt, max_new_tokens=30, seed=i, ignore_eos=True) for i, prompt in enumerate(prompts)]
    config = EngineConfig(max_batch=3, max_context=160)
    runner = make_runner(tiny_model(), max_context=160)
    answers = {c.prompt_token_ids: c.token_ids for c in Engine(runner, config=config).generate(requests)}
    sink = MemorySink()
    drafter = ScriptedDrafter(oracle(answers, 3, wrong_at=2))
    completions = Engine(runner, config=config, drafter=drafter, sink=sink).generate(requests)
    rounds = [event for event in sink.events if isinstance(event, RoundEvent)]
    assert any(len(event.rounds_by_context) == 3 for event in rounds)
    for event in rounds:
        assert sum(event.rounds_by_context) == event.num_requests
        assert sum(event.drafted_by_context) == event.num_draft_tokens
        assert sum(event.accepted_by_context) == event.num_accepted_tokens
        assert event.draft_depth >= len(event.drafted_by_depth)
    ended = [event for event in sink.events if isinstance(event, RequestEvent)]
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        assert sum(getattr(event, name) for event in rounds) == sum(getattr(event, name) for event in ended) > 0
    assert sum(event.num_requests for event in rounds) == sum(completion.num_rounds for completion in completions)


def test_a_request_says_which_version_it_began_with() -> None:
    sink = MemorySink()
    runner = make_runner(tiny_model(), max_context=64)
    engine = Engine(runner, config=EngineConfig(max_batch=1, max_context=64), sink=sink)
    engine.add(Request(prompt_token_ids=(3, 4), max_new_tokens=6, seed=1, ignore_eos=True))
    engine.step()
    engine.update_weights(dict(runner.named_weights()).items(), version=5)
    while engine.has_work:
        engine.step()
    (ended,) = [event for event in sink.events if isinstance(event, RequestEvent)]
    assert (ended.oldest_weights_version, ended.weights_version) == (0, 5)

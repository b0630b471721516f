"""The suffix drafter: which continuation it takes, what it learns from siblings, epochs and verdicts, and what it lets go."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext, RequestView
from rollout_spec.drafters.suffix import SuffixConfig, SuffixDrafter
from rollout_spec.sampling import SamplingParams
from rollout_spec.tree import DraftTree
from rollout_spec.verdict import Verdict

PROMPT = [900, 901, 902, 903]


def view(output: list[int], request_id: str = "a", prompt_key: str = "p", prompt: list[int] | None = None) -> RequestView:
    prompt = PROMPT if prompt is None else prompt
    return RequestView(
        request_id=request_id,
        prompt_key=prompt_key,
        token_ids=prompt + output,
        num_prompt_tokens=len(prompt),
        seed=0,
        sampling=SamplingParams(),
    )


def propose(drafter: SuffixDrafter, views: list[RequestView], length: int, width: tuple[int, ...] = (1,), version: int = 0) -> DraftTree:
    budget = Budget(draft_lengths=torch.full((len(views),), length), tree_width=width)
    return drafter.propose(DraftContext(requests=views, weights_version=version), budget)


def drafted(tree: DraftTree, request: int = 0) -> list[int]:
    tokens: list[int] = tree.token_ids[request, : int(tree.num_nodes[request])].tolist()
    return tokens


def run(drafter: SuffixDrafter, output: list[int], request_id: str = "a", prompt_key: str = "p") -> None:
    """A whole request: started, emitted, finished."""
    drafter.start(view([], request_id, prompt_key))
    drafter.finish(view(output, request_id, prompt_key))


def verdict(num_accepted: list[int], is_bonus: list[bool]) -> Verdict:
    none = torch.zeros(len(num_accepted), 1)
    return Verdict(
        path=none.long(),
        num_accepted=torch.tensor(num_accepted),
        next_token_ids=none[:, 0].long(),
        is_bonus=torch.tensor(is_bonus),
        accept_probs=none,
    )


def random_tokens(num: int, seed: int) -> list[int]:
    tokens: list[int] = torch.randint(0, 800, (num,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


@given(
    texts=st.lists(st.lists(st.integers(0, 2), max_size=25), min_size=1, max_size=4),
    min_match=st.integers(1, 3),
)
def test_takes_the_commonest_continuation_of_the_longest_known_suffix(texts: list[list[int]], min_match: int) -> None:
    drafter = SuffixDrafter(SuffixConfig(min_match_length=min_match, min_path_prob=1e-9))
    views = [view(text, request_id=str(index)) for index, text in enumerate(texts)]
    for request in views:
        drafter.start(request)
    token = drafted(propose(drafter, [views[0]], 1))
    context = views[0].token_ids
    full = [list(request.token_ids) for request in views]
    for length in range(len(context), min_match - 1, -1):
        followers = Counter(
            text[end] for text in full for end in range(length, len(text)) if text[end - length : end] == context[len(context) - length :]
        )
        # The shared prompt was read once; its own continuations count once a sample.
        if followers:
            assert followers[token[0]] == max(followers.values())
            return
    assert token == []


def test_a_sample_of_an_earlier_epoch_is_proposed_again() -> None:
    output = random_tokens(120, seed=1)
    drafter = SuffixDrafter()
    run(drafter, output, "epoch 0")
    drafter.start(view([], "epoch 1"))
    for position in range(0, 112, 7):
        assert drafted(propose(drafter, [view(output[:position], "epoch 1")], 8)) == output[position : position + 8]


def test_a_departure_from_history_finds_its_way_back() -> None:
    output = random_tokens(60, seed=2)
    drafter = SuffixDrafter()
    run(drafter, output, "epoch 0")
    drafter.start(view([], "epoch 1"))
    departed = [*output[:20], 850, 851]
    assert drafted(propose(drafter, [view(departed, "epoch 1")], 4)) == []
    assert drafted(propose(drafter, [view([*departed, *output[30:32]], "epoch 1")], 4)) == output[32:36]


def test_siblings_in_the_same_batch_see_each_other_and_other_prompts_do_not() -> None:
    output = random_tokens(12, seed=3)
    drafter = SuffixDrafter()
    views = [view(output[:6], "a"), view(output, "b"), view(output[:6], "c", prompt_key="other")]
    for request in (view([], "a"), view([], "b"), view([], "c", prompt_key="other")):
        drafter.start(request)
    tree = propose(drafter, views, 4)  # b's tokens are new in this very call and stand behind a in the batch
    assert drafted(tree, 0) == output[6:10]
    assert drafted(tree, 2) == []


def test_frequent_continuations_come_first_and_trees_branch_by_them() -> None:
    drafter = SuffixDrafter()
    for index, token in enumerate([10, 20, 10, 30, 10, 20]):
        run(drafter, [token, index], f"r{index}")  # distinct second tokens: no sample is a repetition of another
    drafter.start(view([], "now"))
    assert drafted(propose(drafter, [view([], "now")], 1)) == [10]
    tree = propose(drafter, [view([], "now")], 1, width=(2,))
    assert drafted(tree) == [10, 20]
    assert drafted(propose(drafter, [view([], "now")], 1, width=(5,))) == [10, 20, 30]


def test_nodes_are_taken_best_first() -> None:
    """Three samples a b c, one x y z: b (two in three) is taken before x, and y, the least likely, last."""
    drafter = SuffixDrafter()
    for index in range(3):
        run(drafter, [1, 2, 3, 700 + index], f"r{index}")
    run(drafter, [7, 8, 9], "r3")
    drafter.start(view([], "now"))
    tree = propose(drafter, [view([], "now")], 2, width=(2, 1))
    assert drafted(tree) == [1, 2, 7, 8]
    assert tree.parents.tolist() == [[-1, 0, -1, 2]]


def test_a_shorter_context_gets_only_what_the_longer_one_leaves() -> None:
    """After 1 2 came 3 4; after 2 alone mostly 6. The sure path's second token goes before the shorter context's branch."""
    drafter = SuffixDrafter(SuffixConfig(min_match_length=1, max_nodes=3))
    run(drafter, [1, 2, 3, 4, 5, 2, 6, 7, 5, 2, 6, 8, 5, 2, 6], "before")
    now = view([9, 1, 2], "now")
    drafter.start(now)
    tree = propose(drafter, [now], 2, width=(2, 1))
    assert drafted(tree) == [3, 4, 6]
    assert tree.parents.tolist() == [[-1, 0, -1]]


def test_the_most_nodes_are_bounded() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_nodes=5, min_path_prob=1e-9))
    for index in range(4):
        run(drafter, random_tokens(20, seed=10 + index), f"r{index}")
    drafter.start(view([], "now"))
    assert len(drafted(propose(drafter, [view([], "now")], 8, width=(4, 2, 1)))) == 5


def test_recent_weights_versions_are_preferred() -> None:
    drafter = SuffixDrafter(SuffixConfig(version_decay=0.5))
    for index in range(3):
        run(drafter, [10, index], f"old {index}")
    drafter.target_updated(1)
    run(drafter, [20, 1], "new 1")
    run(drafter, [20, 2], "new 2")
    drafter.start(view([], "now"))
    assert drafted(propose(drafter, [view([], "now")], 1, version=1)) == [20]  # 2 against 3 / 2


def test_weights_that_change_under_running_requests_age_what_they_emitted() -> None:
    drafter = SuffixDrafter(SuffixConfig(version_decay=0.5))
    for name in ("a", "b", "c", "d"):
        drafter.start(view([], name))
    old = [view([10, 1], "a"), view([10, 2], "b"), view([10, 3], "c"), view([], "d")]
    assert drafted(propose(drafter, old, 1), 3) == [10]
    for name in ("e", "f"):
        drafter.start(view([], name))
    late = [view([20, 4], "e"), view([20, 5], "f"), view([], "d")]
    assert drafted(propose(drafter, late, 1, version=1), 2) == [20]  # the context's version alone says that weights changed


def test_refused_drafts_get_shorter_and_accepted_ones_longer() -> None:
    output = random_tokens(300, seed=4)
    drafter = SuffixDrafter()
    run(drafter, output, "epoch 0")
    drafter.start(view([], "now"))
    lengths = []
    for step in range(60):
        request = view(output[: 4 * step], "now")
        tree = propose(drafter, [request], 8)
        lengths.append(len(drafted(tree)))
        refused = step < 40
        accepted = 0 if refused else lengths[-1]
        drafter.observe(DraftContext(requests=[request], weights_version=0), tree, verdict([accepted], [not refused]))
    assert lengths[0] == 8
    assert lengths[:41] == sorted(lengths[:41], reverse=True)
    assert lengths[40] in (1, 2)  # never so short that nothing more could be learnt
    assert lengths[40:] == sorted(lengths[40:])
    assert lengths[59] == 8


def test_new_requests_inherit_what_others_learnt() -> None:
    output = random_tokens(300, seed=5)
    drafter = SuffixDrafter()
    run(drafter, output, "epoch 0")
    for step in range(60):
        drafter.start(view([], f"r{step}"))
        request = view(output[: 4 * step], f"r{step}")
        tree = propose(drafter, [request], 8)
        drafter.observe(DraftContext(requests=[request], weights_version=0), tree, verdict([0], [False]))
    drafter.start(view([], "next"))
    assert 1 <= len(drafted(propose(drafter, [view([], "next")], 8))) <= 2


def test_an_undrafted_round_teaches_nothing() -> None:
    output = random_tokens(100, seed=6)
    drafter = SuffixDrafter()
    run(drafter, output, "epoch 0")
    drafter.start(view([], "now"))
    request = view([], "now")
    for _ in range(20):
        tree = propose(drafter, [request], 0)
        drafter.observe(DraftContext(requests=[request], weights_version=0), tree, verdict([0], [False]))
    assert len(drafted(propose(drafter, [request], 8))) == 8


def test_aborted_requests_leave_their_part_and_nothing_else() -> None:
    output = random_tokens(30, seed=7)
    drafter = SuffixDrafter()
    drafter.start(view([], "aborted"))
    propose(drafter, [view(output[:5], "aborted")], 4)
    drafter.finish(view(output[:10], "aborted"))
    drafter.finish(view(output[:10], "aborted"))
    drafter.finish(view([], "never started"))
    assert drafter._prompts == {}
    assert drafter._requests == {}
    assert [(sample.token_ids.tolist(), sample.count) for sample in drafter.history.samples("p")] == [(output[:10], 1)]
    drafter.start(view(output[:10], "aborted"))  # resumed
    drafter.finish(view(output, "aborted"))
    assert [(sample.token_ids.tolist(), sample.count) for sample in drafter.history.samples("p")] == [(output, 1)]


def test_a_request_aborted_before_its_first_token_leaves_no_trace() -> None:
    drafter = SuffixDrafter()
    run(drafter, [])
    assert drafter.history.prompt_keys() == []
    assert drafter._prompts == {}


def test_a_prompts_automaton_lives_while_one_of_its_samples_runs() -> None:
    drafter = SuffixDrafter()
    drafter.start(view([], "a"))
    drafter.start(view([], "b"))
    drafter.finish(view([1, 2, 3], "a"))
    assert drafted(propose(drafter, [view([], "b")], 3)) == [1, 2, 3]
    drafter.finish(view([4], "b"))
    assert drafter._prompts == {}


def test_one_key_with_two_prompts_keeps_them_apart() -> None:
    drafter = SuffixDrafter()
    drafter.start(view([1, 2, 3], "a"))
    other = view([], "b", prompt=[905, 906])
    drafter.start(other)
    assert drafted(propose(drafter, [other], 3)) == []
    longer = view([1, 2], "b", prompt=[905, 906])
    assert drafted(propose(drafter, [longer], 3)) == [3]  # what follows 1 2 is known all the same


def test_history_survives_in_a_file(tmp_path: Path) -> None:
    output = random_tokens(40, seed=8)
    first = SuffixDrafter()
    first.target_updated(30)
    run(first, output)
    first.save_history(tmp_path / "history.npz")
    second = SuffixDrafter()
    second.load_history(tmp_path / "history.npz")
    second.start(view([], "now"))
    assert drafted(propose(second, [view([], "now")], 8)) == output[:8]


def test_history_is_bounded() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_history_tokens=50))
    for index in range(9):
        run(drafter, random_tokens(20, seed=20 + index), f"r{index}", prompt_key=f"p{index}")
    assert drafter.history.num_tokens <= 50
    assert drafter.history.prompt_keys() == ["p7", "p8"]


def test_a_proposal_does_not_change_the_drafter() -> None:
    drafter = SuffixDrafter()
    for index in range(3):
        run(drafter, random_tokens(20, seed=30 + index), f"r{index}")
    drafter.start(view([], "now"))
    trees = [propose(drafter, [view([], "now")], 6, width=(3, 1)) for _ in range(3)]
    for tree in trees:
        assert torch.equal(tree.token_ids, trees[0].token_ids)
        assert torch.equal(tree.parents, trees[0].parents)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"min_match_length": 0},
        {"max_nodes": 0},
        {"min_path_prob": 0.0},
        {"version_decay": 1.5},
        {"trust_prior": 0.0},
        {"trust_decay": -1.0},
        {"shared_trust_decay": 0.0},
        {"trust_floor": 0.0},
        {"novelty": 0.0},
        {"trust_prior_tokens": 0.0},
        {"max_history_tokens": -1},
        {"max_history_tokens_per_prompt": -1},
    ],
)
def test_bad_settings_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        SuffixConfig(**kwargs)

"""vLLM's own proposer as a drafter: what is cut, what its drafts were drawn from, and when it runs. No vLLM is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext, HasWeights, RequestView
from rollout_spec.sampling import SamplingParams
from rollout_spec.tree import Draw
from rollout_spec_rl.vllm.native import Drafted, NativeDrafter, Turn

VOCAB = 6
IDS = ("a", "b", "c")


def refuse(named_tensors: Iterable[tuple[str, Tensor]]) -> Mapping[str, int]:
    raise ValueError("weights refused")


def drafter(**settings: Any) -> NativeDrafter:
    given = {"method": "eagle", "draft_length": 3, "vocab_size": VOCAB, "sampled": True, "keep_up": True, "reload": refuse} | settings
    model = SimpleNamespace(named_parameters=lambda: [("own", torch.ones(2)), ("packed", torch.ones(0)), ("embed", EMBED)])
    return NativeDrafter(SimpleNamespace(model=model), target=SimpleNamespace(parameters=lambda: [EMBED]), **given)


EMBED = torch.zeros(3)


class Host:
    """vLLM's proposer: row r drafts r, r + 1, ...; ``lengths`` it was run with."""

    def __init__(self, *, all_greedy: bool = False, vocab_size: int = VOCAB) -> None:
        self.lengths: list[int] = []
        self.all_greedy, self.vocab_size = all_greedy, vocab_size

    def run(self, length: int) -> Drafted:
        self.lengths.append(length)
        token_ids = torch.arange(len(IDS))[:, None] + torch.arange(length)
        probs = torch.full((*token_ids.shape, self.vocab_size), 0.1).scatter_(2, token_ids[:, :, None], 0.5)
        return Drafted(token_ids=token_ids.int(), draft_probs=None if self.all_greedy else probs)

    def turn(self, room: int = 99) -> Turn:
        return Turn(run=self.run, rows={name: row for row, name in enumerate(IDS)}, room=room)


def context(*temperatures: float) -> DraftContext:
    """Of requests in another order than the batch's."""
    names = IDS[::-1][: len(temperatures)]
    views = [
        RequestView(
            request_id=name,
            prompt_key="",
            token_ids=[1],
            num_prompt_tokens=1,
            seed=0,
            sampling=SamplingParams(temperature=temperature),
        )
        for name, temperature in zip(names, temperatures, strict=True)
    ]
    return DraftContext(requests=views, weights_version=0)


def budget(*lengths: int) -> Budget:
    return Budget(draft_lengths=torch.tensor(lengths))


def test_each_request_gets_as_much_as_was_decided_for_it() -> None:
    own, host = drafter(), Host()
    own.begin(host.turn())
    tree = own.propose(context(1.0, 1.0, 1.0), budget(2, 0, 1))
    assert host.lengths == [2]
    assert (tree.token_ids.tolist(), tree.num_nodes.tolist()) == ([[2, 3], [1, 2], [0, 1]], [2, 0, 1])
    assert tree.draw is Draw.SAMPLED
    assert tree.draft_probs is not None
    assert tree.draft_probs[0, 1].tolist() == pytest.approx([0.1, 0.1, 0.1, 0.5, 0.1, 0.1])
    own.end()
    assert host.lengths == [2], "it ran already"


def test_a_greedy_request_was_drafted_the_likeliest_token_for_certain() -> None:
    own, host = drafter(), Host()
    own.begin(host.turn())
    tree = own.propose(context(1.0, 0.0), budget(1, 1))
    assert tree.draft_probs is not None
    assert tree.draft_probs[1, 0].tolist() == [0, 1, 0, 0, 0, 0]
    assert tree.draft_probs[0, 0, 2] == 0.5
    own.begin(Host(all_greedy=True).turn())
    tree = own.propose(context(0.0, 0.0), budget(1, 1))
    assert tree.draft_probs is not None
    assert tree.draft_probs.argmax(2).tolist() == [[2], [1]]
    assert tree.draft_probs.sum() == 2


def test_drafts_that_are_no_draws_have_no_distribution() -> None:
    own = drafter(sampled=False)
    own.begin(Host().turn())
    tree = own.propose(context(1.0), budget(2))
    assert (tree.draw, tree.draft_probs, tree.token_ids.tolist()) == (Draw.DETERMINISTIC, None, [[2, 3]])


def test_with_nothing_to_draft_it_reads_the_step_once() -> None:
    own, host = drafter(), Host()
    assert own.needs.every_round
    own.begin(host.turn())
    assert own.propose(context(1.0, 1.0), budget(0, 0)).max_nodes == 0
    own.end()
    own.begin(host.turn())
    own.end()
    assert host.lengths == [0, 0]
    off = drafter(keep_up=False)
    assert not off.needs.every_round
    off.begin(host.turn())
    off.end()
    assert host.lengths == [0, 0]


def test_drafts_end_where_the_proposer_cannot_read_on() -> None:
    own, host = drafter(), Host()
    own.begin(host.turn(room=1))
    assert own.propose(context(1.0), budget(3)).num_nodes.tolist() == [1]
    own.begin(host.turn(room=-1))
    assert own.propose(context(1.0), budget(3)).max_nodes == 0
    own.end()
    assert host.lengths == [1]


def test_a_block_is_drafted_whole_or_not_at_all() -> None:
    own, host = drafter(method="dflash"), Host()
    own.begin(host.turn())
    assert own.propose(context(1.0), budget(1)).token_ids.tolist() == [[2]]
    own.begin(host.turn(room=2))
    assert own.propose(context(1.0), budget(1)).max_nodes == 0
    assert host.lengths == [3, 0]


def test_a_distribution_that_cannot_be_is_an_error() -> None:
    own = drafter()
    own.begin(Host(vocab_size=VOCAB + 1).turn())
    with pytest.raises(ValueError, match="has 7 tokens, the policy 6"):
        own.propose(context(1.0), budget(1))

    def broken(length: int) -> Drafted:
        return Drafted(token_ids=torch.zeros(3, length), draft_probs=torch.full((3, length, VOCAB), torch.nan))

    own.begin(Turn(run=broken, rows={"c": 2}, room=9))
    with pytest.raises(ValueError, match="probability 0 or NaN"):
        own.propose(context(1.0), budget(1))


def test_its_weights_are_its_own_and_the_targets_are_borrowed() -> None:
    own = drafter(reload=lambda tensors: {name: 1 for name, _ in tensors})
    assert isinstance(own, HasWeights)
    assert (list(own.named_weights()), list(own.borrowed_weights())) == (["own"], ["embed"])
    own.update_weights([("fc.weight", torch.ones(1))], 4)
    assert (own.weights_version, own.loaded) == (4, {"fc.weight": 1})
    refusing = drafter()
    with pytest.raises(ValueError, match="refused"):
        refusing.update_weights([], 5)
    assert refusing.weights_version == 0

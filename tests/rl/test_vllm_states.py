"""States reach the drafter whole and in order, also where vLLM took a prompt's beginning from its prefix cache. No vLLM is needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_spec_rl.vllm.states import NewStates, StateLedger

BLOCK = 4
PROMPT = list(range(100, 110))


def states_of(tokens: Sequence[int], first: int, end: int) -> dict[int, Tensor]:
    """States that tell what they belong to: position and token."""
    return {5: torch.tensor([[float(position), float(tokens[position])] for position in range(first, end)]).reshape(-1, 2)}


def new(request_id: str, tokens: Sequence[int], first: int, end: int, num_prompt: int = len(PROMPT)) -> NewStates:
    return NewStates(
        request_id=request_id, token_ids=tokens, num_prompt_tokens=num_prompt, first=first, states=states_of(tokens, first, end)
    )


def ledger(max_tokens: int = 64) -> StateLedger:
    return StateLedger((5,), block_size=BLOCK, max_tokens=max_tokens)


def check(held: StateLedger, request_id: str, tokens: Sequence[int], first: int, end: int) -> None:
    taken = held.take([request_id])
    assert taken is not None
    assert taken.positions.tolist() == list(range(first, end))
    assert torch.equal(taken.hidden[5], states_of(tokens, first, end)[5])


def test_chunks_of_a_prompt_and_rounds_come_in_order() -> None:
    held, tokens = ledger(), [*PROMPT, 1, 2, 3]
    held.add([new("a", tokens, 0, 6)])
    held.add([new("a", tokens, 6, 10)])
    check(held, "a", tokens, 0, 10)
    held.add([new("a", tokens, 10, 12)])
    check(held, "a", tokens, 10, 12)


def test_a_cached_prefix_comes_from_the_request_that_computed_it_even_in_the_same_step() -> None:
    held, one, other = ledger(), [*PROMPT, 1], [*PROMPT, 2]
    held.add([new("b", other, 8, 10), new("a", one, 0, 10)])
    assert not held.is_blind("b")
    check(held, "b", other, 0, 10)


def test_a_prefix_that_nobody_remembers_makes_a_request_blind_until_it_begins_anew() -> None:
    held, tokens = ledger(), [*PROMPT, 1, 2]
    held.add([new("a", tokens, 8, 10)])
    assert held.is_blind("a")
    held.add([new("a", tokens, 10, 11)])
    assert held.is_blind("a")
    held.add([new("a", tokens, 0, 11)])
    assert not held.is_blind("a")
    check(held, "a", tokens, 0, 11)


def test_another_prompt_of_the_same_length_is_not_taken_for_it() -> None:
    held = ledger()
    held.add([new("a", PROMPT, 0, 10)])
    other = [*PROMPT[:6], 7, 7, *PROMPT[8:]]
    held.add([new("b", other, 8, 10)])
    assert held.is_blind("b")
    held.add([new("c", other, 4, 10)])  # the first block is the same
    check(held, "c", other, 0, 10)


def test_old_prompts_make_room() -> None:
    held = ledger(max_tokens=20)
    prompts = [[base, *PROMPT[1:]] for base in (1, 2, 3)]
    for index, prompt in enumerate(prompts):
        held.add([new(f"first-{index}", prompt, 0, 10)])
    for index, prompt in enumerate(prompts):
        held.add([new(f"second-{index}", prompt, 8, 10)])
    assert [held.is_blind(f"second-{index}") for index in range(3)] == [True, False, False]


def test_a_preempted_request_gets_its_states_again() -> None:
    held, tokens = ledger(), [*PROMPT, 1, 2, 3]
    held.add([new("a", tokens, 0, 12)])
    check(held, "a", tokens, 0, 12)
    held.add([new("a", tokens, 8, 13)])  # resumed behind two cached blocks
    check(held, "a", tokens, 0, 13)


def test_new_weights_void_every_state() -> None:
    held, tokens = ledger(), [*PROMPT, 1, 2]
    held.add([new("a", tokens, 0, 11)])
    held.clear()
    held.add([new("a", tokens, 11, 12), new("b", tokens, 8, 11)])
    assert held.is_blind("a")
    assert held.is_blind("b")


def test_without_layers_nobody_is_blind() -> None:
    held = StateLedger((), block_size=BLOCK, max_tokens=64)
    assert not held.is_blind("a")
    assert held.take(["a"]) is None

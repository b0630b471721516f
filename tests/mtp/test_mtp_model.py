"""The training forward: what each slot sees, predicts and may not see."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from mtp_tiny import VOCAB, random_head, random_rollout, tiny_policy

from rollout_spec_mtp.mtp.config import MTPConfig
from rollout_spec_mtp.mtp.model import MTPModel
from rollout_spec_mtp.training.packing import pack, supervision_lines
from rollout_spec_mtp.training.protocol import PackedBatch, PolicyParts


def _slots(batch: PackedBatch, model: MTPModel) -> list[tuple[int, int, int]]:
    """(anchor, depth, row of the token) of every valid slot of one packed row."""
    layout = model.layout(batch, 0)
    rows = zip(layout.anchors.tolist(), layout.token_rows.tolist(), layout.valid.tolist(), strict=True)
    return [(anchor, d, token) for anchor, tokens, valid in rows for d, (token, ok) in enumerate(zip(tokens, valid, strict=True), 1) if ok]


def test_two_token_answer_supervises_exactly_its_two_tokens() -> None:
    model = random_head(tiny_policy())
    batch = pack([[random_rollout("a", [1, 4, 6, 8, 10, 12], num_prompt=4)]])
    # The first draft of a response starts from the state before the prompt's last token: states 0..2 are known, token 3 is newest.
    assert _slots(batch, model) == [(2, 1, 4), (2, 2, 5), (3, 1, 5)]
    layout = model.layout(batch, 0)
    assert layout.target_rows[layout.valid].tolist() == [3, 4, 4]
    lines = list(supervision_lines(batch, layout, str))
    assert [line.split()[-1] for line in lines[:4]] == ["-"] * 4
    assert lines[4].endswith("1<-2")
    assert lines[5].endswith("2<-2 1<-3")


def test_one_token_prompt_has_no_state_to_draft_its_answer_from() -> None:
    batch = pack([[random_rollout("a", [1, 4, 6], num_prompt=1)]])
    assert _slots(batch, random_head(tiny_policy())) == [(0, 1, 2)]


def test_batch_without_a_response_has_no_slot_and_a_finite_zero_gradient() -> None:
    model = random_head(tiny_policy())
    batch = pack([[random_rollout("a", [1, 4, 6], num_prompt=3)]])
    layout = model.layout(batch, 0)
    states = model(batch, layout)
    assert states.shape == (0, 3, 32)
    states.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("window", [None, 5])
def test_packing_does_not_leak_and_does_not_change_a_sequence(kind: str, window: int | None) -> None:
    if window is not None and kind == "llama":
        pytest.skip("Llama has no sliding window")
    changes: dict[str, object] = {"sliding_window": window} if window is not None or kind == "mistral" else {}
    if window is not None and kind != "mistral":
        changes |= {"use_sliding_window": True, "max_window_layers": 0}
    model = random_head(tiny_policy(kind, **changes), layers=(1, -1))
    assert model.window == (window or 0)
    first = random_rollout("a", [1, 4, 6, 8, 10, 12, 14], num_prompt=2, layers=(1, -1), seed=1)
    second = random_rollout("b", [3, 5, 7, 9, 11, 13, 15, 17], num_prompt=3, layers=(1, -1), seed=2)
    alone = pack([[second]])
    expected = model(alone, model.layout(alone, 0))
    packed = pack([[first, second], [second]])
    layout = model.layout(packed, 0)
    states = model(packed, layout)
    row_length = packed.token_ids.shape[1]
    of_second = (layout.anchors >= first.token_ids.numel()) & (layout.anchors < row_length)
    torch.testing.assert_close(states[of_second], expected)

    neighbour = dataclasses.replace(
        first, token_ids=torch.where(torch.arange(7) < 7, (first.token_ids + 9) % VOCAB, 0), hidden={k: -v for k, v in first.hidden.items()}
    )
    perturbed = pack([[neighbour, second], [second]])
    again = model(perturbed, model.layout(perturbed, 0))
    torch.testing.assert_close(again[of_second], states[of_second], rtol=0, atol=0)
    assert not torch.equal(again[~of_second], states[~of_second]), "the perturbation reached nothing at all"


def test_slots_see_nothing_of_later_states_or_of_the_token_they_predict() -> None:
    model = random_head(tiny_policy())
    rollout = random_rollout("a", [1, 4, 6, 8, 10, 12, 14, 16, 18, 20], num_prompt=3)
    batch = pack([[rollout]])
    layout = model.layout(batch, 0)
    states = model(batch, layout)
    place = layout.anchors.tolist().index(3)
    # Slot k of anchor t reads states up to t and tokens up to t + k.
    later_states = dataclasses.replace(rollout, hidden={-1: torch.where(torch.arange(9)[:, None] > 3, 7.0, rollout.hidden[-1])})
    changed = model(pack([[later_states]]), layout)
    torch.testing.assert_close(changed[place], states[place], rtol=0, atol=0)
    for depth in range(3):
        tokens = rollout.token_ids.clone()
        tokens[3 + depth + 2 :] = 50  # the token this slot predicts, and all after it
        changed = model(pack([[dataclasses.replace(rollout, token_ids=tokens)]]), layout)
        torch.testing.assert_close(changed[place, depth], states[place, depth], rtol=0, atol=0)
        tokens[3 + depth + 1] = 50  # the newest token it is given
        changed = model(pack([[dataclasses.replace(rollout, token_ids=tokens)]]), layout)
        assert not torch.allclose(changed[place, depth], states[place, depth])


def test_parameters_hold_nothing_of_the_policy() -> None:
    policy = tiny_policy()
    model = random_head(policy)
    borrowed = {id(p) for p in policy.parameters()}
    assert not any(id(p) in borrowed for p in model.parameters())
    assert {name.split(".")[0] for name in model.state_dict()} == {"embed_norm", "hidden_norm", "norm", "fc", "layer"}


@pytest.mark.parametrize("layers", [(3,), (-2,), (), (1, 1)])
def test_hidden_layers_that_are_not_there_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="hidden_layers"):
        MTPModel(MTPConfig(hidden_layers=layers), PolicyParts.of(tiny_policy()), None)

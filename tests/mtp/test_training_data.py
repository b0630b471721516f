"""Rollouts with states: what is collected, kept, split, ordered and packed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from mtp_tiny import collect, prompts, random_rollout, tiny_policy

from rollout_spec.engine.load import make_runner
from rollout_spec_mtp.configs import build
from rollout_spec_mtp.training.batches import Batches, split_held_out
from rollout_spec_mtp.training.collect import CollectConfig, Collector
from rollout_spec_mtp.training.packing import pack
from rollout_spec_mtp.training.protocol import PADDING, PolicyParts
from rollout_spec_mtp.training.shards import RolloutSet, ShardWriter, first_fit
from rollout_spec_mtp.training.vocabulary import draft_vocabulary, expected_counts


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_states_and_laws_are_those_of_a_forward_over_the_whole_text(tmp_path: Path, temperature: float) -> None:
    policy = tiny_policy()
    rollouts = collect(policy, tmp_path, layers=(0, -1), temperature=temperature)
    ended = 0
    for rollout in rollouts:
        with torch.no_grad():
            out = policy(rollout.token_ids[None], output_hidden_states=True)
        states = rollout.token_ids.numel() - 1
        torch.testing.assert_close(rollout.hidden[-1], out.hidden_states[-1][0, :states], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rollout.hidden[0], out.hidden_states[1][0, :states], rtol=1e-4, atol=1e-4)
        law = (out.logits[0] / temperature).log_softmax(-1)
        first = rollout.num_prompt_tokens - 1
        torch.testing.assert_close(
            rollout.target_lse[first:], (out.logits[0] / temperature).logsumexp(-1)[first:states], rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(rollout.target_entropies[first:], -(law.exp() * law).sum(-1)[first:states], rtol=1e-4, atol=1e-4)
        response = rollout.token_ids[rollout.num_prompt_tokens :].tolist()
        assert 1 <= len(response) <= 24
        assert 2 not in response[:-1], "nothing comes after the end of a sequence"
        assert response[-1] == 2 or len(response) == 24
        ended += response[-1] == 2
    assert 0 < ended < len(rollouts), "both kinds of ending should occur"


def test_collecting_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    whole = collect(policy, tmp_path / "whole")
    monkeypatch.setattr("rollout_spec_mtp.training.collect._SHARD_TOKENS", 60)

    class KilledError(Exception):
        pass

    def stop(sequences: int, tokens: int) -> None:
        if sequences == 9:
            raise KilledError

    config = build(CollectConfig, {"prompts": "tiny", "max_new_tokens": 24, "max_batch": 4, "storage": "float32"}, "collect")
    parts = {
        "policy": PolicyParts.of(policy),
        "prompts": prompts(24),
        "hidden_layers": (-1,),
        "folder": tmp_path / "parts",
        "model": "tiny",
    }
    with pytest.raises(KilledError):
        Collector(config, runner=make_runner(policy, max_context=64), **parts).run(stop)  # type: ignore[arg-type]
    kept = len(RolloutSet(tmp_path / "parts"))
    assert 0 < kept < 9
    again = Collector(config, runner=make_runner(policy, max_context=64), **parts)  # type: ignore[arg-type]
    seen: list[int] = []
    again.run(lambda sequences, tokens: seen.append(sequences))
    assert seen[0] == kept + 1, "sequences that were there were sampled again"
    resumed = RolloutSet(tmp_path / "parts")
    assert resumed.complete
    assert [r.key for r in resumed] == [r.key for r in whole]
    for one, other in zip(resumed, whole, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        torch.testing.assert_close(one.hidden[-1], other.hidden[-1], rtol=1e-4, atol=1e-4)
    assert again.run(lambda sequences, tokens: None) == 0


def test_budget_of_tokens_ends_the_collection(tmp_path: Path) -> None:
    rollouts = collect(tiny_policy(), tmp_path, max_tokens=100)
    total = sum(rollout.num_response_tokens for rollout in rollouts)
    assert 100 <= total < 100 + 24
    assert rollouts.complete


def test_other_settings_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    collect(tiny_policy(), tmp_path, count=4)
    with pytest.raises(ValueError, match=r"other settings \(temperature: 1.0 then, 0.7 now\)"):
        collect(tiny_policy(), tmp_path, count=4, temperature=0.7)


def test_prompts_that_leave_no_room_are_left_out_and_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of the 4 prompts fits"):
        collect(tiny_policy(), tmp_path, count=4, max_new_tokens=254)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temperature", 0.0, "greedy policy"),
        ("num_samples", 0, "num_samples"),
        ("storage", "int8", "storage"),
        ("max_tokens", "many", "type int"),
        ("speed", 1, "unknown keys speed"),
    ],
)
def test_collect_settings_are_checked(key: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(CollectConfig, {"prompts": "tiny", key: value}, "collect")


def test_all_samples_of_a_prompt_are_on_one_side(tmp_path: Path) -> None:
    rollouts = collect(tiny_policy(), tmp_path, count=24, num_samples=2, max_new_tokens=4)
    training, held_out = split_held_out(rollouts, 0.3)
    sides = [{rollouts.key(number).rpartition("/")[0] for number in side} for side in (training, held_out)]
    assert not sides[0] & sides[1]
    assert sorted(training + held_out) == list(range(48))


def test_every_epoch_has_every_row_once_in_its_own_order(tmp_path: Path) -> None:
    rollouts = collect(tiny_policy(), tmp_path, count=24)
    batches = Batches(rollouts, range(24), row_tokens=64, seed=3)
    count = len(batches.rows)
    assert sorted(number for row in batches.rows for number in row) == list(range(24))
    seen = [row for step in range(count) for row in batches.rows_of_step(step, 2)]  # two epochs; a step may straddle them
    assert sorted(seen[:count]) == sorted(seen[count:]) == list(range(count))
    assert seen[:count] != seen[count:]
    assert [Batches(rollouts, range(24), row_tokens=64, seed=3).rows_of_step(s, 2) for s in range(4)] == [
        batches.rows_of_step(s, 2) for s in range(4)
    ]
    assert Batches(rollouts, range(24), row_tokens=64, seed=4).rows_of_step(0, count) != batches.rows_of_step(0, count)


@pytest.mark.parametrize("lengths", [[5, 9, 3, 30, 7, 7, 1], [64, 64], [70, 2, 80]])
def test_first_fit_keeps_whole_sequences_within_the_row(lengths: list[int]) -> None:
    rows = first_fit(lengths, range(len(lengths)), 64)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[n] for n in row) <= 64 or len(row) == 1 for row in rows)
    assert first_fit([30, 40, 20, 10], range(4), 64) == [[0, 2, 3], [1]] or first_fit([30, 40, 20, 10], range(4), 64) == [[0, 3], [1, 2]]


def test_padding_is_marked_and_states_lie_beside_their_tokens() -> None:
    first, second = random_rollout("a", [1, 4, 6], 1, seed=1), random_rollout("b", [3, 5, 7, 9], 2, seed=2)
    batch = pack([[first, second], [second]])
    assert batch.sequence_ids[1].tolist() == [0] * 4 + [PADDING] * 3
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert batch.is_response[0].tolist() == [False, True, True, False, False, True, True]
    torch.testing.assert_close(batch.hidden[-1][0, 3:6], second.hidden[-1])
    assert not batch.hidden[-1][0, 6].any(), "the last token of a sequence has no state"
    torch.testing.assert_close(batch.target_lse[1, :3], second.target_lse)


def test_draft_vocabulary_is_the_likeliest_tokens() -> None:
    assert draft_vocabulary(torch.tensor([5, 1, 5, 9, 0]), 3).tolist() == [0, 2, 3]
    assert draft_vocabulary(torch.tensor([1, 1, 1]), 2).tolist() == [0, 1]
    with pytest.raises(ValueError, match="between 1 and the policy's 5"):
        draft_vocabulary(torch.zeros(5), 6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_expected_counts_are_the_sums_of_the_laws_sampled_from(tmp_path: Path, temperature: float) -> None:
    policy = tiny_policy()
    rollouts = collect(policy, tmp_path, count=6, temperature=temperature)
    laws = []
    for rollout in (rollouts[0], rollouts[3]):
        with torch.no_grad():
            logits = policy(rollout.token_ids[None]).logits[0, rollout.num_prompt_tokens - 1 : -1]
        laws.append((logits / temperature).softmax(-1))
    head = policy.get_output_embeddings().weight.detach()
    counts = expected_counts(rollouts, [0, 3], head, temperature)
    torch.testing.assert_close(counts.float(), torch.cat(laws).sum(0), rtol=1e-4, atol=1e-4)
    # Of fewer positions: every third of both sequences together.
    fewer = expected_counts(rollouts, [0, 3], head, temperature, max_positions=-(-len(torch.cat(laws)) // 3))
    torch.testing.assert_close(fewer.float(), torch.cat(laws)[::3].sum(0), rtol=1e-4, atol=1e-4)


def test_a_half_written_shard_is_not_in_the_index(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, {"a": 1})
    writer.write([random_rollout("p/0", [1, 4, 6], 1)])
    (tmp_path / "shard-00001.safetensors.part").write_bytes(b"torn")
    assert [rollout.key for rollout in RolloutSet(tmp_path)] == ["p/0"]
    assert ShardWriter(tmp_path, {"a": 1}).keys == {"p/0"}
    with pytest.raises(ValueError, match="holds no rollouts"):
        RolloutSet(tmp_path / "nowhere")
    assert math.isfinite(float(RolloutSet(tmp_path)[0].target_lse.sum()))

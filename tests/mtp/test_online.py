"""A drafter that is refreshed while it serves: what is recorded, what training changes and what it must not, what survives a kill."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from mtp_tiny import VOCAB, ListSink, random_head, tiny_policy
from torch import nn

from rollout_spec.budget import FixedBudget
from rollout_spec.drafter import HasWeights
from rollout_spec.drafters.ngram import NGramDrafter
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import make_runner
from rollout_spec.engine.ops import TorchOps
from rollout_spec.engine.request import Request
from rollout_spec.engine.weights import checksums
from rollout_spec.events import WeightSyncEvent
from rollout_spec.sampling import SamplingParams
from rollout_spec_mtp.mtp.drafter import MTPDrafter
from rollout_spec_mtp.mtp.model import MTPModel
from rollout_spec_mtp.online.recorder import Recorded, RolloutBuffer, StateRecorder
from rollout_spec_mtp.online.store import DrafterStore
from rollout_spec_mtp.online.trainer import MIN_SEQUENCES, OnlineTrainer, RefreshSettings
from rollout_spec_mtp.training.protocol import PolicyParts


def requests(count: int, *, temperature: float = 1.0, length: int = 20) -> list[Request]:
    return [
        Request(
            prompt_token_ids=(1, 3 + number % 40, 5 + number % 7),
            max_new_tokens=length,
            sampling=SamplingParams(temperature=temperature),
            seed=number,
            ignore_eos=True,
            request_id=f"r{number}",
        )
        for number in range(count)
    ]


class Served:
    """A tiny policy with a recorded MTP head in the engine."""

    def __init__(self, *, layers: tuple[int, ...] = (1, -1), buffer_tokens: int = 10_000) -> None:
        self.policy = tiny_policy()
        self.model: MTPModel = random_head(self.policy, layers=layers)
        self.parts = PolicyParts.of(self.policy)
        self.buffer = RolloutBuffer(buffer_tokens)
        self.sink = ListSink()
        drafter = MTPDrafter(self.model, self.parts, TorchOps())
        self.recorder = StateRecorder(drafter, self.buffer, temperature=1.0, storage=torch.float32)
        self.engine = Engine(
            make_runner(self.policy, max_context=64),
            config=EngineConfig(max_batch=4, max_context=64, max_tree_nodes=8),
            drafter=self.recorder,
            controller=FixedBudget(draft_length=3),
            sink=self.sink,
        )

    def jump(self, version: int, scale: float = 0.3) -> None:
        generator = torch.Generator().manual_seed(version)
        named = {
            name: tensor + scale * tensor.std() * torch.randn(tensor.shape, generator=generator)
            for name, tensor in self.policy.named_parameters()
        }
        self.engine.update_weights([(name, tensor.detach()) for name, tensor in named.items()], version)


def states_of(policy: nn.Module, tokens: Sequence[int], layers: Sequence[int]) -> dict[int, torch.Tensor]:
    with torch.no_grad():
        out = policy.model(torch.tensor([list(tokens)]), output_hidden_states=True)  # type: ignore[operator]
    return {layer: out.last_hidden_state[0] if layer == -1 else out.hidden_states[layer + 1][0] for layer in layers}


@pytest.mark.parametrize("layers", [(1,), (1, -1)], ids=["without the last state", "with it"])
def test_what_is_recorded_are_the_policys_states_of_what_was_emitted(layers: tuple[int, ...]) -> None:
    served = Served(layers=layers)
    done = {(*out.prompt_token_ids, *out.token_ids) for out in served.engine.generate(requests(6))}
    held = served.buffer.snapshot()
    assert len(held) == 6
    for sequence in held:
        tokens = sequence.token_ids.tolist()
        assert sum(whole[: len(tokens)] == tuple(tokens) for whole in done) == 1
        assert len(tokens) >= 23 - 4, "only the last round's tokens are left off"
        assert sequence.num_prompt_tokens == 3
        assert set(sequence.hidden) == {-1, *layers}
        for layer, wanted in states_of(served.policy, tokens[:-1], tuple(sequence.hidden)).items():
            torch.testing.assert_close(sequence.hidden[layer], wanted, atol=2e-4, rtol=2e-4)


def test_a_running_sequence_starts_over_with_new_weights() -> None:
    served = Served()
    for request in requests(3, length=40):
        served.engine.add(request)
    for _ in range(4):
        served.engine.step()
    served.engine.abort("r0")
    served.jump(1)
    while served.engine.has_work:
        served.engine.step()
    held = served.buffer.snapshot()
    assert len(held) == 2, "what was aborted before its states came again leaves nothing"
    for sequence in held:
        for layer, wanted in states_of(served.policy, sequence.token_ids[:-1].tolist(), (1, -1)).items():
            torch.testing.assert_close(sequence.hidden[layer], wanted, atol=2e-4, rtol=2e-4)
    served.jump(2)
    assert served.buffer.num_tokens == 0


def test_validation_at_another_temperature_is_not_recorded() -> None:
    served = Served()
    served.engine.generate(requests(2, temperature=0.0))
    assert served.buffer.snapshot() == []


def test_recording_changes_no_draft() -> None:
    served = Served(layers=(1,))
    plain = Engine(
        make_runner(served.policy, max_context=64),
        config=EngineConfig(max_batch=4, max_context=64, max_tree_nodes=8),
        drafter=MTPDrafter(served.model, served.parts, TorchOps()),
        controller=FixedBudget(draft_length=3),
    )
    recorded, wanted = served.engine.generate(requests(5)), plain.generate(requests(5))
    assert [(out.token_ids, out.accepted_depths) for out in recorded] == [(out.token_ids, out.accepted_depths) for out in wanted]


def test_the_buffer_is_bounded_and_keeps_the_newest() -> None:
    buffer = RolloutBuffer(30)
    for number, length in enumerate((12, 12, 31, 12)):
        buffer.add(Recorded(token_ids=torch.full((length,), number), num_prompt_tokens=1, hidden={}))
    assert [int(sequence.token_ids[0]) for sequence in buffer.snapshot()] == [1, 3]
    assert buffer.num_tokens == 24
    with pytest.raises(ValueError, match="1 token or more"):
        RolloutBuffer(0)


def test_a_drafter_without_weights_cannot_be_refreshed() -> None:
    with pytest.raises(ValueError, match="ngram has no weights of its own"):
        StateRecorder(NGramDrafter(), RolloutBuffer(10), temperature=1.0)


def test_a_refresh_serves_longer_drafts_and_leaves_the_policy_alone() -> None:
    served = Served()
    served.jump(1)
    served.engine.generate(requests(64, length=24))
    trainer = OnlineTrainer(served.model, served.parts, RefreshSettings(max_steps=40, lr=5e-3, row_tokens=128, max_seconds=600))
    policy = checksums(dict(served.policy.named_parameters()))
    own = checksums(served.recorder.named_weights())
    refreshed = trainer.train(served.buffer.snapshot(), version=1)
    assert refreshed is not None
    assert refreshed.improved
    assert refreshed.length_after > 1.15 * refreshed.length_before
    assert checksums(served.recorder.named_weights()) == own, "nothing is served before it is published"
    assert all(parameter.grad is None for parameter in served.policy.parameters())

    before = served.engine.generate(requests(32))
    report = served.engine.update_drafter(refreshed.tensors.items(), 1)
    after = served.engine.generate(requests(32))
    assert served.recorder.weights_version == 1
    assert dict(report.tensor_checksums) == checksums(dict(trainer.model.named_parameters())) != own
    assert checksums(dict(served.policy.named_parameters())) == policy
    rates = [sum(out.num_accepted_tokens for out in some) / sum(out.num_draft_tokens for out in some) for some in (before, after)]
    assert rates[1] > 1.1 * rates[0], rates
    event = refreshed.event()
    assert event.step == 1
    assert event.metrics["improved"] == 1.0
    assert event.metrics["num_steps"] == refreshed.num_steps <= 40
    (sync,) = [event for event in served.sink.events if isinstance(event, WeightSyncEvent) and event.role == "drafter"]
    assert (sync.version, sync.checksum, sync.num_tensors) == (1, report.checksum, len(own))


def test_a_refresh_that_makes_it_worse_is_thrown_away() -> None:
    served = Served()
    served.engine.generate(requests(40))
    trainer = OnlineTrainer(served.model, served.parts, RefreshSettings(max_steps=8, lr=10.0, row_tokens=128))
    refreshed = trainer.train(served.buffer.snapshot(), version=0)
    assert refreshed is not None
    assert not refreshed.improved
    assert checksums(refreshed.tensors) == checksums(served.recorder.named_weights())


def test_bounds_of_a_refresh() -> None:
    served = Served()
    served.engine.generate(requests(MIN_SEQUENCES))
    held = served.buffer.snapshot()
    few = OnlineTrainer(served.model, served.parts, RefreshSettings(max_steps=1000, row_tokens=70))
    assert few.train(held[:-1], version=0) is None
    refreshed = few.train(held, version=0)
    assert refreshed is not None
    assert refreshed.num_steps == 4 * 3, "four epochs over 7 sequences of 20 to 23 tokens in rows of 70"
    hasty = OnlineTrainer(served.model, served.parts, RefreshSettings(max_seconds=1e-6))
    refreshed = hasty.train(held, version=0)
    assert refreshed is not None
    assert refreshed.num_steps == 1


def test_a_loss_that_is_no_number_is_an_error() -> None:
    served = Served()
    served.engine.generate(requests(MIN_SEQUENCES))
    trainer = OnlineTrainer(served.model, served.parts, RefreshSettings())
    with torch.no_grad():
        trainer.model.fc.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="the loss is nan at step 0"):
        trainer.train(served.buffer.snapshot(), version=3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 0.0}, "temperature 0.0: a greedy"),
        ({"max_steps": 0}, "max_steps"),
        ({"max_seconds": 0.0}, "max_seconds"),
        ({"lr": float("nan")}, "lr"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RefreshSettings(**changes)  # type: ignore[arg-type]


def test_the_newest_drafter_comes_back_after_a_kill(tmp_path: Path) -> None:
    policy = tiny_policy()
    parts, origin = PolicyParts.of(policy), random_head(policy)
    store, model = DrafterStore(tmp_path / "kept", origin), copy.copy(origin)
    assert store.newest() is None
    assert store.resume(random_head(policy), parts) is None
    model = random_head(policy)
    for version in (1, 2, 10):
        with torch.no_grad():
            model.fc.weight.add_(0.1)
        store.save(model, parts, version)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["version-00000002", "version-00000010"]
    # Killed while the next one was written: it has no name yet.
    (tmp_path / "kept" / ".version-00000011-abc").mkdir()
    fresh = random_head(policy)
    assert DrafterStore(tmp_path / "kept", fresh).resume(fresh, parts) == 10
    assert checksums(dict(fresh.named_parameters())) == checksums(dict(model.named_parameters()))
    other = random_head(policy)
    with torch.no_grad():
        other.fc.weight.mul_(2)
    with pytest.raises(ValueError, match="refreshed from another drafter"):
        DrafterStore(tmp_path / "kept", other).newest()


def test_the_recorder_shows_the_weights_it_wraps() -> None:
    served = Served()
    assert isinstance(served.recorder, HasWeights)
    assert checksums(served.recorder.named_weights()) == checksums(dict(served.model.named_parameters()))
    assert served.recorder.borrowed_weights()["head"].shape[0] == len(range(0, VOCAB, 2))

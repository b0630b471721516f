"""Weights of the policy and of a drafter: an update of one leaves the other's, borrowed parts follow or stay as they were asked to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from mtp_tiny import ListSink, random_head, tiny_policy
from torch import nn

from rollout_spec.budget import Budget, FixedBudget
from rollout_spec.drafter import DraftContext
from rollout_spec.drafters.ngram import NGramDrafter
from rollout_spec.engine.async_engine import AsyncEngine
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import make_runner
from rollout_spec.engine.ops import TorchOps
from rollout_spec.engine.request import Request
from rollout_spec.engine.weights import checksums
from rollout_spec.events import TrainEvent, WeightSyncEvent
from rollout_spec.tree import DraftTree
from rollout_spec_mtp.checkpoint import save_drafter
from rollout_spec_mtp.mtp.drafter import MTPDrafter
from rollout_spec_mtp.serving import load_drafter
from rollout_spec_mtp.training.protocol import PolicyParts

REQUESTS = [Request(prompt_token_ids=(1, 3 + i, 7), max_new_tokens=16, seed=i, ignore_eos=True, request_id=f"r{i}") for i in range(6)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = tiny_policy()
    folder = tmp_path_factory.mktemp("drafter") / "mtp"
    save_drafter(folder, random_head(policy), PolicyParts.of(policy))
    return folder


def served(policy: nn.Module, directory: Path, *, follow_head: bool) -> tuple[Engine, ListSink]:
    ops, sink = TorchOps(), ListSink()
    drafter = load_drafter(directory, policy, ops, follow_head=follow_head)
    config = EngineConfig(max_batch=4, max_context=48, max_tree_nodes=8)
    runner = make_runner(policy, max_context=48, ops=ops)
    return Engine(runner, config=config, drafter=drafter, controller=FixedBudget(draft_length=3), sink=sink), sink


def new_weights(policy: nn.Module) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(name, w.detach() + 0.5 * w.std() * torch.randn(w.shape, generator=generator)) for name, w in policy.named_parameters()]


def first_drafts(engine: Engine) -> torch.Tensor:
    """[B, 3] tokens of the first round's drafts."""
    drafter = engine.drafter
    assert drafter is not None
    trees: list[DraftTree] = []
    propose = drafter.propose

    def spy(context: DraftContext, budget: Budget) -> DraftTree:
        trees.append(propose(context, budget))
        return trees[-1]

    drafter.propose = spy  # type: ignore[method-assign]
    engine.generate(REQUESTS)
    return trees[0].token_ids


@pytest.mark.parametrize("follow_head", [True, False], ids=["follow_head", "frozen"])
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_a_target_sync_leaves_a_drafters_own_weights(directory: Path, follow_head: bool, tied: bool) -> None:
    policy = tiny_policy(tie_word_embeddings=tied)
    engine, sink = served(policy, directory, follow_head=follow_head)
    own, borrowed = checksums(engine.drafter.named_weights()), checksums(engine.drafter.borrowed_weights())  # type: ignore[union-attr]
    report = engine.update_weights(new_weights(policy), 5)
    assert checksums(engine.drafter.named_weights()) == own  # type: ignore[union-attr]
    now = checksums(engine.drafter.borrowed_weights())  # type: ignore[union-attr]
    assert all((now[name] != borrowed[name]) == follow_head for name in ("head", "embedding"))
    if follow_head:
        assert now["embedding"] == report.tensor_checksums["model.embed_tokens.weight"]
    syncs = [event for event in sink.events if isinstance(event, WeightSyncEvent)]
    assert [(event.role, event.version) for event in syncs] == [("target", 5), ("drafter_head", 5)]


def test_followed_parts_are_drafted_with_and_kept_ones_are_not(directory: Path) -> None:
    """What counts is what drafts are made of, packed forms included: as a drafter loaded after the sync makes them, or not."""
    policies = [tiny_policy() for _ in range(3)]
    weights = new_weights(policies[0])
    engines = [served(policy, directory, follow_head=follow)[0] for policy, follow in zip(policies[:2], (True, False), strict=True)]
    for engine in engines:
        engine.update_weights(weights, 1)
    policies[2].load_state_dict(dict(weights))
    loaded_late, _ = served(policies[2], directory, follow_head=True)
    following, kept, wanted = (first_drafts(engine) for engine in (*engines, loaded_late))
    assert wanted.shape == (4, 3)
    assert torch.equal(following, wanted)
    assert not torch.equal(kept, wanted)


def test_a_drafters_update_leaves_the_target(directory: Path) -> None:
    policy = tiny_policy()
    engine, _ = served(policy, directory, follow_head=True)
    before = checksums(dict(policy.named_parameters()))
    own = dict(engine.drafter.named_weights())  # type: ignore[union-attr]
    report = engine.update_drafter([(name, tensor * 1.5) for name, tensor in own.items()], 9)
    assert checksums(dict(policy.named_parameters())) == before
    assert dict(report.tensor_checksums) == checksums(engine.drafter.named_weights())  # type: ignore[union-attr]
    assert report.version == engine.drafter.weights_version == 9  # type: ignore[union-attr]
    # What was published is the drafter's own from now on: the next sync of the target compares with it.
    engine.update_weights(new_weights(policy), 10)


def test_faulty_drafter_weights_are_refused_by_name(directory: Path) -> None:
    engine, _ = served(tiny_policy(), directory, follow_head=True)
    own = {name: tensor.clone() for name, tensor in engine.drafter.named_weights().items()}  # type: ignore[union-attr]
    for faulty, said in (
        ({name: tensor for name, tensor in own.items() if name != "fc.weight"}, "missing: fc.weight"),
        ({**own, "lm_head.weight": own["fc.weight"]}, "unexpected: lm_head.weight"),
        ({**own, "norm.weight": own["norm.weight"] * float("nan")}, "not finite: norm.weight"),
    ):
        with pytest.raises(ValueError, match=said):
            engine.update_drafter(faulty.items(), 2)
    assert checksums(engine.drafter.named_weights()) == checksums(own)  # type: ignore[union-attr]


def test_a_drafter_without_weights_takes_none() -> None:
    policy = tiny_policy()
    for drafter, said in ((None, "there is no drafter"), (NGramDrafter(), "ngram has no weights of its own")):
        engine = Engine(make_runner(policy, max_context=48), config=EngineConfig(max_batch=1, max_context=48), drafter=drafter)
        with pytest.raises(ValueError, match=said):
            engine.update_drafter([], 1)


class _WritesIntoThePolicy(MTPDrafter):
    def update_weights(self, named_tensors, version) -> None:  # type: ignore[no-untyped-def]
        self._model.policy.embedding[0, 0] += 1.0


class _FollowsWithItsOwnNorm(MTPDrafter):
    def target_updated(self, version) -> None:  # type: ignore[no-untyped-def]
        self._model.norm.weight.data.mul_(1.01)


def test_weights_that_land_on_the_wrong_side_are_an_error() -> None:
    policy = tiny_policy()

    def engine(kind: type[MTPDrafter]) -> Engine:
        drafter = kind(random_head(policy), PolicyParts.of(policy), TorchOps())
        return Engine(make_runner(policy, max_context=48), config=EngineConfig(max_batch=1, max_context=48), drafter=drafter)

    with pytest.raises(RuntimeError, match=r"weights 4 of the drafter changed weights of the target: model\.embed_tokens\.weight"):
        engine(_WritesIntoThePolicy).update_drafter([], 4)
    with pytest.raises(RuntimeError, match=r"weights 5 of the target changed weights of the drafter: norm\.weight"):
        engine(_FollowsWithItsOwnNorm).update_weights(new_weights(policy), 5)


def test_the_same_from_another_thread(directory: Path) -> None:
    engine, sink = served(tiny_policy(), directory, follow_head=True)
    weights = [(name, tensor * 1.5) for name, tensor in engine.drafter.named_weights().items()]  # type: ignore[union-attr]

    async def work(running: AsyncEngine) -> None:
        tasks = [asyncio.create_task(running.generate(request)) for request in REQUESTS]
        await asyncio.sleep(0.02)
        report = await asyncio.wrap_future(running.update_drafter(weights, 3))
        assert report.version == 3
        await asyncio.wrap_future(running.run(lambda engine: engine.emit(TrainEvent(step=3, loss=0.5, metrics={}))))
        assert {len(out.token_ids) for out in await asyncio.gather(*tasks)} == {16}
        with pytest.raises(ValueError, match="missing"):
            await asyncio.wrap_future(running.update_drafter([], 4))

    with AsyncEngine(engine) as running:
        asyncio.run(work(running))
    assert [event.step for event in sink.events if isinstance(event, TrainEvent)] == [3]

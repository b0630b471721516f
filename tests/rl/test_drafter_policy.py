"""Drafters while the policy learns: settings that go together, when a refresh runs and what it leaves, training before the first step."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[1] / "mtp"), str(Path(__file__).parents[1] / "engine")]

from mtp_tiny import random_head, save_policy, tiny_policy  # noqa: E402

from rollout_spec.budget import FixedBudget  # noqa: E402
from rollout_spec.engine.async_engine import AsyncEngine  # noqa: E402
from rollout_spec.engine.engine import Engine, EngineConfig  # noqa: E402
from rollout_spec.engine.load import LoadedModel, make_runner  # noqa: E402
from rollout_spec.engine.ops import TorchOps  # noqa: E402
from rollout_spec.engine.request import Request  # noqa: E402
from rollout_spec.engine.weights import checksums  # noqa: E402
from rollout_spec_mtp.checkpoint import save_drafter  # noqa: E402
from rollout_spec_mtp.training.protocol import PolicyParts  # noqa: E402
from rollout_spec_rl.verl import before_rl  # noqa: E402
from rollout_spec_rl.verl.before_rl import plan_before_vllm, rl_prompts, train_before_rl, training_config  # noqa: E402
from rollout_spec_rl.verl.drafter_policy import DraftRefresher, ServedDrafter, serve_drafter  # noqa: E402
from rollout_spec_rl.verl.metrics import StepSink, named  # noqa: E402
from rollout_spec_rl.verl.options import RolloutPlan, RolloutSpecOptions, plan_rollouts  # noqa: E402

Rollout = Callable[..., dict[str, Any]]
REFRESHING = {"refresh_every": 1, "refresh_steps": 6, "refresh_lr": 5e-3, "refresh_seconds": 600.0}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = tiny_policy()
    folder = tmp_path_factory.mktemp("drafter") / "mtp"
    save_drafter(folder, random_head(policy, layers=(1, -1)), PolicyParts.of(policy))
    return folder


@pytest.mark.parametrize(
    ("custom", "said"),
    [
        ({"drafter_policy": "thawed"}, "drafter_policy='thawed' is not one of follow_head, frozen"),
        ({"drafter": "suffix", "refresh_every": 2}, "refresh_every is for trained drafters; drafter='suffix' has no weights"),
        ({"drafter": "none", "refresh_when_stale": True}, "refresh_when_stale is for trained drafters"),
        ({"drafter": "self", "drafter_policy": "frozen"}, "drafter_policy is for trained drafters"),
        ({"drafter": "DIR", "drafter_policy": "frozen", "refresh_every": 2}, "drafter_policy=frozen keeps an old one: use follow_head"),
        ({"drafter": "DIR", "refresh_every": 0}, "refresh_every must be 1 or more, got 0"),
        ({"drafter": "DIR", "refresh_steps": 0}, "refresh_steps must be 1 or more"),
        ({"drafter": "DIR", "refresh_seconds": 0.0}, "refresh_seconds must be positive"),
        ({"drafter": "DIR", "refresh_lr": float("inf")}, "refresh_lr must be positive"),
        ({"drafter": "DIR", "refresh_every": 1.5}, "refresh_every must be null or a whole number"),
        ({"drafter": "DIR", "refresh_before_rl": 1}, "refresh_before_rl must be true or false"),
        ({"drafter": "DIR", "drafter_config": "FILE"}, "drafter_config is read by refresh_before_rl only"),
        ({"drafter": "DIR", "refresh_before_rl": True, "drafter_config": "FILE"}, "names one: leave one of them out"),
        ({"drafter": "???", "refresh_before_rl": True}, "give drafter_config=configs/drafter"),
        ({"drafter": "???", "refresh_before_rl": True, "drafter_config": "/nowhere.yaml"}, "is no file on this machine"),
        ({"drafter": "???", "refresh_before_rl": True, "drafter_config": "FILE"}, "a sweep's jobs take a trained one"),
    ],
)
def test_settings_that_do_not_go_together(rollout: Rollout, directory: Path, custom: dict[str, Any], said: str) -> None:
    places = {"DIR": str(directory), "FILE": str(directory / "config.json")}
    with pytest.raises(ValueError, match=said):
        plan_rollouts(rollout({name: places.get(value, value) for name, value in custom.items()}))


def test_a_greedy_policy_has_nothing_to_refresh_on(rollout: Rollout, directory: Path) -> None:
    with pytest.raises(ValueError, match=r"temperature=0\.0: a greedy policy has no law"):
        plan_rollouts(rollout({"drafter": str(directory), "refresh_every": 1}, temperature=0.0))


class Replica:
    """What a server does with a drafter, without verl: rollouts, the sleep after them, new weights."""

    def __init__(self, plan: RolloutPlan, *, stale: bool = False, rank: int = 0) -> None:
        self.policy: nn.Module = tiny_policy()
        ops, self.sink, self.stale = TorchOps(), StepSink(), stale
        loaded = LoadedModel(path=Path(), module=self.policy, tokenizer=None)  # type: ignore[arg-type]
        self.served: ServedDrafter = serve_drafter(plan, loaded, ops, rank)
        engine = Engine(
            make_runner(self.policy, max_context=64, ops=ops),
            config=EngineConfig(max_batch=4, max_context=64, max_tree_nodes=8),
            drafter=self.served.drafter,
            controller=FixedBudget(draft_length=3),
            sink=self.sink,
        )
        began = self.served.loaded()
        if began is not None:
            engine.emit(began)
        self.engine = AsyncEngine(engine)
        assert self.served.online is not None
        self.refresher = DraftRefresher(self.engine, self.served.online, plan.options, lambda: self.stale)
        self.version = -1

    @property
    def own(self) -> dict[str, int]:
        return checksums(self.served.drafter.named_weights())  # type: ignore[union-attr]

    async def rollouts(self, count: int = 16) -> None:
        requests = [Request(prompt_token_ids=(1, 3 + i, 7), max_new_tokens=16, seed=i, ignore_eos=True) for i in range(count)]
        await asyncio.gather(*(self.engine.generate(request) for request in requests))

    def sleep(self) -> None:
        self.refresher.begin_if_due(self.version)

    async def sync(self, version: int) -> None:
        await self.refresher.before_sync(self.version)
        generator = torch.Generator().manual_seed(version)
        new = [(name, w.detach() + 0.1 * w.std() * torch.randn(w.shape, generator=generator)) for name, w in self.policy.named_parameters()]
        await asyncio.wrap_future(self.engine.update_weights(new, version))
        self.version = version


@pytest.fixture
def replica(rollout: Rollout, directory: Path) -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []

    def make(custom: dict[str, Any], **changes: Any) -> Replica:
        made.append(Replica(plan_rollouts(rollout({"drafter": str(directory), **custom})), **changes))
        return made[-1]

    yield make
    for each in made:
        each.engine.close()


def test_every_second_version(replica: Callable[..., Replica]) -> None:
    """Due after two syncs, begun by the sleep after the rollouts, published before the next weights; the policy's are untouched by it."""
    served = replica({**REFRESHING, "refresh_every": 2})

    async def work() -> list[tuple[float, float]]:
        seen = []
        for version in range(5):
            await served.sync(version)
            await served.rollouts()
            policy = checksums(dict(served.policy.named_parameters()))
            served.sleep()
            await served.refresher.before_sync(served.version) if version == 4 else None
            assert checksums(dict(served.policy.named_parameters())) == policy
            found = named(served.sink.take())
            seen.append((found["rollout_spec/drafter_refreshes"], found["rollout_spec/drafter_version"]))
        return seen

    # Rollouts of version 1 are the first after two syncs; what they teach is there before version 2, and counted with it.
    assert asyncio.run(work()) == [(0, 0), (0, 0), (1, 1), (0, 1), (1, 3)]


def test_without_a_sleep_it_runs_before_the_next_weights(replica: Callable[..., Replica]) -> None:
    served = replica(REFRESHING)

    async def work() -> dict[str, float]:
        await served.sync(0)
        await served.rollouts()
        before = served.own
        await served.sync(1)
        assert served.own != before
        return named(served.sink.take())

    found = asyncio.run(work())
    assert (found["rollout_spec/drafter_refreshes"], found["rollout_spec/drafter_version"], found["rollout_spec/policy_version"]) == (
        1,
        0,
        1,
    )
    assert found["rollout_spec/drafter_train_s"] > 0
    assert 0 < found["rollout_spec/drafter_loss"] <= 1


def test_a_stale_drafter_is_refreshed_and_a_fresh_one_is_not(replica: Callable[..., Replica]) -> None:
    served = replica({**REFRESHING, "refresh_every": None, "refresh_when_stale": True})

    async def work() -> list[float]:
        counts = []
        for version, stale in enumerate((False, True, False)):
            await served.sync(version)
            await served.rollouts()
            served.stale = stale
            served.sleep()
            served.stale = False
            await served.refresher.before_sync(version)
            counts.append(named(served.sink.take())["rollout_spec/drafter_refreshes"])
        return counts

    assert asyncio.run(work()) == [0, 1, 0]


def test_too_little_text_leaves_it_due(replica: Callable[..., Replica]) -> None:
    served = replica(REFRESHING)

    async def work() -> None:
        await served.sync(0)
        await served.rollouts(3)
        before = served.own
        await served.sync(1)
        assert served.own == before
        await served.rollouts()
        await served.sync(2)
        assert served.own != before

    asyncio.run(work())


def test_what_breaks_in_a_refresh_stops_the_sync(replica: Callable[..., Replica]) -> None:
    served = replica(REFRESHING)

    async def work() -> None:
        await served.sync(0)
        await served.rollouts()
        with torch.no_grad():
            served.served.online.trainer.model.fc.weight.fill_(float("nan"))  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="refreshing the drafter for weights 0: the loss is nan"):
            await served.sync(1)

    asyncio.run(work())


def test_a_refreshed_drafter_comes_back(replica: Callable[..., Replica], tmp_path: Path) -> None:
    """The process ends; the next one of this replica begins with what was published, another replica with its own."""
    settings = {**REFRESHING, "drafter_dir": str(tmp_path / "kept")}
    first = replica(settings)

    async def work() -> None:
        await first.sync(0)
        await first.rollouts()
        await first.sync(1)

    before = first.own
    asyncio.run(work())
    assert first.own != before
    again, other = replica(settings), replica(settings, rank=1)
    assert again.own == first.own
    assert named(again.sink.take())["rollout_spec/drafter_version"] == 0
    assert again.served.drafter.weights_version == 0  # type: ignore[union-attr]
    assert other.own == before


DATA = [[{"role": "user", "content": f"w{3 + i} w{5 + i} w7"}] for i in range(24)]


@pytest.fixture
def before(tmp_path: Path, rollout: Rollout) -> Callable[..., tuple[RolloutPlan, str, dict[str, Any]]]:
    """A run's plan, model and data as verl has them."""
    model = save_policy(tmp_path / "model")
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": prompt, "answer": "w1"}) + "\n" for prompt in DATA))
    (tmp_path / "drafter.yaml").write_text(
        "model: other\nout: unused\ncollect: {prompts: 'gsm_symbolic:8', max_batch: 4, max_new_tokens: 999, temperature: 0.5}\n"
        "drafter: {settings: {draft_length: 2}}\nphases: [{share: 1.0, loss: {kl: 1.0}}]\n"
        "train: {epochs: 2, rows_per_step: 1, micro_rows: 1, row_tokens: 64, checkpoint_steps: 1}\n"
        "evaluate: {held_out: 0.2, served_prompts: 'gsm_symbolic:8', served_max_new_tokens: 64}\n"
    )

    def make(**changes: Any) -> tuple[RolloutPlan, str, dict[str, Any]]:
        custom = {"drafter": "???", "refresh_before_rl": True, "drafter_config": str(tmp_path / "drafter.yaml")}
        custom |= {"drafter_cache": str(tmp_path / "cache")}
        plan = plan_rollouts(rollout(custom, **changes), before_training=True)
        return plan, str(model), {"train_files": [str(tmp_path / "train.jsonl")], "prompt_key": "prompt"}

    return make


def test_the_first_drafter_is_trained_as_the_run_samples(before: Callable[..., Any], tmp_path: Path) -> None:
    plan, model, data = before(temperature=0.7)
    config = training_config(plan, model, data, tmp_path / "cache")
    assert (config.model, config.collect.temperature, config.collect.max_new_tokens, config.collect.dtype) == (model, 0.7, 24, "float32")
    written = [json.loads(line)["prompt"] for line in Path(config.collect.prompts).read_text().splitlines()]
    assert sorted(map(json.dumps, written)) == sorted(map(json.dumps, DATA))
    assert written != DATA, "files come sorted; the order is shuffled"
    assert config.evaluate.served_prompts is not None
    assert [json.loads(line)["prompt"] for line in Path(config.evaluate.served_prompts).read_text().splitlines()] == written[:16]
    assert config.evaluate.served_max_new_tokens == 24
    assert training_config(plan, model, data, tmp_path / "cache") == config


def test_the_first_drafter_is_cached_and_goes_on_where_it_was_stopped(
    before: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, model, data = before()
    trainer = sys.modules["rollout_spec_mtp.training.trainer"].Trainer
    step, stopped_at = trainer._step, 5

    def stopping(self: Any, number: int) -> dict[str, float]:
        if number == stopped_at:
            raise KeyboardInterrupt
        result: dict[str, float] = step(self, number)
        return result

    monkeypatch.setattr(trainer, "_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        train_before_rl(plan, model, data)
    monkeypatch.setattr(trainer, "_step", step)
    folder = train_before_rl(plan, model, data)
    assert f"steps from step {stopped_at}" in " ".join(capsys.readouterr().err.split())
    assert (folder / "evaluation.json").is_file()
    monkeypatch.setattr(trainer, "__init__", None)  # nothing is trained a third time
    assert train_before_rl(plan, model, data) == folder
    assert RolloutSpecOptions(drafter=str(folder)).drafter_policy == "follow_head"


def test_what_is_trained_before_rollouts_by_vllm(before: Callable[..., Any], rollout: Rollout, tmp_path: Path) -> None:
    """The same options in the same place, and nothing else there."""
    wanted, _, _ = before()
    custom = {name: getattr(wanted.options, name) for name in ("refresh_before_rl", "drafter_config", "drafter_cache")}
    plan = plan_before_vllm(rollout(custom), "???")
    assert plan is not None
    assert plan == wanted
    assert plan_before_vllm(rollout({}), "suffix") is None
    assert plan_before_vllm(rollout({"refresh_before_rl": False, "drafter_cache": "somewhere"}), "???") is None
    for given, drafter, said in (
        (custom, str(tmp_path), "names one: leave one of them out"),
        ({**custom, "drafter_config": None}, "???", "give drafter_config=configs/drafter"),
        ({"drafter_config": custom["drafter_config"]}, "suffix", "is read by refresh_before_rl only"),
        (
            {**custom, "refresh_every": 2},
            "???",
            r"refresh_every is for the embedded engine; with vLLM options stand under .*engine_kwargs\.vllm",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            plan_before_vllm(rollout(given), drafter)


def test_prompts_of_all_files_once(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"question": ["a", "b", "a"], "other": [1, 2, 3]}), tmp_path / "one.parquet")
    (tmp_path / "two.jsonl").write_text('{"question": "c"}\n\n{"question": "b"}\n')
    files = [str(tmp_path / "one.parquet"), str(tmp_path / "two.jsonl")]
    assert sorted(map(str, rl_prompts(files, "question"))) == ["a", "b", "c"]
    for faulty, said in (
        ([str(tmp_path / "none.parquet")], "none.parquet does not exist"),
        ([files[0]], "has no column 'prompt'"),
        ([files[1]], "line 1 is no object with 'prompt'"),
        ([str(Path(__file__))], "neither parquet nor JSON lines"),
    ):
        with pytest.raises(ValueError, match=said):
            rl_prompts(faulty, "prompt")
    assert before_rl.__name__


def test_options_of_a_plan_survive_a_process_border(rollout: Rollout, directory: Path) -> None:
    import pickle

    plan = plan_rollouts(rollout({"drafter": str(directory), "refresh_every": 3}))
    assert pickle.loads(pickle.dumps(plan)) == dataclasses.replace(plan)
    assert plan.options.refreshes

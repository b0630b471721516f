"""Each patch does what it says, and upstream is still the code it was written against."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_spec_rl.patching import Patch, fingerprint, place
from rollout_spec_rl.verl import patches


@pytest.mark.parametrize("patch", patches.EVERY_PATCH, ids=lambda patch: patch.target)
def test_upstream_is_what_the_patch_knows(patch: Patch) -> None:
    assert patch.fingerprint() == patch.upstream, f"{patch.target} changed upstream: see whether the patch is still right ({patch.reason})"


def test_a_changed_upstream_is_noticed() -> None:
    def one() -> int:
        return 1

    def other() -> int:
        return 2

    assert fingerprint(one) != fingerprint(other)
    assert len(fingerprint(one)) == 12


@pytest.mark.parametrize("patch", patches.EVERY_PATCH, ids=lambda patch: patch.target)
def test_applying_twice_is_applying_once(patch: Patch) -> None:
    patch.apply()
    owner, name = place(patch.target)
    once = getattr(owner, name)
    patch.apply()
    assert getattr(owner, name) is once
    assert patch.fingerprint() == patch.upstream


def test_an_untested_verl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    patches.check_version()
    monkeypatch.setattr(patches.metadata, "version", lambda _: "0.10.0")
    with pytest.raises(ValueError, match=r"verl 0\.10\.0 is not among .*: pip install 'verl==0\.9\.1'"):
        patches.check_version()


def test_processes_meet_over_gloo_once() -> None:
    asked: list[tuple[Any, Any]] = []
    initialize = patches._gloo_process_group(lambda timeout, backend: asked.append((timeout, backend)))
    initialize()
    initialize(30, "cpu:gloo,cuda:nccl")
    assert asked == [(None, "cpu:gloo"), (30, "cpu:gloo,cuda:nccl")]


def test_only_training_steps_get_rollout_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout_spec_rl.verl import collect

    logged: list[dict[str, Any]] = []
    log = patches._log_with_rollout_metrics(lambda _, data, step, backend: logged.append(data))
    monkeypatch.setattr(collect, "step_metrics", lambda: {"rollout_spec/entropy": 1.0})
    reported: list[tuple[Any, int]] = []
    monkeypatch.setattr(collect, "report_training", lambda data, number: reported.append((data, number)))
    step = {"training/global_step": 3}
    log(None, step, 3)
    log(None, {"val-core/acc": 0.5}, 3)
    assert logged == [{"training/global_step": 3, "rollout_spec/entropy": 1.0}, {"val-core/acc": 0.5}]
    assert step == {"training/global_step": 3}
    assert reported == [(step, 3)]


def test_separate_async_may_log_as_it_does(caplog: pytest.LogCaptureFixture) -> None:
    from verl.trainer.ppo.v1 import trainer_separate_async

    patch = next(patch for patch in patches.IN_THE_TRAINER if patch.target.endswith("trainer_separate_async:logger"))
    patch.apply()
    upstream = trainer_separate_async.logger.__rollout_spec_patch__
    with caplog.at_level(logging.INFO, logger=upstream.name):
        with pytest.raises(TypeError):
            upstream.info("as upstream", flush=True)
        trainer_separate_async.logger.info("with %s", "flush", flush=True)
    assert [record.getMessage() for record in caplog.records] == ["with flush"]


def test_fully_async_gets_our_workers_and_our_client(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.experimental.fully_async_policy import fully_async_rollouter
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

    from rollout_spec_rl.verl import agent_loop

    next(patch for patch in patches.IN_THE_TRAINER if patch.target.endswith("FullyAsyncAgentLoopManager")).apply()
    monkeypatch.setattr(agent_loop.ray, "remote", lambda worker: worker)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=None, model=None))
    manager = fully_async_rollouter.FullyAsyncAgentLoopManager(config, FullyAsyncLLMServerClient(config=config))
    assert type(manager.llm_client) is agent_loop.CountingClient
    assert manager.agent_loop_workers_class is agent_loop.SeededStreamWorker


def test_patches_of_a_trainer_that_does_not_run_are_not_loaded() -> None:
    absent = Patch(target="no_such_module:name", reason="", upstream="", replace=lambda it: it)
    assert not absent.loaded
    assert patches.IN_EVERY_PROCESS[0].loaded

"""A refreshed drafter is trained once for a policy's weights, and taken from the cache after that."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock
from mtp_tiny import save_policy, tiny_policy, train_config

from rollout_spec.engine.ops import TorchOps
from rollout_spec_mtp import refresh
from rollout_spec_mtp.refresh import refreshed_drafter
from rollout_spec_mtp.serving import load_drafter


class _Silent:
    def say(self, line: str) -> None:
        pass

    def bar(self, name: str, total: int, done: int):
        return lambda now, note: None


def _config(tmp_path: Path, model: Path, **train: object):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{3 + i} w{5 + i} w7"}}\n' for i in range(24)))
    return train_config(
        model=str(model),  # type: ignore[arg-type]
        collect={"prompts": str(prompts), "max_new_tokens": 16, "max_batch": 4},
        train={"epochs": 2, **train},
    )


def test_a_drafter_is_trained_once_for_the_same_weights_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, cache = TorchOps(), tmp_path / "cache"
    config = _config(tmp_path, save_policy(tmp_path / "model", seed=0))
    first = refreshed_drafter(config, cache, ops, _Silent())
    assert {path.name for path in first.iterdir()} >= {"config.json", "model.safetensors", "evaluation.json"}
    assert [path.name for path in cache.iterdir() if path.suffix != ".lock"] == [first.name], "rollouts and checkpoints are not kept"
    assert load_drafter(first, tiny_policy(), ops, None).name == "mtp"

    trained: list[object] = []
    run = refresh.run_training
    monkeypatch.setattr(refresh, "run_training", lambda *args, **kwargs: (trained.append(args), run(*args, **kwargs)))
    assert refreshed_drafter(config, cache, ops, _Silent()) == first
    assert not trained
    other_settings = refreshed_drafter(_config(tmp_path, tmp_path / "model", lr=1e-3), cache, ops, _Silent())
    other_weights = refreshed_drafter(_config(tmp_path, save_policy(tmp_path / "model", seed=1)), cache, ops, _Silent())
    assert len({first, other_settings, other_weights}) == 3
    assert len(trained) == 2


def test_who_asks_for_a_drafter_that_another_process_trains_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep over seeds starts several jobs on one node at once."""
    config, cache = _config(tmp_path, save_policy(tmp_path / "model", seed=0)), tmp_path / "cache"
    trained = refreshed_drafter(config, cache, TorchOps(), _Silent())
    (path,) = cache.glob("*.lock")
    others = FileLock(path)
    others.acquire()
    trained.rename(tmp_path / "not_there_yet")

    class Display(_Silent):
        def say(self, line: str) -> None:
            if line.startswith("another process trains this drafter"):
                (tmp_path / "not_there_yet").rename(trained)
                others.release()

    monkeypatch.setattr(refresh, "run_training", lambda *_, **__: pytest.fail("trained twice at once"))
    assert refreshed_drafter(config, cache, TorchOps(), Display()) == trained
    others.acquire(timeout=0)  # it was let go

"""A drafter for this very policy: trained now, or taken from the cache if it was trained from these weights with these settings before."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rollout_spec.engine.ops import Ops
from rollout_spec.engine.weights import checksums, combine
from rollout_spec.files import cache_dir
from rollout_spec_mtp.configs import to_mapping
from rollout_spec_mtp.training.config import TrainConfig, load_config
from rollout_spec_mtp.training.run import Display, open_workplace, run_training

_DEMO = Path(__file__).with_name("demo.yaml")
# Enough to see every part at work, not to draft well.
_QUICK = ("collect.max_tokens=4000", "train.epochs=1", "evaluate.served_prompts=gsm_symbolic:4", "evaluate.served_max_new_tokens=48")


def demo_config(model: str, *, quick: bool, threads: int | None) -> TrainConfig:
    """The demo's small MTP head for a model: minutes on two cores, or a fraction of that."""
    own = [f"model={model}", *([] if threads is None else [f"threads={threads}"])]
    return load_config(_DEMO, [*own, *(_QUICK if quick else ())])


def drafters_dir() -> Path:
    return cache_dir() / "drafters"


def refreshed_drafter(config: TrainConfig, cache: Path, ops: Ops, display: Display) -> Path:
    """Directory under ``cache`` of a drafter trained by ``config`` on the policy that ``config.model`` is now.

    Its name is a digest of the policy's weights and of every setting but ``out``; evaluation.json lies beside the weights. A training
    that was interrupted goes on where it stopped. Its rollouts are not kept: they are large, and the policy's next weights need others.
    Of several processes that ask for one drafter, one trains it and the others wait.
    """
    workplace = open_workplace(config.model, config.collect.dtype, ops, display)
    settings: dict[str, Any] = to_mapping(config)
    del settings["out"]
    policy = combine(checksums(dict(workplace.loaded.module.named_parameters())))
    key = hashlib.sha256(json.dumps([policy, settings], sort_keys=True).encode()).hexdigest()[:16]
    target, work = cache / key, cache / f"{key}.part"
    with _alone(cache / f".{key}.lock", display):
        if target.is_dir():
            display.say(f"drafter from {target}")
            return target
        run_training(config, work, ops, display, resume=True, workplace=workplace)
        shutil.copy2(work / "evaluation.json", work / "drafter")
        (work / "drafter").rename(target)
        shutil.rmtree(work)
    return target


@contextmanager
def _alone(path: Path, display: Display) -> Iterator[None]:
    """Holds the lock of that file; a process that dies lets go of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        display.say(f"another process trains this drafter (lock {path}); waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()

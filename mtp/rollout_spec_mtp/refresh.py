"""A drafter for this very policy: trained now, or taken from the cache if it was trained from these weights with these settings before."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from rollout_spec.engine.ops import Ops
from rollout_spec.engine.weights import checksums, combine
from rollout_spec_mtp.configs import to_mapping
from rollout_spec_mtp.training.config import TrainConfig
from rollout_spec_mtp.training.run import Display, open_workplace, run_training


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "rollout_spec" / "drafters"


def refreshed_drafter(config: TrainConfig, cache: Path, ops: Ops, display: Display) -> Path:
    """Directory under ``cache`` of a drafter trained by ``config`` on the policy that ``config.model`` is now.

    Its name is a digest of the policy's weights and of every setting but ``out``; evaluation.json lies beside the weights. A training
    that was interrupted goes on where it stopped. Its rollouts are not kept: they are large, and the policy's next weights need others.
    """
    workplace = open_workplace(config.model, config.collect.dtype, ops, display)
    settings: dict[str, Any] = to_mapping(config)
    del settings["out"]
    policy = combine(checksums(dict(workplace.loaded.module.named_parameters())))
    key = hashlib.sha256(json.dumps([policy, settings], sort_keys=True).encode()).hexdigest()[:16]
    target, work = cache / key, cache / f"{key}.part"
    if target.is_dir():
        display.say(f"drafter from {target}")
        return target
    run_training(config, work, ops, display, resume=True, workplace=workplace)
    shutil.copy2(work / "evaluation.json", work / "drafter")
    (work / "drafter").rename(target)
    shutil.rmtree(work)
    return target

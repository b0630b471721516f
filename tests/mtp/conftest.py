"""Helper modules for the tests of drafters, and one trained drafter that they share."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import nn

# Helpers beside the tests, and the engine tests' tiny models; the import mode "importlib" adds no folder to the path.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engine")]

from mtp_tiny import collect, tiny_policy, train_config, trainer_for  # noqa: E402

from rollout_spec_mtp.training.shards import RolloutSet  # noqa: E402


@dataclass(frozen=True)
class Trained:
    policy: nn.Module
    rollouts: RolloutSet
    directory: Path  # of the drafter
    lengths: tuple[float, float]  # held out, before and after


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A drafter of two tapped layers and a reduced vocabulary, trained for a moment on the tiny policy's own rollouts."""
    folder = tmp_path_factory.mktemp("trained")
    policy = tiny_policy()
    rollouts = collect(policy, folder / "rollouts", layers=(1, -1), count=60)
    config = train_config(
        drafter={"draft_vocabulary": 40, "settings": {"draft_length": 3, "hidden_layers": [1, -1]}},
        train={"epochs": 20},
        phases=[{"share": 0.5, "loss": {"kl": 1.0}}, {"share": 0.5, "loss": {"e2e_tv": 1.0}}],
    )
    trainer, _ = trainer_for(config, policy, rollouts, folder / "run")
    before = trainer.evaluate()["held_out_block_length_estimate"]
    after = trainer.run(lambda step, metrics: None)
    return Trained(policy=policy, rollouts=rollouts, directory=folder / "run" / "drafter", lengths=(before, after))

"""Hydra's callback in every ``+rollout_spec=`` group: refuses a wrong configuration before Ray or a model is started."""

from __future__ import annotations

from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from rollout_spec_rl.verl.options import plan_rollouts
from rollout_spec_rl.verl.patches import check_version
from rollout_spec_rl.verl.replica import as_mapping


class CheckConfig(Callback):
    """Ends the program with one line that says what to change."""

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        try:
            check_version()
            plan_rollouts(as_mapping(config.actor_rollout_ref.rollout))
        except ValueError as error:
            # Hydra turns a callback's exceptions into warnings and goes on; only an exit gets through.
            raise SystemExit(f"rollout_spec: {error}") from None

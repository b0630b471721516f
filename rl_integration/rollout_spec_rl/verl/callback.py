"""Hydra's callback in every ``+rollout_spec=`` group: refuses a wrong configuration before Ray starts, trains the first drafter, and clears
up after the last rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from rollout_spec.sinks.specs import forget_targets
from rollout_spec_rl.verl.options import WHERE, RolloutPlan, plan_rollouts
from rollout_spec_rl.verl.patches import check_version
from rollout_spec_rl.verl.replica import as_mapping
from rollout_spec_rl.vllm.native_options import UNDER_VERL
from rollout_spec_rl.vllm.options import KEY, VllmOptions
from rollout_spec_rl.vllm.options import WHERE as IN_VLLM
from rollout_spec_rl.vllm.patches import check_version as check_vllm_version

_ENGINE_KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"


class CheckConfig(Callback):
    """Ends the program with one line that says what to change."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Before the job's config is copied for it: what is set here is what the job gets. A sweep's jobs do not come by."""
        try:
            check_version()
            plan = plan_rollouts(as_mapping(config.actor_rollout_ref.rollout), before_training=True)
            check_kept_drafters(plan, str(config.trainer.resume_mode))
            if plan.options.is_untrained:
                from rollout_spec_rl.verl.before_rl import train_before_rl

                folder = train_before_rl(plan, str(config.actor_rollout_ref.model.path), config.data)
                with read_write(config):
                    OmegaConf.update(config, f"{WHERE}.drafter", str(folder))
                    OmegaConf.update(config, f"{WHERE}.refresh_before_rl", value=False)
                    OmegaConf.update(config, f"{WHERE}.drafter_config", None)
        except ValueError as error:
            # Hydra turns a callback's exceptions into warnings and goes on; only an exit gets through.
            raise SystemExit(f"rollout_spec: {error}") from None

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        try:
            check_version()
            plan_rollouts(as_mapping(config.actor_rollout_ref.rollout))
        except ValueError as error:
            raise SystemExit(f"rollout_spec: {error}") from None

    def on_job_end(self, config: DictConfig, **_: Any) -> None:
        """The replicas are over, and Ray did not ask them to end."""
        events = plan_rollouts(as_mapping(config.actor_rollout_ref.rollout)).options.events
        if events is not None:
            forget_targets(Path(events))


class CheckVllmConfig(Callback):
    """The same for rollouts by vLLM. The options of what is trained first stand where the embedded engine's do."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        from rollout_spec_rl.verl.before_rl import plan_before_vllm, train_before_rl

        try:
            check_version()
            plan = plan_before_vllm(as_mapping(config.actor_rollout_ref.rollout), str(_vllm_options(config)["drafter"]))
            if plan is not None:
                folder = train_before_rl(plan, str(config.actor_rollout_ref.model.path), config.data)
                with read_write(config):
                    OmegaConf.update(config, f"{_ENGINE_KWARGS}.{IN_VLLM}.drafter", str(folder))
                    OmegaConf.update(config, WHERE, {}, merge=False)
        except ValueError as error:
            raise SystemExit(f"rollout_spec: {error}") from None

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        try:
            check_version()
            check_vllm_version()
            if VllmOptions.parse(_vllm_options(config)).is_native:
                raise ValueError(UNDER_VERL)
        except ValueError as error:
            raise SystemExit(f"rollout_spec: {error}") from None


def _vllm_options(config: DictConfig) -> dict[str, Any]:
    engine = OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs.vllm, resolve=False)
    assert isinstance(engine, dict)
    options: dict[str, Any] = engine["additional_config"][KEY]
    return options


def check_kept_drafters(plan: RolloutPlan, resume_mode: str) -> None:
    """Raise ValueError if a run that begins anew would go on with an earlier run's refreshed drafters."""
    folder = plan.options.drafter_dir
    if resume_mode == "disable" and plan.options.refreshes and folder is not None and any(Path(folder).expanduser().glob("replica-*/*")):
        raise ValueError(
            f"trainer.resume_mode=disable, but {WHERE}.drafter_dir={folder} holds drafters that an earlier run refreshed: "
            "delete it, or give another folder"
        )

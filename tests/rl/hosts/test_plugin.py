"""verl finds the backend, the platform and the groups by itself, and a wrong run ends before it starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import verl
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry

configs = {}
with initialize_config_module("verl.trainer.config", version_base=None):
    for name in ("off", "suffix", "mtp", "block"):
        config = compose("ppo_trainer", overrides=["+machine=cpu", f"+rollout_spec={name}", "actor_rollout_ref.model.path=x"])
        custom = OmegaConf.to_container(config.actor_rollout_ref.rollout.custom)
        config.actor_rollout_ref.rollout.custom.rollout_spec.drafter = "none"  # a folder that is still to be given makes no dataclass
        configs[name] = {
            "custom": custom,
            "logprobs": omega_conf_to_dataclass(config.actor_rollout_ref.rollout).calculate_log_probs,
            "strategy": config.actor_rollout_ref.actor.strategy,
            "ray": OmegaConf.to_container(config.ray_kwargs.ray_init),
        }
vllm = {}
with initialize_config_module("verl.trainer.config", version_base=None):
    for name in ("vllm_suffix", "vllm_mtp", "vllm_block"):
        config = compose("ppo_trainer", overrides=["+machine=cpu", f"+rollout_spec={name}", "actor_rollout_ref.model.path=x"])
        engine = config.actor_rollout_ref.rollout.engine_kwargs.vllm
        tokens = engine.speculative_config.num_speculative_tokens
        vllm[name] = {**OmegaConf.to_container(engine.additional_config.rollout_spec), "tokens": tokens}
print(json.dumps({
    "vllm": vllm,
    "adapter": get_rollout_class("rollout_spec").__name__,
    "replica": RolloutReplicaRegistry.get("rollout_spec").__name__,
    "platform": get_platform().device_name,
    "configs": configs,
}))
"""


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", "HYDRA_FULL_ERROR": "1", **environment}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=cwd, env=settings)


def test_verl_knows_us(tmp_path: Path) -> None:
    done = run("-c", PROGRAM, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["adapter"], found["replica"]) == ("RolloutSpecAdapter", "RolloutSpecReplica")
    assert found["platform"] == "cpu"
    drafters = {name: config["custom"]["rollout_spec"]["drafter"] for name, config in found["configs"].items()}
    assert drafters == {"off": "none", "suffix": "suffix", "mtp": "???", "block": "???"}
    assert found["vllm"] == {
        "vllm_suffix": {"drafter": "suffix", "draft_length": 8, "budget": "auto", "tokens": 8},
        "vllm_mtp": {"drafter": "???", "draft_length": 3, "budget": "auto", "tokens": 3},
        "vllm_block": {"drafter": "???", "draft_length": 4, "budget": "auto", "tokens": 4},
    }
    for config in found["configs"].values():
        assert config["logprobs"] is True
        assert config["strategy"] == "fsdp2"
        assert (config["ray"]["num_gpus"], config["ray"]["num_cpus"]) == (1, 32)


def test_a_platform_that_the_user_names_is_left_alone(tmp_path: Path) -> None:
    """As on the head node of a cluster, which has no accelerator of its own."""
    program = "import verl; from verl.plugin.platform import PlatformRegistry; print(PlatformRegistry.registered_names())"
    done = run("-c", program, cwd=tmp_path, VERL_PLATFORM="nvidia")
    assert done.returncode == 0, done.stderr
    assert "cpu" not in done.stdout.splitlines()[-1]


def test_a_plugin_that_fails_says_so(tmp_path: Path) -> None:
    """verl itself would only report it at DEBUG."""
    program = """
from importlib import metadata
real = metadata.version
metadata.version = lambda name: "0.0.1" if name == "verl" else real(name)
import verl
"""
    done = run("-c", program, cwd=tmp_path)
    assert done.returncode == 0
    assert "rollout_spec could not register with verl" in done.stderr
    assert "verl 0.0.1 is not among the versions" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["+rollout_spec=mtp"], "drafter is not set: give the directory of a trained drafter"),
        (["+rollout_spec=suffix", "+actor_rollout_ref.rollout.custom.rollout_spec.draftlength=3"], "unknown option .*draftlength"),
        (
            ["+rollout_spec=vllm_suffix", "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.rollout_spec.drafter=vllm"],
            "vLLM's own drafters are not driven under verl",
        ),
        (["+rollout_spec=off", "actor_rollout_ref.rollout.dtype=float16"], "the embedded engine runs float32 or bfloat16"),
    ],
)
def test_a_wrong_run_ends_before_it_starts(tmp_path: Path, overrides: list[str], said: str) -> None:
    done = run("-m", "verl.trainer.main_ppo", "+machine=cpu", *overrides, "actor_rollout_ref.model.path=x", cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(f"^rollout_spec: .*{said}", last), done.stderr
    assert "Started a local Ray instance" not in done.stdout + done.stderr


def test_the_gpu_example_is_a_config_that_verl_and_we_accept(repository_root: Path) -> None:
    """Composed as its script does it, made into verl's own dataclasses, and checked as at the start of a run."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    from rollout_spec_rl.verl.options import plan_rollouts
    from rollout_spec_rl.verl.replica import as_mapping

    with initialize_config_dir(str(repository_root / "examples" / "verl_grpo_qwen3_gpu"), version_base=None):
        config = compose(
            "config",
            overrides=["+rollout_spec=suffix", "data.train_files=train.parquet", "data.val_files=test.parquet"],
        )
    assert not OmegaConf.missing_keys(config.actor_rollout_ref)
    plan = plan_rollouts(as_mapping(config.actor_rollout_ref.rollout))
    assert (plan.options.drafter, plan.dtype, plan.response_length) == ("suffix", "bfloat16", 1024)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert (rollout.name, rollout.n, rollout.calculate_log_probs) == ("rollout_spec", 8, True)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).strategy == "fsdp2"
    assert config.trainer.v1.trainer_mode == "colocate_async"

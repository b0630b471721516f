"""A drafter's life under verl: trained by the callback before the job starts, refreshed by the server while its rollouts are over."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from served import PROMPT, SAMPLED, perturbed
from test_server import send, serve

from rollout_spec.engine.load import load_model
from rollout_spec_mtp.checkpoint import save_drafter
from rollout_spec_mtp.mtp.config import MTPConfig
from rollout_spec_mtp.mtp.model import MTPModel
from rollout_spec_mtp.training.protocol import PolicyParts
from rollout_spec_rl.verl.metrics import named

Rollout = Callable[..., dict[str, Any]]

JOB = """
import json
import hydra
import verl
from omegaconf import OmegaConf

@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def job(config):
    print("CUSTOM " + json.dumps(OmegaConf.to_container(config.actor_rollout_ref.rollout.custom.rollout_spec, resolve=True)))

job()
"""
DRAFTER = """
model: the run decides
out: unused
collect: {prompts: "gsm_symbolic:8", max_batch: 8, max_tokens: 600}
drafter: {settings: {draft_length: 2}}
phases: [{share: 1.0, loss: {kl: 1.0}}]
train: {epochs: 1, rows_per_step: 1, micro_rows: 1, row_tokens: 128}
evaluate: {held_out: 0.2}
"""


@pytest.fixture(scope="module")
def head(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = PolicyParts.of(load_model(str(tiny_policy)).module)
    torch.manual_seed(0)
    model = MTPModel(MTPConfig(draft_length=3), parts, None)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    folder = tmp_path_factory.mktemp("head") / "mtp"
    save_drafter(folder, model, parts)
    return folder


def test_the_server_refreshes_between_rollouts(tiny_policy: Path, rollout: Rollout, head: Path, tmp_path: Path) -> None:
    """verl's order: weights, rollouts, sleep, weights. The second start finds what the first one left."""
    custom = {"drafter": str(head), "draft_length": 3, "budget": "fixed:3", "refresh_every": 1, "refresh_steps": 8, "refresh_lr": 3e-3}
    settings = rollout({**custom, "refresh_seconds": 600.0, "drafter_dir": str(tmp_path)}, ignore_eos=True)
    weights = perturbed(tiny_policy)

    async def work(server: Any) -> dict[str, float]:
        await send(server, weights, 4)
        first = await asyncio.gather(*(server.generate(PROMPT, SAMPLED, f"r{index}") for index in range(12)))
        assert all(output.extra_fields["spec_num_draft_tokens"] > 0 for output in first)
        await server.sleep()
        await send(server, weights, 5)
        output = await server.generate(PROMPT, SAMPLED, "after")
        assert output.extra_fields["rollout_spec_versions"] == [(5, 0, 24)]
        return named(await server.take_metrics())

    async def again(server: Any) -> dict[str, float]:
        return named(await server.take_metrics())

    found = serve(work, tiny_policy, settings)
    assert (found["rollout_spec/drafter_refreshes"], found["rollout_spec/policy_version"]) == (1, 5)
    assert found["rollout_spec/drafter_version"] == 4
    assert serve(again, tiny_policy, settings)["rollout_spec/drafter_version"] == 4


def run_job(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    program = folder / "job.py"
    program.write_text(JOB)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(program), "+machine=cpu", "+rollout_spec=mtp", "trainer.default_local_dir=kept", *overrides]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def test_the_first_drafter_is_there_before_the_job(tiny_policy: Path, tmp_path: Path) -> None:
    (tmp_path / "drafter.yaml").write_text(DRAFTER)
    rows = [{"prompt": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(6) for b in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ours = "actor_rollout_ref.rollout.custom.rollout_spec"
    overrides = (
        f"actor_rollout_ref.model.path={tiny_policy}",
        f"data.train_files={tmp_path / 'train.jsonl'}",
        "data.max_response_length=24",
        f"+{ours}.refresh_before_rl=true",
        f"+{ours}.drafter_config={tmp_path / 'drafter.yaml'}",
        f"+{ours}.drafter_cache={tmp_path / 'cache'}",
    )
    done = run_job(tmp_path, *overrides)
    assert done.returncode == 0, done.stderr
    custom = json.loads(done.stdout.split("CUSTOM ")[1])
    assert Path(custom["drafter"]).parent == tmp_path / "cache"
    assert (Path(custom["drafter"]) / "model.safetensors").is_file()
    assert (custom["refresh_before_rl"], custom["drafter_dir"]) == (False, "kept/drafters")
    assert "train 1/" in done.stderr or "steps from step 0" in " ".join(done.stderr.split())

    # What a killed replica told Prometheus goes with the job, other runs' stays.
    found = tmp_path / "prometheus"
    found.mkdir()
    for name in ("run-0", "run-13", "run-later-0", "another-0"):
        (found / f"{name}.json").write_text("[]")
    again = run_job(tmp_path, *overrides, f"+{ours}.events={tmp_path / 'run'}")
    assert sorted(path.stem for path in found.iterdir()) == ["another-0", "run-later-0"]
    custom["events"] = str(tmp_path / "run")
    assert json.loads(again.stdout.split("CUSTOM ")[1]) == custom
    assert "drafter from" in " ".join(again.stderr.split())

    (tmp_path / "kept" / "drafters" / "replica-0" / "version-00000003").mkdir(parents=True)
    anew = (f"{ours}.drafter={custom['drafter']}", f"+{ours}.refresh_every=2", "trainer.resume_mode=disable")
    refused = run_job(tmp_path, overrides[0], *anew)
    assert refused.returncode != 0
    assert "resume_mode=disable, but" in refused.stderr
    assert "CUSTOM" not in refused.stdout

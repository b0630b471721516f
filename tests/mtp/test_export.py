"""export-drafter: what other engines get to read is what was trained, and nothing is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from block_tiny import block_model
from mtp_tiny import random_head, save_policy
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rollout_spec_mtp.block.checkpoint import is_dflash
from rollout_spec_mtp.checkpoint import save_drafter
from rollout_spec_mtp.mtp.published import load_published
from rollout_spec_mtp.serving import load_trained
from rollout_spec_mtp.training.protocol import PolicyParts
from rollout_spec_rl.compose import COMPOSITION, application


def _policy(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(save_policy(folder), dtype=torch.float32).eval()


def _save(model: torch.nn.Module, policy: torch.nn.Module, folder: Path) -> Path:
    save_drafter(folder, model, PolicyParts.of(policy), tensors=model.state_dict(), about={})
    return folder


def _command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(application(), ["export-drafter", *map(str, arguments)], obj=COMPOSITION)
    return result.exit_code, result.output


def test_an_mtp_head_goes_into_a_copy_of_the_policy(tmp_path: Path) -> None:
    policy = _policy(tmp_path / "policy")
    head = random_head(policy, reduced=True)
    drafter = _save(head, policy, tmp_path / "drafter")
    code, output = _command("--model", tmp_path / "policy", "--drafter", drafter, "--out", tmp_path / "out")
    assert code == 0, output
    read = load_published(tmp_path / "out", PolicyParts.of(policy))
    assert read.draft_token_ids is None
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], tensor, rtol=1e-2, atol=1e-2, msg=name)
    copied = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert all(torch.equal(copied[name], tensor) for name, tensor in policy.state_dict().items())
    code, output = _command("--model", tmp_path / "policy", "--drafter", drafter, "--out", tmp_path / "out")
    assert code == 2
    assert "exists already" in output


def test_a_head_that_reads_other_layers_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    policy = _policy(tmp_path / "policy")
    drafter = _save(random_head(policy, layers=(1, -1)), policy, tmp_path / "drafter")
    code, output = _command("--model", tmp_path / "policy", "--drafter", drafter, "--out", tmp_path / "out")
    assert code == 2
    assert "read the final state alone" in " ".join(output.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "policy"]


def test_a_block_drafter_becomes_a_dflash_directory(tmp_path: Path) -> None:
    policy = _policy(tmp_path / "policy")
    model = block_model(policy, target_layers=[0, 2])
    drafter = _save(model, policy, tmp_path / "drafter")
    code, output = _command("--model", tmp_path / "policy", "--drafter", drafter, "--out", tmp_path / "out")
    assert code == 0, output
    assert is_dflash(tmp_path / "out")
    read = load_trained(tmp_path / "out", PolicyParts.of(policy)).state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(read[name], tensor, rtol=1e-2, atol=1e-2, msg=name)
    with pytest.raises(FileNotFoundError):
        (tmp_path / "out.part").stat()

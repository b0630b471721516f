"""Drafters on disk: round trips, published names, and every fault named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mtp_tiny import random_head, tiny_policy
from safetensors.torch import load_file, save_file

from rollout_spec_mtp.checkpoint import save_drafter
from rollout_spec_mtp.mtp.model import MTPModel
from rollout_spec_mtp.mtp.published import LAYOUTS, from_published, to_published, write_published
from rollout_spec_mtp.serving import load_trained
from rollout_spec_mtp.training.protocol import PolicyParts


@pytest.fixture
def saved(tmp_path: Path) -> tuple[MTPModel, PolicyParts, Path]:
    policy = PolicyParts.of(tiny_policy())
    model = random_head(policy.module, layers=(0, -1))
    save_drafter(tmp_path / "drafter", model, policy, about={"step": 7})
    return model, policy, tmp_path / "drafter"


def _rewrite(directory: Path, change) -> None:  # type: ignore[no-untyped-def]
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_round_trip(saved: tuple[MTPModel, PolicyParts, Path]) -> None:
    model, policy, directory = saved
    loaded = load_trained(directory, policy)
    assert loaded.config == model.config
    assert loaded.draft_token_ids.dtype == torch.int64
    torch.testing.assert_close(loaded.draft_token_ids, model.draft_token_ids)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)
    held = set(load_file(directory / "model.safetensors"))
    assert not any("embed_tokens" in name or "lm_head" in name for name in held), "borrowed tensors must not be saved"


def test_saving_again_replaces_the_whole_directory(saved: tuple[MTPModel, PolicyParts, Path]) -> None:
    model, policy, directory = saved
    (directory / "stale").write_text("")
    save_drafter(directory, model, policy)
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in directory.parent.iterdir()] == ["drafter"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "missing: fc.weight"),
        (lambda t: t.update(extra=torch.ones(2)), "unexpected: extra"),
        (lambda t: t.update({"norm.weight": torch.ones(3)}), r"misshapen: norm.weight \(3,\) for \(32,\)"),
        (lambda t: t["layer.mlp.up_proj.weight"].zero_(), "all zero: layer.mlp.up_proj.weight"),
        (lambda t: t["hidden_norm.weight"].fill_(torch.nan), "not finite: hidden_norm.weight"),
        (lambda t: t.pop("draft_token_ids"), "names 31 draft tokens"),
        (lambda t: t.update(draft_token_ids=torch.arange(31) + 40), "below 61"),
        (lambda t: t.update(draft_token_ids=torch.full((31,), 3)), "distinct"),
        (lambda t: t.update(draft_token_ids=torch.arange(31, dtype=torch.int32)), "int64"),
    ],
)
def test_faulty_tensors_are_named(saved: tuple[MTPModel, PolicyParts, Path], change, message: str) -> None:  # type: ignore[no-untyped-def]
    _, policy, directory = saved
    _rewrite(directory, change)
    with pytest.raises(ValueError, match=message):
        load_trained(directory, policy)


def test_all_faults_are_reported_at_once(saved: tuple[MTPModel, PolicyParts, Path]) -> None:
    _, policy, directory = saved
    _rewrite(directory, lambda t: (t.pop("fc.weight"), t.pop("norm.weight"), t["hidden_norm.weight"].zero_()))
    with pytest.raises(ValueError, match=r"missing: fc.weight, norm.weight; all zero: hidden_norm.weight"):
        load_trained(directory, policy)


def test_another_policy_is_refused(saved: tuple[MTPModel, PolicyParts, Path]) -> None:
    with pytest.raises(ValueError, match=r"trained for another policy .*config_sha256"):
        load_trained(saved[2], PolicyParts.of(tiny_policy("qwen3", num_hidden_layers=2)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json"),
        ("{", "is no JSON"),
        ("{}", "does not describe a drafter"),
        ('{"kind": "mtp", "format_version": 99}', "version 99"),
    ],
)
def test_directories_that_hold_no_drafter(saved: tuple[MTPModel, PolicyParts, Path], text: str | None, message: str) -> None:
    _, policy, directory = saved
    (directory / "config.json").unlink() if text is None else (directory / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_trained(directory, policy)


def test_cut_file(saved: tuple[MTPModel, PolicyParts, Path]) -> None:
    _, policy, directory = saved
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="no whole safetensors file"):
        load_trained(directory, policy)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_published_names_round_trip_through_a_model_directory(tmp_path: Path, layout: str, kind: str) -> None:
    module = tiny_policy(kind)
    module.save_pretrained(tmp_path / "model")
    model = random_head(module, reduced=False)
    write_published(model, layout, tmp_path / "model")
    loaded = load_trained(tmp_path / "model", PolicyParts.of(module))
    assert isinstance(loaded, MTPModel)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor.to(torch.bfloat16).float(), rtol=0, atol=0)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert "model.embed_tokens.weight" in index["weight_map"]


def test_published_names_are_the_published_ones() -> None:
    model = random_head(tiny_policy(), reduced=False)
    hidden = 32
    qwen, mimo, deepseek = (to_published(model, layout) for layout in ("mtp", "mimo", "deepseek"))
    assert {"mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"} <= set(qwen)
    assert "mtp.layers.0.self_attn.q_proj.weight" in qwen
    assert {f"model.mtp_layers.0.{n}.weight" for n in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")} <= set(mimo)
    assert {f"model.layers.3.{n}.weight" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} <= set(deepseek)
    # MiMo's projection takes [state; embedding], the others [embedding; state].
    torch.testing.assert_close(mimo["model.mtp_layers.0.input_proj.weight"][:, :hidden], model.fc.weight[:, hidden:])
    torch.testing.assert_close(qwen["mtp.fc.weight"], model.fc.weight)


def test_copies_of_the_policys_embedding_and_head_are_left_alone() -> None:
    model = random_head(tiny_policy(), reduced=False)
    tensors = to_published(model, "deepseek")
    with_copies = {**tensors, "model.layers.3.embed_tokens.weight": torch.ones(2), "model.layers.3.shared_head.head.weight": torch.ones(2)}
    assert set(from_published(with_copies, 3)) == set(model.state_dict())


def test_heads_without_published_names_are_refused() -> None:
    with pytest.raises(ValueError, match="final state alone"):
        to_published(random_head(tiny_policy(), layers=(0, -1), reduced=False), "mtp")
    with pytest.raises(ValueError, match="no reduced vocabulary"):
        to_published(random_head(tiny_policy()), "mtp")
    with pytest.raises(ValueError, match="no MTP head"):
        from_published({"model.norm.weight": torch.ones(2)}, 3)

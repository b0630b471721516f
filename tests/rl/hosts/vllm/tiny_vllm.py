"""A tiny policy with drafters of ours and of vLLM's own kinds, and engines of it."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB = 32
PROMPT = tuple((7 * i + 3) % VOCAB for i in range(41))  # longer than a block of the prefix cache


def write_policy(folder: Path, seed: int = 0, *, tied: bool = False) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the least that vLLM's attention on a CPU takes
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
        initializer_range=0.15,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(policy: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()


def write_drafters(policy: Path, folder: Path) -> Path:
    """Untrained, but different from nothing: their drafts are accepted now and then."""
    from rollout_spec_mtp.checkpoint import save_drafter
    from rollout_spec_mtp.kinds import kind_of
    from rollout_spec_mtp.training.protocol import PolicyParts

    parts = PolicyParts.of(load(policy))
    torch.manual_seed(1)
    for kind, config, ids in (
        ("mtp", {"draft_length": 3, "hidden_layers": [1, -1]}, None),
        ("block", {"num_layers": 1, "block_size": 4, "target_layers": [0, 1], "mask_token_id": 0}, torch.arange(0, VOCAB, 2)),
    ):
        model = kind_of(kind).build(config, parts, ids)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.add_(0.03 * torch.randn_like(parameter))
        save_drafter(folder / kind, model, parts)
    return folder


METHODS = {
    "draft": "draft_model",
    "self": "draft_model",
    "useless": "draft_model",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "dflash": "dflash",
}


def native(kind: str, natives: Path, **config: Any) -> dict[str, Any]:
    """engine_args' options for one of vLLM's own drafters, three tokens at most; config: of vLLM's speculative_config."""
    return {"speculative_config": {"method": METHODS[kind], "model": str(natives / kind), "num_speculative_tokens": 3, **config}}


def write_natives(policy: Path, folder: Path) -> Path:
    """Drafters that vLLM runs itself: the policy, one near it, one that wants what it does not, two EAGLE heads and a DFlash block."""
    from rollout_spec_mtp.kinds import kind_of
    from rollout_spec_mtp.training.protocol import PolicyParts

    load(policy).save_pretrained(folder / "self")
    generator = torch.Generator().manual_seed(3)
    near, useless = load(policy), load(policy)
    with torch.no_grad():
        for parameter in near.parameters():
            if parameter.ndim > 1:
                parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator))
        useless.lm_head.weight.neg_()
    near.save_pretrained(folder / "draft")
    useless.save_pretrained(folder / "useless")
    write_eagle(policy, folder / "eagle")
    write_eagle3(policy, folder / "eagle3")
    torch.manual_seed(1)
    config = {"num_layers": 2, "block_size": 4, "target_layers": [0, 1], "mask_token_id": 0}
    block = kind_of("block").build(config, PolicyParts.of(load(policy)), torch.arange(0, VOCAB, 2))
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.ndim > 1:
                parameter.add_(0.03 * torch.randn_like(parameter))
    export = kind_of("block").export
    assert export is not None
    export(block, policy, folder / "dflash")
    return folder


def write_eagle(policy: Path, folder: Path) -> None:
    """The policy's last layer, not quite, on a mixture of the token's embedding and the policy's last state; and the policy's embedding."""
    model = load(policy)
    generator = torch.Generator().manual_seed(5)
    tensors = {"embed_tokens.weight": model.model.embed_tokens.weight.detach().clone()}
    for name, parameter in model.model.layers[-1].named_parameters():
        noise = 0.2 * parameter.std() * torch.randn(parameter.shape, generator=generator) if parameter.ndim > 1 else 0.0
        tensors[f"layers.0.{name}"] = (parameter + noise).detach()
    del tensors["layers.0.input_layernorm.weight"]  # an EAGLE head's first layer has none
    tensors["fc.weight"] = torch.cat([0.1 * torch.eye(model.config.hidden_size), torch.eye(model.config.hidden_size)], dim=1)
    _save_head(tensors, model, folder)


def write_eagle3(policy: Path, folder: Path) -> None:
    """A random layer over three of the policy's layers, with a head of its own over every other token."""
    model = load(policy)
    hidden, ids = model.config.hidden_size, torch.arange(0, VOCAB, 2)
    generator = torch.Generator().manual_seed(6)
    tensors = {f"midlayer.{name}": parameter.detach().clone() for name, parameter in model.model.layers[-1].named_parameters()}
    for name in ("q", "k", "v"):  # of the token's embedding beside the states
        weight = tensors[f"midlayer.self_attn.{name}_proj.weight"]
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat([weight, weight], dim=1)
    tensors |= {
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "norm.weight": model.model.norm.weight.detach().clone(),
        "fc.weight": torch.cat([torch.eye(hidden)] * 3, dim=1) + 0.05 * torch.randn(hidden, 3 * hidden, generator=generator),
        "lm_head.weight": model.lm_head.weight.detach()[ids].clone(),
        "d2t": ids - torch.arange(ids.numel()),
    }
    _save_head(tensors, model, folder, draft_vocab_size=ids.numel())


def _save_head(tensors: dict[str, Tensor], model: Any, folder: Path, **config: Any) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    own = {**model.config.to_dict(), "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"], **config}
    (folder / "config.json").write_text(json.dumps(own))


def write_mtp_policy(folder: Path) -> Path:
    """A random policy like MiMo, a Qwen2 whose checkpoint holds an MTP head: its last layer, not quite, behind a mixture of its inputs."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    torch.manual_seed(4)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    head = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    eye, norm = torch.eye(config.hidden_size), torch.ones(config.hidden_size)
    tensors |= {name.replace("layers.2", "mtp_layers.0"): tensor + 0.02 * torch.randn_like(tensor) for name, tensor in head.items()}
    tensors |= {f"model.mtp_layers.0.{name}_layernorm.weight": norm.clone() for name in ("token", "hidden", "final")}
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.cat([eye, 0.3 * eye], dim=1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@dataclass
class Running:
    """At most one engine."""

    policy: Path
    llm: Any = field(default=None)

    def start(self, *, options: dict[str, Any] | None = None, **settings: Any) -> Any:
        """vLLM's LLM; options as engine_args takes them, None without our speculation."""
        from vllm import LLM

        from rollout_spec_rl.vllm import engine_args

        self.stop()
        given = {
            "model": str(self.policy),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 128,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
            "block_size": 32,
            "seed": 0,
            "disable_log_stats": True,
            **({} if options is None else engine_args(**options)),
            **settings,
        }
        self.llm = LLM(**given)
        return self.llm

    def stop(self) -> None:
        self.llm = None
        gc.collect()


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def driver_of(llm: Any) -> Any:
    """What of ours drives the engine."""
    from rollout_spec_rl.vllm import patches

    return patches.driver_of(runner_of(llm))


def totals_of(llm: Any) -> dict[str, float]:
    """Our metrics since they were last asked for."""
    from rollout_spec_rl.verl.metrics import named

    return named(driver_of(llm).totals.take())


def sample(llm: Any, count: int, length: int, prompt: Sequence[int] = PROMPT, **params: Any) -> list[tuple[int, ...]]:
    from vllm import SamplingParams

    asked = SamplingParams(n=count, max_tokens=length, ignore_eos=True, detokenize=False, **params)
    outputs = llm.generate({"prompt_token_ids": list(prompt)}, asked, use_tqdm=False)
    return [tuple(output.token_ids) for output in outputs[0].outputs]

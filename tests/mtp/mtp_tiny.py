"""A tiny policy, its rollouts, and a drafter trained on them for a moment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

from rollout_spec.engine.load import make_runner
from rollout_spec.events import Event, EventSink
from rollout_spec.prompts import Prompt
from rollout_spec_mtp.configs import build
from rollout_spec_mtp.mtp.config import MTPConfig
from rollout_spec_mtp.mtp.model import MTPModel
from rollout_spec_mtp.training.collect import CollectConfig, Collector
from rollout_spec_mtp.training.config import TrainConfig
from rollout_spec_mtp.training.protocol import PolicyParts
from rollout_spec_mtp.training.run import make_trainer
from rollout_spec_mtp.training.shards import Rollout, RolloutSet
from rollout_spec_mtp.training.trainer import Trainer

VOCAB, HIDDEN = 61, 32
_CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}


def tiny_policy(kind: str = "qwen3", **changes: object) -> nn.Module:
    """Random weights, peaked enough that there is something to learn and flat enough that sampling matters."""
    torch.manual_seed(11)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    return AutoModelForCausalLM.from_config(_CONFIGS[kind](**{**sizes, **changes}), dtype=torch.float32).eval()


def save_policy(folder: Path, *, seed: int = 0) -> Path:
    """A tiny policy on disk, with an output head of that seed and a tokenizer whose word i is "wI"."""
    policy = tiny_policy()
    torch.manual_seed(seed)
    with torch.no_grad():
        policy.lm_head.weight.normal_(std=0.3)
    policy.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", pad_token="w0").save_pretrained(folder)
    return folder


def prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{i}", token_ids=(1, 3 + i % 50, 5 + i // 50, 7)[: 2 + i % 3], text=str(i)) for i in range(count)]


def collect(policy: nn.Module, folder: Path, *, layers: tuple[int, ...] = (-1,), count: int = 24, **changes: object) -> RolloutSet:
    settings: dict[str, object] = {"prompts": "tiny", "max_new_tokens": 24, "max_batch": 4, "storage": "float32", **changes}
    config = build(CollectConfig, settings, "collect")
    collector = Collector(
        config,
        runner=make_runner(policy, max_context=64),
        policy=PolicyParts.of(policy),
        prompts=prompts(count),
        hidden_layers=layers,
        folder=folder,
        model="tiny",
    )
    collector.run(lambda sequences, tokens: None)
    return RolloutSet(folder)


def train_config(**sections: dict[str, object]) -> TrainConfig:
    mapping: dict[str, object] = {
        "model": "tiny",
        "out": "unused",
        "collect": {"prompts": "tiny", **sections.pop("collect", {})},
        "drafter": {"settings": {"draft_length": 3}, **sections.pop("drafter", {})},
        "train": {
            "epochs": 8,
            "rows_per_step": 2,
            "micro_rows": 2,
            "row_tokens": 64,
            "lr": 5e-3,
            "warmup_steps": 3,
            "checkpoint_steps": 5,
            **sections.pop("train", {}),
        },
        "evaluate": {"held_out": 0.2, "every_steps": 10, **sections.pop("evaluate", {})},
        **sections,
    }
    return build(TrainConfig, mapping, "config")


class ListSink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def trainer_for(
    config: TrainConfig, policy: nn.Module, rollouts: RolloutSet, out: Path, sink: EventSink | None = None
) -> tuple[Trainer, MTPModel]:
    out.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    return make_trainer(
        config, PolicyParts.of(policy), rollouts, accelerator=accelerator, sink=ListSink() if sink is None else sink, out=out
    )


def random_head(policy: nn.Module, *, layers: tuple[int, ...] = (-1,), reduced: bool = True, draft_length: int = 3) -> MTPModel:
    torch.manual_seed(5)
    ids = torch.arange(0, VOCAB, 2) if reduced else None
    model = MTPModel(MTPConfig(draft_length=draft_length, hidden_layers=layers), PolicyParts.of(policy), ids)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # what starts at zero, as if it had been trained
                parameter.normal_(std=0.2)
    return model


def random_rollout(key: str, tokens: Sequence[int], num_prompt: int, *, layers: tuple[int, ...] = (-1,), seed: int = 0) -> Rollout:
    generator = torch.Generator().manual_seed(seed)
    length = len(tokens)
    return Rollout(
        key=key,
        token_ids=torch.tensor(tokens),
        num_prompt_tokens=num_prompt,
        hidden={layer: torch.randn(length - 1, HIDDEN, generator=generator) for layer in {-1, *layers}},
        target_lse=torch.randn(length - 1, generator=generator),
        target_entropies=torch.rand(length - 1, generator=generator),
    )

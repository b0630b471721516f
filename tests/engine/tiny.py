"""Tiny random models and scripted drafters for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext, DrafterNeeds, RequestView
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verdict import Verdict

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.4,  # peaked distributions: a wrong state shows in the tokens
}
# Layers: three with a recurrent state, then one that attends, then one with a state again.
HYBRID = {
    "num_hidden_layers": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "initializer_range": 0.2,  # recurrent layers amplify rounding: at .4 transformers differs from itself by .01 between chunks
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


def _qwen3_next(**sizes: object) -> PreTrainedConfig:
    return Qwen3NextConfig(**{**sizes, **HYBRID, **EXPERTS})


def _qwen3_5(**sizes: object) -> PreTrainedConfig:
    return Qwen3_5TextConfig(**{**sizes, **HYBRID})


CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
}
HYBRID_KINDS = ("qwen3_next", "qwen3_5")


def tiny_model(kind: str = "llama", *, tied: bool = False, **changes: object) -> nn.Module:
    torch.manual_seed(11)
    config = CONFIGS[kind](**{**SIZES, "tie_word_embeddings": tied, **changes})
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return model


class ScriptedDrafter:
    """Proposes what a function of a request's tokens says: [(token, parent), ...] in topological order."""

    name = "scripted"
    vocab_size: int | None = None

    def __init__(self, script: Callable[[Sequence[int]], Sequence[tuple[int, int]]], hidden_layers: tuple[int, ...] = ()) -> None:
        self._script = script
        self.needs = DrafterNeeds(hidden_layers=hidden_layers)
        self.contexts: list[DraftContext] = []
        self.verdicts: list[Verdict] = []
        self.finished: list[str] = []

    def start(self, request: RequestView) -> None:
        pass

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        self.contexts.append(context)
        trees = [list(self._script(request.token_ids)) for request in context.requests]
        # What the budget leaves no room for is cut, deepest nodes first: a chain's prefix or a tree's upper levels.
        for b, tree in enumerate(trees):
            depths: list[int] = []
            for _, parent in tree:
                depths.append(1 if parent < 0 else depths[parent] + 1)
            trees[b] = [node for node, depth in zip(tree, depths, strict=True) if depth <= int(budget.draft_lengths[b])]
        most = max(map(len, trees))
        tokens, parents = torch.zeros(len(trees), most, dtype=torch.int64), torch.full((len(trees), most), -1)
        for b, tree in enumerate(trees):
            for n, (token, parent) in enumerate(tree):
                tokens[b, n], parents[b, n] = token, parent
        return DraftTree(token_ids=tokens, parents=parents, num_nodes=torch.tensor([len(tree) for tree in trees]), draw=Draw.DETERMINISTIC)

    def observe(self, context: DraftContext, tree: DraftTree, verdict: Verdict) -> None:
        self.verdicts.append(verdict)

    def finish(self, request: RequestView) -> None:
        self.finished.append(request.request_id)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise ValueError("no weights")

    def target_updated(self, version: int) -> None:
        pass


def chain(tokens: Sequence[int]) -> list[tuple[int, int]]:
    return [(token, place - 1) for place, token in enumerate(tokens)]


def oracle(
    answers: dict[tuple[int, ...], Sequence[int]], length: int, wrong_at: int | None = None
) -> Callable[[Sequence[int]], list[tuple[int, int]]]:
    """A script that knows each prompt's full output and drafts its next tokens, one of them wrong if asked for."""

    def script(tokens: Sequence[int]) -> list[tuple[int, int]]:
        prompt = next(prompt for prompt in answers if tuple(tokens[: len(prompt)]) == prompt)
        done = len(tokens) - len(prompt)
        draft = list(answers[prompt][done : done + length])
        if wrong_at is not None and wrong_at < len(draft):
            draft[wrong_at] = (draft[wrong_at] + 1) % VOCAB
        return chain(draft)

    return script

"""From a model's name to an engine: weights, tokenizer, runner.

``ops`` decides how the forward is computed: TorchOps here, CpuOps of rollout_spec_kernels where the composition passes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rollout_spec.engine.decoder import FusedDecoder, is_fusable
from rollout_spec.engine.models import resolve_model
from rollout_spec.engine.ops import Ops, TorchOps
from rollout_spec.engine.runner import CausalLM, ModelRunner
from rollout_spec.engine.transformers_runner import TransformersRunner

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    path: Path
    module: CausalLM
    tokenizer: PreTrainedTokenizerBase

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special tokens left out."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


def load_model(name: str, dtype: str = "float32", report: Callable[[str], None] = lambda _: None) -> LoadedModel:
    """Weights and tokenizer of a known name, a local directory or a hub id. Raises ValueError that names what is missing."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    path = resolve_model(name, report=report)
    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(path)
    module = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=DTYPES[dtype]).eval()
    return LoadedModel(path=path, module=module, tokenizer=AutoTokenizer.from_pretrained(path))


def make_runner(module: CausalLM, *, max_context: int, ops: Ops | None = None, fused: bool | None = None) -> ModelRunner:
    """FusedDecoder where it knows the architecture (``fused`` forces or forbids it), else TransformersRunner."""
    chosen = TorchOps() if ops is None else ops
    if is_fusable(module.config) if fused is None else fused:
        return FusedDecoder(module, chosen, max_context)
    return TransformersRunner(module, chosen)

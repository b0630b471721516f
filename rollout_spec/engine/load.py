"""From a model's name to an engine: weights, tokenizer, runner.

``ops`` decides how the forward is computed: TorchOps here, CpuOps of rollout_spec_kernels where the composition passes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rollout_spec.engine.decoder import FusedDecoder, is_fusable
from rollout_spec.engine.hybrid import HybridRunner, is_hybrid
from rollout_spec.engine.models import resolve_model
from rollout_spec.engine.ops import Ops, TorchOps
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.runner import CausalLM, ModelRunner, StepInput
from rollout_spec.engine.transformers_runner import ATTENTION_NAME, TransformersRunner

# Relative distance of the probe's logits: a hundred times what another order of summation makes, a hundredth of what a wrong layer does.
_PROBE_LENGTH = 8
_PROBE_SPLIT = 5
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}

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


def token_texts(name: str) -> Callable[[Sequence[int]], list[str]]:
    """What makes of tokens their texts one by one, special tokens included, for a model by ``load_model``'s names; no weights are loaded.

    Raises ValueError or OSError when the model or its tokenizer is not there.
    """
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(name))
    return lambda token_ids: [str(tokenizer.decode([token])) for token in token_ids]


def make_runner(module: CausalLM, *, max_context: int, ops: Ops | None = None, fused: bool | None = None) -> ModelRunner:
    """FusedDecoder or HybridRunner where they know the architecture, else TransformersRunner; ``fused`` forces or forbids the first.

    Either way the runner's logits on a short probe must be the module's own. Raises ValueError otherwise: a model that scales or caps
    its logits, or attends in its own way, would be sampled from another law, silently.
    """
    chosen = TorchOps() if ops is None else ops
    probe = torch.arange(_PROBE_LENGTH) * 7 % module.config.vocab_size
    with torch.inference_mode():
        # transformers has no public way to ask. True when the module served a runner before.
        if module.config._attn_implementation == ATTENTION_NAME:  # noqa: SLF001
            module.set_attn_implementation("sdpa")
        wanted = module(probe[None].to(module.device), use_cache=False).logits[0].float()
    runner: ModelRunner
    if is_fusable(module.config) if fused is None else fused:
        runner = FusedDecoder(module, chosen, max_context)
    elif is_hybrid(module.config):
        runner = HybridRunner(module, chosen)
    else:
        runner = TransformersRunner(module, chosen)
    _check_probe(runner, probe, wanted, type(module).__name__)
    return runner


def _check_probe(runner: ModelRunner, probe: Tensor, wanted: Tensor, name: str) -> None:
    """In two parts, so that what a model keeps between forwards is looked at too."""
    kv, parts = runner.make_slots(1, probe.numel()), list[Tensor]()
    for begin, end in ((0, _PROBE_SPLIT), (_PROBE_SPLIT, probe.numel())):
        contexts = torch.tensor([begin])
        plan = AttentionPlan(row_offsets=torch.tensor([0, end - begin]), slots=torch.zeros_like(contexts), context_lengths=contexts)
        step = StepInput(token_ids=probe[begin:end], positions=torch.arange(begin, end), plan=plan, is_known=True)
        parts.append(runner.logits(runner.forward(step, kv).hidden).float())
    got = torch.cat(parts)
    error = float((got - wanted).norm() / wanted.norm())
    if not error <= _PROBE_TOLERANCE[runner.dtype]:
        raise ValueError(
            f"{name}: the embedded engine's logits differ from the model's own by a relative {error:.2g} on a probe; the architecture does "
            "something to logits or attention that the engine does not know, and would not be sampled exactly"
        )

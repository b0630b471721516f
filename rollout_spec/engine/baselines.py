"""Other engines to measure against: transformers' generate and vLLM, on the same requests.

Shape legend: B requests, T tokens (padded).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from rollout_spec.engine.request import Request
from rollout_spec.engine.runner import CausalLM


class Baseline(Protocol):
    name: str

    def generate(self, requests: Sequence[Request]) -> int:
        """Run the requests (same length for all, end of sequence ignored) and return the number of tokens generated."""


class TransformersBaseline:
    """``model.generate`` on a left-padded batch with the same sampling."""

    name = "hf"

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def generate(self, requests: Sequence[Request]) -> int:
        longest = max(len(request.prompt_token_ids) for request in requests)
        input_ids = torch.zeros(len(requests), longest, dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for row, request in enumerate(requests):
            input_ids[row, longest - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
            mask[row, longest - len(request.prompt_token_ids) :] = 1
        length, temperature = requests[0].max_new_tokens, requests[0].sampling.temperature
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {"do_sample": False}
        with torch.inference_mode():
            out = self._model.generate(
                input_ids, attention_mask=mask, max_new_tokens=length, min_new_tokens=length, pad_token_id=0, **sampling
            )
        return int(out[:, longest:].numel())


class VllmBaseline:
    """vLLM's offline LLM in this process, without speculation, eager, the same threads."""

    name = "vllm"

    def __init__(self, path: Path, *, dtype: str, max_context: int, max_batch: int, load: Callable[[], Any]) -> None:
        self._vllm = load()
        self._llm = self._vllm.LLM(
            model=str(path),
            dtype=dtype,
            max_model_len=max_context,
            max_num_seqs=max_batch,
            enforce_eager=True,
            disable_log_stats=True,
        )

    def generate(self, requests: Sequence[Request]) -> int:
        params = self._vllm.SamplingParams(
            temperature=requests[0].sampling.temperature, max_tokens=requests[0].max_new_tokens, ignore_eos=True, detokenize=False
        )
        outputs = self._llm.generate([{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

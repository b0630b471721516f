"""StepRows: the target's rows of one vLLM step, processed as vLLM would, for our verifiers.

A request's rows lie together: its root, then one for each token that was drafted. Rows of padding behind them are never asked for.

Shape legend: B requests, R rows, V vocabulary, Q rows asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout_spec.engine.ops import Ops
from rollout_spec.sampling import first_argmax
from rollout_spec.verify import AllRows, TokenScores


@dataclass(frozen=True, kw_only=True, eq=False)
class Processed:
    """Logits whose softmax is each row's target, except that greedy rows (inv_temperature 0 stands for them) are not yet a point mass."""

    logits: Tensor  # [R, V]; possibly vLLM's own raw ones, not to be modified
    inv_temperatures: Tensor  # [R] float32 still to be multiplied in
    greedy: Tensor  # [R] bool


def is_plain(metadata: Any) -> bool:
    """True if temperature is all that vLLM's SamplingMetadata asks for."""
    return (
        metadata.no_penalties
        and metadata.top_k is None
        and metadata.top_p is None
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and all(getattr(processor, "min_toks", None) == {} for processor in metadata.logitsprocs.non_argmax_invariant)
        and metadata.thinking_budget_state_holder is None
    )


def temperatures_of(metadata: Any, like: Tensor) -> Tensor:
    """[B] float32, 0 = greedy; vLLM keeps none where all are greedy."""
    num_requests = like.shape[0]
    if metadata.temperature is None:
        return torch.zeros(num_requests, device=like.device)
    temperatures: Tensor = metadata.temperature[:num_requests].to(torch.float32)
    return temperatures


def process(logits: Tensor, spec: Any, metadata: Any, sampler: Any) -> Processed:
    """All rows of a step. spec: vLLM's SpecDecodeMetadata, None if nothing was drafted; sampler: its RejectionSampler, whose own
    processors are used."""
    num_drafted = [0] * logits.shape[0] if spec is None else spec.num_draft_tokens
    requests = torch.arange(len(num_drafted), device=logits.device)
    counts = torch.tensor(num_drafted, device=logits.device) + 1
    temperatures = temperatures_of(metadata, requests).repeat_interleave(counts)
    greedy = temperatures == 0
    if is_plain(metadata):
        return Processed(logits=logits, inv_temperatures=torch.where(greedy, 1.0, 1.0 / temperatures), greedy=greedy)
    from vllm.v1.sample.rejection_sampler import apply_sampling_constraints

    out = torch.empty_like(logits, dtype=torch.float32)
    last = requests if spec is None else spec.bonus_logits_indices
    if spec is not None and spec.target_logits_indices.numel():
        rows = sampler.apply_logits_processors(logits[spec.target_logits_indices].float(), metadata, spec)
        out[spec.target_logits_indices] = apply_sampling_constraints(rows, spec.cu_num_draft_tokens, metadata)
    rows = sampler.sampler.apply_logits_processors(logits[last].float(), metadata, predict_bonus_token=spec is not None)
    out[last] = apply_sampling_constraints(rows, (requests + 1).to(torch.int32), metadata)
    return Processed(logits=out, inv_temperatures=torch.ones_like(temperatures), greedy=greedy)


class StepRows:
    """A rollout_spec.verify.TargetRows."""

    def __init__(self, raw: Tensor, processed: Processed, roots: Tensor, ops: Ops) -> None:
        """raw [R, V] the model's own logits; roots [B] int64 the requests' first rows. Raises ValueError for logits that are no law."""
        self.batch_size, self.vocab_size = roots.numel(), raw.shape[1]
        self._raw, self._roots, self._ops = raw, roots, ops
        stats = ops.log_softmax_stats(processed.logits, processed.inv_temperatures)
        self._log_probs, self._entropies = stats.log_probs, stats.entropies
        if not bool(self._entropies.isfinite().all()):
            raise ValueError("the policy's logits are not finite (NaN or infinity): check the weights of the last update")
        greedy = processed.greedy.nonzero()[:, 0]
        self._raw_is_processed = processed.logits is raw and not greedy.numel() and bool((processed.inv_temperatures == 1).all())
        self._soft = self._log_probs  # before greedy rows became point masses
        if greedy.numel():
            self._soft = self._log_probs.clone()
            best = first_argmax(self._log_probs[greedy])
            self._log_probs[greedy] = torch.full_like(self._log_probs[greedy], -torch.inf).scatter_(1, best[:, None], 0.0)
            self._entropies[greedy] = 0.0

    @property
    def num_rows(self) -> int:
        return self._log_probs.shape[0]

    def log_probs(self, requests: Tensor, nodes: Tensor) -> Tensor:
        """[Q, V] float32."""
        return self._log_probs[self._roots[requests] + nodes + 1]

    def all_rows(self, *, needed: bool) -> AllRows:  # noqa: ARG002  # they are there
        return AllRows(log_probs=self._log_probs, roots=self._roots, entropies=self._entropies if self._raw_is_processed else None)

    def draw(self, log_probs: Tensor, uniforms: Tensor) -> Tensor:
        return self._ops.inverse_cdf(log_probs, uniforms)

    def score(self, requests: Tensor, nodes: Tensor, token_ids: Tensor) -> TokenScores:
        """Log-probabilities of tokens sampled at the nodes, and the entropy there, each [Q] float32."""
        rows = self._roots[requests] + nodes + 1
        processed = raw = self._log_probs[rows, token_ids]
        if not self._raw_is_processed:
            logits = self._raw[rows].float()
            raw = logits.gather(1, token_ids[:, None])[:, 0] - logits.logsumexp(dim=-1)
        return TokenScores(raw_logprobs=raw, processed_logprobs=processed, entropies=self._entropies[rows])

    def values(self, rows: Tensor, mode: str) -> Tensor:
        """[Q, V] float32 what vLLM's ``logprobs_mode`` calls log-probabilities, at rows [Q]."""
        if mode == "processed_logprobs" or (mode == "raw_logprobs" and self._raw_is_processed):
            return self._soft[rows]
        raw = self._raw[rows].float()
        return raw if mode == "raw_logits" else raw.log_softmax(dim=-1)

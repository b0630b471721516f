"""Logits -> target distribution: every logits processor, applied row by row with that row's own history.

Shape legend: R rows (one a tree node or request), V vocabulary, T tokens of a history.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_spec.penalties import Penalties, RowHistory, penalise
from rollout_spec.truncation import Truncations, truncate_

__all__ = [
    "LogitsProcessor",
    "RowHistory",
    "SamplingParams",
    "bad_rows",
    "first_argmax",
    "is_plain",
    "log_target",
    "needs_history",
    "only_truncates",
    "process_logits",
    "sample",
    "truncations",
]

# (history [T] int64: prompt + path to this node, logits [V] float32) -> logits [V]; must not modify its inputs.
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled from the model's logits; the order of application is vLLM's (see process_logits)."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt + output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        for name, holds, wanted in (
            ("temperature", self.temperature >= 0, ">= 0 (0 = greedy)"),
            ("top_k", self.top_k >= 0, ">= 0 (0 = off)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1] (1 = off)"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1) (0 = off)"),
            ("repetition_penalty", self.repetition_penalty > 0, "> 0 (1 = off)"),
            ("presence_penalty", True, "finite (0 = off)"),
            ("frequency_penalty", True, "finite (0 = off)"),
        ):
            value = getattr(self, name)
            _require(holds and math.isfinite(value), name, wanted, value)
        for token_id, bias in self.logit_bias.items():
            _require(math.isfinite(bias), f"logit_bias[{token_id}]", "finite (to forbid a token use banned_token_ids)", bias)
        # Own copies: a list or dict changed later by the caller must not change a running request.
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        object.__setattr__(self, "banned_token_ids", tuple(self.banned_token_ids))
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
            _require(len(self.allowed_token_ids) > 0, "allowed_token_ids", "None (all) or at least one id", self.allowed_token_ids)
            left = set(self.allowed_token_ids) - set(self.banned_token_ids)
            _require(len(left) > 0, "banned_token_ids", "such that an allowed token is left", self.banned_token_ids)
        ids = (*self.logit_bias, *(self.allowed_token_ids or ()), *self.banned_token_ids)
        _require(min(ids, default=0) >= 0, "token ids in logit_bias, allowed_token_ids and banned_token_ids", ">= 0", min(ids, default=0))

    @functools.cached_property
    def _hash(self) -> int:
        bias = tuple(sorted(self.logit_bias.items()))
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        masks = (self.allowed_token_ids or (), self.banned_token_ids, len(self.logits_processors))
        return hash((self.temperature, self.top_k, self.top_p, self.min_p, *penalties, bias, *masks))

    def __hash__(self) -> int:
        return self._hash


def needs_history(params: SamplingParams) -> bool:
    """True if these parameters look at the tokens before the row."""
    return _penalties(params).any or len(params.logits_processors) > 0


@functools.lru_cache(maxsize=1024)  # asked for every row of every round
def is_plain(params: SamplingParams) -> bool:
    """True if the target is softmax(logits / temperature) with a positive temperature and nothing else."""
    return only_truncates(params) and not _truncates(params)


@functools.lru_cache(maxsize=1024)
def only_truncates(params: SamplingParams) -> bool:
    """True if the target is softmax(logits / temperature) with a positive temperature over the support of min-p, top-k and top-p."""
    return params.temperature > 0 and not (needs_history(params) or _has_static_bias(params))


def truncations(params: Sequence[SamplingParams]) -> Truncations:
    """What ``process_logits`` does to rows that ``only_truncates`` is true of."""
    return Truncations(
        temperatures=torch.tensor([p.temperature for p in params], dtype=torch.float32),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64),
    )


def process_logits(logits: Tensor, params: Sequence[SamplingParams], histories: Sequence[RowHistory] | None = None) -> Tensor:
    """Logits whose softmax is the target distribution, row by row.

    logits [R, V] float32, params R, histories R (may be None if no row ``needs_history``) -> [R, V] float32. The input is not
    modified; if no row asks for anything the input itself is returned, so treat the result as read-only. A row depends on its
    own logits, parameters and history only, bit for bit.

    Order (that of vLLM's V1 sampler, ``vllm/v1/sample/sampler.py``; user processors stand where vLLM has its processors that
    can change the argmax):

    1. allowed_token_ids, banned_token_ids: -inf;  2. logit_bias: added;  3. logits_processors, in order;
    4. repetition penalty r over prompt + output: ``l / r if l > 0 else l * r``; frequency, then presence penalty over the
       output: ``l - frequency * count - presence * [count > 0]`` (on raw logits: before temperature);
    5. temperature 0: 0 at the argmax (lowest id on ties), -inf elsewhere, and the end; otherwise ``l / temperature``;
    6. min-p, top-k, top-p (``truncation.truncate_``), each renormalising over what the one before kept.

    A row without any finite maximum (see ``bad_rows``) stays bad: it is never turned into a distribution.

    Raises ValueError for logits in low precision, mismatching lengths, a missing history, a token id outside the vocabulary
    (in parameters or history) and a user processor that returns another shape.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logits must be float32 (or float64), got {logits.dtype}: processors in low precision would not be exact")
    if len(params) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits but {len(params)} sampling parameters")
    if histories is not None and len(histories) != len(params):
        raise ValueError(f"{len(params)} rows but {len(histories)} histories")
    groups = _group_rows(params)
    if all(is_plain(p) for p in groups):
        return logits if all(p.temperature == 1 for p in groups) else logits / _temperature_column(params, logits)
    if histories is None and any(needs_history(p) for p in groups):
        raise ValueError("penalties and user logits processors need the histories of their rows; none were given")
    if len(groups) == 1:
        return _process_group(logits, params[0], histories)
    out = logits.clone()
    for group_params, rows in groups.items():
        if is_plain(group_params) and group_params.temperature == 1:
            continue
        index = torch.tensor(rows, device=logits.device)
        out[index] = _process_group(logits[index], group_params, None if histories is None else [histories[row] for row in rows])
    return out


def log_target(logits: Tensor, params: Sequence[SamplingParams], histories: Sequence[RowHistory] | None = None) -> Tensor:
    """[R, V] float32 log-probabilities of the target: log-softmax of ``process_logits``. Bad rows are NaN."""
    return process_logits(logits, params, histories).log_softmax(-1)


def bad_rows(logits: Tensor) -> Tensor:
    """[R] bool: rows of logits [R, V] that define no distribution: they hold a NaN, +inf, or nothing above -inf.

    One pass: exactly then the maximum of the row is not finite.
    """
    return ~logits.amax(-1).isfinite()


def sample(log_probs: Tensor, gumbel: Tensor) -> Tensor:
    """[R] int64 ``argmax_v(log_probs + gumbel)``, lowest id on ties: one exact draw a row (Gumbel-max; Maddison et al. 2014).

    log_probs [R, V], gumbel [R, V] finite. Logits whose softmax is the distribution do as well as log-probabilities.
    """
    return first_argmax(log_probs + gumbel)


def first_argmax(scores: Tensor) -> Tensor:
    """[R] int64 index of the maximum of scores [R, V], lowest on ties (the first NaN if there is one)."""
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(scores.numpy().argmax(-1))  # ~15 x faster than torch's on the CPU, with the same rule
    return scores.argmax(-1)


def _require(condition: bool, name: str, wanted: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{name} must be {wanted}, got {got}")


def _penalties(params: SamplingParams) -> Penalties:
    return Penalties(repetition=params.repetition_penalty, frequency=params.frequency_penalty, presence=params.presence_penalty)


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _has_static_bias(params: SamplingParams) -> bool:
    return bool(params.logit_bias) or params.allowed_token_ids is not None or len(params.banned_token_ids) > 0


def _group_rows(params: Sequence[SamplingParams]) -> dict[SamplingParams, list[int]]:
    """Rows by equal parameters. Rows of a request share one object, so most rows cost an id() only."""
    by_id: dict[int, list[int]] = {}
    groups: dict[SamplingParams, list[int]] = {}
    for row, row_params in enumerate(params):
        rows = by_id.get(id(row_params))
        if rows is None:
            rows = by_id[id(row_params)] = groups.setdefault(row_params, [])
        rows.append(row)
    return groups


def _temperature_column(params: Sequence[SamplingParams], like: Tensor) -> Tensor:
    """[R, 1]. Always a tensor: CUDA divides by a host scalar with its reciprocal, and bits would depend on the batch's composition."""
    return torch.tensor([[p.temperature] for p in params], dtype=like.dtype, device=like.device)


def _process_group(logits: Tensor, params: SamplingParams, histories: Sequence[RowHistory] | None) -> Tensor:
    """process_logits for rows that share their parameters; may return ``logits`` itself, never modifies it."""
    x = logits
    if _has_static_bias(params):
        x = x + _static_bias(params, x.shape[1], x.device)
    if params.logits_processors:
        assert histories is not None
        x = torch.stack([_run_processors(row, params.logits_processors, history) for row, history in zip(x, histories, strict=True)])
    penalties = _penalties(params)
    if penalties.any:
        assert histories is not None
        x = penalise(x, histories, penalties)
    if params.temperature == 0:
        return _greedy(x)
    if params.temperature != 1:
        x = x / _temperature_column([params] * x.shape[0], x)
    if _truncates(params):
        x = truncate_(x.clone() if x is logits else x, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    return x


@functools.lru_cache(maxsize=64)
def _static_bias(params: SamplingParams, vocab_size: int, device: torch.device) -> Tensor:
    """[V]: 0, -inf where a token is not allowed, logit_bias elsewhere."""
    for name in ("logit_bias", "allowed_token_ids", "banned_token_ids"):
        largest = max(getattr(params, name) or (), default=0)
        if largest >= vocab_size:
            raise ValueError(f"{name} names token {largest}, outside the vocabulary of {vocab_size}")
    bias = torch.zeros(vocab_size)
    if params.logit_bias:
        bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()))
    if params.allowed_token_ids is not None:
        forbidden = torch.ones(vocab_size, dtype=torch.bool)
        forbidden[list(params.allowed_token_ids)] = False
        bias[forbidden] = -math.inf
    bias[list(params.banned_token_ids)] = -math.inf
    return bias.to(device)


def _run_processors(row: Tensor, processors: Sequence[LogitsProcessor], history: RowHistory) -> Tensor:
    tokens = history.tensor().to(row.device)
    for processor in processors:
        processed = processor(tokens, row)
        if processed.shape != row.shape:
            raise ValueError(f"logits processor {processor!r} returned shape {tuple(processed.shape)} for {tuple(row.shape)}")
        row = processed.to(row.dtype)
    return row


def _greedy(x: Tensor) -> Tensor:
    """0 at the first argmax, -inf elsewhere; a bad row gets NaN there (inf - inf), so that it cannot pass for a point mass."""
    best = first_argmax(x)[:, None]
    value = x.gather(1, best)
    return torch.full_like(x, -math.inf).scatter_(1, best, value - value)

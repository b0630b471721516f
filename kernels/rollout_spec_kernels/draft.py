"""FusedDraftHead: a whole round of a recurrent draft head in one C++ call.

It computes what ``DraftHead`` does over ``CpuOps``: the same hidden states and logits, bit for bit. What it leaves out is the Python and
the small tensors between a step's operations, which took as long as the step itself.

Shape legend: B requests, R rows, T tapped layers, K steps, H hidden size, d head size, V vocabulary, Vd draft vocabulary, S slots,
Hkv key/value heads, C slot capacity.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout_spec.engine.draft_head import ChainDraws, Chains, DraftHead, HeadCache, HeadWeights, NewRows
from rollout_spec.engine.stack import Linear
from rollout_spec.sampling import SamplingParams, is_plain
from rollout_spec_kernels.decoder import DecoderStack
from rollout_spec_kernels.library import checked, is_bfloat16, library
from rollout_spec_kernels.linear import PackedLinear
from rollout_spec_kernels.noise import words

if TYPE_CHECKING:
    from rollout_spec.engine.ops import Ops

_OUTSIDE = -1  # rs_draft_chains: an index reaches outside of what it indexes


class _Head(ctypes.Structure):
    """rs::Head of draft.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("is_bf16", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_width")),
        *((name, ctypes.c_int64) for name in ("num_taps", "vocab", "draft_vocab")),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
        ("tap_norms", ctypes.c_void_p),
        *((f"{name}_{part}", ctypes.c_void_p) for name in ("tap_fc", "fc", "head") for part in ("packed", "bias")),
        *((name, ctypes.c_void_p) for name in ("embed_norm", "hidden_norm", "final_norm", "embedding", "token_ids", "layer")),
    ]


class _Round(ctypes.Structure):
    """rs::Round of draft.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("threads", "num_requests", "num_rows", "num_steps", "num_slots", "capacity")),
        *((name, ctypes.c_int64) for name in ("slot_stride", "head_stride", "coupled")),
        *((name, ctypes.c_void_p) for name in ("taps", "tokens", "row_offsets", "slots", "contexts", "cos", "sin", "k_cache", "v_cache")),
        *((name, ctypes.c_void_p) for name in ("states", "lengths", "inv_temperatures", "seeds", "positions", "drawn", "probs")),
    ]


class FusedDraftHead(DraftHead):
    """Truncated laws (top-k, top-p, min-p) are left to the readable form, on this one's absorption."""

    def __init__(self, ops: Ops, weights: HeadWeights) -> None:
        super().__init__(ops, weights)
        assert isinstance(self._stack, DecoderStack)
        self._library = library()
        self._dtype, self._num_taps = weights.embedding.dtype, max(1, len(weights.tap_norms))
        _check_weights(weights, self._stack.hidden_size)
        self._tap_norms = _addresses(weights.tap_norms)
        self._head = _head_of(weights, self._stack)
        if weights.tap_norms:
            self._head.tap_norms = ctypes.addressof(self._tap_norms)
        self._checked_cache: HeadCache | None = None

    def absorb(self, rows: NewRows, cache: HeadCache) -> Tensor:
        """[B, H]: the state after each request's last new row, zeros where it has none."""
        num_requests = rows.plan.slots.shape[0]
        states = torch.empty(num_requests, self._head.hidden_size, dtype=self._dtype)
        nobody = torch.zeros(num_requests, dtype=torch.int64)
        self._run(rows, cache, _Round(states=states.data_ptr(), lengths=nobody.data_ptr(), drawn=nobody.data_ptr()))
        return states

    def draw_chains(self, rows: NewRows, cache: HeadCache, draws: ChainDraws) -> Chains:
        """As DraftHead's: tokens may differ where a uniform, or a race, is decided by the last bits of a probability."""
        if any(_is_truncated(own) for own in draws.sampling):
            return super().draw_chains(rows, cache, draws)
        num_requests, num_steps = rows.plan.slots.shape[0], draws.num_steps
        if not len(draws.sampling) == len(draws.seeds) == len(draws.positions) == num_requests:
            raise ValueError(f"{num_requests} requests need as many sampling parameters, seeds and positions")
        lengths = checked("lengths", draws.lengths, torch.int64, (num_requests,))
        inverse = (ctypes.c_float * num_requests)(*(1.0 / own.temperature if own.temperature > 0 else 0.0 for own in draws.sampling))
        seeds, positions = words(draws.seeds), words(draws.positions)
        drawn = torch.empty(num_requests, num_steps, dtype=torch.int64)
        probs = None if draws.coupled else torch.empty(num_requests, num_steps, self._head.draft_vocab)
        work = _Round(
            num_steps=num_steps,
            coupled=draws.coupled,
            lengths=lengths.data_ptr(),
            inv_temperatures=ctypes.addressof(inverse),
            seeds=ctypes.addressof(seeds),
            positions=ctypes.addressof(positions),
            drawn=drawn.data_ptr(),
            probs=None if probs is None else probs.data_ptr(),
        )
        self._run(rows, cache, work)
        return Chains(token_ids=drawn, probs=probs)

    def _run(self, rows: NewRows, cache: HeadCache, work: _Round) -> None:
        """Absorb the rows and draw what ``work`` says; its other fields are filled in here."""
        head, plan, num_rows = self._head, rows.plan, rows.token_ids.shape[0]
        num_requests = plan.slots.shape[0]
        if cache is not self._checked_cache:
            self._check_cache(cache)
        if len(rows.taps) != self._num_taps:
            raise ValueError(f"this head reads {self._num_taps} tapped layers; got {len(rows.taps)}")
        taps = [checked("taps", tap, self._dtype, (num_rows, head.hidden_size)) for tap in rows.taps]
        tokens = checked("token_ids", rows.token_ids, torch.int64, (num_rows,))
        row_offsets = checked("row_offsets", plan.row_offsets, torch.int64, (num_requests + 1,))
        slots = checked("slots", plan.slots, torch.int64, (num_requests,))
        contexts = checked("context_lengths", plan.context_lengths, torch.int64, (num_requests,))
        tap_addresses = _addresses(taps)
        _, work.num_slots, _, work.capacity, _ = cache.k.shape
        _, work.slot_stride, work.head_stride, _, _ = cache.k.stride()
        work.threads, work.num_requests, work.num_rows = torch.get_num_threads(), num_requests, num_rows
        work.taps, work.tokens = ctypes.addressof(tap_addresses), tokens.data_ptr()
        work.row_offsets, work.slots, work.contexts = row_offsets.data_ptr(), slots.data_ptr(), contexts.data_ptr()
        work.k_cache, work.v_cache = cache.k.data_ptr(), cache.v.data_ptr()
        work.cos, work.sin = cache.cos.data_ptr(), cache.sin.data_ptr()
        status = self._library.rs_draft_chains(ctypes.byref(head), ctypes.byref(work))
        if status == _OUTSIDE:
            where = f"{work.num_slots} slots of {work.capacity} tokens and a vocabulary of {head.vocab}"
            raise ValueError(f"rows, drafts and tokens must stay inside {where}, and a request that drafts needs a new row")
        if status:
            raise ValueError(f"no distribution to draw from: the draft head's logits of request {status - 1} are not finite")

    def _check_cache(self, cache: HeadCache) -> None:
        _, num_slots, _, capacity, head_dim = cache.k.shape
        cells, table = (1, num_slots, self._head.num_kv_heads, capacity, self._head.head_dim), (capacity, head_dim)
        for name, tensor, shape in (("k", cache.k, cells), ("v", cache.v, cells), ("cos", cache.cos, table), ("sin", cache.sin, table)):
            if checked(name, tensor, self._dtype, shape) is not tensor:
                raise ValueError(f"{name} must be contiguous")
        self._checked_cache = cache


def _head_of(weights: HeadWeights, stack: DecoderStack) -> _Head:
    projections: dict[str, int | None] = {}
    for name in ("tap_fc", "fc", "head"):
        linear = getattr(weights, name)
        if isinstance(linear, PackedLinear):
            projections[f"{name}_packed"], projections[f"{name}_bias"] = linear.pointers
    return _Head(
        is_bf16=is_bfloat16("embedding", weights.embedding),
        hidden_size=stack.hidden_size,
        num_heads=stack.num_heads,
        num_kv_heads=stack.num_kv_heads,
        head_dim=stack.head_dim,
        mlp_width=stack.mlp_width,
        num_taps=len(weights.tap_norms),
        vocab=weights.embedding.shape[0],
        draft_vocab=weights.head.out_features,
        eps=stack.eps,
        scale=stack.scale,
        embed_norm=weights.embed_norm.data_ptr(),
        hidden_norm=weights.hidden_norm.data_ptr(),
        final_norm=weights.final_norm.data_ptr(),
        embedding=weights.embedding.data_ptr(),
        token_ids=None if weights.token_ids is None else weights.token_ids.data_ptr(),
        layer=ctypes.addressof(stack.pointers),
        **projections,
    )


def _check_weights(weights: HeadWeights, hidden: int) -> None:
    """Raises ValueError naming what has another shape or dtype than the head's, or was packed by other operations."""
    dtype, vocab, num_taps, ids = weights.embedding.dtype, weights.embedding.shape[0], len(weights.tap_norms), weights.token_ids
    tensors: dict[str, tuple[Tensor, torch.dtype, Sequence[int]]] = {
        f"tap_norms[{i}]": (norm, dtype, (hidden,)) for i, norm in enumerate(weights.tap_norms)
    }
    tensors |= {"embed_norm": (weights.embed_norm, dtype, (hidden,)), "hidden_norm": (weights.hidden_norm, dtype, (hidden,))}
    if ids is not None:
        tensors["token_ids"] = (ids, torch.int64, ids.shape[:1])
    for name, (tensor, wanted, shape) in tensors.items():
        if checked(name, tensor, wanted, shape) is not tensor:
            raise ValueError(f"{name} must be contiguous")
    if checked("embedding", weights.embedding, dtype, (vocab, hidden)) is not weights.embedding:
        raise ValueError("embedding must be contiguous")
    if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(f"token_ids reach outside the vocabulary of {vocab}")
    if (weights.tap_fc is None) is not (num_taps == 0):
        raise ValueError("tap_fc and tap_norms come together")
    if weights.tap_fc is not None:
        _check_linear("tap_fc", weights.tap_fc, (hidden, num_taps * hidden), dtype)
    _check_linear("fc", weights.fc, (hidden, 2 * hidden), dtype)
    _check_linear("head", weights.head, (vocab if ids is None else ids.numel(), hidden), torch.float32)


def _check_linear(name: str, linear: Linear, shape: tuple[int, int], out_dtype: torch.dtype) -> None:
    if not isinstance(linear, PackedLinear):
        raise ValueError(f"{name} was packed by other operations ({type(linear).__name__}); pack it with CpuOps")
    got = (linear.out_features, linear.in_features)
    if got != shape or linear.out_dtype is not out_dtype:
        raise ValueError(f"{name} must be {shape} in {out_dtype}; got {got} in {linear.out_dtype}")


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _is_truncated(own: SamplingParams) -> bool:
    return own.temperature > 0 and not is_plain(own)

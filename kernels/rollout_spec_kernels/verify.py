"""verify: rollout_spec.verify.verify with chains, and plain decoding, in one C++ call.

Shape legend: B requests, N nodes, R target rows, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec.tree import DraftTree
from rollout_spec.verdict import Verdict
from rollout_spec.verify import EXACT_ON, AllRows, CounterNoise, Scheme, TargetRows, VerifyNoise, with_scores
from rollout_spec.verify import verify as readable_verify
from rollout_spec.verify.ratio import SUM_TOLERANCE
from rollout_spec_kernels.library import library
from rollout_spec_kernels.noise import CpuNoise, words

# rs::Scheme of verify.cpp
_CODES = {Scheme.REJECTION: 0, Scheme.BLOCK: 1, Scheme.EXACT_MATCH: 2, Scheme.GUMBEL: 3}
_RATIO = (Scheme.REJECTION, Scheme.BLOCK)
# Sums here are float64, the readable verifier's float32: whatever is close to its limit is left to it.
_SUM_TOLERANCE = 0.9 * SUM_TOLERANCE


class _Verification(ctypes.Structure):
    """rs::Verification of verify.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("scheme", "threads", "batch", "max_nodes", "num_rows", "vocab", "draft_vocab")),
        ("sum_tolerance", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("tokens", "lengths", "draft_probs", "draft_token_ids")),
        *((name, ctypes.c_void_p) for name in ("log_probs", "target_entropies", "roots")),
        *((name, ctypes.c_void_p) for name in ("seeds", "positions", "accept", "recover")),
        *((name, ctypes.c_void_p) for name in ("path", "num_accepted", "next_tokens", "is_bonus", "accept_probs", "scores", "entropies")),
    ]


def verify(tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict:
    """The scheme's verdict, as rollout_spec.verify.verify gives it (signature, refusals, noise and law are its).

    Chains under rejection, block, exact match and Gumbel, and trees without nodes, are verified in C++ in one pass over the target's
    rows (float32, on the CPU); every other tree, scheme, dtype and device, and every input that the C++ declines, goes to the readable
    verifier, which answers or says what is wrong.

    For the same noise the two decide the same except where a uniform lies within float rounding of its threshold: probabilities are
    float32 in both, summed here in float64, there in float32. Paths are padded to N here, to the longest chain there.
    """
    verdict = verify_chains(tree, target, noise, scheme)
    return readable_verify(tree, target, noise, scheme) if verdict is None else verdict


def verify_chains(tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict | None:
    """The verdict, or None where this is not a batch for C++."""
    if tree.max_nodes == 0 and scheme is not Scheme.GUMBEL:
        scheme = Scheme.EXACT_MATCH  # without a draft every scheme draws from the target
    if scheme not in _CODES or tree.batch_size != target.batch_size or not _fits(tree, target.vocab_size, scheme):
        return None
    drawn = _Noise.of(tree, noise, scheme)
    if drawn is None:
        return None
    # Block verification looks at every row; the others stop at the first refusal, and rows behind it are better not computed.
    rows = target.all_rows(needed=scheme is Scheme.BLOCK)
    if rows is None or rows.log_probs.dtype is not torch.float32 or not rows.log_probs.is_cpu:
        return None
    verdict = _call(tree, rows, drawn, scheme)
    if verdict is None or rows.entropies is not None:
        return verdict
    return with_scores(verdict, tree, target)


def _fits(tree: DraftTree, vocab_size: int, scheme: Scheme) -> bool:
    """True if the scheme is exact on the tree and the tree is one that C++ reads: chains of int64 tokens on the CPU, float32 q."""
    if tree.max_nodes == 0:
        return tree.num_nodes.is_cpu and tree.num_nodes.dtype is torch.int64
    if tree.draw not in EXACT_ON[scheme] or not tree.token_ids.is_cpu:
        return False
    if not tree.token_ids.dtype is tree.num_nodes.dtype is torch.int64:
        return False
    if scheme in _RATIO:
        probs, token_ids = tree.draft_probs, tree.draft_token_ids
        if probs is None or probs.dtype is not torch.float32 or not probs.is_cpu:
            return False
        if token_ids is None and probs.shape[2] != vocab_size:
            return False
        if token_ids is not None and not (token_ids.dtype is torch.int64 and token_ids.is_cpu):
            return False
    return tree.is_chain()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Noise:
    """A round's noise as C++ takes it: keys if it can draw the numbers itself, else the uniforms of every depth."""

    seeds: ctypes.Array[ctypes.c_uint64] | None = None  # [B]
    positions: ctypes.Array[ctypes.c_uint64] | None = None  # [B]
    accept: Tensor | None = None  # [B, N] float64
    recover: Tensor | None = None  # [B, N + 1] float64

    @staticmethod
    def of(tree: DraftTree, noise: VerifyNoise, scheme: Scheme) -> _Noise | None:
        """None for Gumbel noise that C++ would draw with other bits."""
        if isinstance(noise, CounterNoise) and (scheme is not Scheme.GUMBEL or isinstance(noise.keyed, CpuNoise)):
            return _Noise(seeds=words(noise.seeds), positions=words(noise.positions))
        if scheme is Scheme.GUMBEL:
            return None
        accept = torch.empty(tree.batch_size, tree.max_nodes, dtype=torch.float64)
        recover = torch.empty(tree.batch_size, tree.max_nodes + 1, dtype=torch.float64)
        if scheme in _RATIO:
            requests, nodes = tree.valid().nonzero(as_tuple=True)
            accept[requests, nodes] = noise.accept(requests, nodes, 0)
        requests, depths = (torch.arange(tree.max_nodes + 1) <= tree.num_nodes[:, None]).nonzero(as_tuple=True)
        recover[requests, depths] = noise.recover(requests, depths)
        return _Noise(accept=accept, recover=recover)


def _call(tree: DraftTree, rows: AllRows, noise: _Noise, scheme: Scheme) -> Verdict | None:
    batch, num_nodes = tree.token_ids.shape
    inputs = {
        "tokens": tree.token_ids,
        "lengths": tree.num_nodes,
        "log_probs": rows.log_probs,
        "target_entropies": rows.entropies,
        "roots": rows.roots,
        "draft_probs": tree.draft_probs if scheme in _RATIO else None,
        "draft_token_ids": tree.draft_token_ids if scheme in _RATIO else None,
        "accept": noise.accept,
        "recover": noise.recover,
    }
    held = {name: tensor.contiguous() for name, tensor in inputs.items() if tensor is not None}
    path, whole = torch.empty(batch, num_nodes, dtype=torch.int64), torch.empty(2, batch, dtype=torch.int64)
    is_bonus, accept_probs = torch.empty(batch, dtype=torch.bool), torch.empty(batch, num_nodes, dtype=torch.float64)
    scores = None if rows.entropies is None else torch.empty(2, batch, num_nodes + 1)
    verification = _Verification(
        scheme=_CODES[scheme],
        threads=torch.get_num_threads(),
        batch=batch,
        max_nodes=num_nodes,
        num_rows=rows.log_probs.shape[0],
        vocab=rows.log_probs.shape[1],
        draft_vocab=held["draft_probs"].shape[2] if "draft_probs" in held else 0,
        sum_tolerance=_SUM_TOLERANCE,
        seeds=None if noise.seeds is None else ctypes.addressof(noise.seeds),
        positions=None if noise.positions is None else ctypes.addressof(noise.positions),
        path=path.data_ptr(),
        num_accepted=whole[0].data_ptr(),
        next_tokens=whole[1].data_ptr(),
        is_bonus=is_bonus.data_ptr(),
        accept_probs=accept_probs.data_ptr(),
        scores=None if scores is None else scores[0].data_ptr(),
        entropies=None if scores is None else scores[1].data_ptr(),
        **{name: tensor.data_ptr() for name, tensor in held.items()},
    )
    if not library().rs_verify_chains(ctypes.byref(verification)):
        return None
    return Verdict(
        path=path,
        num_accepted=whole[0],
        next_token_ids=whole[1],
        is_bonus=is_bonus,
        accept_probs=accept_probs,
        raw_logprobs=None if scores is None else scores[0],
        processed_logprobs=None if scores is None else scores[0],
        entropies=None if scores is None else scores[1],
    )

"""verify: rollout_spec.verify.verify in C++, all six schemes on chains and trees; cuda.py runs the same on a GPU.

Shape legend: B requests, N nodes, D depth of the deepest node, R target rows, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verdict import Verdict
from rollout_spec.verify import EXACT_ON, RATIO_SCHEMES, AllRows, CounterNoise, Scheme, TargetRows, VerifyNoise, with_scores
from rollout_spec.verify import verify as readable_verify
from rollout_spec.verify.ratio import SUM_TOLERANCE
from rollout_spec_kernels.library import library
from rollout_spec_kernels.noise import CpuNoise, words
from rollout_spec_kernels.uniforms import Uniforms

# rs::Scheme of verification.h
_CODES = {scheme: code for code, scheme in enumerate(Scheme)}
# Sums here are float64, the readable verifier's float32: whatever is close to its limit is left to it.
_SUM_TOLERANCE = 0.9 * SUM_TOLERANCE
NOT_BEGUN, FINISHED = -1, -2  # Verification.wanted
DONE, ROWS_WANTED, DECLINED = 0, 1, -1  # what Machine.run returns


class Verification(ctypes.Structure):
    """rs::Verification of verification.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("scheme", "threads", "batch", "max_nodes", "num_rows", "vocab", "draft_vocab")),
        ("sum_tolerance", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("tokens", "parents", "lengths", "draft_probs", "draft_token_ids", "column_of")),
        *((name, ctypes.c_void_p) for name in ("log_probs", "roots", "rows", "entropies_in", "seeds", "positions", "accept", "recover")),
        *((name, ctypes.c_void_p) for name in ("path", "num_accepted", "next_tokens", "is_bonus", "accept_probs", "scores", "entropies")),
        *((name, ctypes.c_void_p) for name in ("deepest", "wanted", "state")),
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Machine:
    """Where a batch is verified."""

    device: torch.device
    takes_rows_later: bool  # whether rows may be computed as the walks reach them; else all must be there
    state_bytes: Callable[[int], int]  # of a request, for the longest tree's nodes
    run: Callable[[Verification, Tensor], int]  # (pointers on the device, Verification.wanted [B])

    def holds(self, *tensors: Tensor | None) -> bool:
        return all(tensor is None or tensor.device == self.device for tensor in tensors)


def verify(tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict:
    """The scheme's verdict, as rollout_spec.verify.verify gives it (signature, refusals, noise and law are its).

    float32 rows on the CPU are verified in C++, which reads a target's row once for each decision and stores none; other dtypes and
    devices, and every input that the C++ declines, go to the readable verifier, which answers or says what is wrong.

    For the same noise the two decide the same except where a uniform lies within float rounding of its threshold: probabilities are
    float32 in both, summed here in float64, there in float32.
    """
    verdict = verify_fused(tree, target, noise, scheme)
    return readable_verify(tree, target, noise, scheme) if verdict is None else verdict


def verify_fused(tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict | None:
    """The verdict, or None where this is not a batch for C++."""
    call = library()
    cpu = Machine(
        device=torch.device("cpu"),
        takes_rows_later=True,
        state_bytes=call.rs_verify_state_bytes,
        run=lambda verification, _: int(call.rs_verify(ctypes.byref(verification))),
    )
    return verify_on(cpu, tree, target, noise, scheme)


def verify_on(machine: Machine, tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict | None:
    """The verdict, or None where this is not a batch for that machine."""
    if tree.max_nodes == 0 and scheme is not Scheme.GUMBEL:
        scheme = Scheme.EXACT_MATCH  # without a draft every scheme draws from the target
    if tree.batch_size != target.batch_size or not _fits(machine, tree, target.vocab_size, scheme):
        return None
    drawn = _Noise.of(tree, noise, scheme)
    if drawn is None:
        return None
    # Block verification looks at every row; the others stop early, and rows behind that are better not computed.
    rows = _Rows.of(machine, tree, target, needed=scheme is Scheme.BLOCK or not machine.takes_rows_later)
    return None if rows is None else _decide(machine, tree, target, rows, drawn, scheme)


def _fits(machine: Machine, tree: DraftTree, vocab_size: int, scheme: Scheme) -> bool:
    """True if the scheme is exact on the tree and the tree is one that C++ reads: int64 tokens, float32 q, all where it runs."""
    ids = (tree.token_ids, tree.parents, tree.num_nodes)
    if not machine.holds(*ids) or any(tensor.dtype is not torch.int64 for tensor in ids):
        return False
    if tree.max_nodes == 0:
        return True
    if tree.draw not in EXACT_ON[scheme]:
        return False
    if scheme not in RATIO_SCHEMES:
        return True
    probs, token_ids = tree.draft_probs, tree.draft_token_ids
    if probs is None or probs.dtype is not torch.float32 or not machine.holds(probs, token_ids):
        return False
    fits = probs.shape[2] == vocab_size if token_ids is None else token_ids.dtype is torch.int64
    return fits and (tree.draw is not Draw.SAMPLED or tree.is_chain())


@dataclass(frozen=True, kw_only=True, eq=False)
class _Noise:
    """A round's noise as C++ takes it: keys if it can draw the numbers itself, else the uniforms it may ask for."""

    seeds: ctypes.Array[ctypes.c_uint64] | None = None  # [B]
    positions: ctypes.Array[ctypes.c_uint64] | None = None  # [B]
    uniforms: Uniforms | None = None

    @staticmethod
    def of(tree: DraftTree, noise: VerifyNoise, scheme: Scheme) -> _Noise | None:
        """None for Gumbel noise that C++ would draw with other bits, and for uniforms by depth where parents make no tree."""
        if isinstance(noise, CounterNoise) and (scheme is not Scheme.GUMBEL or isinstance(noise.keyed, CpuNoise)):
            return _Noise(seeds=words(noise.seeds), positions=words(noise.positions))
        uniforms = None if scheme is Scheme.GUMBEL else Uniforms.of(tree, noise, scheme)
        return None if uniforms is None else _Noise(uniforms=uniforms)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """Where C++ finds the target's rows: in one block, or at addresses that are filled in as rows are computed."""

    whole: AllRows | None
    addresses: Tensor | None  # [B, N + 1] int64, the root first, 0 = not computed yet
    held: list[Tensor]  # [R, V] each: what the addresses point into

    @staticmethod
    def of(machine: Machine, tree: DraftTree, target: TargetRows, *, needed: bool) -> _Rows | None:
        """None if the rows are not float32 where they are read, or cannot be had."""
        whole = target.all_rows(needed=needed)
        if whole is None:
            none = torch.zeros(tree.batch_size, tree.max_nodes + 1, dtype=torch.int64)
            return _Rows(whole=None, addresses=none, held=[]) if machine.takes_rows_later else None
        if whole.log_probs.dtype is not torch.float32 or not machine.holds(whole.log_probs, whole.roots, whole.entropies):
            return None
        return _Rows(whole=whole, addresses=None, held=[])

    @property
    def has_entropies(self) -> bool:
        """True if the rows tell a token's scores."""
        return self.whole is not None and self.whole.entropies is not None

    def add(self, machine: Machine, target: TargetRows, entries: Tensor) -> bool:
        """Compute the rows of entries [B] (0 = the root, n + 1 = node n, negative = none). False if they are not float32 there."""
        assert self.addresses is not None
        requests = (entries >= 0).nonzero()[:, 0]
        block = target.log_probs(requests, entries[requests] - 1)
        if block.dtype is not torch.float32 or not machine.holds(block):
            return False
        block = block.contiguous()
        self.held.append(block)
        row_bytes = block.shape[1] * block.element_size()
        self.addresses[requests, entries[requests]] = block.data_ptr() + row_bytes * torch.arange(requests.numel())
        return True


def _decide(machine: Machine, tree: DraftTree, target: TargetRows, rows: _Rows, noise: _Noise, scheme: Scheme) -> Verdict | None:
    """Runs the walks until none waits for a row."""
    batch, num_nodes, divides, device = tree.batch_size, tree.max_nodes, scheme in RATIO_SCHEMES, machine.device
    inputs = {
        "tokens": tree.token_ids,
        "parents": tree.parents,
        "lengths": tree.num_nodes,
        "draft_probs": tree.draft_probs if divides else None,
        "draft_token_ids": tree.draft_token_ids if divides else None,
        "log_probs": None if rows.whole is None else rows.whole.log_probs,
        "roots": None if rows.whole is None else rows.whole.roots,
        "rows": rows.addresses,
        "entropies_in": None if rows.whole is None else rows.whole.entropies,
        "accept": None if noise.uniforms is None else noise.uniforms.accept,
        "recover": None if noise.uniforms is None else noise.uniforms.recover,
        "seeds": _moved(noise.seeds, device),
        "positions": _moved(noise.positions, device),
    }
    held = {name: tensor.contiguous() if isinstance(tensor, Tensor) else tensor for name, tensor in inputs.items() if tensor is not None}
    columns = target.vocab_size if divides and tree.draft_token_ids is not None else 0
    num_accepted, next_tokens, deepest, wanted = torch.empty(4, batch, dtype=torch.int64, device=device)
    outputs = {
        "path": torch.empty(batch, num_nodes, dtype=torch.int64, device=device),
        "num_accepted": num_accepted,
        "next_tokens": next_tokens,
        "is_bonus": torch.empty(batch, dtype=torch.bool, device=device),
        "accept_probs": torch.empty(batch, num_nodes, dtype=torch.float64, device=device),
        "scores": None if not rows.has_entropies else torch.empty(batch, num_nodes + 1, device=device),
        "entropies": None if not rows.has_entropies else torch.empty(batch, num_nodes + 1, device=device),
        "deepest": deepest,
        "wanted": wanted.fill_(NOT_BEGUN),
        "state": torch.empty(batch * machine.state_bytes(num_nodes), dtype=torch.uint8, device=device),
        "column_of": torch.empty(columns, dtype=torch.int32, device=device),
    }
    verification = Verification(
        scheme=_CODES[scheme],
        threads=torch.get_num_threads(),
        batch=batch,
        max_nodes=num_nodes,
        num_rows=0 if rows.whole is None else rows.whole.log_probs.shape[0],
        vocab=target.vocab_size,
        draft_vocab=tree.draft_probs.shape[2] if divides and tree.draft_probs is not None else 0,
        sum_tolerance=_SUM_TOLERANCE,
        **{name: _address(memory) for name, memory in (held | outputs).items()},
    )
    while (result := machine.run(verification, wanted)) == ROWS_WANTED:
        if not rows.add(machine, target, wanted):
            return None
    return _verdict(outputs, tree, target) if result == DONE else None


def _verdict(outputs: dict[str, Tensor | None], tree: DraftTree, target: TargetRows) -> Verdict:
    """What was decided, cut to the deepest node, with its scores."""
    written = {name: tensor for name, tensor in outputs.items() if tensor is not None}
    depth = int(written["deepest"].max()) if tree.batch_size else 0
    scores = written["scores"][:, : depth + 1] if "scores" in written else None
    verdict = Verdict(
        path=written["path"][:, :depth],
        num_accepted=written["num_accepted"],
        next_token_ids=written["next_tokens"],
        is_bonus=written["is_bonus"],
        accept_probs=written["accept_probs"][:, :depth],
        raw_logprobs=scores,
        processed_logprobs=scores,
        entropies=None if scores is None else written["entropies"][:, : depth + 1],
    )
    return verdict if scores is not None else with_scores(verdict, tree, target)


def _moved(of: ctypes.Array[ctypes.c_uint64] | None, device: torch.device) -> ctypes.Array[ctypes.c_uint64] | Tensor | None:
    """Keys where the walks run; the CPU reads them as they are."""
    if of is None or device.type == "cpu" or len(of) == 0:
        return of
    return torch.frombuffer(of, dtype=torch.int64).to(device)


def _address(memory: Tensor | ctypes.Array[ctypes.c_uint64] | None) -> int | None:
    if memory is None:
        return None
    return memory.data_ptr() if isinstance(memory, Tensor) else ctypes.addressof(memory)

"""Gated Delta Net layers over a draft tree: Triton for tensors on a GPU, torch elsewhere.

rollout_spec.engine.gated_delta has the formulas and the readable form; the signatures are its GatedDelta's.

Shape legend: B requests, N rows (root and nodes, parents before children), H heads, dk key size, dv value size, C channels, w window.
"""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor

from rollout_spec.engine import gated_delta as in_torch
from rollout_spec.engine.gated_delta import GatedDelta, TreeStates


def tree_delta(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, parents: Tensor, state: Tensor) -> TreeStates:
    """What every row gives, and what the state after any of them is made of (rollout_spec.engine.gated_delta.tree_delta)."""
    return _form(on_gpu=q.is_cuda).tree_delta(q, k, v, log_decay, beta, parents, state)


def commit_state(k: Tensor, states: TreeStates, parents: Tensor, leaves: Tensor, state: Tensor) -> Tensor:
    """[B, H, dk, dv]: the state after row leaves [B] (rollout_spec.engine.gated_delta.commit_state)."""
    return _form(on_gpu=k.is_cuda).commit_state(k, states, parents, leaves, state)


def tree_convolution(x: Tensor, history: Tensor, weight: Tensor, parents: Tensor) -> Tensor:
    """[B, N, C]: the short convolution along ancestors (rollout_spec.engine.gated_delta.tree_convolution)."""
    return _form(on_gpu=x.is_cuda).tree_convolution(x, history, weight, parents)


@functools.cache
def _form(*, on_gpu: bool) -> GatedDelta:
    if not on_gpu or importlib.util.find_spec("triton") is None:
        return in_torch
    from rollout_spec_kernels.triton import gated_delta as in_triton

    return in_triton

"""Gated Delta Net layers over a draft tree, without rollback (Weaver): in torch, the readable form of what kernels do.

With P the inclusive ancestor relation, g log-decays, β write strengths, H0 the state before the root row, and keys as the model normalises
them,

    π = P g,    A_ij = β_i e^{π_i - π_j} k_i · k_j for strict ancestors j,    (I + A) U = β (V - e^π K H0)
    O_i = e^{π_i} q_iᵀ H0 + sum_{j in P(i)} e^{π_i - π_j} (q_i · k_j) U_j
    H_l = e^{π_l} H0 + sum_{j in P(l)} e^{π_l - π_j} k_j U_jᵀ

are what the recurrence S <- e^g S, S <- S + k β (v - Sᵀ k)ᵀ, o = Sᵀ q gives along every path, with no state of a node ever written.

Shape legend: B requests, N rows (root and nodes, parents before children), H heads, dk key size, dv value size, C channels, w window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeStates:
    """What a layer gives for every row, and what its state is made of later."""

    out: Tensor  # [B, N, H, dv]
    updates: Tensor  # [B, N, H, dv] U
    decay: Tensor  # [B, N, H] π


class GatedDelta(Protocol):
    """The operations of such a layer, as this module has them."""

    def tree_delta(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, parents: Tensor, state: Tensor
    ) -> TreeStates: ...

    def commit_state(self, k: Tensor, states: TreeStates, parents: Tensor, leaves: Tensor, state: Tensor) -> Tensor: ...

    def tree_convolution(self, x: Tensor, history: Tensor, weight: Tensor, parents: Tensor) -> Tensor: ...


def check_tree(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, parents: Tensor, state: Tensor) -> None:
    """Raise ValueError if the shapes do not fit one another."""
    batch, num_rows, num_heads, key_size = q.shape
    wanted = {
        "k": (k, (batch, num_rows, num_heads, key_size)),
        "v": (v, (batch, num_rows, num_heads, v.shape[-1])),
        "log_decay": (log_decay, (batch, num_rows, num_heads)),
        "beta": (beta, (batch, num_rows, num_heads)),
        "parents": (parents, (batch, num_rows)),
        "state": (state, (batch, num_heads, key_size, v.shape[-1])),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {shape} beside q {tuple(q.shape)}; got {tuple(tensor.shape)}")


def ancestor_mask(parents: Tensor) -> Tensor:
    """[B, N, N] bool: (i, j) says that row j is row i or one of its ancestors. parents [B, N], -1 above the root; parents come first."""
    num_rows = parents.shape[1]
    order = torch.arange(num_rows, device=parents.device)
    sees = ((parents[:, :, None] == order) | (order[:, None] == order)).float()
    for _ in range(max(num_rows - 1, 0).bit_length()):  # every product doubles how far up a row sees
        sees = (sees @ sees).clamp_max_(1.0)
    return sees > 0


def tree_delta(
    q: Tensor,  # [B, N, H, dk], scaled as the model does
    k: Tensor,  # [B, N, H, dk], normalised as the model does
    v: Tensor,  # [B, N, H, dv]
    log_decay: Tensor,  # [B, N, H] g <= 0
    beta: Tensor,  # [B, N, H]
    parents: Tensor,  # [B, N] int64
    state: Tensor,  # [B, H, dk, dv] H0
) -> TreeStates:
    """Outputs of every row and what commit_state needs; computed in the widest of the inputs' dtypes. Raises ValueError for shapes."""
    check_tree(q, k, v, log_decay, beta, parents, state)
    sees = ancestor_mask(parents)[:, None]  # [B, 1, N, N]
    q_rows, k_rows, v_rows = (of.transpose(1, 2) for of in (q, k, v))  # [B, H, N, d]
    g, strength = log_decay.transpose(1, 2), beta.transpose(1, 2)[..., None]  # [B, H, N], [B, H, N, 1]
    decay = (sees.to(g.dtype) @ g[..., None])[..., 0]  # π
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~sees, -torch.inf).exp()
    grown = decay.exp()[..., None]
    coupling = (strength * between * (k_rows @ k_rows.mT)).tril(-1)
    identity = torch.eye(k.shape[1], dtype=coupling.dtype, device=k.device)
    updates = torch.linalg.solve_triangular(identity + coupling, strength * (v_rows - grown * (k_rows @ state)), upper=False)
    out = grown * (q_rows @ state) + (between * (q_rows @ k_rows.mT)) @ updates
    return TreeStates(out=out.transpose(1, 2), updates=updates.transpose(1, 2), decay=decay.transpose(1, 2))


def commit_state(k: Tensor, states: TreeStates, parents: Tensor, leaves: Tensor, state: Tensor) -> Tensor:
    """[B, H, dk, dv]: the state after row leaves [B] int64, from k [B, N, H, dk] and the state before the root."""
    every = torch.arange(k.shape[0], device=k.device)
    final = states.decay[every, leaves]  # [B, H]
    on_path = ancestor_mask(parents)[every, leaves]  # [B, N]
    share = (final[:, None] - states.decay).masked_fill(~on_path[..., None], -torch.inf).exp()  # [B, N, H]
    return final.exp()[..., None, None] * state + torch.einsum("bnh,bnhk,bnhv->bhkv", share, k, states.updates)


def ancestor_taps(parents: Tensor, window: int) -> Tensor:
    """[B, N, w] int64: what a window that ends at each row looks at, oldest first: rows, or -1, -2, ... backwards into the history."""
    batch, num_rows = parents.shape
    every = torch.arange(batch, device=parents.device)[:, None]
    at = torch.arange(num_rows, device=parents.device).expand(batch, -1)
    taps = [at]
    for _ in range(window - 1):
        at = torch.where(at >= 0, parents[every, at.clamp_min(0)], at - 1)
        taps.append(at)
    return torch.stack(taps[::-1], dim=-1)


def tree_convolution(x: Tensor, history: Tensor, weight: Tensor, parents: Tensor) -> Tensor:
    """[B, N, C] causal depthwise convolution of x [B, N, C] along ancestors, with the last w - 1 inputs before the root.

    history [B, C, w - 1] (newest last), weight [C, w] (newest last), parents [B, N] int64; summed in float32 or wider.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    windows = _looked_at(x, history, ancestor_taps(parents, weight.shape[1]))
    return (windows.to(wide) * weight.to(wide)).sum(-1).to(x.dtype)


def commit_history(x: Tensor, history: Tensor, parents: Tensor, leaves: Tensor) -> Tensor:
    """[B, C, w - 1]: the last inputs of a convolution after row leaves [B], from x [B, N, C] and those before the root."""
    every = torch.arange(x.shape[0], device=x.device)
    taps = ancestor_taps(parents, history.shape[2])[every, leaves]
    return _looked_at(x, history, taps[:, None])[:, 0]


def _looked_at(x: Tensor, history: Tensor, taps: Tensor) -> Tensor:
    """[B, n, C, w] the inputs that taps [B, n, w] point at (ancestor_taps)."""
    every = torch.arange(x.shape[0], device=x.device)[:, None]
    both = torch.cat([x, history.transpose(1, 2)], dim=1)  # [B, N + w - 1, C]: a negative tap counts from the end
    return torch.stack([both[every, taps[..., i]] for i in range(taps.shape[2])], dim=-1)

"""Norms, rotary embedding and gate: the roundings transformers makes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rollout_spec.engine.ops import TorchOps
from rollout_spec_kernels.cpu import CpuOps

DTYPES = (torch.float32, torch.bfloat16)


def _normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _steps(got: Tensor, wanted: Tensor) -> int:
    """The largest distance in representable numbers between two tensors of one dtype."""
    kind = torch.int32 if got.dtype is torch.float32 else torch.int16
    low = torch.iinfo(kind).min
    ordered = [torch.where(bits < 0, low - bits, bits) for bits in (t.contiguous().view(kind).long() for t in (got, wanted))]
    return int((ordered[0] - ordered[1]).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 17), (5, 576), (100, 901)])
def test_rms_norm(ops: CpuOps, dtype: torch.dtype, num_rows: int, size: int) -> None:
    x, residual = _normal(num_rows, size, seed=1, dtype=dtype), _normal(num_rows, size, seed=2, dtype=dtype)
    weight = _normal(size, seed=3, dtype=dtype)
    # The sum of squares may round differently: two steps in float32; in bfloat16 one step of the cast, times the weight's rounding.
    assert _steps(ops.rms_norm(x, weight, 1e-5), TorchOps().rms_norm(x, weight, 1e-5)) <= (4 if dtype is torch.float32 else 2)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 17), (40, 1536)])
def test_silu_mul(ops: CpuOps, dtype: torch.dtype, num_rows: int, size: int) -> None:
    gate_up = 4 * _normal(num_rows, 2 * size, seed=1, dtype=dtype)
    gate_up[0, 0] = -200.0  # exp(200) overflows: silu is -0
    assert _steps(ops.silu_mul(gate_up), TorchOps().silu_mul(gate_up)) <= (4 if dtype is torch.float32 else 2)
    gate_up[0, 0] = math.nan
    assert ops.silu_mul(gate_up)[0, 0].isnan()
    assert int(ops.silu_mul(gate_up).isnan().sum()) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 8), (4, 1, 40)])
def test_qkv_rope_store(ops: CpuOps, dtype: torch.dtype, with_norms: bool, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    num_rows = 70
    qkv = _normal(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, seed=1, dtype=dtype)
    angles = torch.rand(num_rows, head_dim // 2, generator=torch.Generator().manual_seed(2)).repeat(1, 2) * 100
    q_norm, k_norm = (_normal(head_dim, seed=seed, dtype=dtype) if with_norms else None for seed in (3, 4))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots, indices = torch.arange(num_rows) % 3, torch.arange(num_rows) // 3
    results = []
    for implementation in (ops, TorchOps()):
        k, v = torch.full((3, num_kv_heads, 30, head_dim), 7.0, dtype=dtype), torch.full((3, num_kv_heads, 30, head_dim), 7.0, dtype=dtype)
        q = implementation.qkv_rope_store(qkv, cos, sin, q_norm, k_norm, 1e-6, k, v, slots, indices)
        results.append((q, k, v))
    for got, wanted in zip(*results, strict=True):
        if not with_norms:
            assert torch.equal(got, wanted)
        else:  # a norm one step off, times a cosine, plus another such product
            assert torch.allclose(got.float(), wanted.float(), rtol=0, atol=4 * torch.finfo(dtype).eps * float(wanted.abs().max()))


@pytest.mark.parametrize(("slot", "index"), [(3, 0), (-1, 0), (0, 30), (0, -1)])
def test_a_cell_outside_the_cache_is_refused(ops: CpuOps, slot: int, index: int) -> None:
    cache = torch.zeros(3, 1, 30, 8)
    with pytest.raises(ValueError, match="inside the cache of 3 slots of 30 tokens"):
        ops.qkv_rope_store(
            torch.ones(1, 24),
            torch.ones(1, 8),
            torch.ones(1, 8),
            None,
            None,
            1e-6,
            cache,
            cache.clone(),
            torch.tensor([slot]),
            torch.tensor([index]),
        )
    assert not cache.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_their_neighbours_or_on_threads(ops: CpuOps, dtype: torch.dtype, restore_threads: None) -> None:
    x, weight = _normal(100, 576, seed=1, dtype=dtype), _normal(576, seed=2, dtype=dtype)
    torch.set_num_threads(1)
    norm_alone = torch.cat([ops.rms_norm(row[None], weight, 1e-5) for row in x])
    gate_alone = torch.cat([ops.silu_mul(row[None]) for row in x])
    torch.set_num_threads(2)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), norm_alone)
    assert torch.equal(ops.silu_mul(x), gate_alone)


def test_other_dtypes_and_shapes_are_refused(ops: CpuOps) -> None:
    with pytest.raises(ValueError, match="x must be float32 or bfloat16 on the CPU"):
        ops.rms_norm(torch.zeros(1, 4, dtype=torch.float16), torch.zeros(4), 1e-5)
    with pytest.raises(ValueError, match="weight must be"):
        ops.rms_norm(torch.zeros(1, 4), torch.zeros(5), 1e-5)
    with pytest.raises(ValueError, match="residual must be"):
        ops.add_rms_norm(torch.zeros(1, 4), torch.zeros(2, 4), torch.zeros(4), 1e-5)
    with pytest.raises(ValueError, match="gate_up must be"):
        ops.silu_mul(torch.zeros(1, 5))

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollout_spec_kernels.cpu import CpuOps

ROWS = (1, 2, 3, 5, 8, 13, 16, 17, 32, 33, 64, 100)
DTYPES = (torch.float32, torch.bfloat16)


def _normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (31, 7), (32, 16), (33, 257), (65, 576), (100, 1001)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_error_is_at_most_twice_that_of_torch(ops: CpuOps, dtype: torch.dtype, num_out: int, num_in: int, with_bias: bool) -> None:
    weight, bias = _normal(num_out, num_in, seed=1, dtype=dtype), _normal(num_out, seed=2, dtype=dtype) if with_bias else None
    linear = ops.pack_linear(weight, bias)
    assert (linear.in_features, linear.out_features) == (num_in, num_out)
    for num_rows in (1, 14, 15, 37):
        x = _normal(num_rows, num_in, seed=3, dtype=dtype)
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        plain = torch.nn.functional.linear(x, weight, bias)
        got = linear(x)
        assert got.dtype is dtype
        assert got.shape == (num_rows, num_out)
        # The last term: one rounding of the largest value, where torch's own error happens to be nil.
        assert _error(got, exact) <= 2 * _error(plain, exact) + torch.finfo(dtype).eps * float(exact.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_their_neighbours_or_on_threads(ops: CpuOps, dtype: torch.dtype, restore_threads: None) -> None:
    linear = ops.pack_linear(_normal(97, 577, seed=1, dtype=dtype), _normal(97, seed=2, dtype=dtype))
    x = _normal(max(ROWS), 577, seed=3, dtype=dtype)
    torch.set_num_threads(1)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(len(x))])
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_rows in ROWS:
            assert torch.equal(linear(x[:num_rows]), alone[:num_rows]), f"{num_rows} rows, {num_threads} threads"
            assert torch.equal(linear(x[-num_rows:]), alone[-num_rows:]), f"last {num_rows} rows, {num_threads} threads"


def test_rows_agree_across_blocks_of_a_long_prefill(ops: CpuOps) -> None:
    num_in = 20_000  # few rows of this width fit a block, so the loop over blocks runs more than once
    linear = ops.pack_linear(_normal(40, num_in, seed=1), None)
    x = _normal(45, num_in, seed=2)
    assert torch.equal(linear(x)[40:], linear(x[40:]))
    exact = x.double() @ _normal(40, num_in, seed=1).double().T
    assert _error(linear(x), exact) <= 2 * _error(x @ _normal(40, num_in, seed=1).T, exact)


def test_float32_output_of_a_bfloat16_layer_is_the_unrounded_sum(ops: CpuOps) -> None:
    weight, x = _normal(50, 64, seed=1, dtype=torch.bfloat16), _normal(9, 64, seed=2, dtype=torch.bfloat16)
    head = ops.pack_linear(weight, None, torch.float32)
    exact = x.double() @ weight.double().T
    assert head(x).dtype is torch.float32
    assert _error(head(x), exact) < 1e-5 * float(exact.abs().max())  # 64 float32 sums; a bfloat16 rounding would be 4e-3
    assert torch.equal(head(x).bfloat16(), ops.pack_linear(weight, None)(x))


def test_update_takes_new_weights_and_bias_in_place(ops: CpuOps) -> None:
    linear = ops.pack_linear(_normal(33, 20, seed=1), _normal(33, seed=2))
    pointers, x, weight, bias = linear.pointers, _normal(3, 20, seed=3), _normal(33, 20, seed=4), _normal(33, seed=5)
    linear.update(weight, bias)
    assert linear.pointers == pointers
    assert torch.equal(linear(x), ops.pack_linear(weight, bias)(x))
    with pytest.raises(ValueError, match=r"weight must be torch.float32 \(33, 20\)"):
        linear.update(_normal(32, 20, seed=5), bias)
    with pytest.raises(ValueError, match="keeps having a bias"):
        linear.update(weight, None)


def test_no_rows_and_strided_rows(ops: CpuOps) -> None:
    linear = ops.pack_linear(_normal(10, 12, seed=1), None)
    assert linear(torch.empty(0, 12)).shape == (0, 10)
    wide = _normal(6, 30, seed=2)
    assert torch.equal(linear(wide[::2, 5:17]), linear(wide[::2, 5:17].contiguous()))
    assert torch.equal(linear(wide.T.contiguous().T[:, :12]), linear(wide[:, :12].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_row(ops: CpuOps, dtype: torch.dtype) -> None:
    linear = ops.pack_linear(_normal(40, 33, seed=1, dtype=dtype), None)
    x = _normal(5, 33, seed=2, dtype=dtype)
    clean = linear(x)
    x[1, 4], x[3, 32] = float("nan"), float("inf")
    dirty = linear(x)
    assert dirty[1].isnan().all()
    assert not dirty[3].isfinite().any()
    assert torch.equal(dirty[[0, 2, 4]], clean[[0, 2, 4]])


@pytest.mark.parametrize("wrong", [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 4), torch.zeros(3)])
def test_wrong_inputs_are_refused(ops: CpuOps, wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=r"x must be torch.float32 \[M, 3\]"):
        ops.pack_linear(torch.zeros(5, 3), None)(wrong)

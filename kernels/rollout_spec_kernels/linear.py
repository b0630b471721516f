"""Linear layers on packed weights.

Shape legend: M rows, K input features, N output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_spec_kernels.library import checked, is_bfloat16, library


class PackedLinear:
    """y = x Wᵀ + b with W [N, K] kept in panels of output columns; float32 sums, rounded once to ``out_dtype``."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> None:
        self._is_bf16, self._dtype = is_bfloat16("weight", weight), weight.dtype
        if weight.ndim != 2:
            raise ValueError(f"weight must be [N, K]; got {tuple(weight.shape)}")
        self.out_dtype = weight.dtype if out_dtype is None else out_dtype
        if self.out_dtype not in (weight.dtype, torch.float32):
            raise ValueError(f"out_dtype must be float32 or the weight's {weight.dtype}; got {out_dtype}")
        self.out_features, self.in_features = weight.shape
        self._library = library()
        columns = self._library.rs_panel_columns()
        self._padded_out = -(-self.out_features // columns) * columns
        self._packed = torch.empty(self._padded_out * self.in_features, dtype=weight.dtype)
        self._bias = None if bias is None else torch.zeros(self._padded_out)
        self.update(weight, bias)

    def update(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take new weights of the same shape and dtype, in the same memory."""
        weight = checked("weight", weight.detach(), self._dtype, (self.out_features, self.in_features))
        if (bias is None) is not (self._bias is None):
            raise ValueError("a layer keeps having a bias, or having none")
        if bias is not None and self._bias is not None:
            self._bias[: self.out_features] = checked("bias", bias.detach(), bias.dtype, (self.out_features,))
        self._library.rs_pack_weight(
            self._is_bf16,
            weight.data_ptr(),
            self.out_features,
            self.in_features,
            self._packed.data_ptr(),
            torch.get_num_threads(),
        )

    @property
    def pointers(self) -> tuple[int, int | None]:
        """Addresses of the packed weight and of the bias; they stay while the layer lives."""
        return self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        if x.dtype is not self._dtype or not x.is_cpu or x.ndim != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"x must be {self._dtype} [M, {self.in_features}] on the CPU; got {x.dtype} {tuple(x.shape)} on {x.device}")
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows = x.shape[0]
        out = torch.empty(num_rows, self.out_features, dtype=self.out_dtype)
        if num_rows:
            self._library.rs_linear(
                self._is_bf16,
                self.out_dtype is torch.bfloat16,
                x.data_ptr(),
                x.stride(0),
                num_rows,
                self.in_features,
                *self.pointers,
                self.out_features,
                out.data_ptr(),
                torch.get_num_threads(),
            )
        return out

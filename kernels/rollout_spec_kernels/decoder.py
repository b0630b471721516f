"""DecoderStack: every layer of a decoder's forward in one C++ call.

It computes what ``CpuOps`` does operation by operation, bit for bit; what it leaves out is the Python between 270 small operations,
which on a model of 135M parameters is a quarter of a decode step.

Shape legend: R rows, L layers, H query heads, Hkv key/value heads, d head size, I MLP width, S slots, C slot capacity.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.stack import DecoderLayer, StackOutput
from rollout_spec_kernels.library import checked, is_bfloat16, library
from rollout_spec_kernels.linear import PackedLinear


class _Layer(ctypes.Structure):
    """rs::Layer of decoder.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((f"{name}_{part}", ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down") for part in ("packed", "bias")),
        ("window", ctypes.c_int64),
    ]


class _Step(ctypes.Structure):
    """rs::Step of decoder.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("is_bf16", "threads")),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_width")),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_requests", "mask_words", "num_slots", "capacity")),
        *((name, ctypes.c_int64) for name in ("layer_stride", "slot_stride", "head_stride")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "k_cache", "v_cache", "row_slots", "row_indices")),
        *((name, ctypes.c_void_p) for name in ("row_offsets", "slots", "context_lengths", "ancestors")),
        *((name, ctypes.c_void_p) for name in ("final_norm", "residual", "normed", "taps")),
    ]


class DecoderStack:
    """The layers and the final norm. It keeps the layers' tensors and reads them at each call: they may be updated in place only."""

    def __init__(self, layers: Sequence[DecoderLayer], final_norm: Tensor, *, head_dim: int, eps: float, scale: float) -> None:
        if not layers:
            raise ValueError("a decoder stack needs at least one layer")
        self._library = library()
        self._is_bf16, self._dtype = is_bfloat16("final_norm", final_norm), final_norm.dtype
        self.hidden_size, self.head_dim, self.eps, self.scale = final_norm.shape[0], head_dim, eps, scale
        self.num_heads = layers[0].out.in_features // head_dim
        self.num_kv_heads = (layers[0].qkv.out_features // head_dim - self.num_heads) // 2
        self.mlp_width = layers[0].down.in_features
        self._layers, self._final_norm = list(layers), final_norm
        for index, layer in enumerate(self._layers):
            self._check_layer(index, layer)
        self.pointers = (_Layer * len(layers))(*(_pointers(layer) for layer in self._layers))  # what rs_decoder takes

    def _check_layer(self, index: int, layer: DecoderLayer) -> None:
        hidden, width = self.hidden_size, self.num_heads * self.head_dim
        shapes = {
            "qkv": (width + 2 * self.num_kv_heads * self.head_dim, hidden),
            "out": (hidden, width),
            "gate_up": (2 * self.mlp_width, hidden),
            "down": (hidden, self.mlp_width),
        }
        for name, shape in shapes.items():
            linear = getattr(layer, name)
            if not isinstance(linear, PackedLinear):
                raise ValueError(f"layer {index}: {name} was packed by other operations ({type(linear).__name__}); pack it with CpuOps")
            if (linear.out_features, linear.in_features) != shape or linear.out_dtype is not self._dtype:
                raise ValueError(f"layer {index}: {name} must be {shape} in {self._dtype}; got {(linear.out_features, linear.in_features)}")
        for name, size in (("input_norm", hidden), ("post_norm", hidden), ("q_norm", self.head_dim), ("k_norm", self.head_dim)):
            norm: Tensor | None = getattr(layer, name)
            if norm is not None and checked(f"layer {index}: {name}", norm, self._dtype, (size,)) is not norm:
                raise ValueError(f"layer {index}: {name} must be contiguous")

    def __call__(
        self,
        embedded: Tensor,  # [R, hidden]
        cos: Tensor,  # [R, d]
        sin: Tensor,  # [R, d]
        k_cache: Tensor,  # [L, S, Hkv, C, d]
        v_cache: Tensor,  # [L, S, Hkv, C, d]
        plan: AttentionPlan,
        row_slots: Tensor,  # [R] int64
        row_indices: Tensor,  # [R] int64
        tap_layers: Collection[int] = (),
    ) -> StackOutput:
        """Rows of embedded tokens -> hidden states; K and V of every layer go to cells (layer, row_slots, :, row_indices)."""
        dtype, (num_rows, hidden), num_layers = self._dtype, embedded.shape, len(self._layers)
        if self.num_kv_heads != k_cache.shape[2] or k_cache.shape[0] != num_layers or k_cache.shape[4] != self.head_dim:
            raise ValueError(
                f"the cache {tuple(k_cache.shape)} is not of {num_layers} layers of {self.num_kv_heads} heads of {self.head_dim}"
            )
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            if checked(name, cache, dtype, k_cache.shape) is not cache:
                raise ValueError(f"{name} must be contiguous")
        residual = checked("embedded", embedded, dtype, (num_rows, self.hidden_size)).clone()
        normed = torch.empty_like(residual)
        taps = {layer: torch.empty_like(residual) for layer in tap_layers if layer >= 0}
        num_requests, ancestors = plan.slots.shape[0], plan.ancestors
        held = {
            "cos": checked("cos", cos, dtype, (num_rows, self.head_dim)),
            "sin": checked("sin", sin, dtype, (num_rows, self.head_dim)),
            "row_slots": checked("row_slots", row_slots, torch.int64, (num_rows,)),
            "row_indices": checked("row_indices", row_indices, torch.int64, (num_rows,)),
            "row_offsets": checked("row_offsets", plan.row_offsets, torch.int64, (num_requests + 1,)),
            "slots": checked("slots", plan.slots, torch.int64, (num_requests,)),
            "context_lengths": checked("context_lengths", plan.context_lengths, torch.int64, (num_requests,)),
        }
        if ancestors is not None:
            held["ancestors"] = checked("ancestors", ancestors, torch.int64, (num_rows, ancestors.shape[1]))
        step = _Step(
            is_bf16=self._is_bf16,
            threads=torch.get_num_threads(),
            num_layers=num_layers,
            hidden_size=hidden,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            mlp_width=self.mlp_width,
            eps=self.eps,
            scale=self.scale,
            num_rows=num_rows,
            num_requests=num_requests,
            mask_words=0 if ancestors is None else ancestors.shape[1],
            num_slots=k_cache.shape[1],
            capacity=k_cache.shape[3],
            layer_stride=k_cache.stride(0),
            slot_stride=k_cache.stride(1),
            head_stride=k_cache.stride(2),
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            final_norm=self._final_norm.data_ptr(),
            residual=residual.data_ptr(),
            normed=normed.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in held.items()},
        )
        tap_pointers = (ctypes.c_void_p * num_layers)(*(taps[i].data_ptr() if i in taps else None for i in range(num_layers)))
        step.taps = ctypes.cast(tap_pointers, ctypes.c_void_p)
        if num_rows and not self._library.rs_decoder(ctypes.byref(step), self.pointers):
            raise ValueError(
                f"the plan must cover {num_rows} rows and stay inside the cache of {k_cache.shape[1]} slots of {k_cache.shape[3]} tokens"
            )
        return StackOutput(hidden=normed, taps=taps)


def _pointers(layer: DecoderLayer) -> _Layer:
    norms = (None if norm is None else norm.data_ptr() for norm in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm))
    linears = (layer.qkv, layer.out, layer.gate_up, layer.down)
    projections = (pointer for linear in linears if isinstance(linear, PackedLinear) for pointer in linear.pointers)
    return _Layer(*norms, *projections, layer.sliding_window)

"""The loaded C++ library with its signatures, and the checks that keep wrong pointers out of it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_spec_kernels.build import BuildError, load_library

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "rs_panel_columns": ([], _L),
    "rs_max_head_dim": ([], _L),
    "rs_pack_weight": ([_I, _P, _L, _L, _P, _I], None),
    "rs_linear": ([_I, _I, _P, _L, _L, _L, _P, _P, _L, _P, _I], None),
    "rs_add_rms_norm": ([_I, _P, _P, _P, _P, _P, _L, _L, _F, _I], None),
    "rs_qkv_rope_store": ([_I, _P, _P, _P, _P, _P, _F, _P, _P, _P, _P, _P, *[_L] * 8, _I], ctypes.c_bool),
    "rs_attention": ([_I, *[_P] * 8, *[_L] * 10, _F, _L, _I], ctypes.c_bool),
    "rs_silu_mul": ([_I, _P, _P, _L, _L, _I], None),
    "rs_commit": ([_P, _P, *[_L] * 6, _P, _P, _P, *[_L] * 4, _I], ctypes.c_bool),
    "rs_decoder": ([_P, _P], ctypes.c_bool),
    "rs_log_softmax_stats": ([_I, _P, _P, _P, _P, _L, _L, _I], None),
    "rs_truncated_log_softmax": ([_I, *[_P] * 7, _L, _L, _I], None),
    "rs_draft_chains": ([_P, _P], _L),
    "rs_gumbel_noise": ([_P, _P, _L, _P, _P, _L, _L, _I], None),
    "rs_uniforms": ([_P, _P, _L, _P, _L, _L], None),
    "rs_gumbel_argmax": ([_P, _P, _P, _L, _P, _L, _L, _I], None),
    "rs_inverse_cdf": ([_P, _P, _P, _L, _L, _I], None),
    "rs_verify_state_bytes": ([_L], _L),
    "rs_verify": ([_P], _I),
}


@functools.cache
def library() -> ctypes.CDLL:
    loaded = load_library()
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    return loaded


@functools.cache
def unavailable_reason() -> str | None:
    """Why the CPU kernels cannot be used here, or None if they can. The first call compiles them."""
    try:
        library()
    except BuildError as error:
        return str(error)
    return None


def is_bfloat16(name: str, tensor: Tensor) -> bool:
    """Checks the one thing every kernel rests on: a CPU tensor of one of the two dtypes."""
    if tensor.dtype is torch.bfloat16 and tensor.is_cpu:
        return True
    if tensor.dtype is torch.float32 and tensor.is_cpu:
        return False
    raise ValueError(f"{name} must be float32 or bfloat16 on the CPU; got {tensor.dtype} on {tensor.device}")


def checked(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor, contiguous, after its dtype, device and shape are checked."""
    if tensor.dtype is not dtype or not tensor.is_cpu or tensor.shape != torch.Size(shape):
        raise ValueError(f"{name} must be {dtype} {tuple(shape)} on the CPU; got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}")
    return tensor.contiguous()

"""verify and truncated log-softmax on a GPU: csrc/verify.cu and csrc/truncation.cu, built by nvcc on first use.

Shape legend: B requests, R rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import fields

import torch
from torch import Tensor

from rollout_spec.engine.ops import LogSoftmaxStats, TorchLogSoftmaxStats
from rollout_spec.tree import DraftTree
from rollout_spec.truncation import Truncations
from rollout_spec.verdict import Verdict
from rollout_spec.verify import Scheme, TargetRows, VerifyNoise
from rollout_spec.verify import verify as readable_verify
from rollout_spec_kernels.build import BuildError, load_cuda_library
from rollout_spec_kernels.verify import DECLINED, DONE, FINISHED, Machine, Verification, verify_on


def stream_machine(library: ctypes.CDLL, device: torch.device) -> Machine:
    """Verification by a library built from verify.cu, on the device's current stream."""
    library.rs_verify_state_bytes.argtypes, library.rs_verify_state_bytes.restype = [ctypes.c_int64], ctypes.c_int64
    library.rs_verify_on_stream.argtypes, library.rs_verify_on_stream.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int

    def run(verification: Verification, wanted: Tensor) -> int:
        _check(library.rs_verify_on_stream(ctypes.byref(verification), _stream(device)))
        return DONE if bool((wanted == FINISHED).all()) else DECLINED

    return Machine(device=device, takes_rows_later=False, state_bytes=library.rs_verify_state_bytes, run=run)


def truncate_on(library: ctypes.CDLL, logits: Tensor, truncations: Truncations) -> LogSoftmaxStats:
    """``truncated_log_softmax`` by a library built from truncation.cu, on the current stream of the logits' device."""
    if logits.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"logits must be float32 or bfloat16; got {logits.dtype}")
    num_rows, vocab_size = logits.shape
    held = [getattr(truncations, field.name).to(logits.device).contiguous() for field in fields(truncations)]
    if any(of.numel() != num_rows for of in held):
        raise ValueError(f"{num_rows} rows of logits need as many truncations; got {held[0].numel()}")
    logits = logits.contiguous()
    log_probs = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    entropies = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    pointers = [ctypes.c_void_p(of.data_ptr()) for of in (logits, *held, log_probs, entropies)]
    sizes = (ctypes.c_int64(num_rows), ctypes.c_int64(vocab_size))
    is_bf16 = ctypes.c_int(logits.dtype is torch.bfloat16)
    _check(library.rs_truncated_log_softmax_on_stream(is_bf16, *pointers, *sizes, ctypes.c_void_p(_stream(logits.device))))
    return TorchLogSoftmaxStats(log_probs=log_probs, entropies=entropies)


def _stream(device: torch.device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the kernels could not be launched: CUDA error {status}")


def sees_gpu() -> bool:
    return torch.cuda.is_available()


@functools.cache
def _library() -> ctypes.CDLL:
    return load_cuda_library()


@functools.cache
def unavailable_reason() -> str | None:
    """Why the CUDA kernels cannot be used here, or None if they can. The first call on a machine with a GPU compiles them."""
    if not sees_gpu():
        return "torch sees no GPU"
    try:
        _library()
    except BuildError as error:
        return str(error)
    return None


def verify(tree: DraftTree, target: TargetRows, noise: VerifyNoise, scheme: Scheme) -> Verdict:
    """rollout_spec.verify.verify with the tree and all the target's rows on one GPU: one launch for trees, three for chains.

    Whatever the kernels decline, and what does not lie on a GPU, goes to the readable verifier. Raises BuildError where
    `unavailable_reason` is not None, RuntimeError if a kernel cannot be launched.
    """
    verdict = verify_on(stream_machine(_library(), tree.device), tree, target, noise, scheme) if tree.device.type == "cuda" else None
    return readable_verify(tree, target, noise, scheme) if verdict is None else verdict


def truncated_log_softmax(logits: Tensor, truncations: Truncations) -> LogSoftmaxStats:
    """log softmax of logits [R, V] over their temperatures in the support of min-p, top-k and top-p, as CpuOps.truncated_log_softmax.

    For logits on a GPU, float32 or bfloat16, else ValueError; one launch, a block a row. The supports are truncation.truncate_'s, ties
    included, unless a nucleus' mass is within float32 rounding of top_p. Raises BuildError where `unavailable_reason` is not None.
    """
    if logits.device.type != "cuda":
        raise ValueError(f"logits must be on a GPU; got {logits.device}: rollout_spec_kernels.cpu.CpuOps is for the CPU")
    return truncate_on(_library(), logits, truncations)

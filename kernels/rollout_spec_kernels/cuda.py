"""verify on a GPU: csrc/verify.cu, built by nvcc on first use.

Shape legend: B requests.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from rollout_spec.tree import DraftTree
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
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        status = library.rs_verify_on_stream(ctypes.byref(verification), stream)
        if status:
            raise RuntimeError(f"the verification kernels could not be launched: CUDA error {status}")
        return DONE if bool((wanted == FINISHED).all()) else DECLINED

    return Machine(device=device, takes_rows_later=False, state_bytes=library.rs_verify_state_bytes, run=run)


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

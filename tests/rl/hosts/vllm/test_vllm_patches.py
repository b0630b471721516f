"""Each patch of vLLM is written against what is installed, and goes when vLLM is mended."""

from __future__ import annotations

import pytest

from rollout_spec_rl.patching import Patch
from rollout_spec_rl.vllm import patches


@pytest.mark.parametrize("patch", patches.EVERY_PATCH, ids=lambda patch: patch.target)
def test_upstream_is_what_the_patch_knows(patch: Patch) -> None:
    assert patch.fingerprint() == patch.upstream, f"{patch.target} changed upstream: see whether the patch is still right ({patch.reason})"


def test_an_untested_vllm_is_refused_unless_the_environment_says_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    patches.check_version()
    monkeypatch.setattr(patches.metadata, "version", lambda _: "0.40.0+cpu")
    with pytest.raises(ValueError, match=r"vLLM 0\.40\.0 is not among .*\(0\.31\.0\): install one of them, or set ROLLOUT_SPEC_ANY_VLLM=1"):
        patches.check_version()
    monkeypatch.setenv(patches.OVERRIDE, "1")
    patches.check_version()


def original(target: str) -> object:
    from rollout_spec_rl.patching import place

    owner, name = place(target)
    found = getattr(owner, name)
    return getattr(found, "__rollout_spec_patch__", found)


def test_expanded_temperatures_are_still_dropped() -> None:
    """Fails when vLLM fills what it was given: then the patch can go."""
    import torch

    out = torch.full((3,), -7.0)
    expand = original("vllm.utils.cpu_triton_utils:_expand_kernel_impl")
    assert callable(expand)
    given = (torch.tensor([0.0, 0.5]), torch.tensor([1, 3], dtype=torch.int32), 0, 1)
    expand(out, *given)
    assert out.tolist() == [-7.0] * 3, "vLLM is mended: take the patch out"
    patches.ON_CPU[0].replace(expand)(out, *given)
    assert out.tolist() == [1.0, 0.5, 0.5]


def test_nothing_to_constrain_still_fails() -> None:
    from types import SimpleNamespace

    import torch
    from vllm.platforms import current_platform

    constrain = original("vllm.v1.sample.rejection_sampler:apply_sampling_constraints")
    assert callable(constrain)
    for patch in patches.ON_CPU:
        patch.apply()
    current_platform.register_triton_kernel_overrides()  # as vLLM does before it makes a worker
    metadata = SimpleNamespace(all_greedy=False, temperature=torch.ones(1), top_k=torch.tensor([2]), top_p=None)
    given = (torch.empty(0, 8), torch.zeros(1, dtype=torch.int32), metadata)
    with pytest.raises((IndexError, RuntimeError)):
        constrain(*given)
    assert patches.ON_CPU[1].replace(constrain)(*given).shape == (0, 8)


def test_generators_of_a_cpu_still_cannot_be_wound_back() -> None:
    """Fails when either side is mended: torch's generators, or vLLM's use of them."""
    import inspect

    import torch

    bookkeeping = original("vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync")
    assert callable(bookkeeping)
    assert "get_offset" in inspect.getsource(bookkeeping)
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator().get_offset()


def test_packed_weights_are_still_dropped() -> None:
    """Fails when vLLM keeps them: then loading under verl needs no patch."""
    import inspect

    dispatch = original("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm")
    assert "remove_weight" in inspect.signature(dispatch).parameters

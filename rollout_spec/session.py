"""From the command line's words to the objects they name: schemes, budgets, widths, a loaded model with its runner.

Everything here raises ValueError with the option's name and the mend; the command line prints it and ends with code 2.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rollout_spec.budget import BudgetController, FixedBudget
from rollout_spec.composition import Composition, DrafterOptions, draw_for
from rollout_spec.controllers import BatchTableBudget, EntropyBudget, ThroughputBudget
from rollout_spec.drafter import Drafter
from rollout_spec.engine.load import LoadedModel, load_model, make_runner
from rollout_spec.engine.runner import ModelRunner
from rollout_spec.prompts import Prompt, load_prompts
from rollout_spec.verify import Scheme

AUTO = "auto"
# Contexts grow in steps, so that runs on similar prompts allocate alike.
_CONTEXT_STEP = 64


@dataclass(frozen=True, kw_only=True)
class Session:
    """A model that is ready to run, and prompts for it."""

    loaded: LoadedModel
    runner: ModelRunner
    prompts: Sequence[Prompt]
    max_context: int


def open_session(
    composition: Composition,
    *,
    model: str,
    prompts: str,
    dtype: str,
    threads: int | None,
    max_new_tokens: int,
    report: Callable[[str], None],
) -> Session:
    """Load the model and prompts, with room for every prompt that fits the model; longer ones are refused one by one later."""
    set_threads(threads)
    loaded = load_model(model, dtype, report)
    found = load_prompts(prompts, loaded.tokenizer)
    limit: int = loaded.module.config.max_position_embeddings
    needed = [len(prompt.token_ids) + max_new_tokens for prompt in found]
    longest = max((length for length in needed if length <= limit), default=min(limit, max(needed)))
    max_context = min(limit, -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP)
    runner = make_runner(loaded.module, max_context=max_context, ops=composition.make_ops())
    return Session(loaded=loaded, runner=runner, prompts=found, max_context=max_context)


def set_threads(threads: int | None) -> None:
    """Compute threads of torch and of the kernels; None leaves torch's own choice."""
    if threads is None:
        return
    if not 1 <= threads <= 1024:
        raise ValueError(f"--threads must be a positive number, got {threads}")
    cores = os.cpu_count() or 1
    if threads > cores:
        raise ValueError(f"--threads {threads} on {cores} cores makes them wait for each other; use at most {cores}")
    torch.set_num_threads(threads)


def parse_scheme(verifier: str) -> Scheme | None:
    """A scheme by name; "auto" is None: chosen by the drafter's kind of tree."""
    if verifier == AUTO:
        return None
    try:
        return Scheme(verifier)
    except ValueError:
        raise ValueError(f"--verifier {verifier!r} is not one of auto, {', '.join(scheme.value for scheme in Scheme)}") from None


def parse_widths(text: str) -> tuple[int, ...]:
    """ "2,2,1" -> (2, 2, 1): children a node by depth."""
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        widths = ()
    if not widths or min(widths) < 1:
        raise ValueError(f"--tree-width {text!r}: give positive widths by depth, like 2,2,1 (1 = a chain)")
    return widths


def parse_budget(text: str, draft_length: int, tree_width: tuple[int, ...]) -> BudgetController:
    """A controller by name; draft_length is the deepest that "auto" and "entropy" go, and 0 turns drafting off under any name."""
    if draft_length < 0:
        raise ValueError(f"draft_length must be 0 or more, got {draft_length}")
    kind, _, value = text.partition(":")
    if text == "off" or draft_length == 0:
        return FixedBudget(draft_length=0, tree_width=tree_width)
    if text == AUTO:
        return ThroughputBudget(max_length=draft_length, tree_width=tree_width)
    if text == "entropy":
        return EntropyBudget(max_length=draft_length, tree_width=tree_width)
    if kind == "fixed" and value.isdecimal():
        return FixedBudget(draft_length=int(value), tree_width=tree_width)
    if kind == "batch_table" and value:
        return BatchTableBudget.load(Path(value), tree_width)
    raise ValueError(f"--budget {text!r}: give off, fixed:K (like fixed:4), batch_table:FILE, entropy or auto")


def parse_logit_bias(text: str | None) -> dict[int, float]:
    """A JSON object of token id -> bias."""
    if text is None:
        return {}
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f'--logit-bias {text!r}: give a JSON object of token id to bias, like {{"42": -5}} ({error})') from None


def drafter_factory(
    composition: Composition,
    loaded: LoadedModel,
    *,
    scheme: Scheme | None,
    seeded: bool,
    tree_width: tuple[int, ...],
    history: Path | None = None,
) -> Callable[[str], Drafter | None]:
    """Makes a fresh drafter for a name, with draws that suit the verifier."""
    draw = draw_for(scheme, seeded=seeded, wide=max(tree_width) > 1)

    def make(spec: str) -> Drafter | None:
        return composition.make_drafter(DrafterOptions(spec=spec, draw=draw, history=history), loaded, composition.make_ops())

    return make

"""refresh_before_rl: a drafter for the policy, prompts, temperature and lengths that a run begins with. Nothing here imports verl."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec.files import write_text
from rollout_spec_rl.compose import make_ops
from rollout_spec_rl.verl import BACKEND
from rollout_spec_rl.verl.options import WHERE, RolloutPlan, plan_rollouts
from rollout_spec_rl.vllm.options import WHERE as IN_VLLM

if TYPE_CHECKING:
    from rollout_spec_mtp.training.config import TrainConfig

_SERVED_PROMPTS = 16
_WITH_VLLM = ("refresh_before_rl", "drafter_config", "drafter_cache")


def plan_before_vllm(rollout: Mapping[str, Any], drafter: str) -> RolloutPlan | None:
    """What to train before rollouts by vLLM, by the same three options as with the embedded engine; None if nothing.

    rollout: verl's rollout config; drafter: vLLM's, as it is given. Raises ValueError for options that only the embedded engine follows.
    """
    given = (rollout.get("custom") or {}).get(BACKEND) or {}
    foreign = sorted(set(given) - set(_WITH_VLLM))
    if foreign:
        raise ValueError(
            f"{WHERE}.{foreign[0]} is for the embedded engine; with vLLM options stand under "
            f"actor_rollout_ref.rollout.engine_kwargs.vllm.{IN_VLLM}, except {', '.join(_WITH_VLLM)}"
        )
    if not given.get("refresh_before_rl") and "drafter_config" not in given:
        return None
    return plan_rollouts({**rollout, "custom": {BACKEND: {**given, "drafter": drafter}}}, before_training=True)


def train_before_rl(plan: RolloutPlan, model: str, data: Mapping[str, Any]) -> Path:
    """Folder of the drafter that the plan's drafter_config gives on the policy at ``model`` and the prompts of verl's ``data``.

    From the cache if it was trained before for these weights, prompts and settings; an interrupted training goes on where it stopped.
    Raises ValueError for files and settings that cannot be used.
    """
    from rollout_spec_mtp.cli import console_display
    from rollout_spec_mtp.refresh import drafters_dir, refreshed_drafter

    options = plan.options
    cache = drafters_dir() if options.drafter_cache is None else Path(options.drafter_cache).expanduser()
    with console_display() as display:
        display.say(f"rollout_spec: drafter for {model} by {options.drafter_config}")
        return refreshed_drafter(training_config(plan, model, data, cache), cache, make_ops(), display)


def training_config(plan: RolloutPlan, model: str, data: Mapping[str, Any], cache: Path) -> TrainConfig:
    """The plan's drafter_config with the run's own policy, prompts, temperature, response length and precision."""
    from rollout_spec_mtp.training.config import load_config

    options = plan.options
    assert options.drafter_config is not None
    given = load_config(Path(options.drafter_config).expanduser())
    files = data["train_files"]
    prompts = rl_prompts([files] if isinstance(files, str) else list(files), str(data.get("prompt_key") or "prompt"))
    collect = dataclasses.replace(
        given.collect,
        prompts=str(_written(prompts, cache)),
        temperature=plan.temperature,
        max_new_tokens=plan.response_length,
        dtype=plan.dtype,
    )
    evaluate = given.evaluate
    if evaluate.served_prompts is not None:
        # What is judged there is that the served drafter is the trained one; a score on fresh prompts is what held_out is for.
        served = _written(prompts[:_SERVED_PROMPTS], cache)
        length = min(evaluate.served_max_new_tokens, plan.response_length)
        evaluate = dataclasses.replace(evaluate, served_prompts=str(served), served_max_new_tokens=length)
    threads = given.threads if options.threads is None else options.threads
    return dataclasses.replace(given, model=model, collect=collect, evaluate=evaluate, threads=threads)


def rl_prompts(files: Sequence[str], key: str) -> list[object]:
    """The prompts of verl's data files, each once, in a fixed random order (files come sorted by source or difficulty)."""
    texts = {json.dumps(prompt) for file in files for prompt in _prompts_of(Path(file).expanduser(), key)}
    if not texts:
        raise ValueError(f"data.train_files hold no prompts: {', '.join(files)}")
    ordered = sorted(texts)
    random.Random(0).shuffle(ordered)
    return [json.loads(text) for text in ordered]


def _prompts_of(path: Path, key: str) -> Iterator[object]:
    if not path.is_file():
        raise ValueError(f"data.train_files: {path} does not exist on this machine")
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        if key not in pq.read_schema(path).names:
            raise ValueError(f"data.train_files: {path} has no column {key!r} (data.prompt_key)")
        yield from pq.read_table(path, columns=[key]).column(key).to_pylist()
        return
    if path.suffix not in (".json", ".jsonl"):
        raise ValueError(f"data.train_files: {path} is neither parquet nor JSON lines, so no drafter can be trained on its prompts")
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            row = json.loads(line) if line.strip() else None
            if row is None:
                continue
            if not isinstance(row, dict) or key not in row:
                raise ValueError(f"data.train_files: {path}, line {number} is no object with {key!r} (data.prompt_key)")
            yield row[key]


def _written(prompts: Sequence[object], cache: Path) -> Path:
    """A prompts file under a name by its contents, so that other prompts are other settings for the cache."""
    text = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    path = cache / "prompts" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_text(path, text)
    return path

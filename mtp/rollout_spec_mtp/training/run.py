"""The whole way from a config to an evaluated drafter: collect, train, evaluate."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from rollout_spec.engine.load import LoadedModel, load_model, make_runner
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.runner import ModelRunner
from rollout_spec.events import EventSink
from rollout_spec.files import write_text
from rollout_spec.prompts import Prompt, load_prompts
from rollout_spec.sinks import JsonlSink
from rollout_spec_mtp.configs import to_mapping
from rollout_spec_mtp.kinds import kind_of
from rollout_spec_mtp.serving import load_trained
from rollout_spec_mtp.training.batches import Batches, split_held_out
from rollout_spec_mtp.training.collect import CollectConfig, Collector
from rollout_spec_mtp.training.config import TrainConfig
from rollout_spec_mtp.training.evaluation import evaluate_drafter
from rollout_spec_mtp.training.packing import supervision_lines
from rollout_spec_mtp.training.protocol import PolicyParts, TrainableDrafter
from rollout_spec_mtp.training.shards import RolloutSet, read_index
from rollout_spec_mtp.training.trainer import Trainer, check_resume
from rollout_spec_mtp.training.vocabulary import draft_vocabulary, expected_counts


class Display(Protocol):
    """Where progress is shown."""

    def say(self, line: str) -> None: ...

    def bar(self, name: str, total: int, done: int) -> Callable[[int, str], None]:
        """Opens a bar; the result is called with how much is done, and a note."""


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """A loaded policy and the operations it runs on."""

    loaded: LoadedModel
    ops: Ops
    name: str

    @property
    def policy(self) -> PolicyParts:
        return PolicyParts.of(self.loaded.module)

    def runner(self, prompts: Sequence[Prompt], max_new_tokens: int) -> ModelRunner:
        limit: int = self.loaded.module.config.max_position_embeddings
        longest = max((len(prompt.token_ids) for prompt in prompts), default=1)
        return make_runner(self.loaded.module, max_context=min(limit, longest + max_new_tokens + 1), ops=self.ops)


def open_workplace(model: str, dtype: str, ops: Ops, display: Display) -> Workplace:
    return Workplace(loaded=load_model(model, dtype, display.say), ops=ops, name=model)


def run_collect(workplace: Workplace, config: CollectConfig, hidden_layers: tuple[int, ...], folder: Path, display: Display) -> RolloutSet:
    """Rollouts of the config in the folder: those that are there are kept, what is missing is sampled."""
    index = read_index(folder)
    prompts = load_prompts(config.prompts, workplace.loaded.tokenizer)
    collector = Collector(
        config,
        runner=workplace.runner(prompts, config.max_new_tokens),
        policy=workplace.policy,
        prompts=prompts,
        hidden_layers=hidden_layers,
        folder=folder,
        model=workplace.name,
    )
    if index is None or not index["complete"]:
        total = collector.total if config.max_tokens is None else config.max_tokens
        update = display.bar("collect", total, 0)
        collector.run(lambda sequences, tokens: update(sequences if config.max_tokens is None else tokens, f"{tokens} tokens"))
    return RolloutSet(folder)


def collect_only(config: TrainConfig, folder: Path, ops: Ops, display: Display) -> RolloutSet:
    """The rollouts that training with this config would use."""
    workplace = open_workplace(config.model, config.collect.dtype, ops, display)
    return run_collect(workplace, config.collect, _hidden_layers(config, workplace.policy), folder, display)


def run_training(
    config: TrainConfig,
    out: Path,
    ops: Ops,
    display: Display,
    *,
    resume: bool,
    accelerator: Accelerator | None = None,
    workplace: Workplace | None = None,
) -> dict[str, Any]:
    """Collect (if need be), train and evaluate; returns what evaluation.json holds. ``workplace``: the policy, if it is loaded already."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    # The policy first: once a ZeRO-3 accelerator exists, transformers would load it in shards, and it is lent whole.
    workplace = workplace or open_workplace(config.model, config.collect.dtype, ops, display)
    accelerator = _accelerator(config, out) if accelerator is None else accelerator
    settings: dict[str, Any] = to_mapping(config)
    if accelerator.is_main_process:
        check_resume(out, settings, resume=resume)
    layers = _hidden_layers(config, workplace.policy)
    with accelerator.main_process_first():
        rollouts = run_collect(workplace, config.collect, layers, out / "rollouts", display)
    with contextlib.closing(JsonlSink(out / "train.jsonl")) as sink:
        held_out = _train(config, workplace.policy, rollouts, accelerator, sink, out, display, resume=resume)
    if not accelerator.is_main_process:
        return {}
    return run_evaluation(config, workplace, out, held_out, display)


def _train(
    config: TrainConfig,
    policy: PolicyParts,
    rollouts: RolloutSet,
    accelerator: Accelerator,
    sink: EventSink,
    out: Path,
    display: Display,
    *,
    resume: bool,
) -> dict[str, float]:
    """Held-out acceptance of the last weights."""
    trainer, model = make_trainer(config, policy, rollouts, accelerator=accelerator, sink=sink, out=out)
    start = trainer.resume() if resume else 0
    if config.train.trackers:
        accelerator.init_trackers("rollout_spec", config=_flat(to_mapping(config)))
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    display.say(f"{len(rollouts)} sequences, {trainer.num_steps} steps from step {start}, drafter of {parameters:.1f} M parameters")
    update = display.bar("train", trainer.num_steps, start)
    trainer.run(lambda step, metrics: update(step, f"loss {metrics['loss']:.3f}  length {1 + metrics['rejection_length_estimate']:.2f}"))
    held_out = trainer.evaluate()  # by all processes: ZeRO-3 gathers the weights for it
    accelerator.end_training()
    return held_out


def make_trainer(
    config: TrainConfig, policy: PolicyParts, rollouts: RolloutSet, *, accelerator: Accelerator, sink: EventSink, out: Path
) -> tuple[Trainer, Any]:
    """A trainer at step 0 with a fresh drafter."""
    training, held_out = split_held_out(rollouts, config.evaluate.held_out)
    ids = None
    if config.drafter.draft_vocabulary is not None:
        counts = expected_counts(rollouts, training, policy.head, config.collect.temperature)
        ids = draft_vocabulary(counts, config.drafter.draft_vocabulary)
    torch.manual_seed(config.train.seed)
    model = kind_of(config.drafter.kind).build(config.drafter.settings, policy, ids)
    options = config.train
    trainer = Trainer(
        config,
        model,
        policy,
        batches=Batches(rollouts, training, row_tokens=options.row_tokens, seed=options.seed),
        held_out=Batches(rollouts, held_out, row_tokens=options.row_tokens, seed=options.seed),
        accelerator=accelerator,
        sink=sink,
        out=out,
    )
    return trainer, model


def run_evaluation(config: TrainConfig, workplace: Workplace, out: Path, held_out: dict[str, float], display: Display) -> dict[str, Any]:
    """Held-out numbers of the last weights and, if the config names prompts for it, what the engine makes of the best ones."""
    report: dict[str, Any] = {"held_out": held_out}
    served = config.evaluate.served_prompts
    if served is not None:
        display.say(f"serving {served} with the trained drafter")
        prompts = load_prompts(served, workplace.loaded.tokenizer)
        policy = workplace.policy
        model = load_trained(out / "drafter", policy)
        report |= evaluate_drafter(
            model,
            kind_of(model.kind).serve(model, policy, workplace.ops, None),
            policy=policy,
            runner=workplace.runner(prompts, config.evaluate.served_max_new_tokens),
            prompts=prompts,
            temperature=config.collect.temperature,
            draft_length=model.num_slots,
            max_new_tokens=config.evaluate.served_max_new_tokens,
        )
    write_text(out / "evaluation.json", json.dumps(report, indent=2) + "\n")
    return report


def show_supervision(config: TrainConfig, out: Path, ops: Ops, display: Display) -> Iterator[str]:
    """The first packed row of the training set, token by token, with the slots that each token supervises."""
    workplace = open_workplace(config.model, config.collect.dtype, ops, display)
    policy, rollouts = workplace.policy, RolloutSet(out / "rollouts")
    training, _ = split_held_out(rollouts, config.evaluate.held_out)
    batches = Batches(rollouts, training, row_tokens=config.train.row_tokens, seed=config.train.seed)
    batch = batches.batch([0], policy.head.device)
    model = kind_of(config.drafter.kind).build(config.drafter.settings, policy, None)
    tokenizer = workplace.loaded.tokenizer
    return supervision_lines(batch, model.layout(batch, config.train.seed), lambda tokens: str(tokenizer.decode(list(tokens))))


def _hidden_layers(config: TrainConfig, policy: PolicyParts) -> tuple[int, ...]:
    model: TrainableDrafter = kind_of(config.drafter.kind).build(config.drafter.settings, policy, None)
    return model.hidden_layers


def _accelerator(config: TrainConfig, out: Path) -> Accelerator:
    trackers = list(config.train.trackers)
    return Accelerator(log_with=trackers or None, project_dir=str(out), step_scheduler_with_optimizer=False)


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """section.key -> value, which is what trackers take."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, int | float | str | bool) else json.dumps(value)
    return flat

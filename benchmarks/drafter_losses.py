"""Losses side by side: every arm goes on from one warmed-up drafter, over the same tokens in the same order, for the same steps.

    python benchmarks/drafter_losses.py --config configs/drafter/mtp_smollm2.yaml --out runs/losses_mtp [--rollouts FOLDER]
        [--arms ce,kl,tv] [--warmup-steps 60] [--steps 60] [--lr 5e-4] [--held-out 0.15] [--set drafter.settings.draft_length=4]

Collects the config's rollouts into OUT/rollouts unless --rollouts names a folder that has them. Each arm ends as OUT/ARM.json: its last
weights judged teacher-forced on every held-out sequence. Run again, an interrupted comparison goes on where it was: arms that have their
file are kept, an arm in the middle resumes from its checkpoint. The table (also OUT/table.md, with OUT/summary.json beside it) compares
sequence by sequence.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from loss_report import COMPARISONS, summarise, table
from progress import Lines

from rollout_spec.files import write_text
from rollout_spec.sinks import JsonlSink
from rollout_spec_mtp.checkpoint import save_drafter
from rollout_spec_mtp.configs import to_mapping
from rollout_spec_mtp.kinds import kind_of
from rollout_spec_mtp.losses import LossConfig
from rollout_spec_mtp.losses.objectives import block_length, e2e_length, rejection_length
from rollout_spec_mtp.serving import load_trained
from rollout_spec_mtp.training.batches import Batches, split_held_out
from rollout_spec_mtp.training.config import Phase, TrainConfig, load_config
from rollout_spec_mtp.training.evaluation import TeacherForced, teacher_forced
from rollout_spec_mtp.training.protocol import PolicyParts
from rollout_spec_mtp.training.run import make_trainer, open_workplace, run_collect
from rollout_spec_mtp.training.shards import RolloutSet
from rollout_spec_mtp.training.trainer import Trainer
from rollout_spec_rl.compose import make_ops

START = "start"
_KL = LossConfig(kl=1.0)
# The soft form of cross-entropy favours no arm. A recursive head learns most from its first step, which costs a fraction of all.
WARM_UP: Mapping[str, tuple[Phase, ...]] = {
    "mtp": (Phase(share=0.6, loss=_KL, slots=1), Phase(share=0.4, loss=_KL)),
    "block": (Phase(share=1.0, loss=_KL),),
}
_SLOT_LOSSES = ("ce", "kl", "tv", "hybrid")
_ANCHOR_LOSSES = ("e2e_tv", "rejection_length", "block_length")
# The three interventions of arXiv 2606.11552 on top of cross-entropy. Its decay of 7 is for the 15 slots of a block of 16; the same
# share of a block with 4 slots is 2.
_POSITION: Mapping[str, Any] = {"position_weight": {"decay": 2.0}}
_FOCAL: Mapping[str, Any] = {"first_error_focal": {"weight": 1.0, "exponent": 2.0}}
_CHAIN: Mapping[str, Any] = {"chain": 1.0}
ARMS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "mtp": {name: {name: 1.0} for name in _SLOT_LOSSES + _ANCHOR_LOSSES},
    "block": {
        "ce": {"ce": 1.0},
        "ce+position": {"ce": 1.0, **_POSITION},
        "ce+focal": {"ce": 1.0, **_FOCAL},
        "ce+chain": {"ce": 1.0, **_CHAIN},
        "ce+all": {"ce": 1.0, **_POSITION, **_FOCAL, **_CHAIN},
        "e2e_tv": {"e2e_tv": 1.0},
    },
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What all arms share."""

    config: TrainConfig
    policy: PolicyParts
    rollouts: RolloutSet
    held_out: Sequence[int]
    out: Path
    warmup_steps: int
    steps: int
    lr: float
    seed: int  # of the arms' order of tokens

    def settings(self) -> dict[str, object]:
        """What the warm-up and every arm must have been made with."""
        training = [n for n in range(len(self.rollouts)) if n not in set(self.held_out)]
        settings: dict[str, object] = {
            "config": {**to_mapping(self.config), "phases": None},
            "warm_up": to_mapping(WARM_UP[self.config.drafter.kind]),
            "warmup_steps": self.warmup_steps,
            "num_training_sequences": len(training),
            "num_training_tokens": sum(self.rollouts.length(n) - self.rollouts.prompt_length(n) for n in training),
            "num_held_out_sequences": len(self.held_out),
        }
        plain: dict[str, object] = json.loads(json.dumps(settings))
        return plain

    def arm_config(self, phases: tuple[Phase, ...], steps: int, seed: int, lr: float) -> TrainConfig:
        """The config of one arm: nothing in it is chosen by looking at held-out sequences."""
        options = self.config.train
        training, _ = split_held_out(self.rollouts, self.config.evaluate.held_out)
        rows = len(Batches(self.rollouts, training, row_tokens=options.row_tokens, seed=seed).rows)
        return dataclasses.replace(
            self.config,
            phases=phases,
            train=dataclasses.replace(
                options, epochs=steps * options.rows_per_step / rows, seed=seed, lr=lr, warmup_steps=min(options.warmup_steps, steps // 10)
            ),
            evaluate=dataclasses.replace(self.config.evaluate, every_steps=steps, max_rows=1, patience=None, served_prompts=None),
        )

    def run_warm_up(self) -> None:
        """The drafter that all arms start from."""
        options, phases = self.config.train, WARM_UP[self.config.drafter.kind]
        self._run(START, self.arm_config(phases, self.warmup_steps, options.seed, options.lr), self.warmup_steps, None)

    def run_arm(self, name: str, loss: Mapping[str, Any]) -> None:
        """Train one arm from the warmed-up drafter, and write its file; nothing if it is there."""
        phases = (Phase(share=1.0, loss=LossConfig.from_mapping(loss)),)
        self._run(name, self.arm_config(phases, self.steps, self.seed, self.lr), self.steps, self.out / "arms" / START / "last")

    def _run(self, name: str, config: TrainConfig, steps: int, start: Path | None) -> None:
        path, options = self.out / f"{name}.json", config.train
        about: dict[str, object] = {"arm": name, "num_steps": steps, "seed": options.seed, "lr": options.lr}
        about |= {"phases": json.loads(json.dumps(to_mapping(config.phases))), "settings": self.settings()}
        if path.exists():
            held = json.loads(path.read_text())
            if different := [key for key in about if held[key] != about[key]]:
                raise ValueError(f"{path} was made with other settings ({', '.join(different)}): choose another --out, or delete it")
            return
        folder = self.out / "arms" / name
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(JsonlSink(folder / "train.jsonl")) as sink:
            trainer, model = self._trainer(config, start, sink, folder)
            assert trainer.num_steps == steps
            update = Lines().bar(name, steps, trainer.resume())
            trainer.run(lambda step, metrics: update(step, f"loss {metrics['loss']:.3f}"))
        save_drafter(folder / "last", model, self.policy, about={"arm": name, "step": steps})
        record = {**about, "sequences": self.judge(model)}
        write_text(path, json.dumps(record) + "\n")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def _trainer(self, config: TrainConfig, start: Path | None, sink: JsonlSink, folder: Path) -> tuple[Trainer, Any]:
        """A trainer at step 0: of a fresh drafter, or of the one in ``start``."""
        accelerator = Accelerator(step_scheduler_with_optimizer=False)
        if start is None:
            return make_trainer(config, self.policy, self.rollouts, accelerator=accelerator, sink=sink, out=folder)
        model = load_trained(start, self.policy)
        training, held_out = (
            Batches(self.rollouts, numbers, row_tokens=config.train.row_tokens, seed=config.train.seed)
            for numbers in split_held_out(self.rollouts, config.evaluate.held_out)
        )
        trainer = Trainer(config, model, self.policy, batches=training, held_out=held_out, accelerator=accelerator, sink=sink, out=folder)
        return trainer, model

    def judge(self, model: Any) -> list[dict[str, Any]]:
        """Sums of a drafter's acceptance over each held-out sequence's positions, in float32 whatever the policy's dtype."""
        policy = dataclasses.replace(self.policy, head=self.policy.head.float())
        model.eval()
        temperature = self.config.collect.temperature
        texts = ((self.rollouts.key(n), teacher_forced(model, policy, self.rollouts[n], temperature)) for n in self.held_out)
        return [{"key": key, **sequence_sums(text)} for key, text in texts if text.anchors.numel()]


def sequence_sums(text: TeacherForced) -> dict[str, Any]:
    """Sums over a text's positions: lengths without the bonus token, and overlap with the number of slots at every depth."""
    stats = text.stats
    return {
        "num_positions": text.anchors.numel(),
        "e2e_length": float(e2e_length(stats).sum()),
        "rejection_length": float(rejection_length(stats).sum()),
        "block_length": float(block_length(stats).sum()),
        "overlap_by_depth": (stats.overlap * stats.valid).sum(0).tolist(),
        "num_slots_by_depth": stats.valid.sum(0).tolist(),
    }


def prepare(arguments: argparse.Namespace) -> Comparison:
    """Load the policy and its rollouts (collected if need be), and set the held-out sequences apart."""
    overrides = [f"evaluate.held_out={arguments.held_out}", *arguments.set]
    config = load_config(arguments.config, overrides)
    workplace = open_workplace(config.model, config.collect.dtype, make_ops(), Lines())
    policy = workplace.policy
    layers = kind_of(config.drafter.kind).build(config.drafter.settings, policy, None).hidden_layers
    if arguments.rollouts is None:
        rollouts = run_collect(workplace, config.collect, layers, arguments.out / "rollouts", Lines())
    else:
        rollouts = RolloutSet(arguments.rollouts)
        if missing := sorted(set(layers) - set(rollouts.hidden_layers)):
            raise ValueError(
                f"{arguments.rollouts} holds layers {rollouts.hidden_layers}, and the drafter reads {missing} too: collect again"
            )
    _, held_out = split_held_out(rollouts, config.evaluate.held_out)
    return Comparison(
        config=config,
        policy=policy,
        rollouts=rollouts,
        held_out=held_out,
        out=arguments.out,
        warmup_steps=arguments.warmup_steps,
        steps=arguments.steps,
        lr=arguments.lr,
        seed=arguments.seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rollouts", type=Path)
    parser.add_argument("--arms", help="default: all of the drafter's kind")
    parser.add_argument("--warmup-steps", type=int, default=60)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=5e-4, help="of the arms; the warm-up has the config's")
    parser.add_argument("--held-out", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=1, help="of the arms' order of tokens; the warm-up has the config's")
    parser.add_argument("--set", action="append", default=[], help="override of a setting of the config, like train.lr=3e-4")
    arguments = parser.parse_args()
    comparison = prepare(arguments)
    arms = ARMS[comparison.config.drafter.kind]
    wanted = list(arms) if arguments.arms is None else arguments.arms.split(",")
    if unknown := sorted(set(wanted) - set(arms)):
        parser.error(f"unknown arms {', '.join(unknown)}; known are {', '.join(arms)}")
    comparison.run_warm_up()
    for name in wanted:
        comparison.run_arm(name, arms[name])
    records = {name: json.loads((arguments.out / f"{name}.json").read_text()) for name in (START, *wanted)}
    summary = summarise(records, COMPARISONS[comparison.config.drafter.kind])
    about = {"settings": comparison.settings(), **{name: getattr(comparison, name) for name in ("steps", "lr", "seed")}}
    write_text(arguments.out / "summary.json", json.dumps({**about, **summary}, indent=1) + "\n")
    write_text(arguments.out / "table.md", table(summary))
    print(table(summary))


if __name__ == "__main__":
    main()

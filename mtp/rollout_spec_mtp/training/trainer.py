"""Trainer: accelerate's loop over packed rollouts, resumable to the bit.

Shape legend: T anchors, G slots of an anchor, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from rollout_spec.events import EventSink, TrainEvent
from rollout_spec.files import write_text
from rollout_spec_mtp.checkpoint import save_drafter
from rollout_spec_mtp.losses import DraftBatch, LossConfig, SlotCounts, chunked_loss
from rollout_spec_mtp.training.batches import Batches
from rollout_spec_mtp.training.config import TrainConfig
from rollout_spec_mtp.training.protocol import PackedBatch, PolicyParts, SlotLayout

_KEPT_CHECKPOINTS = 2
_EVALUATION = LossConfig(block_length=1.0)  # its metrics hold every acceptance length


@dataclass(kw_only=True)
class Progress:
    """What a checkpoint must remember besides weights, optimiser and random states."""

    step: int = 0  # optimiser steps done
    best_length: float = 0.0
    evaluations_since_best: int = 0
    ema: dict[str, Tensor] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class Trainer:
    """Trains ``model`` on ``batches``; the policy lends embedding, head and layer class and gets no gradient.

    ``out/drafter`` holds the best drafter by held-out accepted length, ``out/checkpoints/step-N`` the whole state.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Any,
        policy: PolicyParts,
        *,
        batches: Batches,
        held_out: Batches,
        accelerator: Accelerator,
        sink: EventSink,
        out: Path,
    ) -> None:
        self._config, self._policy, self._out, self._sink = config, policy, out, sink
        self._batches, self._held_out, self._accelerator = batches, held_out, accelerator
        options = config.train
        self.num_steps = batches.num_steps(options.epochs, options.rows_per_step)
        self._check_processes()
        self._check_phases(model)
        assert_policy_frozen(model, policy)
        decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=options.lr,
            betas=(options.betas[0], options.betas[1]),
        )
        self._bare = model
        self._model, self._optimizer = accelerator.prepare(model, optimizer)
        self.progress = Progress()
        accelerator.register_for_checkpointing(self.progress)
        dtype = getattr(torch, options.precision)
        head = policy.head.to(device=accelerator.device, dtype=dtype)
        ids = model.draft_token_ids
        self._target_head, self._student_head = head, head if ids is None else head[ids]

    def _check_processes(self) -> None:
        options, world = self._config.train, self._accelerator.num_processes
        per_process = options.rows_per_step // world
        if options.rows_per_step % (world * options.micro_rows):
            raise ValueError(
                f"train.rows_per_step {options.rows_per_step} must be a multiple of "
                f"{world} processes times train.micro_rows {options.micro_rows}"
            )
        if self._accelerator.distributed_type is DistributedType.DEEPSPEED and per_process != options.micro_rows:
            raise ValueError("DeepSpeed steps after every backward pass: set train.micro_rows to train.rows_per_step / processes")
        plugin = self._accelerator.state.deepspeed_plugin
        if options.ema_decay is not None and plugin is not None and plugin.zero_stage == 3:
            raise ValueError("train.ema_decay: no process holds the weights that ZeRO-3 spreads out; leave it out, or use ZeRO-2")

    def _check_phases(self, model: Any) -> None:
        for phase in self._config.phases:
            if phase.slots is not None and not (model.sequential and phase.slots <= model.num_slots):
                reason = f"it drafts {model.num_slots} tokens" if model.sequential else "it drafts a block in one pass"
                raise ValueError(f"phases: slots {phase.slots} cannot be trained of a drafter of kind {model.kind!r}: {reason}")

    def run(self, on_step: Callable[[int, dict[str, float]], None]) -> float:
        """Train from where ``progress`` stands to the end, or to an early stop; returns the best held-out accepted length."""
        config = self._config
        while self.progress.step < self.num_steps:
            step = self.progress.step
            metrics = self._step(step)
            self.progress.step = step + 1
            at_end = self.progress.step == self.num_steps
            if self.progress.step % config.evaluate.every_steps == 0 or at_end:
                metrics |= self._evaluate_and_keep_best()
            if step % config.train.log_steps == 0 or at_end:
                self._report(step, metrics)
            on_step(self.progress.step, metrics)
            if self.progress.step % config.train.checkpoint_steps == 0 or at_end:
                self.save_checkpoint()
            patience = config.evaluate.patience
            if patience is not None and self.progress.evaluations_since_best >= patience:
                break
        return self.progress.best_length

    def _step(self, step: int) -> dict[str, float]:
        options, accelerator = self._config.train, self._accelerator
        phase = self._config.phase_at(step, self.num_steps)
        lr = options.lr_at(step, self.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        batches, layouts = self._micro_batches(step, phase.slots)
        counts = self._global_counts(layouts)
        self._optimizer.zero_grad()
        totals: dict[str, Tensor] = {}
        for place, (batch, layout) in enumerate(zip(batches, layouts, strict=True)):
            with nullcontext() if place + 1 == len(batches) else accelerator.no_sync(self._model):
                output = self._loss(batch, layout, phase.loss, counts)
                # Data parallelism averages the processes' gradients; their shares are to be added.
                accelerator.backward(output.loss * accelerator.num_processes)
            for name, value in {"loss": output.loss.detach(), **output.metrics}.items():
                totals[name] = totals[name] + value if name in totals else value
        norm = accelerator.clip_grad_norm_(self._model.parameters(), options.max_grad_norm)
        if step == 0:
            assert all(parameter.grad is None for parameter in self._policy.module.parameters()), "the policy got a gradient"
        self._optimizer.step()
        self._update_ema()
        metrics = _floats({name: accelerator.reduce(value, reduction="sum") for name, value in totals.items()})
        return {**metrics, "lr": lr, "grad_norm": float(norm) if norm is not None else 0.0}

    def _micro_batches(self, step: int, slots: int | None) -> tuple[list[PackedBatch], list[SlotLayout]]:
        """This process's share of the step's rows, a micro-batch at a time; of each draft the first ``slots``."""
        options, accelerator = self._config.train, self._accelerator
        rows = self._batches.rows_of_step(step, options.rows_per_step)[accelerator.process_index :: accelerator.num_processes]
        batches = [
            self._batches.batch(rows[begin : begin + options.micro_rows], accelerator.device)
            for begin in range(0, len(rows), options.micro_rows)
        ]
        seeds = (
            options.seed + (step * accelerator.num_processes + accelerator.process_index) * len(batches) + i for i in range(len(batches))
        )
        layouts = [self._bare.layout(batch, seed) for batch, seed in zip(batches, seeds, strict=True)]
        return batches, layouts if slots is None else [layout.first(slots) for layout in layouts]

    def _global_counts(self, layouts: Sequence[SlotLayout]) -> SlotCounts:
        own = torch.stack([SlotCounts.of(layout.valid).to_tensor() for layout in layouts]).sum(0)
        return SlotCounts.from_tensor(self._accelerator.reduce(own, reduction="sum"))

    def _loss(self, batch: PackedBatch, layout: SlotLayout, config: LossConfig, counts: SlotCounts | None) -> Any:
        device, options = self._accelerator.device, self._config.train
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.precision == "bfloat16"):
            student = self._model(batch, layout)
        draft = DraftBatch(
            student_hidden=student.float(),
            target_hidden=batch.hidden[-1].flatten(0, 1),
            target_rows=layout.target_rows,
            token_ids=batch.token_ids.flatten()[layout.token_rows],
            valid=layout.valid,
            student_head=self._student_head,
            target_head=self._target_head,
            draft_token_ids=self._bare.draft_token_ids,
            temperature=self._config.collect.temperature,
            target_lse=batch.target_lse.flatten(),
        )
        return chunked_loss(draft, config, counts, chunk_bytes=options.chunk_mib << 20)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Teacher-forced acceptance on held-out rows, with the running mean of the weights if there is one; every process does it all."""
        options = self._config.train
        rows = list(range(min(len(self._held_out.rows), self._config.evaluate.max_rows)))
        batches = [
            self._held_out.batch(rows[i : i + options.micro_rows], self._accelerator.device)
            for i in range(0, len(rows), options.micro_rows)
        ]
        layouts = [self._bare.layout(batch, options.seed + i) for i, batch in enumerate(batches)]
        counts = SlotCounts.from_tensor(torch.stack([SlotCounts.of(layout.valid).to_tensor() for layout in layouts]).sum(0))
        totals: dict[str, Tensor] = {}
        with self._averaged_weights():
            for batch, layout in zip(batches, layouts, strict=True):
                for name, value in self._loss(batch, layout, _EVALUATION, counts).metrics.items():
                    totals[name] = totals[name] + value if name in totals else value
        return {f"held_out_{name}": value for name, value in _floats(totals).items()}

    def _evaluate_and_keep_best(self) -> dict[str, float]:
        metrics = self.evaluate()
        length = metrics["held_out_block_length_estimate"]
        if length > self.progress.best_length:
            self.progress.best_length, self.progress.evaluations_since_best = length, 0
            self._save_drafter(metrics)
        else:
            self.progress.evaluations_since_best += 1
        return metrics

    def _save_drafter(self, metrics: dict[str, float]) -> None:
        tensors = self._accelerator.get_state_dict(self._model)  # gathers what ZeRO spread out, on the main process alone
        if self._accelerator.is_main_process:
            tensors = {**tensors, **self.progress.ema}
            about = {"step": self.progress.step, "temperature": self._config.collect.temperature, **metrics}
            save_drafter(self._out / "drafter", self._bare, self._policy, tensors=tensors, about=about)
        self._accelerator.wait_for_everyone()

    # Running mean of the weights

    @torch.no_grad()
    def _update_ema(self) -> None:
        decay = self._config.train.ema_decay
        if decay is None:
            return
        own = dict(self._bare.named_parameters())
        if not self.progress.ema:
            self.progress.ema = {name: parameter.detach().clone() for name, parameter in own.items()}
        for name, mean in self.progress.ema.items():
            # Early on the mean is over the few steps there are.
            mean.lerp_(own[name], max(1 - decay, 1 / (self.progress.step + 1)))

    def _averaged_weights(self) -> Any:
        return _Swapped(self._bare, self.progress.ema) if self.progress.ema else nullcontext()

    # Checkpoints

    def save_checkpoint(self) -> None:
        """Write everything, then give it its name: a kill leaves no half checkpoint under a name that ``resume`` reads."""
        accelerator, folder = self._accelerator, self._out / "checkpoints"
        target, part = folder / f"step-{self.progress.step:07d}", folder / f"step-{self.progress.step:07d}.part"
        if accelerator.is_main_process:
            shutil.rmtree(part, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(part))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
            for old in checkpoints(self._out)[:-_KEPT_CHECKPOINTS]:
                shutil.rmtree(old)
        accelerator.wait_for_everyone()

    def resume(self) -> int:
        """Load the newest checkpoint, if there is one; returns the step to go on from."""
        found = checkpoints(self._out)
        if found:
            self._accelerator.load_state(str(found[-1]))
            self.progress.ema = {name: mean.to(self._accelerator.device) for name, mean in self.progress.ema.items()}
        return self.progress.step

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        self._accelerator.log(metrics, step=step)
        if self._accelerator.is_main_process:
            rest = {name: value for name, value in metrics.items() if name != "loss"}
            self._sink.emit(TrainEvent(step=step, loss=metrics["loss"], metrics=rest))


class _Swapped:
    """A module with other weights for the length of a with statement."""

    def __init__(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        self._parameters, self._weights = dict(module.named_parameters()), weights

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(self, *_: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        for name, weight in self._weights.items():
            parameter = self._parameters[name]
            held = parameter.data.clone()
            parameter.data.copy_(weight)
            weight.copy_(held)


def checkpoints(out: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in (out / "checkpoints").glob("step-*") if path.suffix != ".part")


def assert_policy_frozen(model: nn.Module, policy: PolicyParts) -> None:
    """Take gradients off the policy, and make sure that the drafter trains none of its storage."""
    policy.module.requires_grad_(False)
    borrowed = {tensor.untyped_storage().data_ptr() for tensor in policy.module.parameters()}
    shared = [name for name, parameter in model.named_parameters() if parameter.untyped_storage().data_ptr() in borrowed]
    assert not shared, f"the drafter would train the policy's own storage: {', '.join(shared)}"


def _floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Scalars by name; a vector over depths becomes name_1, name_2, ..."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if value.ndim == 0:
            flat[name] = float(value)
        else:
            flat |= {f"{name}_{depth}": number for depth, number in enumerate(value.tolist(), start=1)}
    return flat


def check_resume(out: Path, settings: dict[str, Any], *, resume: bool) -> None:
    """Write out/config.json, or refuse to mix two configs or to overwrite a run that was not asked to go on."""
    path = out / "config.json"
    if path.exists() and checkpoints(out):
        if not resume:
            raise ValueError(f"{out} already holds a training run: continue it with --resume, or choose another --out")
        held = json.loads(path.read_text())
        wanted = json.loads(json.dumps(settings))
        different = sorted(key for key in {*held, *wanted} if held.get(key) != wanted.get(key))
        if different:
            raise ValueError(f"--resume with other settings than {path} ({', '.join(different)} differ): use the same, or another --out")
        return
    out.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(settings, indent=2) + "\n")

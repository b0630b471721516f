"""OnlineTrainer: a few steps of the end-to-end TV loss on recorded states, towards the law that the policy has now.

Shape legend: L tokens of a sequence, H hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout_spec.events import TrainEvent
from rollout_spec_mtp.kinds import kind_of
from rollout_spec_mtp.losses import DraftBatch, LossConfig, LossOutput, chunked_loss
from rollout_spec_mtp.online.recorder import Recorded
from rollout_spec_mtp.training.batches import Batches
from rollout_spec_mtp.training.collect import law_summary
from rollout_spec_mtp.training.config import OptimSection
from rollout_spec_mtp.training.protocol import PolicyParts
from rollout_spec_mtp.training.shards import Rollout
from rollout_spec_mtp.training.trainer import assert_policy_frozen

MIN_SEQUENCES = 8  # fewer tell too little, and of eight the last is held out
_HELD_OUT = 8  # one in so many
_MAX_EPOCHS = 4
_HELD_OUT_ROWS = 4
_LOSS, _EVALUATION = LossConfig(e2e_tv=1.0), LossConfig(block_length=1.0)


@dataclass(frozen=True, kw_only=True)
class RefreshSettings:
    """Bounds of one refresh; whichever is reached first ends it. At most four epochs over the text there is."""

    temperature: float = 1.0  # of the rollouts
    max_steps: int = 40
    max_seconds: float = 30.0
    lr: float = 5e-4
    row_tokens: int = 512  # of a step
    chunk_mib: int = 64

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"a drafter cannot be refreshed on rollouts of temperature {self.temperature}: a greedy policy has no law")
        for name in ("max_steps", "row_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("max_seconds", "lr"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Refreshed:
    """What came of one refresh. Lengths are expected accepted tokens a round on held-out sequences, without the bonus."""

    version: int  # of the policy whose states were trained on
    num_steps: int
    num_sequences: int
    num_tokens: int
    seconds: float
    loss: float  # mean over the steps
    length_before: float
    length_after: float
    tensors: Mapping[str, Tensor]  # the drafter's own weights: new ones if they are better, else those from before

    @property
    def improved(self) -> bool:
        return self.length_after > self.length_before

    def event(self) -> TrainEvent:
        names = ("num_steps", "num_sequences", "num_tokens", "seconds", "length_before", "length_after", "improved")
        return TrainEvent(step=self.version, loss=self.loss, metrics={name: float(getattr(self, name)) for name in names})


class OnlineTrainer:
    """Holds the drafter's weights a second time, with their optimiser, whose moments live from refresh to refresh."""

    def __init__(self, served: Any, policy: PolicyParts, settings: RefreshSettings) -> None:
        """``served``: the module that serves now; its weights are where training begins."""
        self.settings, self._policy = settings, policy
        self.model: Any = new_like(served, policy)
        self.model.load_state_dict(served.state_dict())
        assert_policy_frozen(self.model, policy)
        self._schedule = OptimSection(lr=settings.lr, warmup_steps=5)
        self._optimizer = self._new_optimizer()

    def train(self, recorded: Sequence[Recorded], version: int) -> Refreshed | None:
        """Train on sequences of the policy as it is; None if there are fewer than MIN_SEQUENCES.

        The result is kept only if it is better on the sequences held out. Raises ValueError if the loss is no number.
        """
        if len(recorded) < MIN_SEQUENCES:
            return None
        began = time.perf_counter()
        law = _Sequences(recorded, self._policy, self.settings.temperature)
        held_out = range(_HELD_OUT - 1, len(recorded), _HELD_OUT)
        training = [number for number in range(len(recorded)) if number not in held_out]
        held = Batches(law, held_out, row_tokens=self.settings.row_tokens, seed=version)
        before, start = self._length(held, law.head), {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        batches = Batches(law, training, row_tokens=self.settings.row_tokens, seed=version)
        losses = self._run(batches, law.head, version, began)
        after = self._length(held, law.head)
        if not after > before:
            self.model.load_state_dict(start)
            self._optimizer = self._new_optimizer()
        return Refreshed(
            version=version,
            num_steps=len(losses),
            num_sequences=len(recorded),
            num_tokens=sum(sequence.token_ids.numel() for sequence in recorded),
            seconds=time.perf_counter() - began,
            loss=sum(losses) / len(losses),
            length_before=before,
            length_after=after,
            tensors={name: tensor.detach().clone() for name, tensor in self.model.named_parameters()},
        )

    def _run(self, batches: Batches, head: Tensor, version: int, began: float) -> list[float]:
        num_steps = min(self.settings.max_steps, _MAX_EPOCHS * len(batches.rows))
        losses: list[float] = []
        for step in range(num_steps):
            if losses and time.perf_counter() - began > self.settings.max_seconds:
                break
            for group in self._optimizer.param_groups:
                group["lr"] = self._schedule.lr_at(step, num_steps)
            self._optimizer.zero_grad()
            output = self._loss(batches, batches.rows_of_step(step, 1), head, _LOSS, seed=version + step)
            losses.append(float(output.loss.detach()))
            if not math.isfinite(losses[-1]):
                raise ValueError(f"refreshing the drafter for weights {version}: the loss is {losses[-1]} at step {step}; lower refresh_lr")
            output.loss.backward()
            assert all(parameter.grad is None for parameter in self._policy.module.parameters()), "the policy got a gradient"
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._schedule.max_grad_norm)
            self._optimizer.step()
        return losses

    @torch.no_grad()
    def _length(self, held_out: Batches, head: Tensor) -> float:
        rows = list(range(min(len(held_out.rows), _HELD_OUT_ROWS)))
        return float(self._loss(held_out, rows, head, _EVALUATION, seed=0).metrics["block_length_estimate"])

    def _loss(self, batches: Batches, rows: Sequence[int], head: Tensor, config: LossConfig, seed: int) -> LossOutput:
        """head [V, H] float32."""
        batch = batches.batch(rows, head.device)
        layout, ids = self.model.layout(batch, seed), self.model.draft_token_ids
        draft = DraftBatch(
            student_hidden=self.model(batch, layout),
            target_hidden=batch.hidden[-1].flatten(0, 1),
            target_rows=layout.target_rows,
            token_ids=batch.token_ids.flatten()[layout.token_rows],
            valid=layout.valid,
            student_head=head if ids is None else head[ids],
            target_head=head,
            draft_token_ids=ids,
            temperature=self.settings.temperature,
            target_lse=batch.target_lse.flatten(),
        )
        return chunked_loss(draft, config, None, chunk_bytes=self.settings.chunk_mib << 20)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        betas = (self._schedule.betas[0], self._schedule.betas[1])
        return torch.optim.AdamW(self.model.parameters(), lr=self.settings.lr, betas=betas, weight_decay=0.0)


def new_like(module: Any, policy: PolicyParts) -> Any:
    """A fresh module of the same kind, settings and vocabulary."""
    return kind_of(module.kind).build(module.config_mapping(), policy, module.draft_token_ids)


class _Sequences:
    """Recorded sequences as rollouts; the normalisers of a sequence are computed when it is first read."""

    def __init__(self, recorded: Sequence[Recorded], policy: PolicyParts, temperature: float) -> None:
        self._recorded, self.head, self._temperature = recorded, policy.head.float(), temperature
        self._known: dict[int, Rollout] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def length(self, number: int) -> int:
        return self._recorded[number].token_ids.numel()

    def __getitem__(self, number: int) -> Rollout:
        if number not in self._known:
            own = self._recorded[number]
            begin = own.num_prompt_tokens - 1  # the first state whose next token is of the response
            lse, entropies = torch.zeros(2, self.length(number) - 1).unbind()
            lse[begin:], entropies[begin:] = law_summary(own.hidden[-1][begin:], self.head, self._temperature)
            fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
            self._known[number] = Rollout(key=str(number), **fields, target_lse=lse, target_entropies=entropies)
        return self._known[number]

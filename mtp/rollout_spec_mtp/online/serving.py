"""Everything a drafter needs that is refreshed while it serves, from a drafter's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollout_spec.engine.ops import Ops
from rollout_spec.engine.runner import CausalLM
from rollout_spec.tree import Draw
from rollout_spec_mtp.kinds import kind_of
from rollout_spec_mtp.online.recorder import RolloutBuffer, StateRecorder
from rollout_spec_mtp.online.store import DrafterStore
from rollout_spec_mtp.online.trainer import OnlineTrainer, Refreshed, RefreshSettings
from rollout_spec_mtp.serving import load_trained
from rollout_spec_mtp.training.protocol import PolicyParts


@dataclass(frozen=True, kw_only=True)
class OnlineDrafter:
    """``drafter`` goes into the engine, ``train`` may run in any thread while the policy's weights stay as they are."""

    drafter: StateRecorder
    buffer: RolloutBuffer
    trainer: OnlineTrainer
    store: DrafterStore | None
    policy: PolicyParts

    def train(self, version: int) -> Refreshed | None:
        """A refresh on what the buffer holds now, of policy ``version``; None if that is too little. What is better is stored."""
        refreshed = self.trainer.train(self.buffer.snapshot(), version)
        if self.store is not None and refreshed is not None and refreshed.improved:
            self.store.save(self.trainer.model, self.policy, version)
        return refreshed


def open_online(
    directory: Path,
    module: CausalLM,
    ops: Ops,
    draw: Draw | None,
    *,
    settings: RefreshSettings,
    buffer_tokens: int,
    kept_in: Path | None,
) -> OnlineDrafter:
    """The trained drafter of a directory, or the newest of those that were refreshed from it and kept in ``kept_in``.

    Raises ValueError if a drafter does not fit the policy, or those that are kept began as another one.
    """
    policy = PolicyParts.of(module)
    model = load_trained(directory, policy)
    store = None if kept_in is None else DrafterStore(kept_in, model)
    version = None if store is None else store.resume(model, policy)
    buffer = RolloutBuffer(buffer_tokens)
    drafter = StateRecorder(kind_of(model.kind).serve(model, policy, ops, draw), buffer, settings.temperature)
    if version is not None:
        drafter.weights_version = version
    return OnlineDrafter(drafter=drafter, buffer=buffer, trainer=OnlineTrainer(model, policy, settings), store=store, policy=policy)

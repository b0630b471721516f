"""From a directory to a trained module, and to a drafter that the engine can use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from rollout_spec.drafter import Drafter
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.runner import CausalLM
from rollout_spec.tree import Draw
from rollout_spec_mtp.checkpoint import (
    VOCABULARY,
    WEIGHTS,
    check_policy,
    check_vocabulary,
    load_checked,
    read_config,
    read_json,
    read_tensors,
)
from rollout_spec_mtp.kinds import KINDS, kind_of
from rollout_spec_mtp.training.protocol import PolicyParts


def load_drafter(directory: Path, module: CausalLM, ops: Ops, draw: Draw | None = None, *, follow_head: bool = True) -> Drafter:
    """The trained drafter of a directory for this policy; draw None = the kind's own choice. ValueError if it does not fit.

    ``follow_head``: the embedding and output head it borrows are the policy's of the moment; else copies of what they are now.
    """
    policy = PolicyParts.of(module) if follow_head else PolicyParts.of(module).kept()
    model = load_trained(directory, policy)
    return kind_of(model.kind).serve(model, policy, ops, draw)


def load_trained(directory: Path, policy: PolicyParts) -> Any:
    """The module in a directory, for this policy.

    Raises ValueError if it is no drafter's directory, is of another format or policy, or a tensor of it is missing, unexpected,
    misshapen, all zero or not finite (each is named).
    """
    read_json(directory)  # before anyone asks whose layout it is
    for kind in KINDS.values():
        if kind.recognises is not None and kind.load_foreign is not None and kind.recognises(directory):
            return kind.load_foreign(directory, policy)
    config = read_config(directory)
    check_policy(directory, config, policy)
    tensors = read_tensors(directory / WEIGHTS)
    ids = tensors.pop(VOCABULARY, None)
    wanted = config["num_draft_tokens"]
    if (None if ids is None else ids.numel()) != wanted:
        raise ValueError(f"{directory}: config.json names {wanted} draft tokens, {WEIGHTS} holds {None if ids is None else ids.numel()}")
    if ids is not None:
        check_vocabulary(directory, ids, policy.vocab_size)
    model = kind_of(config["kind"]).build(config["settings"], policy, ids)
    assert isinstance(model, nn.Module)
    load_checked(model, tensors, str(directory))
    return model

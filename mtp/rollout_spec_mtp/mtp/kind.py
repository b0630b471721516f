"""The MTP head as a row of the table of kinds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rollout_spec_mtp.configs import build
from rollout_spec_mtp.mtp.config import MTPConfig
from rollout_spec_mtp.mtp.drafter import MTPDrafter
from rollout_spec_mtp.mtp.model import MTPModel
from rollout_spec_mtp.mtp.published import copy_with_head, is_published, load_published
from rollout_spec_mtp.training.protocol import DrafterKind, PolicyParts


def _build(config: Mapping[str, object], policy: PolicyParts, draft_token_ids: Tensor | None) -> MTPModel:
    return MTPModel(build(MTPConfig, config, "drafter"), policy, draft_token_ids)


def _export(model: Any, checkpoint: Path, out: Path) -> None:
    copy_with_head(model, checkpoint, out)


MTP = DrafterKind(name=MTPModel.kind, build=_build, serve=MTPDrafter, recognises=is_published, load_foreign=load_published, export=_export)

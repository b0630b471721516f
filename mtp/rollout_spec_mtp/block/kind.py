"""The block drafter's row in the table of kinds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rollout_spec.engine.ops import Ops
from rollout_spec.tree import Draw
from rollout_spec_mtp.block.checkpoint import is_dflash, load_dflash, save_dflash
from rollout_spec_mtp.block.config import BlockConfig
from rollout_spec_mtp.block.drafter import BlockDrafter
from rollout_spec_mtp.block.model import BlockModel
from rollout_spec_mtp.training.protocol import DrafterKind, PolicyParts


def build(config: Mapping[str, object], policy: PolicyParts, draft_token_ids: Tensor | None) -> BlockModel:
    """A fresh model; config as BlockConfig.from_mapping takes it."""
    return BlockModel(BlockConfig.from_mapping(config, policy), policy, draft_token_ids)


def serve(model: Any, policy: PolicyParts, ops: Ops, draw: Draw | None) -> BlockDrafter:
    """The engine's form of a trained model."""
    if not isinstance(model, BlockModel) or model.policy.module is not policy.module:
        raise ValueError("the block drafter serves a BlockModel that was built or loaded for this very policy")
    return BlockDrafter(model, ops, draw)


def export(model: Any, checkpoint: Path, out: Path) -> None:  # noqa: ARG001  # a DFlash directory stands alone
    """A directory in the published DFlash layout, which vLLM and SGLang serve."""
    part = out.with_name(f"{out.name}.part")
    save_dflash(model, part)
    part.rename(out)


BLOCK_KIND = DrafterKind(name=BlockModel.kind, build=build, serve=serve, recognises=is_dflash, load_foreign=load_dflash, export=export)

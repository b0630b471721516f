"""Refreshed drafters on disk, by the policy version they were trained for: the newest survives the trainer that made it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rollout_spec.engine.weights import checksums, combine
from rollout_spec_mtp.checkpoint import read_config, save_drafter
from rollout_spec_mtp.serving import load_trained
from rollout_spec_mtp.training.protocol import PolicyParts

_KEPT = 2  # the newest, and one more in case that its policy's checkpoint is the one to go back to


class DrafterStore:
    """A folder of drafters that all began as one. Each is written whole and then named."""

    def __init__(self, folder: Path, origin: Any) -> None:
        """``origin``: the module that the run starts with. Drafters that began as another are refused."""
        self._folder, self._origin = folder, combine(checksums(dict(origin.named_parameters())))

    def save(self, model: Any, policy: PolicyParts, version: int) -> Path:
        """Write the module's weights as those of a policy version, and drop what is older than the newest few."""
        target = self._folder / f"version-{version:08d}"
        save_drafter(target, model, policy, about={"policy_version": version, "origin": self._origin})
        for old in self._held()[:-_KEPT]:
            shutil.rmtree(old)
        return target

    def newest(self) -> tuple[Path, int] | None:
        """Folder and policy version of the newest, None if there is none. ValueError if it began as another drafter."""
        held = self._held()
        if not held:
            return None
        about = read_config(held[-1])["about"]
        if about.get("origin") != self._origin:
            raise ValueError(
                f"{held[-1]} was refreshed from another drafter than this run starts with: give the drafter of that run, or another folder"
            )
        return held[-1], int(about["policy_version"])

    def resume(self, model: Any, policy: PolicyParts) -> int | None:
        """Load the newest into the module; its policy version, or None if there is none."""
        found = self.newest()
        if found is None:
            return None
        model.load_state_dict(load_trained(found[0], policy).state_dict())
        return found[1]

    def _held(self) -> list[Path]:
        return sorted(self._folder.glob("version-*"))

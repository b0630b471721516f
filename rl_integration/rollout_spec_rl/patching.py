"""Patch: a change made to a host's code while it runs. Each host has one file of them, with reasons and fingerprints.

A test fails when a host's source at one of these places is no longer the one that the patch knows.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_APPLIED = "__rollout_spec_patch__"


@dataclass(frozen=True, kw_only=True)
class Patch:
    """``replace`` gets what stands at ``target`` and returns what shall stand there."""

    target: str  # "module:Class.method"
    reason: str
    upstream: str  # fingerprint of the source in the tested versions
    replace: Callable[[Any], Any]
    source: str | None = None  # whose source has the fault; None: the target's

    def fingerprint(self) -> str:
        """Of the source that is installed."""
        owner, name = place(self.source or self.target)
        return fingerprint(getattr(getattr(owner, name), _APPLIED, getattr(owner, name)))

    @property
    def loaded(self) -> bool:
        """Whether this process uses the target's module at all."""
        return self.target.partition(":")[0] in sys.modules

    def apply(self) -> None:
        """Once a process; a second call changes nothing."""
        owner, name = place(self.target)
        original = getattr(owner, name)
        if hasattr(original, _APPLIED):
            return
        replaced = self.replace(original)
        setattr(replaced, _APPLIED, original)
        setattr(owner, name, replaced)


def place(target: str) -> tuple[Any, str]:
    """The object that holds the target, and the target's name in it."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


def fingerprint(code: Any) -> str:
    """Twelve hexadecimal digits of a function's or class's source."""
    return hashlib.sha256(inspect.getsource(code).encode()).hexdigest()[:12]

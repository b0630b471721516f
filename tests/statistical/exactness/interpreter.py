"""Triton's interpreter (3.9) without its setting-up at every call of a device function, which is most of its time."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

assert hasattr(interpreter, "_patch_lang"), "another Triton: see whether its interpreter still walks through triton.language at every call"


class _Launch:
    """What ends with a launch."""

    def __init__(self, scope: Any, seen: set[int]) -> None:
        self._scope, self._seen = scope, seen

    def restore(self) -> None:
        self._scope.restore()
        self._seen.clear()


def make_quick() -> None:
    """Makes the interpreter replace triton.language's functions (``_patch_lang``) once a launch for each module that kernels are in.

    It does so whenever one kernel calls another, though after the first time there is nothing left to replace: 6 ms a call.
    """
    patch, seen = interpreter._patch_lang, set[int]()
    if patch.__module__ == __name__:
        return  # both conftests ask for it

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in seen:
            return None  # the caller, who wants nothing of it, is a device function: a launch is the first one
        is_launch = not seen
        seen.add(module)
        return _Launch(patch(function), seen) if is_launch else patch(function)

    interpreter._patch_lang = patch_once

"""The policy's newest weights in Ray's object store, where every server finds them: also one whose process died and was started again.

An actor keeps references only; the buckets stay where their sender put them until the next version comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import ray

from rollout_spec_rl.verl.weights import WeightBucket

_NAME = "rollout_spec_mailbox"
_MAX_CALLS = 1000  # of readers that wait at the same time


class Mailbox:
    """References to the buckets of the newest version. Asking for one that has not come yet waits."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._letters: list[list[Any]] = []  # references in lists: bare ones would be fetched into this process
        self._complete = False
        self._changed = asyncio.Condition()

    async def begin(self, version: int, *, again: bool) -> bool:
        """A new version; the buckets of the one before may go. False if somebody else sends it, unless it is to be sent ``again``."""
        async with self._changed:
            if version == self._version and not again:
                return False
            self._version, self._letters, self._complete = version, [], False
            self._changed.notify_all()
            return True

    async def put(self, version: int, letter: list[Any]) -> None:
        async with self._changed:
            assert version == self._version, f"bucket of version {version} while {self._version} is being sent"
            self._letters.append(letter)
            self._changed.notify_all()

    async def end(self, version: int) -> None:
        async with self._changed:
            assert version == self._version, f"end of version {version} while {self._version} is being sent"
            self._complete = True
            self._changed.notify_all()

    async def get(self, version: int, index: int) -> list[Any] | None:
        """The bucket of that number, or None when there are no more."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version == version and (index < len(self._letters) or self._complete))
            return self._letters[index] if index < len(self._letters) else None

    async def newest(self) -> tuple[int, list[list[Any]]] | None:
        """The newest version and all its buckets; None if there is none, or if it is still being sent.

        Not waited for: its sender may be waiting for the very server that asks.
        """
        async with self._changed:
            return (self._version, self._letters) if self._version is not None and self._complete else None


def open_mailbox() -> Any:
    """The run's mailbox, made by whoever asks first. It is gone when that process drops what it got here."""
    return ray.remote(Mailbox).options(name=_NAME, get_if_exists=True, num_cpus=0, max_concurrency=_MAX_CALLS).remote()


class Posting:
    """One sender's version: buckets become references, which go into the mailbox unless another sender's already do."""

    def __init__(self, mailbox: Any, version: int) -> None:
        self._mailbox, self._version = mailbox, version
        self._posts = False

    async def begin(self, *, again: bool = False) -> None:
        self._posts = await self._mailbox.begin.remote(self._version, again=again)

    async def put(self, bucket: WeightBucket) -> Any:
        """The bucket's reference."""
        reference = ray.put(bucket)
        if self._posts:
            await self._mailbox.put.remote(self._version, [reference])
        return reference

    async def end(self) -> None:
        if self._posts:
            await self._mailbox.end.remote(self._version)


async def read(mailbox: Any, version: int) -> AsyncIterator[WeightBucket]:
    """All buckets of the version, in order, as they come."""
    index = 0
    while (letter := await mailbox.get.remote(version, index)) is not None:
        yield await letter[0]
        index += 1


def read_newest() -> list[WeightBucket] | None:
    """Everything that was sent last, or None if nothing was, or not yet all of it."""
    newest = ray.get(open_mailbox().newest.remote())
    return None if newest is None else ray.get([letter[0] for letter in newest[1]])

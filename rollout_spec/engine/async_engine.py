"""AsyncEngine: requests come and go while others run. One thread drives the engine; everything else only talks to it.

All calls are safe from any thread or event loop; they take effect between two rounds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Self, TypeVar

from torch import Tensor

from rollout_spec.engine.engine import Engine
from rollout_spec.engine.request import Completion, Request
from rollout_spec.engine.weights import WeightsReport

T = TypeVar("T")


class AsyncEngine:
    """``await generate(request)`` from any number of tasks; ``abort`` and ``update_weights`` in between.

    If the engine itself breaks (not one request), every waiting call raises that error and so does every later one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._results: dict[str, Future[Completion]] = {}
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._drive, name="rollout-spec-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> Completion:
        """The finished completion. Cancelling the awaiting task aborts the request, wherever it is by then."""
        named = request if request.request_id is not None else dataclasses.replace(request, request_id=secrets.token_hex(8))
        assert named.request_id is not None
        try:
            return await asyncio.wrap_future(self.submit(named))
        except asyncio.CancelledError:
            self.abort(named.request_id)
            raise

    def submit(self, request: Request) -> Future[Completion]:
        """The same without an event loop: a future of the completion."""
        result: Future[Completion] = Future()

        def add() -> None:
            # From here on the future cannot be cancelled under the thread that will fill it.
            if not result.set_running_or_notify_cancel():
                return
            try:
                self._results[self._engine.add(request)] = result
            except ValueError as error:
                result.set_exception(error)

        self._post(add, result)
        return result

    def abort(self, request_id: str) -> Future[None]:
        """End one request; its generate() returns what it has, with finish_reason "aborted"."""
        return self._call(lambda: self._engine.abort(request_id))

    def abort_all(self) -> Future[None]:
        """End every request that waits or runs."""

        def each() -> None:
            for request_id in self._results:
                self._engine.abort(request_id)

        return self._call(each)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int, *, partial: bool = False) -> Future[WeightsReport]:
        """Engine.update_weights between two rounds; running requests go on under the new weights."""
        return self._call(lambda: self._engine.update_weights(named_tensors, version, partial=partial))

    def update_drafter(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> Future[WeightsReport]:
        """Engine.update_drafter between two rounds; running requests go on."""
        return self._call(lambda: self._engine.update_drafter(named_tensors, version))

    def run(self, action: Callable[[Engine], T]) -> Future[T]:
        """The action's result, between two rounds. A ValueError of it reaches the future; any other breaks the engine."""
        return self._call(lambda: action(self._engine))

    def close(self) -> None:
        """Abort what runs and stop the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _call(self, action: Callable[[], T]) -> Future[T]:
        """Run action on the engine's thread between two rounds."""
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(action())
            except ValueError as error:
                outcome.set_exception(error)

        self._post(run, outcome)
        return outcome

    def _post(self, command: Callable[[], None], outcome: Future[T]) -> None:
        with self._wake:
            if self._failure is not None or self._closing:
                outcome.set_exception(self._failure or RuntimeError("the engine is closed"))
                return
            self._commands.append(command)
            self._wake.notify()

    def _drive(self) -> None:
        try:
            while self._take_commands():
                for completion in self._engine.step():
                    self._results.pop(completion.request_id).set_result(completion)
        except BaseException as error:  # whatever broke the engine must reach every caller, not die with this thread
            with self._wake:
                self._failure = error
            for result in self._results.values():
                result.set_exception(error)
            self._results.clear()
            raise

    def _take_commands(self) -> bool:
        """Run posted commands, waiting for one when there is nothing else to do. False when it is time to stop."""
        with self._wake:
            while not self._commands and not self._engine.has_work and not self._closing:
                self._wake.wait()
            commands, self._commands = list(self._commands), deque()
            closing = self._closing
        for command in commands:
            command()
        if closing:
            for request_id in self._results:
                self._engine.abort(request_id)
            for completion in self._engine.step():
                self._results.pop(completion.request_id).set_result(completion)
        return not closing

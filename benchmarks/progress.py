"""Progress of a long benchmark as lines: it is started and left alone with its log."""

from __future__ import annotations

import time
from collections.abc import Callable


class Lines:
    """A ``rollout_spec_mtp.training.run.Display`` that prints a line at every tenth of the work."""

    def say(self, line: str) -> None:
        print(line, flush=True)

    def bar(self, name: str, total: int, done: int) -> Callable[[int, str], None]:
        began, tenth = time.perf_counter(), 10 * done // total

        def update(now: int, note: str) -> None:
            nonlocal tenth
            if 10 * now // total > tenth:
                tenth = 10 * now // total
                self.say(f"  {name} {now}/{total}  {note}  {time.perf_counter() - began:.0f} s")

        return update

"""A rollout process that dies: Ray starts it again and it takes the newest weights. Real processes, killed for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1200)
def test_a_killed_replica_comes_back_with_the_newest_weights_and_answers_everything(tiny_policy: Path) -> None:
    """In a process of its own: Ray leaves children behind that pytest would count as ours."""
    program = Path(__file__).with_name("kill_a_replica.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tiny_policy)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RAY_DEDUP_LOGS": "0"},
    )
    assert done.returncode == 0, done.stderr[-8000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["replaced"]
    # The same seeds under the same weights: what the dead process owed is what any other answers.
    assert report["same_tokens"]
    assert report["num_tokens"] == [400] * 8
    assert report["versions"] == [7]
    assert report["restarts"] == [1, 0]
    assert report["policy_versions"] == [7, 7]
    # The next version reaches it although its buckets went elsewhere.
    (first, other), second = report["checksums"]
    assert first == other
    assert len({first, *second}) == 2
    assert report["early"] == 0
    assert report["late_versions"] == [9]
    assert "replica 0: its process died and was started again; weights version 7 taken from the mailbox" in done.stdout + done.stderr

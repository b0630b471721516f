"""Errors that users can mend: one line, whole, and exit code 2."""

from __future__ import annotations

import pytest
import typer

from rollout_spec.console import clear_errors


def test_a_mend_with_brackets_is_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, clear_errors():
        raise ValueError("the task needs reasoning-gym: pip install 'rollout-spec[tasks]'")
    assert ended.value.exit_code == 2
    assert "pip install 'rollout-spec[tasks]'" in capsys.readouterr().err


def test_our_own_faults_keep_their_traceback() -> None:
    with pytest.raises(KeyError), clear_errors():
        raise KeyError("a fault")

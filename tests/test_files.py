"""Files are whole or not there, whoever else writes them."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from rollout_spec.files import cache_dir, replacing, resumed, write_text


def _write_often(path: Path, letter: str) -> None:
    for _ in range(300):
        write_text(path, letter * 5000)


def test_of_several_writers_the_last_ones_text_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    processes = [multiprocessing.get_context("fork").Process(target=_write_often, args=(path, letter)) for letter in "abcd"]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        if path.exists():
            text = path.read_text()
            assert text == text[0] * 5000
    assert [process.exitcode for process in processes] == [0] * 4
    assert [found.name for found in tmp_path.iterdir()] == ["file.json"]


def _write_half(path: Path) -> None:
    path.write_text("ha")
    raise OSError("disk full")


def test_what_was_there_stays_if_the_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_text(path, "before")
    with pytest.raises(OSError, match="full"), replacing(path) as beside:
        _write_half(beside)
    assert path.read_text() == "before"
    assert [found.name for found in tmp_path.iterdir()] == ["file.json"]


ABOUT = {"settings": {"requests": (1, 8), "block": None}, "machine": {"cores": 2}}


def test_an_interrupted_runs_file_is_taken_up_again(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    found = resumed(path, ABOUT)
    assert found == {"settings": {"requests": [1, 8], "block": None}, "machine": {"cores": 2}}
    found["answers"] = [1]
    write_text(path, json.dumps(found))
    assert resumed(path, ABOUT) == found


def test_another_runs_file_is_refused_by_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    write_text(path, json.dumps(ABOUT))
    other = {"settings": {"requests": (1, 9), "tokens": None}, "machine": {"cores": 4}}
    told = r"requests \[1, 8\] there, \[1, 9\] here; tokens not set there, null here; block null there, not set here; cores 2 there, 4 here"
    with pytest.raises(ValueError, match=rf"found.json was made with other settings \({told}\): name another file, or delete it"):
        resumed(path, other)


def test_the_cache_lies_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "rollout_spec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "rollout_spec"

"""The history store: what it keeps, what it gives up first, and that a file brings it back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_spec.drafters.history import HistoryStore


def store(max_tokens: int = 1000, max_tokens_per_prompt: int = 1000) -> HistoryStore:
    return HistoryStore(max_tokens=max_tokens, max_tokens_per_prompt=max_tokens_per_prompt)


def contents(history: HistoryStore) -> dict[str, list[tuple[list[int], int, int]]]:
    """By prompt key (least recently used first): (tokens, version, count)."""
    return {key: [(s.token_ids.tolist(), s.version, s.count) for s in history.samples(key)] for key in history.prompt_keys()}


def test_repeated_samples_are_counted_and_take_the_newest_version() -> None:
    history = store()
    history.add("p", [1, 2, 3], version=2)
    history.add("p", [1, 2, 3], version=5)
    history.add("p", [1, 2, 3], version=4)
    history.add("p", [], version=9)
    assert contents(history) == {"p": [([1, 2, 3], 5, 3)]}
    assert history.num_tokens == 3


def test_a_resumed_sample_replaces_its_cut_short_part() -> None:
    history = store()
    history.add("p", [1, 2], version=0)
    history.add("p", [1, 3], version=0)
    history.add("p", [1, 2, 4], version=1)
    history.add("p", [1], version=1)  # a part of others is kept: it may be a sample that stopped there
    assert contents(history) == {"p": [([1, 3], 0, 1), ([1, 2, 4], 1, 1), ([1], 1, 1)]}
    assert history.num_tokens == 6


def test_a_sample_costs_the_same_among_thousands() -> None:
    """They are found by their tokens: looking through them took half a minute for these."""
    history = store(max_tokens=10**6, max_tokens_per_prompt=10**6)
    began = time.process_time()
    for sample in np.random.default_rng(0).permutation(10_000):
        history.add("p", [int(sample) // 1000, int(sample) % 1000, 7, 7, 7], version=0)
    assert time.process_time() - began < 20
    assert (len(history.samples("p")), history.num_tokens) == (10_000, 50_000)


def test_oldest_version_goes_first_then_the_least_recently_used_prompt() -> None:
    history = store(max_tokens=8)
    history.add("a", [1, 1], version=1)
    history.add("b", [2, 2], version=0)
    history.add("c", [3, 3], version=0)
    history.add("d", [4, 4], version=1)
    history.samples("b")  # now c is the older of the two prompts of version 0
    history.add("e", [5, 5], version=2)
    assert set(history.prompt_keys()) == {"a", "b", "d", "e"}
    history.add("f", [6, 6], version=2)
    assert set(history.prompt_keys()) == {"a", "d", "e", "f"}
    history.samples("a")
    history.add("g", [7, 7], version=2)
    assert set(history.prompt_keys()) == {"a", "e", "f", "g"}
    assert history.num_tokens == 8


def test_one_prompt_is_bounded_too() -> None:
    history = store(max_tokens_per_prompt=5)
    history.add("p", [1, 1], version=3)
    history.add("p", [2, 2], version=1)
    history.add("q", [9, 9], version=0)
    history.add("p", [3, 3], version=3)
    assert [tokens for tokens, _, _ in contents(history)["p"]] == [[1, 1], [3, 3]]
    history.add("p", [4] * 6, version=4)  # longer than the bound: nothing of it can stay
    assert history.prompt_keys() == ["q"]
    assert history.num_tokens == 2


def test_bounds_hold_always() -> None:
    rng = np.random.default_rng(0)
    history = store(max_tokens=60, max_tokens_per_prompt=25)
    for step in range(300):
        history.add(f"p{rng.integers(6)}", rng.integers(0, 5, rng.integers(1, 12)).tolist(), version=step // 30)
        by_prompt = {key: sum(len(tokens) for tokens, _, _ in samples) for key, samples in contents(history).items()}
        assert max(by_prompt.values()) <= 25
        assert history.num_tokens == sum(by_prompt.values()) <= 60


def filled() -> HistoryStore:
    history = store()
    history.add("p\n'ü", [1, 2, 3], version=4)
    history.add("q", [7], version=6)
    history.add("p\n'ü", [1, 2, 3], version=5)
    history.add("q", [8, 9], version=2)
    return history


@pytest.mark.parametrize("make", [filled, store])
def test_a_file_brings_everything_back(make: Any, tmp_path: Path) -> None:
    saved, loaded = make(), store()
    saved.save(tmp_path / "history.npz")
    loaded.load(tmp_path / "history.npz", current_version=6)
    assert contents(loaded) == contents(saved)
    assert loaded.prompt_keys() == saved.prompt_keys()
    assert [path.name for path in tmp_path.iterdir()] == ["history.npz"]


def test_versions_ahead_of_a_new_process_are_shifted_back(tmp_path: Path) -> None:
    filled().save(tmp_path / "history")
    loaded = store()
    loaded.load(tmp_path / "history", current_version=1)
    assert sorted(version for samples in contents(loaded).values() for _, version, _ in samples) == [-3, 0, 1]


def test_loading_respects_the_bounds(tmp_path: Path) -> None:
    filled().save(tmp_path / "history")
    loaded = store(max_tokens=4)
    loaded.load(tmp_path / "history", current_version=6)
    assert contents(loaded) == {"p\n'ü": [([1, 2, 3], 5, 2)], "q": [([7], 6, 1)]}


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history"
    filled().save(path)
    before = path.read_bytes()

    def interrupted(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(OSError, match="no space"):
        store().save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"not a history"])
def test_damaged_files_are_refused_by_name(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "history.npz"
    filled().save(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"history\.npz"):
        store().load(path, current_version=0)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    filled().save(path)
    with np.load(path) as saved:
        arrays = {name: saved[name] for name in saved.files}
    np.savez(path, **{**arrays, "format": np.array(99)})
    with pytest.raises(ValueError, match="format 99"):
        store().load(path, current_version=0)
    np.savez(tmp_path / "foreign.npz", weights=np.zeros(3))
    with pytest.raises(ValueError, match="not a history file"):
        store().load(tmp_path / "foreign.npz", current_version=0)


def test_negative_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="token bounds"):
        store(max_tokens=-1)

"""The kernels' benchmark on shapes that take a moment: what it checks, what it writes, and its GPU half in Triton's interpreter."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import kernels as benchmark
from rollout_spec.verify import Scheme
from rollout_spec_kernels.cpu import unavailable_reason

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before a test imports one of Triton's kernels


def test_cpu_half_checks_and_times_every_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if unavailable_reason() is not None:
        pytest.skip(f"no CPU kernels here: {unavailable_reason()}")
    threads = torch.get_num_threads()
    made = tmp_path / "times.json"
    options = ["--cpu", "--shapes", "2x5x300", "--repeats", "1", "--threads", str(threads), "--json", str(made)]
    monkeypatch.setattr(sys, "argv", ["kernels.py", *options])
    benchmark.main()
    measured = json.loads(made.read_text(encoding="utf-8"))
    assert [result["scheme"] for result in measured["results"]] == [scheme.value for scheme in Scheme]
    for result in measured["results"]:
        assert result["ratio"] == pytest.approx(result["torch"]["median_ms"] / result["cpp"]["median_ms"])
        assert (result["batch"], result["nodes"], result["vocab"]) == (2, 5, 300)


def test_gpu_half_compares_attention_with_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollout-spec[triton]'")
    monkeypatch.setattr(benchmark, "HEADS", (4, 2, 16))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (result,) = benchmark.gpu_attention(((2, 5, 70),), device, lambda run: 0.0)
    assert {"triton", "sdpa"} <= set(result["ms"])
    assert result["bytes"] == 2 * 2 * 2 * 75 * 16 * 2 + 2 * 2 * 5 * 4 * 16 * 2


def test_the_trees_of_the_benchmark_are_binary() -> None:
    assert benchmark.binary_parents(7) == [-1, -1, 0, 0, 1, 1, 2]
    plan = benchmark.tree_plan(1, 4, 3, torch.device("cpu"))
    assert plan.visible(0).int().tolist() == [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0, 1]]

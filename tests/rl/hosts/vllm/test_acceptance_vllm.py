"""A draft's fate is the same in vLLM as in the embedded engine: token for token, by the benchmark that measures it on real models."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def benchmark(repository_root: Path) -> ModuleType:
    sys.path.insert(0, str(repository_root / "benchmarks"))
    import vllm_acceptance

    return vllm_acceptance


@pytest.fixture(scope="module")
def tiny(repository_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a policy with a tokenizer, and of drafters for it."""
    from tiny_vllm import write_drafters

    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run([sys.executable, repository_root / "examples" / "verl_grpo_tiny" / "prepare.py", folder, "32"], check=True)
    write_drafters(folder / "model", folder)
    return folder


@pytest.mark.parametrize("kind", ["mtp", "block"])
def test_the_same_noise_gives_the_same_drafts_acceptances_and_tokens(kind: str, benchmark: ModuleType, tiny: Path) -> None:
    """Seeds and positions decide all noise, so engines that hand the drafter the same states cannot differ."""
    setting = benchmark.Setting(model=str(tiny / "model"), drafter=str(tiny / kind), draft_length=3, dtype="float32", max_context=96)
    asked = [benchmark.Asked(prompt=tuple(range(5, 25 + seed % 20)), seed=seed, num_tokens=32) for seed in range(24)]
    vllm = benchmark.with_vllm(setting, asked)
    gc.collect()  # the engine, before another may start
    after = benchmark.behind_first_token(asked, vllm)
    found = benchmark.coupled(vllm, benchmark.with_embedded(setting, after))
    # Sums of another order may turn one draw in some thousands.
    assert found["equal_requests"] >= 22
    assert found["tokens_before_a_difference"] > 0.95 * found["tokens"]
    assert accepted(vllm) > 10, "nothing was compared: hardly a draft was accepted"
    other_noise = [dataclasses.replace(one, seed=one.seed + 1000) for one in after]
    assert benchmark.coupled(vllm, benchmark.with_embedded(setting, other_noise))["equal_requests"] == 0


def accepted(traces: Sequence[Any]) -> int:
    return sum(sum(row) for trace in traces for row in trace.accepted)

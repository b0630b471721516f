"""The kernels' benchmark on shapes that take a moment: what it checks, what it writes, and its GPU half in Triton's interpreter."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

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


class _Wrapper:
    """What FlashInfer's wrapper computes of ragged rows and a flat mask, as its documentation says."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")

    def plan(self, rows: Tensor, keys: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, **options: Any) -> None:
        self.rows, self.keys, self.sizes, self.mask = (
            rows.tolist(),
            keys.tolist(),
            (num_heads, num_kv_heads, head_dim),
            options["custom_mask"],
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts, begin = [], 0
        assert (q.shape[1], k.shape[1], q.shape[2]) == self.sizes
        for b in range(len(self.rows) - 1):
            rows, keys = slice(*self.rows[b : b + 2]), slice(*self.keys[b : b + 2])
            shape = (rows.stop - rows.start, keys.stop - keys.start)
            mask = self.mask[begin : begin + shape[0] * shape[1]].view(shape)
            begin += mask.numel()
            heads = (of.transpose(0, 1)[None] for of in (q[rows], k[keys], v[keys]))
            parts.append(torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
        assert begin == self.mask.numel()
        return torch.cat(parts)


def test_flashinfer_is_given_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollout-spec[triton]'")
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=_Wrapper))
    plan = benchmark.tree_plan(3, 5, 20, torch.device("cpu"))
    q, k, v = torch.randn(15, 4, 16), torch.randn(3, 2, 25, 16), torch.randn(3, 2, 25, 16)
    wanted = benchmark.attention_variants(plan, q, k, v, 5)["sdpa"]()
    torch.testing.assert_close(benchmark.flashinfer_attention(q, k, v, plan.visible(0))(), wanted)


def test_the_trees_of_the_benchmark_are_binary() -> None:
    assert benchmark.binary_parents(7) == [-1, -1, 0, 0, 1, 1, 2]
    plan = benchmark.tree_plan(1, 4, 3, torch.device("cpu"))
    assert plan.visible(0).int().tolist() == [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0, 1]]

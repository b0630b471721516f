"""What the linear layers of a model and the truncation of its rows cost: torch, and rollout_spec_kernels.

    python benchmarks/cpu_ops.py [--rows 1,2,4,8,16,32,64] [--repeats 15] [--threads 2] [--only linear|truncation] [--json FILE]

A pass of the linear layers is every one of a Llama-like model once, in order, so that the weights come from memory as they do in a decode
step: torch, oneDNN or MKL with packed weights, and ours. A pass of truncation is temperature, min-p, top-k, top-p and log-softmax of 16
rows, by the readable form and in C++. The variants take turns inside each repeat. Prints the least and the median milliseconds of a pass.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rollout_spec.engine.ops import TorchLinear, TorchOps
from rollout_spec.sampling import SamplingParams, truncations
from rollout_spec_kernels.cpu import CpuOps

# (out, in) of qkv, out, gate/up and down of SmolLM2-135M, and its number of layers.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
NUM_LAYERS = 30
TRUNCATED_ROWS = 16
VOCABULARIES = (49_152, 151_936)
FILTERS = {
    "top_k": SamplingParams(temperature=0.7, top_k=50),
    "top_p": SamplingParams(temperature=0.7, top_p=0.95),
    "min_p": SamplingParams(temperature=0.7, min_p=0.05),
    "all three": SamplingParams(temperature=0.7, top_k=50, top_p=0.95, min_p=0.01),
}


def passes(weights: list[Tensor], ops: CpuOps) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """The layers of each variant."""
    return {
        "torch": [functools.partial(torch.nn.functional.linear, weight=weight) for weight in weights],
        "packed torch": [TorchLinear(weight, None, None) for weight in weights],
        "rollout_spec_kernels": [ops.pack_linear(weight, None) for weight in weights],
    }


def measure(dtype: torch.dtype, rows: list[int], repeats: int) -> list[dict[str, object]]:
    """One result for each (rows, variant): milliseconds of a pass."""
    weights = [torch.randn(shape).to(dtype) for _ in range(NUM_LAYERS) for shape in SHAPES]
    variants, results = passes(weights, CpuOps()), []
    for num_rows in rows:
        inputs = {width: torch.randn(num_rows, width).to(dtype) for _, width in SHAPES}
        run_all = {name: functools.partial(_run_layers, layers, weights, inputs) for name, layers in variants.items()}
        label = {"dtype": str(dtype), "rows": num_rows}
        results += timed(run_all, repeats, label, f"{str(dtype).removeprefix('torch.'):9} {num_rows:4} rows")
    return results


def _run_layers(layers: list[Callable[[Tensor], Tensor]], weights: list[Tensor], inputs: dict[int, Tensor]) -> None:
    for weight, layer in zip(weights, layers, strict=True):
        layer(inputs[weight.shape[1]])


def measure_truncation(vocab_size: int, repeats: int) -> list[dict[str, object]]:
    """One result for each (filters, variant): milliseconds for all rows."""
    results: list[dict[str, object]] = []
    logits = 3 * torch.randn(TRUNCATED_ROWS, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    for name, params in FILTERS.items():
        given = truncations([params] * TRUNCATED_ROWS)
        readable, own = (ops.truncated_log_softmax(logits, given).log_probs > -torch.inf for ops in (TorchOps(), CpuOps()))
        assert torch.equal(readable, own), f"{name}: the supports differ"
        variants: dict[str, Callable[[], object]] = {
            "readable": functools.partial(TorchOps().truncated_log_softmax, logits, given),
            "rollout_spec_kernels": functools.partial(CpuOps().truncated_log_softmax, logits, given),
        }
        label = {"filters": name, "rows": TRUNCATED_ROWS, "vocab": vocab_size}
        results += timed(variants, repeats, label, f"{name:9} {TRUNCATED_ROWS:4} rows of {vocab_size}")
    return results


def timed(variants: Mapping[str, Callable[[], object]], repeats: int, label: dict[str, object], line: str) -> list[dict[str, object]]:
    """Least and median milliseconds of each variant, which take turns; the first turn is a warm-up. Prints them behind ``line``."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    warm = {name: taken[1:] for name, taken in times.items()}
    print(f"{line}   " + "  ".join(f"{name} {min(of):7.1f} ({statistics.median(of):7.1f})" for name, of in warm.items()), flush=True)
    return [{**label, "variant": name, "min_ms": min(of), "median_ms": statistics.median(of)} for name, of in warm.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=("linear", "truncation"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{platform.processor() or platform.machine()}, {arguments.threads} threads, torch {torch.__version__}; least (median) ms")
    with torch.inference_mode():
        rows = [int(number) for number in arguments.rows.split(",")]
        results: list[dict[str, object]] = []
        if arguments.only != "truncation":
            results += [result for dtype in (torch.bfloat16, torch.float32) for result in measure(dtype, rows, arguments.repeats)]
        if arguments.only != "linear":
            results += [result for vocab_size in VOCABULARIES for result in measure_truncation(vocab_size, arguments.repeats)]
    if arguments.json:
        arguments.json.write_text(json.dumps({"threads": arguments.threads, "torch": torch.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()

"""What the linear layers of a model cost by number of rows: torch, oneDNN or MKL with packed weights, and rollout_spec_kernels.

    python benchmarks/cpu_ops.py [--rows 1,2,4,8,16,32,64] [--repeats 15] [--threads 2] [--json FILE]

One pass is every linear layer of a Llama-like model once, in order, so that the weights come from memory as they do in a decode step;
the variants take turns inside each repeat. Prints the least and the median milliseconds of a pass.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rollout_spec.engine.ops import TorchLinear
from rollout_spec_kernels.cpu import CpuOps

# (out, in) of qkv, out, gate/up and down of SmolLM2-135M, and its number of layers.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
NUM_LAYERS = 30


def passes(weights: list[Tensor], ops: CpuOps) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """The layers of each variant."""
    return {
        "torch": [functools.partial(torch.nn.functional.linear, weight=weight) for weight in weights],
        "packed torch": [TorchLinear(weight, None) for weight in weights],
        "rollout_spec_kernels": [ops.pack_linear(weight, None) for weight in weights],
    }


def measure(dtype: torch.dtype, rows: list[int], repeats: int) -> list[dict[str, object]]:
    """One result for each (rows, variant): milliseconds of a pass."""
    weights = [torch.randn(shape).to(dtype) for _ in range(NUM_LAYERS) for shape in SHAPES]
    variants, results = passes(weights, CpuOps()), []
    for num_rows in rows:
        inputs = {width: torch.randn(num_rows, width).to(dtype) for _, width in SHAPES}
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(repeats + 1):
            for name, layers in variants.items():
                start = time.perf_counter()
                for weight, layer in zip(weights, layers, strict=True):
                    layer(inputs[weight.shape[1]])
                times[name].append(1e3 * (time.perf_counter() - start))
        for name, taken in times.items():
            warm = taken[1:]
            results.append(
                {"dtype": str(dtype), "rows": num_rows, "variant": name, "min_ms": min(warm), "median_ms": statistics.median(warm)}
            )
        line = "  ".join(f"{name} {min(taken[1:]):7.1f} ({statistics.median(taken[1:]):7.1f})" for name, taken in times.items())
        print(f"{str(dtype).removeprefix('torch.'):9} {num_rows:4} rows   {line}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{platform.processor() or platform.machine()}, {arguments.threads} threads, torch {torch.__version__}; least (median) ms")
    with torch.inference_mode():
        rows = [int(number) for number in arguments.rows.split(",")]
        results = [result for dtype in (torch.bfloat16, torch.float32) for result in measure(dtype, rows, arguments.repeats)]
    if arguments.json:
        arguments.json.write_text(json.dumps({"threads": arguments.threads, "torch": torch.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()

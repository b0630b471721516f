"""Times of the kernels beside what they replace, after a check that both give the same.

    python benchmarks/kernels.py --cpu --json FILE [--repeats 9] [--threads 2]     verification in C++ against torch
    python benchmarks/kernels.py --json FILE                              on a GPU: tree attention, verification, truncation

On the CPU variants take turns inside each repeat; the least and the median milliseconds are kept. On a GPU times are Triton's do_bench
medians, and each stands beside its floor: bytes that must be moved over the bandwidth of a copy measured in the same run.

Shape legend: B requests, N nodes, V vocabulary, H query heads, Hkv key/value heads, d head size.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_spec.engine.ops import TorchOps
from rollout_spec.engine.plan import AttentionPlan, mask_words
from rollout_spec.sampling import SamplingParams, truncations
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verify import AllRows, CounterNoise, Scheme, TokenScores
from rollout_spec.verify import verify as readable_verify

CHAINS = (Scheme.REJECTION, Scheme.BLOCK)
VERIFY_SHAPES = ((16, 8, 49_152), (32, 16, 151_936))
TRUNCATION_SHAPES = ((144, 49_152), (528, 151_936))  # R, V: all rows of the trees above
TRUNCATIONS = {
    "top_k": SamplingParams(temperature=0.7, top_k=50),
    "top_p": SamplingParams(temperature=0.7, top_p=0.95),
    "all three": SamplingParams(temperature=0.7, top_k=50, top_p=0.95, min_p=0.01),
}
HEADS = (32, 8, 128)  # H, Hkv, d of an 8B model
ATTENTION_SHAPES = tuple((batch, nodes, context) for batch in (1, 16, 64) for nodes in (8, 64) for context in (1024, 8192, 32_768))
MAX_CACHE_BYTES = 24 << 30

Result = dict[str, Any]
TimeMs = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Rows that are there already: what is timed is verification alone."""

    rows: Tensor  # [B (N + 1), V] float32 log-probabilities
    batch_size: int
    vocab_size: int
    stride: int  # N + 1

    def log_probs(self, requests: Tensor, nodes: Tensor) -> Tensor:
        return self.rows[requests * self.stride + nodes + 1]

    def all_rows(self, *, needed: bool) -> AllRows:  # noqa: ARG002 - the protocol's signature
        return AllRows(log_probs=self.rows, roots=torch.arange(self.batch_size, device=self.rows.device) * self.stride, entropies=None)

    def draw(self, log_probs: Tensor, uniforms: Tensor) -> Tensor:
        return TorchOps().inverse_cdf(log_probs, uniforms)

    def score(self, requests: Tensor, nodes: Tensor, token_ids: Tensor) -> TokenScores | None:  # noqa: ARG002 - the protocol's signature
        return None


def binary_parents(nodes: int) -> list[int]:
    """Two children a node, in breadth-first order."""
    return [(node - 2) // 2 if node > 1 else -1 for node in range(nodes)]


def draft_round(scheme: Scheme, batch: int, nodes: int, vocab_size: int, device: torch.device) -> tuple[DraftTree, Target]:
    """A chain, or a binary tree drawn without replacement, from laws near the target's, and the target's rows."""
    generator = torch.Generator(device).manual_seed(batch * nodes)
    parents = list(range(-1, nodes - 1)) if scheme in CHAINS else binary_parents(nodes)
    rows = 2.5 * torch.randn(batch, nodes + 1, vocab_size, generator=generator, device=device)
    draft_probs = torch.empty(batch, nodes, vocab_size, device=device)
    tokens = torch.empty(batch, nodes, dtype=torch.int64, device=device)
    for parent in sorted(set(parents)):
        children = [node for node, other in enumerate(parents) if other == parent]
        probs = (rows[:, parent + 1] + 0.7 * torch.randn(batch, vocab_size, generator=generator, device=device)).softmax(-1)
        draft_probs[:, children] = probs[:, None]
        race = torch.empty_like(probs).exponential_(generator=generator)
        tokens[:, children] = (probs / race).topk(len(children)).indices
    tree = DraftTree(
        token_ids=tokens,
        parents=torch.tensor(parents, device=device).expand(batch, -1).contiguous(),
        num_nodes=torch.full((batch,), nodes, device=device),
        draw=Draw.SAMPLED if scheme in CHAINS else Draw.WITHOUT_REPLACEMENT,
        draft_probs=draft_probs,
    )
    log_probs = rows.sub_(rows.logsumexp(-1, keepdim=True)).flatten(0, 1)
    return tree, Target(rows=log_probs, batch_size=batch, vocab_size=vocab_size, stride=nodes + 1)


def alternate(variants: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Least and median milliseconds of each variant; they take turns, and the first turn is a warm-up."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: {"min_ms": min(times[1:]), "median_ms": statistics.median(times[1:])} for name, times in taken.items()}


def cpu_verification(shapes: tuple[tuple[int, int, int], ...], schemes: list[Scheme], repeats: int) -> list[Result]:
    """The schemes on every shape: C++ beside torch."""
    from rollout_spec_kernels.cpu import CpuOps
    from rollout_spec_kernels.verify import verify_fused

    results, ops, device = [], CpuOps(), torch.device("cpu")
    for batch, nodes, vocab_size in shapes:
        for scheme in schemes:
            tree, target = draft_round(scheme, batch, nodes, vocab_size, device)
            noise = CounterNoise(list(range(batch)), [5] * batch, ops)
            fused, readable = verify_fused(tree, target, noise, scheme), readable_verify(tree, target, noise, scheme)
            assert fused is not None
            agreeing = int((fused.next_token_ids == readable.next_token_ids).sum())
            assert agreeing >= batch - 1, f"{scheme.value}: {agreeing} of {batch} requests agree"
            variants: dict[str, Callable[[], object]] = {
                "cpp": lambda: verify_fused(tree, target, noise, scheme),  # noqa: B023 - run before the loop goes on
                "torch": lambda: readable_verify(tree, target, noise, scheme),  # noqa: B023
            }
            times = alternate(variants, repeats)
            ratio = times["torch"]["median_ms"] / times["cpp"]["median_ms"]
            shape = {"batch": batch, "nodes": nodes, "vocab": vocab_size}
            mean_accepted = float(fused.num_accepted.double().mean())
            results.append({"kernel": "verify", "scheme": scheme.value, **shape, "mean_accepted": mean_accepted, **times, "ratio": ratio})
            line = f"{times['cpp']['median_ms']:8.2f} ms C++ {times['torch']['median_ms']:9.2f} ms torch   {ratio:5.1f} x"
            print(f"verify {scheme.value:15} B={batch} N={nodes} V={vocab_size}   {line}", flush=True)
    return results


def tree_plan(batch: int, nodes: int, context: int, device: torch.device) -> AttentionPlan:
    """Binary trees of ``nodes`` rows (the root is the first) behind equal contexts."""
    sees = torch.eye(nodes, dtype=torch.bool)
    for row, parent in enumerate([-1, *(parent + 1 for parent in binary_parents(nodes - 1))]):
        if parent >= 0:
            sees[row] |= sees[parent]
    return AttentionPlan(
        row_offsets=nodes * torch.arange(batch + 1, device=device),
        slots=torch.arange(batch, device=device),
        context_lengths=torch.full((batch,), context, device=device),
        ancestors=mask_words(sees).repeat(batch, 1).to(device),
    )


def attention_variants(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, nodes: int) -> dict[str, Callable[[], Tensor]]:
    """Our kernel, SDPA with a mask over expanded heads, and on a GPU flex attention, and FlashInfer where it is installed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from rollout_spec_kernels.triton.attention import attention

    batch, (_, num_heads, head_dim), length = plan.slots.numel(), q.shape, k.shape[2]
    seen = plan.visible(0).to(q.device)
    mask = torch.nn.functional.pad(seen, (0, length - seen.shape[1]))
    batched = q.view(batch, nodes, num_heads, head_dim).transpose(1, 2)
    scale = head_dim**-0.5

    def sdpa() -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(batched, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(batch * nodes, -1)

    variants: dict[str, Callable[[], Tensor]] = {"triton": lambda: attention(q, k, v, plan, scale), "sdpa": sdpa}
    if q.device.type == "cuda":
        flex = torch.compile(flex_attention)
        block_mask = create_block_mask(lambda b, h, row, key: mask[row, key], None, None, nodes, length, device=q.device)  # noqa: ARG005
        variants["flex"] = lambda: (
            flex(batched, k, v, block_mask=block_mask, scale=scale, enable_gqa=True).transpose(1, 2).reshape(batch * nodes, -1)
        )
        if q.dtype is torch.bfloat16 and importlib.util.find_spec("flashinfer") is not None:
            variants["flashinfer"] = flashinfer_attention(q, k, v, mask)
    return variants


def flashinfer_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Callable[[], Tensor]:
    """FlashInfer's batched attention with the tree as a custom mask [N, L]; keys of a request side by side, as it wants them."""
    import flashinfer

    (batch, num_kv_heads, length, head_dim), nodes = k.shape, mask.shape[0]
    keys, values = (of.transpose(1, 2).reshape(batch * length, num_kv_heads, head_dim).contiguous() for of in (k, v))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(256 << 20, dtype=torch.uint8, device=q.device), "NHD")
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    wrapper.plan(
        nodes * offsets,
        length * offsets,
        q.shape[1],
        num_kv_heads,
        head_dim,
        custom_mask=mask.flatten().repeat(batch),
        q_data_type=q.dtype,
    )
    return lambda: wrapper.run(q, keys, values).flatten(1)


def gpu_attention(
    shapes: tuple[tuple[int, int, int], ...], device: torch.device, time_ms: Callable[[Callable[[], object]], float]
) -> list[Result]:
    """Every variant on every shape that fits, checked against SDPA in float32 first; bytes are K and V once, q and out."""
    results, (num_heads, num_kv_heads, head_dim) = [], HEADS
    for batch, nodes, context in shapes:
        length = context + nodes
        kv_bytes = 2 * batch * num_kv_heads * length * head_dim * 2
        if kv_bytes > MAX_CACHE_BYTES:
            continue
        plan = tree_plan(batch, nodes, context, device)
        k, v = torch.randn(2, batch, num_kv_heads, length, head_dim, device=device).to(torch.bfloat16)
        q = torch.randn(batch * nodes, num_heads, head_dim, device=device).to(torch.bfloat16)
        variants = attention_variants(plan, q, k, v, nodes)
        exact = attention_variants(plan, q.float(), k.float(), v.float(), nodes)["sdpa"]()
        for name, run in variants.items():
            error = float((run().float() - exact).abs().max())
            assert error < 0.02, f"{name} is off by {error} at B={batch} N={nodes} context={context}"
        times = {name: time_ms(run) for name, run in variants.items()}
        num_bytes = kv_bytes + 2 * q.numel() * 2
        results.append({"kernel": "attention", "batch": batch, "nodes": nodes, "context": context, "bytes": num_bytes, "ms": times})
        print(f"attention B={batch} N={nodes} context={context}   {times}", flush=True)
    return results


def gpu_verification(device: torch.device, time_ms: TimeMs) -> list[Result]:
    """csrc/verify.cu beside the readable verifier on the GPU; bytes are the rows of p and q once."""
    from rollout_spec_kernels import cuda
    from rollout_spec_kernels.cpu import CpuOps

    results = []
    for batch, nodes, vocab_size in VERIFY_SHAPES:
        for scheme in Scheme:
            tree, target = draft_round(scheme, batch, nodes, vocab_size, device)
            noise = CounterNoise(list(range(batch)), [5] * batch, CpuOps())
            own, readable = cuda.verify(tree, target, noise, scheme), readable_verify(tree, target, noise, scheme)
            assert int((own.next_token_ids == readable.next_token_ids).sum()) >= batch - 1, scheme.value
            times = {
                "cuda": time_ms(lambda: cuda.verify(tree, target, noise, scheme)),  # noqa: B023 - run before the loop goes on
                "torch": time_ms(lambda: readable_verify(tree, target, noise, scheme)),  # noqa: B023
            }
            num_bytes = 4 * vocab_size * batch * (2 * nodes + 1)
            shape = {"batch": batch, "nodes": nodes, "vocab": vocab_size}
            results.append({"kernel": "verify", "scheme": scheme.value, **shape, "bytes": num_bytes, "ms": times})
            print(f"verify {scheme.value} B={batch} N={nodes} V={vocab_size}   {times}", flush=True)
    return results


def gpu_truncation(shapes: tuple[tuple[int, int], ...], device: torch.device, time_ms: TimeMs) -> list[Result]:
    """csrc/truncation.cu beside torch's sorts, and Triton's rows, which write no log-probabilities; bytes are cuda's, read and written.

    "triton, whole" is Triton with the temperature alone: the difference is what finding the support costs.
    """
    from rollout_spec_kernels import cuda
    from rollout_spec_kernels.triton.rows import row_stats

    results = []
    for num_rows, vocab_size in shapes:
        logits = (3 * torch.randn(num_rows, vocab_size, device=device)).to(torch.bfloat16)
        for name, params in TRUNCATIONS.items():
            given = truncations([params] * num_rows)
            moved = replace(given, **{field.name: getattr(given, field.name).to(device) for field in fields(given)})
            kept = [ops(logits, given).log_probs > -torch.inf for ops in (cuda.truncated_log_softmax, TorchOps().truncated_log_softmax)]
            agreeing = int((kept[0] == kept[1]).all(-1).sum())
            assert agreeing >= 0.9 * num_rows, f"{name}: {agreeing} of {num_rows} rows agree"  # torch sums the mass in float32
            entropies = cuda.truncated_log_softmax(logits, given).entropies
            torch.testing.assert_close(row_stats(logits, moved).entropies, entropies, rtol=0, atol=1e-2)  # a token at the edge may differ
            times = {
                "cuda": time_ms(lambda: cuda.truncated_log_softmax(logits, given)),  # noqa: B023 - run before the loop goes on
                "torch": time_ms(lambda: TorchOps().truncated_log_softmax(logits, given)),  # noqa: B023
                "triton": time_ms(lambda: row_stats(logits, moved)),  # noqa: B023
                "triton, whole": time_ms(lambda: row_stats(logits, moved, may_truncate=False)),  # noqa: B023
            }
            shape = {"rows": num_rows, "vocab": vocab_size, "filters": name}
            results.append({"kernel": "truncation", **shape, "bytes": 6 * num_rows * vocab_size, "ms": times})
            print(f"truncation {name} R={num_rows} V={vocab_size}   {times}", flush=True)
    return results


def run_gpu() -> Result:
    from triton.testing import do_bench

    device = torch.device("cuda")
    source, target = torch.empty(2, 1 << 30, dtype=torch.uint8, device=device)
    copy_ms = do_bench(lambda: target.copy_(source), return_mode="median")
    bandwidth = 2 * source.numel() / (1e-3 * copy_ms)
    results = gpu_attention(ATTENTION_SHAPES, device, lambda run: float(do_bench(run, return_mode="median")))
    results += gpu_verification(device, lambda run: float(do_bench(run, return_mode="median")))
    results += gpu_truncation(TRUNCATION_SHAPES, device, lambda run: float(do_bench(run, return_mode="median")))
    for result in results:
        result["floor_ms"] = 1e3 * result["bytes"] / bandwidth
    return {"device": torch.cuda.get_device_name(), "copy_bytes_per_s": bandwidth, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", default="16x8x49152,32x16x151936", help="B x N x V of --cpu")
    parser.add_argument("--schemes", default=",".join(scheme.value for scheme in Scheme), help="of --cpu")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        parser.error("torch sees no GPU; measure the C++ kernels with --cpu")
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        if arguments.cpu:
            shapes = tuple((int(b), int(n), int(v)) for b, n, v in (shape.split("x") for shape in arguments.shapes.split(",")))
            measured = {"device": platform.processor() or platform.machine(), "threads": arguments.threads}
            measured["results"] = cpu_verification(shapes, [Scheme(name) for name in arguments.schemes.split(",")], arguments.repeats)
        else:
            measured = run_gpu()
    arguments.json.write_text(json.dumps({"torch": torch.__version__, **measured}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Compiles Triton's verifiers and Gated Delta Net kernels for GPUs that need not be there; what the interpreter lets pass shows here.

python tests/kernels/compile_triton.py ARCHITECTURE ...     (80, 90), without TRITON_INTERPRET; prints a line for each kernel
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rollout_spec_kernels.triton import chains, gated_delta, match, rows, trees

_INTS = "tokens parents lengths roots seeds positions stage_tokens path num_accepted next_tokens leaves taps top_ks"
_DOUBLES = "draft_sums accept_probs shared left_over draft weights accept recover top_ps log_min_ps"
_SIZES = "num_nodes vocab_size draft_vocab num_rows num_channels"
TYPES = {
    **dict.fromkeys(_INTS.split(), "*i64"),
    **dict.fromkeys(_DOUBLES.split(), "*fp64"),
    **dict.fromkeys(_SIZES.split(), "i32"),
    "logits": "*bf16",
    "column_of": "*i32",
    "support": "*i32",
    "is_bonus": "*i8",
}  # everything else is float32
_WHOLE = {"support": None}  # temperatures only
_KEYED = {"accept": None, "recover": None}  # noise from keys; without it the uniforms are handed over
_DRAFT = {"has_names": True, "chunk": 1024}
_LAYER = {"num_heads": 4, "key_size": 128, "value_size": 128, "block_keys": 128, "block_values": 64}
_DRAWS = {"block_nodes": 8, "races": False, "chunk": 1024}
_RACES = {"block_nodes": 8, "races": True, "chunk": 1024, "recover": None}
KERNELS: tuple[tuple[Any, dict[str, object]], ...] = (
    (rows._row_stats, {"chunk": 1024, **_WHOLE}),
    (rows._row_stats, {"chunk": 1024}),
    (match.follow, {**_RACES, "gumbels": None, **_WHOLE}),
    (match.follow, {**_RACES, "gumbels": None}),
    (match.follow, _RACES),
    (match.follow, {**_DRAWS, "gumbels": None, "recover": None, **_WHOLE}),
    (match.follow, {**_DRAWS, "gumbels": None}),
    (chains.chain_rows, {"is_block": True, **_DRAFT, **_WHOLE}),
    (chains.chain_rows, {"is_block": True, **_DRAFT}),
    (chains.finish_chain, {"is_block": True, **_DRAFT, **_KEYED, **_WHOLE}),
    (chains.finish_chain, {"is_block": True, **_DRAFT}),
    (trees.walk, {"block_nodes": 8, **_DRAFT, **_KEYED, **_WHOLE}),
    (trees.walk, {"block_nodes": 8, **_DRAFT}),
    (trees.traverse, {"block_nodes": 8, **_DRAFT, **_KEYED, **_WHOLE}),
    (trees.traverse, {"block_nodes": 8, **_DRAFT}),
    (gated_delta._solve, {"block_rows": 16, **_LAYER}),
    (gated_delta._commit, _LAYER),
    (gated_delta._convolve, {"window": 4, "block": 128}),
)


def main() -> None:
    for kernel, constants in KERNELS:
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else TYPES.get(name, "*fp32") for name in names}
        source = ASTSource(kernel, signature, constexprs={(names.index(name),): value for name, value in constants.items()})
        for architecture in sys.argv[1:]:
            made = triton.compile(source, target=GPUTarget("cuda", int(architecture), 32))
            sys.stdout.write(f"{kernel.__name__} sm_{architecture}: {len(made.asm['cubin'])} bytes\n")


if __name__ == "__main__":
    main()

"""Sampled proofs: chi-square over joint prefixes of many rounds, with the noise that production uses.

Shape legend: R requests, V vocabulary, L length of a prefix.
"""

from __future__ import annotations

from collections.abc import Callable

import scipy.stats
import torch
from torch import Tensor

from exactness.models import Drafter, TableModel
from rollout_spec.verify import CounterNoise, DenseNoise, DenseTarget, Scheme, VerifyFn, VerifyNoise

NUM_REQUESTS = 1 << 17
NUM_IN_INTERPRETER = {2: 1 << 7, 3: 1 << 10}  # by the length of the prefixes: what Triton's interpreter decides in seconds, and in minutes
# A correct verifier fails one seeded test in 10 000; the seeds are fixed, so a test that passed once goes on passing.
FALSE_ALARM_RATE = 1e-4

# (seeds, absolute positions of the round's first token, vocabulary, the uniforms the drafts were drawn with [R, N]) -> noise
MakeNoise = Callable[[list[int], list[int], int, Tensor], VerifyNoise]


def counter_noise(seeds: list[int], positions: list[int], vocab_size: int, draft_uniforms: Tensor) -> VerifyNoise:
    return CounterNoise(seeds, positions)


def dense_gumbel_noise(seeds: list[int], positions: list[int], vocab_size: int, draft_uniforms: Tensor) -> VerifyNoise:
    """Fresh Gumbel noise of torch's own for every round, at two depths and the one behind them."""
    exponential = torch.empty(len(seeds), 3, vocab_size, dtype=torch.float64).exponential_()
    return DenseNoise(gumbel=-exponential.log())


def sample_prefixes(
    verify: VerifyFn,
    scheme: Scheme,
    make: Callable[[TableModel], Drafter],
    draft: TableModel,
    target: TableModel,
    length: int,
    noise: MakeNoise = counter_noise,
    num_requests: int = NUM_REQUESTS,
    draft_uniforms: Tensor | None = None,
) -> Tensor:
    """[R] codes (base V) of the first L tokens of requests 0 .. R - 1, round after round until each has L.

    Drafts are drawn with fresh uniforms; draft_uniforms [R, positions] plants uniforms by request and token position instead.
    Requests that stand after the same prefix are drafted and verified as one batch. The models' tables must reach the deepest draft.
    """
    generator = torch.Generator().manual_seed(20)
    finished = torch.zeros(num_requests, dtype=torch.int64)
    waiting: dict[tuple[int, ...], Tensor] = {(): torch.arange(num_requests)}
    while waiting:
        prefix, requests = waiting.popitem()
        drafter = make(draft.after(prefix))
        uniforms = torch.rand(requests.numel(), len(drafter.parents), generator=generator, dtype=torch.float64)
        if draft_uniforms is not None:
            uniforms = draft_uniforms[requests, len(prefix) :][:, : len(drafter.parents)]
        tree = drafter.sample(uniforms)
        rows = DenseTarget(drafter.target_rows(target.after(prefix), tree))
        # Rounds start behind a prompt of seven tokens.
        drawn = noise(requests.tolist(), [7 + len(prefix)] * requests.numel(), target.vocab_size, uniforms)
        for output, index in _groups(verify(tree, rows, drawn, scheme).emitted(tree)[:, : length - len(prefix)]):
            after = (*prefix, *output)
            if len(after) < length:
                waiting[after] = torch.cat([waiting[after], requests[index]]) if after in waiting else requests[index]
            else:
                finished[requests[index]] = _code(after, target.vocab_size)
    return finished


def chi_square(codes: Tensor, expected_law: Tensor) -> float:
    """p-value of the counts of codes [R] under expected_law [V**L]; 0 if an impossible prefix occurred.

    Prefixes expected fewer than five times are counted as one.
    """
    counts = torch.bincount(codes, minlength=expected_law.numel()).double()
    if bool(counts[expected_law == 0].any()):
        return 0.0
    expected = expected_law * codes.numel()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    kept = expected > 0
    scale = counts.sum() / expected.sum()  # 1 but for rounding, which scipy refuses
    return float(scipy.stats.chisquare(counts[kept].numpy(), (expected[kept] * scale).numpy()).pvalue)


def _groups(tokens: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """Distinct rows of tokens (NO_TOKEN padding dropped) and the indices that hold them."""
    rows, inverse = tokens.unique(dim=0, return_inverse=True)
    return [(tuple(t for t in row if t >= 0), (inverse == group).nonzero()[:, 0]) for group, row in enumerate(rows.tolist())]


def _code(prefix: tuple[int, ...], vocab_size: int) -> int:
    code = 0
    for token in prefix:
        code = code * vocab_size + token
    return code

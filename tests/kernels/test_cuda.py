"""The CUDA kernels: their text runs here on CPU threads, block by block, and must decide what the CPU's vectors decide; nvcc compiles it.

What a GPU alone can show (clocks, warps, memory) is benchmarks/device.sh's.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import re
import shutil
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from truncated_rows import TRUNCATED

from rollout_spec.sampling import SamplingParams, process_logits, truncations
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verdict import Verdict
from rollout_spec.verify import RATIO_SCHEMES, AllRows, CounterNoise, DenseTarget, Scheme, TokenScores, VerifyNoise
from rollout_spec_kernels import build, cuda
from rollout_spec_kernels.cpu import CpuOps
from rollout_spec_kernels.verify import Machine, verify_fused, verify_on

SHIM = Path(__file__).parent / "cuda" / "on_threads.h"
NUM_THREADS = 8  # of a block; vocabularies here are many times as wide
CHAINS = (Scheme.REJECTION, Scheme.BLOCK)
TREE = (-1, -1, 0, 0, 1, 3)


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The .cu files, compiled for the CPU's threads."""
    made = tmp_path_factory.mktemp("cuda") / "threads.so"
    options = ["-std=c++20", "-O1", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"]
    sources = ["-include", str(SHIM), "-x", "c++", *map(str, sorted(build.SOURCE_DIR.glob("*.cu")))]
    subprocess.run([build.COMPILER, *options, f"-DRS_BLOCK_THREADS={NUM_THREADS}", *sources, "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


@pytest.fixture
def machine(ops: CpuOps, threads: ctypes.CDLL) -> Machine:
    return cuda.stream_machine(threads, torch.device("cpu"))


class _Scored(DenseTarget):
    """A target that is the model's own law, and says so."""

    def all_rows(self, *, needed: bool) -> AllRows:
        rows = super().all_rows(needed=needed)
        return replace(rows, entropies=torch.special.entr(rows.log_probs.exp()).sum(-1))

    def score(self, requests: Tensor, nodes: Tensor, token_ids: Tensor) -> TokenScores:
        raise AssertionError("the kernel writes the scores")


def _round(scheme: Scheme, batch: int, vocab_size: int, draft_vocab: int | None) -> tuple[DraftTree, Tensor]:
    """Ragged chains or trees whose siblings are different tokens that q gives a probability, and the target's probabilities."""
    generator = torch.Generator().manual_seed(vocab_size)
    parents = tuple(range(-1, 4)) if scheme in CHAINS else TREE
    nodes, columns = len(parents), draft_vocab or vocab_size
    names = None if draft_vocab is None else torch.randperm(vocab_size, generator=generator)[:draft_vocab]
    above = torch.tensor(parents) + 1
    logits = torch.randn(batch, nodes + 1, vocab_size, generator=generator) * 2
    drafted = (logits if names is None else logits[..., names]) + 0.7 * torch.randn(batch, nodes + 1, columns, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    logits[..., 0] = 0.0
    order = (drafted - torch.rand(drafted.shape, generator=generator).log().neg().log()).argsort(-1, descending=True)
    ranks = torch.tensor([parents[:node].count(parent) for node, parent in enumerate(parents)])
    tokens = order[:, above, ranks]
    tree = DraftTree(
        token_ids=tokens if names is None else names[tokens],
        parents=torch.tensor(parents).expand(batch, -1),
        num_nodes=nodes - torch.arange(batch) % (nodes + 1),
        draw=Draw.SAMPLED if scheme in CHAINS else Draw.WITHOUT_REPLACEMENT,
        draft_probs=drafted.softmax(-1)[:, above],
        draft_token_ids=names,
    )
    return tree, logits.softmax(-1)


def _assert_same(got: Verdict | None, wanted: Verdict | None) -> None:
    assert got is not None
    assert wanted is not None
    for name in ("path", "num_accepted", "next_token_ids", "is_bonus"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    for name in ("accept_probs", "processed_logprobs", "entropies"):
        torch.testing.assert_close(getattr(got, name), getattr(wanted, name), rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("scheme", Scheme)
@pytest.mark.parametrize(("vocab_size", "draft_vocab"), [(7, None), (77, 20), (1003, None), (1003, 600)])
def test_a_block_decides_what_vectors_decide(
    machine: Machine, ops: CpuOps, scheme: Scheme, vocab_size: int, draft_vocab: int | None
) -> None:
    tree, target_probs = _round(scheme, 12, vocab_size, draft_vocab)
    noise = CounterNoise([-5, *range(11)], [2**40, *range(11)], ops)
    wanted = verify_fused(tree, _Scored(target_probs), noise, scheme)
    _assert_same(verify_on(machine, tree, _Scored(target_probs), noise, scheme), wanted)
    assert wanted is not None
    if scheme in RATIO_SCHEMES:  # the others seldom meet a draft of a large vocabulary
        assert wanted.num_accepted.unique().numel() > 1


class _Handed:
    """The uniforms of a CounterNoise, but not as keys."""

    def __init__(self, noise: CounterNoise) -> None:
        self.accept, self.recover, self.gumbel_argmax = noise.accept, noise.recover, noise.gumbel_argmax


@pytest.mark.parametrize("scheme", [scheme for scheme in Scheme if scheme is not Scheme.GUMBEL])
def test_uniforms_may_be_handed_over(machine: Machine, ops: CpuOps, scheme: Scheme) -> None:
    tree, target_probs = _round(scheme, 8, 90, None)
    noise: VerifyNoise = _Handed(CounterNoise(list(range(8)), [3] * 8, ops))
    _assert_same(verify_on(machine, tree, _Scored(target_probs), noise, scheme), verify_fused(tree, _Scored(target_probs), noise, scheme))


@pytest.mark.parametrize("scheme", [Scheme.BLOCK, Scheme.TRAVERSAL])
def test_one_bad_request_declines_the_batch(machine: Machine, scheme: Scheme) -> None:
    tree, target_probs = _round(scheme, 4, 50, 30)
    assert tree.draft_probs is not None
    assert tree.draft_token_ids is not None
    noise, names = CounterNoise(list(range(4)), [3] * 4), tree.draft_token_ids
    bad_target = target_probs.index_fill(0, torch.tensor([0]), torch.nan)
    bad_sum = torch.where(torch.arange(4)[:, None, None] == 0, 1.01 * tree.draft_probs, tree.draft_probs)
    refused = [
        (tree, bad_target),
        (replace(tree, draft_probs=bad_sum), torch.zeros_like(target_probs).index_fill(2, torch.tensor([_unnamed(names)]), 1.0)),
        (replace(tree, draft_token_ids=torch.cat([names[:1], names[:-1]])), target_probs),
        (replace(tree, token_ids=torch.where(torch.arange(4)[:, None] == 1, 50, tree.token_ids)), target_probs),
    ]
    for bad_tree, bad_probs in refused:
        assert verify_on(machine, bad_tree, DenseTarget(bad_probs), noise, scheme) is None
        assert verify_fused(bad_tree, DenseTarget(bad_probs), noise, scheme) is None


def _unnamed(names: Tensor) -> int:
    return next(token for token in range(50) if token not in names.tolist())


def _rows(vocab_size: int, kind: str) -> Tensor:
    """Logits with what decides between equals: rounded ones, equal ones, and ones of which half are -inf."""
    logits = 3 * torch.randn(len(TRUNCATED), vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    if kind == "ties":
        return logits.round()
    if kind == "flat":
        return torch.zeros_like(logits)
    return logits.index_fill(1, torch.arange(1, vocab_size, 2), -math.inf) if kind == "masked" else logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 33, 1000, 9001])
@pytest.mark.parametrize("kind", ["random", "ties", "flat", "masked"])
def test_a_block_truncates_as_vectors_do(threads: ctypes.CDLL, ops: CpuOps, dtype: torch.dtype, vocab_size: int, kind: str) -> None:
    logits = _rows(vocab_size, kind).to(dtype)
    got, wanted = cuda.truncate_on(threads, logits, truncations(TRUNCATED)), ops.truncated_log_softmax(logits, truncations(TRUNCATED))
    assert torch.equal(got.log_probs > -math.inf, wanted.log_probs > -math.inf)
    assert torch.equal(got.log_probs > -math.inf, process_logits(logits.float(), TRUNCATED) > -math.inf)
    # The same operations in float32 and sums in another order in double.
    torch.testing.assert_close(got.log_probs, wanted.log_probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(got.entropies, wanted.entropies, rtol=1e-6, atol=1e-6)


def test_zeros_of_both_signs_are_tied_and_rows_without_a_law_are_nan(threads: ctypes.CDLL) -> None:
    logits = torch.full((5, 60), -1.0)
    logits[:2, torch.tensor([3, 9, 21, 40])] = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    logits[2, 7], logits[3, 59], logits[4] = math.nan, math.inf, -math.inf
    got = cuda.truncate_on(threads, logits, truncations([SamplingParams(top_k=1), *[SamplingParams(top_k=4, top_p=0.6)] * 4]))
    assert (got.log_probs[0] > -math.inf).nonzero()[:, 0].tolist() == [3, 9, 21, 40]
    assert (got.log_probs[1] > -math.inf).nonzero()[:, 0].tolist() == [3, 9, 21]
    assert bool(got.log_probs[2:].isnan().all())
    assert got.entropies.isnan().tolist() == [False, False, True, True, True]


def test_rows_that_cannot_be_truncated_are_refused(threads: ctypes.CDLL) -> None:
    with pytest.raises(ValueError, match=r"float32 or bfloat16; got torch\.float64"):
        cuda.truncate_on(threads, torch.zeros(1, 5, dtype=torch.float64), truncations(TRUNCATED[:1]))
    with pytest.raises(ValueError, match="2 rows of logits need as many truncations; got 3"):
        cuda.truncate_on(threads, torch.zeros(2, 5), truncations(TRUNCATED[:3]))
    with pytest.raises(ValueError, match="logits must be on a GPU; got cpu"):
        cuda.truncated_log_softmax(torch.zeros(1, 5), truncations(TRUNCATED[:1]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here; benchmarks/device.sh runs this where there is one")
@pytest.mark.parametrize("vocab_size", [77, 49_157, 151_936])
@pytest.mark.parametrize("kind", ["random", "ties", "flat", "masked"])
def test_a_gpu_truncates_as_the_cpu_does(ops: CpuOps, vocab_size: int, kind: str) -> None:
    logits = _rows(vocab_size, kind).bfloat16()
    got, wanted = (
        cuda.truncated_log_softmax(logits.cuda(), truncations(TRUNCATED)),
        ops.truncated_log_softmax(logits, truncations(TRUNCATED)),
    )
    assert torch.equal(got.log_probs.cpu() > -math.inf, wanted.log_probs > -math.inf)
    torch.testing.assert_close(got.log_probs.cpu(), wanted.log_probs, rtol=0, atol=1e-6)


def test_without_nvcc_or_gpu_there_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="no CUDA compiler: 'no-such-compiler' is not on PATH"):
        build.load_cuda_library(cache_dir=tmp_path, compiler="no-such-compiler")
    if not torch.cuda.is_available():
        assert cuda.unavailable_reason() == "torch sees no GPU"


def test_trees_that_are_not_on_a_gpu_are_left_to_the_readable_verifier(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr(cuda, "_library", lambda: pytest.fail("nothing here is on a GPU"))
    tree, target_probs = _round(Scheme.BLOCK, 4, 50, None)
    verdict = cuda.verify(tree, DenseTarget(target_probs), CounterNoise([1] * 4, [2] * 4), Scheme.BLOCK)
    assert verdict.next_token_ids.shape == (4,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here; benchmarks/device.sh runs this where there is one")
@pytest.mark.parametrize("scheme", Scheme)
@pytest.mark.parametrize(("batch", "vocab_size", "draft_vocab"), [(12, 77, 20), (5, 49_157, None), (3, 151_936, 8192)])
def test_a_gpu_decides_what_the_cpu_decides(ops: CpuOps, scheme: Scheme, batch: int, vocab_size: int, draft_vocab: int | None) -> None:
    tree, target_probs = _round(scheme, batch, vocab_size, draft_vocab)
    noise = CounterNoise(list(range(batch)), [2**40] * batch, ops)
    moved = {field.name: getattr(tree, field.name) for field in fields(tree)}
    on_gpu = replace(tree, **{name: value.cuda() for name, value in moved.items() if isinstance(value, Tensor)})
    got = cuda.verify(on_gpu, _Scored(target_probs.cuda()), noise, scheme)
    wanted = verify_fused(tree, _Scored(target_probs), noise, scheme)
    _assert_same(Verdict(**{field.name: getattr(got, field.name).cpu() for field in fields(got)}), wanted)


@pytest.mark.slow
def test_nvcc_compiles_it_for_every_architecture_without_spills(tmp_path: Path) -> None:
    if shutil.which(build.CUDA_COMPILER) is None:
        pytest.skip("no nvcc on PATH")
    library = build.load_cuda_library(cache_dir=tmp_path)
    assert library.rs_verify_on_stream is not None
    assert library.rs_truncated_log_softmax_on_stream is not None
    for architecture, source in itertools.product(("sm_80", "sm_90"), ("verify.cu", "truncation.cu")):
        command = [build.CUDA_COMPILER, "-std=c++20", "-O3", "-fmad=false", f"-arch={architecture}", "-Xptxas=-v", "-cubin"]
        done = subprocess.run(
            [*command, str(build.SOURCE_DIR / source), "-o", str(tmp_path / "kernels.cubin")],
            capture_output=True,
            text=True,
            check=True,
        )
        spills = [int(number) for number in re.findall(r"(\d+) bytes spill", done.stderr)]
        assert spills
        assert max(spills) == 0, (architecture, source)

"""DDTree against brute force over every tree of a size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollout_spec.budget import TreeGrowth
from rollout_spec.drafters.ddtree import best_nodes, ddtree, throughput_sizes
from rollout_spec.tree import NO_PARENT, DraftTree, Draw


def marginals(num_requests: int, num_depths: int, vocab_size: int, seed: int) -> Tensor:
    return (
        torch.randn(num_requests, num_depths, vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        .mul(2)
        .log_softmax(-1)
    )


def build(log_probs: Tensor, num_nodes: int, max_depth: int) -> DraftTree:
    top = log_probs.topk(log_probs.shape[2], dim=-1)
    ones = torch.ones(log_probs.shape[0], dtype=torch.int64)
    return ddtree(top.values, top.indices, ones * num_nodes, ones * max_depth)


def paths(tree: DraftTree, request: int) -> list[tuple[int, ...]]:
    """Every node as the tokens from the root to it."""
    found: list[tuple[int, ...]] = []
    for node in range(int(tree.num_nodes[request])):
        parent = int(tree.parents[request, node])
        found.append((*(found[parent] if parent != NO_PARENT else ()), int(tree.token_ids[request, node])))
    return found


def prob(log_probs: Tensor, path: tuple[int, ...]) -> float:
    return math.exp(sum(float(log_probs[depth, token]) for depth, token in enumerate(path)))


def all_trees(vocab_size: int, num_depths: int, size: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    nodes = [path for depth in range(1, num_depths + 1) for path in itertools.product(range(vocab_size), repeat=depth)]
    for chosen in itertools.combinations(nodes, min(size, len(nodes))):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            yield chosen


@given(st.integers(0, 10**6), st.sampled_from([(2, 2), (3, 2), (2, 3), (5, 1)]), st.integers(1, 4))
def test_no_tree_of_that_size_has_a_larger_sum(seed: int, shape: tuple[int, int], size: int) -> None:
    vocab_size, num_depths = shape
    log_probs = marginals(1, num_depths, vocab_size, seed)
    chosen = paths(build(log_probs, size, num_depths), 0)
    assert len(set(chosen)) == len(chosen) == min(size, sum(vocab_size ** (depth + 1) for depth in range(num_depths)))
    best = max(sum(prob(log_probs[0], path) for path in tree) for tree in all_trees(vocab_size, num_depths, size))
    assert sum(prob(log_probs[0], path) for path in chosen) == pytest.approx(best, rel=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 5))
def test_larger_trees_hold_the_most_probable_nodes_in_order(seed: int, size: int, max_depth: int) -> None:
    log_probs = marginals(1, 4, 4, seed)
    tree = build(log_probs, size, max_depth)
    chosen = paths(tree, 0)
    ranked = sorted(
        (prob(log_probs[0], path) for depth in range(1, min(max_depth, 4) + 1) for path in itertools.product(range(4), repeat=depth)),
        reverse=True,
    )
    assert [prob(log_probs[0], path) for path in chosen] == pytest.approx(ranked[: len(chosen)], rel=1e-12)
    assert len(chosen) == min(size, len(ranked))
    assert int(tree.depths().max()) <= max_depth
    assert tree.draw is Draw.DETERMINISTIC
    tree.check(4)


def test_each_request_of_a_batch_gets_its_own_limits() -> None:
    log_probs = marginals(4, 3, 6, seed=3)
    top = log_probs.topk(6, dim=-1)
    sizes, depths = torch.tensor([5, 0, 9, 4]), torch.tensor([3, 3, 1, 0])
    batch = ddtree(top.values, top.indices, sizes, depths)
    assert batch.num_nodes.tolist() == [5, 0, 6, 0]  # one depth of six tokens holds six nodes
    for request in range(4):
        alone = ddtree(*(part[request : request + 1] for part in (top.values, top.indices, sizes, depths)))
        assert paths(alone, 0) == paths(batch, request)


def test_tokens_of_probability_zero_and_ties() -> None:
    log_probs = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]]).log()
    tree = ddtree(log_probs, torch.tensor([[[7, 8, 9], [3, 4, 5]]]), torch.tensor([10]), torch.tensor([2]))
    # Four nodes of probability 1/2 each: a tie goes to the one found first, and nothing of probability 0 is drafted.
    assert paths(tree, 0) == [(7,), (8,), (7, 3), (8, 3)]


def test_wrong_arguments_are_named() -> None:
    log_probs, ones = torch.tensor([[[0.3, 0.7]]]).log(), torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="must fall along"):
        ddtree(log_probs, torch.zeros(1, 1, 2, dtype=torch.int64), ones, ones)
    with pytest.raises(ValueError, match=r"\[B, D, K\]"):
        ddtree(log_probs, torch.zeros(1, 2, dtype=torch.int64), ones, ones)
    with pytest.raises(ValueError, match="num_nodes and max_depths"):
        ddtree(log_probs.flip(2), torch.zeros(1, 1, 2, dtype=torch.int64), ones, torch.ones(2, dtype=torch.int64))


def best_by_force(log_probs: Tensor, growth: TreeGrowth, trust: float) -> float:
    """The most expected tokens a second over all sizes of all requests' trees, each the most probable nodes."""
    ranked = []
    for request in range(log_probs.shape[0]):
        depths = range(1, log_probs.shape[1] + 1)
        all_paths = (path for depth in depths for path in itertools.product(range(log_probs.shape[2]), repeat=depth))
        ranked.append(sorted((prob(log_probs[request], path) for path in all_paths), reverse=True)[: growth.max_nodes])
    rates = []
    for sizes in itertools.product(*(range(len(probs) + 1) for probs in ranked)):
        tokens = growth.num_requests + trust * sum(sum(probs[:size]) for probs, size in zip(ranked, sizes, strict=True))
        rates.append(tokens / float(growth.round_s[sum(sizes)]))
    return max(rates)


@given(st.integers(0, 10**6), st.integers(1, 2), st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 0.02, 0.2]))
def test_sizes_by_throughput_are_the_best_of_all(seed: int, batch: int, trust: float, row_s: float) -> None:
    log_probs = marginals(batch, 2, 3, seed)
    generator = torch.Generator().manual_seed(seed)
    increments = (torch.rand(batch * 6, generator=generator, dtype=torch.float64) * row_s).sort().values  # convex
    growth = TreeGrowth(num_requests=batch + 1, round_s=1.0 + torch.nn.functional.pad(increments.cumsum(0), (1, 0)), max_nodes=6)
    top = log_probs.topk(3, dim=-1)
    nodes = best_nodes(top.values, torch.full((batch,), 6), torch.full((batch,), 2))
    sizes = throughput_sizes(nodes, growth, trust)
    gains = torch.where(torch.arange(6) < sizes[:, None], nodes.log_probs.exp(), 0.0).sum()
    rate = (growth.num_requests + trust * float(gains)) / float(growth.round_s[int(sizes.sum())])
    assert rate == pytest.approx(best_by_force(log_probs, growth, trust), rel=1e-12)
    tree = nodes.tree(top.indices, sizes)
    assert tree.num_nodes.tolist() == sizes.tolist()
    tree.check(3)


def test_where_rows_cost_too_much_no_tree_is_grown() -> None:
    nodes = best_nodes(marginals(2, 3, 4, 0).topk(4, dim=-1).values, torch.full((2,), 8), torch.full((2,), 3))
    dear = TreeGrowth(num_requests=2, round_s=1.0 + torch.arange(17, dtype=torch.float64), max_nodes=8)
    free = TreeGrowth(num_requests=2, round_s=torch.ones(17, dtype=torch.float64), max_nodes=8)
    few = TreeGrowth(num_requests=2, round_s=torch.ones(17, dtype=torch.float64), max_nodes=3)
    assert throughput_sizes(nodes, dear).tolist() == [0, 0]
    assert throughput_sizes(nodes, free).tolist() == [8, 8]
    assert throughput_sizes(nodes, few).tolist() == [3, 3]

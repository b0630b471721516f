"""DraftTree: geometry against a naive walk over parents, and every malformed tree refused by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.tree import NO_NODE, NO_PARENT, DraftTree, Draw


def _tree(parents: list[list[int]], num_nodes: list[int]) -> DraftTree:
    shape = torch.tensor(parents)
    return DraftTree(
        token_ids=torch.arange(shape.numel()).view(shape.shape), parents=shape, num_nodes=torch.tensor(num_nodes), draw=Draw.DETERMINISTIC
    )


@st.composite
def _batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    batch, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    parents = [[draw(st.integers(NO_PARENT, node - 1)) for node in range(nodes)] for _ in range(batch)]
    return parents, [draw(st.integers(0, nodes)) for _ in range(batch)]


@given(_batches())
def test_geometry_is_that_of_a_walk_to_the_root(batch: tuple[list[list[int]], list[int]]) -> None:
    parents, num_nodes = batch
    tree = _tree(parents, num_nodes)
    depths, ancestors, children = tree.depths(), tree.ancestors(), tree.children()
    for request, above in enumerate(parents):
        for node in range(len(above)):
            path, valid = [node], node < num_nodes[request]
            while valid and above[path[-1]] != NO_PARENT:
                path.append(above[path[-1]])
            assert int(depths[request, node]) == (len(path) if valid else 0)
            assert ancestors[request, node].nonzero()[:, 0].tolist() == sorted(path)
        for node in range(NO_PARENT, len(above)):
            below = [child for child in range(num_nodes[request]) if above[child] == node]
            row = children[request, node + 1].tolist()
            assert row[: len(below)] == below
            assert set(row[len(below) :]) <= {NO_NODE}
    assert tree.max_depth() == int(depths.max())


def test_chains_are_chains_and_siblings_are_not() -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    chain = DraftTree.chains(tokens, torch.tensor([3, 1]), Draw.DETERMINISTIC)
    assert chain.is_chain()
    assert chain.depths().tolist() == [[1, 2, 3], [1, 0, 0]]
    assert not _tree([[NO_PARENT, NO_PARENT]], [2]).is_chain()
    assert _tree([[NO_PARENT, NO_PARENT]], [1]).is_chain()  # the second is padding


def test_no_nodes() -> None:
    tree = DraftTree.empty(3)
    assert (tree.batch_size, tree.max_nodes, tree.max_depth()) == (3, 0, 0)
    assert tree.is_chain()
    assert tree.depths().shape == (3, 0)
    assert tree.ancestors().shape == (3, 0, 0)
    assert tree.children().tolist() == [[[NO_NODE]]] * 3
    tree.check(1)


def test_tensors_follow_the_device_of_the_inputs() -> None:
    tree = DraftTree.chains(
        torch.zeros(2, 3, dtype=torch.int64, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta"), Draw.GUMBEL
    )
    assert {t.device.type for t in (tree.parents, tree.valid(), tree.depths(), tree.ancestors())} == {"meta"}
    assert DraftTree.empty(2, device=torch.device("meta")).num_nodes.device.type == "meta"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parents": torch.zeros(1, 3, dtype=torch.int64)}, r"must both be \[B, N\]"),
        ({"num_nodes": torch.tensor([1, 1])}, r"num_nodes must be \[B\]"),
        ({"draw": Draw.SAMPLED}, "needs draft_probs"),
        ({"draft_probs": torch.ones(1, 3, 4)}, r"draft_probs must be \[B, N, V\]"),
        ({"draft_probs": torch.ones(1, 2, 4).bfloat16()}, "bfloat16"),
        ({"draft_probs": torch.ones(1, 2, 4), "draft_token_ids": torch.arange(3)}, "one target token for each column"),
        ({"draft_token_ids": torch.arange(3)}, "one target token for each column"),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    fields = {
        "token_ids": torch.tensor([[1, 2]]),
        "parents": torch.tensor([[-1, 0]]),
        "num_nodes": torch.tensor([2]),
        "draw": Draw.DETERMINISTIC,
    }
    with pytest.raises(ValueError, match=message):
        DraftTree(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("token_ids", "parents", "message"),
    [
        ([[1, 2], [1, 50]], [[-1, 0], [-1, 0]], "request 1, node 1 has token id 50"),
        ([[1, 2], [-3, 2]], [[-1, 0], [-1, 0]], "request 1, node 0 has token id -3"),
        ([[1, 2], [1, 2]], [[-1, 1], [-1, 0]], "request 0, node 1 has parent 1"),
        ([[1, 2], [1, 2]], [[-2, 0], [-1, 0]], "request 0, node 0 has parent -2"),
        ([[1, 2], [4, 4]], [[-1, 0], [-1, -1]], "request 1, nodes 0 and 1 are siblings with the same token 4"),
    ],
)
def test_check_names_request_and_node(token_ids: list[list[int]], parents: list[list[int]], message: str) -> None:
    tree = DraftTree(
        token_ids=torch.tensor(token_ids), parents=torch.tensor(parents), num_nodes=torch.tensor([2, 2]), draw=Draw.DETERMINISTIC
    )
    with pytest.raises(ValueError, match=message):
        tree.check(50)


def test_check_does_not_look_at_padding() -> None:
    DraftTree(
        token_ids=torch.tensor([[1, -9]]), parents=torch.tensor([[-1, 7]]), num_nodes=torch.tensor([1]), draw=Draw.DETERMINISTIC
    ).check(2)

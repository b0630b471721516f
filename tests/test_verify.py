"""verify: batches, shapes, scores, refusals, and the oracle's output for the same noise. Laws are tests/statistical's business."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exactness.blackbox import take
from exactness.models import Drafter, TableModel, random_model, tree_parents
from torch import Tensor

from rollout_spec.reference import ORACLES, ReferenceTree, replay
from rollout_spec.tree import NO_NODE, NO_PARENT, DraftTree, Draw
from rollout_spec.verdict import NO_TOKEN, Verdict
from rollout_spec.verify import (
    EXACT_ON,
    RATIO_SCHEMES,
    CounterNoise,
    DenseNoise,
    DenseTarget,
    Scheme,
    TokenScores,
    default_scheme,
    verify,
)

DRAW = {
    Scheme.REJECTION: Draw.SAMPLED,
    Scheme.BLOCK: Draw.SAMPLED,
    Scheme.EXACT_MATCH: Draw.DETERMINISTIC,
    Scheme.GUMBEL: Draw.GUMBEL,
    Scheme.REJECTION_WALK: Draw.WITHOUT_REPLACEMENT,
    Scheme.TRAVERSAL: Draw.WITHOUT_REPLACEMENT,
}


def _random_batch(
    scheme: Scheme, batch: int, vocab_size: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[DraftTree, Tensor, DenseNoise]:
    """Trees of ragged sizes, target rows and noise."""
    widths = (1, 1, 1) if DRAW[scheme] is Draw.SAMPLED else (2, 2, 1)
    generator = torch.Generator().manual_seed(4)
    drafter = Drafter(random_model(vocab_size, 4, 1), widths, DRAW[scheme])
    tree = drafter.sample(torch.rand(batch, len(drafter.parents), generator=generator, dtype=torch.float64))
    rows = drafter.target_rows(random_model(vocab_size, 4, 2), tree)
    # Breadth-first numbering: any prefix of the nodes is a tree. A width must not depend on a drawn token, and this does not.
    tree = replace(tree, num_nodes=torch.arange(batch) % (tree.max_nodes + 1))
    assert tree.draft_probs is not None
    tree = replace(tree, draft_probs=tree.draft_probs.to(dtype))
    size = (batch, len(widths) + 1, tree.max_nodes + 1)
    noise = DenseNoise(
        accept=torch.rand(size, generator=generator, dtype=torch.float64),
        recover=torch.rand(size[:2], generator=generator, dtype=torch.float64),
        gumbel=-torch.empty(*size[:2], vocab_size, dtype=torch.float64).exponential_(generator=generator).log(),
    )
    return tree, rows.to(dtype), noise


def _same(one: Verdict, other: Verdict, rows: Tensor) -> bool:
    """Whether one, of a batch cut to rows, says what other says of them; depths beyond one's are unused."""
    depth = one.path.shape[1]
    return (
        torch.equal(one.path, other.path[rows][:, :depth])
        and bool((other.path[rows][:, depth:] == NO_NODE).all())
        and torch.equal(one.next_token_ids, other.next_token_ids[rows])
        and torch.equal(one.is_bonus, other.is_bonus[rows])
        and torch.equal(one.accept_probs.nan_to_num(-1), other.accept_probs[rows][:, :depth].nan_to_num(-1))
    )


@pytest.mark.parametrize("scheme", Scheme)
def test_a_request_does_not_see_its_neighbours(scheme: Scheme) -> None:
    tree, rows, noise = _random_batch(scheme, 24)
    together = verify(tree, DenseTarget(rows), noise, scheme)
    for request in range(24):
        alone = torch.tensor([request])
        # A lone request has fewer nodes than the batch is padded to.
        nodes = int(tree.num_nodes[request])
        cut = take(tree, alone)
        assert cut.draft_probs is not None
        cut = replace(cut, token_ids=cut.token_ids[:, :nodes], parents=cut.parents[:, :nodes], draft_probs=cut.draft_probs[:, :nodes])
        own = DenseNoise(accept=noise._accept[alone], recover=noise._recover[alone], gumbel=noise.gumbel[alone])  # type: ignore[index]
        assert _same(verify(cut, DenseTarget(rows[alone]), own, scheme), together, alone), request


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scheme", [scheme for scheme in Scheme if scheme is not Scheme.GUMBEL])
def test_the_oracle_agrees_for_the_same_noise(scheme: Scheme, dtype: torch.dtype) -> None:
    tree, rows, noise = _random_batch(scheme, 140, dtype=dtype)
    verdict = verify(tree, DenseTarget(rows), noise, scheme)
    accept, recover = noise._accept, noise._recover
    assert accept is not None
    assert recover is not None
    for request, tokens in enumerate(verdict.emitted(tree).tolist()):
        reference = ReferenceTree.of(tree, request, rows.shape[2])
        laws = {reference.prefix(node): rows[request, node + 1].double().tolist() for node in range(-1, len(reference.token_ids))}
        output = replay(
            ORACLES[scheme.value],
            reference,
            laws.__getitem__,
            lambda depth, trial, own=accept[request]: float(own[depth, trial]),
            lambda depth, own=recover[request]: float(own[depth]),
        )
        assert tuple(token for token in tokens if token != NO_TOKEN) == output.token_ids
        assert tuple(node for node in verdict.path[request].tolist() if node != NO_NODE) == output.path


@pytest.mark.parametrize("scheme", Scheme)
def test_shapes_and_padding(scheme: Scheme) -> None:
    tree, rows, noise = _random_batch(scheme, 30)
    verdict = verify(tree, DenseTarget(rows), noise, scheme)
    accepted = verdict.num_accepted
    steps = torch.arange(verdict.path.shape[1])
    assert verdict.path.shape == verdict.accept_probs.shape == (30, tree.max_depth())
    assert torch.equal(verdict.path != NO_NODE, steps < accepted[:, None])
    assert (verdict.emitted(tree) != NO_TOKEN).sum(1).tolist() == (accepted + 1).tolist()
    assert verdict.raw_logprobs is None  # dense probabilities do not tell
    # A path starts below the root and each node hangs below the one before.
    above = torch.nn.functional.pad(verdict.path, (1, 0), value=NO_PARENT)[:, :-1]
    on_path = verdict.path != NO_NODE
    assert torch.equal(tree.parents.gather(1, verdict.path.clamp_min(0))[on_path], above[on_path])
    # Bonus: nothing was drafted behind the last accepted token. Acceptance is known exactly where something was.
    last = torch.nn.functional.pad(verdict.path, (1, 0), value=NO_PARENT).gather(1, accepted[:, None])
    drafted = ((tree.parents == last) & tree.valid()).any(1)
    assert torch.equal(verdict.is_bonus, ~drafted)
    known = (steps < accepted[:, None]) | ((steps == accepted[:, None]) & drafted[:, None])
    assert torch.equal(~verdict.accept_probs.isnan(), known)
    assert bool(((verdict.accept_probs[known] >= 0) & (verdict.accept_probs[known] <= 1)).all())


@pytest.mark.parametrize("scheme", [Scheme.REJECTION, Scheme.BLOCK])
def test_accept_probs_of_chains_are_one_minus_tv(scheme: Scheme) -> None:
    tree, rows, noise = _random_batch(scheme, 40)
    verdict = verify(tree, DenseTarget(rows), noise, scheme)
    assert tree.draft_probs is not None
    expected = torch.minimum(rows[:, :-1], tree.draft_probs).sum(-1)
    known = ~verdict.accept_probs.isnan()
    assert int(known.sum()) > 40
    torch.testing.assert_close(verdict.accept_probs[known], expected[known])


def test_accept_probs_of_exact_match_are_the_childrens_mass_and_of_gumbel_what_happened() -> None:
    target = torch.tensor([[[0.5, 0.2, 0.3], [0.1, 0.1, 0.8], [1.0, 0.0, 0.0]]])
    tree = DraftTree(
        token_ids=torch.tensor([[0, 2]]),
        parents=torch.tensor([[NO_PARENT, NO_PARENT]]),
        num_nodes=torch.tensor([2]),
        draw=Draw.DETERMINISTIC,
    )
    matched = verify(tree, DenseTarget(target), DenseNoise(recover=torch.tensor([[0.6, 0.0]])), Scheme.EXACT_MATCH)
    assert matched.next_token_ids.tolist() == [1]
    assert matched.accept_probs.tolist() == [[pytest.approx(0.8)]]
    for winner, happened in ((2, 1.0), (1, 0.0)):
        noise = DenseNoise(gumbel=torch.nn.functional.one_hot(torch.tensor([[winner, 0]]), 3) * 100.0)
        assert verify(tree, DenseTarget(target), noise, Scheme.GUMBEL).accept_probs.tolist() == [[happened]]


@pytest.mark.parametrize("scheme", Scheme)
def test_no_nodes_is_plain_decoding(scheme: Scheme) -> None:
    rows = random_model(50, 1, 3).tables[0].expand(4, 1, -1)
    plain = verify(DraftTree.empty(4), DenseTarget(rows), CounterNoise([1, 2, 3, 4], [9] * 4), scheme)
    assert plain.path.shape == (4, 0)
    assert plain.is_bonus.all()
    other = Scheme.GUMBEL if scheme is Scheme.GUMBEL else Scheme.EXACT_MATCH
    again = verify(DraftTree.empty(4), DenseTarget(rows), CounterNoise([1, 2, 3, 4], [9] * 4), other)
    assert torch.equal(plain.next_token_ids, again.next_token_ids)


@pytest.mark.parametrize("scheme", Scheme)
def test_a_batch_in_which_nobody_drafted_but_nodes_are_padded(scheme: Scheme) -> None:
    tree, rows, noise = _random_batch(scheme, 6)
    tree = replace(tree, num_nodes=torch.zeros(6, dtype=torch.int64))
    verdict = verify(tree, DenseTarget(rows), noise, scheme)
    assert verdict.num_accepted.tolist() == [0] * 6
    assert verdict.is_bonus.all()


@pytest.mark.parametrize("scheme", [scheme for scheme in Scheme if scheme in RATIO_SCHEMES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_laws_accept_everything(scheme: Scheme, dtype: torch.dtype) -> None:
    """p = q at temperature 1 accepts 100 %; uniforms within 1e-5 of 1 are left to the rounding of float32's log and exp."""
    vocab_size = 1000
    law = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0), dtype=dtype).softmax(-1)
    tokens = torch.multinomial(law.float(), 3 * 64, replacement=True).view(64, 3)
    tree = DraftTree.chains(tokens, torch.full((64,), 3), Draw.SAMPLED, law.expand(64, 3, -1))
    edge = torch.full((64, 4, 4), 1 - 2.0**-53, dtype=torch.float64)
    verdict = verify(tree, DenseTarget(law.expand(64, 4, -1)), DenseNoise(accept=edge * (1 - 1e-5), recover=edge[:, :, 0]), scheme)
    assert verdict.num_accepted.tolist() == [3] * 64
    if scheme in (Scheme.REJECTION, Scheme.BLOCK):
        torch.testing.assert_close(verdict.accept_probs, torch.ones(64, 3, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scheme", [scheme for scheme in Scheme if scheme in RATIO_SCHEMES])
def test_recovered_tokens_of_a_draft_that_is_always_refused_follow_the_residual(scheme: Scheme) -> None:
    """q is a point mass on a token that p gives nothing: everything is recovered, and from p, which is the whole residual."""
    target_law, draft_law = torch.tensor([0.0, 0.1, 0.6, 0.3]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    uniforms = torch.arange(0.5, 1000, dtype=torch.float64) / 1000
    tree = DraftTree.chains(
        torch.zeros(1000, 1, dtype=torch.int64), torch.ones(1000, dtype=torch.int64), Draw.SAMPLED, draft_law.expand(1000, 1, -1)
    )
    noise = DenseNoise(accept=torch.zeros(1000, 2, 2, dtype=torch.float64), recover=uniforms[:, None])
    verdict = verify(tree, DenseTarget(target_law.expand(1000, 2, -1)), noise, scheme)
    assert not verdict.is_bonus.any()
    assert torch.bincount(verdict.next_token_ids, minlength=4).tolist() == [0, 100, 600, 300]


class _Scored(DenseTarget):
    def score(self, requests: Tensor, nodes: Tensor, token_ids: Tensor) -> TokenScores:
        rows = self.target_probs[requests, nodes + 1]
        processed = rows.gather(1, token_ids[:, None])[:, 0].log()
        return TokenScores(raw_logprobs=processed - 1, processed_logprobs=processed, entropies=torch.special.entr(rows).sum(-1))


@pytest.mark.parametrize("scheme", Scheme)
def test_scores_are_those_of_the_emitted_tokens(scheme: Scheme) -> None:
    tree, rows, noise = _random_batch(scheme, 20)
    verdict = verify(tree, _Scored(rows), noise, scheme)
    assert verdict.raw_logprobs is not None
    assert verdict.processed_logprobs is not None
    assert verdict.entropies is not None
    for request, tokens in enumerate(verdict.emitted(tree).tolist()):
        nodes = [NO_PARENT, *verdict.path[request].tolist()]
        for depth, token in enumerate(tokens):
            got = [float(values[request, depth]) for values in (verdict.raw_logprobs, verdict.processed_logprobs, verdict.entropies)]
            if token == NO_TOKEN:
                assert all(value != value for value in got)
                continue
            row = rows[request, nodes[depth] + 1]
            assert got == pytest.approx([float(row[token].log()) - 1, float(row[token].log()), float(torch.special.entr(row).sum())])


class _Counting(DenseTarget):
    """Counts the rows asked for."""

    def __init__(self, target_probs: Tensor) -> None:
        super().__init__(target_probs)
        self.asked: list[tuple[int, int]] = []

    def log_probs(self, requests: Tensor, nodes: Tensor) -> Tensor:
        self.asked += zip(requests.tolist(), nodes.tolist(), strict=True)
        return super().log_probs(requests, nodes)


@pytest.mark.parametrize("scheme", [Scheme.REJECTION, Scheme.EXACT_MATCH, Scheme.GUMBEL, Scheme.REJECTION_WALK])
def test_walks_ask_only_for_rows_they_reach_and_once(scheme: Scheme) -> None:
    tree, rows, noise = _random_batch(scheme, 16)
    target = _Counting(rows)
    verdict = verify(tree, target, noise, scheme)
    reached = [(b, node) for b in range(16) for node in (NO_PARENT, *(n for n in verdict.path[b].tolist() if n != NO_NODE))]
    assert sorted(target.asked) == sorted(reached)


@pytest.mark.parametrize("scheme", Scheme)
@pytest.mark.parametrize("draw", Draw)
def test_wrong_pairings_are_refused_and_say_what_to_use(scheme: Scheme, draw: Draw) -> None:
    tree = DraftTree.chains(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), draw, torch.tensor([[[0.5, 0.5]]]))
    target, noise = DenseTarget(torch.full((1, 2, 2), 0.5)), CounterNoise([0], [0])
    if draw in EXACT_ON[scheme]:
        verify(tree, target, noise, scheme)
        return
    mend = default_scheme(draw, seeded=False, is_chain=True)
    with pytest.raises(ValueError, match=f"'{scheme.value}' is not exact on '{draw.value}' drafts: use '{mend.value}'"):
        verify(tree, target, noise, scheme)
    verify(tree, target, noise, mend)


@pytest.mark.parametrize("scheme", [scheme for scheme in Scheme if scheme in RATIO_SCHEMES])
def test_sampled_siblings_are_refused_by_ratio_schemes(scheme: Scheme) -> None:
    tree = DraftTree(
        token_ids=torch.tensor([[0, 1]]),
        parents=torch.tensor(tree_parents((2,)))[None],
        num_nodes=torch.tensor([2]),
        draw=Draw.SAMPLED,
        draft_probs=torch.full((1, 2, 2), 0.5),
    )
    with pytest.raises(ValueError, match="with siblings"):
        verify(tree, DenseTarget(torch.full((1, 3, 2), 0.5)), CounterNoise([0], [0]), scheme)


@pytest.mark.parametrize("draw", Draw)
@pytest.mark.parametrize("is_chain", [True, False])
def test_defaults_are_exact_on_what_they_are_defaults_for(draw: Draw, is_chain: bool) -> None:
    assert default_scheme(draw, seeded=True, is_chain=is_chain) is Scheme.GUMBEL
    default = default_scheme(draw, seeded=False, is_chain=is_chain)
    assert draw in EXACT_ON[default]
    assert draw is not Draw.SAMPLED or is_chain or default not in RATIO_SCHEMES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": torch.tensor([[0, 7]])}, "request 0, node 1 has token id 7"),
        (
            {"draft_probs": torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])},
            "request 0, node 1 holds a token that its own draft_probs give no",
        ),
        ({"draft_probs": torch.tensor([[[0.5, 0.3, 0.199], [0.5, 0.3, 0.2]]])}, "node 0 has draft_probs that sum to 0.99"),
        ({"draft_probs": torch.full((1, 2, 3), torch.nan)}, "node 0 holds a token that its own draft_probs give no probability"),
        ({"draft_probs": torch.full((1, 2, 2), 0.5)}, "2 columns, the vocabulary 3"),
        (
            {"draft_probs": torch.full((1, 2, 2), 0.5), "draft_token_ids": torch.tensor([0, 2])},
            "node 1 holds a token that is not in draft_token_ids",
        ),
        ({"draft_probs": torch.full((1, 2, 2), 0.5), "draft_token_ids": torch.tensor([1, 1])}, "names a token twice"),
        ({"draft_probs": torch.full((1, 2, 2), 0.5), "draft_token_ids": torch.tensor([0, 3])}, "outside the vocabulary"),
    ],
)
def test_drafts_that_cannot_be_what_was_sampled_are_refused(changes: dict[str, object], message: str) -> None:
    tree = DraftTree.chains(torch.tensor([[0, 1]]), torch.tensor([2]), Draw.SAMPLED, torch.tensor([[[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]]))
    target, noise = DenseTarget(torch.full((1, 3, 3), 1 / 3)), DenseNoise(accept=torch.zeros(1, 3, 1), recover=torch.zeros(1, 3).double())
    verify(tree, target, noise, Scheme.REJECTION)
    for scheme in RATIO_SCHEMES:
        if scheme is Scheme.TRAVERSAL and "sum to" in message:
            continue  # it looks at whole rows of the draft only where it refuses a token
        with pytest.raises(ValueError, match=message):
            verify(replace(tree, **changes), target, noise, scheme)  # type: ignore[arg-type]


def test_batch_sizes_must_agree() -> None:
    with pytest.raises(ValueError, match="3 draft trees for 2 requests"):
        verify(DraftTree.empty(3), DenseTarget(torch.ones(2, 1, 4) / 4), CounterNoise([0] * 3, [0] * 3), Scheme.GUMBEL)
    with pytest.raises(ValueError, match=r"\[B, N \+ 1, V\]"):
        DenseTarget(torch.ones(2, 4))
    with pytest.raises(ValueError, match="one seed and one position"):
        CounterNoise([0], [0, 1])


@pytest.mark.parametrize("scheme", Scheme)
def test_a_float64_draft_meets_a_float32_target(scheme: Scheme) -> None:
    tree, rows, noise = _random_batch(scheme, 60)
    wide, mixed = (verify(tree, DenseTarget(target), noise, scheme) for target in (rows, rows.float()))
    assert torch.equal(wide.emitted(tree), mixed.emitted(tree))


def test_table_models_and_drafters_spell_prefixes_the_same_way() -> None:
    """What the proofs stand on: the tables' codes, the drafter's rows and the oracle's prefixes agree."""
    model = random_model(3, 3, 5)
    tree, _ = Drafter(model, (2, 1), Draw.WITHOUT_REPLACEMENT).every_draft()
    rows = Drafter(model, (2, 1), Draw.WITHOUT_REPLACEMENT).target_rows(model, tree)
    reference = ReferenceTree.of(tree, 4, 3)
    for node in range(-1, 4):
        assert rows[4, node + 1].tolist() == model.law(reference.prefix(node))
    assert isinstance(model.after((1,)), TableModel)

"""The served drafter: as trained, lossless, the same tokens, whatever the batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from mtp_tiny import HIDDEN, VOCAB, prompts, random_head, tiny_policy
from scipy import stats
from torch import nn

from rollout_spec.budget import Budget, FixedBudget
from rollout_spec.drafter import DraftContext, RequestView, TargetStates
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import make_runner
from rollout_spec.engine.ops import Ops, TorchOps
from rollout_spec.engine.request import Completion, Request
from rollout_spec.sampling import SamplingParams
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verify import Scheme
from rollout_spec_kernels import cpu
from rollout_spec_mtp.mtp.drafter import MTPDrafter
from rollout_spec_mtp.mtp.model import MTPModel
from rollout_spec_mtp.serving import load_drafter, load_trained
from rollout_spec_mtp.training.evaluation import check_agreement, evaluate_drafter
from rollout_spec_mtp.training.protocol import PolicyParts

CHAIN, TREE = (1,), (2, 2, 1)


def _drafter(model: MTPModel, draw: Draw | None = None, ops: Ops | None = None) -> MTPDrafter:
    return MTPDrafter(model, model.policy, TorchOps() if ops is None else ops, draw)


@pytest.fixture
def kernels() -> Ops:
    reason = cpu.unavailable_reason()
    if reason is not None:
        pytest.skip(f"no CPU kernels here: {reason}")
    return cpu.CpuOps()


def _engine(
    policy: nn.Module,
    drafter: MTPDrafter | None,
    *,
    batch: int,
    width: tuple[int, ...] = CHAIN,
    scheme: Scheme | None = None,
    ops: Ops | None = None,
) -> Engine:
    return Engine(
        make_runner(policy, max_context=128, ops=ops),
        config=EngineConfig(max_batch=batch, max_context=128, scheme=scheme, seed=3),
        drafter=drafter,
        controller=FixedBudget(draft_length=3, tree_width=width),
    )


def _requests(count: int = 6, *, seeded: bool = True, temperature: float = 1.0, length: int = 24, **sampling: float) -> list[Request]:
    return [
        Request(
            prompt_token_ids=[1] if i == 0 else prompt.token_ids,  # a prompt of one token has no state when its first round begins
            max_new_tokens=length,
            seed=100 + i if seeded else None,
            sampling=SamplingParams(temperature=temperature, **sampling),  # type: ignore[arg-type]
            request_id=str(i),
        )
        for i, prompt in enumerate(prompts(count))
    ]


def _tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    assert all(completion.error is None for completion in completions)
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("draw", "width"), [(Draw.GUMBEL, CHAIN), (Draw.GUMBEL, TREE), (Draw.SAMPLED, CHAIN), (Draw.WITHOUT_REPLACEMENT, TREE)]
)
def test_seeded_tokens_are_those_of_plain_decoding(batch: int, draw: Draw, width: tuple[int, ...]) -> None:
    policy = tiny_policy()
    plain = _tokens(_engine(policy, None, batch=batch).generate(_requests()))
    for layers in ((-1,), (1, -1)):
        drafter = _drafter(random_head(policy, layers=layers), draw)
        completions = _engine(policy, drafter, batch=batch, width=width).generate(_requests())
        assert _tokens(completions) == plain
        assert sum(completion.num_draft_tokens for completion in completions) > 0
        if draw is Draw.GUMBEL:  # other draws of an untrained head are hardly ever the target's
            assert sum(completion.num_accepted_tokens for completion in completions) > 0


@pytest.mark.parametrize(
    ("draw", "width"), [(Draw.GUMBEL, CHAIN), (Draw.GUMBEL, TREE), (Draw.SAMPLED, CHAIN), (Draw.WITHOUT_REPLACEMENT, TREE)]
)
def test_seeded_tokens_are_those_of_plain_decoding_on_kernels(kernels: Ops, draw: Draw, width: tuple[int, ...]) -> None:
    policy = tiny_policy()
    plain = _tokens(_engine(policy, None, batch=4, ops=kernels).generate(_requests()))
    for layers, reduced in (((-1,), False), ((0, 1, -1), True)):
        drafter = _drafter(random_head(policy, layers=layers, reduced=reduced), draw, kernels)
        completions = _engine(policy, drafter, batch=4, width=width, ops=kernels).generate(_requests())
        assert _tokens(completions) == plain
        if draw is Draw.GUMBEL:
            assert sum(completion.num_accepted_tokens for completion in completions) > 0


def _view(index: int, length: int) -> RequestView:
    tokens = [(7 * index + 3 * place) % VOCAB for place in range(length)]
    params = SamplingParams(temperature=0.5 + 0.4 * index)
    return RequestView(request_id=str(index), prompt_key="p", token_ids=tokens, num_prompt_tokens=2, seed=index, sampling=params)


def _context(spans: list[tuple[int, int]], layers: tuple[int, ...]) -> DraftContext:
    """Requests whose states of positions [begin, end) arrive; the same state for a position whenever it comes."""
    states = {layer: torch.randn(len(spans), 40, HIDDEN, generator=torch.Generator().manual_seed(9 + layer)) for layer in layers}
    return DraftContext(
        requests=[_view(index, end + 1) for index, (_, end) in enumerate(spans)],
        weights_version=0,
        states=TargetStates(
            hidden={layer: torch.cat([states[layer][i, begin:end] for i, (begin, end) in enumerate(spans)]) for layer in layers},
            positions=torch.cat([torch.arange(begin, end) for begin, end in spans]),
            offsets=torch.tensor([0, *(end - begin for begin, end in spans)]).cumsum(0),
        ),
    )


def _proposals(drafter: MTPDrafter, rounds: list[list[tuple[int, int]]], lengths: list[int]) -> DraftTree:
    """The proposal of the last round."""
    layers = drafter.needs.hidden_layers
    for index in range(len(lengths)):
        drafter.start(_view(index, 1))
    for spans in rounds:
        tree = drafter.propose(_context(spans, layers), Budget(draft_lengths=torch.tensor(lengths)))
    return tree


@pytest.mark.parametrize("draw", [Draw.SAMPLED, Draw.GUMBEL])
@pytest.mark.parametrize(("layers", "reduced"), [((-1,), False), ((0, 1, -1), True)])
def test_kernels_draft_what_torch_does(kernels: Ops, draw: Draw, layers: tuple[int, ...], reduced: bool) -> None:
    """Mixed lengths over three rounds, the last states restarting one request's; float32 twice, so only rounding may differ."""
    model = random_head(tiny_policy(), layers=layers, reduced=reduced)
    rounds = [[(0, 5), (0, 1), (0, 9)], [(5, 6), (1, 4), (9, 10)], [(6, 9), (0, 5), (10, 11)]]
    mine, theirs = (_proposals(_drafter(model, draw, ops), rounds, [3, 2, 0]) for ops in (kernels, TorchOps()))
    valid = theirs.valid()
    assert torch.equal(mine.num_nodes, theirs.num_nodes)
    assert torch.equal(mine.token_ids[valid], theirs.token_ids[valid])
    if theirs.draft_probs is not None and mine.draft_probs is not None:
        torch.testing.assert_close(mine.draft_probs[valid], theirs.draft_probs[valid], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("on_kernels", [False, True])
def test_states_that_come_again_restart_a_request(request: pytest.FixtureRequest, on_kernels: bool) -> None:
    """After a preemption or an update the drafts are those of a drafter that saw nothing before."""
    ops = request.getfixturevalue("kernels") if on_kernels else TorchOps()
    model = random_head(tiny_policy(), layers=(1, -1))
    again = _proposals(_drafter(model, ops=ops), [[(0, 9)], [(9, 12)], [(0, 7)]], [3])
    fresh = _proposals(_drafter(model, ops=ops), [[(0, 7)]], [3])
    assert again.draft_probs is not None
    assert fresh.draft_probs is not None
    assert torch.equal(again.token_ids, fresh.token_ids)
    assert torch.equal(again.draft_probs, fresh.draft_probs)
    with pytest.raises(AssertionError, match="do not join the 5 before"):
        _proposals(_drafter(model, ops=ops), [[(0, 5)], [(6, 8)]], [3])


def test_slots_grow_with_requests_and_context(kernels: Ops) -> None:
    """Long contexts and more requests move the K/V: what was drafted from before is still there."""
    model = random_head(tiny_policy())
    drafter = _drafter(model, ops=kernels)
    alone = _proposals(_drafter(model, ops=kernels), [[(0, 30)], [(30, 31)]], [3])
    drafter.start(_view(0, 1))
    drafter.propose(_context([(0, 30)], (-1,)), Budget(draft_lengths=torch.tensor([3])))
    for index in (1, 2, 3):
        drafter.start(_view(index, 1))
    spans = [(30, 31), (0, 4), (0, 5), (0, 6)]
    drafter._slots.ensure(300)
    together = drafter.propose(_context(spans, (-1,)), Budget(draft_lengths=torch.tensor([3, 0, 1, 2])))
    assert torch.equal(together.token_ids[0], alone.token_ids[0])


def test_greedy_requests_are_drafted_greedily() -> None:
    policy = tiny_policy()
    plain = _tokens(_engine(policy, None, batch=4).generate(_requests(seeded=False, temperature=0)))
    drafter = _drafter(random_head(policy, reduced=False))
    assert _tokens(_engine(policy, drafter, batch=4).generate(_requests(seeded=False, temperature=0))) == plain


@pytest.mark.parametrize(
    ("scheme", "draw", "width"),
    [
        (Scheme.REJECTION, Draw.SAMPLED, CHAIN),
        (Scheme.BLOCK, Draw.SAMPLED, CHAIN),
        (Scheme.TRAVERSAL, Draw.WITHOUT_REPLACEMENT, TREE),
        (Scheme.REJECTION_WALK, Draw.WITHOUT_REPLACEMENT, TREE),
        (Scheme.EXACT_MATCH, Draw.DETERMINISTIC, TREE),
    ],
)
def test_unseeded_law_is_the_policys(trained: object, scheme: Scheme, draw: Draw, width: tuple[int, ...]) -> None:
    """Chi-square over the joint law of the second and third token; the first is drawn before any draft is possible."""
    policy = trained.policy  # type: ignore[attr-defined]
    drafter = load_drafter(trained.directory, policy, TorchOps(), draw)  # type: ignore[attr-defined]
    count, temperature = 1500, 0.5
    prompt = [1, 4]
    engine = Engine(
        make_runner(policy, max_context=32),
        config=EngineConfig(max_batch=64, max_context=32, scheme=scheme, seed=3),
        drafter=drafter,
        controller=FixedBudget(draft_length=3, tree_width=width),
    )
    requests = [
        Request(prompt_token_ids=prompt, max_new_tokens=2, ignore_eos=True, sampling=SamplingParams(temperature=temperature))
        for _ in range(count)
    ]
    completions = engine.generate(requests)
    assert sum(completion.num_accepted_tokens for completion in completions) > 0
    seen = Counter(_tokens(completions))
    with torch.no_grad():
        first = (policy(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
        second = (policy(torch.tensor([[*prompt, token] for token in range(VOCAB)])).logits[:, -1] / temperature).softmax(-1)
    joint = (first[:, None] * second).double().flatten()
    observed = torch.zeros(VOCAB * VOCAB, dtype=torch.float64)
    for (one, two), number in seen.items():
        observed[one * VOCAB + two] += number
    common = joint * count >= 5
    expected = torch.cat([joint[common] * count, (joint[~common].sum() * count)[None]])
    counts = torch.cat([observed[common], observed[~common].sum()[None]])
    p_value = float(stats.chisquare(counts.numpy(), expected.numpy() * float(counts.sum() / expected.sum())).pvalue)
    assert p_value > 1e-4


def test_top_k_of_a_request_shapes_its_drafts() -> None:
    """A draft outside the request's own top-k could never be accepted."""
    policy = tiny_policy()
    model = random_head(policy, reduced=False)
    seen: list[torch.Tensor] = []

    class Watching(MTPDrafter):
        def propose(self, context, budget):  # type: ignore[no-untyped-def]
            tree = super().propose(context, budget)
            if tree.draft_probs is not None:
                seen.append((tree.draft_probs[tree.valid()] > 0).sum(-1))
            return tree

    engine = _engine(policy, Watching(model, model.policy, TorchOps()), batch=4)  # type: ignore[arg-type]
    _tokens(engine.generate(_requests(seeded=False, top_k=3)))
    assert int(torch.cat(seen).max()) <= 3


def test_served_acceptance_is_the_teacher_forced_one(trained: object) -> None:
    policy = trained.policy  # type: ignore[attr-defined]
    parts = PolicyParts.of(policy)
    model = load_trained(trained.directory, parts)  # type: ignore[attr-defined]
    report = evaluate_drafter(
        model,
        MTPDrafter(model, parts, TorchOps()),
        policy=parts,
        runner=make_runner(policy, max_context=128),
        prompts=prompts(12),
        draft_length=3,
        max_new_tokens=32,
        max_batch=4,
        scheme=Scheme.REJECTION,
    )
    assert report["agreement"]["num_slots"] > 200
    assert report["agreement"]["max_abs_difference"] < 1e-4
    assert len(report["alpha_by_depth"]) == 3
    low, high = report["confidence_intervals"]["served_acceptance_length"]
    assert low <= report["served_acceptance_length"] <= high
    assert sum(bucket["num_positions"] for bucket in report["by_entropy"]) > 200


def test_a_drafter_served_with_other_weights_than_trained_is_refused(trained: object) -> None:
    """The norm before the head is one of the faults that no output shows."""
    policy = trained.policy  # type: ignore[attr-defined]
    parts = PolicyParts.of(policy)
    model, served = (load_trained(trained.directory, parts) for _ in range(2))  # type: ignore[attr-defined]
    with torch.no_grad():
        served.hidden_norm.weight.mul_(1.5)
    with pytest.raises(ValueError, match="served otherwise than it was trained"):
        evaluate_drafter(
            model,
            MTPDrafter(served, parts, TorchOps()),
            policy=parts,
            runner=make_runner(policy, max_context=128),
            prompts=prompts(6),
            draft_length=3,
            max_new_tokens=24,
        )
    with pytest.raises(ValueError, match="no slot in common"):
        check_agreement([], torch.float32)


def test_new_target_weights_reach_the_borrowed_head_and_restart_the_context(trained: object) -> None:
    """After an update in mid-flight the drafts come from the new states: the run ends as one that had the weights from then on."""
    policy = tiny_policy()
    model = random_head(policy, reduced=False)
    drafter = _drafter(model, Draw.GUMBEL)
    engine = _engine(policy, drafter, batch=4)
    for request in _requests(3):
        engine.add(request)
    for _ in range(3):
        engine.step()
    torch.manual_seed(77)
    fresh = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in engine.runner.named_weights().items()}
    engine.update_weights(fresh.items(), version=1)
    while engine.has_work:
        assert all(completion.error is None for completion in engine.step())
    state = torch.randn(2, 32)
    torch.testing.assert_close(drafter._head.logits(state), state @ policy.lm_head.weight.detach().T)


def test_new_drafter_weights_are_checked_and_used() -> None:
    policy = tiny_policy()
    model, other = random_head(policy), random_head(policy)
    with torch.no_grad():
        other.fc.weight.mul_(2)
    drafter = _drafter(model)
    weights = dict(other.state_dict())
    incomplete = {name: tensor for name, tensor in weights.items() if name != "fc.weight"}
    with pytest.raises(ValueError, match=r"missing: fc\.weight"):
        drafter.update_weights(incomplete.items(), version=1)
    drafter.update_weights(weights.items(), version=1)
    torch.testing.assert_close(model.fc.weight, other.fc.weight)
    expected = _drafter(other)
    state, tokens = torch.randn(1, 32), torch.tensor([4])
    torch.testing.assert_close(
        drafter._head.weights.fc(torch.cat([state, state], 1)), expected._head.weights.fc(torch.cat([state, state], 1))
    )
    assert tokens.numel() == 1


def test_wide_trees_of_independent_draws_are_refused() -> None:
    policy = tiny_policy()
    engine = _engine(policy, _drafter(random_head(policy)), batch=2, width=TREE)
    with pytest.raises(ValueError, match="independent draws make chains only"):
        engine.generate(_requests(1, seeded=False))

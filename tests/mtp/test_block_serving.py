"""The block drafter in the engine: the trained distributions, exact outputs, and state that follows requests and weights.

Shape legend: B requests, K slots, V draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import pytest
import torch
from block_tiny import BLOCK, DRAFT_IDS, MASK_ID, block_model, rollout, tiny_policy
from torch import Tensor, nn

from rollout_spec.budget import Budget, FixedBudget
from rollout_spec.drafter import DraftContext, RequestView, TargetStates
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import make_runner
from rollout_spec.engine.ops import Ops, TorchOps
from rollout_spec.engine.request import Completion, Request
from rollout_spec.sampling import SamplingParams
from rollout_spec.sinks.summary import SummarySink
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verify import Scheme
from rollout_spec_kernels import cpu
from rollout_spec_mtp.block.context import ContextCache
from rollout_spec_mtp.block.drafter import BlockDrafter
from rollout_spec_mtp.block.kind import BLOCK_KIND
from rollout_spec_mtp.block.model import BlockModel
from rollout_spec_mtp.block.served import ContextKeys
from rollout_spec_mtp.training.packing import pack
from rollout_spec_mtp.training.protocol import SlotLayout

PROMPTS = [tuple(range(first, first + n)) for first, n in ((3, 5), (20, 9), (40, 1), (30, 14))]
TEMPERATURE = 0.8


class Watched(BlockDrafter):
    """Remembers every distribution it drafted from, with the tokens before it, and every tree."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)  # type: ignore[arg-type]
        self.drafts: list[tuple[list[int], Tensor]] = []
        self.trees: list[DraftTree] = []

    def logits(self, requests: Sequence[RequestView], draft_lengths: Tensor) -> Tensor:
        logits = super().logits(requests, draft_lengths)
        for request, length, rows in zip(requests, draft_lengths.tolist(), logits, strict=True):
            if length:
                self.drafts.append((list(request.token_ids), rows.log_softmax(-1)))
        return logits

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        self.trees.append(super().propose(context, budget))
        return self.trees[-1]


def requests(length: int = 8, *, temperature: float = TEMPERATURE, seed: int | None = 100) -> list[Request]:
    return [
        Request(
            prompt_token_ids=prompt,
            max_new_tokens=length + 2 * i,
            seed=None if seed is None else seed + i,
            ignore_eos=True,
            sampling=SamplingParams(temperature=temperature),
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def make_engine(policy: nn.Module, **settings: object) -> Engine:
    config = EngineConfig(**{"max_batch": 4, "max_context": 96, "seed": 1, **settings.pop("config", {})})  # type: ignore[arg-type]
    return Engine(make_runner(policy, max_context=96), config=config, **settings)  # type: ignore[arg-type]


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def trained_log_probs(policy: nn.Module, model: BlockModel, token_ids: list[int], temperature: float) -> Tensor:
    """[G, V] of the training forward, for the block that starts from the last token."""
    # The anchor's own state, and what follows it, must not matter: give it any.
    batch = pack([[rollout(policy, [*token_ids, 9, 9], len(token_ids), model.hidden_layers)]])
    anchor = torch.tensor([len(token_ids) - 1])
    slots = torch.zeros(1, BLOCK - 1, dtype=torch.int64)
    layout = SlotLayout(anchors=anchor, token_rows=slots, target_rows=slots, valid=torch.ones_like(slots, dtype=torch.bool))
    ids, head = model.draft_token_ids, model.policy.head
    with torch.no_grad():
        return (model(batch, layout)[0] @ (head if ids is None else head[ids]).T / temperature).log_softmax(-1)


def all_ops() -> list[Ops]:
    return [TorchOps(), *([] if cpu.unavailable_reason() else [cpu.CpuOps()])]


@pytest.mark.parametrize("ops", all_ops(), ids=lambda ops: str(ops.name))
@pytest.mark.parametrize(
    ("changes", "ids"),
    [({}, None), ({"fusion": "per_layer"}, None), ({"mask": "learned"}, DRAFT_IDS)],
    ids=["shared", "per_layer", "learned-reduced"],
)
def test_served_distributions_are_the_trained_ones(changes: dict[str, object], ids: Tensor | None, ops: Ops) -> None:
    policy = tiny_policy()
    model = block_model(policy, ids, **changes)
    drafter = Watched(model, ops)
    make_engine(policy, drafter=drafter, controller=FixedBudget(draft_length=3)).generate(requests(seed=None))
    assert len(drafter.drafts) > 20
    for token_ids, served in drafter.drafts:
        wanted = trained_log_probs(policy, model, token_ids, TEMPERATURE)[: served.shape[0]]
        torch.testing.assert_close(served, wanted, atol=2e-4, rtol=2e-4)


DRAWS: dict[str, tuple[Draw, tuple[int, ...], dict[str, int]]] = {
    "coupled-chain": (Draw.GUMBEL, (1,), {}),
    "coupled-tree": (Draw.GUMBEL, (3, 2, 1), {}),
    "top1-chain": (Draw.DETERMINISTIC, (1,), {}),
    "ddtree-by-widths": (Draw.DETERMINISTIC, (3, 2, 1), {}),
    "ddtree-of-20": (Draw.DETERMINISTIC, (1,), {"tree_nodes": 20}),
    "sampled": (Draw.SAMPLED, (1,), {}),
    "without-replacement": (Draw.WITHOUT_REPLACEMENT, (2, 2), {}),
}


@functools.cache
def plain_tokens(temperature: float) -> list[tuple[int, ...]]:
    """Seeded decoding without speculation, one request at a time."""
    return tokens(make_engine(tiny_policy(), config={"max_batch": 1}).generate(requests(temperature=temperature)))


@pytest.mark.parametrize(("ids", "temperature"), [(None, TEMPERATURE), (DRAFT_IDS, 0.0)], ids=["whole-sampled", "reduced-greedy"])
@pytest.mark.parametrize("name", DRAWS)
def test_seeded_tokens_are_those_of_plain_decoding(name: str, ids: Tensor | None, temperature: float) -> None:
    policy = tiny_policy()
    draw, widths, options = DRAWS[name]
    for max_batch in (1, 4):
        drafter = Watched(block_model(policy, ids), TorchOps(), draw, **options)
        controller, totals = FixedBudget(draft_length=4, tree_width=widths), SummarySink()
        config = {"max_batch": max_batch, "scheme": Scheme.GUMBEL}
        speculating = make_engine(policy, drafter=drafter, controller=controller, config=config, sink=totals)
        assert tokens(speculating.generate(requests(temperature=temperature))) == plain_tokens(temperature)
        assert totals.num_draft_tokens > 50


@pytest.mark.parametrize(
    ("draw", "widths", "scheme"),
    [
        (Draw.SAMPLED, (1,), Scheme.REJECTION),
        (Draw.SAMPLED, (1,), Scheme.BLOCK),
        (Draw.WITHOUT_REPLACEMENT, (2, 2, 1), Scheme.TRAVERSAL),
        (Draw.DETERMINISTIC, (3, 2, 1), Scheme.EXACT_MATCH),
    ],
)
def test_greedy_tokens_are_those_of_plain_decoding_under_every_scheme(draw: Draw, widths: tuple[int, ...], scheme: Scheme) -> None:
    policy = tiny_policy()
    drafter = BlockDrafter(block_model(policy), TorchOps(), draw)
    speculating = make_engine(policy, drafter=drafter, controller=FixedBudget(draft_length=4, tree_width=widths), config={"scheme": scheme})
    assert tokens(speculating.generate(requests(temperature=0.0))) == plain_tokens(0.0)


def test_a_sampled_chain_carries_the_distributions_it_was_drawn_from() -> None:
    policy = tiny_policy()
    drafter = Watched(block_model(policy, DRAFT_IDS), TorchOps(), Draw.SAMPLED)
    make_engine(policy, drafter=drafter, controller=FixedBudget(draft_length=3), config={"scheme": Scheme.BLOCK}).generate(
        requests(seed=None)
    )
    rows = iter(drafter.drafts)
    for tree in drafter.trees:
        assert tree.is_chain()
        for request in range(tree.batch_size):
            count = int(tree.num_nodes[request])
            if not count:
                continue
            assert tree.draft_probs is not None
            torch.testing.assert_close(tree.draft_probs[request, :count], next(rows)[1][:count].exp(), atol=1e-6, rtol=1e-5)
            assert set(tree.token_ids[request, :count].tolist()) <= set(DRAFT_IDS.tolist())
    assert next(rows, None) is None


def test_drafts_follow_the_requests_filters() -> None:
    policy = tiny_policy()
    for sampling, allowed in ((SamplingParams(temperature=0.7, top_k=3), 3), (SamplingParams(temperature=0.0), 1)):
        drafter = Watched(block_model(policy), TorchOps(), Draw.SAMPLED)
        filtered = [dataclasses.replace(request, sampling=sampling) for request in requests(seed=None)]
        make_engine(policy, drafter=drafter, controller=FixedBudget(draft_length=3), config={"scheme": Scheme.BLOCK}).generate(filtered)
        assert len(drafter.drafts) > 20
        assert all((rows.exp() > 0).sum(1).tolist() == [allowed] * 3 for _, rows in drafter.drafts if len(rows) == 3)


def test_budget_widths_and_node_counts_are_kept() -> None:
    policy = tiny_policy()
    sizes = {}
    for name in ("coupled-tree", "ddtree-by-widths", "ddtree-of-20", "top1-chain"):
        draw, widths, options = DRAWS[name]
        drafter = Watched(block_model(policy), TorchOps(), draw, **options)
        make_engine(policy, drafter=drafter, controller=FixedBudget(draft_length=9, tree_width=widths)).generate(requests())
        sizes[name] = max(int(tree.num_nodes.max()) for tree in drafter.trees)
        assert max(tree.max_depth() for tree in drafter.trees) <= BLOCK - 1
    # A block of 5 drafts at most 4 deep: 3 + 6 + 6 + 6 nodes.
    assert sizes == {"coupled-tree": 21, "ddtree-by-widths": 21, "ddtree-of-20": 20, "top1-chain": 4}


def test_requests_without_budget_are_left_out() -> None:
    policy = tiny_policy()
    drafter = Watched(block_model(policy), TorchOps(), Draw.GUMBEL)

    class EverySecond:
        name = "every second"

        def decide(self, signals: object, state: object) -> tuple[Budget, object]:
            lengths = torch.tensor([3 * (i % 2) for i in range(len(signals.request_ids))])  # type: ignore[attr-defined]
            return Budget(draft_lengths=lengths), state

    speculating = make_engine(policy, drafter=drafter, controller=EverySecond())
    assert tokens(speculating.generate(requests())) == plain_tokens(TEMPERATURE)
    assert drafter.trees
    assert all((tree.num_nodes > 0).all() for tree in drafter.trees)
    assert max(tree.batch_size for tree in drafter.trees) == 2


def test_new_policy_weights_reach_head_embedding_and_context() -> None:
    policy, later = tiny_policy(), tiny_policy()
    with torch.no_grad():
        for parameter in later.parameters():
            parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    update = {name: parameter.detach().clone() for name, parameter in later.named_parameters()}
    model = block_model(policy)
    drafter = Watched(model, TorchOps(), Draw.GUMBEL)

    engine = make_engine(policy, drafter=drafter, controller=FixedBudget(draft_length=3), config={"max_batch": 2})
    for request in requests(length=16):
        engine.add(request)
    under_way = 0
    while engine.has_work:
        engine.step()
        if engine.weights_version == 0 and len(drafter.drafts) >= 8:
            under_way = sum(len(running.tokens) > running.num_prompt for running in engine._scheduler.running)
            engine.update_weights(update.items(), version=1)
            drafter.drafts.clear()
    assert under_way == 2
    assert len(drafter.drafts) > 10
    for token_ids, served in drafter.drafts:
        # The policy module holds the new weights now; the drafter's context must have been made from them throughout.
        torch.testing.assert_close(
            served, trained_log_probs(policy, model, token_ids, TEMPERATURE)[:3][: served.shape[0]], atol=2e-4, rtol=2e-4
        )


def test_new_drafter_weights_are_checked_and_used() -> None:
    policy = tiny_policy()
    model, other = block_model(policy), block_model(policy, seed=6)
    drafter = Watched(model, TorchOps())
    good = {name: parameter.detach().clone() for name, parameter in other.named_parameters()}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for broken, message in (
        ({name: good[name] for name in good if name != "fc.weight"}, "missing tensor fc.weight"),
        ({**good, "lm_head.weight": torch.ones(1)}, "unknown tensor lm_head.weight"),
        ({**good, "norm.weight": torch.ones(3)}, "norm.weight has shape"),
        ({**good, "layers.1.mlp.up_proj.weight": torch.full((48, 32), torch.nan)}, "layers.1.mlp.up_proj.weight holds NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            drafter.update_weights(broken.items(), version=3)
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    drafter.update_weights(good.items(), version=4)
    assert drafter.weights_version == 4
    make_engine(policy, drafter=drafter, controller=FixedBudget(draft_length=3)).generate(requests())
    for token_ids, served in drafter.drafts:
        torch.testing.assert_close(
            served, trained_log_probs(policy, other, token_ids, TEMPERATURE)[: served.shape[0]], atol=2e-4, rtol=2e-4
        )


def test_missing_states_are_an_error_not_a_guess() -> None:
    policy = tiny_policy()
    model = block_model(policy)
    drafter = BlockDrafter(model, TorchOps())
    view = RequestView(request_id="r", prompt_key="p", token_ids=[3, 4, 5, 6], num_prompt_tokens=4, seed=1, sampling=SamplingParams())
    drafter.start(view)

    def propose(positions: list[int]) -> None:
        hidden = {layer: torch.zeros(len(positions), 32) for layer in model.hidden_layers}
        states = TargetStates(hidden=hidden, positions=torch.tensor(positions), offsets=torch.tensor([0, len(positions)]))
        drafter.propose(DraftContext(requests=[view], weights_version=0, states=states), Budget(draft_lengths=torch.tensor([2])))

    with pytest.raises(ValueError, match="request r: target states of positions 0 to 0 never came"):
        propose([1, 2])
    with pytest.raises(ValueError, match="request r: the block drafter holds target states of 2 tokens, not of 3"):
        propose([0, 1])
    propose([2])
    drafter.target_updated(1)
    with pytest.raises(ValueError, match="positions 0 to 1 never came"):
        propose([2])


def test_contexts_survive_growth_in_both_directions() -> None:
    model = block_model(tiny_policy())
    cache = ContextCache(BlockDrafter(model, TorchOps())._packed.make_slots, margin=BLOCK)
    held: dict[str, Tensor] = {}
    for number in range(9):
        name, count = f"r{number}", 40 * number + 1
        cache.open(name)
        cache.extend(name, 0, count)
        held[name] = torch.randn(count, 2, 2, 8)
        cache.write(ContextKeys(k=held[name], v=-held[name]), torch.full((count,), cache.slot(name)), torch.arange(count))
        if number == 4:
            cache.close("r1")
            del held["r1"]
    assert len({cache.slot(name) for name in held}) == len(held)
    for name, rows in held.items():
        assert torch.equal(cache.kv.k[:, cache.slot(name), :, : len(rows)].permute(2, 0, 1, 3), rows)
        assert torch.equal(cache.kv.v[:, cache.slot(name), :, : len(rows)].permute(2, 0, 1, 3), -rows)
        assert cache.kv.capacity >= len(rows) + BLOCK


def test_bfloat16_policy_is_served_in_bfloat16() -> None:
    policy = tiny_policy()
    policy.to(torch.bfloat16)
    model = block_model(policy)
    drafter = BLOCK_KIND.serve(model, model.policy, TorchOps(), Draw.GUMBEL)
    wanted = tokens(make_engine(policy).generate(requests()))
    got = tokens(make_engine(policy, drafter=drafter, controller=FixedBudget(draft_length=3)).generate(requests()))
    assert isinstance(drafter, BlockDrafter)
    assert drafter._cache.kv.k.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert [len(ours) for ours in got] == [len(theirs) for theirs in wanted]


def test_wrong_uses_are_named() -> None:
    policy = tiny_policy()
    model = block_model(policy)
    with pytest.raises(ValueError, match="tree_nodes 4"):
        BlockDrafter(model, TorchOps(), Draw.SAMPLED, tree_nodes=4)
    with pytest.raises(ValueError, match="this very policy"):
        BLOCK_KIND.serve(model, dataclasses.replace(model.policy, module=tiny_policy()), TorchOps(), None)
    drafter = BlockDrafter(model, TorchOps(), Draw.SAMPLED)
    engine = make_engine(policy, drafter=drafter, controller=FixedBudget(draft_length=3, tree_width=(2,)))
    with pytest.raises(ValueError, match="independent draws make chains only"):
        engine.generate(requests())
    assert model.config.mask_token_id == MASK_ID

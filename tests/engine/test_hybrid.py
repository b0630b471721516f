"""Hybrid models through the whole engine: the recurrent state after every round is that of the tokens kept, whatever was drafted.

Shape legend: B requests, R rows, N nodes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence

import pytest
import torch
from tiny import HYBRID_KINDS, SIZES, VOCAB, ScriptedDrafter, oracle, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, OlmoHybridConfig

from rollout_spec.budget import FixedBudget
from rollout_spec.controllers import ThroughputBudget
from rollout_spec.drafter import Drafter
from rollout_spec.drafters.ngram import NGramDrafter
from rollout_spec.drafters.self_draft import SelfConfig, SelfDrafter
from rollout_spec.drafters.suffix import SuffixDrafter
from rollout_spec.engine.calibrate import calibrate
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.hybrid import HybridRunner
from rollout_spec.engine.load import make_runner
from rollout_spec.engine.ops import Ops, TorchOps
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.request import Completion, Request
from rollout_spec.engine.rounds import kv_moves, round_input
from rollout_spec.engine.runner import StepInput
from rollout_spec.events import PrefillEvent
from rollout_spec.pilot import BudgetPilot
from rollout_spec.sampling import SamplingParams
from rollout_spec.sinks import MemorySink
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verdict import Verdict
from rollout_spec.verify import Scheme
from rollout_spec_kernels.cpu import CpuOps, unavailable_reason

# Logits of order five. transformers' own forward differs from itself, whole against token by token, by up to 8e-4 on these models in
# float32: recurrent layers amplify rounding. A state that is off by one token shows as .1 and more.
TOLERANCE = 2e-3
PROMPTS = [tuple(range(first, first + n)) for first, n in ((3, 5), (20, 9), (40, 1), (30, 14))]


def default_ops() -> Ops:
    return TorchOps() if unavailable_reason() is not None else CpuOps()


def engine(kind: str = "qwen3_next", model: nn.Module | None = None, **settings: object) -> Engine:
    config = EngineConfig(**{"max_batch": 4, "max_context": 96, **settings.pop("config", {})})  # type: ignore[arg-type]
    ops = settings.pop("ops", None) or default_ops()
    return Engine(make_runner(model or tiny_model(kind), max_context=96, ops=ops), config=config, **settings)  # type: ignore[arg-type]


def requests(length: int = 12, **changes: object) -> list[Request]:
    base = [
        Request(prompt_token_ids=prompt, max_new_tokens=length, seed=100 + i, ignore_eos=True, sampling=SamplingParams(temperature=0.8))
        for i, prompt in enumerate(PROMPTS)
    ]
    return [dataclasses.replace(request, **changes) for request in base]  # type: ignore[arg-type]


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    assert not any(completion.error for completion in completions)
    return [completion.token_ids for completion in completions]


def span(line: Tensor, start: int, end: int, slot: int) -> StepInput:
    plan = AttentionPlan(row_offsets=torch.tensor([0, end - start]), slots=torch.tensor([slot]), context_lengths=torch.tensor([start]))
    return StepInput(token_ids=line[start:end], positions=torch.arange(start, end), plan=plan, is_known=True)


@pytest.mark.parametrize("kind", HYBRID_KINDS)
@pytest.mark.parametrize("cuts", [(150,), (1, 2, 9, 150), (70, 150)], ids=str)
def test_logits_of_a_prompt_in_chunks_are_the_modules(kind: str, cuts: tuple[int, ...]) -> None:
    """150 tokens are three blocks of the recurrence; a chunk may end inside one, or be shorter than the convolution's window."""
    line = torch.randint(3, VOCAB, (150,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = tiny_model(kind)(line[None]).logits[0]
    for ops in (TorchOps(), default_ops()):
        runner = make_runner(tiny_model(kind), max_context=192, ops=ops)
        assert isinstance(runner, HybridRunner)
        kv = runner.make_slots(3, 192)
        ends = list(zip((0, *cuts), cuts, strict=False))
        got = torch.cat([runner.logits(runner.forward(span(line, a, b, slot=1), kv).hidden) for a, b in ends])
        torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)


def test_a_short_prompt_beside_a_long_one_keeps_its_own_state() -> None:
    """One has rows in the first block of the recurrence only, the other in three."""
    lines = [torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)) for length in (20, 150)]
    runner = make_runner(tiny_model("qwen3_5"), max_context=192)
    kv, ends = runner.make_slots(2, 192), [len(line) - 3 for line in lines]
    for starts, stops in (([0, 0], ends), (ends, [len(line) for line in lines])):
        counts = torch.tensor(stops) - torch.tensor(starts)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        plan = AttentionPlan(row_offsets=offsets, slots=torch.tensor([1, 0]), context_lengths=torch.tensor(starts))
        spans = list(zip(lines, starts, stops, strict=True))
        step = StepInput(
            token_ids=torch.cat([line[start:stop] for line, start, stop in spans]),
            positions=torch.cat([torch.arange(start, stop) for _, start, stop in spans]),
            plan=plan,
            is_known=True,
        )
        got = runner.logits(runner.forward(step, kv).hidden).split(counts.tolist())
        for (line, start, stop), logits in zip(spans, got, strict=True):
            with torch.inference_mode():
                wanted = tiny_model("qwen3_5")(line[None]).logits[0, start:stop]
            torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


TREE = DraftTree(
    token_ids=torch.tensor([[7, 8, 9, 10, 11], [20, 21, 22, 0, 0]]),
    parents=torch.tensor([[-1, -1, 0, 2, 1], [-1, 0, 0, -1, -1]]),
    num_nodes=torch.tensor([5, 3]),
    draw=Draw.DETERMINISTIC,
)
CONTEXTS = [torch.arange(3, 15), torch.arange(30, 35)]


def path_to(tree: DraftTree, request: int, node: int) -> list[int]:
    return [] if node < 0 else [*path_to(tree, request, int(tree.parents[request, node])), node]


def verdict_on(paths: Sequence[Sequence[int]]) -> Verdict:
    depth = max(1, *map(len, paths))
    padded = torch.tensor([[*path, *[-1] * (depth - len(path))] for path in paths])
    counts = torch.tensor([len(path) for path in paths])
    nothing = torch.zeros(len(paths), dtype=torch.int64)
    return Verdict(
        path=padded, num_accepted=counts, next_token_ids=nothing, is_bonus=nothing.bool(), accept_probs=torch.zeros(len(paths), depth)
    )


@pytest.mark.parametrize("kind", HYBRID_KINDS)
@pytest.mark.parametrize("accepted", [(-1, -1), (0, 1), (3, 2), (4, -1)], ids=str)
def test_a_tree_is_scored_along_its_paths_and_leaves_no_trace(kind: str, accepted: tuple[int, int]) -> None:
    """Every node's logits are those of its path; after the commit the slot goes on as one that only ever saw the accepted path."""
    reference = tiny_model(kind)
    runner = make_runner(tiny_model(kind), max_context=64, ops=default_ops())
    kv = runner.make_slots(2, 64)
    for slot, context in enumerate(CONTEXTS):
        runner.forward(span(context, 0, len(context) - 1, slot), kv)
    lengths = torch.tensor([len(context) - 1 for context in CONTEXTS])
    step = round_input(TREE, torch.stack([context[-1] for context in CONTEXTS]), lengths, torch.arange(2))
    for _ in range(2):  # a drafter may have run the target on the tree before
        logits = runner.logits(runner.forward(step, kv).hidden)
    row = 0
    for b, context in enumerate(CONTEXTS):
        for node in range(-1, int(TREE.num_nodes[b])):
            line = torch.cat([context, TREE.token_ids[b, path_to(TREE, b, node)]])
            with torch.inference_mode():
                torch.testing.assert_close(logits[row], reference(line[None]).logits[0, -1], atol=TOLERANCE, rtol=0)
            row += 1
    paths = [path_to(TREE, b, node) for b, node in enumerate(accepted)]
    verdict = verdict_on(paths)
    runner.commit(kv, step.plan, verdict.path, kv_moves(TREE, verdict))
    for b, (context, path) in enumerate(zip(CONTEXTS, paths, strict=True)):
        line = torch.cat([context, TREE.token_ids[b, path], torch.tensor([50, 51])])
        with torch.inference_mode():
            wanted = reference(line[None]).logits[0, -2:]
        got = runner.logits(runner.forward(span(line, len(line) - 2, len(line), b), kv).hidden)
        torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)


DRAFTERS: dict[str, tuple[Drafter, tuple[int, ...]]] = {
    "ngram": (NGramDrafter(), (1,)),
    "suffix-tree": (SuffixDrafter(), (3, 2, 1)),
    "self-coupled": (SelfDrafter(SelfConfig(draw=Draw.GUMBEL)), (1,)),
    "self-coupled-tree": (SelfDrafter(SelfConfig(draw=Draw.GUMBEL, temperature=1.3)), (2, 2)),
    "self-topk": (SelfDrafter(SelfConfig(draw=Draw.DETERMINISTIC)), (3, 2, 1)),
}


@pytest.mark.parametrize("kind", HYBRID_KINDS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_seeded_tokens_do_not_depend_on_drafts_or_batch(kind: str, name: str) -> None:
    wanted = tokens(engine(kind, config={"max_batch": 1}).generate(requests()))
    drafter, widths = DRAFTERS[name]
    controller = FixedBudget(draft_length=4, tree_width=widths)
    speculating = engine(kind, drafter=drafter, controller=controller, config={"prefill_chunk": 6, "scheme": Scheme.GUMBEL})
    assert tokens(speculating.generate(requests())) == wanted


@pytest.mark.parametrize(
    ("draw", "scheme", "widths"),
    [
        (Draw.SAMPLED, Scheme.BLOCK, (1,)),
        (Draw.WITHOUT_REPLACEMENT, Scheme.TRAVERSAL, (2, 2, 1)),
        (Draw.DETERMINISTIC, Scheme.EXACT_MATCH, (3, 1, 1)),
    ],
)
def test_greedy_equals_plain_decoding_under_other_schemes(draw: Draw, scheme: Scheme, widths: tuple[int, ...]) -> None:
    greedy = SamplingParams(temperature=0.0)
    wanted = tokens(engine().generate(requests(sampling=greedy)))
    drafter = SelfDrafter(SelfConfig(draw=draw, temperature=1.0))
    speculating = engine(drafter=drafter, controller=FixedBudget(draft_length=3, tree_width=widths), config={"scheme": scheme})
    assert tokens(speculating.generate(requests(sampling=greedy))) == wanted


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3, None])
def test_rejection_at_every_position_leaves_no_trace(wrong_at: int | None) -> None:
    """Zero accepted up to all; then the same prompts on the used slots: all as if nothing had ever been drafted."""
    wanted = tokens(engine().generate(requests()))
    answers = dict(zip(PROMPTS, wanted, strict=True))
    sink = MemorySink()
    used = engine(drafter=ScriptedDrafter(oracle(answers, 4, wrong_at=wrong_at)), controller=FixedBudget(draft_length=4), sink=sink)
    done = used.generate(requests())
    assert tokens(done) == wanted
    assert max(depth for completion in done for depth in completion.accepted_depths) == (4 if wrong_at is None else wrong_at)
    sink.events.clear()
    assert tokens(used.generate(requests())) == wanted
    # The prompts' states were kept, though the slots went on from them.
    assert not [event for event in sink.events if isinstance(event, PrefillEvent)]


def test_requests_of_different_lengths_finish_one_by_one() -> None:
    ragged = [dataclasses.replace(request, max_new_tokens=length) for request, length in zip(requests(), (3, 17, 8, 1), strict=True)]
    ragged += [dataclasses.replace(request, seed=7, max_new_tokens=5) for request in ragged]
    wanted = [tokens(engine(config={"max_batch": 1}).generate([request]))[0] for request in ragged]
    speculating = engine(drafter=SuffixDrafter(), controller=FixedBudget(draft_length=3, tree_width=(2, 1)), config={"max_batch": 3})
    assert tokens(speculating.generate(ragged)) == wanted
    assert [len(line) for line in wanted] == [3, 17, 8, 1, 5, 5, 5, 5]


def test_the_samples_of_a_prompt_start_from_its_state() -> None:
    sink = MemorySink()
    same = [dataclasses.replace(requests()[3], seed=i) for i in range(4)]
    done = engine(sink=sink, drafter=NGramDrafter(), config={"prefill_chunk": 5}).generate(same)
    computed = sum(event.num_tokens for event in sink.events if isinstance(event, PrefillEvent))
    assert computed == len(PROMPTS[3]) - 1
    assert tokens(done) == [tokens(engine().generate([request]))[0] for request in same]


def test_a_prefix_is_used_only_where_a_state_was_kept() -> None:
    """The next turn goes on from a finished request; a prompt that shares only a part of what a slot holds is computed anew."""
    sink = MemorySink()
    kept = engine(sink=sink)
    first = kept.generate([requests()[3]])[0]
    sink.events.clear()
    turn = [*PROMPTS[3], *first.token_ids, 9, 8, 7]
    part = [*PROMPTS[3][:10], 9, 8, 7]
    for prompt, computed in ((turn, 3), (part, len(part) - 1)):
        request = dataclasses.replace(requests()[0], prompt_token_ids=prompt)
        assert tokens(kept.generate([request])) == tokens(engine().generate([request]))
        assert sum(event.num_tokens for event in sink.events if isinstance(event, PrefillEvent)) == computed
        sink.events.clear()


def test_a_stop_inside_a_draft_keeps_no_state_behind_it() -> None:
    plain = engine().generate(requests())[0]
    stop_at = next(i for i in range(2, 12) if plain.token_ids[i] not in plain.token_ids[:i])
    stopping = dataclasses.replace(requests(length=12)[0], stop_token_ids=(plain.token_ids[stop_at],))
    used = engine(drafter=ScriptedDrafter(oracle({PROMPTS[0]: plain.token_ids}, 8)), controller=FixedBudget(draft_length=8))
    done = used.generate([stopping])[0]
    assert done.token_ids == plain.token_ids[: stop_at + 1]
    following = dataclasses.replace(requests()[0], prompt_token_ids=[*PROMPTS[0], *done.token_ids, 9])
    assert tokens(used.generate([following])) == tokens(engine().generate([following]))


def changed_weights(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_new_weights_take_effect_in_the_middle_of_a_request(kind: str) -> None:
    new = changed_weights(tiny_model(kind))
    running = engine(kind, drafter=SuffixDrafter())
    ids = [running.add(request) for request in requests()]
    finished: dict[str, Completion] = {}
    for _ in range(6):
        finished |= {completion.request_id: completion for completion in running.step()}
    running.update_weights(new.items(), version=4)
    while running.has_work:
        finished |= {completion.request_id: completion for completion in running.step()}
    updated = tiny_model(kind)
    updated.load_state_dict(new)
    for request, request_id in zip(requests(), ids, strict=True):
        completion = finished[request_id]
        assert [span.weights_version for span in completion.weights_versions] == [0, 4]
        cut = completion.weights_versions[1].start
        columns = ("token_ids", "logprobs", "processed_logprobs", "entropies", "accepted_depths")
        prefix = dataclasses.replace(completion, **{name: getattr(completion, name)[:cut] for name in columns})
        fresh = engine(model=updated, config={"max_batch": 1})
        assert tokens(fresh.generate([dataclasses.replace(request, resume=prefix)])) == [completion.token_ids]


def test_drafters_get_every_layers_states() -> None:
    line = torch.randint(3, VOCAB, (9,))
    with torch.inference_mode():
        wanted = tiny_model("qwen3_5")(line[None], output_hidden_states=True).hidden_states
    runner = make_runner(tiny_model("qwen3_5"), max_context=64)
    step = dataclasses.replace(span(line, 0, 9, 0), tap_layers=(0, 3, -1))
    taps = runner.forward(step, runner.make_slots(1, 32)).taps
    for layer, reference in ((0, wanted[1]), (3, wanted[4]), (-1, wanted[-1])):
        torch.testing.assert_close(taps[layer], reference[0], atol=TOLERANCE, rtol=0)


def test_a_calibrated_budget_serves_a_hybrid_model() -> None:
    """Calibration runs forwards behind contexts that no slot holds: only there may a state stand for tokens it has not seen."""
    pilot, runner = BudgetPilot(ThroughputBudget()), make_runner(tiny_model("qwen3_5"), max_context=96, ops=default_ops())
    calibrate(runner, pilot.costs, max_batch=2, max_context=96)
    served = Engine(runner, config=EngineConfig(max_batch=4, max_context=96), drafter=NGramDrafter(), controller=pilot)
    assert tokens(served.generate(requests())) == tokens(engine("qwen3_5").generate(requests()))


def test_a_state_that_is_not_the_contexts_is_refused() -> None:
    runner = make_runner(tiny_model("qwen3_5"), max_context=64)
    kv = runner.make_slots(1, 32)
    runner.forward(span(torch.arange(3, 12), 0, 5, 0), kv)
    with pytest.raises(AssertionError, match="states after"):
        runner.forward(span(torch.arange(3, 12), 4, 9, 0), kv)


def test_families_the_engine_does_not_know_are_refused() -> None:
    """By their kind of layer where that is unknown, by their logits where the layer does something else than its kind does elsewhere."""
    sizes = {**SIZES, "num_hidden_layers": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 4}
    with pytest.raises(ValueError, match="linear_attention"):
        make_runner(AutoModelForCausalLM.from_config(OlmoHybridConfig(**sizes), dtype=torch.float32).eval(), max_context=64)

    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: object, **kwargs: object) -> object:
            return 2 * self.inner(*args, **kwargs)

        def __getattr__(self, name: str) -> object:
            return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    model = tiny_model("qwen3_next")
    layer = model.model.layers[1]
    layer.linear_attn = Doubled(layer.linear_attn)
    with pytest.raises(ValueError, match="Qwen3NextForCausalLM: the embedded engine's logits differ"):
        make_runner(model, max_context=64)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install 'rollout-spec[triton]'")
def test_tritons_kernels_in_the_engine() -> None:
    from rollout_spec_kernels.triton import gated_delta

    ops = TorchOps()
    ops.gated_delta = gated_delta
    short = requests(length=5)[:2]
    wanted = tokens(engine("qwen3_5", config={"max_batch": 1}).generate(short))
    speculating = engine("qwen3_5", ops=ops, drafter=SuffixDrafter(), controller=FixedBudget(draft_length=3, tree_width=(2, 1)))
    assert tokens(speculating.generate(short)) == wanted

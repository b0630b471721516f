"""The engine's promises, on tiny models: same tokens whatever is drafted, right stops, right logprobs, clean state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from tiny import VOCAB, ScriptedDrafter, chain, oracle, tiny_model
from torch import Tensor, nn

from rollout_spec.budget import FixedBudget
from rollout_spec.drafter import Drafter
from rollout_spec.drafters.ngram import NGramDrafter
from rollout_spec.drafters.self_draft import SelfConfig, SelfDrafter
from rollout_spec.drafters.suffix import SuffixDrafter
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import make_runner
from rollout_spec.engine.ops import TorchOps
from rollout_spec.engine.request import Completion, Request
from rollout_spec.events import Event, PrefillEvent, RoundEvent
from rollout_spec.sampling import SamplingParams
from rollout_spec.sinks import MemorySink
from rollout_spec.sinks.summary import SummarySink
from rollout_spec.tree import Draw
from rollout_spec.verify import Scheme
from rollout_spec_kernels.cpu import CpuOps, unavailable_reason

PROMPTS = [tuple(range(first, first + n)) for first, n in ((3, 5), (20, 9), (40, 1), (30, 14))]


def engine(model: nn.Module | None = None, **settings: object) -> Engine:
    config = EngineConfig(**{"max_batch": 4, "max_context": 96, **settings.pop("config", {})})  # type: ignore[arg-type]
    ops = TorchOps() if unavailable_reason() is not None or settings.pop("torch_ops", False) else CpuOps()
    return Engine(make_runner(model or tiny_model(), max_context=96, ops=ops), config=config, **settings)  # type: ignore[arg-type]


def requests(length: int = 12, **changes: object) -> list[Request]:
    base = [
        Request(prompt_token_ids=prompt, max_new_tokens=length, seed=100 + i, ignore_eos=True, sampling=SamplingParams(temperature=0.8))
        for i, prompt in enumerate(PROMPTS)
    ]
    return [dataclasses.replace(request, **changes) for request in base]  # type: ignore[arg-type]


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


PROCESSED = SamplingParams(
    temperature=0.7,
    top_k=20,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={5: 1.5},
)
DRAFTERS: dict[str, tuple[Drafter, tuple[int, ...]]] = {
    "ngram": (NGramDrafter(), (1,)),
    "ngram-tree": (NGramDrafter(), (2, 2, 1)),
    "suffix": (SuffixDrafter(), (1,)),
    "suffix-tree": (SuffixDrafter(), (3, 2, 1)),
    "self-coupled": (SelfDrafter(SelfConfig(draw=Draw.GUMBEL)), (1,)),
    "self-coupled-tree": (SelfDrafter(SelfConfig(draw=Draw.GUMBEL, temperature=1.3)), (2, 2)),
    "self-topk": (SelfDrafter(SelfConfig(draw=Draw.DETERMINISTIC)), (3, 2, 1)),
    "self-independent": (SelfDrafter(SelfConfig(draw=Draw.SAMPLED)), (1,)),
}


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.8), PROCESSED, SamplingParams(temperature=0.0)], ids=["plain", "processed", "greedy"]
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_seeded_tokens_do_not_depend_on_drafts_or_batch(name: str, sampling: SamplingParams) -> None:
    wanted = tokens(engine(config={"max_batch": 1}).generate(requests(sampling=sampling)))
    drafter, widths = DRAFTERS[name]
    for max_batch in (1, 4):
        controller = FixedBudget(draft_length=4, tree_width=widths)
        speculating = engine(drafter=drafter, controller=controller, config={"max_batch": max_batch, "scheme": Scheme.GUMBEL})
        assert tokens(speculating.generate(requests(sampling=sampling))) == wanted


def test_torchs_operations_keep_the_same_promise() -> None:
    drafter = SuffixDrafter()
    wanted = tokens(engine(torch_ops=True, config={"max_batch": 1}).generate(requests()))
    speculating = engine(torch_ops=True, drafter=drafter, controller=FixedBudget(draft_length=4, tree_width=(2, 1)))
    assert tokens(speculating.generate(requests())) == wanted


@pytest.mark.parametrize(
    ("draw", "scheme", "widths"),
    [
        (Draw.SAMPLED, Scheme.REJECTION, (1,)),
        (Draw.SAMPLED, Scheme.BLOCK, (1,)),
        (Draw.WITHOUT_REPLACEMENT, Scheme.REJECTION_WALK, (2, 2, 1)),
        (Draw.WITHOUT_REPLACEMENT, Scheme.TRAVERSAL, (2, 2, 1)),
        (Draw.DETERMINISTIC, Scheme.EXACT_MATCH, (3, 1, 1)),
    ],
)
def test_greedy_equals_plain_decoding_under_every_scheme(draw: Draw, scheme: Scheme, widths: tuple[int, ...]) -> None:
    greedy = SamplingParams(temperature=0.0, repetition_penalty=1.2)
    wanted = tokens(engine().generate(requests(sampling=greedy)))
    drafter = SelfDrafter(SelfConfig(draw=draw, temperature=1.0))
    speculating = engine(drafter=drafter, controller=FixedBudget(draft_length=3, tree_width=widths), config={"scheme": scheme})
    assert tokens(speculating.generate(requests(sampling=greedy))) == wanted


@pytest.mark.parametrize("scheme", [Scheme.REJECTION, Scheme.BLOCK])
def test_a_drafter_with_the_targets_distribution_is_accepted_always(scheme: Scheme) -> None:
    totals = SummarySink()
    speculating = engine(drafter=SelfDrafter(), controller=FixedBudget(draft_length=3), config={"scheme": scheme}, sink=totals)
    speculating.generate(requests(seed=None))
    assert totals.num_draft_tokens > 0
    assert totals.num_accepted_tokens == totals.num_draft_tokens


@pytest.mark.parametrize("wrong_at", range(5))
def test_rejection_at_every_position_leaves_no_trace(wrong_at: int) -> None:
    """The same prompts, drafted right up to wrong_at every round, and once more in the same engine: fresh tokens and logprobs each time."""
    plain = engine().generate(requests())
    answers = {prompt: completion.token_ids for prompt, completion in zip(PROMPTS, plain, strict=True)}
    drafter = ScriptedDrafter(oracle(answers, 5, wrong_at))
    speculating = engine(drafter=drafter, controller=FixedBudget(draft_length=5))
    for _ in range(2):
        again = speculating.generate(requests())
        assert tokens(again) == tokens(plain)
        for ours, reference in zip(again, plain, strict=True):
            assert ours.num_accepted_tokens == sum(depth > 0 for depth in ours.accepted_depths)
            torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(reference.logprobs), atol=1e-4, rtol=0)
    most = max(int(verdict.num_accepted.max()) for verdict in drafter.verdicts)
    assert most == wrong_at


def test_the_path_through_a_tree_is_kept() -> None:
    """The right continuation hides in the last branch, so that accepted K/V must be moved."""
    plain = engine().generate(requests())
    answers = {prompt: completion.token_ids for prompt, completion in zip(PROMPTS, plain, strict=True)}

    def script(seen: Sequence[int]) -> list[tuple[int, int]]:
        draft = [token for token, _ in oracle(answers, 3)(seen)]
        decoys = [((token + 1) % VOCAB, depth - 1) for depth, token in enumerate(draft)]
        return decoys + [(token, len(draft) + depth - 1 if depth else -1) for depth, token in enumerate(draft)]

    totals = SummarySink()
    speculating = engine(drafter=ScriptedDrafter(script), controller=FixedBudget(draft_length=3), sink=totals)
    ours = speculating.generate(requests())
    assert tokens(ours) == tokens(plain)
    assert totals.summary()["acceptance_length_pooled"] == pytest.approx(4.0)
    for completion, reference in zip(ours, plain, strict=True):
        torch.testing.assert_close(torch.tensor(completion.logprobs), torch.tensor(reference.logprobs), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.6, top_p=0.9), SamplingParams(), PROCESSED], ids=["T.6-p.9", "plain", "processed"]
)
def test_logprobs_and_entropies_equal_a_full_recompute(sampling: SamplingParams) -> None:
    from rollout_spec.sampling import RowHistory, process_logits

    completions = engine(drafter=NGramDrafter(), config={"prefill_chunk": 4}).generate(requests(sampling=sampling))
    model = tiny_model()
    for completion in completions:
        assert len(completion.logprobs) == len(completion.processed_logprobs) == len(completion.entropies) == len(completion.token_ids)
        prompt, output = completion.prompt_token_ids, completion.token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        histories = [RowHistory(prompt_token_ids=prompt, output_token_ids=output[:i]) for i in range(len(output))]
        processed = process_logits(logits, [sampling] * len(output), histories).log_softmax(-1)
        chosen = torch.tensor(output)[:, None]
        torch.testing.assert_close(torch.tensor(completion.logprobs), logits.log_softmax(-1).gather(1, chosen)[:, 0], atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(completion.processed_logprobs), processed.gather(1, chosen)[:, 0], atol=1e-4, rtol=0)
        entropies = torch.special.entr(processed.exp()).sum(-1)
        torch.testing.assert_close(torch.tensor(completion.entropies), entropies, atol=1e-3, rtol=0)


def test_a_stop_token_inside_a_block_ends_the_request_there() -> None:
    plain = engine().generate(requests(length=12))[0]
    stop_at = next(i for i in range(2, 12) if plain.token_ids[i] not in plain.token_ids[:i])
    stopping = dataclasses.replace(requests(length=stop_at + 4)[0], stop_token_ids=(plain.token_ids[stop_at],))
    drafter = ScriptedDrafter(oracle({PROMPTS[0]: plain.token_ids}, 8))
    sink = MemorySink()
    done = engine(drafter=drafter, controller=FixedBudget(draft_length=8), sink=sink).generate([stopping])[0]
    assert done.token_ids == plain.token_ids[: stop_at + 1]
    (event,) = [event for event in sink.events if isinstance(event, RoundEvent)]
    # The verifier accepted more than the stop let through; both counts of accepted tokens say what was kept.
    assert event.num_accepted_tokens == event.num_emitted_tokens == done.num_accepted_tokens == stop_at + 1
    assert sum(event.accepted_by_depth) > event.num_accepted_tokens
    assert (done.finish_reason, done.stop_reason) == ("stop", plain.token_ids[stop_at])
    assert len(done.logprobs) == stop_at + 1


def test_the_length_is_exact_with_drafts_longer_than_what_is_left() -> None:
    plain = engine().generate(requests())
    answers = {prompt: completion.token_ids for prompt, completion in zip(PROMPTS, plain, strict=True)}
    for length in (1, 2, 5, 6):
        drafter = ScriptedDrafter(oracle(answers, 6))
        done = engine(drafter=drafter, controller=FixedBudget(draft_length=6)).generate(requests(length=length))
        assert tokens(done) == [completion.token_ids[:length] for completion in plain]
        assert {completion.finish_reason for completion in done} == {"length"}


def spell(token_ids: Sequence[int]) -> str:
    return "".join(chr(64 + token) for token in token_ids)


def test_stop_strings_over_token_borders_cut_text_and_tokens() -> None:
    plain = engine().generate(requests(length=12))[0]
    stop = spell(plain.token_ids[5:7])
    first = spell(plain.token_ids).index(stop)
    drafter = ScriptedDrafter(oracle({PROMPTS[0]: plain.token_ids}, 8))
    speculating = engine(drafter=drafter, controller=FixedBudget(draft_length=8), detokenize=spell)
    done = speculating.generate([dataclasses.replace(requests(length=12)[0], stop=("\x01never", stop))])[0]
    assert done.token_ids == plain.token_ids[: first + 2]
    assert done.text == spell(plain.token_ids)[:first]
    assert (done.finish_reason, done.stop_reason) == ("stop", stop)


def test_the_samples_of_a_prompt_share_its_prefill() -> None:
    sink = MemorySink()
    same = [dataclasses.replace(requests()[3], seed=i) for i in range(4)]
    shared = engine(sink=sink, config={"prefill_chunk": 5}).generate(same)
    computed = sum(event.num_tokens for event in sink.events if isinstance(event, PrefillEvent))
    assert computed == len(PROMPTS[3]) - 1
    alone = [engine().generate([request])[0] for request in same]
    assert tokens(shared) == tokens(alone)


def test_a_later_batch_reuses_the_prefix_that_a_slot_still_holds() -> None:
    sink = MemorySink()
    kept = engine(sink=sink)
    first = kept.generate(requests())
    sink.events.clear()
    assert tokens(kept.generate(requests())) == tokens(first)
    assert not [event for event in sink.events if isinstance(event, PrefillEvent)]


def test_an_aborted_request_resumes_to_the_same_tokens() -> None:
    wanted = engine().generate(requests())[1]
    interrupted = engine(drafter=NGramDrafter())
    request_id = interrupted.add(requests()[1])
    for _ in range(4):
        interrupted.step()
    interrupted.abort(request_id)
    (partial,) = interrupted.step()
    assert partial.finish_reason == "aborted"
    assert 0 < len(partial.token_ids) < 12
    (whole,) = interrupted.generate([dataclasses.replace(requests()[1], resume=partial)])
    assert whole.token_ids == wanted.token_ids
    torch.testing.assert_close(torch.tensor(whole.logprobs), torch.tensor(wanted.logprobs), atol=1e-4, rtol=0)


def changed_weights(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: p.detach() + 0.3 * torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


@pytest.mark.parametrize("fused", [True, False])
def test_new_weights_take_effect_in_the_middle_of_a_request(fused: bool) -> None:
    new = changed_weights(tiny_model())
    running = Engine(
        make_runner(tiny_model(), max_context=96, fused=fused), config=EngineConfig(max_batch=4, max_context=96), drafter=SuffixDrafter()
    )
    ids = [running.add(request) for request in requests()]
    finished: dict[str, Completion] = {}
    for _ in range(6):
        finished |= {completion.request_id: completion for completion in running.step()}
    before = running.update_weights(tiny_model().named_parameters(), version=3)
    after = running.update_weights(new.items(), version=4)
    assert before.checksum != after.checksum
    while running.has_work:
        finished |= {completion.request_id: completion for completion in running.step()}
    updated = tiny_model()
    updated.load_state_dict(new)
    for request, request_id in zip(requests(), ids, strict=True):
        completion = finished[request_id]
        assert [span.weights_version for span in completion.weights_versions] == [0, 4]
        cut = completion.weights_versions[1].start
        # From the cut on, the tokens are those the new policy samples after that prefix.
        fresh = Engine(make_runner(updated, max_context=96), config=EngineConfig(max_batch=1, max_context=96))
        prefix = dataclasses.replace(
            completion,
            token_ids=completion.token_ids[:cut],
            logprobs=completion.logprobs[:cut],
            processed_logprobs=completion.processed_logprobs[:cut],
            entropies=completion.entropies[:cut],
            accepted_depths=completion.accepted_depths[:cut],
        )
        assert fresh.generate([dataclasses.replace(request, resume=prefix)])[0].token_ids == completion.token_ids


def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing() -> None:
    model = tiny_model(tied=True)
    updating = engine(model)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    checksum = updating.update_weights(own.items(), version=1).checksum
    bad = dict(own)
    del bad["model.norm.weight"]
    bad["model.layers.7.mlp.up_proj.weight"] = torch.zeros(1)
    bad["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    bad["model.layers.1.mlp.up_proj.weight"] = torch.full_like(own["model.layers.1.mlp.up_proj.weight"], math.nan)
    with pytest.raises(ValueError, match="nothing was changed") as error:
        updating.update_weights(bad.items(), version=2)
    for name in (
        "missing tensor model.norm.weight",
        "unknown tensor model.layers.7",
        "layers.0.mlp.up_proj.weight has shape",
        "layers.1.mlp.up_proj.weight holds NaN",
    ):
        assert name in str(error.value)
    assert updating.weights_version == 1
    # A tied head may come along, but not with other values than the embedding it is.
    assert updating.update_weights([*own.items(), ("lm_head.weight", own["model.embed_tokens.weight"])], version=3).checksum == checksum
    with pytest.raises(ValueError, match=r"lm_head\.weight is tied to model\.embed_tokens\.weight"):
        updating.update_weights([*own.items(), ("lm_head.weight", own["model.embed_tokens.weight"] + 1)], version=4)


def test_requests_that_cannot_be_served_fail_alone() -> None:
    good = requests()[0]
    bad = {
        "empty prompt": dataclasses.replace(good, prompt_token_ids=()),
        "exceed the context of 96": dataclasses.replace(good, prompt_token_ids=(5,) * 90),
        "token id 61 is outside the vocabulary": dataclasses.replace(good, prompt_token_ids=(3, 61)),
        "stop strings need a tokenizer": dataclasses.replace(good, stop=("x",)),
    }
    done = engine().generate([*bad.values(), good])
    for completion, message in zip(done, bad, strict=False):
        assert completion.finish_reason == "error"
        assert message in (completion.error or "")
    assert done[-1].token_ids == engine().generate([good])[0].token_ids


def test_a_faulty_draft_fails_its_request_only() -> None:
    def script(seen: Sequence[int]) -> list[tuple[int, int]]:
        return chain([VOCAB + 3]) if tuple(seen[: len(PROMPTS[1])]) == PROMPTS[1] else chain([7])

    done = engine(drafter=ScriptedDrafter(script)).generate(requests())
    assert done[1].finish_reason == "error"
    assert f"draft token id {VOCAB + 3} is outside the vocabulary of {VOCAB}" in (done[1].error or "")
    wanted = engine().generate(requests())
    assert [done[i].token_ids for i in (0, 2, 3)] == [wanted[i].token_ids for i in (0, 2, 3)]


def test_logits_that_are_not_finite_fail_their_request_only() -> None:
    def poison(history: Tensor, logits: Tensor) -> Tensor:
        return torch.full_like(logits, math.nan) if len(history) == len(PROMPTS[1]) + 3 else logits

    mixed = requests()
    mixed[1] = dataclasses.replace(mixed[1], sampling=SamplingParams(logits_processors=(poison,)))
    done = engine(drafter=NGramDrafter()).generate(mixed)
    assert done[1].finish_reason == "error"
    assert "not finite" in (done[1].error or "")
    assert len(done[1].token_ids) <= 3
    wanted = engine().generate(requests())
    assert [done[i].token_ids for i in (0, 2, 3)] == [wanted[i].token_ids for i in (0, 2, 3)]


def test_a_drafter_for_another_vocabulary_is_refused() -> None:
    drafter = ScriptedDrafter(lambda seen: [])
    drafter.vocab_size = 99
    with pytest.raises(ValueError, match="vocabulary of 99; the model's has 61"):
        engine(drafter=drafter)


def test_a_scheme_that_is_not_exact_on_the_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match="use 'exact_match'"):
        engine(drafter=ScriptedDrafter(lambda seen: chain([7])), config={"scheme": Scheme.REJECTION}).generate(requests())


def test_drafters_get_the_states_of_their_own_requests() -> None:
    """Different lengths, shared prefixes, accepted drafts: every committed token's states arrive once, in order, and are the model's."""
    plain = engine().generate(requests())
    answers = {prompt: completion.token_ids for prompt, completion in zip(PROMPTS, plain, strict=True)}
    drafter = ScriptedDrafter(oracle(answers, 3, wrong_at=2), hidden_layers=(0, -1))
    twice = [*requests(), requests()[3]]
    engine(drafter=drafter, controller=FixedBudget(draft_length=3), config={"max_batch": 5}).generate(twice)
    model, seen = tiny_model(), {}
    for context in drafter.contexts:
        states = context.states
        assert states is not None
        for b, request in enumerate(context.requests):
            begin, end = int(states.offsets[b]), int(states.offsets[b + 1])
            if begin == end:
                continue
            assert states.positions[begin:end].tolist() == list(
                range(seen.get(request.request_id, 0), seen.get(request.request_id, 0) + end - begin)
            )
            seen[request.request_id] = seen.get(request.request_id, 0) + end - begin
            # token_ids is the live list; the first seen tokens of it are what the states belong to.
            with torch.inference_mode():
                hidden = model(torch.tensor([list(request.token_ids[: seen[request.request_id]])]), output_hidden_states=True).hidden_states
            for layer, reference in ((0, hidden[1]), (-1, hidden[-1])):
                torch.testing.assert_close(states.hidden[layer][begin:end], reference[0, -(end - begin) :], atol=2e-4, rtol=0)
    assert len(seen) == 5


def test_counts_add_up() -> None:
    sink = MemorySink()
    done = engine(drafter=NGramDrafter(), sink=sink).generate(requests(sampling=SamplingParams(temperature=0.0)))
    rounds = [event for event in sink.events if isinstance(event, RoundEvent)]
    assert sum(event.num_emitted_tokens for event in rounds) == sum(len(c.token_ids) for c in done)
    assert sum(event.num_requests for event in rounds) == sum(c.num_rounds for c in done)
    for completion in done:
        assert len(completion.token_ids) == completion.num_rounds + completion.num_accepted_tokens
    for event in rounds:
        assert all(a <= d for a, d in zip(event.accepted_by_depth, event.drafted_by_depth, strict=True))
    assert_times(rounds)


def assert_times(rounds: Sequence[Event]) -> None:
    for event in rounds:
        assert isinstance(event, RoundEvent)
        assert min(event.draft_s, event.target_s, event.verify_s, event.other_s) >= 0

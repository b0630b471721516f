"""The corners of vLLM's scheduling: outputs are the policy's own whatever became of a draft on the way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vllm import METHODS, PROMPT, VOCAB, native, sample, totals_of

KINDS = ("mtp", "block", "draft", "eagle", "dflash")


@torch.inference_mode()
def continued(model: Any, prompt: Sequence[int], length: int) -> tuple[int, ...]:
    """Greedy tokens behind a prompt."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCAB, (count, length), generator=generator).tolist()


def greedy(llm: Any, given: Sequence[Sequence[int]], length: int, **params: Any) -> list[tuple[int, ...]]:
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False, **params)
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in given], asked, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def options_of(kind: str, drafters: Path, natives: Path) -> dict[str, Any]:
    """Three tokens at most, by one of our drafters or of vLLM's own."""
    return native(kind, natives) if kind in METHODS else {"drafter": str(drafters / kind), "draft_length": 3}


@pytest.mark.parametrize("kind", KINDS)
def test_corners(kind: str, start: Callable[..., Any], drafters: Path, natives: Path, model: Any) -> None:
    """One engine with small chunks and the prefix cache on; each corner is compared with the policy itself."""
    options = {**options_of(kind, drafters, natives), "budget": "fixed:3"}
    if kind in METHODS:
        # vLLM draws drafts from a noise that all requests share; only this verifier's tokens do not depend on them.
        options["verifier"] = "gumbel"
    llm = start(options=options, max_num_batched_tokens=64, max_num_seqs=8, enable_prefix_caching=True)
    mixed = [*prompts(5, 70), *prompts(4, 33), [*PROMPT], [*PROMPT, 4], [*PROMPT]]
    expected = [continued(model, prompt, 12) for prompt in mixed]
    assert greedy(llm, mixed, 12) == expected, "chunked prefill and shared prefixes"
    assert greedy(llm, mixed, 12) == expected, "once more, from the prefix cache"
    almost_full = prompts(2, 126)
    assert greedy(llm, almost_full, 2) == [continued(model, prompt, 2) for prompt in almost_full], "prompts of the longest length - 2"
    near_the_end = [*prompts(1, 124), *prompts(1, 20)]
    found = greedy(llm, near_the_end, 8)
    assert [len(tokens) for tokens in found] == [4, 8]
    assert found == [continued(model, prompt, length) for prompt, length in zip(near_the_end, (4, 8), strict=True)]
    stop = expected[0][5]
    first = expected[0].index(stop) + 1
    assert greedy(llm, mixed[:1], 12, stop_token_ids=[stop]) == [expected[0][:first]], "a stop token inside a draft"
    check_aborts(llm, mixed, expected)
    check_seeds(llm)
    seen = totals_of(llm)
    assert seen["rollout_spec/num_failed_requests"] == 0
    assert seen["rollout/spec_accept_rate"] > 0


@pytest.mark.parametrize("kind", ["mtp", "draft", "dflash"])
def test_preempted_requests_go_on_where_they_were(kind: str, start: Callable[..., Any], drafters: Path, natives: Path, model: Any) -> None:
    """With too few blocks for all, requests lose their K/V in the middle and are computed anew, their drafts with them."""
    options = {**options_of(kind, drafters, natives), "budget": "fixed:3"}
    llm = start(options=options, num_gpu_blocks_override=14, enable_prefix_caching=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, list[str]()

    def counting(request: Any, *args: Any, **settings: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **settings)

    scheduler._preempt_request = counting
    given = prompts(8, 30)
    assert greedy(llm, given, 60) == [continued(model, prompt, 60) for prompt in given]
    assert preempted
    assert totals_of(llm)["rollout/spec_accept_rate"] > 0


def test_a_stop_string_inside_a_draft_ends_the_text_before_it(start: Callable[..., Any], repository_root: Path, tmp_path: Path) -> None:
    """The worker knows no text: it learns by an abort that a request is over, with more tokens accepted than were asked for."""
    from vllm import SamplingParams

    subprocess.run([sys.executable, repository_root / "examples" / "verl_grpo_tiny" / "prepare.py", tmp_path, "32"], check=True)
    options = {"drafter": "suffix", "draft_length": 3, "budget": "fixed:3"}
    llm = start(options=options, model=str(tmp_path / "model"), skip_tokenizer_init=False)

    def ask(**params: Any) -> Any:
        (output,) = llm.generate("abcabcabc", SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, **params), use_tqdm=False)
        return output.outputs[0]

    whole = ask()
    assert ask().token_ids == whole.token_ids
    assert totals_of(llm)["rollout/spec_accept_rate"] > 0, "the second time the drafter knows the first"
    stops = {char for char in whole.text[8:40] if char.isascii() and char.isprintable() and char not in whole.text[:8]}
    assert stops, f"no letter to stop at in {whole.text!r}"
    for stop in stops:
        ended = ask(stop=[stop])
        assert (ended.text, ended.finish_reason) == (whole.text.partition(stop)[0], "stop")


def check_aborts(llm: Any, given: Sequence[Sequence[int]], expected: Sequence[tuple[int, ...]]) -> None:
    """Requests that are cut with drafts in flight leave the others, and those that come after them, as they were."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    asked = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(given[:4]):
        engine.add_request(f"cut-{index}", {"prompt_token_ids": list(prompt)}, asked)
    done: dict[str, tuple[int, ...]] = {}
    for step in range(60):
        if step == 9:
            engine.abort_request(["cut-0", "cut-2"])
        done |= {output.request_id: tuple(output.outputs[0].token_ids) for output in engine.step() if output.finished}
        if not engine.has_unfinished_requests():
            break
    assert {name: tokens for name, tokens in done.items() if len(tokens) == 12} == {"cut-1": expected[1], "cut-3": expected[3]}
    assert greedy(llm, given[:4], 12) == list(expected[:4])


def check_seeds(llm: Any) -> None:
    """A seeded request is the same beside unseeded ones, whose samples differ from each other."""
    from vllm import SamplingParams

    (long,) = prompts(1, 90)  # two chunks

    def ask(seeds: Sequence[int | None]) -> list[tuple[int, ...]]:
        params = [SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, detokenize=False, seed=seed) for seed in seeds]
        given = [{"prompt_token_ids": list(PROMPT)}] * (len(seeds) - 1) + [{"prompt_token_ids": long}]
        outputs = llm.generate(given, params, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    first, second = ask([7, None, 8, None, 9]), ask([7, None, 8, None, 9])
    assert (first[0], first[2], first[4]) == (second[0], second[2], second[4])
    assert len({*first, *second}) == 7
    assert len(set(sample(llm, 6, 10, temperature=1.0))) == 6, "n > 1"


@pytest.mark.parametrize("kind", ["mtp", "draft", "dflash"])
def test_requests_are_told_of_as_vllm_counts_them_and_with_their_entropy(
    kind: str, start: Callable[..., Any], drafters: Path, natives: Path, model: Any, tmp_path: Path
) -> None:
    from vllm import SamplingParams

    from rollout_spec.events import RequestEvent, RoundEvent
    from rollout_spec.sinks import read_events

    options = {**options_of(kind, drafters, natives), "budget": "fixed:3", "events": str(tmp_path)}
    llm = start(options=options, per_request_spec_decode_metrics="detailed")
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": list(PROMPT)}, {"prompt_token_ids": list(PROMPT[:9])}], params, use_tqdm=False)
    records = {record["request_id"]: record for record in llm.collective_rpc("rollout_spec_requests")[0]}
    assert len(records) == len(outputs)
    for output in outputs:
        own, theirs = records[output.request_id], output.outputs[0].spec_decode_metrics
        assert own["num_draft_tokens"] == theirs.num_draft_tokens
        # vLLM also counts what its end cut off.
        assert 0 <= sum(theirs.per_step_accepted) - own["num_accepted_tokens"] <= 3
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        with torch.inference_mode():
            law = model(torch.tensor([tokens])).logits[0, len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
        assert own["mean_entropy"] == pytest.approx(float(-(law.exp() * law).sum(-1).mean()), abs=1e-3)
    llm.collective_rpc("rollout_spec_close")
    events = list(read_events(tmp_path / "replica-0.jsonl"))
    assert sum(event.num_tokens for event in events if isinstance(event, RequestEvent)) == 40
    rounds = [event for event in events if isinstance(event, RoundEvent)]
    assert sum(event.num_emitted_tokens for event in rounds) == 38  # the prompts' steps gave the first two
    assert sum(event.num_draft_tokens for event in rounds) == sum(record["num_draft_tokens"] for record in records.values())


@pytest.mark.parametrize(("kind", "mode"), [("mtp", "raw_logprobs"), ("mtp", "processed_logprobs"), ("draft", "processed_logprobs")])
def test_logprobs_are_of_the_law_that_they_say(
    kind: str, mode: str, start: Callable[..., Any], drafters: Path, natives: Path, model: Any
) -> None:
    from vllm import SamplingParams

    llm = start(options={**options_of(kind, drafters, natives), "budget": "fixed:3"}, logprobs_mode=mode)
    params = SamplingParams(temperature=0.5, max_tokens=16, ignore_eos=True, logprobs=0, detokenize=False)
    output = llm.generate({"prompt_token_ids": list(PROMPT)}, params, use_tqdm=False)[0].outputs[0]
    tokens = list(output.token_ids)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    expected = (logits / (0.5 if mode == "processed_logprobs" else 1.0)).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    found = torch.tensor([entry[token].logprob for entry, token in zip(output.logprobs, tokens, strict=True)])
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["mtp", "draft"])
def test_block_verification_accepts_no_less_than_the_chain(kind: str, start: Callable[..., Any], drafters: Path, natives: Path) -> None:
    """vLLM's own option of that name does nothing in this runner; ours is one scheme among others."""
    rates = {}
    for verifier in ("block", "rejection"):
        llm = start(options={**options_of(kind, drafters, natives), "budget": "fixed:3", "verifier": verifier})
        sample(llm, 300, 24, temperature=1.0)
        seen = totals_of(llm)
        rates[verifier] = (seen["rollout/spec_accept_length"], seen["rollout_spec/num_tokens"])
    error = 2 / min(tokens for _, tokens in rates.values()) ** 0.5  # of a mean length: its variance is below 1
    assert rates["block"][0] > rates["rejection"][0] - 2 * error, rates

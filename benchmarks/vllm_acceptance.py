"""Whether a drafter's tokens are accepted as often inside vLLM as in the embedded engine.

    python benchmarks/vllm_acceptance.py --model FOLDER --drafters runs/mtp/drafter runs/block/drafter --json FILE

Chains under block verification at T = 1, a request at a time, each engine in a process of its own; run again, drafters that are in the file
are kept. Two comparisons:

*Free*: both engines sample each prompt with seeds of their own. Acceptance by depth, prompts drawn again for 95 % intervals, and the
interval of the difference, paired by prompt.

*Coupled*: the embedded engine takes the same seeds and begins behind vLLM's first token, which vLLM samples without a draft. Noise is a
function of seed and position, so that the same hidden states must give the same drafts, the same acceptances and the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from paired import Sums, difference_interval, mean_interval
from transformers import AutoTokenizer

from rollout_spec.bench import machine
from rollout_spec.events import Event, RequestEvent, RoundEvent
from rollout_spec.files import resumed, write_text
from rollout_spec.prompts import load_prompts

Prompt = tuple[int, ...]
_FREE_SEEDS, _SHARED_SEEDS = 1_000_000, 2_000_000  # the embedded engine's own, and vLLM's


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A sample to take, begun behind ``prompt``."""

    prompt: Prompt
    seed: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What became of it: by round, how many drafted tokens were reached and accepted at each depth."""

    token_ids: tuple[int, ...]
    reached: tuple[tuple[int, ...], ...]
    accepted: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What both engines run."""

    model: str
    drafter: str
    draft_length: int
    dtype: str
    max_context: int


def with_vllm(setting: Setting, asked: Sequence[Asked]) -> list[Trace]:
    from vllm import LLM, SamplingParams

    from rollout_spec.sinks import read_events
    from rollout_spec_rl.vllm import engine_args

    with tempfile.TemporaryDirectory() as folder:
        ours = engine_args(
            drafter=setting.drafter,
            draft_length=setting.draft_length,
            budget=f"fixed:{setting.draft_length}",
            verifier="block",
            events=folder,
        )
        llm = LLM(
            model=setting.model, dtype=setting.dtype, enforce_eager=True, max_model_len=setting.max_context, max_num_seqs=1, seed=0, **ours
        )
        tokens = []
        for one in asked:
            params = SamplingParams(temperature=1.0, seed=one.seed, max_tokens=one.num_tokens, ignore_eos=True, detokenize=False)
            (output,) = llm.generate({"prompt_token_ids": list(one.prompt)}, params, use_tqdm=False)
            tokens.append(tuple(output.outputs[0].token_ids))
        llm.collective_rpc("rollout_spec_close")
        return traces(tokens, read_events(Path(folder) / "replica-0.jsonl"))


def with_embedded(setting: Setting, asked: Sequence[Asked]) -> list[Trace]:
    from rollout_spec.budget import FixedBudget
    from rollout_spec.composition import DrafterOptions, draw_for
    from rollout_spec.engine.engine import Engine, EngineConfig
    from rollout_spec.engine.load import load_model, make_runner
    from rollout_spec.engine.request import Request
    from rollout_spec.sinks.memory import MemorySink
    from rollout_spec.verify import Scheme
    from rollout_spec_rl.compose import make_drafter, make_ops

    loaded, ops, sink = load_model(setting.model, setting.dtype), make_ops(), MemorySink()
    drawn = DrafterOptions(spec=setting.drafter, draw=draw_for(Scheme.BLOCK, seeded=True, wide=False))
    engine = Engine(
        make_runner(loaded.module, max_context=setting.max_context, ops=ops),
        config=EngineConfig(max_batch=1, max_context=setting.max_context, scheme=Scheme.BLOCK),
        drafter=make_drafter(drawn, loaded, ops),
        controller=FixedBudget(draft_length=setting.draft_length),
        sink=sink,
    )
    tokens = []
    for one in asked:
        request = Request(prompt_token_ids=one.prompt, max_new_tokens=one.num_tokens, seed=one.seed, ignore_eos=True)
        (completion,) = engine.generate([request])
        if completion.finish_reason == "error":
            raise ValueError(completion.error)
        tokens.append(completion.token_ids)
    return traces(tokens, iter(sink.events))


def traces(tokens: Sequence[tuple[int, ...]], events: Iterator[Event]) -> list[Trace]:
    """From the log of requests that ran one after the other."""
    found = []
    reached: list[tuple[int, ...]] = []
    accepted: list[tuple[int, ...]] = []
    for event in events:
        if isinstance(event, RoundEvent):
            assert event.num_requests == 1
            reached.append(tuple(event.drafted_by_depth))
            accepted.append(tuple(event.accepted_by_depth))
        elif isinstance(event, RequestEvent):
            found.append(Trace(token_ids=tokens[len(found)], reached=tuple(reached), accepted=tuple(accepted)))
            reached, accepted = [], []
    assert len(found) == len(tokens)
    return found


def free(vllm: Sequence[Trace], embedded: Sequence[Trace], num_samples: int, depth: int) -> dict[str, Any]:
    """By measure, each engine's estimate and vLLM's less the embedded engine's."""

    def sums(of: Sequence[Trace], at: int | None) -> Sums:
        """By prompt, of the acceptance at a depth, or (None) of accepted tokens a round."""
        up, down = np.zeros(len(of)), np.zeros(len(of))
        for row, trace in enumerate(of):
            for reached, accepted in zip(trace.reached, trace.accepted, strict=True):
                up[row] += sum(accepted) if at is None else sum(accepted[at : at + 1])
                down[row] += 1 if at is None else sum(reached[at : at + 1])
        return Sums(sums=up.reshape(-1, num_samples).sum(1), counts=down.reshape(-1, num_samples).sum(1))

    measures = {"accepted_tokens_per_round": None, **{f"accept_rate_depth_{at + 1}": at for at in range(depth)}}
    found = {}
    for name, at in measures.items():
        ours, theirs = sums(vllm, at), sums(embedded, at)
        found[name] = {
            "vllm": asdict(mean_interval(ours.sums, ours.counts)),
            "embedded": asdict(mean_interval(theirs.sums, theirs.counts)),
            "difference": asdict(difference_interval(ours, theirs)),
            "counted": {"vllm": int(ours.counts.sum()), "embedded": int(theirs.counts.sum())},
        }
    return found


def coupled(vllm: Sequence[Trace], embedded: Sequence[Trace]) -> dict[str, int]:
    """How many requests are equal in every token, draft and acceptance, and what the others share up to where they part."""
    equal = shared = rounds = 0
    for ours, theirs in zip(vllm, embedded, strict=True):
        equal += (ours.token_ids[1:], ours.reached, ours.accepted) == (theirs.token_ids, theirs.reached, theirs.accepted)
        pairs = zip(ours.token_ids[1:], theirs.token_ids, strict=True)
        shared += next((place for place, (mine, other) in enumerate(pairs) if mine != other), len(theirs.token_ids))
        rounds += len(ours.reached)
    num_tokens = sum(len(trace.token_ids) for trace in embedded)
    return {"requests": len(vllm), "equal_requests": equal, "tokens": num_tokens, "tokens_before_a_difference": shared, "rounds": rounds}


def behind_first_token(asked: Sequence[Asked], found: Sequence[Trace]) -> list[Asked]:
    """What is left to sample when the first token, which vLLM samples without a draft, is there."""
    pairs = zip(asked, found, strict=True)
    return [Asked(prompt=(*one.prompt, trace.token_ids[0]), seed=one.seed, num_tokens=one.num_tokens - 1) for one, trace in pairs]


def in_process(run: Any, setting: Setting, asked: Sequence[Asked]) -> list[Trace]:
    """In a process that ends afterwards, with all the memory that it took."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found: list[Trace] = pool.submit(run, setting, asked).result()
    return found


def compare(setting: Setting, prompts: Sequence[Prompt], num_samples: int, num_tokens: int) -> dict[str, Any]:
    many = [prompt for prompt in prompts for _ in range(num_samples)]
    asked = [Asked(prompt=prompt, seed=_SHARED_SEEDS + index, num_tokens=num_tokens) for index, prompt in enumerate(many)]
    vllm = in_process(with_vllm, setting, asked)
    print(f"{setting.drafter}: vLLM is done", flush=True)
    # The free samples and those that follow vLLM's, in one process.
    alone = [Asked(prompt=prompt, seed=_FREE_SEEDS + index, num_tokens=num_tokens) for index, prompt in enumerate(many)]
    embedded = in_process(with_embedded, setting, [*alone, *behind_first_token(asked, vllm)])
    return {
        "free": free(vllm, embedded[: len(alone)], num_samples, setting.draft_length),
        "coupled": coupled(vllm, embedded[len(alone) :]),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--drafters", nargs="+", required=True, help="folders of trained drafters")
    parser.add_argument("--prompts", default="gsm_symbolic:24")
    parser.add_argument("--samples", type=int, default=2, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    options = parse()
    for name, value in (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    prompts = [tuple(prompt.token_ids) for prompt in load_prompts(options.prompts, AutoTokenizer.from_pretrained(options.model))]
    context = max(map(len, prompts)) + options.tokens
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "drafters")}
    held = resumed(options.json, {"settings": settings, "machine": machine()})
    found = held.setdefault("found", {})
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for drafter in options.drafters:
        if drafter not in found:
            setting = Setting(
                model=options.model, drafter=drafter, draft_length=options.draft_length, dtype=options.dtype, max_context=context
            )
            found[drafter] = compare(setting, prompts, options.samples, options.tokens)
            write_text(options.json, json.dumps(held, indent=2) + "\n")
        print(json.dumps(found[drafter], indent=2), flush=True)


if __name__ == "__main__":
    main()

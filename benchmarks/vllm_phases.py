"""Where the time of a vLLM step goes with our drafters: milliseconds by phase, beside a step without speculation.

    python benchmarks/vllm_phases.py --model FOLDER --drafters suffix runs/mtp/drafter --json FILE

Every variant runs in a process of its own, engine and runner in that same process; run again, those that are in the file are kept.
Phases are exclusive: what one calls is not its own.

    engine   vLLM's scheduler, its outputs and its bookkeeping
    forward  the target's forward over the committed and the drafted rows, inputs and logits included
    process  temperature, truncation and log-softmax of the rows, or vLLM's own sampling without our drafters
    verify   acceptance and the recovered or bonus tokens
    learn    hidden states taken in, entropy and acceptance told to the monitor, events
    decide   the budget
    draft    the drafter
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rollout_spec.bench import machine
from rollout_spec.files import resumed, write_text
from rollout_spec.prompts import load_prompts

NONE = "none"
PHASES = ("engine", "forward", "process", "verify", "learn", "decide", "draft")


class Clock:
    """Seconds by phase; within a phase another one's seconds are that one's."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._now, self._open, self._since = now, list[str](), 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Charge every call of a method of an object or a class to a phase."""
        original = getattr(owner, method)

        def timed(*args: Any, **named: Any) -> Any:
            with self.phase(name):
                return original(*args, **named)

        setattr(owner, method, timed)

    def _charge(self) -> None:
        now = self._now()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


def watch_engine(llm: Any, clock: Clock) -> None:
    """Ours are there only where our drafter runs."""
    from rollout_spec_rl.vllm.proposer import SpecProposer

    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    clock.watch(llm.llm_engine, "step", "engine")
    clock.watch(runner, "execute_model", "forward")
    clock.watch(runner, "_sample", "process")
    proposer = getattr(runner, "drafter", None)
    if isinstance(proposer, SpecProposer):
        speculator = proposer.speculator
        clock.watch(speculator, "verify", "verify")
        clock.watch(runner, "propose_draft_token_ids", "learn")
        clock.watch(speculator.pilot, "decide", "decide")
        clock.watch(speculator.drafter, "propose", "draft")


def measure(drafter: str, prompts: Sequence[tuple[int, ...]], options: dict[str, Any]) -> dict[str, Any]:
    """By number of requests: medians over turns of milliseconds a step, and what a step emitted. The first turn warms up."""
    from vllm import LLM, SamplingParams

    from rollout_spec_rl.vllm import engine_args

    length = options["draft_length"]
    ours = {} if drafter == NONE else engine_args(drafter=drafter, draft_length=length, budget=options["budget"])
    llm = LLM(
        model=options["model"],
        dtype=options["dtype"],
        enforce_eager=True,
        max_model_len=max(map(len, prompts)) + options["tokens"],
        max_num_seqs=max(options["requests"]),
        enable_prefix_caching=False,
        seed=0,
        **ours,
    )
    clock = Clock()
    watch_engine(llm, clock)
    params = SamplingParams(temperature=1.0, max_tokens=options["tokens"], ignore_eos=True, detokenize=False)
    found = {}
    for number in options["requests"]:
        turns = []
        for turn in range(options["turns"] + 1):
            for index in range(number):
                prompt = prompts[(turn * number + index) % len(prompts)]
                llm.llm_engine.add_request(f"{number}-{turn}-{index}", {"prompt_token_ids": list(prompt)}, params)
            llm.llm_engine.step()  # the prompts
            clock.seconds = dict.fromkeys(PHASES, 0.0)
            steps = 0
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
                steps += 1
            if turn:
                turns.append({"steps": steps, **{name: 1000 * seconds / steps for name, seconds in clock.seconds.items()}})
        # The prompts' step gave each request its first token.
        emitted = number * (options["tokens"] - 1)
        found[str(number)] = {
            "ms_per_step": {name: statistics.median(turn[name] for turn in turns) for name in PHASES},
            "ms_in_all": [sum(turn[name] for name in PHASES) for turn in turns],
            "tokens_per_step": emitted / statistics.median(turn["steps"] for turn in turns),
        }
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--drafters", nargs="+", required=True, help="suffix, ngram, or folders of trained drafters")
    parser.add_argument("--prompts", default="gsm_symbolic:32")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--budget", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    options = parse()
    for name, value in (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    prompts = [tuple(prompt.token_ids) for prompt in load_prompts(options.prompts, AutoTokenizer.from_pretrained(options.model))]
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "drafters")}
    held = resumed(options.json, {"settings": settings, "machine": machine()})
    found = held.setdefault("found", {})
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for drafter in (NONE, *options.drafters):
        if drafter not in found:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                found[drafter] = pool.submit(measure, drafter, prompts, settings).result()
            write_text(options.json, json.dumps(held, indent=2) + "\n")
        for number, figures in found[drafter].items():
            spent = "  ".join(f"{name} {ms:.1f}" for name, ms in figures["ms_per_step"].items())
            print(f"{drafter}, {number} requests: {figures['tokens_per_step']:.2f} tokens a step; ms: {spent}", flush=True)


if __name__ == "__main__":
    main()

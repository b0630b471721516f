"""vLLM without speculation, with its own, and with ours: the same prompts in turns, at several numbers of requests.

    python run.py --model FOLDER --prompts gsm_symbolic:32 --mtp runs/mtp/drafter --json compared.json

Every variant runs in a process of its own that stays up; each round lets all of them generate one after the other, so that what else the
machine does hits them alike. A figure is the median over rounds, of the ratios to no speculation too; seconds are generation's alone.

The file is written after every round, with all answers so far. The same command goes on where an earlier one was cut, also with more
--rounds: whole rounds are kept, the one that was cut is made again. Engines start anew then and warm up anew; what `suffix` remembered
and `auto` measured is gone with the old ones, so `warmed_before_round` says in the file where that was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollout_spec.bench import machine
from rollout_spec.files import resumed, write_text

VARIANTS = ("none", "vllm_ngram", "vllm_draft_model", "suffix", "mtp", "block")

Answer = dict[str, Any]  # of one variant in one round: seconds, tokens, vLLM's counters and ours


def engine_settings(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of vLLM's LLM for one variant."""
    from rollout_spec_rl.vllm import engine_args

    if variant == "none":
        return {}
    if variant == "vllm_ngram":
        own = {"method": "ngram", "num_speculative_tokens": args.draft_length, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
        return {"speculative_config": own}
    if variant == "vllm_draft_model":
        own = {"method": "draft_model", "model": args.model, "num_speculative_tokens": args.draft_length}
        return {"speculative_config": {**own, "draft_sample_method": "probabilistic"}}
    drafter = "suffix" if variant == "suffix" else getattr(args, variant)
    return engine_args(drafter=drafter, draft_length=args.draft_length, budget=args.budget)


def serve(args: argparse.Namespace) -> None:
    """One variant: reads "number of requests, seed" a line, generates, and answers with a line of JSON. The answers go to a pipe of
    their own, for vLLM prints to the ordinary output."""
    answers = os.fdopen(args.answers, "w", buffering=1)
    from vllm import LLM, SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in json.loads(Path(args.token_ids).read_text())]
    llm = LLM(
        model=args.model,
        dtype=args.dtype,
        enforce_eager=True,
        max_model_len=args.max_model_len,
        max_num_seqs=max(args.requests),
        enable_prefix_caching=False,  # the same prompts come again every round
        disable_log_stats=False,
        seed=0,
        **engine_settings(args.serve, args),
    )
    print(json.dumps({"ready": args.serve}), file=answers)
    for line in sys.stdin:
        number, seed = map(int, line.split())
        params = SamplingParams(temperature=args.temperature, max_tokens=args.tokens, ignore_eos=True)
        chosen = [prompts[(seed + i) % len(prompts)] for i in range(number)]
        before = counters(llm)
        began = time.perf_counter()
        outputs = llm.generate(chosen, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        spent = {name: value - before.get(name, 0.0) for name, value in counters(llm).items()}
        ours = llm.collective_rpc("rollout_spec_metrics")[0] if args.serve in ("suffix", "mtp", "block") else {}
        print(json.dumps({"seconds": seconds, "num_tokens": num_tokens, "vllm": spent, "ours": ours}), file=answers)


def counters(llm: Any) -> dict[str, float]:
    """vLLM's own counters of speculation."""
    return {metric.name: float(metric.value) for metric in llm.get_metrics() if "spec_decode" in metric.name and hasattr(metric, "value")}


class Served:
    """A variant's process."""

    def __init__(self, variant: str, argv: list[str], token_ids: Path) -> None:
        read, write = os.pipe()
        command = [sys.executable, __file__, *argv, "--serve", variant, "--answers", str(write), "--token-ids", str(token_ids)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, pass_fds=(write,), text=True)
        os.close(write)
        self._answers = os.fdopen(read)
        self._answer()

    def generate(self, number: int, seed: int) -> Answer:
        assert self._process.stdin is not None
        print(number, seed, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Answer:
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"vLLM ended with code {self._process.wait()}; what it said stands above")
        answer: Answer = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Comparison:
    """Answers by number of requests and variant, in a file that is whole after every round."""

    def __init__(self, path: Path, about: Mapping[str, Mapping[str, Any]], report: Callable[[str], None]) -> None:
        """about: settings and machine. ValueError if the file is there and was made with others."""
        self._path, self._report = path, report
        self._held = resumed(path, about)
        self._variants: list[str] = self._held["settings"]["variants"]
        self._requests: list[int] = self._held["settings"]["requests"]
        numbers = [str(number) for number in self._requests]
        self._answers: dict[str, dict[str, list[Answer]]] = self._held.setdefault(
            "answers", {number: {variant: [] for variant in self._variants} for number in numbers}
        )
        self._warmed: dict[str, list[int]] = self._held.setdefault("warmed_before_round", {number: [] for number in numbers})

    def missing(self, num_rounds: int) -> list[int]:
        """Numbers of requests that have fewer rounds."""
        return [number for number in self._requests if self._counted(number) < num_rounds]

    def run(self, num_rounds: int, generate: Callable[[str, int, int], Answer]) -> None:
        """The rounds that are missing; generate takes a variant, the number of requests and a seed."""
        for number in self.missing(num_rounds):
            first = self._counted(number) + 1
            self._report(f"{number} requests: warming up for round {first} of {num_rounds}")
            self._round(number, 0, generate)
            self._warmed[str(number)].append(first)
            for index in range(first, num_rounds + 1):
                answers = self._round(number, index, generate)
                for variant, answer in answers.items():
                    self._answers[str(number)][variant].append(answer)
                write_text(self._path, json.dumps({**self._held, "found": self.figures()}, indent=2) + "\n")
                rates = ", ".join(f"{variant} {rate(answers[variant]):.1f}" for variant in self._variants)
                self._report(f"{number} requests, round {index} of {num_rounds}: {rates} tok/s")

    def figures(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Medians by number of requests and variant, and of what each is to the variant without speculation; of what is there."""
        found = {}
        for number in self._requests:
            if not self._counted(number):
                continue
            answers = self._answers[str(number)]
            found[str(number)] = {variant: summary(own, answers.get("none")) for variant, own in answers.items()}
        return found

    def _counted(self, number: int) -> int:
        return len(self._answers[str(number)][self._variants[0]])

    def _round(self, number: int, index: int, generate: Callable[[str, int, int], Answer]) -> dict[str, Answer]:
        """Every variant once; another one begins each time."""
        first = index % len(self._variants)
        return {variant: generate(variant, number, index) for variant in (*self._variants[first:], *self._variants[:first])}


def compare(comparison: Comparison, args: argparse.Namespace, argv: list[str]) -> None:
    """Starts an engine for every variant and runs the rounds that are missing."""
    from transformers import AutoTokenizer

    from rollout_spec.prompts import load_prompts

    token_ids = Path(args.json).with_suffix(".prompts.json")
    token_ids.parent.mkdir(parents=True, exist_ok=True)
    prompts = load_prompts(args.prompts, AutoTokenizer.from_pretrained(args.model))
    write_text(token_ids, json.dumps([list(prompt.token_ids) for prompt in prompts]))
    with ExitStack() as running:
        served = {}
        for variant in args.variants:
            report(f"starting {variant}")
            served[variant] = Served(variant, argv, token_ids)
            running.callback(served[variant].close)
        comparison.run(args.rounds, lambda variant, number, seed: served[variant].generate(number, seed))


def rate(answer: Answer) -> float:
    """Tokens a second."""
    return float(answer["num_tokens"] / answer["seconds"])


def summary(answers: list[Answer], plain: list[Answer] | None) -> dict[str, Any]:
    """Against the variant without speculation round by round: what slows the machine for a minute slows both."""
    rates = sorted(map(rate, answers))
    last = answers[-1]
    return {
        "tokens_per_s": statistics.median(rates),
        "least": rates[0],
        "most": rates[-1],
        "against_none": plain and statistics.median(rate(own) / rate(none) for own, none in zip(answers, plain, strict=True)),
        "vllm": last["vllm"],
        "ours": last["ours"],
    }


def report(line: str) -> None:
    """Progress; vLLM writes to standard error, too."""
    print(line, file=sys.stderr, flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--prompts", required=True, help="as rollout-spec takes them: gsm_symbolic:32, human_eval, a file")
    parser.add_argument("--json", required=True, help="where the figures go, and where an earlier run left its own")
    parser.add_argument("--mtp", help="directory of a trained MTP head")
    parser.add_argument("--block", help="directory of a trained block-diffusion head")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="default: all that are possible")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--budget", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=1024)
    for name, kind in (("--serve", str), ("--answers", int), ("--token-ids", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    possible = [name for name in VARIANTS if name not in ("mtp", "block") or getattr(args, name)]
    args.variants = args.variants or possible
    if set(args.variants) - set(possible):
        parser.error("--variants mtp and block need --mtp and --block: the directories of trained drafters")
    return args


def main() -> None:
    argv = sys.argv[1:]
    args = parse(argv)
    for name, value in (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_CPU_KVCACHE_SPACE", "2"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    if args.serve:
        serve(args)
        return
    # More rounds are the same comparison; everything else decides what is compared.
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "rounds", "serve", "answers", "token_ids")}
    try:
        comparison = Comparison(Path(args.json), {"settings": settings, "machine": machine()}, report)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if comparison.missing(args.rounds):
        compare(comparison, args, argv)
    for number, by_variant in comparison.figures().items():
        for variant, figures in by_variant.items():
            print(
                f"{number:>3} requests  {variant:<17}{figures['tokens_per_s']:8.1f} tok/s   x {figures['against_none'] or float('nan'):.2f}"
            )


if __name__ == "__main__":
    main()

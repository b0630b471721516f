"""What telemetry costs: rounds a second with every sink on against none, in pairs that run one after the other in one process.

    python benchmarks/telemetry.py --out benchmarks/results/telemetry.json

One request at a time without a draft, in bfloat16: the shortest rounds there are, so the largest share. Sinks whose package is missing
are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from rollout_spec.bench import machine
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import load_model, make_runner
from rollout_spec.engine.request import Request
from rollout_spec.events import EventSink, RoundEvent
from rollout_spec.prompts import load_prompts
from rollout_spec.session import set_threads
from rollout_spec.sinks import JsonlSink, TeeSink
from rollout_spec.sinks.specs import SinkPlace, open_telemetry
from rollout_spec_rl.compose import make_ops

PACKAGES = {"prometheus": "prometheus_client", "tensorboard": "tensorboard", "wandb": "wandb"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    os.environ["WANDB_MODE"], os.environ["WANDB_SILENT"] = "offline", "true"
    set_threads(arguments.threads)
    loaded = load_model("smollm2-135m", "bfloat16")
    prompt = load_prompts("gsm_symbolic:1", loaded.tokenizer)[0]
    runner = make_runner(loaded.module, max_context=512, ops=make_ops())
    sinks = [name for name, package in PACKAGES.items() if find_spec(package) is not None]
    with tempfile.TemporaryDirectory() as folder:
        place = SinkPlace(folder=Path(folder) / "run")
        telemetry = open_telemetry(JsonlSink(place.folder / "events.jsonl"), sinks, place)
        with closing(telemetry):
            engines = {True: _engine(runner, telemetry), False: _engine(runner, TeeSink())}
            rates = {on: [_rounds_a_second(engine, prompt.token_ids, arguments.tokens)] for on, engine in engines.items()}
            for pair in range(arguments.pairs):
                for on in (pair % 2 == 0, pair % 2 == 1):
                    rates[on].append(_rounds_a_second(engines[on], prompt.token_ids, arguments.tokens))
            lost = sum(sink.num_dropped + sink.num_failed for sink in telemetry.health())
    ratios = [on / off for on, off in zip(rates[True][1:], rates[False][1:], strict=True)]  # the first ones warm up
    low, median, high = statistics.quantiles(ratios, n=4)
    results = {
        "machine": machine(),
        "sinks": ["jsonl", *sinks],
        "pairs": arguments.pairs,
        "rounds_per_s": {"on": statistics.median(rates[True][1:]), "off": statistics.median(rates[False][1:])},
        "ratio": {"median": median, "lower_quartile": low, "upper_quartile": high},
        "emit_us": _emit_us(),
        "lost": lost,
    }
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def _engine(runner: object, sink: EventSink) -> Engine:
    return Engine(runner, config=EngineConfig(max_batch=1, max_context=512), sink=sink)  # type: ignore[arg-type]


def _rounds_a_second(engine: Engine, prompt: tuple[int, ...], num_tokens: int) -> float:
    """Of one request's rounds; its prefill is found in the cache from the second time on."""
    engine.add(Request(prompt_token_ids=prompt, max_new_tokens=num_tokens, seed=1, ignore_eos=True))
    engine.step()
    began, rounds = time.perf_counter(), 0
    while engine.has_work:
        engine.step()
        rounds += 1
    return rounds / (time.perf_counter() - began)


def _emit_us() -> float:
    """Microseconds that writing one round's line takes in the rollouts' own thread."""
    with tempfile.TemporaryDirectory() as folder, closing(JsonlSink(Path(folder) / "events.jsonl")) as sink:
        event = RoundEvent(
            round_index=0, num_requests=4, num_draft_tokens=12, num_accepted_tokens=6, num_emitted_tokens=10, drafted_by_depth=(4, 3, 2),
            accepted_by_depth=(3, 2, 1), mean_accept_prob_by_depth=(0.5, 0.5, 0.5), mean_entropy=1.0, draft_s=0.001, target_s=0.01,
            verify_s=0.001, other_s=0.001, weights_version=1, drafter="mtp", verifier="block",
        )  # fmt: skip
        began = time.perf_counter()
        for _ in range(5_000):
            sink.emit(event)
        return 1e6 * (time.perf_counter() - began) / 5_000


if __name__ == "__main__":
    main()

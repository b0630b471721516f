"""vLLM's server with our drafter, started, asked, scraped and ended as a user does it: what it answers is what the offline engine says."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1800)

PROMPT = "abcabcabc"
LENGTH = 40
SAMPLED = {"temperature": 1.0, "seed": 7}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": SAMPLED,
    "three samples": {**SAMPLED, "n": 3},
    "truncated": {"temperature": 0.7, "top_p": 0.9, "seed": 8},
}


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server of its own process; ``events`` is the folder of its log."""

    process: subprocess.Popen[str]
    port: int
    log: Path
    events: Path

    def post(self, **body: Any) -> http.client.HTTPResponse:
        given = {"model": "tiny", "prompt": PROMPT, "max_tokens": LENGTH, "ignore_eos": True, **body}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(given).encode(), headers)
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=600)
        return answer

    def ask(self, **body: Any) -> list[dict[str, Any]]:
        """The choices, in order."""
        with self.post(**body) as answer:
            choices: list[dict[str, Any]] = json.load(answer)["choices"]
        return sorted(choices, key=lambda choice: choice["index"])

    def stream(self, **body: Any) -> Iterator[str]:
        """Pieces of text as they come."""
        with self.post(stream=True, **body) as answer:
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    yield json.loads(data)["choices"][0]["text"]

    def counters(self, address: str) -> dict[str, float]:
        """Samples of a /metrics page by name, summed over their labels."""
        found: dict[str, float] = {}
        for line in urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name.partition("{")[0]] = found.get(name.partition("{")[0], 0.0) + float(value)
        return found

    @property
    def targets(self) -> Path:
        return self.events.parent / "prometheus" / f"{self.events.name}-0.json"

    def our_counters(self) -> dict[str, float]:
        ((address,),) = [entry["targets"] for entry in json.loads(self.targets.read_text())]
        return self.counters(address)


@pytest.fixture(scope="module")
def tiny(repository_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a policy with a tokenizer, and of a drafter for it."""
    from tiny_vllm import write_drafters

    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run([sys.executable, repository_root / "examples" / "verl_grpo_tiny" / "prepare.py", folder, "32"], check=True)
    write_drafters(folder / "model", folder)
    return folder


@pytest.fixture(scope="module")
def options(tiny: Path) -> dict[str, Any]:
    return {"drafter": str(tiny / "mtp"), "draft_length": 3, "budget": "fixed:3"}


@pytest.fixture(scope="module")
def offline(tiny: Path, options: dict[str, Any]) -> dict[str, list[str]]:
    """What an engine of this process says to each question."""
    from tiny_vllm import Running
    from vllm import SamplingParams

    running = Running(tiny / "model")
    llm = running.start(options=options, skip_tokenizer_init=False)
    found = {}
    for name, params in ASKED.items():
        asked = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **params)
        found[name] = [output.text for output in llm.generate(PROMPT, asked, use_tqdm=False)[0].outputs]
    running.stop()
    return found


def test_an_engine_that_ends_reports_what_still_runs(tiny: Path, options: dict[str, Any], tmp_path: Path) -> None:
    """As when vLLM gives its workers no time: the log ends with the requests, and nothing waits in a queue."""
    from tiny_vllm import Running
    from vllm import SamplingParams

    from rollout_spec.events import RequestEvent, RoundEvent
    from rollout_spec.sinks import read_events

    running = Running(tiny / "model")
    engine = running.start(options={**options, "events": str(tmp_path)}, skip_tokenizer_init=False).llm_engine
    for index in range(2):
        engine.add_request(f"cut-{index}", PROMPT, SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.0))
    for _ in range(6):
        assert not any(output.finished for output in engine.step())
    engine.engine_core.shutdown()
    running.stop()
    events = list(read_events(tmp_path / "replica-0.jsonl"))
    assert sum(isinstance(event, RoundEvent) for event in events) == 5, "after the prompts' step"
    ended = [event for event in events if isinstance(event, RequestEvent)]
    assert [(event.request_id[:5], event.finish_reason) for event in ended] == [("cut-0", "aborted"), ("cut-1", "aborted")]
    assert all(event.num_rounds == 5 for event in ended)


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server(
    tiny: Path, options: dict[str, Any], offline: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """After the offline engine has ended, for there is one at a time."""
    from rollout_spec_rl.vllm import engine_args

    folder = tmp_path_factory.mktemp("served")
    given = engine_args(**options, events=str(folder / "events"), sinks=["prometheus"])
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(tiny / "model"), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "128", "--max-num-seqs", "8", "--block-size", "32", "--shutdown-timeout", "60"]
    for name, value in given.items():
        command += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
    # As users start it: engine and worker are processes of their own, other than in this directory's tests.
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = folder / "server.log"
    with log.open("w") as out:
        # A session of its own: vLLM's other processes outlive a server that is killed.
        process = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=environment, start_new_session=True)
    served = Served(process=process, port=port, log=log, events=folder / "events")
    try:
        wait_until_up(served)
        yield served
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_up(served: Served) -> None:
    while True:
        assert served.process.poll() is None, served.log.read_text()[-8000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{served.port}/health", timeout=10).close()
        except OSError:
            time.sleep(0.5)
        else:
            return


def eventually(read: Callable[[], float], wanted: float) -> None:
    """Counters are delivered behind the answers."""
    for _ in range(100):
        if read() == wanted:
            return
        time.sleep(0.1)
    assert read() == wanted


def test_answers_are_the_offline_engines_and_counters_agree(server: Served, offline: dict[str, list[str]]) -> None:
    """Greedy and seeded texts, several samples a request, truncation, streams and stop strings; vLLM's counters and ours."""
    for name, params in ASKED.items():
        assert [choice["text"] for choice in server.ask(**params)] == offline[name], name
    assert len({*offline["three samples"]}) == 3
    assert offline["seeded"] == offline["three samples"][:1], "the first of several samples has the seed itself"
    pieces = list(server.stream(**SAMPLED))
    assert "".join(pieces) == offline["seeded"][0]
    assert len(pieces) > 1
    (choice,) = server.ask(**SAMPLED, logprobs=0)
    assert len(choice["logprobs"]["token_logprobs"]) == LENGTH

    # Of the step in which a stop string's abort arrives vLLM counts nothing, so this comes first.
    theirs = server.counters(f"127.0.0.1:{server.port}")
    drafted = theirs["vllm:spec_decode_num_draft_tokens_total"]
    assert 0 < theirs["vllm:spec_decode_num_accepted_tokens_total"] < drafted
    eventually(lambda: server.our_counters()["rollout_spec_draft_tokens_total"], drafted)
    ours = server.our_counters()
    assert ours["rollout_spec_drafts_total"] == theirs["vllm:spec_decode_num_drafts_total"]
    # vLLM also counts what an end cut off: at most a draft for each of the eight samples.
    assert 0 <= theirs["vllm:spec_decode_num_accepted_tokens_total"] - ours["rollout_spec_accepted_tokens_total"] <= 3 * 8

    whole = offline["greedy"][0]
    stop = next(char for char in whole[4:] if char.isascii() and char.isprintable())
    (choice,) = server.ask(temperature=0.0, stop=[stop])
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (whole.partition(stop)[0], "stop", stop)


def test_the_log_is_whole_after_a_termination(server: Served) -> None:
    """Last of all: a request that still runs is drained, the sinks deliver, and the address is no longer announced."""
    from rollout_spec.events import RequestEvent, RoundEvent
    from rollout_spec.sinks import read_events

    pieces = server.stream(temperature=0.0, max_tokens=100)
    first = next(pieces)
    server.process.send_signal(signal.SIGTERM)
    rest = list(pieces)
    assert server.process.wait(timeout=600) == 0, server.log.read_text()[-8000:]
    events = list(read_events(server.events / "replica-0.jsonl"))
    requests = [event for event in events if isinstance(event, RequestEvent)]
    rounds = [event for event in events if isinstance(event, RoundEvent)]
    assert [event.num_tokens for event in requests if event.num_tokens > LENGTH] == [100], (first, rest)
    assert len(requests) == 10, "four questions with six samples, a stream, a stop string, log-probabilities, and this one"
    assert sum(event.num_draft_tokens for event in rounds) == sum(event.num_draft_tokens for event in requests)
    assert not server.targets.exists()

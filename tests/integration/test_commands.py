"""The commands as a user runs them, on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from rollout_spec.cli import app
from rollout_spec.events import RequestEvent
from rollout_spec.job import SCHEMA
from rollout_spec.sinks import read_events
from rollout_spec_rl.compose import COMPOSITION

COMMAND = [sys.executable, "-c", "from rollout_spec_rl.compose import main; main()"]
SUMMARY_KEYS = {
    "num_requests", "num_tokens", "wall_s", "tokens_per_s", "acceptance_rate", "acceptance_length_pooled", "acceptance_length_per_request",
    "acceptance_by_depth", "mean_entropy", "num_rounds", "seconds",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """--threads sets the process's threads, and these commands run in this process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(*arguments: str | Path, ok: bool = True) -> Result:
    done = CliRunner().invoke(app, [*map(str, arguments)], obj=COMPOSITION)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert (done.exit_code == 0) is ok, done.output
    return done


def rollout(tiny_dir: Path, prompts: Path | str, out: Path, *more: str | Path, ok: bool = True) -> Result:
    basics = ("rollout", "--model", tiny_dir, "--prompts", prompts, "--out", out, "--max-new-tokens", "24", "--threads", "1")
    return run(*basics, *more, ok=ok)


def rows(out: Path) -> list[dict[str, object]]:
    table: list[dict[str, object]] = pq.read_table(out / "rollouts.parquet").to_pylist()
    return table


def tokens(out: Path) -> dict[tuple[object, object], object]:
    return {(row["prompt_id"], row["sample_index"]): row["token_ids"] for row in rows(out)}


def test_a_rollout_leaves_its_three_files(tiny_dir: Path, prompts_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rollout(tiny_dir, prompts_file, out, "-n", "3", "--drafter", "ngram", "--stop", "zz")
    assert {path.name for path in out.iterdir()} == {"rollouts.parquet", "events.jsonl", "summary.json", "settings.json", "budget.json"}
    found = rows(out)
    assert len(found) == 15
    assert set(found[0]) == set(SCHEMA.names)
    for row in found:
        assert isinstance(row["token_ids"], list)
        for column in ("logprobs", "processed_logprobs", "entropies", "accepted_depths"):
            assert len(row[column]) == len(row["token_ids"])  # type: ignore[arg-type]
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary) >= SUMMARY_KEYS
    assert summary["num_tokens"] == sum(len(row["token_ids"]) for row in found)  # type: ignore[arg-type]
    assert set(summary["seconds"]) >= {"draft", "target", "verify", "other"}
    assert len(read_events(out / "events.jsonl")) > 15


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "self", "self:0.7"])
def test_a_seed_gives_the_same_tokens_with_and_without_speculation(
    drafter: str, tiny_dir: Path, prompts_file: Path, tmp_path: Path
) -> None:
    common = ("-n", "2", "--seed", "7", "--verifier", "gumbel")
    rollout(tiny_dir, prompts_file, tmp_path / "none", *common, "--drafter", "none", "--max-batch", "1")
    for max_batch in ("1", "8"):
        rollout(tiny_dir, prompts_file, tmp_path / max_batch, *common, "--drafter", drafter, "--max-batch", max_batch)
        assert tokens(tmp_path / max_batch) == tokens(tmp_path / "none")


def test_a_killed_rollout_resumes_without_losing_a_finished_sample(tiny_dir: Path, prompts_file: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    common = ("-n", "40", "--seed", "1", "--max-batch", "2", "--drafter", "suffix")
    rollout(tiny_dir, prompts_file, whole, *common)
    arguments = (
        "rollout",
        "--model",
        tiny_dir,
        "--prompts",
        prompts_file,
        "--out",
        out,
        "--max-new-tokens",
        "24",
        "--threads",
        "1",
        *common,
    )
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = out / "journal.jsonl"
    deadline = time.monotonic() + 120
    while (not journal.exists() or journal.read_text().count("\n") < 12) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with journal.open("a") as file:
        file.write('{"torn')
    kept = {f"{row['prompt_id']}/{row['sample_index']}" for row in map(json.loads, journal.read_text().splitlines()[:-1])}
    assert len(kept) >= 12
    num_events = len(read_events(out / "events.jsonl"))
    assert not (out / "rollouts.parquet").exists()
    refused = rollout(tiny_dir, prompts_file, out, *common, ok=False)
    assert "--resume" in refused.stderr
    different = rollout(
        tiny_dir, prompts_file, out, "-n", "41", "--seed", "1", "--max-batch", "2", "--drafter", "suffix", "--resume", ok=False
    )
    assert "num_samples: 40 then, 41 now" in " ".join(different.stderr.split())
    rollout(tiny_dir, prompts_file, out, *common, "--resume")
    assert tokens(out) == tokens(whole)
    # What was finished before the kill was not generated again.
    later = [event.request_id for event in read_events(out / "events.jsonl")[num_events:] if isinstance(event, RequestEvent)]
    assert sorted([*kept, *later]) == sorted(f"{prompt}/{sample}" for prompt, sample in tokens(whole))


def test_the_history_file_carries_one_epoch_to_the_next(tiny_dir: Path, prompts_file: Path, tmp_path: Path) -> None:
    history = tmp_path / "history.npz"
    # A fixed length: whether "auto" drafts at all depends on how fast this machine happens to be.
    common = ("-n", "2", "--temperature", "0", "--drafter", "suffix", "--budget", "fixed:4", "--history", history)
    rollout(tiny_dir, prompts_file, tmp_path / "first", *common)
    rollout(tiny_dir, prompts_file, tmp_path / "second", *common)
    first, second = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("first", "second"))
    assert tokens(tmp_path / "first") == tokens(tmp_path / "second")
    assert second["num_request_rounds"] < first["num_request_rounds"]


def test_bench_writes_every_variant(tiny_dir: Path, prompts_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    arguments = (
        "--drafters",
        "none,ngram",
        "--batch-sizes",
        "1,2",
        "--max-new-tokens",
        "8",
        "--repeats",
        "2",
        "--against",
        "hf",
        "--json",
        path,
    )
    run("bench", "--model", tiny_dir, "--prompts", prompts_file, "--threads", "1", *arguments)
    found = json.loads(path.read_text())
    assert set(found) == {"machine", "settings", "results"}
    variants = {(row["engine"], row["drafter"], row["batch_size"]) for row in found["results"]}
    assert variants == {(e, d, b) for b in (1, 2) for e, d in (("rollout_spec", "none"), ("rollout_spec", "ngram"), ("hf", "none"))}
    for row in found["results"]:
        assert row["tokens_per_s"]["min"] <= row["tokens_per_s"]["median"] <= row["tokens_per_s"]["max"]
        if row["engine"] == "rollout_spec" and row["drafter"] == "none":
            assert row["ratio_to_none"] == {"median": 1.0, "min": 1.0, "max": 1.0}
            assert row["acceptance_length_pooled"] == 1.0


def test_doctor_tells_people_and_machines(tmp_path: Path) -> None:
    assert "torch" in run("doctor").stdout
    findings = json.loads(run("doctor", "--json").stdout)
    assert {"component", "status", "detail", "mend"} == set(findings[0])
    assert "cpu kernels" in {finding["component"] for finding in findings}


WRONG: dict[str, tuple[Sequence[str], str]] = {
    "missing model": (("--model", "no/such/dir/here"), "is neither 'smollm2-135m', nor a local directory"),
    "unknown task": (("--prompts", "gsm_symbolicc:2"), "gsm_symbolic"),
    "unknown drafter": (("--drafter", "eagle9"), "--drafter 'eagle9' is neither one of none, ngram, suffix, self"),
    "self at no temperature": (("--drafter", "self:hot"), "give self, or self:T"),
    "unknown verifier": (("--verifier", "lenient"), "--verifier 'lenient' is not one of auto, rejection"),
    "verifier that is not exact": (
        ("--drafter", "ngram", "--verifier", "block"),
        "not exact on the deterministic drafts of ngram: use 'exact_match', 'gumbel'",
    ),
    "temperature": (("--temperature=-1",), "temperature must be >= 0"),
    "logit bias": (("--logit-bias", "[1]"), "--logit-bias"),
    "tree width": (("--tree-width", "2,x"), "--tree-width '2,x'"),
    "budget": (("--budget", "auto9"), "--budget 'auto9'"),
    "dtype": (("--dtype", "int4"), "dtype must be one of float32, bfloat16"),
    "threads": (("--threads", "0"), "--threads must be a positive number"),
    "history": (("--drafter", "ngram", "--history", "h.npz"), "kept by the suffix drafter only"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_words_are_one_clear_error(name: str, tiny_dir: Path, prompts_file: Path, tmp_path: Path) -> None:
    arguments, message = WRONG[name]
    done = rollout(tiny_dir, prompts_file, tmp_path / "out", *arguments, ok=False)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_prompt_that_does_not_fit_fails_alone(tiny_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("short", "x" * 600, "also short")))
    rollout(tiny_dir, prompts, tmp_path / "out", "--drafter", "ngram")
    by_reason = [row["finish_reason"] for row in rows(tmp_path / "out")]
    assert by_reason[1] == "error"
    assert "exceed the context of" in str(rows(tmp_path / "out")[1]["error"])
    assert set(by_reason[::2]) <= {"stop", "length"}


def test_a_truncated_parquet_is_named(tiny_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.parquet"
    prompts.write_bytes(b"PAR1" + bytes(64))
    done = rollout(tiny_dir, prompts, tmp_path / "out", ok=False)
    assert "prompts.parquet" in done.stderr
    assert "Traceback" not in done.stderr

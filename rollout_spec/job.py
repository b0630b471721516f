"""RolloutJob: prompts in, a folder of rollouts out; interrupted at any point it goes on without losing a finished sample.

Every finished sample is one line of journal.jsonl before the next round starts; rollouts.parquet and summary.json are made from it at
the end (written beside, then renamed) and the journal goes. settings.json says what the folder was made with.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from rollout_spec.engine.engine import Engine
from rollout_spec.engine.request import Completion, Request
from rollout_spec.files import replacing, write_text
from rollout_spec.prompts import Prompt
from rollout_spec.sampling import SamplingParams
from rollout_spec.sinks import read_events
from rollout_spec.sinks.summary import SummarySink

_TOKENS, _FLOATS = pa.list_(pa.int64()), pa.list_(pa.float32())
SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample_index", pa.int64()),
        ("prompt_token_ids", _TOKENS),
        ("token_ids", _TOKENS),
        ("text", pa.string()),
        ("logprobs", _FLOATS),
        ("processed_logprobs", _FLOATS),
        ("entropies", _FLOATS),
        ("accepted_depths", _TOKENS),
        ("finish_reason", pa.string()),
        ("error", pa.string()),
        ("num_rounds", pa.int64()),
        ("num_draft_tokens", pa.int64()),
        ("num_accepted_tokens", pa.int64()),
        ("seed", pa.int64()),
        ("weights_version", pa.int64()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What a folder of rollouts is made with; --resume refuses to mix two."""

    model: str
    prompts: str
    num_samples: int
    max_new_tokens: int
    dtype: str
    drafter: str
    verifier: str
    budget: str
    draft_length: int  # the deepest that the budget may choose
    tree_width: tuple[int, ...]
    seed: int | None
    stop: tuple[str, ...]
    sampling: Mapping[str, object]

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"--num-samples must be 1 or more, got {self.num_samples}")


class RolloutJob:
    """One folder. ``run`` may be called again after an interruption."""

    def __init__(self, out: Path, settings: JobSettings, prompts: Sequence[Prompt], sampling: SamplingParams, *, resume: bool) -> None:
        self.out, self._settings, self._prompts, self._sampling = out, settings, prompts, sampling
        self.events_path = out / "events.jsonl"
        self._journal_path = out / "journal.jsonl"
        self._prepare(resume)

    def _prepare(self, resume: bool) -> None:
        settings_path = self.out / "settings.json"
        wanted = json.loads(json.dumps(asdict(self._settings)))
        if settings_path.exists():
            if not resume:
                raise ValueError(f"{self.out} already holds rollouts: choose another --out, delete it, or continue it with --resume")
            held = json.loads(settings_path.read_text())
            different = [f"{key}: {held.get(key)!r} then, {wanted[key]!r} now" for key in wanted if held.get(key) != wanted[key]]
            if different:
                raise ValueError(
                    f"--resume with other settings than {settings_path} ({'; '.join(different)}): use the same, or another --out"
                )
        self.out.mkdir(parents=True, exist_ok=True)
        write_text(settings_path, json.dumps(wanted, indent=2) + "\n")

    @property
    def total(self) -> int:
        return len(self._prompts) * self._settings.num_samples

    def run(self, engine: Engine, on_finished: Callable[[int], None]) -> dict[str, object]:
        """Generate what is missing and write the results; on_finished gets the number of samples done so far."""
        began = time.perf_counter()
        earlier_s = _seconds_of(self.events_path) if self.events_path.exists() else 0.0
        rows = self._finished_rows()
        on_finished(len(rows))
        missing = self._submit(engine, {(row["prompt_id"], row["sample_index"]) for row in rows})
        with self._journal_path.open("a") as journal:
            for row in self._refused:
                _append(journal, row)
                rows.append(row)
            while engine.has_work:
                for completion in engine.step():
                    prompt_id, sample_index = missing[completion.request_id]
                    row = _row(completion, prompt_id, sample_index)
                    _append(journal, row)
                    rows.append(row)
                    on_finished(len(rows))
        return self._write(rows, earlier_s + time.perf_counter() - began)

    def _finished_rows(self) -> list[dict[str, Any]]:
        """Rows of the journal, else of a result that is already complete; a torn last line of the journal is dropped."""
        if self._journal_path.exists():
            lines = self._journal_path.read_text().split("\n")
            write_text(self._journal_path, "".join(line + "\n" for line in lines[:-1]))
            return [json.loads(line) for line in lines[:-1]]
        result = self.out / "rollouts.parquet"
        return pq.read_table(result).to_pylist() if result.exists() else []

    def _submit(self, engine: Engine, finished: set[tuple[object, object]]) -> dict[str, tuple[str, int]]:
        """Queue every sample that is not there yet, a prompt's samples side by side so that they share its prefill."""
        ids: dict[str, tuple[str, int]] = {}
        self._refused: list[dict[str, Any]] = []
        for prompt in self._prompts:
            for sample_index in range(self._settings.num_samples):
                if (prompt.prompt_id, sample_index) in finished:
                    continue
                seed = None if self._settings.seed is None else sample_seed(self._settings.seed, prompt.prompt_id, sample_index)
                request = Request(
                    prompt_token_ids=prompt.token_ids,
                    max_new_tokens=self._settings.max_new_tokens,
                    sampling=self._sampling,
                    seed=seed,
                    stop=self._settings.stop,
                    prompt_key=prompt.prompt_id,
                    request_id=f"{prompt.prompt_id}/{sample_index}",
                )
                refused = engine.try_add(request)
                if refused is None:
                    ids[f"{prompt.prompt_id}/{sample_index}"] = (prompt.prompt_id, sample_index)
                else:
                    self._refused.append(_row(refused, prompt.prompt_id, sample_index))
        return ids

    def _write(self, rows: list[dict[str, Any]], wall_s: float) -> dict[str, Any]:
        order = {prompt.prompt_id: place for place, prompt in enumerate(self._prompts)}
        rows.sort(key=lambda row: (order[row["prompt_id"]], row["sample_index"]))
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        with replacing(self.out / "rollouts.parquet") as beside:
            pq.write_table(table, beside)
        totals = SummarySink()
        for event in read_events(self.events_path):
            totals.emit(event)
        num_tokens = sum(len(row["token_ids"]) for row in rows)
        summary = {
            "num_requests": len(rows),
            "num_failed_requests": sum(row["finish_reason"] == "error" for row in rows),
            "num_tokens": num_tokens,
            "wall_s": wall_s,
            "tokens_per_s": num_tokens / wall_s,
            **totals.summary(),
            "settings": asdict(self._settings),
        }
        write_text(self.out / "summary.json", json.dumps(summary, indent=2) + "\n")
        self._journal_path.unlink()
        return summary


def sample_seed(seed: int, prompt_id: str, sample_index: int) -> int:
    """The seed of one sample: 62 bits that depend on nothing but the run's seed, the prompt and the sample's number."""
    digest = hashlib.sha256(f"{seed}/{prompt_id}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


def _append(journal: TextIO, row: dict[str, Any]) -> None:
    journal.write(json.dumps(row) + "\n")
    journal.flush()


def _row(completion: Completion, prompt_id: str, sample_index: int) -> dict[str, Any]:
    return {
        "prompt_id": prompt_id,
        "sample_index": sample_index,
        "prompt_token_ids": list(completion.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "logprobs": list(completion.logprobs),
        "processed_logprobs": list(completion.processed_logprobs),
        "entropies": list(completion.entropies),
        "accepted_depths": list(completion.accepted_depths),
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "num_rounds": completion.num_rounds,
        "num_draft_tokens": completion.num_draft_tokens,
        "num_accepted_tokens": completion.num_accepted_tokens,
        "seed": completion.seed,
        "weights_version": completion.weights_version,
    }


def _seconds_of(events: Path) -> float:
    """Time that earlier, interrupted runs spent in rounds and prefills."""
    totals = SummarySink()
    for event in read_events(events):
        totals.emit(event)
    return math.fsum(totals.seconds.values())

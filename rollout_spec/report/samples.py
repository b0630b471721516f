"""Samples for the viewer: every token with its text, how it came, its log-probability and the entropy it was drawn at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollout_spec.report.runs import Run

MAX_SAMPLES = 24  # a run
MAX_TOKENS = 12_000  # a run
RECOVERED, UNDRAFTED = 0, -1  # as in Completion.accepted_depths

TextOf = Callable[[Sequence[int]], list[str]]


def origins(accepted_depths: Sequence[int]) -> list[str]:
    """How each token came: "1", "2", ... (drafted, accepted at this depth), "recovered", "bonus" or "undrafted".

    A round ends with exactly one token that was not drafted: recovered after a refusal, bonus after a draft that was accepted whole,
    undrafted if there was no draft.
    """
    out = []
    in_draft = False
    for depth in accepted_depths:
        if depth > 0:
            out.append(str(depth))
        elif depth == RECOVERED:
            out.append("recovered")
        else:
            out.append("bonus" if in_draft else "undrafted")
        in_draft = depth > 0
    return out


def samples_of(run: Run, text_of: TextOf | None) -> list[dict[str, Any]]:
    """Samples spread evenly over the run's rollouts.parquet; none if there is no such file. ``text_of`` None: ids instead of texts."""
    path = run.folder / "rollouts.parquet"
    if not path.exists():
        return []
    try:
        rows = _rows(path)
    except (OSError, ValueError) as error:
        run.notes.append(f"{path.name} cannot be read: {error}")
        return []
    step = max(1, -(-len(rows) // MAX_SAMPLES))
    out: list[dict[str, Any]] = []
    num_tokens = 0
    for row in rows[::step]:
        num_tokens += len(row["token_ids"])
        if num_tokens > MAX_TOKENS and out:
            break
        out.append(_sample(row, text_of))
    return out


def _rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    columns = [
        "prompt_id",
        "sample_index",
        "token_ids",
        "processed_logprobs",
        "entropies",
        "accepted_depths",
        "finish_reason",
        "num_rounds",
    ]
    rows: list[dict[str, Any]] = pq.read_table(path, columns=columns).to_pylist()
    return [row for row in rows if row["token_ids"]]


def _sample(row: dict[str, Any], text_of: TextOf | None) -> dict[str, Any]:
    ids = row["token_ids"]
    texts = [f" {token}" for token in ids] if text_of is None else text_of(ids)
    return {
        "name": f"{row['prompt_id']}, sample {row['sample_index']}",
        "ended": row["finish_reason"],
        "rounds": row["num_rounds"],
        "ids": ids,
        "texts": texts,
        "origins": origins(row["accepted_depths"]),
        "logprobs": [round(value, 3) for value in row["processed_logprobs"]],
        "entropies": [round(value, 3) for value in row["entropies"]],
    }

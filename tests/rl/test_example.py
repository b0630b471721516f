"""The parts of the examples that are Python, without verl and vLLM."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest


def example(repository_root: Path, name: str) -> ModuleType:
    path = repository_root / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step(number: int, reward: float, ratio: float, **more: float) -> str:
    data = {
        "training/global_step": number,
        "critic/rewards/mean": reward,
        "rollout_corr/rollout_is_max": 1.0,
        "rollout_corr/rollout_is_min": ratio,
        **more,
    }
    return json.dumps({"step": number, "data": data})


def test_summary(repository_root: Path) -> None:
    summarise = example(repository_root, "summarise").summarise
    lines = [
        step(
            1, 0.25, 0.9999, **{"rollout_spec/policy_version": 1, "rollout/spec_accept_length": 1.5, "rollout_spec/num_failed_requests": 0}
        ),
        json.dumps({"step": 1, "data": {"val-core/acc": 1.0}}),
        step(
            2, 0.75, 0.999, **{"rollout_spec/policy_version": 2, "rollout/spec_accept_length": 2.5, "rollout_spec/num_failed_requests": 3}
        ),
    ]
    summary = summarise(lines)
    assert (summary["num_steps"], summary["last_step"]) == (2, 2)
    assert (summary["reward_first"], summary["reward_last"]) == (0.25, 0.75)
    assert summary["policy_versions"] == [1, 2]
    assert summary["mean"]["rollout/spec_accept_length"] == 2.0
    assert summary["largest"] == {"rollout_spec/num_failed_requests": 3}
    assert summary["largest_logprob_difference"] == pytest.approx(-math.log(0.999))
    # The policy that trains is newer than the one that sampled: their probabilities differ, and should.
    stale = step(3, 0.75, 0.5, **{"training/off_policy/trajectory_staleness_worst/max": 1})
    summary = summarise([*lines, stale])
    assert (summary["num_steps"], summary["num_steps_compared"]) == (3, 2)
    assert summary["largest_logprob_difference"] == pytest.approx(-math.log(0.999))
    assert summarise([stale])["largest_logprob_difference"] is None
    with pytest.raises(ValueError, match="no training step was logged"):
        summarise(lines[1:2])


def test_reward_is_the_share_of_digits(repository_root: Path) -> None:
    score = example(repository_root, "verl_grpo_tiny/reward").compute_score
    found = [score(data_source="sums", solution_str=text, ground_truth="3", extra_info=None) for text in ("12a4", "", "abc")]
    assert found == [0.75, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [("3 + 4 = 7\nSo she has 1,070 apples.", 1.0), ("1070\nI think", 0.0), ("The answer is 7.", 0.1), ("", 0.0), ("#### 1070.0\n", 1.0)],
)
def test_reward_of_a_word_problem(repository_root: Path, answer: str, wanted: float) -> None:
    score = example(repository_root, "verl_grpo_smollm2/reward").compute_score
    assert score(data_source="gsm_symbolic", solution_str=answer, ground_truth="1070", extra_info=None) == wanted


def test_model_and_prompts_are_made_from_nothing(repository_root: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from rollout_spec.engine.load import load_model

    prepare = example(repository_root, "verl_grpo_tiny/prepare")
    prepare.write_model(tmp_path / "model")
    prepare.write_prompts(tmp_path / "train.parquet", [(1, 2), (3, 4)])
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["3", "7"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True, return_dict=False)
    text = "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.replace("<|im_start|>", "s").replace("<|im_end|>", "e"))
    loaded = load_model(str(tmp_path / "model"))
    assert loaded.module.config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == loaded.module.config.vocab_size


class Engines:
    """What the comparison asks of its engines: (variant, number of requests, seed). Seconds follow from the question alone."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.dies_at: int | None = None

    def generate(self, variant: str, number: int, seed: int) -> dict[str, Any]:
        if len(self.asked) == self.dies_at:
            raise KeyboardInterrupt
        self.asked.append((variant, number, seed))
        seconds = 1.0 + 0.1 * len(variant) + 0.01 * seed
        return {"seconds": seconds, "num_tokens": 10 * number, "vllm": {"seed": seed}, "ours": {}}


@pytest.fixture
def compare(repository_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engines]:
    """Runs the comparison of vLLM's speculation with ours as its command does, with engines that are none."""
    example(repository_root, "verl_grpo_tiny/prepare").write_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in ("1+2=", "3+4=")))
    module = example(repository_root, "vllm_offline/run")

    def run(file: Path, *options: str, dies_at: int | None = None) -> Engines:
        engines = Engines()
        engines.dies_at = dies_at

        class Served:
            def __init__(self, variant: str, argv: list[str], token_ids: Path) -> None:
                assert argv[-len(options) :] == list(options)
                assert len(json.loads(token_ids.read_text())) == 2
                self._variant = variant

            def generate(self, number: int, seed: int) -> dict[str, Any]:
                return engines.generate(self._variant, number, seed)

            def close(self) -> None:
                pass

        given = [
            "--model",
            str(tmp_path / "model"),
            "--prompts",
            str(tmp_path / "prompts.jsonl"),
            "--json",
            str(file),
            "--requests",
            "1",
            "8",
        ]
        monkeypatch.setattr(os, "environ", {**os.environ})  # main sets what vLLM reads
        monkeypatch.setattr(module, "Served", Served)
        monkeypatch.setattr(sys, "argv", ["run.py", *given, "--variants", "none", "vllm_ngram", "suffix", *options])
        module.main()
        return engines

    return run


def test_a_comparison_that_is_cut_goes_on_where_it_was(
    compare: Callable[..., Engines], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = compare(tmp_path / "whole.json", "--rounds", "3")
    told = capsys.readouterr()
    expected = json.loads((tmp_path / "whole.json").read_text())
    assert expected["warmed_before_round"] == {"1": [1], "8": [1]}
    assert len(whole.asked) == 2 * 3 * 4
    assert "8 requests, round 3 of 3: none 55.9, vllm_ngram 39.4, suffix 49.1 tok/s" in told.err

    # Cut in the second round of eight requests, when one engine had answered.
    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path / "cut.json", "--rounds", "3", dies_at=19)
    cut = json.loads((tmp_path / "cut.json").read_text())
    assert [len(cut["answers"][number]["suffix"]) for number in ("1", "8")] == [3, 1]
    assert cut["found"]["8"]["none"]["tokens_per_s"] == pytest.approx(80 / 1.41)

    capsys.readouterr()
    again = compare(tmp_path / "cut.json", "--rounds", "3")
    assert capsys.readouterr().out == told.out
    assert again.asked == [asked for asked in whole.asked if asked[1] == 8 and asked[2] != 1]
    finished = json.loads((tmp_path / "cut.json").read_text())
    assert finished.pop("warmed_before_round") == {"1": [1], "8": [1, 2]}
    assert finished == {name: value for name, value in expected.items() if name != "warmed_before_round"}


def test_a_comparison_that_is_whole_starts_nothing_and_more_rounds_are_added(compare: Callable[..., Engines], tmp_path: Path) -> None:
    assert len(compare(tmp_path / "found.json", "--rounds", "1").asked) == 2 * 3 * 2
    assert compare(tmp_path / "found.json", "--rounds", "1").asked == []
    more = compare(tmp_path / "found.json", "--rounds", "2")
    assert {seed for _, _, seed in more.asked} == {0, 2}


def test_another_comparison_is_not_mixed_in(compare: Callable[..., Engines], tmp_path: Path) -> None:
    compare(tmp_path / "found.json", "--rounds", "1", "--tokens", "16")
    with pytest.raises(SystemExit, match=r"error: .*found.json was made with other settings \(tokens 16 there, 32 here\)"):
        compare(tmp_path / "found.json", "--rounds", "1", "--tokens", "32")


def test_a_variant_is_held_against_none_round_by_round(repository_root: Path) -> None:
    def answers(*seconds: float) -> list[dict[str, Any]]:
        return [{"num_tokens": 12, "seconds": took, "vllm": {}, "ours": None} for took in seconds]

    summary = example(repository_root, "vllm_offline/run").summary
    found = summary(answers(0.5, 3.0, 0.75), answers(1.0, 6.0, 2.0))
    assert (found["tokens_per_s"], found["against_none"]) == (16.0, 2.0)  # the medians' ratio would be 2.67
    assert summary(answers(1.0), None)["against_none"] is None

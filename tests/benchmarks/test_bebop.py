"""Acceptance of greedy and sampled drafts: the estimate is exact by enumeration, and what the engine serves agrees with it."""

from __future__ import annotations

import itertools
import types
from pathlib import Path
from typing import Any

import bebop
import pytest
import torch
from acceptance_report import summarise
from mtp_tiny import prompts, random_head, tiny_policy

from rollout_spec.engine.load import LoadedModel
from rollout_spec.engine.ops import TorchOps
from rollout_spec_mtp.training.run import Workplace


def test_exact_match_length_by_enumeration() -> None:
    """Averaged over every text of three tokens, it is the sum over depths of the target's probability of the drafted prefix."""
    generator = torch.Generator().manual_seed(2)
    vocab, depth = 3, 3
    prefixes = [prefix for length in range(depth) for prefix in itertools.product(range(vocab), repeat=length)]
    laws = {prefix: torch.rand(vocab, generator=generator, dtype=torch.float64).softmax(0) for prefix in prefixes}
    drafts = {prefix: int(torch.randint(vocab, (), generator=generator)) for prefix in prefixes}  # argmax q after each prefix

    drafted: tuple[int, ...] = ()
    reach, expected = 1.0, 0.0
    for _ in range(depth):
        reach *= float(laws[drafted][drafts[drafted]])
        drafted += (drafts[drafted],)
        expected += reach

    mean = 0.0
    for tokens in itertools.product(range(vocab), repeat=depth):
        seen = [tokens[:place] for place in range(depth)]
        weight = torch.stack([laws[prefix][token] for prefix, token in zip(seen, tokens, strict=True)]).prod()
        greedy = torch.stack([laws[prefix][drafts[prefix]] for prefix in seen])[None]
        matches = torch.tensor([[drafts[prefix] == token for prefix, token in zip(seen, tokens, strict=True)]])
        mean += float(weight * bebop.exact_match_length(greedy, matches))
    assert mean == pytest.approx(expected, rel=1e-12)


@pytest.fixture(scope="module")
def study() -> bebop.Study:
    policy = tiny_policy()
    loaded = LoadedModel(path=Path(), module=policy, tokenizer=types.SimpleNamespace())
    return bebop.Study(
        workplace=Workplace(loaded=loaded, ops=TorchOps(), name="tiny"),
        model=random_head(policy, layers=(1, -1)).eval(),
        prompts=prompts(40),
        draft_length=2,
        max_new_tokens=32,
        max_batch=8,
        seed=0,
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_what_is_served_is_what_was_judged(study: bebop.Study, temperature: float) -> None:
    """``run`` itself refuses acceptance probabilities that differ; here the lengths agree, and greedy drafts keep their bound."""
    texts = study.run(temperature)
    assert {text["arm"] for text in texts} == {"rejection", "exact_match"}
    for text in texts:
        assert max(greedy - bound for greedy, bound in zip(text["greedy"], text["bound"], strict=True)) <= 1e-6
    (row,) = summarise([{"temperature": temperature, "texts": texts}])["by_temperature"]
    for name in ("greedy", "sampled"):
        expected, served = row[f"{name}_length"], row[f"{name}_served_length"]
        # Rounds do not start at every position alike, and the last one of a text is cut: close, not equal.
        assert served["value"] == pytest.approx(expected["value"], rel=0.06)


def test_another_temperature_is_noticed(study: bebop.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = bebop.judge
    monkeypatch.setattr(bebop, "judge", lambda model, policy, rollout, temperature: judge(model, policy, rollout, 0.9 * temperature))
    with pytest.raises(ValueError, match="T = 1: acceptance probabilities of the engine and of the texts differ by"):
        study.run(1.0)


def test_a_temperature_is_kept_and_not_mixed(tmp_path: Path) -> None:
    calls: list[float] = []

    class Once:
        def run(self, temperature: float) -> list[dict[str, Any]]:
            calls.append(temperature)
            return [{"key": "a"}]

    for _ in range(2):
        record = bebop.run_temperature(Once(), 0.5, {"seed": 0}, tmp_path)  # type: ignore[arg-type]
        assert record["texts"] == [{"key": "a"}]
    assert calls == [0.5]
    with pytest.raises(ValueError, match=r"T0\.5\.json was made with other settings"):
        bebop.run_temperature(Once(), 0.5, {"seed": 1}, tmp_path)  # type: ignore[arg-type]


def test_hash_follows_the_weights() -> None:
    policy = tiny_policy()
    model = random_head(policy)
    before = bebop.weights_hash(model)
    assert bebop.weights_hash(random_head(policy)) == before
    with torch.no_grad():
        model.fc.weight[0, 0] += 1e-3
    assert bebop.weights_hash(model) != before

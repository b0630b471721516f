"""Records to tables: sums over the right texts, lines through the right points."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acceptance_figure import draw
from acceptance_report import entropy_rows, law, summarise, table, temperature_row


def text(key: str, arm: str, entropies: list[float], **changes: Any) -> dict[str, Any]:
    num = len(entropies)
    record = {
        "key": key,
        "arm": arm,
        "num_tokens": 10,
        "num_rounds": 5,
        "entropies": entropies,
        "bound": [0.9 - 0.2 * entropy for entropy in entropies],
        "greedy": [0.5 - 0.1 * entropy for entropy in entropies],
        "sampled": [0.6] * num,
        "exact_match_length": 0.5 * num,
        "rejection_length": 0.8 * num,
    }
    return {**record, **changes}


@pytest.fixture
def records() -> list[dict[str, Any]]:
    return [
        {
            "temperature": temperature,
            "texts": [
                text(key, arm, [entropy, entropy + 0.2 * place], num_tokens=10 if arm == "rejection" else 8)
                for place, key in enumerate(("a", "b", "c"))
                for arm in ("rejection", "exact_match")
            ],
        }
        for temperature, entropy in ((0.5, 0.4), (1.0, 1.1), (1.4, 2.6))
    ]


def test_row_of_a_temperature(records: list[dict[str, Any]]) -> None:
    row = temperature_row(0.5, records[0]["texts"])
    assert row["num_positions"] == 12
    assert row["entropy"]["value"] == pytest.approx(0.5)
    assert row["sampled"]["value"] == pytest.approx(0.6)
    assert row["greedy"]["value"] == pytest.approx(0.45)
    # max p is .82 .82 .82 .78 .82 .74: sampled drafts pass it nowhere.
    assert row["sampled_beyond_bound_rate"] == 0
    # Estimates use all texts and count the bonus; each served length only the texts that its own scheme served.
    assert row["greedy_length"]["value"] == pytest.approx(1.5)
    assert row["sampled_length"]["value"] == pytest.approx(1.8)
    assert row["greedy_served_length"]["value"] == pytest.approx(8 / 5)
    assert row["sampled_served_length"]["value"] == pytest.approx(2)


def test_share_beyond_the_bound(records: list[dict[str, Any]]) -> None:
    # At 2.6 nats max p is .38, at 2.8 .34, at 3.0 .3: sampled drafts pass all of them.
    assert temperature_row(1.4, records[2]["texts"])["sampled_beyond_bound_rate"] == 1
    mixed = [
        text("a", "rejection", [0.0, 2.0]),
        text("b", "rejection", [0.0, 1.6]),
        text("a", "exact_match", [0.0]),
        text("b", "exact_match", [0.0]),
    ]
    assert temperature_row(1.0, mixed)["sampled_beyond_bound_rate"] == pytest.approx(2 / 6)


def test_laws_of_lines(records: list[dict[str, Any]]) -> None:
    summary = summarise(records)
    for points in ("law_of_temperatures", "law_of_positions"):
        greedy = summary[points]["greedy"]
        assert (greedy["intercept"], greedy["slope"], greedy["r_squared"]) == pytest.approx((0.5, -0.1, 1.0))
        assert summary[points]["bound"]["slope"] == pytest.approx(-0.2)
        assert summary[points]["sampled"]["slope"] == pytest.approx(0, abs=1e-9)


def test_law_says_how_much_it_explains() -> None:
    entropies = np.array([0.0, 1.0, 0.0, 1.0])
    # The line goes through .5 and .3; what is left is ±.1 around it.
    found = law(entropies, np.array([0.6, 0.4, 0.4, 0.2]))
    assert (found["intercept"], found["slope"], found["r_squared"]) == pytest.approx((0.5, -0.2, 0.5))


def test_buckets_of_entropy() -> None:
    entropies = np.array([0.0, 0.249, 0.25, 8.0])
    positions = {"entropies": entropies, "bound": np.array([1.0, 0.8, 0.7, 0.1]), "greedy": entropies / 10, "sampled": entropies / 5}
    rows = entropy_rows(positions)
    assert [(row["entropy_from"], row["entropy_to"], row["num_positions"]) for row in rows] == [(0, 0.25, 2), (0.25, 0.5, 1), (6, None, 1)]
    assert [row["bound"] for row in rows] == pytest.approx([0.9, 0.7, 0.1])
    assert rows[2]["sampled"] == pytest.approx(1.6)


def test_table_and_figure(records: list[dict[str, Any]], tmp_path: Path) -> None:
    summary = summarise(records)
    lines = table(summary).splitlines()
    (row,) = (line for line in lines if line.startswith("| 0.5 |"))
    assert row == "| 0.5 | 0.50 | 0.800 ± 0.020 | 0.450 ± 0.010 | 0.600 ± 0.000 | 0 % | 1.50 (1.60) | 1.80 (2.00) |"
    assert "| greedy drafts | 0.500 -0.100 H | 1.000 | 0.500 -0.100 H | 1.000 |" in lines
    for name in ("one.svg", "two.svg"):
        draw(summary, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    words = " ".join(ET.parse(tmp_path / "one.svg").getroot().itertext())
    assert "T=1.4" in words
    assert "sampled drafts" in words

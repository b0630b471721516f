"""docs/exactness.md lists exactly the proofs and planted bugs that exist, and each has a test."""

from __future__ import annotations

from pathlib import Path

import pytest
from exactness import registry


def test_committed_table_is_the_one_the_proofs_make(repository_root: Path) -> None:
    text = (repository_root / "docs" / "exactness.md").read_text(encoding="utf-8")
    committed = text.partition("<!-- table: begin -->")[2].partition("<!-- table: end -->")[0]
    assert committed.strip() == registry.table(), "run `pytest tests/statistical --write-exactness-table`"


def test_every_proof_is_run_by_a_test(repository_root: Path) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (repository_root / "tests" / "statistical").glob("test_*.py"))
    for name, proof in vars(registry).items():
        if isinstance(proof, registry.Proof):
            assert f"{name}.parameters()" in sources, f"no test runs {proof.title}"


def test_every_scheme_has_every_kind_of_proof() -> None:
    kinds = (registry.ALGEBRA, registry.BRANCHES, registry.SEVERAL_ROUNDS, registry.CHI_SQUARE, registry.GREEDY)
    for scheme in registry.Scheme:
        for proof in kinds:
            assert proof.count(scheme), f"{scheme.value} lacks {proof.title}"
        if sum(bug.count(scheme) for bug in registry.BUGS) < 2:
            pytest.fail(f"{scheme.value} has fewer than two planted bugs")

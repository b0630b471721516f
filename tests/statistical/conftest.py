"""The table of docs/exactness.md is written from a run of these tests in which every proof passed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from exactness import registry
from exactness.backends import BACKENDS, Backend

from rollout_spec.verify import VerifyFn

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before a test imports one of Triton's kernels
    if importlib.util.find_spec("triton") is not None:
        from exactness.interpreter import make_quick

        make_quick()

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
OUTCOMES = pytest.StashKey[dict[tuple[str, str], bool]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-exactness-table", action="store_true", help="rewrite the table of docs/exactness.md from this run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "proof(title): a case of a proof or planted bug of docs/exactness.md")
    config.stash[OUTCOMES] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    marker = item.get_closest_marker("proof")
    if marker is not None and call.when == "call" and isinstance(item, pytest.Function):
        backend, scheme, case = (item.callspec.params[name] for name in ("backend", "scheme", "case"))
        item.config.stash[OUTCOMES][marker.args[0], f"{backend}-{scheme.value}-{case}"] = report.passed
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("--write-exactness-table", default=False):
        return
    outcomes = session.config.stash[OUTCOMES]
    for proof in (*registry.PROOFS, *registry.BUGS):
        for backend in BACKENDS:
            for scheme, case in proof.cases_of(backend):
                name = f"{backend}-{scheme.value}-{case}"
                if not outcomes.get((proof.title, name), False):
                    raise pytest.UsageError(f"{proof.title}: {name} did not pass in this run; the table is left as it was")
    document = Path(session.config.rootpath) / "docs" / "exactness.md"
    before, _, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    document.write_text(f"{before}{BEGIN}\n\n{registry.table()}\n\n{END}{after}", encoding="utf-8")


@pytest.fixture
def verify(backend: Backend) -> VerifyFn:
    """The verify function under proof."""
    reason = backend.unavailable_reason()
    if reason is not None:
        pytest.skip(f"{backend} cannot run here: {reason}")
    return backend.verify

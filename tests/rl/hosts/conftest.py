"""verl is imported inside fixtures and tests: its imports warn, and warnings at collection are errors."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path("examples") / "verl_grpo_tiny"
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """verl and Ray warn of engines that are not installed and of their own deprecated parts: nothing we could write differently."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


def load_module(path: Path) -> ModuleType:
    """A module of an example, which is no package."""
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_policy(repository_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's own model and tokenizer."""
    folder = tmp_path_factory.mktemp("policy")
    load_module(repository_root / EXAMPLE / "prepare.py").write_model(folder)
    return folder

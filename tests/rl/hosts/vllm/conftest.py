"""vLLM runs in this process, one engine after the other, so that tests can look into its runner. Engines start in some seconds each."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
        }.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 32 tokens, peaked enough that drafts are sometimes accepted."""
    from tiny_vllm import write_policy

    return write_policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="session")
def model(policy: Path) -> Any:
    """The policy as transformers runs it."""
    from tiny_vllm import load

    return load(policy)


@pytest.fixture(scope="session")
def laws(model: Any) -> dict[str, dict[tuple[int, ...], float]]:
    """What it samples, exactly, by the names of policy_law.LAWS."""
    from policy_law import laws_of

    return laws_of(model)


@pytest.fixture(scope="session")
def drafters(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of drafters for it: mtp, and block with a reduced vocabulary."""
    from tiny_vllm import write_drafters

    return write_drafters(policy, tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="session")
def natives(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of drafters that vLLM runs itself: draft, self, useless, eagle, and with a reduced vocabulary eagle3 and dflash."""
    from tiny_vllm import write_natives

    return write_natives(policy, tmp_path_factory.mktemp("natives"))


@pytest.fixture(scope="module")
def start(policy: Path) -> Iterator[Callable[..., Any]]:
    """Starts an engine of the policy; the one before it is shut down, for there is one at a time."""
    from tiny_vllm import Running

    running = Running(policy)
    yield running.start
    running.stop()

"""What a user gets: four packages with their data, importable away from the repository, the core with torch and numpy alone."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGES = {
    "rollout_spec": "rollout_spec",
    "rollout_spec_mtp": "mtp/rollout_spec_mtp",
    "rollout_spec_kernels": "kernels/rollout_spec_kernels",
    "rollout_spec_rl": "rl_integration/rollout_spec_rl",
}
# Modules of the core that need an extra: engine (transformers) and the commands (typer, rich, pyarrow).
BEYOND_THE_CORE = (
    "rollout_spec.engine",
    "rollout_spec.cli",
    "rollout_spec.composition",
    "rollout_spec.session",
    "rollout_spec.job",
    "rollout_spec.reports",
    "rollout_spec.bench",
    "rollout_spec.demo",
    "rollout_spec.budget_state",
    "rollout_spec.console",
    "rollout_spec.report",
    "rollout_spec.simulate.commands",
)

# Modules that stand between us and verl: they import it at the top, and without it nobody imports them.
BESIDE_VERL = tuple(
    f"rollout_spec_rl.verl.{name}"
    for name in (
        "adapter",
        "agent_loop",
        "callback",
        "checkpoint_engine",
        "collect",
        "mailbox",
        "names",
        "platform",
        "plugin",
        "recovery",
        "replica",
        "search_path",
        "server",
    )
)

BESIDE_VERL_AND_VLLM = ("rollout_spec_rl.verl.vllm_server", "rollout_spec_rl.vllm.verl_extension")

RunPython = Callable[..., str]


def module_names(root: Path) -> list[str]:
    """Every module of the four packages as they lie in the repository."""
    names = []
    for package, source in PACKAGES.items():
        for path in (root / source).rglob("*.py"):
            parts = (package, *path.relative_to(root / source).with_suffix("").parts)
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(names)


def test_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
    dist_info = {name for name in top if name.endswith(".dist-info")}
    assert len(dist_info) == 1
    assert top - dist_info == set(PACKAGES)


def test_wheel_holds_every_file_of_the_packages(wheel: Path, repository_root: Path) -> None:
    """Types markers, C++ sources and data included."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        str(Path(package) / path.relative_to(repository_root / source))
        for package, source in PACKAGES.items()
        for path in (repository_root / source).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= packed
    assert any(name.startswith("rollout_spec_kernels/csrc/") and name.endswith(".cpp") for name in packed)
    assert "rollout_spec_rl/verl/configs/rollout_spec/suffix.yaml" in packed


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/entry_points.txt"))
    requires = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    unconditional = {line.split(">")[0].split("=")[0] for line in requires if "extra ==" not in line}
    assert unconditional == {"torch", "numpy"}
    assert "rollout-spec = rollout_spec_rl.compose:main" in entry_points
    assert "[verl.plugins]\nrollout_spec = rollout_spec_rl.verl.plugin" in entry_points
    assert "[vllm.general_plugins]\nrollout_spec = rollout_spec_rl.vllm.plugin:register" in entry_points
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_module_imports_from_the_installed_wheel(installed: Path, repository_root: Path, run_python: RunPython) -> None:
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[2:]:\n"
        "    module = importlib.import_module(name)\n"
        "    assert module.__file__.startswith(sys.argv[1]), module.__file__\n"
    )
    names = module_names(repository_root)
    assert {*BESIDE_VERL, *BESIDE_VERL_AND_VLLM} <= set(names)
    if importlib.util.find_spec("verl") is None:
        names = [name for name in names if name not in BESIDE_VERL]
    if importlib.util.find_spec("verl") is None or importlib.util.find_spec("vllm") is None:
        names = [name for name in names if name not in BESIDE_VERL_AND_VLLM]
    if importlib.util.find_spec("triton") is None:
        names = [name for name in names if not name.startswith("rollout_spec_kernels.triton.")]
    run_python(program, str(installed), *names, paths=(installed,))


def test_the_core_imports_with_torch_and_numpy_alone(installed: Path, repository_root: Path, run_python: RunPython) -> None:
    """Everything else that is installed here is hidden, whatever it is."""
    core = [
        name
        for name in module_names(repository_root)
        if name.partition(".")[0] == "rollout_spec" and not any(f"{name}.".startswith(f"{beyond}.") for beyond in BEYOND_THE_CORE)
    ]
    assert {"rollout_spec.tree", "rollout_spec.verify", "rollout_spec.prompts", "rollout_spec.doctor"} <= set(core)
    program = """
import importlib, json, re, sys
from importlib import metadata

def closure(names):
    found, new = set(), set(names)
    while new:
        found |= new
        requires = [line for name in new for line in (metadata.requires(name) or []) if "extra ==" not in line]
        new = {re.match(r"[\\w.-]+", line)[0].lower().replace("_", "-") for line in requires} - found
        new = {name for name in new if any(True for _ in metadata.distributions(name=name))}
    return found

allowed = closure({"torch", "numpy"})
providers = metadata.packages_distributions()
hidden = {top for top, dists in providers.items() if not {dist.lower().replace("_", "-") for dist in dists} & (allowed | {"rollout-spec"})}

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is hidden: the core may need torch and numpy only")

sys.meta_path.insert(0, Hide())
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(hidden)))
"""
    hidden = json.loads(run_python(program, *core, paths=(installed,)))
    assert {"transformers", "safetensors", "typer", "rich", "pyarrow", "reasoning_gym", "yaml", "pytest"} <= set(hidden)


def test_editable_install_exposes_four_names_only(repository_root: Path, tmp_path: Path, run_python: RunPython) -> None:
    """A path entry for the repository root would make its folders kernels/, tests/, docs/ importable."""
    pytest.importorskip("editables")
    program = "import sys\nfrom hatchling.build import build_editable\nprint(build_editable(sys.argv[1]))"
    built = run_python(program, str(tmp_path), cwd=repository_root).split()[-1]
    with zipfile.ZipFile(tmp_path / built) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        "import importlib.util, json, site, sys\n"
        "site.addsitedir(sys.argv[1])\n"
        "names = sys.argv[2:]\n"
        "print(json.dumps({name: getattr(importlib.util.find_spec(name), 'origin', None) for name in names}))\n"
    )
    names = [*PACKAGES, "mtp", "kernels", "rl_integration", "docs", "benchmarks"]
    origins = json.loads(run_python(program, str(tmp_path / "site"), *names))
    expected = {package: str(repository_root / source / "__init__.py") for package, source in PACKAGES.items()}
    assert origins == {**dict.fromkeys(names), **expected}


def test_transformers_imports_beside_us(installed: Path, repository_root: Path, run_python: RunPython, tmp_path: Path) -> None:
    """transformers imports a package named ``kernels``: neither our folder of that name nor our package may get in its way."""
    program = (
        "import rollout_spec_kernels, transformers\n"
        "from transformers import AutoModelForCausalLM\n"
        "from transformers.utils import is_kernels_available\n"
        "print(is_kernels_available())\n"
    )
    # From the repository's root, which Python puts on the path, its folder kernels/ must not be taken for that package.
    assert run_python(program, paths=(installed,), cwd=repository_root).split() == ["False"]
    real = tmp_path / "site"
    (real / "kernels").mkdir(parents=True)
    (real / "kernels" / "__init__.py").write_text("__version__ = '0.0.1'\n")
    program = "import rollout_spec_kernels, kernels; print(kernels.__file__)"
    for path in ((installed, real), (repository_root, installed, real)):
        assert Path(run_python(program, paths=path, cwd=repository_root).strip()) == real / "kernels" / "__init__.py"

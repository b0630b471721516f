from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from rollout_spec_kernels import build
from rollout_spec_kernels.cpu import CpuOps

ONE = 'extern "C" __attribute__((visibility("default"))) int one() { return #; }\n'


def _load(cache_dir: Path, results: multiprocessing.Queue[str]) -> None:
    import torch  # noqa: F401  its OpenMP runtime has to be in the process

    results.put(build.load_library(cache_dir=cache_dir)._name)


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source directory that builds in a moment."""
    source = tmp_path / "csrc"
    source.mkdir()
    (source / "one.cpp").write_text(ONE.replace("#", "1"))
    monkeypatch.setattr(build, "SOURCE_DIR", source)
    return source


def test_processes_that_race_to_build_all_load_one_library(ops: CpuOps, small_source: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[str] = context.Queue()
    cache = tmp_path / "cache"
    processes = [context.Process(target=_load, args=(cache, results)) for _ in range(4)]
    for process in processes:
        process.start()
    names = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert names == {str(path) for path in cache.iterdir()}
    assert len(names) == 1


def test_changed_source_or_flags_make_another_library(
    ops: CpuOps, small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.load_library(cache_dir=tmp_path)
    assert first.one() == 1
    (small_source / "one.cpp").write_text(ONE.replace("#", "2"))
    second = build.load_library(cache_dir=tmp_path)
    assert second.one() == 2
    assert first.one() == 1
    monkeypatch.setattr(build, "COMPILE_FLAGS", (*build.COMPILE_FLAGS, "-DOTHER"))
    assert build.load_library(cache_dir=tmp_path)._name not in (first._name, second._name)


def test_no_compiler_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler: 'no-such-compiler' is not on PATH"):
        build.load_library(cache_dir=tmp_path, compiler="no-such-compiler")


def test_a_source_that_does_not_compile_says_why(ops: CpuOps, small_source: Path, tmp_path: Path) -> None:
    (small_source / "one.cpp").write_text("#error out of order\n")
    with pytest.raises(build.BuildError, match="out of order"):
        build.load_library(cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_that_cannot_be_written_says_so(ops: CpuOps, small_source: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(build.BuildError, match="cannot write or load"):
        build.load_library(cache_dir=blocked / "cache")


def test_no_torch_openmp_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "loaded_openmp", lambda: None)
    with pytest.raises(build.BuildError, match="OpenMP"):
        build.load_library(compiler="sh")


def test_only_torch_s_openmp_runtime_is_in_the_process(ops: CpuOps) -> None:
    ops.gumbel_noise([1], [2], 100_000)
    names = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    runtimes = {name for name in names if Path(name).name.startswith(("libgomp", "libiomp", "libomp"))}
    assert runtimes == {str(build.loaded_openmp())}

"""Compiles csrc/ on first use into a cache and loads it with ctypes; no torch headers, so it takes seconds (CUDA: half a minute).

The library is keyed by everything its machine code depends on, written under a temporary name and renamed, so that processes
that race to build it do no harm. It is linked to the OpenMP runtime that torch has loaded: a second one in the process would keep
its own pool of threads spinning on the same cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollout_spec import files

SOURCE_DIR = Path(__file__).parent / "csrc"
COMPILER = "g++"
# No -ffast-math: the results' bits, and so row invariance, rest on IEEE rounding; no contraction except where fma() says so.
COMPILE_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
    "-fopenmp",
    "-Wno-psabi",
)
CUDA_COMPILER = "nvcc"
# -fmad=false for the same reason. Machine code for what nvcc knows of these, PTX of the last for GPUs that come later.
CUDA_FLAGS = ("-std=c++20", "-O3", "-fmad=false", "-Xcompiler=-fPIC,-fvisibility=hidden", "-shared")
CUDA_ARCHITECTURES = ("80", "90", "100")


class BuildError(RuntimeError):
    """The kernels cannot be built or loaded here; the message says why."""


def loaded_openmp() -> Path | None:
    """The libgomp that is mapped into this process (torch's, once torch is imported), or None."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    for line in maps.read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libgomp"):
            return path
    return None


def load_library(*, cache_dir: Path | None = None, compiler: str = COMPILER) -> ctypes.CDLL:
    """The compiled kernels, built if this machine has not built these sources yet.

    Raises BuildError with the reason if there is no compiler, the sources do not compile, or the result does not load.
    """
    found = shutil.which(compiler)
    if found is None:
        raise BuildError(f"no C++ compiler: {compiler!r} is not on PATH")
    openmp = loaded_openmp()
    if openmp is None:
        raise BuildError("torch's OpenMP runtime (libgomp) is not loaded in this process: this is no Linux build of torch with GNU OpenMP")
    directory = files.cache_dir() if cache_dir is None else cache_dir
    target = directory / f"kernels-{_key(found, openmp)}.so"
    try:
        if not target.exists():
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            _build(found, openmp, target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(f"cannot write or load {target}: {error}") from error


def load_cuda_library(*, cache_dir: Path | None = None, compiler: str = CUDA_COMPILER) -> ctypes.CDLL:
    """The compiled CUDA kernels, built if this machine has not built these sources yet. Compiling needs no GPU.

    Raises BuildError with the reason if there is no nvcc, the sources do not compile, or the result does not load.
    """
    found = shutil.which(compiler)
    if found is None:
        raise BuildError(f"no CUDA compiler: {compiler!r} is not on PATH")
    known = subprocess.run([found, "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout.split()
    architectures = [name for name in CUDA_ARCHITECTURES if f"compute_{name}" in known]
    if not architectures:
        raise BuildError(f"{found} compiles for none of sm_{', sm_'.join(CUDA_ARCHITECTURES)}")
    flags = [*CUDA_FLAGS, *(f"-gencode=arch=compute_{name},code=sm_{name}" for name in architectures)]
    flags.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    sources = sorted(SOURCE_DIR.glob("*.cu"))
    directory = files.cache_dir() if cache_dir is None else cache_dir
    target = directory / f"cuda-{_hash(sources, found, flags)}.so"
    try:
        if not target.exists():
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                made = Path(scratch) / "cuda.so"
                _run([found, *flags, *map(str, sources), "-o", str(made)])
                made.replace(target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(f"cannot write or load {target}: {error}") from error


def _sources() -> list[Path]:
    return sorted(SOURCE_DIR.glob("*.cpp"))


def _key(compiler: str, openmp: Path) -> str:
    """A hash of sources, compiler, flags, CPU and OpenMP runtime."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))), "")
    return _hash(_sources(), compiler, [cpu, *COMPILE_FLAGS, str(openmp)])


def _hash(sources: Sequence[Path], compiler: str, others: Sequence[str]) -> str:
    """A hash of sources, all headers, compiler and others."""
    digest = hashlib.sha256()
    for path in [*sources, *sorted(SOURCE_DIR.glob("*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update("\0".join([version, *others]).encode())
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]} failed on the kernels: {done.stderr.strip()[-2000:]}")


def _build(compiler: str, openmp: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in _sources()]
        commands = [
            [compiler, *COMPILE_FLAGS, "-c", str(source), "-o", str(made)] for source, made in zip(_sources(), objects, strict=True)
        ]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_run, commands))
        library = Path(scratch) / "kernels.so"
        # The runtime as a file and no -fopenmp: the linker's own choice would be the compiler's libgomp.
        _run([compiler, "-shared", *map(str, objects), str(openmp), "-o", str(library)])
        library.replace(target)

"""The kernels of `cpu/`, built with the machine's C++ compiler and kept on disk.

A build takes a second or two and is made once per machine: it is named after the source, the
compiler, its flags and the processor. Without a compiler, or where the build fails or computes
something wrong, there is one warning and torch's own operations serve.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rlhf_app.config.schema import HybridEngineSettings

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).with_name("cpu")
_COMPILERS = ("g++", "c++", "clang++")
# Reductions are marked in the source: nothing here may change what is computed.
_FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp-simd",
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
_TIMEOUT_SECONDS = 120
# With "auto", a rollout of fewer answer tokens than this is not worth a first build. Decided by
# the request alone, so that a run that resumes computes what it would have computed.
AUTO_TOKENS = 2048
# Multiplications of one call that are worth a second thread.
_WORTH_A_THREAD = 1 << 21

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "decode_attention": (
        *[_POINTER, _INTEGER, _INTEGER] * 3, _POINTER, _POINTER, *[_INTEGER] * 4, *[_POINTER] * 3,
        *[_INTEGER] * 5, _FLOAT, _INTEGER, _FLOAT, _POINTER, _INTEGER,
    ),
    "forward": (_POINTER, _POINTER, _INTEGER, *[_POINTER] * 6, _INTEGER, _INTEGER, _POINTER),
}  # fmt: skip


def kernels_for(
    settings: HybridEngineSettings, device: torch.device, dtype: torch.dtype, tokens: int
) -> ctypes.CDLL | None:
    """The kernels for a rollout; None: torch's operations serve.

    Args:
        settings: `compile_decode` counts.
        device: of the weights.
        dtype: of the weights.
        tokens: most answer tokens of the rollout.
    """
    wanted = settings.compile_decode
    if device.type != "cpu" or dtype != torch.float32 or wanted is False:
        return None
    if wanted == "auto" and (tokens < AUTO_TOKENS or find_compiler() is None):
        return None
    return load()


@cache
def find_compiler() -> str | None:
    """Path of a C++ compiler: what CXX names, else the first of the usual ones."""
    named = os.environ.get("CXX")
    for name in (named,) if named else _COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    return None


@cache
def load() -> ctypes.CDLL | None:
    """Build the kernels, or find them on disk; None, with one warning, where that fails."""
    compiler = find_compiler()
    try:
        if compiler is None:
            raise RuntimeError("no C++ compiler was found (g++, c++, clang++, or named by CXX)")
        path = _built(compiler)
        library = ctypes.CDLL(str(path))
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, _INTEGER
        return library
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        text = " ".join(str(error).split())[:200]
        logger.warning("decoding on the CPU runs without compiled kernels: %s", text)
        return None


def directory() -> Path:
    """Where builds are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "rlhf" / "cpu_kernels"


def _built(compiler: str) -> Path:
    version = subprocess.run(  # noqa: S603 - a list of arguments, no shell
        [compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS,
        check=True,
    ).stdout  # fmt: skip
    sources = [path.read_text() for path in sorted(_SOURCES.iterdir())]
    identity = (*sources, compiler, version, *_FLAGS, _processor())
    name = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:24]
    kept = directory()
    for found in sorted(kept.glob(f"{name}-*.so")):
        # Loading a file that a crash or a full disk cut short would end the process.
        if found.stem.rpartition("-")[2] == _digest(found):
            logger.info("compiled CPU kernels: found in %s", kept)
            return found
        logger.info("compiled CPU kernels: %s is damaged and built anew", found)
        found.unlink(missing_ok=True)
    start = time.perf_counter()
    kept.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Processes that start together each build their own file; the last rename wins.
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=kept)
    os.close(handle)
    try:
        done = subprocess.run(  # noqa: S603 - a list of arguments, no shell
            [compiler, *_FLAGS, str(_SOURCES / "kernels.cpp"), "-o", temporary],
            capture_output=True, text=True, timeout=_TIMEOUT_SECONDS,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{compiler} failed: {done.stderr}")
        if not Path(temporary).stat().st_size:
            raise RuntimeError(f"{compiler} made an empty file")
        target = kept / f"{name}-{_digest(Path(temporary))}.so"
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    logger.info(
        "compiled CPU kernels: built in %.1f s, kept in %s",
        time.perf_counter() - start, kept,
    )  # fmt: skip
    return target


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _processor() -> str:
    """What `-march=native` depends on: a home directory may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count)


def shared_out(run: Callable[[int, int], Any], rows: int, work: int) -> list[Any]:
    """Run a kernel over all rows, on several threads where that pays.

    Args:
        run: called with the first row and the number of rows; releases the interpreter's lock.
        rows: of all.
        work: multiplications of all.

    Returns:
        What each call returned, by rows.
    """
    parts = max(1, min(rows, torch.get_num_threads(), work // _WORTH_A_THREAD))
    if parts == 1:
        return [run(0, rows)]
    bounds = [rows * part // parts for part in range(parts + 1)]
    starts = bounds[:-1]
    counts = [end - start for start, end in zip(starts, bounds[1:], strict=True)]
    return list(_threads(torch.get_num_threads()).map(run, starts, counts))

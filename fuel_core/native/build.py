"""Builds ``kernels.cpp`` with the machine's own compiler, and finds what was built before."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from fuel_core.code_cache import CacheUnusable, CodeCache, compiler

__all__ = ["prepare", "shared_object", "status"]

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
# A decode step may wait this long for a compiler that is at work; then torch's ops serve for as long as the process
# lives.
_PATIENCE = 2.0


@dataclass
class _Build:
    process: subprocess.Popen[bytes]
    folder: Path
    key: str


_FILE = "kernels.so"
_lock = threading.Lock()
_running: _Build | None = None
_problem: str | None = None


@functools.cache
def _flags_of_cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return line.partition(":")[2].strip()
    return ""


def _unsupported() -> str | None:
    """Why the kernels cannot serve this machine, None where they can."""
    if os.environ.get("FUEL_NATIVE") == "0":
        return "turned off by FUEL_NATIVE=0"
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"written for Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    missing = {"avx2", "fma", "f16c"} - set(_flags_of_cpu().split())
    return f"the CPU lacks {', '.join(sorted(missing))}" if missing else None


@functools.cache
def _key(cxx: str) -> str:
    version = subprocess.run([cxx, "--version"], capture_output=True, check=False, timeout=20).stdout
    parts = (
        _SOURCE.read_bytes(),
        version,
        _flags_of_cpu().encode(),
        " ".join(_FLAGS).encode(),
        torch.__version__.encode(),
    )
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def prepare() -> None:
    """Start building the kernels in a child process unless they are there, cannot be, or are being built."""
    global _running, _problem
    with _lock:
        if _running is not None or _problem is not None:
            return
        _problem = _unsupported()
        cxx = compiler()
        if _problem is None and cxx is None:
            _problem = "no C++ compiler (CXX, else g++)"
        if _problem is not None or cxx is None:
            return
        cache, key = CodeCache.of_this_user(), _key(cxx)
        try:
            cache.prepare()
            if cache.find(key) is not None:
                return
            folder = Path(tempfile.mkdtemp(prefix="fuel-"))
            torch_lib = Path(torch.__file__).parent / "lib"
            command = [cxx, *_FLAGS, str(_SOURCE), "-o", str(folder / _FILE), f"-L{torch_lib}", "-ltorch_cpu", "-lc10"]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # one signal ends the compiler and all that it started
            )
        except (CacheUnusable, OSError, subprocess.SubprocessError) as error:
            _problem = str(error)
            return
        _running = _Build(process, folder, key)


def shared_object(patience: float | None = _PATIENCE) -> Path | None:
    """The built kernels, None where there are none; waits ``patience`` seconds for a compiler (None: until it ends)."""
    global _running, _problem
    prepare()
    with _lock:
        if _problem is not None:
            return None
        cxx = compiler()
        assert cxx is not None
        if _running is not None:
            build = _running
            try:
                _, errors = build.process.communicate(timeout=patience)
            except subprocess.TimeoutExpired:
                _problem = (
                    f"the compiler took more than {patience:g} s beside loading; the next process finds the kernels"
                )
                threading.Thread(target=_finish, args=(build,), daemon=True).start()
                return None
            _running = None
            _problem = _keep(build, errors)
            if _problem is not None:
                return None
        try:
            entry = CodeCache.of_this_user().find(_key(cxx))
        except CacheUnusable as error:
            _problem = str(error)
            return None
        if entry is None:
            _problem = "removed from the code cache since they were built"
            return None
        return entry.folder / _FILE


def _keep(build: _Build, errors: bytes) -> str | None:
    """Store what the compiler made; returns why that was not possible."""
    try:
        if build.process.returncode:
            lines = errors.decode(errors="replace").strip().splitlines()
            return f"{compiler()} failed: {lines[0] if lines else build.process.returncode}"
        files = {_FILE: (build.folder / _FILE).read_bytes()}
        CodeCache.of_this_user().store(build.key, files, {"kind": "kernels"})
    except (CacheUnusable, OSError) as error:
        return str(error)
    finally:
        shutil.rmtree(build.folder, ignore_errors=True)
    return None


@atexit.register
def _abandon() -> None:
    """A process that ends before it needed the kernels leaves nothing behind."""
    if _running is not None:
        with contextlib.suppress(OSError):
            os.killpg(_running.process.pid, signal.SIGKILL)
        shutil.rmtree(_running.folder, ignore_errors=True)


def _finish(build: _Build) -> None:
    """Keep for the next process what was built too late for this one."""
    _, errors = build.process.communicate()
    _keep(build, errors)


def status() -> str:
    """One line for people: why the kernels are not in use, or where they are."""
    if _problem is not None:
        return _problem
    cxx = compiler()
    return "not built" if cxx is None else f"{CodeCache.of_this_user().root} ({_key(cxx)[:12]})"

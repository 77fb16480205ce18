"""What compiled code and stored recordings are good for: everything that would make them other code.

Code has no checks of its own, so whatever might change it stands in its key; a difference costs a build, a forgotten
one would cost a wrong answer.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch

from fuel_core import __version__
from fuel_core.code_cache import compiler
from fuel_core.plan_backends.rewrites import REWRITES

__all__ = ["INDUCTOR_OPTIONS", "code_key", "compiler", "environment", "index_key", "shelf_identity", "shelf_key"]

# Threads: left to itself, the compiler writes the number of the machine it ran on into the code. With one, its own
# kernels (small ones) run serially, and the products, which are torch's, follow the process' setting.
INDUCTOR_OPTIONS: dict[str, Any] = {"cpp.threads": 1, "aot_inductor.precompile_headers": False}

_HERE = Path(__file__).resolve().parent
_CORE = _HERE.parent


@functools.cache
def _compiler_version(path: str) -> str:
    try:
        done = subprocess.run([path, "-dumpfullversion", "-dumpmachine"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return " ".join(done.stdout.split())


@functools.cache
def _cpu() -> str:
    """The CPU's features, all of them: code is generated for this very CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    named = " ".join(sorted(flags.split())) or f"{platform.processor()} {platform.version()}"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {named}"


@functools.cache
def _sources() -> str:
    """Hash of what records, rewrites and lowers a step, so that code from an older checkout is never taken over."""
    digest = hashlib.sha256()
    paths = [
        *_HERE.glob("*.py"),
        *(_CORE / "layers").glob("*.py"),
        *(_CORE / "native").glob("*.*p*"),
        _CORE / "persistent_decode" / "build.py",
    ]
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def environment() -> dict[str, str]:
    """What the code of a given graph depends on besides the graph."""
    path = compiler()
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {}) else None
    return {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "core": __version__,
        "recorder": _sources(),
        "cpu": _cpu(),
        "compiler": "none" if path is None else f"{path} {_compiler_version(path)}",
        "libc": libc or platform.platform(),
        "system": sys.platform,
        "options": json.dumps(INDUCTOR_OPTIONS, sort_keys=True),
        "rewrites": json.dumps([[rewrite.name, rewrite.version] for rewrite in REWRITES]),
    }


def code_key(fingerprint: str, layout: Hashable, environment: Mapping[str, str]) -> str:
    """The name of one recording's code: what it does, on what tensors, under what."""
    return _digest("code", fingerprint, layout, sorted(environment.items()))


def shelf_identity(model: object, structure: Hashable) -> str:
    """What a stored recording of ``model`` depends on that its probe does not show.

    A probe sees what a layer does at two sets of lengths, tracing sees every look at a length. Which of them a layer
    takes follows from its source and its config, so both are in here and a recording is only found again by the very
    code it was taken from.
    """
    sources = {_file_of(module) for module in _modules_of(model)}
    digests = [(Path(file).name, _hash_of(file, os.stat(file).st_mtime_ns)) for file in sorted(filter(None, sources))]
    return _digest("shelf", digests, structure, torch.__version__, torch.version.git_version, __version__, _sources())


def index_key(identity: str, environment: Mapping[str, str]) -> str:
    """The name of the list of code keys that a model (``shelf_identity``) came to under ``environment``."""
    return _digest("index", identity, sorted(environment.items()))


def shelf_key(identity: str, probed: Hashable) -> str:
    """The name of one segment's stored recording."""
    return _digest("recording", identity, probed)


def _modules_of(model: object) -> list[Any]:
    """Modules of the packages that the model's class and bases come from, as far as they are imported."""
    names = {cls.__module__ for cls in type(model).__mro__}
    tops = {name.partition(".")[0] for name in names} - {"fuel_core", "torch", *sys.stdlib_module_names}
    loaded = list(sys.modules.items())
    return [module for name, module in loaded if name in names or name.partition(".")[0] in tops]


def _file_of(module: Any) -> str | None:
    file = getattr(module, "__file__", None)
    return file if file and file.endswith(".py") and os.path.isfile(file) else None


@functools.lru_cache(maxsize=512)
def _hash_of(file: str, _changed: int) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()

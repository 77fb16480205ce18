"""What this machine and this installation offer a model, and what about them is broken.

Gathers facts for `fuel doctor` and judges them; prints nothing and changes nothing. torch is asked in a process of its
own, so that one that ends the interpreter (an instruction this CPU lacks, two OpenMP runtimes) is a line of the report.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import importlib_metadata

import fuel_core
from fuel_core import discovery
from fuel_core.code_cache import CodeCache, compiler
from fuel_core.discovery import FamilyRecord, Status
from fuel_core.families import FAMILY_API

__all__ = ["SETTINGS", "Diagnosis", "diagnose"]

SETTINGS = (
    "FUEL_CACHE",
    "FUEL_COMPILE",
    "FUEL_DEBUG",
    "FUEL_FAMILIES",
    "FUEL_LOG",
    "FUEL_NATIVE",
    "FUEL_PREFER",
    "FUEL_PROFILE",
    "FUEL_STRICT",
)
"""Environment variables that mean something to fuel."""

_OPTIONAL = {
    "huggingface-hub": "downloads checkpoints (hf download)",
    "transformers": "converts a tokenizer.model, and is the reference a family is tested against",
    "pytest": "runs a family's tests",
}
_CPU_FEATURES = (
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
)
_TORCH_TIMEOUT_S = 120

# Runs with the path of the process that asks, so that both find the same torch.
_ASK_TORCH = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import torch
found = {
    "version": str(torch.__version__),
    "file": torch.__file__,
    "commit": torch.version.git_version,
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "debug": torch.version.debug,
    "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    "threads": torch.get_num_threads(),
    "interop_threads": torch.get_num_interop_threads(),
}
devices = [{"name": "cpu", "description": "", "memory_bytes": None}]
for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    about = torch.cuda.get_device_properties(index)
    text = f"{about.name}, compute capability {about.major}.{about.minor}"
    devices.append({"name": f"cuda:{index}", "description": text, "memory_bytes": about.total_memory})
if torch.backends.mps.is_available():
    devices.append({"name": "mps", "description": "", "memory_bytes": None})
print(json.dumps({"torch": found, "devices": devices}))
"""


@dataclass
class Diagnosis:
    """The report: `facts` ready for JSON, the families' records, what is broken and what is only worth knowing.

    `problems` and `remarks` are one line each. A problem is something that keeps fuel, or a model that an installed
    package should serve, from working as it was set up.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    families: list[FamilyRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values."""
        return {
            "ok": not self.problems,
            "problems": list(self.problems),
            "remarks": list(self.remarks),
            **self.facts,
            "family_api": FAMILY_API,
            "families": [record.as_dict() for record in self.families],
        }


def diagnose(*, load: bool = False) -> Diagnosis:
    """Look at everything. With `load`, family plugins are imported in this process, each inside a guard."""
    report = Diagnosis()
    _core(report)
    _torch(report)
    _cpu(report)
    _compiler(report)
    _cache(report)
    _settings(report)
    _families(report, load=load)
    return report


def _version_of(distribution: str) -> str | None:
    try:
        return importlib_metadata.version(distribution)
    except Exception:
        return None


def _core(report: Diagnosis) -> None:
    place = Path(fuel_core.__file__).parent
    report.facts["core"] = {
        "version": fuel_core.__version__,
        "folder": str(place),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
    }
    needs: list[dict[str, Any]] = []
    report.facts["dependencies"] = needs
    report.facts["optional"] = [
        {"name": name, "version": _version_of(name), "for": use} for name, use in _OPTIONAL.items()
    ]
    try:
        distribution = importlib_metadata.distribution("fuel-core")
    except importlib_metadata.PackageNotFoundError:
        report.remarks.append(
            f"fuel-core is run from {place} without being installed, so nothing says what it needs; "
            "`pip install -e` puts that right"
        )
        return
    if distribution.version != fuel_core.__version__:
        report.remarks.append(
            f"fuel-core {fuel_core.__version__} is what runs (from {place}), but {distribution.version} is what is "
            "installed: one of two cores is in the way; uninstall it"
        )
    for need in discovery.requirements(distribution):
        needs.append({"name": need.name, "required": need.specifier, "version": need.found, "fits": need.fits})
        if need.found is None:
            report.problems.append(f"{need.name} is not installed, expected {need.asked}; pip install '{need.asked}'")
        elif not need.fits:
            report.remarks.append(f"{need.name}: {need.asked} expected, found {need.found}, which was not tested")


def _torch(report: Diagnosis) -> None:
    report.facts["torch"], report.facts["devices"] = {"error": None}, []
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH, json.dumps(sys.path)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        error = f"importing it took more than {_TORCH_TIMEOUT_S} s"
    except OSError as cause:
        error = f"no process could be started to import it: {cause}"
    else:
        if done.returncode == 0:
            # Whatever an installation prints while it starts stands above.
            report.facts.update(json.loads(done.stdout.splitlines()[-1]))
            report.facts["torch"]["error"] = None
            return
        said = done.stderr.strip().splitlines()
        if done.returncode < 0:
            error = f"importing it ended the interpreter with {_signal_name(-done.returncode)}"
        else:
            error = said[-1] if said else f"importing it ended with exit code {done.returncode}"
    report.facts["torch"]["error"] = error
    report.problems.append(f"torch cannot be imported: {error}; install it again, for this machine")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cpu(report: Diagnosis) -> None:
    model, features = platform.processor(), []
    try:
        # One CPU stands for all of them.
        first = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        first = ""
    for line in first.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            features = [feature for feature in _CPU_FEATURES if feature in value.split()]
        elif name.strip() == "model name":
            model = value.strip()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report.facts["cpu"] = {
        "model": model or platform.machine(),
        "machine": platform.machine(),
        "features": features,
        "cpus": os.cpu_count(),
        "cpus_usable": usable,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def _compiler(report: Diagnosis) -> None:
    named = os.environ.get("CXX")
    path = compiler()
    version = None
    if path is None:
        wanted = f"CXX={named!r} names none" if named else "no g++ on PATH, and CXX is not set"
        report.remarks.append(f"no C++ compiler: {wanted}; plans cannot be compiled to native code")
    else:
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=20)
            version = next(iter(done.stdout.splitlines()), None)
        except (OSError, subprocess.SubprocessError) as error:
            report.remarks.append(f"C++ compiler {path} does not answer: {error}")
    report.facts["compiler"] = {"path": path, "version": version, "from": "CXX" if named else "PATH"}


def _cache(report: Diagnosis) -> None:
    """The folder must be the user's alone: what is loaded from it is code."""
    folder = CodeCache.of_this_user().root
    facts: dict[str, Any] = {
        "folder": str(folder),
        "from": "FUEL_CACHE" if os.environ.get("FUEL_CACHE") else "default",
        "exists": False,
        "owner": None,
        "mode": None,
        "writable": False,
        "files": 0,
        "size_bytes": 0,
    }
    report.facts["cache"] = facts
    another = "set FUEL_CACHE to another place"
    try:
        found = folder.stat()
    except FileNotFoundError:
        parent = next((p for p in folder.absolute().parents if p.exists()), folder)
        facts["writable"] = os.access(parent, os.W_OK | os.X_OK)
        if not facts["writable"]:
            report.problems.append(
                f"cache {folder}: expected a folder that can be made, found {parent} closed; {another}"
            )
        return
    except OSError as error:
        report.problems.append(f"cache {folder}: expected a folder, found {error.strerror or error}; {another}")
        return
    mode = stat.S_IMODE(found.st_mode)
    facts |= {"exists": True, "owner": _user(found.st_uid), "mode": f"{mode:04o}"}
    facts["writable"] = os.access(folder, os.W_OK | os.X_OK)
    if not stat.S_ISDIR(found.st_mode):
        report.problems.append(f"cache {folder}: expected a folder, found a file; {another}")
        return
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        report.problems.append(
            f"cache {folder}: expected a folder of your own, found one of {facts['owner']}; {another}"
        )
    elif hasattr(os, "geteuid") and mode & 0o022:
        report.problems.append(
            f"cache {folder}: expected a folder that only you can write to, found mode {facts['mode']}; "
            "empty it and chmod 700 it"
        )
    elif not facts["writable"]:
        report.problems.append(f"cache {folder}: expected a folder that you can write to, found none; {another}")
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                facts["size_bytes"] += os.lstat(os.path.join(path, name)).st_size
                facts["files"] += 1
            except OSError:  # removed meanwhile
                continue


def _user(number: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(number).pw_name
    except (ImportError, KeyError):
        return str(number)


def _settings(report: Diagnosis) -> None:
    report.facts["settings"] = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("FUEL_")}
    for name in report.facts["settings"]:
        if name not in SETTINGS:
            report.remarks.append(f"{name} is set, but means nothing; known are {', '.join(SETTINGS)}")


def _families(report: Diagnosis, *, load: bool) -> None:
    report.families = discovery.families(load=load)
    if not report.families:
        report.remarks.append("no family is installed, so no model can be served; see docs/families.md")
    for record in report.families:
        if record.status not in (Status.OK, Status.NOT_LOADED, Status.DISABLED):
            who = f" ({record.package})" if record.package else ""
            report.problems.append(f"family {record.name!r}{who} is {record.status}: {record.detail}")
        report.remarks += [f"family {record.name!r}: {warning}" for warning in record.warnings]
    report.problems += discovery.faulty_preferences(report.families)

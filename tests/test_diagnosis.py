"""What `fuel doctor` finds out, and what it calls broken."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from plugin_site import Site, imported

from fuel_core import diagnosis, discovery
from fuel_core.diagnosis import Diagnosis, diagnose

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _own_discovery(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(discovery, "_process_wide", discovery.Discovery())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("FUEL_CACHE")
    monkeypatch.delenv("FUEL_COMPILE")


def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the question that takes a process: for tests about everything else."""
    monkeypatch.setattr(diagnosis, "_torch", lambda report: None)


def test_report_of_a_working_installation_is_whole_plain_and_without_problems(site: Site) -> None:
    site.install("fuel-zebra", family="zebra")
    report = diagnose()
    assert report.problems == []
    shown = json.loads(json.dumps(report.as_dict()))
    assert shown["ok"] is True
    assert shown["torch"]["error"] is None
    assert shown["torch"]["threads"] >= 1
    assert shown["devices"][0]["name"] == "cpu"
    assert {need["name"] for need in shown["dependencies"]} >= {"torch", "pluggy", "tokenizers"}
    assert all(need["fits"] for need in shown["dependencies"])
    assert {tool["name"] for tool in shown["optional"]} == {"huggingface-hub", "transformers", "pytest"}
    assert shown["cpu"]["cpus_usable"] >= 1
    assert "zebra" in {record["family"] for record in shown["families"]}
    assert imported() == []


BAD_TORCH = {
    "raises": ("raise OSError('libgomp.so.1: cannot open shared object file')", "libgomp.so.1: cannot open"),
    "is missing a part": ("", "AttributeError"),
    "kills": ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "ended the interpreter with SIGILL"),
    "leaves": ("import os; os._exit(3)", "ended with exit code 3"),
    "hangs": ("import time; time.sleep(600)", "took more than"),
}


@pytest.mark.parametrize("case", BAD_TORCH)
def test_torch_that_cannot_be_imported_is_a_problem_and_no_crash(
    site: Site, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    source, expected = BAD_TORCH[case]
    (site.folder / "torch.py").write_text(source)
    monkeypatch.setattr(diagnosis, "_TORCH_TIMEOUT_S", 2 if case == "hangs" else 60)
    report = diagnose()
    (problem,) = report.problems
    assert problem.startswith("torch cannot be imported: ")
    assert expected in problem
    assert "\n" not in problem
    assert report.facts["torch"]["error"] in problem
    assert report.facts["devices"] == []


FAKE_TORCH = """
print("a banner")
from types import SimpleNamespace as N
__version__ = "9.9"
version = N(git_version="abc", cuda="13.1", hip=None, debug=False)
backends = N(cpu=N(get_cpu_capability=lambda: "AVX9"), mps=N(is_available=lambda: True))
get_num_threads = get_num_interop_threads = lambda: 3
card = N(name="a card", major=9, minor=0, total_memory=7)
cuda = N(is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda index: card)
"""


def test_devices_are_listed_and_what_torch_prints_when_imported_does_not_matter(site: Site) -> None:
    (site.folder / "torch.py").write_text(FAKE_TORCH)
    report = diagnose()
    assert report.problems == []
    assert (report.facts["torch"]["version"], report.facts["torch"]["threads"]) == ("9.9", 3)
    assert [device["name"] for device in report.facts["devices"]] == ["cpu", "cuda:0", "cuda:1", "mps"]
    assert report.facts["devices"][1]["description"] == "a card, compute capability 9.0"
    assert report.facts["devices"][1]["memory_bytes"] == 7


def test_each_family_that_cannot_serve_is_a_problem_and_a_warning_is_a_remark(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_torch(monkeypatch)
    site.install("fuel-good", family="good")
    site.install("fuel-bad", family="bad", source="1 / 0")
    groups = {"fuel_core.families.v99": {"new": "fuel_new"}, "fuel_core.model_types": {"new": "fuel_new"}}
    site.install("fuel-new", family="new", groups=groups)
    metadata = site.folder / "fuel_good-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: fuel-bad>=2\n")
    monkeypatch.setenv("FUEL_FAMILIES", "good,bad,new,gone")
    gone = "family 'gone' is not found: named in FUEL_FAMILIES, but no installed distribution publishes it"
    listed = diagnose()
    assert len(listed.problems) == 2
    assert listed.problems[0] == gone
    assert listed.problems[1].startswith("family 'new' (fuel-new 1.0) is incompatible: written for family API 99")
    assert listed.remarks == ["family 'good': fuel-good 1.0 requires fuel-bad>=2, found fuel-bad 1.0"]
    assert imported() == []
    loaded = diagnose(load=True)
    assert loaded.problems[0].startswith("family 'bad' (fuel-bad 1.0) is broken: fuel_bad failed with ZeroDivision")
    assert loaded.problems[1:] == listed.problems


def test_preference_that_cannot_be_followed_is_a_problem(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_torch(monkeypatch)
    site.install("fuel-zebra", family="zebra")
    monkeypatch.setenv("FUEL_FAMILIES", "zebra")
    monkeypatch.setenv("FUEL_PREFER", "zebra=Fuel_Zebra")
    assert diagnose().problems == []
    monkeypatch.setenv("FUEL_PREFER", "zebra=acme-zebra")
    (problem,) = diagnose().problems
    assert "FUEL_PREFER: zebra=acme-zebra names a distribution that publishes no family here" in problem
    assert "fuel-zebra" in problem
    monkeypatch.setenv("FUEL_PREFER", "acme-zebra")
    assert diagnose().problems == ["FUEL_PREFER: expected NAME=DISTRIBUTION, found 'acme-zebra'; correct the setting"]


def test_unknown_setting_is_a_remark(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_torch(monkeypatch)
    monkeypatch.setenv("FUEL_FAMILES", "zebra")
    report = diagnose()
    assert "FUEL_FAMILES is set, but means nothing; known are FUEL_CACHE, " in " ".join(report.remarks)
    assert report.facts["settings"] == {"FUEL_FAMILES": "zebra"}
    assert report.problems == []


def test_known_settings_are_the_ones_the_code_reads() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "fuel_core").rglob("*.py"))
    assert set(diagnosis.SETTINGS) == set(re.findall(r'environ(?:\.get\(|\[)"(FUEL_\w+)"', code))


def _cache(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> Diagnosis:
    if folder is not None:
        monkeypatch.setenv("FUEL_CACHE", str(folder))
    report = Diagnosis()
    diagnosis._cache(report)
    return report


def test_cache_is_where_the_setting_says_or_in_the_users_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    facts = _cache(monkeypatch, None).facts["cache"]
    assert (facts["folder"], facts["from"], facts["exists"]) == (str(tmp_path / "caches" / "fuel"), "default", False)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _cache(monkeypatch, None).facts["cache"]["folder"] == str(tmp_path / ".cache" / "fuel")
    facts = _cache(monkeypatch, Path("~/elsewhere")).facts["cache"]
    assert (facts["folder"], facts["from"]) == (str(tmp_path / "elsewhere"), "FUEL_CACHE")


def test_cache_that_is_the_users_alone_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    (folder / "v1").mkdir(parents=True)
    folder.chmod(0o700)
    (folder / "a").write_bytes(b"12345")
    (folder / "v1" / "b").write_bytes(b"1234567")
    report = _cache(monkeypatch, folder)
    facts = report.facts["cache"]
    assert (facts["exists"], facts["writable"], facts["mode"]) == (True, True, "0700")
    assert (facts["files"], facts["size_bytes"]) == (2, 12)
    assert report.problems == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_cache_that_others_can_write_to_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    (problem,) = _cache(monkeypatch, folder).problems
    assert f"found mode {mode:04o}" in problem
    assert "chmod 700" in problem
    folder.chmod(0o755)  # others may look
    assert _cache(monkeypatch, folder).problems == []


def test_cache_of_another_user_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    (problem,) = _cache(monkeypatch, folder).problems
    assert "expected a folder of your own, found one of " in problem


def test_cache_that_is_a_file_or_lies_below_one_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "expected a folder, found a file" in _cache(monkeypatch, tmp_path / "file").problems[0]
    assert "expected a folder, found Not a directory" in _cache(monkeypatch, tmp_path / "file" / "cache").problems[0]


def test_compiler_is_what_cxx_names_or_what_is_on_the_path(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _without_torch(monkeypatch)
    compiler = tmp_path / "my-c++"
    compiler.write_text("#!/bin/sh\necho my compiler 1.2\necho more\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} -O1")
    assert diagnose().facts["compiler"] == {"path": str(compiler), "version": "my compiler 1.2", "from": "CXX"}
    monkeypatch.setenv("CXX", "no-such-compiler")
    report = diagnose()
    assert report.facts["compiler"]["path"] is None
    assert [line for line in report.remarks if "no C++ compiler: CXX='no-such-compiler' names none" in line]
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [line for line in diagnose().remarks if "no C++ compiler: no g++ on PATH" in line]
    assert diagnose().problems == []


def test_core_whose_dependency_is_missing_or_of_an_untested_version_says_so(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_torch(monkeypatch)
    info = site.folder / "fuel_core-0.0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fuel-core\nVersion: 0.0.9\nRequires-Dist: not-installed-zz>=3\n"
        "Requires-Dist: pluggy<1\nRequires-Dist: rich; extra == 'test'\n"
    )
    report = diagnose()
    assert report.problems == [
        "not-installed-zz is not installed, expected not-installed-zz>=3; pip install 'not-installed-zz>=3'"
    ]
    said = " ".join(report.remarks)
    assert "pluggy: pluggy<1 expected, found " in said
    assert "0.0.9 is what is installed: one of two cores is in the way" in said
    assert [need["name"] for need in report.facts["dependencies"]] == ["not-installed-zz", "pluggy"]

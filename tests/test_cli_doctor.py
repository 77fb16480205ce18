"""`fuel doctor`: one report for people, one for scripts, and an exit code that says whether something is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_site import Site

from fuel_core import cli, diagnosis, discovery


@pytest.fixture(autouse=True)
def _own_discovery(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(discovery, "_process_wide", discovery.Discovery())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FUEL_CACHE")
    monkeypatch.delenv("FUEL_COMPILE")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report about torch without the process it takes."""

    def torch(report: diagnosis.Diagnosis) -> None:
        report.facts["torch"] = {
            "error": None, "version": "9.9+cu1", "cuda": "1.2", "hip": None, "commit": "0123456789abcdef",
            "threads": 3, "cpu_capability": "AVX9",
        }  # fmt: skip
        report.facts["devices"] = [{"name": "cuda:0", "description": "a card", "memory_bytes": 2_000_000_000}]

    monkeypatch.setattr(diagnosis, "_torch", torch)


@pytest.mark.usefixtures("quick")
def test_doctor_prints_a_table_and_exits_zero_when_nothing_is_broken(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("fuel-zebra", family="zebra")
    monkeypatch.setenv("CXX", sys.executable)  # something that answers --version
    assert cli.main(["doctor"]) == 0
    captured = capsys.readouterr()
    for part in (
        "9.9+cu1 (CUDA 1.2, commit 0123456789)", "cuda:0, a card, 2.0 GB", "AVX9 in torch", "not there yet",
        f"{sys.executable}, Python 3.", "pluggy", "fuel-zebra 1.0",
    ):  # fmt: skip
        assert part in captured.out
    assert captured.err == ""
    assert "\x1b" not in captured.out


@pytest.mark.usefixtures("quick")
def test_doctor_json_is_one_object_and_problems_exit_2(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("fuel-bad", family="bad", source="print('noise')\n1 / 0")
    monkeypatch.setenv("FUEL_FAMILIES", "bad")
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert cli.main(["doctor", "--json", "--load"]) == 2
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["ok"] is False
    assert report["problems"][0].startswith("family 'bad' (fuel-bad 1.0) is broken: ")
    assert captured.err.splitlines() == ["noise", f"problem: {report['problems'][0]}"]
    assert "ZeroDivisionError" in {r["family"]: r["traceback"] for r in report["families"]}["bad"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["option", "setting"])
def test_doctor_exits_2_for_a_remark_only_where_it_is_strict(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    monkeypatch.setenv("FUEL_NONSENSE", "1")
    assert cli.main(["doctor"]) == 0
    assert "remark: FUEL_NONSENSE is set, but means nothing" in capsys.readouterr().err
    if how == "setting":
        monkeypatch.setenv("FUEL_STRICT", "1")
    assert cli.main(["doctor", *(["--strict"] if how == "option" else [])]) == 2


def test_doctor_imports_no_torch_itself_and_survives_one_that_kills(site: Site) -> None:
    # In a process of its own: here torch has long been imported.
    (site.folder / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    code = (
        f"import sys; sys.path.insert(0, {str(site.folder)!r})\nfrom fuel_core.cli import main\n"
        "code = main(['doctor'])\nprint(code, sorted({'torch', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "2 []"
    assert "problem: torch cannot be imported: importing it ended the interpreter with SIGSEGV" in done.stderr
    assert "cannot be imported" in done.stdout

"""`fuel families`: every status is shown, and the exit code is for scripts that ask."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from plugin_site import Site, imported

from fuel_core import cli, discovery


@pytest.fixture(autouse=True)
def _own_discovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_process_wide", discovery.Discovery())


def _listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert cli.main(["families", "--json", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["family_api"] == 1
    return {record["family"]: record for record in report["families"]}


def test_families_json_is_one_object_and_imports_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("fuel-zebra", "2.0", family="zebra", model_types=("zebra", "okapi"))
    shown = _listed(capsys)["zebra"]
    assert (shown["distribution"], shown["version"], shown["status"]) == ("fuel-zebra", "2.0", "not loaded")
    assert shown["model_types"] == ["okapi", "zebra"]
    assert imported() == []


def test_families_load_shows_broken_ones_with_their_traceback_and_exits_zero(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install("fuel-zebra", family="zebra")
    site.install("fuel-bad", family="bad", source="1 / 0")
    monkeypatch.setenv("FUEL_FAMILIES", "zebra,bad")
    shown = _listed(capsys, "--load")
    assert shown["zebra"]["status"] == "ok"
    assert shown["bad"]["status"] == "broken"
    assert "ZeroDivisionError" in shown["bad"]["traceback"]
    assert cli.main(["families", "--load"]) == 0
    captured = capsys.readouterr()
    assert "fuel-bad 1.0" in captured.out
    assert "Traceback" in captured.err
    assert "\x1b" not in captured.out + captured.err  # colour only on a terminal


def test_families_strict_exits_2_for_each_status_that_cannot_serve(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install("fuel-zebra", family="zebra")
    monkeypatch.setenv("FUEL_FAMILIES", "zebra")
    assert cli.main(["families", "--strict", "--load"]) == 0
    monkeypatch.setenv("FUEL_FAMILIES", "zebra,zerba")
    assert cli.main(["families", "--strict"]) == 2
    assert "zerba" in capsys.readouterr().err
    monkeypatch.setenv("FUEL_FAMILIES", "zebra")
    site.install("acme-zebra", family="zebra")
    assert cli.main(["families", "--strict"]) == 2


def test_families_without_any_plugin_says_where_they_come_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert cli.main(["families"]) == 0
    assert "separate packages" in capsys.readouterr().out

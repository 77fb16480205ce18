"""Every check of the core's conformance kit, on this family: pytest collects them from here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fuel_olmo import conformance as declared
from fuel_olmo.family import FAMILY

PROJECT = Path(__file__).resolve().parent.parent

PROJECT_OR_NONE = str(PROJECT) if (PROJECT / "fuel_olmo").is_dir() else None
conformance = dataclasses.replace(declared.CONFORMANCE, project=PROJECT_OR_NONE)


def test_the_kit_is_collected(request: pytest.FixtureRequest) -> None:
    """Without the plugin that fuel-core registers, pytest would find two tests here and pass."""
    assert request.config.pluginmanager.has_plugin("fuel_core.testing.plugin"), "install fuel-core again"


def test_every_model_type_has_a_config() -> None:
    assert {config["model_type"] for config in declared.CONFORMANCE.configs.values()} == set(FAMILY.model_types)

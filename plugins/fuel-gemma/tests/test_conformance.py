"""Every check of the core's conformance kit, on every generation of this package: pytest collects them from here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fuel_gemma.conformance import CONFORMANCE
from fuel_gemma.family import FAMILY

PROJECT = Path(__file__).resolve().parent.parent

conformance = dataclasses.replace(CONFORMANCE, project=str(PROJECT) if (PROJECT / "fuel_gemma").is_dir() else None)


def test_the_kit_is_collected(request: pytest.FixtureRequest) -> None:
    """Without the plugin that fuel-core registers, pytest would find two tests here and pass."""
    assert request.config.pluginmanager.has_plugin("fuel_core.testing.plugin"), "install fuel-core again"


def test_every_model_type_has_a_config_or_is_one_of_another() -> None:
    """gemma3 nests a gemma3_text, whose own config is here; its loading is tested in test_gemma3."""
    shown = {config["model_type"] for config in CONFORMANCE.configs.values()}
    assert shown == set(FAMILY.model_types) - {"gemma3"}

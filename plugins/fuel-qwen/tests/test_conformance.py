"""Every check of the core's conformance kit, on every generation of this package: pytest collects them from here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fuel_qwen.conformance import CONFORMANCE
from fuel_qwen.family import FAMILY

PROJECT = Path(__file__).resolve().parent.parent

conformance = dataclasses.replace(CONFORMANCE, project=str(PROJECT) if (PROJECT / "fuel_qwen").is_dir() else None)


def test_the_kit_is_collected(request: pytest.FixtureRequest) -> None:
    """Without the plugin that fuel-core registers, pytest would find two tests here and pass."""
    assert request.config.pluginmanager.has_plugin("fuel_core.testing.plugin"), "install fuel-core again"


def test_every_model_type_has_a_config() -> None:
    shown = {config["model_type"] for config in CONFORMANCE.configs.values()}
    assert shown == set(FAMILY.model_types)

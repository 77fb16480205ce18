"""Every check of the core's conformance kit, on every architecture of this package: pytest collects them from here."""

from __future__ import annotations

import pytest
from fuel_core.testing import Conformance

from fuel_llama.conformance import CONFORMANCE
from fuel_llama.family import FAMILY

conformance: Conformance = CONFORMANCE


def test_the_kit_is_collected(request: pytest.FixtureRequest) -> None:
    """A pytest without the kit's plugin would find one test here, and pass."""
    assert any("correctness.held_steps" in item.nodeid for item in request.session.items) or (
        request.config.option.keyword or request.config.args != request.config.getini("testpaths")
    )


def test_every_model_type_has_a_config_or_is_one_of_another() -> None:
    """mistral3 nests a decoder of another type, whose own config is here; its loading is tested in test_mistral."""
    shown = {config["model_type"] for config in CONFORMANCE.configs.values()}
    assert shown == set(FAMILY.model_types) - {"mistral3"}

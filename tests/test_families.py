"""What a Family must be before anything is built from it."""

from __future__ import annotations

from typing import Any

import pytest

from fuel_core.errors import FamilyBrokenError
from fuel_core.families import Family


def _family(**changes: Any) -> Family:
    fields: dict[str, Any] = {
        "name": "toy",
        "model_types": ("toy",),
        "gguf_architectures": (),
        "resolve_config": dict,
        "build": dict,
    }
    return Family(**{**fields, **changes})


def test_family_accepts_names_from_one_side_only() -> None:
    assert _family().model_types == ("toy",)
    assert _family(model_types=(), gguf_architectures=("toy",)).gguf_architectures == ("toy",)


def test_family_is_frozen_and_its_defaults_are_its_own() -> None:
    family = _family()
    with pytest.raises(AttributeError):
        family.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        family.defaults["rope_theta"] = 1.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"name": ""}, "Family.name"),
        ({"model_types": "toy"}, "model_types"),
        ({"model_types": ("toy", "")}, "model_types"),
        ({"gguf_architectures": ["toy"]}, "gguf_architectures"),
        ({"model_types": ()}, "serves no model_type"),
        ({"resolve_config": None}, "resolve_config"),
        ({"build": "toy"}, "build"),
    ],
)
def test_family_refuses_a_field_that_cannot_work_and_names_it(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(FamilyBrokenError, match=names):
        _family(**changes)

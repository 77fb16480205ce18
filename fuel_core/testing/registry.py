"""The checks by name: what each needs, and whether all that there should be are there.

A check is a function of one case (one config) or of the whole family. Its docstring says which defect it catches.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

from fuel_core.errors import ConformanceError
from fuel_core.testing.declaration import Conformance

__all__ = ["MANIFEST", "Check", "CheckFailed", "CheckSkipped", "check", "checks", "fail", "require", "skip"]

REQUIRED, OPTIONAL = "required", "optional"

MANIFEST: Final[Mapping[str, tuple[str, ...]]] = {
    "contract": (
        "family_record",
        "config_is_frozen",
        "config_spellings_agree",
        "hostile_configs_are_refused",
        "build_allocates_nothing",
        "dims_agree",
        "tensors_are_used_once",
        "every_weight_reaches_the_logits",
        "steps_write_their_own_rows",
        "errors_carry_the_family",
        "capabilities_are_true",
        "fixtures_can_see",
    ),
    "correctness": (
        "fresh_steps",
        "held_steps",
        "chunked_prompts",
        "windows_crossed_twice",
        "every_position",
        "the_last_slot",
        "high_positions",
        "weight_formats",
        "half_precision_activations",
        "embedding_rows",
    ),
    "identity": (
        "fields_that_decide_ops_are_keyed",
        "fields_that_only_bind_are_not_keyed",
        "an_equal_config_keeps_the_plan",
        "bound_fields_are_followed",
        "bound_fields_are_shown",
        "instances_are_told_apart",
        "replaced_weights_are_followed",
        "allocations_are_told_apart",
        "capacity_dtype_and_device_are_keyed",
    ),
    "bound": (
        "every_layer_records",
        "recorded_elsewhere_the_ops_are_equal",
        "every_length_equals_a_fresh_step",
        "window_and_mask_are_one_entry",
        "assigned_plans_are_followed",
        "layers_leave_bound_data_alone",
        "steps_are_repeatable",
    ),
    "plans": (
        "one_plan_for_many_tokens",
        "op_counts_stay",
        "uniform_plans_emit_nothing_extra",
        "head_runs_on_the_last_row",
        "logits_belong_to_the_caller",
        "a_batch_of_two_is_two_of_one",
    ),
    "interleavings": (
        "two_caches_alternate",
        "two_models_alternate",
        "swapped_and_rewound",
        "errors_in_mid_step",
        "addresses_are_reused",
    ),
    "hygiene": (
        "imports_no_torch",
        "public_names_only",
        "metadata_is_complete",
        "wheel_installs_and_passes",
    ),
}
"""Topic (a file of `fuel_core.testing.checks`) -> its checks. One that goes missing is an error, not a shorter list."""


class CheckFailed(AssertionError):
    """A family does not do what the contract says; the message names the config and the numbers."""


class CheckSkipped(Exception):
    """A check does not apply to this case; the message says why."""


@dataclass(frozen=True)
class Check:
    """One named check."""

    name: str
    """``topic.name``"""
    catches: str
    """One line: the defect it is there for."""
    group: str
    """``required`` or ``optional`` (run when asked for)."""
    needs: frozenset[str]
    """Capabilities without which it does not apply."""
    per_config: bool
    run: Callable[[Any], None]


_checks: dict[str, Check] = {}
_Function = TypeVar("_Function", bound=Callable[[Any], None])


def check(
    *, group: str = REQUIRED, needs: tuple[str, ...] = (), per_config: bool = True
) -> Callable[[_Function], _Function]:
    """Register a function as the check named after its file and itself."""

    def register(function: _Function) -> _Function:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        catches = " ".join((function.__doc__ or "").split())
        _checks[name] = Check(name, catches, group, frozenset(needs), per_config, function)
        return function

    return register


def checks() -> tuple[Check, ...]:
    """Every check, in the manifest's order. Raises ConformanceError when one is missing or is not in the manifest."""
    for topic in MANIFEST:
        importlib.import_module(f"fuel_core.testing.checks.{topic}")
    expected = [f"{topic}.{name}" for topic, names in MANIFEST.items() for name in names]
    missing, extra = sorted(set(expected) - set(_checks)), sorted(set(_checks) - set(expected))
    if missing or extra:
        raise ConformanceError(
            f"the conformance kit is not whole: missing {missing or 'none'}, not in the manifest {extra or 'none'}; "
            "install fuel-core again"
        )
    return tuple(_checks[name] for name in expected)


def verify(declaration: Conformance) -> None:
    """Refuse a declaration that names a check or a config that does not exist."""
    if not isinstance(declaration, Conformance):
        raise ConformanceError(
            f"a Conformance expected, found {declaration!r:.80}; pass the declaration, or run `fuel check FAMILY`"
        )
    names = {one.name for one in checks()}
    for key in declaration.expected_failures:
        name, _, config = key.partition("[")
        if name not in names or (config and config.removesuffix("]") not in declaration.configs):
            raise ConformanceError(
                f"expected_failures: {key!r} is no check of the kit (of a config it is NAME[CONFIG]); "
                "docs/conformance.md lists them"
            )


def fail(message: str) -> NoReturn:
    raise CheckFailed(message)


def require(condition: object, message: str) -> None:
    """Fail with ``message`` unless ``condition`` holds."""
    if not condition:
        raise CheckFailed(message)


def skip(why: str) -> NoReturn:
    raise CheckSkipped(why)

"""What an author declares: the family, tiny configs, capabilities, where the truth comes from.

Nothing is imported or built here: a declaration is data, checked for misspellings when it is made. Knows no check and
no family.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from fuel_core.errors import ConformanceError

if TYPE_CHECKING:
    from fuel_core.families import Family
    from fuel_core.testing.oracles import Oracle

__all__ = ["CAPABILITIES", "Conformance", "family_of"]

CAPABILITIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bias": "some projection adds a bias",
        "embed_scale": "embeddings are multiplied by a constant",
        "full_heads": "some config has as many kv heads as query heads",
        "grouped_heads": "some config has fewer kv heads than query heads",
        "named_slots": "some layer keeps named slots instead of keys and values",
        "partial_rotary": "fewer features are rotated than a head has",
        "rope": "some layer rotates",
        "rope_variants": "layers differ in their rotation; one that does not rotate at all is no variant",
        "tied_head": "the head shares the embedding in some config",
        "window": "some layer attends through a window",
        "window_variants": "some layers have a window and others have none, or another",
    }
)
"""What a family may say of itself -> what that means. Each is verified: none may be claimed in vain, none left out."""

_BOUND_DEFAULT: Final = 2e-5


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Conformance:
    """A family's declaration. pytest collects its checks from a module-level instance; `fuel check` runs them.

    - `family`: the `Family`, or where it is, as "module:NAME".
    - `configs`: name -> config.json of a tiny checkpoint (hidden 96, a window of 5, ...): the kit makes its weights.
    - `capabilities`: words of `CAPABILITIES` that hold for some config. A word left out is as wrong as one too many.
    - `oracle`: where true logits come from: `transformers_oracle()`, `reference_oracle(f)`, `golden_oracle(path)`.
    - `distribution`: name of the package that ships the family; None skips the checks of packages.
    - `project`: the folder with its pyproject.toml, for the wheel check; None skips it.
    - `expected_failures`: "check" or "check[config]" -> why it fails. Strict: one that passes is an error.
    - `tolerance`: largest float32 error of a logit, relative to the largest logit (or 1).
    - `deep_tolerance`: the same at high positions, where a reference computes angles in float32.
    - `format_bounds`: weight format -> error in place of the kit's bound for it.
    - `bound_changes`: bound config field -> values to set one after another, where the kit cannot think of any.
    - `skipped_tensors`: names of checkpoint tensors that the family leaves out on purpose.

    Raises ConformanceError for an unknown capability, no configs, and an expected failure without a reason.
    """

    family: Family | str
    configs: Mapping[str, Mapping[str, Any]]
    capabilities: Set[str]
    oracle: Oracle
    distribution: str | None = None
    project: str | None = None
    expected_failures: Mapping[str, str] = field(default_factory=_empty)
    tolerance: float = _BOUND_DEFAULT
    deep_tolerance: float = 2 * _BOUND_DEFAULT
    format_bounds: Mapping[str, float] = field(default_factory=_empty)
    bound_changes: Mapping[str, Sequence[Any]] = field(default_factory=_empty)
    skipped_tensors: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.capabilities, str) or not isinstance(self.capabilities, Set):
            raise ConformanceError(f"capabilities: a set of words expected, found {self.capabilities!r}; write {{...}}")
        unknown = sorted(set(self.capabilities) - set(CAPABILITIES))
        if unknown:
            raise ConformanceError(
                f"capabilities: words of {', '.join(CAPABILITIES)} expected, found {', '.join(map(repr, unknown))}; "
                "correct or leave out"
            )
        if not self.configs:
            raise ConformanceError("configs: at least one tiny config expected, found none; see docs/conformance.md")
        for check, reason in self.expected_failures.items():
            if not isinstance(reason, str) or not reason.strip():
                raise ConformanceError(
                    f"expected_failures: {check!r} needs a reason, found {reason!r}; write why it fails"
                )


def family_of(declaration: Conformance) -> Family:
    """The declared family, imported if it was named. Raises ConformanceError for a name that leads nowhere."""
    from fuel_core.families import Family

    found: Any = declaration.family
    if isinstance(found, str):
        module, _, name = found.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConformanceError(
                f"family: 'module:NAME' of a Family expected, found {found!r} ({error}); correct it"
            ) from error
    if isinstance(found, Callable) and not isinstance(found, Family):  # type: ignore[arg-type]
        found = found()
    if not isinstance(found, Family):
        raise ConformanceError(f"family: a Family expected, found {type(found).__name__}; pass the plugin's FAMILY")
    return found

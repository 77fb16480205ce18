"""What the core ships for testing: the conformance kit that a family's author points at a family, and sabotage.

    from fuel_core.testing import Conformance, transformers_oracle

    conformance = Conformance(family="fuel_zebra.model:FAMILY", configs={...}, capabilities={...},
                              oracle=transformers_oracle())

It may import anything; the library never imports it. Importing it imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuel_core.testing.declaration import CAPABILITIES, Conformance
from fuel_core.testing.oracles import golden_oracle, record_golden, reference_oracle, transformers_oracle
from fuel_core.testing.runner import Result, run_checks

__all__ = [
    "CAPABILITIES",
    "Conformance",
    "Result",
    "Sabotage",
    "golden_oracle",
    "record_golden",
    "reference_oracle",
    "run_checks",
    "transformers_oracle",
]


@dataclass(frozen=True)
class Sabotage:
    """One defect: what it is called, what it breaks, and how it is put in (once, for the life of the process)."""

    name: str
    breaks: str
    apply: Callable[[], None]

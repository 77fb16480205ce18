"""One declared config made real: its checkpoint, its models, its truth, and the runs that checks compare.

A case is cheap to ask twice: checkpoints and true logits are kept for the life of the workspace.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fuel_core.backbone import DecodeBackbone
from fuel_core.checkpoint import RawConfig, load_weights, open_checkpoint
from fuel_core.errors import FuelError
from fuel_core.families import Family
from fuel_core.kv_cache import KvCache
from fuel_core.persistent_decode import InferenceContext, forward_decode_step
from fuel_core.testing.declaration import Conformance, family_of
from fuel_core.testing.oracles import Logits
from fuel_core.testing.registry import fail, require

__all__ = ["PATHS", "Case", "Run", "Workspace"]

PATHS = ("symbol", "device")


@dataclass
class Run:
    """Steps that ran: the logits of each call, by the index of the last id it was fed."""

    rows: list[tuple[int, Tensor]]
    cache: KvCache
    ctx: InferenceContext

    @property
    def last(self) -> Tensor:
        return self.rows[-1][1]


class Case:
    """One config of a declaration."""

    def __init__(self, workspace: Workspace, name: str) -> None:
        self.workspace, self.name = workspace, name
        self.declaration: Conformance = workspace.declaration
        self.family: Family = workspace.family
        self._prepared: dict[int, tuple[Path, Logits]] = {}
        self._truths: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    # -- what there is ------------------------------------------------------------------------------------------

    def prepared(self, seed: int = 0) -> tuple[Path, Logits]:
        """The checkpoint folder with the weights of ``seed``, and its true logits."""
        if seed not in self._prepared:
            folder = self.workspace.folder / f"{self.name}-{seed}"
            folder.mkdir(exist_ok=True)
            config = self.declaration.configs[self.name]
            logits = self.declaration.oracle.prepare(self.name, config, folder, self.family, seed)
            self._prepared[seed] = folder, logits
        return self._prepared[seed]

    @property
    def folder(self) -> Path:
        return self.prepared()[0]

    @cached_property
    def raw(self) -> Any:
        """The checkpoint's raw config, as written."""
        with open_checkpoint(self.folder) as checkpoint:
            return checkpoint.raw

    @cached_property
    def spec(self) -> Any:
        """The resolved spec."""
        return self.family.resolve_config(self.raw)

    def build(self, spec: Any = None) -> DecodeBackbone:
        """The backbone on the meta device."""
        spec = self.spec if spec is None else spec
        with torch.device("meta"):
            return self.family.build(spec)

    def model(self, seed: int = 0, spec: Any = None, weights: str = "auto") -> DecodeBackbone:
        """A model of its own with the checkpoint's weights; ``spec`` replaces its config."""
        backbone = self.build(spec)
        with open_checkpoint(self.prepared(seed)[0]) as checkpoint:
            load_weights(backbone, checkpoint, self.family, weights=weights)
        return backbone

    @cached_property
    def shared(self) -> DecodeBackbone:
        """A model for checks that leave it as it is."""
        return self.model()

    # -- ids and truth ------------------------------------------------------------------------------------------

    @property
    def vocab(self) -> int:
        return self.shared.decode_dims().vocab

    def ids(self, count: int, stream: int = 0) -> list[int]:
        """Ids that repeat in no pattern; a shorter run is a prefix of a longer one."""
        raw = np.random.Philox(key=stream).random_raw(count)
        return [int(number % self.vocab) for number in raw]

    def truth(self, ids: Sequence[int], seed: int = 0) -> Tensor:
        """The oracle's logits ``[T, V]``, float64."""
        key = (seed, tuple(ids))
        if key not in self._truths:
            self._truths[key] = self.prepared(seed)[1](ids).double()
        return self._truths[key]

    @property
    def window(self) -> int | None:
        """The widest window of any layer, None where there is none."""
        return max((w for w in self.shared.mask_plan.windows if w is not None), default=None)

    @property
    def length(self) -> int:
        """Ids of an ordinary run: three windows past a prompt, so that every window is crossed twice."""
        return self.prompt + max(9, 3 * (self.window or 0))

    @property
    def prompt(self) -> int:
        return 9

    # -- runs ---------------------------------------------------------------------------------------------------

    def cache(self, model: DecodeBackbone, capacity: int, dtype: torch.dtype = torch.float32) -> KvCache:
        return KvCache.with_capacity(model.layer_state_specs(), max_seq_len=capacity, dtype=dtype, device="cpu")

    def run(
        self,
        model: DecodeBackbone,
        ids: Sequence[int],
        chunks: Sequence[int] = (),
        *,
        path: str = "symbol",
        plan: str = "recorded",
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        cache: KvCache | None = None,
        ctx: InferenceContext | None = None,
    ) -> Run:
        """Feed ids: first in chunks, then one by one."""
        cache = cache or self.cache(model, capacity or len(ids) + 2, dtype)
        ctx = ctx or InferenceContext("cpu", offset_path=path, plan=plan)
        rows, fed = [], 0
        for size in [*chunks, *[1] * (len(ids) - sum(chunks))]:
            logits = forward_decode_step(model, list(ids[fed : fed + size]), cache, ctx)
            fed += size
            rows.append((fed - 1, logits))
        return Run(rows, cache, ctx)

    def fresh(self, model: DecodeBackbone, ids: Sequence[int], path: str = "symbol") -> Tensor:
        """Logits ``[T, V]`` of single steps executed fresh on a cache of their own."""
        return torch.stack([row for _, row in self.run(model, ids, path=path, plan="off").rows]).double()

    # -- verdicts -----------------------------------------------------------------------------------------------

    def close(self, found: Tensor, expected: Tensor, where: str, tolerance: float | None = None) -> None:
        """Fail unless every logit is within the tolerance, relative to the largest one (or 1)."""
        tolerance = self.declaration.tolerance if tolerance is None else tolerance
        error, limit = distance(found, expected), tolerance * max(1.0, float(expected.abs().max()))
        if not error <= limit:
            fail(f"{self.name}: {where}: logits are off by {error:.3g}, at most {limit:.3g} expected")

    def rows_close(self, run: Run, expected: Tensor, where: str, tolerance: float | None = None) -> None:
        for index, row in run.rows:
            self.close(row, expected[index], f"{where}, position {index}", tolerance)

    def require(self, condition: object, message: str) -> None:
        require(condition, f"{self.name}: {message}")


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; inf where either is not finite."""
    if found.shape != expected.shape:
        fail(f"logits of shape {list(expected.shape)} expected, found {list(found.shape)}")
    difference = (found.double() - expected.double()).abs().max()
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


class Workspace:
    """The cases of one declaration, in a folder of their own."""

    def __init__(self, declaration: Conformance) -> None:
        self.declaration = declaration
        self.family = family_of(declaration)
        self.folder = Path(tempfile.mkdtemp(prefix="fuel-check-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._cases: dict[str, Case] = {}

    def case(self, name: str) -> Case:
        if name not in self._cases:
            self._cases[name] = Case(self, name)
        return self._cases[name]

    @property
    def cases(self) -> list[Case]:
        return [self.case(name) for name in self.declaration.configs]

    @property
    def declared_configs(self) -> Mapping[str, Mapping[str, Any]]:
        """Every config that the author declared."""
        return self.declaration.configs

    @cached_property
    def declared_specs(self) -> Mapping[str, Any]:
        """What they resolve to; without those that are refused, which a check of their own finds."""
        found = {}
        for name, config in self.declared_configs.items():
            with contextlib.suppress(FuelError, ValueError, TypeError, KeyError):
                found[name] = self.family.resolve_config(RawConfig.from_config(config))
        return found

    def close(self) -> None:
        self._cases.clear()
        self._remove()

"""Break the shared path on purpose, one defect at a time, and show which tests go red.

A green suite proves nothing until it has been seen to fail. Each sabotage here is a defect that would be silent in
use: plausible text at full speed, or the right text at a fraction of it. As a pytest plugin it applies the one that
FUEL_SABOTAGE names; as a command it runs every one over the suites it is given and writes the table:

    python -m fuel_core.testing.sabotage --suite tests --suite plugins/NAME/tests --out docs/sabotage.md

A suite may bring defects of its own: a file `sabotages.py` beside its tests with a list `SABOTAGES`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuel_core.testing import Sabotage

__all__ = ["SABOTAGES", "Sabotage", "main", "pytest_configure"]

_NAME = "FUEL_SABOTAGE"
_FILE = "FUEL_SABOTAGE_FILE"


def _patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _cache_never_advances() -> None:
    from fuel_core.kv_cache import KvCache

    def make(original: Any) -> Any:
        def advance(self: Any, token_ids: Sequence[int], filled_by: object = None) -> None:
            before = self._cached_len
            original(self, token_ids, filled_by)
            if len(token_ids) == 1:
                self._cached_len = before

        return advance

    _patch(KvCache, "advance", make)


def _swap_cos_and_sin() -> None:
    from fuel_core.token_data import DecodeTokenData

    _patch(DecodeTokenData, "rope_views", lambda original: lambda self: [(s, c) for c, s in original(self)])


def _skip_the_repoint() -> None:
    from fuel_core.plan_backends import HeldPlan

    _patch(HeldPlan, "repoint", lambda _: lambda self, states: None)


def _compare_nothing_in_the_guard() -> None:
    from fuel_core.plan_backends import recorded

    recorded.signature = lambda tensor: (0, (), (), None, None)  # type: ignore[assignment, return-value]


def _forget_the_allocation() -> None:
    from fuel_core.persistent_decode.session import SessionKey

    def make(original: Any) -> Any:
        return lambda self, now: original(self, dataclasses.replace(now, alloc_id=self.alloc_id))

    _patch(SessionKey, "verdict", make)


def _forget_the_instance() -> None:
    from fuel_core.backbone import PersistentDecodeModel

    def make(original: Any) -> Any:
        return lambda self, *args: {**original(self, *args), "instance": 1}

    _patch(PersistentDecodeModel, "_key_components", make)


def _forget_the_epoch() -> None:
    from fuel_core.backbone import PersistentDecodeModel

    PersistentDecodeModel.weights_epoch = lambda self: 0  # type: ignore[method-assign]


def _forget_the_config() -> None:
    from fuel_core.backbone import PersistentDecodeModel

    def make(original: Any) -> Any:
        def components(self: Any, *args: Any) -> dict[str, Any]:
            return {name: value for name, value in original(self, *args).items() if not name.startswith("config.")}

        return components

    _patch(PersistentDecodeModel, "_key_components", make)


def _key_the_bound_values() -> None:
    from fuel_core.mask_and_rope import MaskPlan, RopePlan

    _patch(MaskPlan, "structure", lambda original: lambda self: (original(self), str(self.windows)))
    _patch(RopePlan, "structure", lambda original: lambda self: (original(self), str(self.variants)))


def _always_stale() -> None:
    from fuel_core.decode_shape import Difference
    from fuel_core.persistent_decode.session import SessionKey, Validity, Verdict

    SessionKey.verdict = lambda self, now: Verdict(  # type: ignore[method-assign]
        Validity.STALE, Difference("max_seq_len", 0, 0)
    )


def _truncate_mints_an_id() -> None:
    from fuel_core.decode_shape import KvAllocId
    from fuel_core.kv_cache import KvCache

    def make(original: Any) -> Any:
        def truncate_to(self: Any, n: int) -> None:
            original(self, n)
            self._alloc_id = KvAllocId.next()

        return truncate_to

    _patch(KvCache, "truncate_to", make)


def _clear_keeps_the_id() -> None:
    from fuel_core.kv_cache import KvCache

    def make(original: Any) -> Any:
        def clear(self: Any) -> None:
            kept = self._alloc_id
            original(self)
            self._alloc_id = kept

        return clear

    _patch(KvCache, "clear", make)


def _window_one_too_wide() -> None:
    from fuel_core import token_data
    from fuel_core.mask_and_rope import MaskPlan

    def wider(plan: MaskPlan) -> MaskPlan:
        return MaskPlan([None if w is None else w + 1 for w in plan.windows], plan.per_layer)

    _patch(token_data, "build_decode_mask_variants", lambda original: lambda plan, *args: original(wider(plan), *args))
    _patch(MaskPlan, "window_starts", lambda original: lambda self, cached: original(wider(self), cached))


def _window_start_from_elsewhere() -> None:
    from fuel_core.mask_and_rope import MaskPlan

    _patch(MaskPlan, "window_starts", lambda original: lambda self, cached: tuple(0 for _ in self.windows))


def _stale(field: str) -> Callable[[], None]:
    """A rebind that forgets one piece of bound data."""

    def apply() -> None:
        from fuel_core import backbone

        def make(original: Any) -> Any:
            def upload(host: Any, *, into: Any = None, **kwargs: Any) -> Any:
                kept = None if into is None else getattr(into, field)
                saved = kept.clone() if kept is not None and hasattr(kept, "clone") else kept
                data = original(host, into=into, **kwargs)
                if into is not None and kept is not None:
                    if hasattr(kept, "copy_"):
                        kept.copy_(saved)
                    else:
                        setattr(into, field, saved)
                return data

            return upload

        _patch(backbone, "upload_decode_token_data", make)

    return apply


def _doubled_position() -> None:
    from fuel_core import token_data

    _patch(
        token_data,
        "build_rope_tables",
        lambda original: lambda plan, start, seq, *more: original(plan, start + (start > 0), seq, *more),
    )


def _scale_after_the_cast() -> None:
    import torch

    from fuel_core.persistent_decode import build

    def make(original: Any) -> Any:
        def segments(model: Any, dtype: Any, **kwargs: Any) -> Any:
            made = original(model, dtype, **kwargs)
            scale = model.decode_dims().embed_scale
            if scale is None:
                return made

            def embed(tensors: Any, _: Any) -> torch.Tensor:
                out: torch.Tensor = model.decode_token_embedding()(tensors["token_ids"]).to(dtype) * scale
                return out

            made[0] = dataclasses.replace(made[0], call=embed)
            return made

        return segments

    _patch(build, "decode_segments", make)


def _head_on_every_row() -> None:
    import torch

    from fuel_core.persistent_decode import build

    def make(original: Any) -> Any:
        def segments(model: Any, dtype: Any, **kwargs: Any) -> Any:
            made = original(model, dtype, **kwargs)

            def head(tensors: Any, _: Any) -> torch.Tensor:
                out: torch.Tensor = model.decode_final_norm_and_head(tensors["h"]).to(torch.float32)
                return out

            made[-1] = dataclasses.replace(made[-1], call=head)
            return made

        return segments

    _patch(build, "decode_segments", make)


def _no_capacity_check_on_rebind() -> None:
    from fuel_core.persistent_decode import driver, entry

    driver.check_step = lambda *args: None  # type: ignore[attr-defined]
    entry.check_step = lambda *args: None  # type: ignore[attr-defined]


def _wrong_head_groups() -> None:
    import torch

    from fuel_core.layers import attention

    def make(original: Any) -> Any:
        def rows(q: Any, keys: Any, values: Any, *rest: Any) -> torch.Tensor:
            heads, groups = q.shape[1], keys.shape[1]
            order = torch.arange(heads, device=q.device).view(heads // groups, groups).t().flatten()
            out: torch.Tensor = original(q[:, order], keys, values, *rest)[:, torch.argsort(order)]
            return out

        return rows

    _patch(attention, "_attend_rows", make)


def _logits_are_reused() -> None:
    from fuel_core.plan_backends import HeldPlan

    def make(original: Any) -> Any:
        def run(self: Any, symbols: Any) -> Any:
            out = original(self, symbols)
            shared = self.__dict__.setdefault("_shared_logits", out.clone())
            return shared.copy_(out)

        return run

    _patch(HeldPlan, "run", make)


def _multi_token_step_drops_sessions() -> None:
    from fuel_core.persistent_decode import entry

    def make(original: Any) -> Any:
        def runs_fresh(ids: Any, ctx: Any) -> Any:
            if len(ids) > 1:
                ctx.drop_sessions()
            return original(ids, ctx)

        return runs_fresh

    _patch(entry, "_runs_fresh", make)


def _record_every_layer() -> None:
    from fuel_core.plan_backends import recording

    count = iter(range(1 << 30))
    _patch(recording, "_metas", lambda original: lambda *args: (original(*args), next(count)))


def _fingerprint_never_changes() -> None:
    from fuel_core.plan_backends import Recording

    def make(original: Any) -> Any:
        def rewrite(self: Any, change: Any) -> None:
            kept = self.fingerprint
            original(self, change)
            self.fingerprint = kept

        return rewrite

    _patch(Recording, "rewrite", make)


SABOTAGES: list[Sabotage] = [
    Sabotage("cache-never-advances", "a single-token step leaves cached_len where it was", _cache_never_advances),
    Sabotage("swap-cos-and-sin", "every layer rotates with cos and sin exchanged", _swap_cos_and_sin),
    Sabotage("skip-the-repoint", "a held plan keeps reading the buffers it was built on", _skip_the_repoint),
    Sabotage("compare-nothing", "the re-point guard finds that everything fits", _compare_nothing_in_the_guard),
    Sabotage("forget-allocation", "the KV allocation is no part of validity", _forget_the_allocation),
    Sabotage("forget-instance", "two models of equal config share a plan", _forget_the_instance),
    Sabotage("forget-epoch", "replaced weights go unnoticed", _forget_the_epoch),
    Sabotage("forget-config", "config fields are no part of the key", _forget_the_config),
    Sabotage("key-bound-values", "window widths and frequencies are part of the key", _key_the_bound_values),
    Sabotage("always-stale", "no held plan is ever valid", _always_stale),
    Sabotage("truncate-mints", "a rewound cache counts as another allocation", _truncate_mints_an_id),
    Sabotage("clear-keeps-id", "released storage keeps its id", _clear_keeps_the_id),
    Sabotage("window-off-by-one", "a window of w sees w + 1 positions", _window_one_too_wide),
    Sabotage("window-start-elsewhere", "window starts do not come from the mask's entry", _window_start_from_elsewhere),
    Sabotage("stale-token", "a rebind keeps the old token", _stale("token_ids")),
    Sabotage("stale-cos", "a rebind keeps the old cosines", _stale("cos")),
    Sabotage("stale-mask", "a rebind keeps the old mask", _stale("mask")),
    Sabotage("stale-offset", "a rebind keeps the old write position (device-offset path)", _stale("offset")),
    Sabotage("stale-symbols", "a rebind keeps the old lengths (symbol path)", _stale("symbols")),
    Sabotage("doubled-position", "positions are off by one after the first step", _doubled_position),
    Sabotage("scale-after-cast", "the embedding is scaled in the activation dtype", _scale_after_the_cast),
    Sabotage("head-on-every-row", "prefill computes logits for all rows", _head_on_every_row),
    Sabotage("no-capacity-check", "a rebind does not check capacity or geometry", _no_capacity_check_on_rebind),
    Sabotage("wrong-head-groups", "query heads read the wrong kv heads", _wrong_head_groups),
    Sabotage("logits-reused", "a later step overwrites returned logits", _logits_are_reused),
    Sabotage("multi-token-drops", "a multi-token step throws held plans away", _multi_token_step_drops_sessions),
    Sabotage("record-every-layer", "no two layers share a recording", _record_every_layer),
    Sabotage("fingerprint-fixed", "a rewritten recording goes unnoticed", _fingerprint_never_changes),
]


# -- as a pytest plugin -----------------------------------------------------------------------------------------


def _load_file(path: Path) -> list[Sabotage]:
    spec = importlib.util.spec_from_file_location("fuel_suite_sabotages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[Sabotage] = module.SABOTAGES
    return found


def pytest_configure(config: Any) -> None:
    """Apply the sabotage that FUEL_SABOTAGE names, if any."""
    name = os.environ.get(_NAME)
    if not name:
        return
    known = [*SABOTAGES, *(_load_file(Path(os.environ[_FILE])) if os.environ.get(_FILE) else [])]
    chosen = [sabotage for sabotage in known if sabotage.name == name]
    if not chosen:
        raise SystemExit(f"{_NAME}: one of {', '.join(s.name for s in known)} expected, found {name!r}")
    chosen[0].apply()


# -- as a command -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Suite:
    """Test files or folders of one distribution: they run in one process, from that distribution's folder."""

    name: str
    root: Path
    paths: tuple[Path, ...]

    @property
    def own(self) -> Path | None:
        """The suite's own list of sabotages, if it brings one."""
        folders = [path if path.is_dir() else path.parent for path in self.paths]
        found = [folder / "sabotages.py" for folder in folders if (folder / "sabotages.py").exists()]
        return found[0] if found else None


def suites_of(paths: Sequence[Path]) -> list[Suite]:
    """Group test paths by the distribution they belong to: the nearest folder above with a pyproject.toml."""
    grouped: dict[Path, list[Path]] = {}
    for path in (path.resolve() for path in paths):
        roots = [folder for folder in path.parents if (folder / "pyproject.toml").exists()]
        if not path.exists() or not roots:
            raise SystemExit(f"--suite: tests of a distribution (below a pyproject.toml) expected, found {path}")
        grouped.setdefault(roots[0], []).append(path)
    named = []
    for root, members in grouped.items():
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        named.append(Suite(project["name"], root, tuple(members)))
    return named


@dataclass(frozen=True)
class Outcome:
    """What one suite did under one sabotage: red tests by file, and how many ran."""

    red: Counter[str]
    ran: int

    def __str__(self) -> str:
        if not self.red:
            return "green"
        files = ", ".join(f"{name} {count}" for name, count in sorted(self.red.items()))
        return f"{sum(self.red.values())} red of {self.ran}: {files}"


def run_suite(suite: Suite, name: str | None, file: Path | None, pytest_args: Sequence[str]) -> Outcome:
    """Run one suite in a process of its own with one sabotage (or none) in force, from ``file`` if it is a family's."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "fuel_core.testing.sabotage", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", *pytest_args, *map(str, suite.paths)]
        environment = {k: v for k, v in os.environ.items() if k not in (_NAME, _FILE)}
        if name is not None:
            environment[_NAME] = name
        if file is not None:
            environment[_FILE] = str(file)
        done = subprocess.run(
            command, env=environment, cwd=suite.root, capture_output=True, text=True, check=False, timeout=3600
        )
        if not report.exists():
            tail = f"{done.stdout[-400:]}{done.stderr[-400:]}"
            raise SystemExit(f"{suite.name}: pytest wrote no report ({done.returncode}): {tail}")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    red: Counter[str] = Counter()
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            red[case.get("classname", "?").split(".")[-1]] += 1
    return Outcome(red, sum(case.find("skipped") is None for case in cases))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the table; returns 1 if a sabotage survives every suite or a clean suite is red."""
    parser = argparse.ArgumentParser(description="Apply each sabotage in turn and list the tests that go red.")
    parser.add_argument(
        "--suite", type=Path, action="append", required=True, help="tests: a folder or file; repeatable"
    )
    parser.add_argument("--only", action="append", default=[], help="names of sabotages to run; default all")
    parser.add_argument("--jobs", type=int, default=1, help="how many sabotages to run at once")
    parser.add_argument("--out", type=Path, help="write the table as Markdown here")
    parser.add_argument("--pytest", action="append", default=[], help="an argument passed on to pytest; repeatable")
    args = parser.parse_args(argv)
    suites = suites_of(args.suite)
    for suite in suites:
        clean = run_suite(suite, None, None, args.pytest)
        if clean.red or not clean.ran:
            print(f"{suite.name}: without any sabotage {clean} of {clean.ran}", file=sys.stderr)
            return 1
    rows: list[tuple[Sabotage, Path | None]] = [(sabotage, None) for sabotage in SABOTAGES]
    rows += [(sabotage, suite.own) for suite in suites if suite.own is not None for sabotage in _load_file(suite.own)]
    rows = [row for row in rows if not args.only or row[0].name in args.only]

    def outcomes(row: tuple[Sabotage, Path | None]) -> list[Outcome]:
        return [run_suite(suite, row[0].name, row[1], args.pytest) for suite in suites]

    lines = [f"| sabotage | what is broken | {' | '.join(suite.name for suite in suites)} |"]
    lines.append("|---" * (2 + len(suites)) + "|")
    survivors = []
    with ThreadPoolExecutor(max_workers=args.jobs) as pool:
        for (sabotage, _), found in zip(rows, pool.map(outcomes, rows), strict=True):
            lines.append(f"| {sabotage.name} | {sabotage.breaks} | {' | '.join(map(str, found))} |")
            print(lines[-1], flush=True)
            if not any(outcome.red for outcome in found):
                survivors.append(sabotage.name)
    if args.out:
        files = [path.relative_to(suite.root).as_posix() for suite in suites for path in suite.paths]
        args.out.write_text(_HEADING.format(files=", ".join(files)) + "\n".join(lines) + "\n", encoding="utf-8")
    if survivors:
        print(f"survived every suite: {', '.join(survivors)}", file=sys.stderr)
    return 1 if survivors else 0


_HEADING = """# Sabotage

Each row is a defect that would be silent in use, put in by `fuel_core.testing.sabotage`, and the tests that went red.
The table is generated with `make sabotage`, over {files}.
`green` in one column is fine where the other is red: a defect of one family must leave the core green, and a family
that has no window or no embedding scale cannot meet a defect of those.

"""


if __name__ == "__main__":
    raise SystemExit(main())

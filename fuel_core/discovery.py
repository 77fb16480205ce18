"""Finds the installed family plugins and imports the one a checkpoint needs.

Knows packages and entry points; it never sees weights, plans or text, and importing it imports no plugin. Which
package serves a checkpoint, and whether it fits this core, is decided from metadata alone; only then is one module
imported, inside a guard, so that a broken plugin is a status record and not the end of the program.

Three entry-point groups are read:

    fuel_core.families.vN          family name -> plugin module; N is the family API it is written for
    fuel_core.model_types          config.json model_type -> plugin module
    fuel_core.gguf_architectures   GGUF general.architecture -> plugin module

Three environment variables matter, read at every call: `FUEL_FAMILIES` (comma-separated families that may load; empty:
none), `FUEL_PREFER` (comma-separated NAME=DISTRIBUTION, for a name that two distributions claim) and `FUEL_STRICT` (1:
what would be a warning is an error).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

import importlib_metadata
import pluggy
from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from fuel_core.errors import FamilyBrokenError, FamilyConflictError, FamilyNotFoundError
from fuel_core.families import FAMILY_API, HOOK_NAMESPACE, Family, FamilyHooks

__all__ = [
    "Discovery",
    "FamilyRecord",
    "FamilyWarning",
    "RequirementFound",
    "Status",
    "families",
    "family_for",
    "faulty_preferences",
    "requirements",
    "strict_setting",
]

_OUR_GROUPS = "fuel_core."
_FAMILY_GROUP = re.compile(r"fuel_core\.families(?:\.(.*))?\Z")
# One spelling for each number, and none that is too long to be one.
_API_NUMBER = re.compile(r"v(0|[1-9][0-9]{0,8})\Z")
_MODEL_TYPES = "fuel_core.model_types"
_GGUF_ARCHITECTURES = "fuel_core.gguf_architectures"
# Endings of the class names that config.json lists under `architectures` where a model has no head for the next token.
_NO_LANGUAGE_HEAD = (
    r"((?<!LMHead)Model|For(MaskedLM|PreTraining|NextSentencePrediction|MultipleChoice|QuestionAnswering"
    r"|\w*Classification))\Z"
)


class FamilyWarning(UserWarning):
    """Something about a family plugin is not as it says; the message names distribution, version and fault."""


class Status(StrEnum):
    """Where a family plugin stands."""

    OK = "ok"
    NOT_LOADED = "not loaded"
    DISABLED = "disabled"
    BROKEN = "broken"
    INCOMPATIBLE = "incompatible"
    DUPLICATE = "duplicate"
    NOT_FOUND = "not found"


@dataclass(frozen=True)
class FamilyRecord:
    """One family as one distribution publishes it.

    `name` is the family, `distribution` and `version` the package, `module` the entry-point value that this core would
    import (None where it fits none), `api` the family-API numbers it is published for. `detail` says in one line why
    the status is what it is, `duplicate_of` which packages publish the family too; `warnings` are faults that decide
    nothing (a violated requirement); `traceback` is the text of a failed import. `family` is set once loaded.
    """

    name: str
    status: Status
    distribution: str = ""
    version: str = ""
    module: str | None = None
    api: tuple[int, ...] = ()
    model_types: tuple[str, ...] = ()
    gguf_architectures: tuple[str, ...] = ()
    detail: str = ""
    duplicate_of: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    traceback: str | None = None
    family: Family | None = None

    @property
    def package(self) -> str:
        """`distribution version`, for messages."""
        return f"{self.distribution} {self.version}".strip()

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON-ready values; the loaded object itself is left out."""
        return {
            "family": self.name,
            "status": str(self.status),
            "distribution": self.distribution,
            "version": self.version,
            "module": self.module,
            "api": list(self.api),
            "model_types": list(self.model_types),
            "gguf_architectures": list(self.gguf_architectures),
            "detail": self.detail,
            "duplicate_of": list(self.duplicate_of),
            "warnings": list(self.warnings),
            "traceback": self.traceback,
        }


class ServedCheckpoint(Protocol):
    """The part of a checkpoint that decides which family serves it."""

    @property
    def format(self) -> str: ...
    @property
    def model_type(self) -> str | None: ...
    @property
    def gguf_architecture(self) -> str | None: ...


@dataclass(frozen=True)
class _Loaded:
    """Outcome of importing one plugin module, kept for the life of the process."""

    families: Mapping[str, Family]
    error: str = ""
    traceback: str | None = None


class Discovery:
    """The plugins visible on `sys.path`, and those imported so far.

    Metadata is read anew at every call, so a record is never older than the environment; an import happens at most
    once per distribution and module. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._loaded: dict[tuple[str, str, str], _Loaded] = {}
        self._warned: set[str] = set()

    def records(self) -> list[FamilyRecord]:
        """Every family that installed distributions publish, by family and distribution. Imports none of them."""
        records = [self._with_outcome(record) for record in _scan()]
        allowed = _allowed_names()
        if allowed is not None:
            for index, record in enumerate(records):
                if record.name not in allowed:
                    detail = f"not named in FUEL_FAMILIES={os.environ['FUEL_FAMILIES']!r}"
                    records[index] = replace(record, status=Status.DISABLED, detail=detail)
            present = {record.name for record in records}
            for name in sorted(allowed - present):
                detail = "named in FUEL_FAMILIES, but no installed distribution publishes it"
                records.append(FamilyRecord(name, Status.NOT_FOUND, detail=detail))
        return sorted(_mark_duplicates(records), key=lambda r: (r.name, r.distribution))

    def family_for(self, checkpoint: ServedCheckpoint, prefer: str | Family | None = None) -> Family:
        """The family that serves `checkpoint`, imported if it was not yet.

        `prefer` names a distribution or a family and decides where several claim the same name; it cannot make a
        family serve a model_type it does not claim. A Family is taken without looking at what is installed.

        Raises FamilyNotFoundError (nobody claims it, or `prefer` matches nothing), FamilyConflictError (several do and
        nothing chooses), FamilyBrokenError (the one that should serve it is incompatible or does not import). What
        decides nothing (a violated requirement, a name in FUEL_FAMILIES that matches nothing) is one FamilyWarning,
        with FUEL_STRICT=1 an error.
        """
        if checkpoint.format == "gguf":
            what, word = "GGUF architecture", checkpoint.gguf_architecture
        else:
            what, word = "model_type", checkpoint.model_type
        if isinstance(prefer, Family):
            served = prefer.gguf_architectures if what[0] == "G" else prefer.model_types
            if word not in served:
                raise FamilyNotFoundError(
                    f"family: {prefer.name} serves {what} {', '.join(served) or 'nothing'}, the checkpoint states "
                    f"{word!r}; give another family, or add the name to this one"
                )
            return prefer
        records = self.records()
        for record in records:
            if record.status is Status.NOT_FOUND:
                self._warn(f"FUEL_FAMILIES names {record.name!r}, which no installed distribution publishes")
        if not word:
            raise FamilyNotFoundError(
                f"The checkpoint states no {what}, so no family can be chosen (installed: {_installed(records)}); "
                f"download its {'file' if what[0] == 'G' else 'config.json'} again, or choose another checkpoint"
            )
        claims = [r for r in records if word in (r.gguf_architectures if what[0] == "G" else r.model_types)]
        if not claims:
            _refuse_what_generates_nothing(what, word, checkpoint)
        chosen = _choose(what, word, claims, records, prefer)
        record = chosen[0]
        for fault in record.warnings:
            self._warn(fault)
        loaded = None if record.status is Status.BROKEN else self._load(record)
        error = record.detail if loaded is None else loaded.error
        if loaded is None or error:
            imported = record.traceback is not None or loaded is not None
            raise FamilyBrokenError(
                f"{record.package} should serve {what} {word!r}, but {error}"
                + ("; `fuel families --load` shows the traceback" if imported else "")
            )
        found = [loaded.families[r.name] for r in chosen if r.name in loaded.families]
        claimed = [family.gguf_architectures if what[0] == "G" else family.model_types for family in found]
        for family, words in zip(found, claimed, strict=True):
            if word in words:
                return family
        raise FamilyBrokenError(
            f"{record.package} publishes {what} {word!r} for family {record.name!r}, but the Family it registers "
            f"serves {', '.join(w for words in claimed for w in words) or 'nothing'}: its metadata and its "
            f"code disagree; install another version of {record.distribution}, or tell its author"
        )

    def load_all(self, *, strict: bool = False) -> list[FamilyRecord]:
        """Import every plugin that may load and return all records.

        A plugin that fails is skipped with one FamilyWarning; with `strict`, or FUEL_STRICT=1, the first failure raises
        FamilyBrokenError.
        """
        for record in self.records():
            if record.status is not Status.NOT_LOADED:
                continue
            loaded = self._load(record)
            if loaded.error:
                message = f"family plugin {record.package} was skipped: {loaded.error}"
                if strict:
                    raise FamilyBrokenError(f"{message}; `fuel families --load` shows the traceback")
                self._warn(message)
        return self.records()

    def _warn(self, message: str) -> None:
        """Say it once; with FUEL_STRICT=1 raise FamilyBrokenError every time."""
        if strict_setting():
            raise FamilyBrokenError(f"{message} (an error because of FUEL_STRICT=1); mend it, or unset FUEL_STRICT")
        with self._lock:
            if message in self._warned:
                return
            warnings.warn(message, FamilyWarning, stacklevel=3)
            self._warned.add(message)  # after: where warnings are errors, each call is one

    def _with_outcome(self, record: FamilyRecord) -> FamilyRecord:
        loaded = self._loaded.get(_load_key(record))
        if loaded is None or record.status is not Status.NOT_LOADED:
            return record
        if loaded.error:
            return replace(record, status=Status.BROKEN, detail=loaded.error, traceback=loaded.traceback)
        family = loaded.families.get(record.name)
        if family is None:
            detail = f"{record.module} registers {', '.join(loaded.families)}, not {record.name!r} as its metadata says"
            return replace(record, status=Status.BROKEN, detail=detail)
        return replace(record, status=Status.OK, detail="", family=family)

    def _load(self, record: FamilyRecord) -> _Loaded:
        key = _load_key(record)
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = self._import(record)
            return self._loaded[key]

    def _import(self, record: FamilyRecord) -> _Loaded:
        """Import, register and call one plugin; leave nothing of it behind if any of the three fails."""
        assert record.module is not None
        entry = importlib_metadata.EntryPoint(name=record.name, value=record.module, group="fuel_core.families")
        before = set(sys.modules)
        try:
            with _stdout_kept():
                plugin: object = importlib.import_module(entry.module)
                for attribute in entry.attr.split(".") if entry.attr else ():
                    plugin = getattr(plugin, attribute)
                found = _families_of(plugin, f"{record.distribution}:{record.module}")
        except KeyboardInterrupt:
            # An interrupt is the user's, not the plugin's: undo, and let it through.
            _forget(entry.module, before)
            raise
        except BaseException as error:
            # SystemExit among them: whatever a plugin raises, it ends the plugin and not the program.
            _forget(entry.module, before)
            return _Loaded(
                {}, f"{record.module} failed with {_cause(error)}", "".join(traceback.format_exception(error))
            )
        return _Loaded(MappingProxyType(found))


def _families_of(plugin: object, name: str) -> dict[str, Family]:
    """What the hook of `plugin` registers, by name. Raises FamilyBrokenError, and what pluggy or the hook raises.

    Each plugin has a manager of its own: nothing a wrong one leaves there is met by the next.
    """
    manager = pluggy.PluginManager(HOOK_NAMESPACE)
    manager.add_hookspecs(FamilyHooks)
    manager.register(plugin, name=name)
    # register() compares arguments with the specification; this finds hooks that have none (a misspelt name).
    manager.check_pending()
    found: dict[str, Family] = {}

    def register(family: Family) -> None:
        if not isinstance(family, Family):
            raise FamilyBrokenError(f"register() takes a fuel_core.Family, found {type(family).__name__}; pass it one")
        if family.name in found:
            raise FamilyBrokenError(f"family {family.name!r} is registered twice; call register() once for each")
        found[family.name] = family

    manager.hook.register_families(register=register)
    if not found:
        raise FamilyBrokenError(
            "it registers no family: expected a @hookimpl register_families(register) that calls register; found none"
        )
    # A copy: a plugin that kept `register` cannot add to what was checked.
    return dict(found)


def _forget(module: str, before: set[str]) -> None:
    """Drop a plugin's half-imported modules; what it imported from elsewhere may already be in use."""
    package = module.partition(".")[0]
    for name in set(sys.modules) - before:
        if name == package or name.startswith(package + "."):
            del sys.modules[name]


def _stdout_kept() -> contextlib.AbstractContextManager[object]:
    """What a plugin prints while it is imported goes to stderr: stdout may be one JSON object."""
    return contextlib.nullcontext() if sys.stderr is None else contextlib.redirect_stdout(sys.stderr)


def _cause(error: BaseException) -> str:
    """Type and message in one line, whatever the error makes of `str`."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = ""
    return f"{type(error).__name__}: {message}".removesuffix(": ")


_process_wide = Discovery()


def family_for(checkpoint: ServedCheckpoint, prefer: str | Family | None = None) -> Family:
    """`Discovery.family_for` on the process-wide instance."""
    return _process_wide.family_for(checkpoint, prefer)


def families(*, load: bool = False) -> list[FamilyRecord]:
    """Records of every installed family; with `load`, after importing each of them (failures stay records)."""
    if not load:
        return _process_wide.records()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FamilyWarning)
        return _process_wide.load_all()


def _load_key(record: FamilyRecord) -> tuple[str, str, str]:
    return record.distribution, record.version, record.module or ""


def _canonical(name: str) -> str:
    """A distribution name as package indexes compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def strict_setting() -> bool:
    """Whether FUEL_STRICT asks for errors where warnings would stand."""
    return os.environ.get("FUEL_STRICT", "0") not in ("", "0")


def _allowed_names() -> set[str] | None:
    value = os.environ.get("FUEL_FAMILIES")
    if value is None:
        return None
    return {name.strip() for name in value.split(",") if name.strip()}


def _preferences() -> dict[str, str]:
    """`FUEL_PREFER` as contested name -> distribution; raises FamilyConflictError where it cannot be read."""
    chosen: dict[str, str] = {}
    for part in os.environ.get("FUEL_PREFER", "").split(","):
        if not part.strip():
            continue
        name, equals, distribution = part.partition("=")
        if not equals or not name.strip() or not distribution.strip():
            raise FamilyConflictError(
                f"FUEL_PREFER: expected NAME=DISTRIBUTION, found {part.strip()!r}; correct the setting"
            )
        chosen[name.strip()] = distribution.strip()
    return chosen


def _fields(distribution: importlib_metadata.IDistribution, *names: str) -> list[str]:
    """Fields of the metadata as text, "" for one that is missing: METADATA may have been cut short."""
    try:
        metadata = distribution.metadata  # parsed at every access
    except Exception:
        return [""] * len(names)
    return [str(metadata[name] or "") if name in metadata else "" for name in names]


def _field(distribution: importlib_metadata.IDistribution, name: str) -> str:
    return _fields(distribution, name)[0]


def faulty_preferences(records: Iterable[FamilyRecord]) -> list[str]:
    """What is wrong with FUEL_PREFER as it is set, one line each: it cannot be read, or names what is not there."""
    try:
        preferences = _preferences()
    except FamilyConflictError as error:
        return [str(error)]
    there = {_canonical(record.distribution) for record in records}
    return [
        f"FUEL_PREFER: {name}={distribution} names a distribution that publishes no family here; "
        f"expected one of {', '.join(sorted(there - {''})) or 'none'}"
        for name, distribution in preferences.items()
        if _canonical(distribution) not in there
    ]


def _distributions() -> Iterator[tuple[importlib_metadata.IDistribution, tuple[str, ...]]]:
    """Distributions that publish something of ours, each name once, with what is wrong about their metadata.

    Where a name is installed twice, the first on `sys.path` counts: its modules are the ones that would be imported.
    Where one folder holds metadata of two versions (an upgrade that was cut short), the newer counts, not the one that
    the file system lists first.
    """
    found: dict[str, importlib_metadata.IDistribution] = {}
    for distribution in importlib_metadata.distributions():
        try:
            # Parsing every METADATA would dominate the listing; the raw text rules nearly all of them out.
            if _OUR_GROUPS in (distribution.read_text("entry_points.txt") or ""):
                found.setdefault(_canonical(distribution.metadata["Name"]), distribution)
        except Exception:  # not a package that can be named, so not one that can be reported
            continue
    for name, distribution in found.items():
        here = list(importlib_metadata.distributions(name=name)) or [distribution]  # a folder not named after it
        place = here[0].locate_file("")
        same = [d for d in here if d.locate_file("") == place]
        # Parsing is what a listing costs, so only where there is a choice.
        versions = {} if len(same) == 1 else {_field(d, "Version"): d for d in reversed(same)}
        if len(versions) > 1:
            *_, newest = listed = sorted(versions, key=_comparable)
            fault = f"{name} has metadata of versions {' and '.join(listed)} in {place}; {newest} is taken"
            yield versions[newest], (f"{fault}: install it again",)
        else:
            yield same[0], ()


def _comparable(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        return Version("0.dev0")


def _scan() -> list[FamilyRecord]:
    records: list[FamilyRecord] = []
    versions: dict[str, str | None] = {}
    for distribution, faults in _distributions():
        name, version = _fields(distribution, "Name", "Version")
        try:
            published = _records_of(distribution, name, version)
        except Exception as error:
            # Unreadable entry points of one package must not hide the others.
            detail = f"its entry points cannot be read: {_cause(error)}"
            published = [FamilyRecord(name, Status.INCOMPATIBLE, name, version, detail=detail)]
        package = f"{name} {version}".strip()
        faults += tuple(f"{package} {fault}" for fault in _violated_requirements(distribution, versions))
        records += [replace(record, warnings=faults) for record in published]
    return records


@dataclass(frozen=True)
class RequirementFound:
    """One requirement of a distribution, and what is installed: `found` is None where nothing is."""

    name: str
    specifier: str
    found: str | None
    fits: bool
    fault: str = ""
    """Why the requirement cannot be read; the name is the whole line then."""

    @property
    def asked(self) -> str:
        """`name>=1`, for messages."""
        return f"{self.name}{self.specifier}"


def requirements(
    distribution: importlib_metadata.IDistribution, versions: dict[str, str | None] | None = None
) -> Iterator[RequirementFound]:
    """What `distribution` requires here without extras, against what is installed. Metadata alone; imports nothing.

    `versions` keeps what was looked up, for several distributions: plugins require much the same.
    """
    if versions is None:
        versions = {}
    for line in distribution.requires or ():
        try:
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
        except (InvalidRequirement, UndefinedEnvironmentName) as error:
            yield RequirementFound(line, "", None, False, " ".join(str(error).split()))
            continue
        if wanted.name not in versions:
            try:
                versions[wanted.name] = _field(importlib_metadata.distribution(wanted.name), "Version") or "unknown"
            except importlib_metadata.PackageNotFoundError:
                versions[wanted.name] = None
        found = versions[wanted.name]
        try:
            fits = found is not None and wanted.specifier.contains(Version(found), prereleases=True)
        except InvalidVersion:
            fits = True  # it cannot be compared, so nothing can be said
        yield RequirementFound(wanted.name, str(wanted.specifier), found, fits)


def _violated_requirements(
    distribution: importlib_metadata.IDistribution, versions: dict[str, str | None]
) -> Iterator[str]:
    """What is installed otherwise than `distribution` asks. Only said: the API number alone decides whether it fits."""
    try:
        needs = list(requirements(distribution, versions))
    except Exception:  # unreadable metadata
        return
    for need in needs:
        if need.fault:
            yield f"has a requirement that cannot be read: {need.fault}"
        elif need.found is None:
            # Run from a checkout, the core has no metadata; it is there all the same.
            if _canonical(need.name) != "fuel-core":
                yield f"requires {need.asked}, which is not installed"
        elif not need.fits:
            yield f"requires {need.asked}, found {need.name} {need.found}"


def _without_module(value: str, distribution: str) -> str:
    """Why the module of an entry point cannot be there, "" where it may be. Looks for it and imports nothing."""
    try:
        module = importlib_metadata.EntryPoint(name="", value=value, group="").module
    except ValueError:
        return f"its entry point {value!r} names no module: expected MODULE or MODULE:ATTRIBUTE"
    package = module.partition(".")[0]
    try:
        if package in sys.modules or importlib.util.find_spec(package) is not None:
            return ""
        # It may have been installed while this process ran, within the resolution of a folder's time stamp.
        importlib.invalidate_caches()
        if importlib.util.find_spec(package) is not None:
            return ""
    except Exception:  # a finder that fails here fails the import as well, and says more there
        return ""
    return f"its module {package!r} is not there, only its metadata: install {distribution} again, or uninstall it"


def _records_of(distribution: importlib_metadata.IDistribution, name: str, version: str) -> list[FamilyRecord]:
    modules: dict[str, dict[int, str]] = {}  # family -> API number -> module
    unreadable: dict[str, tuple[str, str]] = {}  # family -> group whose last part is no number, module
    claims: dict[str, list[tuple[str, str]]] = {_MODEL_TYPES: [], _GGUF_ARCHITECTURES: []}
    for entry in distribution.entry_points:
        group = _FAMILY_GROUP.match(entry.group)
        if group:
            number = _API_NUMBER.match(group[1] or "")
            if number:
                modules.setdefault(entry.name, {})[int(number[1])] = entry.value
            else:
                unreadable[entry.name] = (entry.group, entry.value)
        elif entry.group in claims:
            claims[entry.group].append((entry.name, entry.value))
    records = []
    for family in sorted(modules.keys() | unreadable.keys()):
        published = modules.get(family, {})
        own = {*published.values(), *(module for _, module in [unreadable.get(family, ("", ""))])}
        status, detail = Status.NOT_LOADED, ""
        if FAMILY_API not in published:
            status = Status.INCOMPATIBLE
            numbers = ", ".join(str(api) for api in sorted(published))
            wrote = (
                f"family API {numbers}" if numbers else f"no numbered family API (group {unreadable[family][0]!r:.80})"
            )
            detail = (
                f"written for {wrote}, this core has {FAMILY_API}: "
                f"install a {name} for API {FAMILY_API} or another fuel-core"
            )
        else:
            detail = _without_module(published[FAMILY_API], name)
            status = Status.BROKEN if detail else Status.NOT_LOADED
        records.append(
            FamilyRecord(
                family,
                status,
                name,
                version,
                published.get(FAMILY_API),
                tuple(sorted(published)),
                tuple(sorted({word for word, module in claims[_MODEL_TYPES] if module in own})),
                tuple(sorted({word for word, module in claims[_GGUF_ARCHITECTURES] if module in own})),
                detail,
            )
        )
    known = {module for published in modules.values() for module in published.values()}
    known |= {module for _, module in unreadable.values()}
    for module in sorted({m for words in claims.values() for _, m in words} - known):
        # Claims without a family: the package forgot its fuel_core.families.vN entry, or misspelt the module.
        records.append(
            FamilyRecord(
                module,
                Status.INCOMPATIBLE,
                name,
                version,
                None,
                (),
                tuple(sorted({word for word, m in claims[_MODEL_TYPES] if m == module})),
                tuple(sorted({word for word, m in claims[_GGUF_ARCHITECTURES] if m == module})),
                f"claims names for module {module!r}, which no fuel_core.families.v{FAMILY_API} entry point names; "
                f"install another version of {name}, or tell its author",
            )
        )
    return records


def _usable(record: FamilyRecord) -> bool:
    return record.status not in (Status.DISABLED, Status.INCOMPATIBLE, Status.NOT_FOUND)


def _mark_duplicates(records: list[FamilyRecord]) -> list[FamilyRecord]:
    """Mark a family that two usable distributions publish, and note model types that two of them claim.

    FUEL_PREFER settles a family name for the distribution it names; the other stays a duplicate.
    """
    try:
        preferences = _preferences()
    except FamilyConflictError:
        preferences = {}  # the listing must not fail over a misspelt setting; choosing a family does
    marked = []
    for record in records:
        others = [r for r in records if _usable(r) and r.distribution != record.distribution]
        same = [r for r in others if r.name == record.name]
        shared = {
            word: rival
            for rival in others
            for word in (*record.model_types, *record.gguf_architectures)
            if word in (*rival.model_types, *rival.gguf_architectures)
        }
        if not _usable(record):
            pass
        elif same and _canonical(preferences.get(record.name, "")) != _canonical(record.distribution):
            rivals = tuple(r.package for r in same)
            record = replace(record, duplicate_of=rivals)
            if record.status is not Status.BROKEN:  # what does not work at all is the more urgent news
                detail = f"family {record.name!r} is also in {', '.join(rivals)}"
                record = replace(record, status=Status.DUPLICATE, detail=detail)
        elif shared and not record.detail:
            words = ", ".join(f"{word!r} ({rival.package})" for word, rival in sorted(shared.items()))
            record = replace(record, detail=f"also claimed by another distribution: {words}")
        marked.append(record)
    return marked


def _installed(records: Iterable[FamilyRecord]) -> str:
    """The usable families with the names each serves, for messages."""
    served = []
    for record in records:
        if _usable(record):
            words = sorted({*record.model_types, *record.gguf_architectures})
            served.append(f"{record.name} ({record.package}) for {', '.join(words) or 'nothing'}")
    return "; ".join(served) or "none"


def _choose(
    what: str, word: str, claims: list[FamilyRecord], records: list[FamilyRecord], prefer: str | None
) -> list[FamilyRecord]:
    """Records of the one plugin that serves `word`; several where its module registers several families."""
    usable = [r for r in claims if _usable(r)]
    if prefer is not None:
        named = [r for r in usable if prefer == r.name or _canonical(prefer) == _canonical(r.distribution)]
        if not named:
            raise FamilyNotFoundError(
                f"family={prefer!r} names no installed family or distribution that handles {what} {word!r} "
                f"(installed: {_installed(records)}); name one of these, or install the package"
            )
        usable = named
    if not usable:
        _refuse(what, word, claims, records)
    if len({_load_key(r) for r in usable}) > 1:
        preferences = _preferences()
        chosen = preferences.get(word) or preferences.get(usable[0].name)
        picked = [r for r in usable if chosen is not None and _canonical(chosen) == _canonical(r.distribution)]
        if len({_load_key(r) for r in picked}) != 1:
            _refuse_conflict(what, word, usable)
        usable = picked
    record = usable[0]
    twins = [r for r in records if _usable(r) and r.module == record.module and r.distribution != record.distribution]
    if twins:
        # Import finds whichever lies first on sys.path: the choice could not be kept.
        raise FamilyConflictError(
            f"{record.package} and {twins[0].package} both install the module {record.module!r}, so choosing between "
            f"them has no effect; uninstall one"
        )
    return usable


def _refuse_conflict(what: str, word: str, usable: list[FamilyRecord]) -> NoReturn:
    rivals = [r.package + (" (broken)" if r.status is Status.BROKEN else "") for r in usable]
    one = usable[0].distribution
    if len({r.distribution for r in usable}) > 1:
        settings = f"load(family={one!r}), --family {one} or FUEL_PREFER='{word}={one}', or uninstall the other"
    else:
        rivals = [f"family {r.name!r} of {rival}" for r, rival in zip(usable, rivals, strict=True)]
        settings = f"load(family={usable[0].name!r}) or --family {usable[0].name}"
    raise FamilyConflictError(f"{what} {word!r} is claimed by {' and by '.join(rivals)}; choose one with {settings}")


def _refuse_what_generates_nothing(what: str, word: str, checkpoint: ServedCheckpoint) -> None:
    """Raise FamilyNotFoundError for an encoder: no family will ever serve it, so looking for one would be in vain."""
    raw = getattr(checkpoint, "raw", None)
    if not isinstance(raw, Mapping):
        return
    named = raw.get("architectures")
    classes = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    headless = bool(classes) and all(re.search(_NO_LANGUAGE_HEAD, name) for name in classes)
    if headless or raw.get("is_encoder_decoder") is True:
        found = f"{what} {word!r} with {', '.join(classes) or 'no class'}"
        why = "does not generate text" if headless else "has an encoder"
        raise FamilyNotFoundError(
            f"expected a decoder language model, found {found}, which {why}; "
            "choose a checkpoint that generates text token by token"
        )


def _refuse(what: str, word: str, claims: list[FamilyRecord], records: list[FamilyRecord]) -> None:
    for record in claims:
        if record.status is Status.INCOMPATIBLE:
            raise FamilyBrokenError(f"{record.package} handles {what} {word!r}, but cannot serve it: {record.detail}")
        if record.status is Status.DISABLED:
            raise FamilyNotFoundError(
                f"{record.package} handles {what} {word!r}, but family {record.name!r} is {record.detail}; add it there"
            )
    # Imported here: a listing needs no checkpoint, and must not wait for what reads one.
    from fuel_core.checkpoint.published import family_package

    handles = f"No installed family handles {what} {word!r} (installed: {_installed(records)})"
    package = family_package(word, gguf=what[0] == "G")
    if package is None:
        raise FamilyNotFoundError(f"{handles}. Families are separate packages: see docs/families.md")
    # An older release of it may be here.
    upgrade = "--upgrade " if any(_canonical(record.distribution) == package for record in records) else ""
    raise FamilyNotFoundError(f"{handles}; {package} does: pip install {upgrade}{package}")

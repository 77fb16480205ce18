"""`fuel compile`: make a model's native code now, instead of in the background of a conversation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuel_core.cli.options import Dtype, FamilyName, Json, Model, Threads, Weights
from fuel_core.cli.output import bytes_text, note, print_json

if TYPE_CHECKING:
    from fuel_core.plan_backends import BuiltCode

__all__ = ["compile_model"]


def compile_model(
    model: Model,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all code that is kept, of any model, first.")] = False,
    threads: Threads = None,
    weights: Weights = "auto",
    dtype: Dtype = "auto",
    family: FamilyName = None,
    json: Json = False,
) -> None:
    """Make the native code of a model's decode step, so that --plan auto and compiled find it."""
    from fuel_core.code_cache import CacheUnusable
    from fuel_core.errors import BackendUnavailableError
    from fuel_core.llm import load
    from fuel_core.plan_backends import CodeCache

    cache = CodeCache.of_this_user()
    report: dict[str, Any] = {"cache": str(cache.root), "limit_bytes": cache.limit_bytes}
    if clear:
        try:
            entries, size = cache.clear()
        except CacheUnusable as error:
            raise BackendUnavailableError(str(error)) from error
        report["cleared"] = {"entries": entries, "bytes": size}
        note(f"Removed {entries} entries, {bytes_text(size)}, from {cache.root}")
    llm = load(model, weights=weights, dtype=dtype, plan="auto", family=family, threads=threads)
    if not json:
        note("Making native code where there is none; each distinct layer takes the compiler about 20 seconds.")
    began = time.perf_counter()
    built = llm.compile()
    entries_now = cache.entries()
    report |= {
        "seconds": round(time.perf_counter() - began, 2),
        "segments": [_as_json(each) for each in built],
        "cache_bytes": sum(size for _, _, size in entries_now),
        "cache_entries": len(entries_now),
    }
    if json:
        print_json(report)
    else:
        for each in built:
            print(_line(each))
        if not built:
            print("Nothing to make: no layer of this model gains from native code.")
        print(f"{report['seconds']:.1f} s; {cache.root} holds {bytes_text(report['cache_bytes'])}")
    if any(not each.usable for each in built):
        raise typer.Exit(2)


def _as_json(each: BuiltCode) -> dict[str, Any]:
    return {
        "segment": each.segment,
        "status": each.status,
        "detail": each.detail,
        "key": each.key,
        "build_seconds": each.seconds,
        "bytes": each.bytes,
        "error": each.error,
        "bound": each.bound,
    }


def _line(each: BuiltCode) -> str:
    """One segment in one line. ``layer 0`` stands for all layers like it."""
    if not each.usable:
        return f"{each.segment} and its like: {each.status}: {each.detail}"
    how = f"built in {each.seconds:.1f} s" if each.status == "built" else f"found, built in {each.seconds:.1f} s"
    differs = (
        "" if each.error is None else f"; differs from the recorded step by {each.error:.1e} (bound {each.bound:.1e})"
    )
    return f"{each.segment} and its like: {how}, {bytes_text(each.bytes)}{differs}"

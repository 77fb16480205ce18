"""`fuel inspect`: what a checkpoint is and what fuel would make of it, without reading a weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuel_core.cli import model_facts
from fuel_core.cli.model_facts import places, plain
from fuel_core.cli.options import Dtype, FamilyName, Json, MaxSeqLen, Model, Weights
from fuel_core.cli.output import bytes_text, note, print_json, stdout_console, table

if TYPE_CHECKING:
    from rich.table import Table

    from fuel_core.backbone import DecodeBackbone
    from fuel_core.checkpoint import Checkpoint
    from fuel_core.families import Family

__all__ = ["inspect"]

# More positions than most prompts need and fewer than most models allow: a size to compare models by.
_SHOWN_POSITIONS = 4096

Errors = Annotated[bool, typer.Option("--errors", help="Read the weights and say how much each loses in its format.")]


def inspect(
    model: Model,
    max_seq_len: MaxSeqLen = None,
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    errors: Errors = False,
    family: FamilyName = None,
    json: Json = False,
) -> None:
    """Show what a checkpoint is: config and where it is from, layers, memory by part, native code, shape key."""
    import torch

    from fuel_core.checkpoint import open_checkpoint
    from fuel_core.checkpoint.config import canonical_dtype
    from fuel_core.checkpoint.weights import check_layer_count, outline_weights
    from fuel_core.discovery import family_for
    from fuel_core.errors import ConfigError
    from fuel_core.llm import activation_dtype

    if dtype != "auto" and canonical_dtype(dtype) is None:
        raise ConfigError(f"dtype: expected auto, float32, bfloat16 or float16, found {dtype!r}; name one of them")
    with open_checkpoint(model) as checkpoint:
        chosen = family_for(checkpoint, family)
        spec = chosen.resolve_config(checkpoint.raw)
        check_layer_count(spec, checkpoint, chosen)
        with torch.device("meta"):
            backbone = chosen.build(spec)
        positions = max_seq_len or min(spec.max_position_embeddings, _SHOWN_POSITIONS)
        report: dict[str, Any] = {
            "model": str(checkpoint.path),
            "format": checkpoint.format,
            "has_weights": checkpoint.has_weights,
            "model_type": checkpoint.model_type,
            "gguf_architecture": checkpoint.gguf_architecture,
            "family": chosen.name,
            "package": _package(chosen),
            "config": _config(spec),
            "parameters": _stored(checkpoint) if checkpoint.has_weights else _declared(backbone, spec.dtype),
        }
        planned = _weights(backbone, checkpoint, chosen, weights, errors) if checkpoint.has_weights else None
        # From here on the backbone is what loading would make of it, on the meta device.
        outlined = outline_weights(
            backbone,
            None if planned is None else checkpoint,
            chosen,
            weights,
            dtype=spec.dtype,
            known={entry["parameter"]: entry["format"] for entry in planned or [] if errors},
        )
        compute = activation_dtype(dtype, backbone, outlined.dtype, device=torch.device("cpu"))
        memory = model_facts.memory(backbone, outlined, positions, compute)
        key = backbone.decode_shape_key()
        # The weights' component repeats the dtype of every parameter: pages of it, and all of it above already.
        components = {name: plain(value) for name, value in key.components if name != "weights"}
        report |= {
            "weights": planned or [],
            "layers": model_facts.layers(backbone),
            "rope_variants": model_facts.rope_variants(backbone),
            "kv_cache": {name: memory["kv_cache"][name] for name in ("max_seq_len", "dtype", "bytes")},
            "memory": {"from": "config" if planned is None else "headers", **memory},
            "native_code": model_facts.native_code(backbone, compute),
            "shape_key": {
                "structure": str(backbone.structure_key()),
                "components": components,
                "groups": model_facts.key_groups(backbone),
            },
        }
    if json:
        print_json(report)
    else:
        _print(report)


def _package(family: object) -> str:
    from fuel_core import discovery

    return next((record.package for record in discovery.families() if record.family is family), "")


def _config(spec: Any) -> dict[str, dict[str, Any]]:
    from dataclasses import fields

    names = [field.name for field in fields(spec) if field.name != "sources"]
    return {name: {"value": plain(getattr(spec, name)), "source": spec.sources.get(name, "")} for name in names}


def _stored(checkpoint: Checkpoint) -> dict[str, Any]:
    """Parameters as the files hold them, whether or not a model would use every tensor."""
    return _totals(((info.dtype_name, info.numel) for _, info in checkpoint.iter_info()), "as stored in the checkpoint")


def _declared(backbone: DecodeBackbone, dtype: str) -> dict[str, Any]:
    """Parameters as the config declares them; a tied pair counts once, as a checkpoint stores it."""
    tied = {first for first, _ in backbone.tied_weights()}
    counts = ((dtype, parameter.numel()) for name, parameter in backbone.named_parameters() if name not in tied)
    return _totals(counts, "computed from the config; the folder holds no weights")


def _weights(
    backbone: DecodeBackbone, checkpoint: Checkpoint, family: Family, weights: str, errors: bool
) -> list[dict[str, Any]] | None:
    """How each matrix would be stored; `relative_error` is null unless the weights were read for it.

    None for weights that cannot be loaded.
    """
    from fuel_core.checkpoint.formats import error_of
    from fuel_core.checkpoint.weights import planned_formats
    from fuel_core.errors import UnsupportedCheckpointError, WeightsError

    try:
        planned = planned_formats(backbone, checkpoint, family, weights)
    except (UnsupportedCheckpointError, WeightsError) as error:
        if weights != "auto":
            raise
        # A checkpoint that cannot be loaded may be looked at all the same.
        note(f"weights: {error}")
        return None
    found = []
    for plan in planned:
        parameter, tensor, info, choice, named = plan
        entry: dict[str, Any] = {
            "parameter": parameter,
            "tensor": tensor,
            "stored": info.dtype_name,
            "format": choice.format,
            "or": "bf16" if choice.measured else None,
            "asked": choice.asked,
            "reason": choice.reason,
            "relative_error": None,
        }
        if errors:
            entry["format"], entry["relative_error"] = error_of(choice, plan.source())
            entry["or"] = None
            named.release(tensor)
        found.append(entry)
    return found


def _totals(counts: Iterable[tuple[str, int]], source: str) -> dict[str, Any]:
    numbers: Counter[str] = Counter()
    for dtype, count in counts:
        numbers[dtype] += count
    sizes = {dtype: _bytes(dtype, count) for dtype, count in numbers.most_common()}
    return {"count": sum(numbers.values()), "bytes": sum(sizes.values()), "bytes_by_dtype": sizes, "source": source}


def _bytes(dtype: str, count: int) -> int:
    """Bytes of `count` values of a stored type, a torch dtype's name or a GGUF block type's."""
    import torch

    known = getattr(torch, dtype, None)
    if isinstance(known, torch.dtype):
        return count * known.itemsize
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
    return int(count // block * size)


def _print(report: dict[str, Any]) -> None:
    console = stdout_console()
    named = report["model_type"] or report["gguf_architecture"]
    console.print(f"{report['model']}: {report['format']}, {named}, served by {report['family']} ({report['package']})")
    if not report["has_weights"]:
        note("The folder holds a config and no weights: sizes below are computed from the config.")
    config = table("config", "value", "from")
    for name, entry in report["config"].items():
        config.add_row(name, _shown(entry["value"]), entry["source"])
    for each in (config, _layer_table(report["layers"]), _rope_table(report), _memory_table(report)):
        console.print()
        console.print(each)
    console.print()
    parameters, code, key = report["parameters"], report["native_code"], report["shape_key"]
    sizes = ", ".join(f"{dtype} {_short(size)}" for dtype, size in parameters["bytes_by_dtype"].items())
    console.print(f"parameters: {parameters['count']:,}, {bytes_text(parameters['bytes'])}, {parameters['source']}")
    console.print(f"  {sizes}")
    for (stored, word, other, reason), group in _groups(report["weights"]).items():
        known = [entry["relative_error"] for entry in group if entry["relative_error"] is not None]
        lost = f"; relative error {min(known):.2g} to {max(known):.2g}" if known else ""
        instead = f" (or {other}, where it loses too much)" if other else ""
        why = f"; not {group[0]['asked']}: {reason}" if reason else ""
        console.print(f"weights: {len(group)} stored as {stored}, kept as {word}{instead}{lost}{why}")
    console.print(f"native code: {_code_text(code)}")
    console.print()
    console.print(f"structure key {key['structure']}, made of")
    for name, text in _key_texts(key["groups"]):
        # As wide as the tables are not: the values of a key are prose.
        console.print(
            fill(text, 110, initial_indent=f"  {name:<9}", subsequent_indent=" " * 11, break_long_words=False)
        )


def _layer_table(layers: list[dict[str, Any]]) -> Table:
    """Layers that are alike in one row, wherever they stand."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for layer in layers:
        alike.setdefault(repr({**layer, "layer": 0}), []).append(layer)
    mixed = any(layer["experts"] for layer in layers)
    made = table("layers", "", "state a position", "window", "RoPE", "weights", *(["experts"] * mixed), "bytes each")
    for group in alike.values():
        layer, at = group[0], [each["layer"] for each in group]
        state = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in layer["state"].items())
        window = "whole prefix" if layer["window"] is None else str(layer["window"])
        experts = [_expert_text(layer["experts"])] * mixed
        words = ", ".join(layer["formats"])
        made.add_row(
            places(at),
            f"({len(at)})",
            state,
            window,
            str(layer["rope_variant"]),
            words,
            *experts,
            _short(layer["bytes"]),
        )
    return made


def _expert_text(experts: dict[str, Any] | None) -> str:
    if experts is None:
        return "none"
    chosen = "" if experts["chosen"] is None else f", {experts['chosen']} a token"
    return f"{experts['count']}{chosen}, {_short(experts['bytes'])}"


def _rope_table(report: dict[str, Any]) -> Table:
    made = table("RoPE", "layers", "kind", "base", "features", "scaling", "radians a position", "cos, sin", "from")
    for index, variant in enumerate(report["rope_variants"]):
        known = variant["parameters"] or {}
        scaling = {k: v for k, v in known.items() if k not in ("kind", "theta", "partial_rotary_factor")}
        beyond = variant.get("other_frequencies_beyond")
        low, high = min(variant["inv_freq"]), max(variant["inv_freq"])
        made.add_row(
            str(index),
            places(variant["layers"]),
            variant["kind"] or "its own",
            "" if variant["base"] is None else f"{variant['base']:.12g}",
            str(variant["width"]),
            (_shown(scaling) or "none") + ("" if beyond is None else f"; other frequencies beyond {beyond} positions"),
            f"{low:.6g} to {high:.6g}",
            f"times {variant['scale']:.6g}",
            variant["field"] or "",
        )
    return made


def _memory_table(report: dict[str, Any]) -> Table:
    memory = report["memory"]
    weights, cache, plan = memory["weights"], memory["kv_cache"], memory["held_plan"]
    made = table(f"memory for {cache['max_seq_len']} positions", "", "")
    guess = "; what auto would measure counts as int8" if any(entry["or"] for entry in report["weights"]) else ""
    other = "norms, biases, routers" if any(layer["experts"] for layer in report["layers"]) else "norms and biases"
    formats = {(other if word == "other" else word): size for word, size in weights["by_format"].items()}
    made.add_row("weights", _short(weights["bytes"]), _sizes(formats) + guess)
    tied = {"head": f"{', '.join(taker for taker, _ in weights['tied'])} tied"} if weights["tied"] else {}
    for part, size in weights["parts"].items():
        made.add_row(f"  {part}", _short(size), tied.get(part, "outside the layers" if part == "norms" else ""))
    if weights["mapped_bytes"]:
        made.add_row("  of it mapped", _short(weights["mapped_bytes"]), "from the files, without a copy")
    a_position = f"{cache['bytes_per_position']:,} bytes a position"
    made.add_row("KV cache", _short(cache["bytes"]), f"{cache['dtype']}, {a_position}")
    parts = {"masks": plan["masks"], "RoPE tables": plan["rope_tables"], "token id": plan["token_ids"]}
    made.add_row("held plan", _short(plan["bytes"]), _sizes(parts))
    made.add_row("in all", _short(memory["bytes"]), "")
    return made


def _code_text(code: dict[str, Any]) -> str:
    layers = f"{code['layers']} distinct layer{'' if code['layers'] == 1 else 's'}"
    if code["status"] == "there":
        return f"there for {layers}, {_short(code['bytes'])} in {code['folder']}"
    if code["status"] in ("refused", "unusable"):
        return f"{code['status']}: {code['detail']}"
    found = "none" if code["status"] == "none" else f"{code['found']} of {layers}"
    return f"{found} in {code['folder']}; fuel compile makes it, for the same --weights and --dtype"


def _key_texts(groups: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("identity", "sizes"):
        yield name, _shown(groups[name])
    for name in ("state", "masks", "rope"):
        yield name, "; ".join(f"{value} (layers {places(at)})" for value, at in groups[name].items())
    weights = groups["weights"]
    counts = {name: ", ".join(f"{count} {word}" for word, count in weights[name].items()) for name in weights}
    yield "weights", f"matrices {counts['matrices'] or 'none'}; other tensors {counts['others'] or 'none'}"
    bound = ", ".join(groups["bound"])
    yield "config", f"every field, save {bound} (bound: may change on a live model)" if bound else "every field"


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_short(size)}" for name, size in sizes.items())


def _short(count: int) -> str:
    """`bytes_text` without the exact number, for tables; `--json` has that."""
    return bytes_text(count).partition(" (")[0]


def _groups(weights: list[dict[str, Any]]) -> dict[tuple[str, str, str, str], list[dict[str, Any]]]:
    groups: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for entry in weights:
        groups.setdefault((entry["stored"], entry["format"], entry["or"] or "", entry["reason"]), []).append(entry)
    return groups


def _shown(value: Any) -> str:
    """A config value in at most a line: equal neighbours of a list are counted, long lists and texts are cut."""
    if isinstance(value, dict):
        text = ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    elif isinstance(value, list):
        text = _list_text(value)
    else:
        text = str(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def _list_text(values: Sequence[Any]) -> str:
    runs: list[tuple[str, int]] = []
    for each in map(_shown, values):
        count = runs.pop()[1] if runs and runs[-1][0] == each else 0
        runs.append((each, count + 1))
    texts = [each if count == 1 else f"{each} x {count}" for each, count in runs]
    if len(texts) > 8:
        texts = [*texts[:4], f"... ({len(values)} in all)"]
    return f"[{', '.join(texts)}]"

"""`fuel inspect`: what a checkpoint is and what fuel would make of it, without reading a weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuel_core.cli.options import Dtype, FamilyName, Json, MaxSeqLen, Model, Weights
from fuel_core.cli.output import bytes_text, note, print_json, stdout_console, table

if TYPE_CHECKING:
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
    """Show a checkpoint's resolved config and where each value is from, its layers, sizes, formats and shape key."""
    import torch

    from fuel_core.checkpoint import open_checkpoint
    from fuel_core.checkpoint.config import canonical_dtype
    from fuel_core.checkpoint.weights import check_layer_count
    from fuel_core.discovery import family_for
    from fuel_core.errors import ConfigError

    cache_dtype = None if dtype == "auto" else canonical_dtype(dtype)
    if dtype != "auto" and cache_dtype is None:
        raise ConfigError(f"dtype: expected auto, float32, bfloat16 or float16, found {dtype!r}; name one of them")
    with open_checkpoint(model) as checkpoint:
        chosen = family_for(checkpoint, family)
        spec = chosen.resolve_config(checkpoint.raw)
        check_layer_count(spec, checkpoint, chosen)
        with torch.device("meta"):
            backbone = chosen.build(spec)
        positions = max_seq_len or min(spec.max_position_embeddings, _SHOWN_POSITIONS)
        report = {
            "model": str(checkpoint.path),
            "format": checkpoint.format,
            "has_weights": checkpoint.has_weights,
            "model_type": checkpoint.model_type,
            "gguf_architecture": checkpoint.gguf_architecture,
            "family": chosen.name,
            "package": _package(chosen),
            "config": _config(spec),
            "layers": _layers(backbone),
            "rope_variants": [_rope_variant(variant) for variant in backbone.rope_plan.variants],
            "parameters": _stored(checkpoint) if checkpoint.has_weights else _declared(backbone, spec.dtype),
            "weights": _weights(backbone, checkpoint, chosen, weights, errors) if checkpoint.has_weights else [],
            "kv_cache": _kv_cache(backbone, positions, cache_dtype or spec.dtype),
            "shape_key": _shape_key(backbone),
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
    return {name: {"value": _plain(getattr(spec, name)), "source": spec.sources.get(name, "")} for name in names}


def _plain(value: Any) -> Any:
    """A config value as JSON can carry it; frozen dataclasses become objects without their empty fields."""
    from dataclasses import fields, is_dataclass

    if is_dataclass(value):
        found = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {name: each for name, each in found.items() if each not in (None, [], {})}
    if isinstance(value, (tuple, list, frozenset, set)):
        return [_plain(each) for each in value]
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return str(value)


def _layers(backbone: DecodeBackbone) -> list[dict[str, Any]]:
    mask, rope = backbone.mask_plan, backbone.rope_plan
    return [
        {
            "layer": index,
            "state": {slot.name: list(slot.shape) for slot in spec.slots},
            "window": mask.window_for_layer(index),
            "rope_variant": rope.per_layer[index],
        }
        for index, spec in enumerate(backbone.layer_state_specs())
    ]


def _rope_variant(variant: Any) -> dict[str, Any]:
    shown = {"width": variant.width, "scale": variant.scale, "inv_freq": list(variant.inv_freq)}
    if variant.longer is not None:
        shown["other_frequencies_beyond"] = variant.longer.original
    return shown


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
) -> list[dict[str, Any]]:
    """How each matrix would be stored; `relative_error` is null unless the weights were read for it."""
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
        return []
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


def _kv_cache(backbone: DecodeBackbone, max_seq_len: int, dtype: str) -> dict[str, Any]:
    slots = [slot for spec in backbone.layer_state_specs() for slot in spec.slots]
    count = sum(prod(slot.buffer_shape(1, max_seq_len)) for slot in slots)
    return {"max_seq_len": max_seq_len, "dtype": dtype, "bytes": _bytes(dtype, count)}


def _shape_key(backbone: DecodeBackbone) -> dict[str, Any]:
    key = backbone.decode_shape_key()
    # The weights' component repeats the dtype of every parameter: pages of it, and all of it above already.
    parts = {name: value for name, value in key.components if name != "weights"}
    return {"structure": str(backbone.structure_key()), "components": {name: _plain(v) for name, v in parts.items()}}


def _print(report: dict[str, Any]) -> None:
    console = stdout_console()
    named = report["model_type"] or report["gguf_architecture"]
    console.print(f"{report['model']}: {report['format']}, {named}, served by {report['family']} ({report['package']})")
    if not report["has_weights"]:
        note("The folder holds a config and no weights: sizes below are computed from the config.")
    console.print()
    config = table("config", "value", "from")
    for name, entry in report["config"].items():
        config.add_row(name, _shown(entry["value"]), entry["source"])
    console.print(config)
    console.print()
    layers = table("layers", "state per position", "window", "RoPE variant")
    for first, last, layer in _runs(report["layers"]):
        state = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in layer["state"].items())
        window = "whole prefix" if layer["window"] is None else str(layer["window"])
        layers.add_row(f"{first}..{last}" if first != last else str(first), state, window, str(layer["rope_variant"]))
    console.print(layers)
    console.print()
    for index, variant in enumerate(report["rope_variants"]):
        low, high = variant["inv_freq"][-1], variant["inv_freq"][0]
        console.print(
            f"RoPE variant {index}: {variant['width']} features turn, {low:.6g} to {high:.6g} radians a position, "
            f"cos and sin times {variant['scale']:.6g}"
        )
        if "other_frequencies_beyond" in variant:
            console.print(f"  sequences of more than {variant['other_frequencies_beyond']} positions turn by others")
    parameters, cache, key = report["parameters"], report["kv_cache"], report["shape_key"]
    console.print(f"parameters: {parameters['count']:,}, {bytes_text(parameters['bytes'])}, {parameters['source']}")
    for dtype, size in parameters["bytes_by_dtype"].items():
        console.print(f"  {dtype}: {bytes_text(size)}")
    for (stored, word, other, reason), group in _groups(report["weights"]).items():
        known = [entry["relative_error"] for entry in group if entry["relative_error"] is not None]
        lost = f"; relative error {min(known):.2g} to {max(known):.2g}" if known else ""
        instead = f" (or {other}, where it loses too much)" if other else ""
        why = f"; not {group[0]['asked']}: {reason}" if reason else ""
        console.print(f"weights: {len(group)} stored as {stored}, kept as {word}{instead}{lost}{why}")
    console.print(f"KV cache for {cache['max_seq_len']} positions in {cache['dtype']}: {bytes_text(cache['bytes'])}")
    console.print()
    console.print(f"structure key {key['structure']}, made of")
    for name, value in key["components"].items():
        console.print(f"  {name}: {_shown(value)}")


def _groups(weights: list[dict[str, Any]]) -> dict[tuple[str, str, str, str], list[dict[str, Any]]]:
    groups: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for entry in weights:
        groups.setdefault((entry["stored"], entry["format"], entry["or"] or "", entry["reason"]), []).append(entry)
    return groups


def _shown(value: Any) -> str:
    text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def _runs(layers: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """Neighbouring layers that are alike, as (first, last, layer)."""
    runs: list[tuple[int, int, dict[str, Any]]] = []
    for layer in layers:
        if runs and {**runs[-1][2], "layer": 0} == {**layer, "layer": 0}:
            runs[-1] = (runs[-1][0], layer["layer"], runs[-1][2])
        else:
            runs.append((layer["layer"], layer["layer"], layer))
    return runs

"""What `fuel inspect` tells of a model that is outlined (`outline_weights`): layers, memory by part, key, native code.

Everything is read off the model itself, on the meta device: nothing here knows a format, a family or a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fuel_core.backbone import DecodeBackbone
    from fuel_core.checkpoint import LoadReport
    from fuel_core.mask_and_rope import RopeVariant

__all__ = ["key_groups", "layers", "memory", "native_code", "places", "plain", "rope_variants"]


def plain(value: Any) -> Any:
    """A config value as JSON can carry it; frozen dataclasses become objects without their empty fields."""
    if is_dataclass(value):
        found = {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        return {name: each for name, each in found.items() if each not in (None, [], {})}
    if isinstance(value, (tuple, list, frozenset, set)):
        return [plain(each) for each in value]
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return str(value)


def places(indices: Sequence[int]) -> str:
    """Layer numbers, ascending, for reading: ``0..29``, ``0, 2, .. 24``, ``0..4, 6..10, .. 60, 61``."""
    if len(indices) > 2:
        steps = {after - before for before, after in pairwise(indices)}
        if len(steps) == 1 and steps != {1}:
            return f"{indices[0]}, {indices[1]}, .. {indices[-1]}" if len(indices) > 3 else ", ".join(map(str, indices))
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    texts = [str(first) if first == last else f"{first}..{last}" for first, last in runs]
    if len(texts) > 6:
        texts = [*texts[:2], f".. {texts[-2]}", texts[-1]]
    return ", ".join(texts)


def _grouped(values: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    """Value -> the layers that have it, in the order of each first one."""
    found: dict[Hashable, list[int]] = {}
    for layer, value in enumerate(values):
        found.setdefault(value, []).append(layer)
    return found


# -- layers -----------------------------------------------------------------------------------------------------------


def _layer_modules(backbone: DecodeBackbone) -> list[list[nn.Module]]:
    """The modules of each layer: the children of lists that are as long as the model is deep, outermost lists only."""
    from torch import nn

    n_layers = backbone.decode_dims().n_layers
    found: list[list[nn.Module]] = [[] for _ in range(n_layers)]
    taken: list[str] = []
    for name, module in backbone.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in taken)
        if isinstance(module, nn.ModuleList) and len(module) == n_layers and not inside:
            taken.append(name)
            for layer, child in enumerate(module):
                found[layer].append(child)
    return found


def _tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """(owner, name in it, tensor) of every parameter and buffer, each tensor once."""
    seen: set[int] = set()
    for module in modules:
        for owner in module.modules():
            for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield owner, name, tensor


def _format(owner: nn.Module, name: str) -> str:
    """The weight format that a tensor is a part of; ``other`` for norms, biases, routers."""
    from fuel_core.checkpoint.formats import format_of
    from fuel_core.layers.linear import FormattedWeight
    from fuel_core.layers.packed_formats import PACKED_PARAMETERS

    is_weight = isinstance(owner, FormattedWeight) and name in ("weight", *PACKED_PARAMETERS)
    return format_of(owner) if is_weight else "other"


def _by_format(modules: Iterable[nn.Module]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for owner, name, tensor in _tensors(modules):
        sizes[_format(owner, name)] += tensor.nbytes
    return dict(sizes.most_common())


def layers(backbone: DecodeBackbone) -> list[dict[str, Any]]:
    """One entry a layer: state, window, RoPE variant, formats of its matrices, bytes, and experts where it has some."""
    mask, rope = backbone.mask_plan, backbone.rope_plan
    modules = _layer_modules(backbone)
    found = []
    for index, spec in enumerate(backbone.layer_state_specs()):
        sizes = _by_format(modules[index])
        found.append(
            {
                "layer": index,
                "state": {slot.name: list(slot.shape) for slot in spec.slots},
                "window": mask.window_for_layer(index),
                "rope_variant": rope.per_layer[index],
                "formats": {word: size for word, size in sizes.items() if word != "other"},
                "bytes": sum(sizes.values()),
                "experts": _experts(modules[index]),
            }
        )
    return found


def _experts(modules: Sequence[nn.Module]) -> dict[str, Any] | None:
    from fuel_core.layers.moe import ExpertLinear, Router

    inside = [child for module in modules for child in module.modules()]
    stacks = [module for module in inside if isinstance(module, ExpertLinear)]
    if not stacks:
        return None
    chosen = [module.n_chosen for module in inside if isinstance(module, Router)]
    size = sum(tensor.nbytes for _, _, tensor in _tensors(stacks))
    return {"count": stacks[0].n_experts, "chosen": chosen[0] if chosen else None, "bytes": size}


# -- RoPE -------------------------------------------------------------------------------------------------------------


def rope_variants(backbone: DecodeBackbone) -> list[dict[str, Any]]:
    """The variants in force, and for each what the config says that gives exactly its frequencies.

    ``kind``, ``base``, ``parameters`` and ``field`` are null where no RopeParameters of the config do.
    """
    plan = backbone.rope_plan
    found = []
    for index, variant in enumerate(plan.variants):
        field, parameters = _parameters_of(backbone, variant)
        shown: dict[str, Any] = {
            "width": variant.width,
            "scale": variant.scale,
            "inv_freq": list(variant.inv_freq),
            "layers": [layer for layer, used in enumerate(plan.per_layer) if used == index],
            "field": field,
            "kind": None if parameters is None else parameters.kind,
            "base": None if parameters is None else parameters.theta,
            "parameters": plain(parameters),
        }
        if variant.longer is not None:
            shown["other_frequencies_beyond"] = variant.longer.original
        found.append(shown)
    return found


def _parameters_of(backbone: DecodeBackbone, variant: RopeVariant) -> tuple[str | None, Any]:
    from fuel_core.checkpoint import RopeParameters
    from fuel_core.errors import ConfigError

    config = backbone.decode_config()
    for field in fields(config):
        value = getattr(config, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if not isinstance(each, RopeParameters):
                continue
            try:
                if type(variant).from_parameters(variant.width, each) == variant:
                    return field.name, each
            except ConfigError:
                continue
    return None, None


# -- memory -----------------------------------------------------------------------------------------------------------


def memory(backbone: DecodeBackbone, report: LoadReport, max_seq_len: int, dtype: torch.dtype) -> dict[str, Any]:
    """Bytes of the weights by part and by format, of a KV cache, and of what a held plan owns beside them.

    A plan's own tensors are made by the very function that makes them for a step, on the meta device. Left out: what
    a step computes on the way, and the masks of a prompt while it runs.
    """
    from fuel_core.kv_cache import KvCache

    cache = KvCache(backbone.layer_state_specs(), max_seq_len=max_seq_len, dtype=dtype, device="meta")
    data = backbone.build_decode_token_data([0], cache, device_offset=False, mask_columns=None)
    plan = {
        "token_ids": data.token_ids.nbytes,
        "rope_tables": data.cos.nbytes + data.sin.nbytes,
        "masks": data.mask.nbytes,
    }
    parts = _parts(backbone)
    weights: dict[str, Any] = {
        "bytes": sum(parts.values()),
        "parts": parts,
        "by_format": _by_format([backbone]),
        "tied": [list(pair) for pair in report.tied],
        "mapped_bytes": report.mapped_bytes,
    }
    kv_cache: dict[str, Any] = {
        "bytes": cache.nbytes,
        "bytes_per_position": _per_position(backbone, dtype),
        "max_seq_len": max_seq_len,
        "dtype": str(dtype).removeprefix("torch."),
    }
    held = {"bytes": sum(plan.values()), **plan}
    return {
        "weights": weights,
        "kv_cache": kv_cache,
        "held_plan": held,
        "bytes": weights["bytes"] + cache.nbytes + held["bytes"],
    }


def _per_position(backbone: DecodeBackbone, dtype: torch.dtype) -> int:
    from math import prod

    slots = [slot for spec in backbone.layer_state_specs() for slot in spec.slots]
    return dtype.itemsize * sum(prod(slot.shape) for slot in slots if slot.seq_axis is not None)


def _parts(backbone: DecodeBackbone) -> dict[str, int]:
    """Bytes of embedding, layers, head, and what else stands outside the layers (norms). A tied head has none."""
    from fuel_core.layers.linear import FormattedWeight

    parts = dict.fromkeys(("embedding", "layers", "head", "norms"), 0)
    seen: set[int] = set()
    per_layer = [module for modules in _layer_modules(backbone) for module in modules]
    for part, modules in (("embedding", [backbone.decode_token_embedding()]), ("layers", per_layer)):
        for _, _, tensor in _tensors(modules):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                parts[part] += tensor.nbytes
    for owner, _, tensor in _tensors([backbone]):
        if id(tensor) not in seen:
            parts["head" if isinstance(owner, FormattedWeight) or tensor.dim() > 1 else "norms"] += tensor.nbytes
    return parts


# -- identity ---------------------------------------------------------------------------------------------------------


def key_groups(backbone: DecodeBackbone) -> dict[str, Any]:
    """What the structure key is made of, by subject; layers that are alike are named together.

    ``bound`` are the config's fields that are no part of it, because they may change on a live model.
    """
    key, config = backbone.structure_key(), backbone.decode_config()
    mask, rope = backbone.mask_plan, backbone.rope_plan
    states = [
        ", ".join(f"{slot.name} {' x '.join(map(str, slot.shape))}" for slot in spec.slots)
        for spec in backbone.layer_state_specs()
    ]
    windowed = ["a window" if mask.windows[variant] is not None else "the whole prefix" for variant in mask.per_layer]
    turned = [f"variant {variant}, {rope.variants[variant].width} features" for variant in rope.per_layer]
    dtypes, packed = Counter[str](), Counter[str]()
    for owner, name, tensor in _tensors([backbone]):
        word = _format(owner, name)
        if word == "other":
            dtypes[str(tensor.dtype).removeprefix("torch.")] += 1
        elif name == "weight":
            packed[word] += 1
    return {
        "identity": {"family": key.get("family"), "model": key.get("model")},
        "sizes": {name.removeprefix("dims."): v for name, v in key.components if name.startswith("dims.")},
        "state": {str(value): at for value, at in _grouped(states).items()},
        "masks": {str(value): at for value, at in _grouped(windowed).items()},
        "rope": {str(value): at for value, at in _grouped(turned).items()},
        "weights": {"matrices": dict(packed), "others": dict(dtypes)},
        "config": {name.removeprefix("config."): plain(v) for name, v in key.components if name.startswith("config.")},
        "bound": sorted(backbone.decode_bound_fields() & {field.name for field in fields(config)}),
    }


def native_code(backbone: DecodeBackbone, dtype: torch.dtype) -> dict[str, Any]:
    """What the folder for native code holds for this model on caches of ``dtype``, by looking at it."""
    from fuel_core.persistent_decode import code_for

    return asdict(code_for(backbone, dtype))

"""Puts the tensors of a checkpoint into a module built on the meta device.

Every parameter is set exactly once and every tensor is used exactly once, or nothing is: names and shapes are compared
before the first tensor is read. How one tensor becomes one stored parameter is the job of `_store`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fuel_core.checkpoint.base import listed
from fuel_core.checkpoint.config import MOST_LAYERS
from fuel_core.checkpoint.expert_tensors import gather_experts
from fuel_core.errors import BackendUnavailableError, ConfigError, UnsupportedCheckpointError, WeightsError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fuel_core.checkpoint.base import Checkpoint, TensorInfo
    from fuel_core.checkpoint.formats import Choice, Packed
    from fuel_core.layers.linear import FormattedWeight
    from fuel_core.layers.packed_formats import Rows

__all__ = [
    "WEIGHT_FORMATS",
    "LoadReport",
    "PlannedFormat",
    "check_layer_count",
    "default_tensor_name",
    "load_weights",
    "outline_weights",
    "planned_formats",
]

WEIGHT_FORMATS: Final = ("f32", "bf16", "f16", "int8", "int4")
"""Words `weights=` accepts besides "auto" and the dtype names themselves."""
_DTYPE_WORDS: Final[Mapping[str, str]] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

_BY_WIDTH: Final = ("auto", "int8", "int4")
"""Words under which not every tensor has one dtype."""
_FLOATING: Final = frozenset({"float64", "float32", "bfloat16", "float16"})
_READABLE: Final = _FLOATING | {"int64", "int32", "int16", "int8", "uint8", "bool"}
_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = "model.embed_tokens.weight"
# Buffers that old checkpoints store and every model works out for itself.
_RECOMPUTED: Final = (".rotary_emb.inv_freq",)
_SHOWN: Final = 10
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d+)\.")


@dataclass(frozen=True)
class LoadReport:
    """What `load_weights` did.

    - `weights`: the format word in use, of most numbers where a file keeps several; `dtype` the dtype it stands for,
      float32 beside packed formats. Norms that a mixed file stores in float32 stay float32 beside it.
    - `formats`: parameter -> format, for every weight of a Linear or Embedding.
    - `errors`: parameter -> relative error of int8, where `auto` measured it to choose.
    - `instead`: (parameter, format asked for, format used, why).
    - `parameters`: how many parameters and buffers were set, tied ones not counted twice; `parameter_bytes` their size.
    - `mapped_bytes`: the part of that served from the file mapping without a copy.
    - `tied`: (parameter, parameter it shares storage with).
    - `skipped`: tensors of the file left out by name.
    - `seconds`: wall-clock time.
    """

    weights: str
    dtype: str
    parameters: int
    parameter_bytes: int
    mapped_bytes: int
    tied: tuple[tuple[str, str], ...]
    skipped: tuple[str, ...]
    seconds: float
    formats: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    instead: tuple[tuple[str, str, str, str], ...] = ()


def default_tensor_name(name: str) -> str | None:
    """Parameter name of a checkpoint tensor for families that say nothing: itself, or None for a recomputed buffer."""
    return None if name.endswith(_RECOMPUTED) else name


def check_layer_count(config: Any, ck: Checkpoint, family: Any = None) -> None:
    """Refuse a number of layers that the checkpoint does not hold, before a module is built for each of them.

    Compares `config.num_hidden_layers` with the distinct N among names `layers.N.` (or `blk.N.`) that `family` keeps.
    Without weights, or without names of that form, the number may be 10 000 at most. A config that has no such field
    passes. Reads names only. Raises ConfigError naming both numbers.
    """
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        return
    source = getattr(config, "sources", {}).get("num_hidden_layers") or "num_hidden_layers"
    rule = getattr(family, "tensor_names", None)
    held: set[int] = set()
    for name in ck.for_family(family).tensor_names() if ck.has_weights else ():
        found = _LAYER.search(_parameter_name(rule, name) or "")
        if found is not None:
            held.add(int(found[1]))
    if held and len(held) != count:
        raise ConfigError(
            f"{ck.path}: expected num_hidden_layers to be the number of layers that the weights hold, {len(held)}, "
            f"found {count} ({source}); correct the config, or download the rest of the weights"
        )
    if not held and count > MOST_LAYERS:
        raise ConfigError(
            f"{ck.path}: expected num_hidden_layers of at most {MOST_LAYERS}, found {count} ({source}); "
            "correct the config"
        )


def _parameter_name(rule: Any, name: str) -> str | None:
    """What a family's `tensor_names` makes of a tensor's name; None skips the tensor."""
    if rule is None:
        return default_tensor_name(name)
    if isinstance(rule, Mapping):
        return rule[name] if name in rule else default_tensor_name(name)
    parameter: str | None = rule(name)
    return parameter


def load_weights(
    backbone: nn.Module, ck: Checkpoint, family: Any = None, weights: str = "auto", device: str = "cpu"
) -> LoadReport:
    """Set every parameter and persistent buffer of `backbone` from `ck`.

    `backbone` is built on the meta device; parameters already elsewhere are replaced as well. Parameters come out on
    the CPU without gradients, and share memory with the file mapping where the stored dtype is the wanted one.

    `family` gives `tensor_names` (a function or mapping from checkpoint tensor name to parameter name; None skips the
    tensor) and `gguf_names`. `weights` is "auto" or a format: "f32", "bf16", "f16" (or "float32", ...), "int8", "int4".
    "auto" is the dtype the config declares, else the one most tensors are stored in; in a GGUF file with quantised
    tensors it keeps each at its own width (docs/weights.md has the rule), and vectors in float32. In a file that stores
    matrices in a shorter dtype and vectors in float32, norms stay float32. `device` is where the model will run: packed
    formats are for CPUs, and elsewhere "auto" dequantises to float32.

    Tied parameters (`lm_head.weight` to `model.embed_tokens.weight` when `backbone.config.tie_word_embeddings`; or the
    (parameter, source) pairs of `backbone.tied_weights()`) become one Parameter. A file that stores a tied tensor as
    well must store the same numbers.

    Raises WeightsError listing what is missing, unused, wrongly shaped or left over, before any tensor is read;
    UnsupportedCheckpointError for a quantised checkpoint or a stored type or format that cannot be used;
    BackendUnavailableError for a packed format on another device than a CPU.
    """
    started = time.perf_counter()
    plan = _plan(backbone, ck, family, weights, device)
    assert plan.ck is not None
    report = _install(backbone, plan, _Stored(plan.ck))
    _check_nothing_left(backbone)
    return replace(report, seconds=time.perf_counter() - started)


def outline_weights(
    backbone: nn.Module,
    ck: Checkpoint | None,
    family: Any = None,
    weights: str = "auto",
    *,
    dtype: str = "float32",
    known: Mapping[str, str] | None = None,
) -> LoadReport:
    """Give `backbone` the parameters that `load_weights` would on a CPU, but on the meta device: from headers alone.

    Shapes, dtypes, formats and ties are those of the loaded model, so that its sizes and its structure key are. What
    `auto` would have to measure counts as int8, unless `known` (parameter -> format) says what it came to. Without a
    checkpoint, every parameter counts as stored in `dtype`. Same errors as `load_weights`, and the same report, save
    that it measured nothing.
    """
    if ck is None:
        return _install(backbone, _declared(backbone, weights, dtype), _Outlined(None))
    plan = _plan(backbone, ck, family, weights, "cpu")
    plan.choices.update(
        (parameter, replace(plan.choices[parameter], format=word))
        for parameter, word in (known or {}).items()
        if parameter in plan.choices
    )
    return _install(backbone, plan, _Outlined(plan.ck))


class _Stored:
    """Where the tensors of a model come from: the files."""

    def __init__(self, ck: Checkpoint) -> None:
        self.ck = ck

    def packed(self, choice: Choice, name: str, info: TensorInfo) -> Packed:
        from fuel_core.checkpoint.formats import pack

        try:
            return pack(choice, self.ck.rows(name) if len(info.shape) == 2 else self.ck.matrices(name))
        except WeightsError as exc:
            raise WeightsError(f"{self.ck.path}: tensor {name!r}: {exc}") from None

    def tensor(self, name: str, info: TensorInfo) -> torch.Tensor:
        tensor = self.ck.tensor(name)
        if tuple(tensor.shape) != info.shape:
            raise WeightsError(
                f"{self.ck.path}: expected tensor {name!r} with shape {list(info.shape)} as its header says, found "
                f"{list(tensor.shape)}; download the file again"
            )
        return tensor

    def is_mapped(self, name: str) -> bool:
        return self.ck.is_mapped(name)

    def release(self, name: str) -> None:
        self.ck.release(name)

    def check_same(self, parameter: str, name: str, source: str, source_name: str) -> None:
        _check_same(self.ck, parameter, name, source, source_name)


class _Outlined:
    """The same, by their headers alone: tensors of the meta device."""

    def __init__(self, ck: Checkpoint | None) -> None:
        self.ck = ck

    def packed(self, choice: Choice, name: str, info: TensorInfo) -> Packed:
        from fuel_core.checkpoint.formats import Packed, outlined
        from fuel_core.layers.weight_formats import FORMATS

        return Packed(FORMATS[choice.format], outlined(choice, info.shape), None)

    def tensor(self, name: str, info: TensorInfo) -> torch.Tensor:
        import torch

        # Quantised ones are dequantised to float32 where they are read as a whole.
        dtype: torch.dtype = getattr(torch, "float32" if _is_quantized(info) else info.dtype_name)
        return torch.empty(info.shape, dtype=dtype, device="meta")

    def is_mapped(self, name: str) -> bool:
        return self.ck is not None and self.ck.is_mapped(name)

    def release(self, name: str) -> None:
        pass

    def check_same(self, parameter: str, name: str, source: str, source_name: str) -> None:
        pass


def _install(backbone: nn.Module, plan: _Plan, tensors: _Stored | _Outlined) -> LoadReport:
    """Set every parameter as planned. The one place that decides in which dtype something is stored."""
    import torch

    from fuel_core.checkpoint.formats import DENSE_DTYPES, format_of
    from fuel_core.layers.weight_formats import install

    sources, infos, modules = plan.sources, plan.infos, plan.modules
    target: torch.dtype = getattr(torch, plan.dtype)
    mixed = any(i.dtype_name != "float32" and len(i.shape) >= 2 for i in infos.values())
    matrices = {p for p, slot in plan.slots.items() if slot.dim() >= 2}
    errors: dict[str, float] = {}
    instead: list[tuple[str, str, str, str]] = []
    set_bytes = mapped_bytes = 0
    for parameter, name in sources.items():
        info, wanted = infos[parameter], target
        choice = plan.choices.get(parameter)
        if choice is not None and (choice.format not in DENSE_DTYPES or _is_quantized(info)):
            packed = tensors.packed(choice, name, info)
            install(modules[parameter], packed.format.packed_as, packed.tensors)
            tensors.release(name)
            if packed.error is not None:
                errors[parameter] = packed.error
            if choice.asked is not None:
                instead.append((parameter, choice.asked, packed.format.name, choice.reason))
            set_bytes += sum(t.nbytes for t in packed.tensors.values())
            continue
        if choice is not None:
            wanted = getattr(torch, DENSE_DTYPES[choice.format])
        tensor = tensors.tensor(name, info)
        if info.dtype_name not in _FLOATING and not _is_quantized(info):
            wanted = tensor.dtype
        elif plan.by_width and len(info.shape) == 1:
            wanted = torch.float32
        elif plan.by_width and choice is None and not plan.quantized:
            wanted = tensor.dtype  # what no format holds keeps the dtype it has
        elif (
            mixed and info.dtype_name == "float32" and len(info.shape) == 1 and not _beside_matrix(parameter, matrices)
        ):
            wanted = torch.float32
        stored = tensor.to(wanted)
        if stored is tensor and tensors.is_mapped(name):
            mapped_bytes += tensor.nbytes
        elif stored is not tensor:
            tensors.release(name)
        set_bytes += stored.nbytes
        if parameter in modules:
            install(modules[parameter], None, {"weight": stored})
        else:
            _store(backbone, parameter, stored)
        del tensor, stored
    for parameter, source in plan.pairs:
        if parameter in plan.tensors and parameter not in sources:
            tensors.check_same(parameter, plan.tensors[parameter], source, sources[source])
        _tie(backbone, parameter, source)
    formats = {parameter: format_of(module) for parameter, module in modules.items()}
    return LoadReport(
        weights=_most(formats, plan.slots) if plan.by_width and formats else _DTYPE_WORDS[plan.dtype],
        dtype=plan.dtype,
        parameters=len(sources),
        parameter_bytes=set_bytes,
        mapped_bytes=mapped_bytes,
        tied=tuple(plan.pairs),
        skipped=plan.skipped,
        seconds=0.0,
        formats=formats,
        errors=errors,
        instead=tuple(instead),
    )


class PlannedFormat(NamedTuple):
    """What loading would make of one weight; see `planned_formats`."""

    parameter: str
    tensor: str
    info: TensorInfo
    choice: Choice
    checkpoint: Checkpoint
    """Where the tensor is read; it may be one that the files hold in parts."""

    def source(self) -> Rows | list[Rows]:
        """The numbers: a matrix, or those of a stack."""
        read = self.checkpoint.rows if len(self.info.shape) == 2 else self.checkpoint.matrices
        return read(self.tensor)


def planned_formats(
    backbone: nn.Module, ck: Checkpoint, family: Any = None, weights: str = "auto"
) -> list[PlannedFormat]:
    """How `load_weights` would store every weight that a format can hold on a CPU, from headers alone.

    Same arguments and errors. Norms, biases and what else is no weight of those are left out.
    """
    from fuel_core.checkpoint.formats import DENSE_DTYPES, Choice

    plan = _plan(backbone, ck, family, weights, "cpu")
    assert plan.ck is not None
    dense = Choice(next(word for word, dtype in DENSE_DTYPES.items() if dtype == plan.dtype))
    return [
        PlannedFormat(parameter, name, plan.infos[parameter], plan.choices.get(parameter, dense), plan.ck)
        for parameter, name in plan.sources.items()
        if parameter in plan.modules
    ]


@dataclass(frozen=True)
class _Plan:
    """Everything that is decided before the first tensor is read."""

    ck: Checkpoint | None
    """None where there are no files."""
    dtype: str
    """Of what no format holds, and of everything under a dense word."""
    by_width: bool
    """Packed formats, or each tensor at its own width: vectors are float32 then."""
    quantized: bool
    slots: dict[str, torch.Tensor]
    pairs: list[tuple[str, str]]
    tensors: dict[str, str]
    infos: dict[str, TensorInfo]
    sources: dict[str, str]
    skipped: tuple[str, ...]
    modules: dict[str, FormattedWeight]
    choices: dict[str, Choice]
    """For each weight that is not simply cast to `dtype`."""


def _plan(backbone: nn.Module, ck: Checkpoint, family: Any, weights: str, device: str) -> _Plan:
    from fuel_core.checkpoint.formats import slots_of, weight_modules
    from fuel_core.layers.moe import ExpertLinear

    word, dtype_name = _wanted(weights, ck)
    if word in ("int8", "int4") and device != "cpu":
        raise BackendUnavailableError(
            f"weights={weights!r} on device {device!r}: expected 'cpu', where packed formats run in this release; "
            "use weights='bf16'"
        )
    ck.raw.reject_quantized()
    if not ck.has_weights:
        raise WeightsError(
            f"{ck.path}: expected weights, found only a config; download the safetensors files of this checkpoint"
        )
    ck = ck.for_family(family)
    slots = slots_of(backbone)
    pairs = _tied_pairs(backbone, slots)
    modules = dict(weight_modules(backbone))
    tensors, skipped = _map_names(ck, family)
    stacks = {p: module.n_experts for p, module in modules.items() if isinstance(module, ExpertLinear)}
    ck, tensors = gather_experts(ck, tensors, stacks)
    infos = {parameter: ck.tensor_info(name) for parameter, name in tensors.items()}
    _refuse_unreadable(ck, tensors, infos)
    sources = _check_names(ck, slots, pairs, tensors, infos)
    infos |= {parameter: ck.tensor_info(name) for parameter, name in sources.items()}
    quantized = any(_is_quantized(info) for info in infos.values())
    if word == "auto" and (device != "cpu" or not quantized):
        word = _DTYPE_WORDS[dtype_name]
    return _Plan(
        ck=ck,
        dtype=dtype_name,
        by_width=word in _BY_WIDTH,
        quantized=quantized,
        slots=slots,
        pairs=pairs,
        tensors=tensors,
        infos=infos,
        sources=sources,
        skipped=tuple(skipped),
        modules=modules,
        choices=_choices(word, quantized, modules, pairs, {parameter: infos[parameter] for parameter in sources}),
    )


def _declared(backbone: nn.Module, weights: str, dtype: str) -> _Plan:
    """The plan for a model whose files are not here: every parameter counts as stored in `dtype`."""
    from fuel_core.checkpoint.base import TensorInfo
    from fuel_core.checkpoint.formats import slots_of, weight_modules

    word, dtype_name = (_DTYPE_WORDS[dtype], dtype) if weights == "auto" else _named(weights)
    slots = slots_of(backbone)
    pairs = _tied_pairs(backbone, slots)
    modules = dict(weight_modules(backbone))
    tied = {parameter for parameter, _ in pairs}
    infos = {
        parameter: TensorInfo(
            tuple(slot.shape), dtype if slot.is_floating_point() else str(slot.dtype).removeprefix("torch.")
        )
        for parameter, slot in slots.items()
        if parameter not in tied
    }
    return _Plan(
        ck=None,
        dtype=dtype_name,
        by_width=word in _BY_WIDTH,
        quantized=False,
        slots=slots,
        pairs=pairs,
        tensors={},
        infos=infos,
        sources={parameter: parameter for parameter in infos},
        skipped=(),
        modules=modules,
        choices=_choices(word, False, modules, pairs, infos),
    )


def _choices(
    word: str,
    quantized: bool,
    modules: Mapping[str, FormattedWeight],
    pairs: list[tuple[str, str]],
    infos: Mapping[str, TensorInfo],
) -> dict[str, Choice]:
    """The format of each of the tensors `infos` that is not simply cast."""
    from fuel_core.checkpoint.formats import choose

    # A parameter that shares its storage with something that is no Linear or Embedding stays dense.
    shared = {source for parameter, source in pairs if parameter not in modules}
    return {
        parameter: choose(word, info)
        for parameter, info in infos.items()
        if parameter in modules
        and parameter not in shared
        and (info.dtype_name in _FLOATING or _is_quantized(info))
        and (word in _BY_WIDTH or (quantized and word != "f32"))
    }


def _is_quantized(info: TensorInfo) -> bool:
    return info.dtype_name not in _READABLE


def _most(formats: Mapping[str, str], slots: Mapping[str, torch.Tensor]) -> str:
    """The format that most numbers have."""
    counts: dict[str, int] = {}
    for parameter, word in formats.items():
        counts[word] = counts.get(word, 0) + slots[parameter].numel()
    return max(counts, key=lambda word: counts[word])


def _wanted(weights: str, ck: Checkpoint) -> tuple[str, str]:
    """The format word, and the dtype of what no packed format holds."""
    if weights == "auto":
        key = ck.raw.dtype_key
        if key is not None and ck.raw.dtype is None:
            raise ConfigError(
                f"{ck.raw.source(key)}: expected {key!r} to be float32, bfloat16 or float16, found {ck.raw[key]!r}; "
                "correct the config or say weights="
            )
        return "auto", ck.raw.dtype or "float32"
    return _named(weights)


def _named(weights: str) -> tuple[str, str]:
    word = _DTYPE_WORDS.get(weights, weights)
    if word not in WEIGHT_FORMATS:
        raise UnsupportedCheckpointError(
            f"weights: expected one of auto, {', '.join(WEIGHT_FORMATS)}, found {weights!r}; name one of them"
        )
    return word, next((dtype for dtype, short in _DTYPE_WORDS.items() if short == word), "float32")


def _tied_pairs(backbone: nn.Module, slots: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    declare: Callable[[], Any] | None = getattr(backbone, "tied_weights", None)
    if callable(declare):
        pairs = [(str(p), str(s)) for p, s in declare()]
    elif getattr(getattr(backbone, "config", None), "tie_word_embeddings", False):
        pairs = [(_HEAD, _EMBEDDING)] if _HEAD in slots else []
    else:
        pairs = []
    # A module that ties at build time has one Parameter under two names; it must stay one.
    first: dict[int, str] = {}
    taken = {parameter for parameter, _ in pairs}
    for name, slot in slots.items():
        owner = first.setdefault(id(slot), name)
        if owner != name and name not in taken and owner not in taken:
            pairs.append((name, owner))
    unknown = [name for pair in pairs for name in pair if name not in slots]
    if unknown:
        raise WeightsError(
            f"expected tied weights to name parameters of {type(backbone).__name__}, found {listed(unknown, _SHOWN)}; "
            "correct the family's names or its tied_weights()"
        )
    return pairs


def _map_names(ck: Checkpoint, family: Any) -> tuple[dict[str, str], list[str]]:
    """Parameter name -> tensor name, and the tensors skipped by name."""
    rule = getattr(family, "tensor_names", None)
    tensors: dict[str, str] = {}
    skipped: list[str] = []
    for name in ck.tensor_names():
        parameter = _parameter_name(rule, name)
        if parameter is None:
            skipped.append(name)
        elif parameter in tensors:
            raise WeightsError(
                f"{ck.path}: expected one tensor for parameter {parameter!r}, found {tensors[parameter]!r} and "
                f"{name!r}; correct the family's tensor_names"
            )
        else:
            tensors[parameter] = name
    return tensors, skipped


def _refuse_unreadable(ck: Checkpoint, tensors: Mapping[str, str], infos: Mapping[str, TensorInfo]) -> None:
    readable = _READABLE
    if ck.format == "gguf":
        from fuel_core.checkpoint.gguf_file import READABLE_TYPES

        readable = READABLE_TYPES
    for parameter, info in infos.items():
        if info.dtype_name not in readable:
            raise UnsupportedCheckpointError(
                f"{ck.path}: tensor {tensors[parameter]!r} is stored as {info.dtype_name}: expected one of "
                f"{', '.join(sorted(readable))}; convert or download the model in one of them"
            )


def _check_names(
    ck: Checkpoint,
    slots: Mapping[str, torch.Tensor],
    pairs: list[tuple[str, str]],
    tensors: Mapping[str, str],
    infos: Mapping[str, TensorInfo],
) -> dict[str, str]:
    """Parameter -> tensor to set it from, in the order of `slots`; tied parameters are left to their source."""
    sources = {parameter: tensors[parameter] for parameter in slots if parameter in tensors}
    for parameter, source in pairs:
        if source not in sources and parameter in sources:
            # Some savers keep the tied tensor under the other of its two names.
            sources[source] = sources[parameter]
        sources.pop(parameter, None)
    tied = {parameter for parameter, _ in pairs}
    missing = [p for p in slots if p not in sources and p not in tied]
    unused = [name for parameter, name in tensors.items() if parameter not in slots]
    shapes = []
    for parameter, name in tensors.items():
        if parameter in slots and infos[parameter].shape != tuple(slots[parameter].shape):
            shapes.append(f"{name} {list(infos[parameter].shape)} for {list(slots[parameter].shape)}")
    problems = []
    if missing:
        hint = " (the config does not tie it to the embedding)" if _HEAD in missing else ""
        problems.append(f"{len(missing)} parameters without a tensor: {listed(missing, _SHOWN)}{hint}")
    if unused:
        problems.append(f"{len(unused)} unused tensors: {listed(unused, _SHOWN)}")
    if shapes:
        problems.append(f"{len(shapes)} wrong shapes: {listed(shapes, _SHOWN)}")
    if problems:
        raise WeightsError(
            f"{ck.path}: expected one tensor for every parameter and the reverse, found {'; '.join(problems)}. "
            "Check that the family fits this checkpoint and that the download is complete"
        )
    return sources


def _beside_matrix(parameter: str, matrices: set[str]) -> bool:
    """Whether a vector is the bias of a projection, which must have the dtype of its matrix."""
    stem, _, leaf = parameter.rpartition(".")
    return leaf == "bias" and f"{stem}.weight" in matrices


def _store(backbone: nn.Module, parameter: str, tensor: torch.Tensor) -> None:
    """Make `tensor` the value of one parameter or buffer, without copying it."""
    from torch import nn

    path, _, leaf = parameter.rpartition(".")
    module = backbone.get_submodule(path)
    if leaf in module._parameters:
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        setattr(module, leaf, tensor)


def _tie(backbone: nn.Module, parameter: str, source: str) -> None:
    from fuel_core.layers.linear import Embedding, Linear
    from fuel_core.layers.packed_formats import PACKED_PARAMETERS
    from fuel_core.layers.weight_formats import install

    path, _, leaf = parameter.rpartition(".")
    module, owner = backbone.get_submodule(path), backbone.get_submodule(source.rpartition(".")[0])
    if not isinstance(module, Linear | Embedding) or not isinstance(owner, Linear | Embedding):
        setattr(module, leaf, backbone.get_parameter(source))
        return
    names = ("weight", *PACKED_PARAMETERS)
    stored = {name: p for name, p in owner._parameters.items() if name in names and p is not None}
    install(module, owner.packed_format, stored)


def _check_same(ck: Checkpoint, parameter: str, name: str, source: str, source_name: str) -> None:
    import torch

    from fuel_core.layers.packed_formats import pieces

    if name == source_name:
        return
    if len(ck.tensor_info(name).shape) == 2:  # as large as an embedding: never two of them in float32
        one, other = ck.rows(name), ck.rows(source_name)
        same = all(torch.equal(one.rows(a, b), other.rows(a, b)) for a, b in pieces(*one.shape))
    else:
        same = torch.equal(ck.tensor(name), ck.tensor(source_name))
    if not same:
        raise WeightsError(
            f"{ck.path}: expected {name!r} to equal {source_name!r}, because the config ties {parameter!r} to "
            f"{source!r}, found other numbers; set tie_word_embeddings to false if the head is meant to be its own"
        )


def _check_nothing_left(backbone: nn.Module) -> None:
    left = [name for name, t in (*backbone.named_parameters(), *backbone.named_buffers()) if t.is_meta]
    if left:
        raise WeightsError(
            f"expected every parameter and buffer to have storage, found {len(left)} still on the meta device: "
            f"{listed(left, _SHOWN)}; the family must not register non-persistent buffers in build()"
        )

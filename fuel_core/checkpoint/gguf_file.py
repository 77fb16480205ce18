"""Reads a GGUF file, or the files of a split one: metadata under config.json names, tensors under Hugging Face names.

The header goes through `gguf_header` (our own bounds on every claim of the file); of the gguf package only constants,
name tables and block dequantisation are used. Which family serves an architecture is not known here.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fuel_core.checkpoint import published
from fuel_core.checkpoint.base import Checkpoint, TensorInfo, refuse_lfs_pointer, shown, token_ids
from fuel_core.checkpoint.config import RawConfig
from fuel_core.checkpoint.gguf_header import GgufHeader, GgufTensor, parse_header
from fuel_core.checkpoint.tokenizer_source import GgufVocabulary, TokenizerSource
from fuel_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigError,
    TokenizerError,
    UnsupportedCheckpointError,
    WeightsError,
)

if TYPE_CHECKING:
    import torch

    from fuel_core.layers.packed_formats import Rows

__all__ = ["GgufCheckpoint", "checkpoint_names", "shard_paths"]

# Stored types that torch has as they are; the others that can be read are dequantised to float32.
_PLAIN: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTIZED: Final = frozenset({"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"})
READABLE_TYPES: Final = frozenset({*_PLAIN.values(), *_QUANTIZED})
"""`TensorInfo.dtype_name` of every stored type that can be read."""
_ROPE_DIVISORS: Final = "rope_freqs.weight"
_ROPE_LONG: Final = "rope_factors_long.weight"
_ROPE_SHORT: Final = "rope_factors_short.weight"
_NOT_WEIGHTS: Final = frozenset({_ROPE_DIVISORS, _ROPE_LONG, _ROPE_SHORT})
_BLOCK: Final = re.compile(r"blk\.(\d+)\.(.+)")
# Output floats per dequantisation call: bounds the float32 temporaries to a few times this.
_CHUNK: Final = 1 << 20

# Which tensors say that projections add a bias; q, k and v may be one.
_BIASES = {
    "attention_bias": ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
    "mlp_bias": ("blk.0.ffn_up.bias",),
}
_ID_KEYS: Final = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "eot": "tokenizer.ggml.eot_token_id",
    "eom": "tokenizer.ggml.eom_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
}
_STOP_ROLES: Final = ("eos", "eot", "eom")


_SHARD: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
_MOST_SHARDS: Final = 10_000


class _File:
    """One mapped GGUF file with its checked header."""

    def __init__(self, path: Path, alignment_of_set: int | None = None) -> None:
        self.path = path
        refuse_lfs_pointer(path)
        with path.open("rb") as f:
            if os.fstat(f.fileno()).st_size == 0:
                raise CheckpointCorruptError(f"{path}: expected a GGUF file, found an empty one; download it again")
            # Copy on write: torch wants writable memory, and no write may reach the file.
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        self.header = parse_header(self._map, str(path), alignment_of_set=alignment_of_set)

    def data(self) -> mmap.mmap:
        """The mapping. Raises CheckpointCorruptError for a file cut since: reading what is gone kills the process."""
        size = self._map.size()
        if size < len(self._map):
            raise CheckpointCorruptError(
                f"{self.path}: expected the {len(self._map)} bytes that were there when it was opened, found {size}; "
                "it was cut meanwhile: open the checkpoint again"
            )
        return self._map


class GgufCheckpoint(Checkpoint):
    """One GGUF file, or all files of a split one, memory-mapped.

    `path` is the file that was named; of a split model, its first. `header` has the metadata of that file and the
    tensors of all.
    """

    format = "gguf"

    def __init__(self, path: Path) -> None:
        """Map the files and check their headers. See `open_checkpoint` for the errors."""
        files = _files_of(path)
        self.path = path = files[0].path
        self._file_of = {name: file for file in files for name in file.header.tensors}
        self.files = tuple(file.path for file in files)
        self.header = files[0].header
        if len(files) > 1:
            union = {name: file.header.tensors[name] for name, file in self._file_of.items()}
            self.header = replace(self.header, tensors=union)
        architecture = self.header.metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture.isprintable() or not 0 < len(architecture) <= 64:
            raise CheckpointCorruptError(
                f"{path}: expected 'general.architecture' to name the architecture, found {shown(architecture)}; "
                "convert the model again"
            )
        self._architecture = architecture
        self._overrides: Mapping[str, str | None] = {}
        self._names = checkpoint_names(architecture, self.header.tensors, {})
        self.raw = _raw_config(self, architecture)

    def for_family(self, family: object) -> Checkpoint:
        overrides = getattr(family, "gguf_names", None)
        if not overrides:
            return self
        view = object.__new__(GgufCheckpoint)
        view.__dict__.update(self.__dict__)
        view._names = checkpoint_names(self._architecture, self.header.tensors, overrides)
        return view

    @property
    def has_weights(self) -> bool:
        return bool(self._names)

    def tensor_names(self) -> list[str]:
        return sorted(self._names)

    def tensor_info(self, name: str) -> TensorInfo:
        entry = self.header.tensors[self._names[name]]
        return TensorInfo(entry.shape, _PLAIN.get(entry.type_name, entry.type_name))

    def gguf_name(self, name: str) -> str:
        """The name a tensor has inside the file."""
        return self._names[name]

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._names[name]
        tensor = self._read(self.header.tensors[stored])
        permuted = self._permuted(stored)
        if permuted is None:
            return tensor
        heads, layer = permuted
        return _unpermute(tensor, self._head_count(heads, layer), f"{self.path}: tensor {stored!r}")

    def rows(self, name: str) -> Rows:
        stored = self._names[name]
        entry = self.header.tensors[stored]
        if entry.type_name not in _QUANTIZED:
            return super().rows(name)
        import torch

        from fuel_core.checkpoint.gguf_blocks import BlockRows

        permuted = self._permuted(stored)
        if permuted is None:
            return BlockRows(self._data(stored), entry)
        # Whole rows were moved, so they go back as they are stored.
        heads, layer = permuted
        place = f"{self.path}: tensor {stored!r}"
        return BlockRows(
            self._data(stored), entry, _unpermute(torch.arange(entry.shape[0]), self._head_count(heads, layer), place)
        )

    def release(self, name: str) -> None:
        entry = self.header.tensors[self._names[name]]
        # Whole pages inside the tensor: its neighbours may be parameters that were written to.
        first = -(-entry.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (entry.offset + entry.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and entry.type_name in _QUANTIZED and hasattr(mmap, "MADV_DONTNEED"):
            self._file_of[entry.name].data().madvise(mmap.MADV_DONTNEED, first, length)

    def is_mapped(self, name: str) -> bool:
        stored = self._names[name]
        return self.header.tensors[stored].type_name in _PLAIN and self._permuted(stored) is None

    def tokenizer_files(self) -> TokenizerSource:
        meta = self.header.metadata
        special = self._special_ids()
        return TokenizerSource(
            format="gguf",
            origin=str(self.path),
            chat_templates=_chat_templates(meta),
            special_ids=special,
            stop_ids={_ID_KEYS[role]: (special[role],) for role in _STOP_ROLES if role in special},
            gguf=_vocabulary(meta, str(self.path)),
        )

    # -- internals ----------------------------------------------------------------------------------------------

    def _data(self, stored: str) -> mmap.mmap:
        return self._file_of[stored].data()

    def _read(self, entry: GgufTensor) -> torch.Tensor:
        import torch

        plain = _PLAIN.get(entry.type_name)
        if plain is not None:
            dtype: torch.dtype = getattr(torch, plain)
            flat = torch.frombuffer(
                self._data(entry.name), dtype=dtype, count=entry.nbytes // dtype.itemsize, offset=entry.offset
            )
            return flat.view(entry.shape)
        if entry.type_name not in _QUANTIZED:
            raise UnsupportedCheckpointError(
                f"{self.path}: tensor {entry.name!r} is stored as {entry.type_name}: expected one of "
                f"{', '.join(sorted((*_PLAIN, *_QUANTIZED)))}; convert or download the model in one of them"
            )
        return _dequantize(self._data(entry.name), entry)

    def _permuted(self, stored: str) -> tuple[str, int] | None:
        """Config key of the head count and layer number of a tensor whose rows the converter reordered."""
        block = _BLOCK.fullmatch(stored)
        if block is None or self._architecture not in published.permuted_architectures():
            return None
        key = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(block[2].split(".")[0])
        return None if key is None else (key, int(block[1]))

    def read_small(self, stored: str) -> tuple[float, ...] | None:
        """Values of a float32 vector under its name in the file; None if the file has none."""
        import numpy as np

        entry = self.header.tensors.get(stored)
        if entry is None:
            return None
        if entry.type_name != "F32" or len(entry.shape) != 1 or entry.shape[0] > 1 << 16:
            raise CheckpointCorruptError(
                f"{self.path}: expected {stored!r} to be a short float32 vector, found {entry.type_name} "
                f"{list(entry.shape)}; convert the model again"
            )
        values = np.frombuffer(self._data(stored), np.dtype("<f4"), entry.shape[0], entry.offset)
        return tuple(float(v) for v in values)

    def _head_count(self, key: str, layer: int) -> int:
        value = self.raw.get(key)
        if value is None and key == "num_key_value_heads":
            value = self.raw.get("num_attention_heads")
        if isinstance(value, list) and layer < len(value):
            value = value[layer]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{self.raw.source(key)}: expected a positive head count to put query and key rows back in order, "
                f"found {shown(value)}; convert the model again"
            )
        return value

    def _special_ids(self) -> dict[str, int]:
        meta = self.header.metadata
        tokens = meta.get("tokenizer.ggml.tokens")
        size = len(tokens) if isinstance(tokens, list) else None
        special: dict[str, int] = {}
        for role, key in _ID_KEYS.items():
            for token in token_ids(meta.get(key), f"{self.path}: {key}")[:1]:
                if size is None or token < size:
                    special[role] = token
                elif role not in ("unk", "pad"):
                    # Never written by a converter on purpose: a stop id that cannot occur never stops.
                    raise CheckpointCorruptError(
                        f"{self.path}: expected {key!r} below the {size} tokens of the vocabulary, found {token}; "
                        "convert the model again"
                    )
        return special


def _files_of(path: Path) -> list[_File]:
    """The file, or every file of the split model it belongs to, in order; the first holds the metadata.

    Raises CheckpointNotFoundError listing the files that are not there, CheckpointCorruptError where names, the split
    keys and the tensors of the files contradict one another.
    """
    named = _SHARD.fullmatch(path.name)
    if named is not None and int(named["total"]) > 1:
        siblings = shard_paths(path)
        missing = [p.name for p in siblings if not p.is_file()]
        if missing:
            some = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise CheckpointNotFoundError(
                f"{path.parent}: expected all {len(siblings)} files of this split model, found {len(missing)} missing: "
                f"{some}; incomplete download? Download them into the same folder"
            )
    else:
        siblings = [path]
    first = _File(siblings[0])
    alignment = first.header.metadata.get("general.alignment")
    files = [first, *(_File(p, alignment) for p in siblings[1:])]
    owner: dict[str, Path] = {}
    for number, file in enumerate(files):
        meta = file.header.metadata
        count, place = meta.get("split.count"), meta.get("split.no")
        if len(files) == 1 and (count is None or (count in (0, 1) and place in (None, 0))):
            return files
        if len(files) == 1:
            raise CheckpointNotFoundError(
                f"{file.path}: expected the name of a split file, NAME-00001-of-{_five(count)}.gguf, because the file "
                f"is part {shown(place)} (from 0) of {shown(count)}, found another one; give all parts their names back"
            )
        if isinstance(count, bool) or count != len(files) or isinstance(place, bool) or place != number:
            raise CheckpointCorruptError(
                f"{file.path}: expected part {number} (from 0) of {len(files)} as its name says, found split.no "
                f"{shown(place)} of split.count {shown(count)}; download it again, under its own name"
            )
        for name in file.header.tensors:
            if name in owner:
                raise CheckpointCorruptError(
                    f"{file.path}: expected every tensor once, found {name!r} in {owner[name].name} as well; "
                    "download the parts of one and the same model"
                )
            owner[name] = file.path
    promised = first.header.metadata.get("split.tensors.count")
    if promised is not None and promised != len(owner):
        raise CheckpointCorruptError(
            f"{first.path}: expected the {shown(promised)} tensors of split.tensors.count in the {len(files)} files, "
            f"found {len(owner)}; download the parts of one and the same model"
        )
    return files


def shard_paths(path: Path) -> list[Path]:
    """All files of the set that a split file's name belongs to, present or not; [path] for another name."""
    named = _SHARD.fullmatch(path.name)
    if named is None:
        return [path]
    total, number = int(named["total"]), int(named["number"])
    if not 1 <= number <= total <= _MOST_SHARDS:
        raise CheckpointCorruptError(
            f"{path}: expected a part from 1 to its total, of at most {_MOST_SHARDS} in all, found {path.name!r}; "
            "give the file its own name back"
        )
    return [path.with_name(f"{named['stem']}-{i:05d}-of-{total:05d}.gguf") for i in range(1, total + 1)]


def _five(count: object) -> str:
    return f"{count:05d}" if isinstance(count, int) else "?"


def checkpoint_names(architecture: str, tensors: Mapping[str, object], overrides: Mapping[str, Any]) -> dict[str, str]:
    """Hugging Face name -> name in the file, for every tensor that is a weight.

    `overrides` come from the family: a pattern such as "blk.{bid}.ffn_up" or "output_norm.weight" (with or without
    the ending) to a name with the same `{bid}`, or to None for a tensor to skip. A key that is `architecture` holds a
    mapping of the same kind for that architecture alone, which wins.

    Raises WeightsError for two tensors that end up under one name. A tensor without a known name keeps its own.
    """
    mine = {k: v for k, v in overrides.items() if not isinstance(v, Mapping)}
    special = overrides.get(architecture)
    if isinstance(special, Mapping):
        mine.update(special)
    names: dict[str, str] = {}
    for stored in tensors:
        if stored in _NOT_WEIGHTS:
            continue
        name = _one_name(architecture, stored, mine)
        if name is None:
            continue
        if name in names:
            raise WeightsError(
                f"expected every tensor under its own name, found {names[name]!r} and {stored!r} both as {name!r}; "
                "correct the family's gguf_names"
            )
        names[name] = stored
    return names


def _one_name(architecture: str, stored: str, overrides: Mapping[str, str | None]) -> str | None:
    block = _BLOCK.fullmatch(stored)
    number, pattern = (block[1], f"blk.{{bid}}.{block[2]}") if block else ("", stored)
    stem, dot, ending = pattern.rpartition(".")
    if ending not in ("weight", "bias"):
        stem, dot, ending = pattern, "", ""
    if pattern in overrides:
        name = overrides[pattern]
    elif stem in overrides:
        base = overrides[stem]
        name = None if base is None else f"{base}{dot}{ending}"
    else:
        name = f"{_default_names(architecture).get(stem, stem)}{dot}{ending}"
    return None if name is None else name.replace("{bid}", number)


@cache
def _default_names(architecture: str) -> Mapping[str, str]:
    """Stem in the file -> stem in a Hugging Face folder, both with `{bid}` for the layer number."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    table = published.table("checkpoint_names")
    arch = next((a for a, n in MODEL_ARCH_NAMES.items() if n == architecture), None)
    if arch is None:
        return {}
    known = get_tensor_name_map(arch, 1).mapping
    names: dict[str, str] = {}
    for prefix, words in (("", table["whole_model"]), ("model.layers.{bid}.", table["per_block"])):
        for word in words:
            entry = known.get(f"{prefix.replace('{bid}', '0')}{word}")
            if entry is not None:
                names.setdefault(entry[1].replace("blk.0.", "blk.{bid}."), f"{prefix}{word}")
    return names


def _raw_config(ck: GgufCheckpoint, architecture: str) -> RawConfig:
    """Metadata under config.json names, each with the key it came from."""
    header, meta, prefix = ck.header, ck.header.metadata, f"{architecture}."
    renamed, rope_renamed = published.table("gguf_keys"), published.table("gguf_rope_keys")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def put(key: str, value: Any, source: str) -> None:
        values[key], sources[key] = value, source

    for full, value in meta.items():
        if not full.startswith(prefix):
            continue
        key = full.removeprefix(prefix)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            # Per-layer lists of one value say the same as the value; config.json has no per-layer form.
            value = value[0]
        put(renamed.get(key, f"gguf:{key}"), value, f"gguf: {full}")

    value_length = meta.get(f"{prefix}attention.value_length")
    if value_length is not None:
        key_length = values.get("head_dim")
        if key_length is None:
            hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
            divisible = isinstance(hidden, int) and isinstance(heads, int) and heads > 0
            key_length = hidden // heads if divisible else None  # type: ignore[operator]
        if value_length != key_length:
            raise ConfigError(
                f"{ck.path}: expected {prefix}attention.value_length to equal the key length {shown(key_length)}, "
                f"found {shown(value_length)}; heads of two widths are not supported"
            )
    if "vocab_size" not in values:
        embedding = header.tensors.get("token_embd.weight")
        tokens = meta.get("tokenizer.ggml.tokens")
        if embedding is not None and len(embedding.shape) == 2:
            put("vocab_size", embedding.shape[0], "gguf: rows of token_embd.weight")
        elif isinstance(tokens, list):
            put("vocab_size", len(tokens), "gguf: tokenizer.ggml.tokens")
    if header.tensors:
        tied = "output.weight" not in header.tensors
        put("tie_word_embeddings", tied, f"gguf: output.weight {'absent' if tied else 'present'}")
        for key, fits in _BIASES.items():
            biases = [stored for stored in fits if stored in header.tensors]
            put(key, bool(biases), f"gguf: {biases[0]} present" if biases else f"gguf: {' and '.join(fits)} absent")
        fused = "blk.0.attn_qkv.weight" in header.tensors
        put("fused_qkv", fused, f"gguf: blk.0.attn_qkv.weight {'present' if fused else 'absent'}")
        dtype = _loaded_dtype(header)
        if dtype is not None:
            put("dtype", dtype, "gguf: tensor types")
    for role in ("bos", "eos", "pad"):
        if _ID_KEYS[role] in meta:
            put(f"{role}_token_id", meta[_ID_KEYS[role]], f"gguf: {_ID_KEYS[role]}")
    _put_rope(ck, meta, prefix, rope_renamed, values, put)
    return RawConfig(values, sources, format="gguf", gguf_architecture=architecture)


def _put_rope(
    ck: GgufCheckpoint,
    meta: Mapping[str, Any],
    prefix: str,
    renamed: Mapping[str, str],
    values: Mapping[str, Any],
    put: Any,
) -> None:
    if "rope_theta" not in values:
        # The format's own default: converters leave the key out where a model uses it.
        put("rope_theta", 10000.0, "gguf: default of rope.freq_base")
    width, head_dim = meta.get(f"{prefix}rope.dimension_count"), values.get("head_dim")
    if head_dim is None:
        hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0:
            head_dim = hidden // heads
    if isinstance(width, int) and isinstance(head_dim, int) and head_dim > 0 and width != head_dim:
        put("partial_rotary_factor", width / head_dim, f"gguf: {prefix}rope.dimension_count / head_dim")

    scaling: dict[str, Any] = {}
    kind = meta.get(f"{prefix}rope.scaling.type")
    for full, value in meta.items():
        if full.startswith(f"{prefix}rope.scaling."):
            key = full.removeprefix(f"{prefix}rope.scaling.")
            if key != "type":
                # A key without a known meaning stays in the block under its own name, and the reader refuses it there.
                scaling[renamed.get(key, f"gguf:{key}")] = value
    long, short, divisors = (ck.read_small(n) for n in (_ROPE_LONG, _ROPE_SHORT, _ROPE_DIVISORS))
    source = f"gguf: {prefix}rope.scaling"
    if divisors is not None:
        put("rope_scaling", {"rope_type": "default", "frequency_divisors": list(divisors)}, f"gguf: {_ROPE_DIVISORS}")
        return
    if long is not None and short is not None:
        scaling |= {"rope_type": "longrope", "long_factor": list(long), "short_factor": list(short)}
        source = f"gguf: {_ROPE_LONG}"
        # Stored for the reference implementation; the number follows from the two lengths.
        scaling.pop("factor", None)
    elif kind is not None:
        scaling["rope_type"] = kind
    elif meta.get(f"{prefix}rope.scale_linear") is not None:
        scaling |= {"rope_type": "linear", "factor": meta[f"{prefix}rope.scale_linear"]}
    elif "factor" in scaling:
        scaling["rope_type"] = "linear"
    behaviour = published.rope_behaviour(str(scaling.get("rope_type", "default")))
    magnitude, factor = scaling.get("attention_factor"), scaling.get("factor")
    if behaviour == "yarn" and isinstance(magnitude, float) and isinstance(factor, float) and factor > 1.0:
        # In a GGUF file this number multiplies the formula; in a config it replaces it.
        scaling["attention_factor"] = magnitude * (0.1 * math.log(factor) + 1.0)
    if behaviour != "default":
        put("rope_scaling", scaling, source)


def _loaded_dtype(header: GgufHeader) -> str | None:
    """Dtype the weights have once read: float32 as soon as one is quantised, else that of most matrix elements."""
    counts: dict[str, int] = {}
    for entry in header.tensors.values():
        if entry.type_name not in _PLAIN:
            return "float32"
        if len(entry.shape) >= 2:
            name = _PLAIN[entry.type_name]
            counts[name] = counts.get(name, 0) + entry.nbytes
    return max(counts, key=lambda k: counts[k]) if counts else None


def _unpermute(tensor: torch.Tensor, heads: int, stored: str) -> torch.Tensor:
    """Undo the converter's row order: within each head, rows (pair, half) go back to (half, pair).

    Works on weights [heads * head_dim, hidden] and biases [heads * head_dim] alike.
    """
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise CheckpointCorruptError(
            f"{stored}: expected rows in pairs for {heads} heads, found {rows} rows; convert the model again"
        )
    pairs = tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()


def _dequantize(data: mmap.mmap, entry: GgufTensor) -> torch.Tensor:
    """Blocks to float32, a chunk at a time, straight into the result."""
    import numpy as np
    import torch
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(entry.type_id)
    block, size = GGML_QUANT_SIZES[kind]
    blocks = np.frombuffer(data, np.uint8, entry.nbytes, entry.offset)
    result = torch.empty(entry.nbytes // size * block, dtype=torch.float32)
    out = result.numpy()
    step = _CHUNK // block
    for first in range(0, entry.nbytes // size, step):
        piece = blocks[first * size : (first + step) * size]
        out[first * block : (first + step) * block] = dequantize(piece, kind)
    return result.view(entry.shape)


def _chat_templates(meta: Mapping[str, Any]) -> dict[str, str]:
    templates = {
        key.removeprefix("tokenizer.chat_template."): value
        for key, value in meta.items()
        if key.startswith("tokenizer.chat_template.") and isinstance(value, str)
    }
    default = meta.get("tokenizer.chat_template")
    if isinstance(default, str):
        templates["default"] = default
    return templates


def _vocabulary(meta: Mapping[str, Any], origin: str) -> GgufVocabulary | None:
    word, tokens = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.tokens")
    if word is None and tokens is None:
        return None
    if not isinstance(word, str) or not isinstance(tokens, list) or not _all_of(tokens, str):
        raise CheckpointCorruptError(
            f"{origin}: expected both tokenizer.ggml.model and tokenizer.ggml.tokens, found one; "
            "convert the model again"
        )
    kind = published.tokenizer_kind(word.lower())
    if kind not in ("bpe", "spm"):
        known = ", ".join(sorted(published.table("tokenizer_models")))
        raise TokenizerError(
            f"{origin}: unknown GGUF tokenizer model {shown(word)}: expected one of {known}; "
            "use the Hugging Face folder of this model, which carries its own tokenizer.json"
        )
    lists: dict[str, tuple[Any, ...]] = {}
    for key, item, length in (
        ("token_type", int, len(tokens)),
        ("scores", float, len(tokens)),
        ("merges", str, None),
    ):
        value = meta.get(f"tokenizer.ggml.{key}", [])
        if not _all_of(value, item) or (value and length is not None and len(value) != length):
            size = f" of {length} items" if length is not None else ""
            raise CheckpointCorruptError(
                f"{origin}: expected tokenizer.ggml.{key} to be a list of {item.__name__}{size}, found "
                f"{len(value) if isinstance(value, list) else shown(value)}; convert the model again"
            )
        lists[key] = tuple(value)
    pre = meta.get("tokenizer.ggml.pre")
    pre = pre if isinstance(pre, str) else None
    add_bos = meta.get("tokenizer.ggml.add_bos_token")
    if not isinstance(add_bos, bool):
        add_bos = True if kind == "spm" else _rule_adds_bos(pre)
    return GgufVocabulary(
        model_kind=word.lower(),
        kind=kind,  # type: ignore[arg-type]
        pre_tokenizer=pre,
        tokens=tuple(tokens),
        token_types=lists["token_type"],
        scores=lists["scores"],
        merges=lists["merges"],
        add_bos=add_bos,
        add_eos=meta.get("tokenizer.ggml.add_eos_token") is True,
        add_space_prefix=meta.get("tokenizer.ggml.add_space_prefix") is not False,
    )


def _rule_adds_bos(pre: str | None) -> bool:
    try:
        return published.pre_tokenizer(pre).add_bos
    except TokenizerError:
        # An unknown rule is refused where text is cut, not where the file is inspected.
        return False


def _all_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(v) is kind for v in value)

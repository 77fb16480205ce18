"""Turns the raw keys of a checkpoint into a frozen spec, and remembers where every value came from.

Knows the spellings that published configs use for one and the same fact; knows no family. A family's
`resolve_config(raw)` makes a `ConfigReader`, asks it for values by their config.json name and ends with `finish`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

from fuel_core.checkpoint.base import listed, shown
from fuel_core.checkpoint.published import known_rope_types, rope_behaviour
from fuel_core.checkpoint.quantised import declared_method
from fuel_core.errors import ConfigError, UnsupportedCheckpointError

__all__ = ["MOST_LAYERS", "REQUIRED", "ConfigReader", "DecoderConfig", "RawConfig", "RopeParameters", "canonical_dtype"]

# The reader's methods are named for the types they return, which hides those names inside its class body.
_Int: TypeAlias = int
_Float: TypeAlias = float
_Bool: TypeAlias = bool
_Str: TypeAlias = str


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = _Required()
"""Default of the typed getters: the key must be there."""

MOST_LAYERS: Final = 10_000
"""Many times the depth of the deepest model; a module of this many layers is still built in seconds."""
_MOST_WIDTH: Final = 1 << 24
"""Above every width and vocabulary that is published; the square of it is still a size that torch can name."""

_MOST_SCALE: Final = 1e9
"""Above every factor of a rotation that is published; its reciprocal is below every one."""
_MOST_BASE: Final = 1e30

_DTYPES: Final = {
    "float32": "float32",
    "float": "float32",
    "f32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "f16": "float16",
    "fp16": "float16",
}
_NESTED: Final = "text_config"
_QUANTIZATION_KEYS: Final = ("quantization_config", "compression_config", "quantization")
# Keys of the outer config that say nothing about the decoder, though a decoder key may have the same name.
_OUTER_ONLY: Final = frozenset({"model_type", "architectures"})


def canonical_dtype(word: object) -> str | None:
    """Canonical word ("float32", "bfloat16", "float16") for a published spelling ("torch.bfloat16", ...), or None."""
    return _DTYPES.get(word.removeprefix("torch.").lower()) if isinstance(word, str) else None


class RawConfig(Mapping[str, Any]):
    """The keys of a checkpoint under their config.json names, with the place each was read from.

    Where a config nests the decoder's keys under `text_config` (multimodal checkpoints), a key is taken from there
    when it has a value there, else from the outer level; `source(key)` says which. Three keys follow their own rule:
    `model_type` and `architectures` are the outer ones, `tie_word_embeddings` is true if any level says so, and
    `eos_token_id` is taken from the outer level first, where multimodal checkpoints keep it.

    A null value counts as present (`key in raw`), so a family can tell "null" from "not said"; the typed getters of
    `ConfigReader` treat both as absent.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        sources: Mapping[str, str],
        *,
        format: str = "huggingface",
        gguf_architecture: str | None = None,
        nested_model_type: str | None = None,
    ) -> None:
        self._values = dict(values)
        self._sources = dict(sources)
        self.format = format
        self.gguf_architecture = gguf_architecture
        self.nested_model_type = nested_model_type
        """`model_type` inside `text_config`, if there is one."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, origin: str = "config.json") -> RawConfig:
        """Merge the levels of one parsed config.json by the rule above. Raises ConfigError if it is not an object."""
        if not isinstance(config, Mapping):
            raise ConfigError(f"{origin}: expected a JSON object, found {type(config).__name__}; correct the file")
        nested = config.get(_NESTED)
        if nested is None:
            nested = {}
        if not isinstance(nested, Mapping):
            raise ConfigError(
                f"{origin}: expected an object under {_NESTED!r}, found {type(nested).__name__}; correct it"
            )
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for key, value in config.items():
            if key != _NESTED:
                values[key], sources[key] = value, origin
        for key, value in nested.items():
            if key in _OUTER_ONLY and values.get(key) is not None:
                continue
            if key == "eos_token_id" and values.get(key) is not None:
                continue
            if key == "tie_word_embeddings" and values.get(key) is True:
                continue
            if value is not None or key not in values:
                values[key], sources[key] = value, f"{origin}: {_NESTED}"
        nested_type = nested.get("model_type")
        return cls(values, sources, nested_model_type=nested_type if isinstance(nested_type, str) else None)

    def with_values(self, values: Mapping[str, Any], source: str) -> RawConfig:
        """A copy where `values` replace or add keys, with `source` as their place."""
        return RawConfig(
            {**self._values, **values},
            {**self._sources, **dict.fromkeys(values, source)},
            format=self.format,
            gguf_architecture=self.gguf_architecture,
            nested_model_type=self.nested_model_type,
        )

    def renamed(self, names: Mapping[str, str]) -> RawConfig:
        """A copy in which what is published under other names stands under the usual ones as well.

        `names`: published name -> usual name (`{"rotary_pct": "partial_rotary_factor"}`). The source of such a value
        names the key it was read from. A null counts as absent. Raises ConfigError where two values stand under the two
        names.
        """
        found: RawConfig = self
        for published, usual in names.items():
            value, there = found.get(published), found.get(usual)
            if value is None:
                continue
            if there is not None and there != value:
                raise ConfigError(
                    f"{found.source(published)}: expected {published!r} and {usual!r} to agree, found {shown(value)} "
                    f"and {shown(there)}; correct one of them"
                )
            if there is None:
                found = found.with_values({usual: value}, f"{found.source(published)}: {published}")
        return found

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"RawConfig(model_type={self.model_type!r}, format={self.format!r}, {len(self)} keys)"

    def source(self, key: str) -> str:
        """Place `key` was read from, such as "config.json: text_config" or "gguf: rope.freq_base"."""
        return self._sources.get(key, "not given")

    @property
    def model_type(self) -> str | None:
        """The outer `model_type`; None where there is none (GGUF has an architecture instead)."""
        value = self._values.get("model_type")
        return value if isinstance(value, str) else None

    @property
    def dtype(self) -> str | None:
        """Declared dtype in canonical form from `dtype` or `torch_dtype` (either level), None if not declared."""
        return canonical_dtype(self._values.get(self.dtype_key or ""))

    @property
    def dtype_key(self) -> str | None:
        """Which of the two spellings is in use: "dtype" before "torch_dtype"; None if neither has a value."""
        return next((k for k in ("dtype", "torch_dtype") if self._values.get(k) is not None), None)

    @property
    def quantization(self) -> str | None:
        """Method named by a `quantization_config`, "unnamed" if it names none, None without one."""
        key = self._quantization_key
        return None if key is None else declared_method(self._values[key])

    @property
    def _quantization_key(self) -> str | None:
        return next((k for k in _QUANTIZATION_KEYS if self._values.get(k) is not None), None)

    def reject_quantized(self) -> None:
        """Raise UnsupportedCheckpointError, naming the method, if the weights are declared quantised.

        Quantised tensors read as plain numbers give fluent nonsense, so the declaration alone is refused.
        """
        method, key = self.quantization, self._quantization_key
        if method is not None and key is not None:
            place = self.source(key)
            raise UnsupportedCheckpointError(
                f"this checkpoint is quantised with {shown(method)} "
                f"({place if place.startswith('tensors: ') else f'{place}: {key}'}): "
                "expected plain float32, bfloat16 or float16 tensors; use the unquantised checkpoint or a GGUF of it"
            )


@dataclass(frozen=True)
class RopeParameters:
    """Everything a checkpoint says about one rotary embedding, under one spelling. Hashable.

    `kind` is the behaviour: "default", "linear", "dynamic", "banded" (low and high frequencies scaled apart), "yarn"
    or "longrope". `theta` is the base. `partial_rotary_factor` is the share of the head that rotates. Numbers a kind
    does not use are None; numbers it uses and the file does not give are None too, save the ones resolved from
    elsewhere in the config (`original_max_position_embeddings`, and `factor` of longrope).

    `frequency_divisors` (one per rotated pair) divide the inverse frequencies of `theta`. They come with kind "default"
    and stand for a whole scaling whose parameters the file does not give.
    """

    kind: str
    theta: float
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    frequency_divisors: tuple[float, ...] | None = None
    extra: tuple[tuple[str, float], ...] = ()
    """Numbers under keys that are not known here and that the family asked for by name."""

    def rotary_width(self, head_dim: int) -> int:
        """How many dimensions of a head rotate: `int(head_dim * partial_rotary_factor)`.

        The small allowance keeps a factor that was itself made by dividing (GGUF stores the width) exact.
        """
        return int(head_dim * self.partial_rotary_factor + 1e-6)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Resolved spec that every family extends. Frozen and hashable; field names are those of config.json.

    `dtype` is the model's declared dtype in canonical form ("float32", "bfloat16" or "float16"). `rms_norm_eps` is
    None for families that normalise otherwise. `sources` maps each field to the place its value came from; it takes
    no part in equality, hashing or repr.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeParameters
    hidden_act: str = "silu"
    rms_norm_eps: float | None = None
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)

    # A mapping proxy is neither copied nor pickled, and a model that cannot be copied is no use to anyone.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "sources": dict(self.sources)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, sources=MappingProxyType(state["sources"]))


_Spec = TypeVar("_Spec", bound=DecoderConfig)

_ROPE_FLOATS: Final = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_ROPE_LISTS: Final = ("short_factor", "long_factor", "frequency_divisors")
_ROPE_KNOWN: Final = frozenset(
    {
        *_ROPE_FLOATS,
        *_ROPE_LISTS,
        "type",
        "rope_type",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "truncate",
        # Said of a checkpoint's training, not of its arithmetic.
        "finetuned",
    }
)
# What each kind cannot do without.
_ROPE_NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "banded": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "short_factor", "long_factor", "original_max_position_embeddings"),
}


class ConfigReader:
    """Typed, sourced access to a `RawConfig` for one family.

    Every getter takes the config.json key; looks in the raw config, then in the family's `defaults`, then at its own
    `default`; records where the value came from under the key (or under `into`, when the spec's field has another
    name); and raises ConfigError, in one line with what was expected and found, for anything else. A null value counts
    as absent. `why` is the source to record when `default` is used, such as "derived: num_attention_heads".
    """

    def __init__(self, raw: RawConfig, defaults: Mapping[str, Any] | None = None, family: str = "") -> None:
        self.raw = raw
        self.family = family
        self.defaults = dict(defaults or {})
        self._sources: dict[str, str] = {}

    # -- plain values -------------------------------------------------------------------------------------------

    def int(
        self,
        key: _Str,
        default: _Int | _Required = REQUIRED,
        *,
        minimum: _Int | None = 1,
        maximum: _Int | None = None,
        why: _Str = "default",
        into: _Str | None = None,
    ) -> _Int:
        """An integer, at least `minimum` and at most `maximum`; bound what sizes a tensor or a list."""
        value = self._integer(key, self._lookup(key, default, why, into), minimum)
        if maximum is not None and value > maximum:
            raise self._wrong(key, f"an integer of at most {maximum}", value)
        return value

    def optional_int(self, key: _Str, *, minimum: _Int | None = 1, into: _Str | None = None) -> _Int | None:
        """An integer, or None where the key is absent or null (a null is final: no default replaces it)."""
        value = self._optional(key, into)
        return None if value is None else self._integer(key, value, minimum)

    def float(
        self,
        key: _Str,
        default: _Float | _Required = REQUIRED,
        *,
        above: _Float | None = 0.0,
        why: _Str = "default",
        into: _Str | None = None,
    ) -> _Float:
        """A finite number greater than `above`; integers are accepted."""
        return self._number(key, self._lookup(key, default, why, into), above)

    def optional_float(self, key: _Str, *, above: _Float | None = 0.0, into: _Str | None = None) -> _Float | None:
        """A finite number, or None where the key is absent or null."""
        value = self._optional(key, into)
        return None if value is None else self._number(key, value, above)

    def bool(
        self, key: _Str, default: _Bool | _Required = REQUIRED, *, why: _Str = "default", into: _Str | None = None
    ) -> _Bool:
        """A JSON true or false, nothing that merely looks like it."""
        value = self._lookup(key, default, why, into)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def str(
        self,
        key: _Str,
        default: _Str | _Required = REQUIRED,
        *,
        choices: Iterable[_Str] = (),
        why: _Str = "default",
        into: _Str | None = None,
    ) -> _Str:
        """A non-empty string, one of `choices` if any are given."""
        value = self._lookup(key, default, why, into)
        allowed = tuple(choices)
        if not isinstance(value, str) or not value or (allowed and value not in allowed):
            raise self._wrong(key, f"one of {', '.join(allowed)}" if allowed else "a non-empty string", value)
        return value

    def ids(self, key: _Str, *, into: _Str | None = None) -> tuple[_Int, ...]:
        """Token ids published as one integer, a list of integers or null; () when absent."""
        value = self._optional(key, into)
        items = () if value is None else value if isinstance(value, (list, tuple)) else (value,)
        return tuple(self._integer(key, item, 0) for item in items)

    def list(
        self, key: _Str, *, length: _Int | None = None, choices: Iterable[Any] = (), into: _Str | None = None
    ) -> tuple[Any, ...] | None:
        """A list as a tuple (hashable), None when absent or null.

        `length` is the number of items it must have; each is one of `choices`, if any are given.
        """
        value = self._optional(key, into)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise self._wrong(key, "a list", value)
        if length is not None and len(value) != length:
            whose = " (num_hidden_layers)" if length == self.raw.get("num_hidden_layers") else ""
            raise ConfigError(
                f"{self._place(key)}: expected {length} items in {key!r}{whose}, found {len(value)}{self._for()}; "
                "correct the config"
            )
        allowed = tuple(choices)
        for i, item in enumerate(value if allowed else ()):
            if item not in allowed:
                raise ConfigError(
                    f"{self._place(key)}: expected {key}[{i}] to be {' or '.join(map(str, allowed))}, found "
                    f"{shown(item)}{self._for()}; correct the config"
                )
        return tuple(value)

    # -- facts with more than one spelling ----------------------------------------------------------------------

    def head_dim(self) -> _Int:
        """Explicit `head_dim` wins; else hidden_size / num_attention_heads, which must divide."""
        if self._present("head_dim") or self.defaults.get("head_dim") is not None:
            return self.int("head_dim")
        hidden, heads = self.int("hidden_size"), self.int("num_attention_heads")
        if hidden % heads:
            raise ConfigError(
                f"{self._place('hidden_size')}: expected hidden_size {hidden} to be a multiple of num_attention_heads "
                f"{heads} or an explicit head_dim, found neither{self._for()}; add head_dim to the config"
            )
        self.note("head_dim", "derived: hidden_size / num_attention_heads")
        return hidden // heads

    def dtype(self) -> _Str:
        """Declared dtype, canonical; both spellings, either level. "float32" where nothing declares one."""
        key = self.raw.dtype_key
        other = "torch_dtype"
        if key == "dtype" and self._present(other) and self.raw.format != "gguf":
            mine, its = canonical_dtype(self.raw[key]), canonical_dtype(self.raw[other])
            if mine != its:
                raise self._contradiction(key, self.raw[key], other, self.raw[other])
        if key is None:
            self.note("dtype", "default: nothing declares one")
            return "float32"
        word = canonical_dtype(self.raw[key])
        if word is None:
            raise self._wrong(key, "float32, bfloat16 or float16", self.raw[key])
        self.note("dtype", self.raw.source(key) if self.raw.source(key) != "config.json" else f"config.json: {key}")
        return word

    def model_type(self) -> _Str:
        """`model_type`, or the architecture name of a GGUF file."""
        if self.raw.model_type is None and self.raw.gguf_architecture is not None:
            self.note("model_type", "gguf: general.architecture")
            return self.raw.gguf_architecture
        return self.str("model_type")

    def reject_quantized(self) -> None:
        """See `RawConfig.reject_quantized`; `finish` calls it as well, so that no family can forget it."""
        self.raw.reject_quantized()

    def rope(
        self,
        *,
        layer_type: _Str | None = None,
        theta_key: _Str = "rope_theta",
        scaled: _Bool = True,
        kinds: Iterable[_Str] = (),
        allow: Iterable[_Str] = (),
        into: _Str = "rope",
    ) -> RopeParameters:
        """The rotary embedding, whichever way the checkpoint spells it.

        Spellings: `rope_theta` beside `rope_scaling` (type key `type` or `rope_type`), or everything inside
        `rope_parameters`, which may nest one block per layer type. A file that was migrated by half is merged: a number
        is the block's, else the one beside it, else the family's default. Where both are there they must agree.

        - `layer_type`: which block to take when they are nested ("full_attention", ...). In the flat spelling the
          family says with `theta_key` where this layer type's base is, and with `scaled=False` that the scaling block
          is not for it.
        - `kinds`: behaviours the family implements; () for all. Another one is refused by name.
        - `allow`: unknown keys of the block that the family reads itself, from `RopeParameters.extra`. Any other
          unknown key is refused, because ignoring one means running the wrong arithmetic.

        Raises ConfigError for an unknown type (listing the known ones), a missing base with no family default, a
        missing or impossible number.
        """
        block, place = self._rope_block(layer_type, theta_key, scaled)
        word = self._rope_word(block, place)
        kind = rope_behaviour(word) if isinstance(word, str) else None
        if kind is None:
            raise ConfigError(
                f"{place}: unknown RoPE type {shown(word)}: expected one of {', '.join(known_rope_types())}"
                f"{self._for()}; a newer release may know it"
            )
        allowed = tuple(kinds)
        if allowed and kind not in allowed:
            raise ConfigError(
                f"{place}: RoPE type {shown(word)}{f' ({kind})' * (word != kind)} is not implemented{self._for()}: "
                f"expected one of {', '.join(allowed)} under rope_parameters or rope_scaling; use a checkpoint that "
                "has it"
            )
        wanted = frozenset(allow)
        unknown = sorted(str(k) for k in block if k not in _ROPE_KNOWN and k not in wanted and block[k] is not None)
        if unknown:
            raise ConfigError(
                f"{place}: unknown RoPE key {', '.join(map(shown, unknown[:5]))}{self._for()}: expected only keys "
                f"whose effect is known ({', '.join(sorted(_ROPE_KNOWN))}); a newer release may know it"
            )

        theta, theta_place = self._rope_theta(block, place, theta_key)
        if kind == "yarn" and theta == 1.0:
            raise ConfigError(
                f"{theta_place}: expected rope_theta to differ from 1 where the RoPE type is {shown(word)} (every pair "
                f"would turn alike){self._for()}; correct the config"
            )
        numbers: dict[_Str, Any] = {
            key: self._rope_number(f"{place}: {key}", block[key], signed=key.startswith("mscale"))
            for key in _ROPE_FLOATS
            if block.get(key) is not None
        }
        lists: dict[_Str, Any] = {
            key: tuple(self._rope_number(f"{place}: {key}", item) for item in self._as_list(place, key, block[key]))
            for key in _ROPE_LISTS
            if block.get(key) is not None
        }
        truncate = block.get("truncate")
        if truncate is not None and not isinstance(truncate, bool):
            raise self._wrong(f"{place}: truncate", "true or false", truncate)
        original = self._rope_original(block, kind, place)
        if kind == "longrope" and "factor" not in numbers and original is not None:
            numbers["factor"] = self.int("max_position_embeddings") / original
        explicit = "frequency_divisors" in lists
        if kind == "default" and not explicit:
            # A default rotation ignores every number but the base, so two configs that differ there are one spec.
            numbers, lists, truncate = {}, {}, None
        present = {*numbers, *lists} | ({"original_max_position_embeddings"} if original is not None else set())
        missing = [k for k in _ROPE_NEEDS[kind] if k not in present]
        if missing and not explicit:
            raise ConfigError(
                f"{place}: RoPE type {shown(word)} needs {', '.join(missing)}, found "
                f"{listed(sorted(block), 12) or 'nothing'}{self._for()}; complete the config"
            )
        if kind == "banded" and not explicit and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
            raise ConfigError(
                f"{place}: expected low_freq_factor below high_freq_factor, found {numbers['low_freq_factor']} and "
                f"{numbers['high_freq_factor']}{self._for()}; correct the config"
            )
        rope = RopeParameters(
            kind=kind,
            theta=theta,
            partial_rotary_factor=self._rope_share(block, place),
            original_max_position_embeddings=original,
            truncate=truncate,
            extra=tuple(
                (k, self._number(f"{place}: {k}", block[k], None)) for k in sorted(wanted) if block.get(k) is not None
            ),
            **numbers,
            **lists,
        )
        self._check_rope_width(rope, place)
        self._check_rope_lists(rope, place)
        self.note(into, theta_place if theta_place == place else f"{theta_place}; {place}")
        return rope

    # -- the whole spec -----------------------------------------------------------------------------------------

    def common(self) -> dict[_Str, Any]:
        """Values of the `DecoderConfig` fields every decoder has, save `rope`, `hidden_act` and the norm's epsilon.

        Refuses a quantised checkpoint first: nothing else about it is worth reporting.
        """
        self.reject_quantized()
        return {
            "model_type": self.model_type(),
            "vocab_size": self._width("vocab_size"),
            "hidden_size": self._width("hidden_size"),
            "intermediate_size": self._width("intermediate_size"),
            "num_hidden_layers": self._layers(),
            "num_attention_heads": self._width("num_attention_heads"),
            "num_key_value_heads": self._key_value_heads(),
            "head_dim": self._head_width(),
            "max_position_embeddings": self.int("max_position_embeddings"),
            "tie_word_embeddings": self.bool("tie_word_embeddings", False),
            "dtype": self.dtype(),
        }

    def note(self, name: _Str, source: _Str) -> None:
        """Record where the value of a spec field came from, for values a family works out itself."""
        self._sources[name] = source

    def finish(self, spec: type[_Spec], **values: Any) -> _Spec:
        """Build the frozen spec with `sources` filled. Refuses a quantised checkpoint."""
        self.reject_quantized()
        names = [f.name for f in fields(spec) if f.name != "sources"]
        sources = {name: self._sources.get(name, "family" if name in values else "default") for name in names}
        return spec(**values, sources=MappingProxyType(sources))

    # -- internals ----------------------------------------------------------------------------------------------

    def _present(self, key: _Str) -> _Bool:
        return self.raw.get(key) is not None

    def _for(self) -> _Str:
        return f" for family {self.family!r}" if self.family else ""

    def _place(self, key: _Str) -> _Str:
        return self.raw.source(key) if key in self.raw else ("gguf" if self.raw.format == "gguf" else "config.json")

    def _source_of(self, key: _Str) -> _Str:
        return self.raw.source(key)

    def _lookup(self, key: _Str, default: Any, why: _Str, into: _Str | None) -> Any:
        if self._present(key):
            self.note(into or key, self._source_of(key))
            return self.raw[key]
        if self.defaults.get(key) is not None:
            self.note(into or key, "family default")
            return self.defaults[key]
        if default is not REQUIRED:
            self.note(into or key, why)
            return default
        found = "null" if key in self.raw else "nothing"
        raise ConfigError(
            f"{self._place(key)}: expected a value for {key!r}{self._for()}, found {found}; "
            "add it or check that the file is complete"
        )

    def _optional(self, key: _Str, into: _Str | None) -> Any:
        if key in self.raw:
            self.note(into or key, self._source_of(key))
            return self.raw[key]
        self.note(into or key, "family default" if key in self.defaults else "not given")
        return self.defaults.get(key)

    def _wrong(self, key: _Str, expected: _Str, value: Any) -> ConfigError:
        place = "" if ": " in key else f"{self._place(key)}: "
        return ConfigError(
            f"{place}expected {key!r} to be {expected}, found {shown(value)}{self._for()}; correct the config"
        )

    def _contradiction(self, key: _Str, value: Any, other: _Str, its: Any) -> ConfigError:
        # Another place than the first one's: a key that was read under another name, another level, a derived value.
        source = self.raw.source(other)
        origin = "" if source in (self.raw.source(key.split(".")[0]), "not given") else f" ({source})"
        return ConfigError(
            f"{self._place(key.split('.')[0])}: expected {key} and {other}{origin} to agree, found {shown(value)} "
            f"and {shown(its)}{self._for()}; remove the one that is not meant"
        )

    def _integer(self, key: _Str, value: Any, minimum: _Int | None) -> _Int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer", value)
        if minimum is not None and value < minimum:
            raise self._wrong(key, f"an integer of at least {minimum}", value)
        if value >= 1 << 62:
            raise self._wrong(key, "an integer below 2^62", value)
        return value

    def _width(self, key: _Str) -> _Int:
        return self.int(key, maximum=_MOST_WIDTH)

    def _head_width(self) -> _Int:
        width, heads = self.head_dim(), self.int("num_attention_heads")
        if width * heads > _MOST_WIDTH:
            raise ConfigError(
                f"{self._place('head_dim')}: expected num_attention_heads times head_dim to be at most {_MOST_WIDTH}, "
                f"found {heads} times {width}{self._for()}; correct the config"
            )
        return width

    def _layers(self) -> _Int:
        # Bounded here, because families make lists of this length before anything is compared with the weights.
        return self.int("num_hidden_layers", maximum=MOST_LAYERS)

    def _number(self, key: _Str, value: Any, above: _Float | None) -> _Float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, "a number", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or (above is not None and number <= above):
            raise self._wrong(key, "a finite number" if above is None else f"a finite number above {above:g}", value)
        return number

    def _as_list(self, place: _Str, key: _Str, value: Any) -> Iterable[Any]:
        if not isinstance(value, (list, tuple)):
            raise self._wrong(f"{place}: {key}", "a list of numbers", value)
        return value

    def _key_value_heads(self) -> _Int:
        heads = self.int("num_attention_heads")
        groups = self.int("num_key_value_heads", heads, why="derived: num_attention_heads")
        if heads % groups:
            raise ConfigError(
                f"{self._place('num_key_value_heads')}: expected num_attention_heads {heads} to be a multiple of "
                f"num_key_value_heads, found {groups}{self._for()}; correct the config"
            )
        return groups

    def _rope_word(self, block: Mapping[_Str, Any], place: _Str) -> Any:
        """The block's type under either key. Writers of the change between them store both, which must then agree."""
        new, old = block.get("rope_type"), block.get("type")
        if new is None or old is None:
            word = old if new is None else new
            return "default" if word is None else word
        behaviours = [rope_behaviour(word) if isinstance(word, str) else None for word in (new, old)]
        if new != old and (behaviours[0] != behaviours[1] or None in behaviours):
            raise ConfigError(
                f"{place}: expected rope_type and type to agree, found {shown(new)} and {shown(old)}{self._for()}; "
                "remove the one that is not meant"
            )
        return new

    def _rope_block(self, layer_type: _Str | None, theta_key: _Str, scaled: _Bool) -> tuple[Mapping[_Str, Any], _Str]:
        blocks: dict[_Str, Mapping[_Str, Any]] = {}
        for key in ("rope_scaling", "rope_parameters"):
            block = self.raw.get(key)
            if block is not None and not isinstance(block, Mapping):
                raise self._wrong(key, "an object", block)
            if block:
                blocks[key] = block
        if not blocks:
            return {}, self._place("rope_theta")
        key, block = next(iter(blocks.items()))
        place = f"{self.raw.source(key)}: {key}"
        nested = {k: v for k, v in block.items() if isinstance(v, Mapping)}
        if len(blocks) == 2:
            newer = blocks["rope_parameters"]
            if nested or any(isinstance(v, Mapping) for v in newer.values()):
                raise ConfigError(
                    f"{place}: expected one of rope_scaling and rope_parameters, found both, one of them per layer type"
                    f"{self._for()}; remove the one that is not meant"
                )
            # An older key added to a newer file is an edit by hand: its scaling counts, and what it leaves out is as
            # the newer key has it. Two scalings are not an edit but a contradiction.
            self._check_rope_blocks_agree(block, newer)
            block = {**{k: newer[k] for k in ("rope_theta", "partial_rotary_factor") if k in newer}, **block}
        if nested:
            if layer_type is None and len({repr(sorted(v.items())) for v in nested.values()}) == 1:
                layer_type = next(iter(nested))
            if layer_type not in nested:
                raise ConfigError(
                    f"{place}: expected one RoPE block{f' for layer type {layer_type!r}' if layer_type else ''}, found "
                    f"one per layer type ({', '.join(sorted(nested))}){self._for()}; the family must say which layers "
                    "use which"
                )
            return nested[layer_type], f"{place}: {layer_type}"
        if not scaled:
            own = ("rope_theta", "partial_rotary_factor") if theta_key == "rope_theta" else ()
            return {k: block[k] for k in own if k in block}, place
        return block, place

    def _check_rope_blocks_agree(self, older: Mapping[_Str, Any], newer: Mapping[_Str, Any]) -> None:
        words = [self._rope_word(block, key) for key, block in (("rope_scaling", older), ("rope_parameters", newer))]
        kinds = [rope_behaviour(word) if isinstance(word, str) else None for word in words]
        shared = [
            k for k in older if older[k] is not None and newer.get(k) is not None and k not in ("type", "rope_type")
        ]
        if kinds[1] == "default":
            shared = [k for k in shared if k in ("rope_theta", "partial_rotary_factor")]
        elif kinds[0] != kinds[1]:
            raise self._contradiction("rope_scaling.rope_type", words[0], "rope_parameters.rope_type", words[1])
        for key in shared:
            if older[key] != newer[key]:
                raise self._contradiction(f"rope_scaling.{key}", older[key], f"rope_parameters.{key}", newer[key])

    def _rope_flat(self, block: Mapping[_Str, Any], key: _Str, flat: _Str) -> None:
        """Refuse a number that stands in the block and beside it with two values: half of a file was edited."""
        if not self._present(flat) or block.get(key) is None or block is not self.raw.get("rope_parameters"):
            return
        if self.raw[flat] != block[key]:
            raise self._contradiction(f"rope_parameters.{key}", block[key], flat, self.raw[flat])

    def _rope_theta(self, block: Mapping[_Str, Any], place: _Str, key: _Str) -> tuple[_Float, _Str]:
        if block.get("rope_theta") is not None:
            self._rope_flat(block, "rope_theta", key)
            return self._rope_number(f"{place}: rope_theta", block["rope_theta"], most=_MOST_BASE), place
        if not self._present(key) and self.defaults.get(key) is None:
            raise ConfigError(
                f"{place}: expected {key!r} (beside rope_scaling, or inside rope_parameters){self._for()}, found "
                "nothing; add it: a guessed base gives fluent nonsense on long text"
            )
        source = self.raw.source(key) if self._present(key) else "family default"
        value: Any = self.raw[key] if self._present(key) else self.defaults[key]
        return self._rope_number(key, value, most=_MOST_BASE), source

    def _rope_number(self, key: _Str, value: Any, *, signed: _Bool = False, most: _Float = _MOST_SCALE) -> _Float:
        # Finite is not enough: a factor of 1e-300 or a base of 1e300 gives frequencies that are not.
        number = self._number(key, value, None if signed else 0.0)
        if abs(number) > most or (not signed and number < 1 / _MOST_SCALE):
            least = "" if signed else f" of at least {1 / _MOST_SCALE:g} and"
            raise self._wrong(key, f"a number{least} at most {most:g}", value)
        return number

    def _rope_original(self, block: Mapping[_Str, Any], kind: _Str, place: _Str) -> _Int | None:
        key = "original_max_position_embeddings"
        if kind in ("default", "linear"):
            return None
        if block.get(key) is not None:
            self._rope_flat(block, key, key)
            return self._integer(f"{place}: {key}", block[key], 1)
        if self._present(key):
            return self._integer(key, self.raw[key], 1)
        # The published formulas of these two fall back to the model's own limit.
        if kind in ("yarn", "dynamic") and self._present("max_position_embeddings"):
            return self._integer("max_position_embeddings", self.raw["max_position_embeddings"], 1)
        return None

    def _rope_share(self, block: Mapping[_Str, Any], place: _Str) -> _Float:
        key = "partial_rotary_factor"
        value, where = block.get(key), f"{place}: {key}"
        self._rope_flat(block, key, key)
        if value is None:
            value, where = self.raw.get(key) if self._present(key) else self.defaults.get(key, 1.0), key
        share = self._number(where, value, 0.0)
        if share > 1.0:
            raise self._wrong(where, "at most 1", value)
        return share

    def _check_rope_width(self, rope: RopeParameters, place: _Str) -> None:
        # Without a head width there is nothing to compare with, and `common` reports that.
        explicit = self._present("head_dim") or self.defaults.get("head_dim") is not None
        if not explicit and not (self._present("hidden_size") and self._present("num_attention_heads")):
            return
        width = rope.rotary_width(self.head_dim())
        if width < 2 or width % 2:
            raise ConfigError(
                f"{place}: expected an even number of rotated dimensions, at least 2, found {width} (head_dim "
                f"{self.head_dim()} times partial_rotary_factor {rope.partial_rotary_factor:g}){self._for()}; correct "
                "the config"
            )

    def _check_rope_lists(self, rope: RopeParameters, place: _Str) -> None:
        if not (rope.short_factor or rope.long_factor or rope.frequency_divisors):
            return
        width = rope.rotary_width(self.head_dim())
        for name in _ROPE_LISTS:
            items = getattr(rope, name)
            if items is not None and len(items) != width // 2:
                raise ConfigError(
                    f"{place}: expected {width // 2} numbers in {name!r} (half of the {width} rotated dimensions), "
                    f"found {len(items)}{self._for()}; check partial_rotary_factor and head_dim"
                )

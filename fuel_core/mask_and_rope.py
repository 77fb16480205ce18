"""Which keys a query sees and by which angles it turns: the plans of a model, and the bytes of one step.

Works on numbers alone (numpy): it never sees a tensor, a cache or a config file, and names no family.

Variation in data needs a variant axis: two window widths or two frequency tables are two variants, stacked and chosen
per layer. Variation in whether to apply something needs none: a layer without RoPE simply does not read the tables.
What is baked into a held step is the number of variants, who uses which, whether a variant has a window at all and how
wide its rotation is. Window widths, frequencies and scales are bound: they arrive with every token and may change
without a rebuild. So do frequencies that depend on how long the sequence is.

There is one function for mask bytes and one for RoPE bytes, used when a step is built and when it is rebound; two
formulas could drift apart and nothing would show it until the second token of a windowed model.

Shape letters: V variants, T tokens of this step, S cache slots, R rotated width.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from fuel_core.decode_shape import Component, ShapeKeyHasher, mix_component
from fuel_core.errors import CapacityError, ConfigError, DecodeError

__all__ = [
    "MaskPlan",
    "RopePlan",
    "RopeVariant",
    "build_decode_mask_variants",
    "build_rope_tables",
]

_F32: TypeAlias = npt.NDArray[np.float32]
_F64: TypeAlias = npt.NDArray[np.float64]


# ---------------------------------------------------------------------------------------------------------------------
# Checks shared by both plans


def _count(value: object, what: str, minimum: int) -> int:
    """Return an integer of at least `minimum` as a plain int; a bool is a flag, not a count."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ConfigError(f"{what} must be an integer, got {value!r}; give one")
    if value < minimum:
        raise ConfigError(f"{what} must be at least {minimum}, got {value}; correct it")
    return int(value)


def _positive(value: object, what: str) -> float:
    """Return a finite number above zero as a float."""
    number = _finite(value, what)
    if number <= 0.0:
        raise ConfigError(f"{what} must be above 0, got {value!r}; correct it")
    return number


def _finite(value: object, what: str) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ConfigError(f"{what} must be a number, got {value!r}; give one")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{what} must be finite, got {value!r}; correct it")
    return number


def _assignment(per_layer: Sequence[int], n_variants: int, plan: str) -> tuple[int, ...]:
    """Check the variant index of every layer; a wrong one would otherwise be a layer masked or turned wrongly."""
    checked = []
    for layer, variant in enumerate(per_layer):
        index = _count(variant, f"{plan}: the variant of layer {layer}", 0)
        if index >= n_variants:
            raise ConfigError(
                f"{plan}: layer {layer} selects variant {index}, but the plan defines {n_variants} "
                f"(0..{n_variants - 1}); add the variant or correct per_layer"
            )
        checked.append(index)
    return tuple(checked)


def _layer_index(layer_idx: int, n_layers: int, plan: str) -> int:
    # A negative index would quietly answer for another layer.
    if not 0 <= layer_idx < n_layers:
        raise ConfigError(f"{plan}: no layer {layer_idx}, the plan covers {n_layers} layers; name one from 0")
    return layer_idx


def _step_range(start: int, seq: int) -> None:
    if start < 0 or seq < 1:
        raise DecodeError(
            f"a step has at least one token at a position of 0 or above, got {seq} from position {start}; give it one"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Masks


@dataclass(frozen=True, init=False)
class MaskPlan:
    """Which causal mask each layer attends under.

    Args:
        windows: one entry per variant: None attends to the whole prefix, an int W >= 1 to the W most recent positions,
            the current one included.
        per_layer: for each layer, the index of its variant.

    Raises ConfigError for no variants, a width below 1, an index that names no variant, and bools in either place.
    """

    windows: tuple[int | None, ...]
    per_layer: tuple[int, ...]

    def __init__(self, windows: Sequence[int | None], per_layer: Sequence[int]) -> None:
        if len(windows) == 0:
            raise ConfigError("MaskPlan: windows is empty, a plan has at least one variant; pass [None] for dense")
        checked = tuple(
            None if window is None else _count(window, f"MaskPlan: the window of variant {variant}", 1)
            for variant, window in enumerate(windows)
        )
        object.__setattr__(self, "windows", checked)
        object.__setattr__(self, "per_layer", _assignment(per_layer, len(checked), "MaskPlan"))

    @classmethod
    def dense(cls, n_layers: int) -> Self:
        """Return the plan in which every layer attends to the whole prefix."""
        return cls([None], [0] * _count(n_layers, "MaskPlan: n_layers", 0))

    @classmethod
    def split_window(cls, n_layers: int, split: int, window: int) -> Self:
        """Window the first `split` layers and leave the rest dense.

        A split of 0 is `dense`, one of `n_layers` or more a single windowed variant; anything between has two variants,
        windowed first. A model that windows the last layers instead uses `per_layer_window`.
        """
        first_dense = _count(split, "MaskPlan: split", 0)
        if first_dense == 0:
            _count(window, "MaskPlan: window", 1)
            return cls.dense(n_layers)
        if first_dense >= _count(n_layers, "MaskPlan: n_layers", 0):
            return cls([window], [0] * n_layers)
        return cls([window, None], [0 if layer < first_dense else 1 for layer in range(n_layers)])

    @classmethod
    def per_layer_window(cls, n_layers: int, window: int, uses_window: Callable[[int], bool]) -> Self:
        """Window the layers for which `uses_window(layer_idx)` holds.

        One variant when all layers agree; two, windowed first, when they differ. With no layers at all there is nothing
        to agree on and both stay.
        """
        windowed = [bool(uses_window(layer)) for layer in range(_count(n_layers, "MaskPlan: n_layers", 0))]
        if windowed and not any(windowed):
            _count(window, "MaskPlan: window", 1)
            return cls.dense(n_layers)
        if windowed and all(windowed):
            return cls([window], [0] * n_layers)
        return cls([window, None], [0 if uses else 1 for uses in windowed])

    @property
    def n_variants(self) -> int:
        """Number of distinct masks, the leading extent of the mask array."""
        return len(self.windows)

    @property
    def n_layers(self) -> int:
        """Number of layers that the plan assigns."""
        return len(self.per_layer)

    def variant_for_layer(self, layer_idx: int) -> int:
        """Return the index of this layer's mask on the variant axis."""
        return self.per_layer[_layer_index(layer_idx, self.n_layers, "MaskPlan")]

    def window_for_layer(self, layer_idx: int) -> int | None:
        """Return this layer's window, None for dense: the entry its mask is made from, so the two cannot disagree."""
        return self.windows[self.variant_for_layer(layer_idx)]

    def structure(self) -> Component:
        """Return what a plan bakes: variant count, assignment, and which variants have a window; never a width."""
        return (self.n_variants, self.per_layer, tuple(window is not None for window in self.windows))

    def mix_into(self, hasher: ShapeKeyHasher) -> None:
        """Mix `structure()` into a key."""
        mix_component(hasher, self.structure())

    def window_starts(self, cached_len: int) -> tuple[int, ...]:
        """Return, per variant, the first key that the first row of a step at `cached_len` sees.

        0 where the variant is dense; otherwise max(0, cached_len - window + 1), as the first row stands at position
        `cached_len`. Later rows of the same step see no earlier key.
        """
        return tuple(0 if window is None else max(0, cached_len - window + 1) for window in self.windows)


def build_decode_mask_variants(plan: MaskPlan, cached_len: int, seq: int, max_seq_len: int) -> _F32:
    """Build the additive masks of one step, float32 [V, 1, seq, max_seq_len], in the plan's variant order.

    Row q stands at position p = cached_len + q. Key k gets 0 if k <= p and, in a variant with window W, k > p - W; else
    -inf. The first condition hides both the future and the unwritten tail of the cache. A row always sees itself, so
    no row is -inf throughout.

    Raises CapacityError if the step reaches past `max_seq_len`, DecodeError for a step without tokens.
    """
    _step_range(cached_len, seq)
    if cached_len + seq > max_seq_len:
        raise CapacityError(
            f"the step needs {cached_len + seq} positions ({cached_len} cached + {seq} new), the cache has "
            f"{max_seq_len}; allocate it with a larger max_seq_len"
        )
    k_S = np.arange(max_seq_len)
    p_T1 = np.arange(cached_len, cached_len + seq)[:, None]
    # A window of the whole cache and one more hides nothing, which is what dense means.
    widths_V11 = np.array([max_seq_len + 1 if w is None else min(w, max_seq_len + 1) for w in plan.windows])
    widths_V11 = widths_V11[:, None, None]
    visible_VTS = (k_S <= p_T1) & (k_S > p_T1 - widths_V11)
    return np.where(visible_VTS, np.float32(0.0), np.float32(-np.inf))[:, None]


# ---------------------------------------------------------------------------------------------------------------------
# RoPE


@dataclass(frozen=True)
class LongerList:
    """Beyond `original` positions the whole sequence turns by these frequencies instead."""

    original: int
    inv_freq: tuple[float, ...]

    def regime(self, length: int) -> int:
        """Which frequencies a sequence of `length` positions turns by: equal numbers, equal frequencies."""
        return int(length > self.original)

    def at(self, regime: int, short: tuple[float, ...]) -> tuple[float, ...]:
        """The frequencies of a regime; `short` are those up to `original`."""
        return self.inv_freq if regime else short


@dataclass(frozen=True)
class StretchedBase:
    """Beyond `original` positions the base grows with the length: every length has frequencies of its own."""

    original: int
    theta: float
    factor: float

    def regime(self, length: int) -> int:
        """The length itself beyond `original`, else 0."""
        return length if length > self.original else 0

    def at(self, regime: int, short: tuple[float, ...]) -> tuple[float, ...]:
        """The frequencies of a regime; the base is theta * (factor * n / original - (factor - 1)) ** (R / (R - 2))."""
        if not regime:
            return short
        width = 2 * len(short)
        grown = self.factor * regime / self.original - (self.factor - 1.0)
        return tuple(_base_frequencies(width, self.theta * grown ** (width / (width - 2))).tolist())


@dataclass(frozen=True, init=False)
class RopeVariant:
    """One set of rotation frequencies.

    Args:
        inv_freq: R/2 angles per position in radians, one per rotated pair; float64, finite, not negative.
        scale: factor on cos and sin alike (attention scaling of long-context methods); finite and above 0.
        longer: what sequences beyond an original length turn by instead, None where the length does not matter. One
            sequence turns by one set of frequencies: its rows are computed again when it comes to turn by another.

    Raises ConfigError otherwise. Widths R are in features of one head and count only those that turn.
    """

    inv_freq: tuple[float, ...]
    scale: float
    longer: LongerList | StretchedBase | None

    def __init__(
        self, inv_freq: Sequence[float], scale: float = 1.0, longer: LongerList | StretchedBase | None = None
    ) -> None:
        checked = _frequencies(inv_freq, "inv_freq")
        object.__setattr__(self, "inv_freq", checked)
        object.__setattr__(self, "scale", _positive(scale, "RoPE: scale"))
        if isinstance(longer, LongerList):
            second = _frequencies(longer.inv_freq, "longer.inv_freq")
            if len(second) != len(checked):
                raise ConfigError(
                    f"RoPE: longer.inv_freq must have {len(checked)} frequencies, as inv_freq has, got {len(second)}; "
                    "give one for each pair"
                )
        object.__setattr__(self, "longer", longer)

    def regime(self, length: int) -> int:
        """Which frequencies a sequence of `length` positions turns by; 0 are `inv_freq`."""
        return 0 if self.longer is None else self.longer.regime(length)

    def frequencies(self, regime: int) -> tuple[float, ...]:
        """The frequencies of a regime."""
        return self.inv_freq if self.longer is None else self.longer.at(regime, self.inv_freq)

    @property
    def width(self) -> int:
        """Number of features that turn, twice the number of frequencies."""
        return 2 * len(self.inv_freq)

    @classmethod
    def default(cls, width: int, theta: float) -> Self:
        """Return the unscaled frequencies theta ** (-2i / width), i < width/2 (RoFormer, arXiv:2104.09864)."""
        return cls(_base_frequencies(width, theta).tolist())

    @classmethod
    def linear(cls, width: int, theta: float, factor: float) -> Self:
        """Return the frequencies divided by `factor`, which is the position divided by it (arXiv:2306.15595)."""
        divisor = _positive(factor, "RoPE: factor")
        return cls((_base_frequencies(width, theta) / divisor).tolist())

    @classmethod
    def divided(cls, width: int, theta: float, divisors: Sequence[float]) -> Self:
        """Return the frequencies divided one by one: `divisors` holds width/2 numbers, as a GGUF `rope_freqs` does."""
        return cls(_divide(_base_frequencies(width, theta), divisors).tolist())

    @classmethod
    def banded(
        cls,
        width: int,
        theta: float,
        *,
        factor: float,
        low_freq_factor: float,
        high_freq_factor: float,
        original_max_position_embeddings: float,
    ) -> Self:
        """Return frequencies scaled by how often they turn within the original context.

        With n = original_max_position_embeddings * f / 2 pi turns, a frequency f is kept if n > high_freq_factor,
        divided by `factor` if n < low_freq_factor, and in between mixed linearly in n. Formula as in transformers'
        `modeling_rope_utils`.
        """
        divisor = _positive(factor, "RoPE: factor")
        low = _positive(low_freq_factor, "RoPE: low_freq_factor")
        high = _positive(high_freq_factor, "RoPE: high_freq_factor")
        original = _positive(original_max_position_embeddings, "RoPE: original_max_position_embeddings")
        if low >= high:
            raise ConfigError(f"RoPE: low_freq_factor must be below high_freq_factor, got {low} and {high}; swap them")
        inv_freq = _base_frequencies(width, theta)
        turns = original * inv_freq / (2.0 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return cls((kept * inv_freq + (1.0 - kept) * inv_freq / divisor).tolist())

    @classmethod
    def yarn(
        cls,
        width: int,
        theta: float,
        *,
        factor: float,
        original_max_position_embeddings: float,
        beta_fast: float = 32,
        beta_slow: float = 1,
        attention_factor: float | None = None,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        truncate: bool = True,
    ) -> Self:
        """Return frequencies blended over the pair index, with a scale on cos and sin (YaRN, arXiv:2309.00071).

        Pairs that turn more than `beta_fast` times within the original context keep their frequency, those that turn
        fewer than `beta_slow` times are divided by `factor`, with a linear ramp between; `truncate` rounds the ramp's
        ends outwards to whole pairs. `attention_factor` replaces the scale; without it the scale is
        m(mscale) / m(mscale_all_dim) if both are given, else m(1), where m(s) = 0.1 * s * ln(factor) + 1 and 1 for a
        factor of at most 1. Formulas as in transformers' `modeling_rope_utils`.
        """
        divisor = _positive(factor, "RoPE: factor")
        original = _positive(original_max_position_embeddings, "RoPE: original_max_position_embeddings")
        fast = _positive(beta_fast, "RoPE: beta_fast")
        slow = _positive(beta_slow, "RoPE: beta_slow")
        inv_freq = _base_frequencies(width, theta)
        if theta == 1:
            raise ConfigError("RoPE: theta 1 gives every pair one frequency, so YaRN has no bands; theta must differ")

        def pair_turning(turns: float) -> float:
            """Return the (fractional) pair index that turns this often within the original context."""
            return width * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

        first, last = pair_turning(fast), pair_turning(slow)
        if truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        if first == last:
            last += 0.001  # the published guard against a ramp of length zero
        divided = np.clip((np.arange(width // 2) - first) / (last - first), 0.0, 1.0)

        def magnitude(slope: float) -> float:
            return 1.0 if divisor <= 1.0 else 0.1 * slope * math.log(divisor) + 1.0

        if attention_factor is not None:
            scale = _positive(attention_factor, "RoPE: attention_factor")
        elif mscale and mscale_all_dim:
            scale = magnitude(_finite(mscale, "RoPE: mscale")) / magnitude(
                _finite(mscale_all_dim, "RoPE: mscale_all_dim")
            )
        else:
            scale = magnitude(1.0)
        return cls((inv_freq / divisor * divided + inv_freq * (1.0 - divided)).tolist(), scale)

    @classmethod
    def longrope(
        cls,
        width: int,
        theta: float,
        *,
        short_factor: Sequence[float],
        long_factor: Sequence[float],
        factor: float,
        original_max_position_embeddings: float,
        attention_factor: float | None = None,
    ) -> Self:
        """Return frequencies divided by one of two lists: the short one up to the original length, else the long one.

        Each list has width/2 numbers (LongRoPE, arXiv:2402.13753). Both come with one scale on cos and sin:
        `attention_factor` where it is given, else sqrt(1 + ln(factor) / ln(original)), and 1 for a factor of at most
        1; `factor` is the whole length divided by the original one. Formulas as in transformers'
        `modeling_rope_utils`.
        """
        original = _count(original_max_position_embeddings, "RoPE: original_max_position_embeddings", 1)
        ratio = _positive(factor, "RoPE: factor")
        inv_freq = _base_frequencies(width, theta)
        short = _divide(inv_freq, short_factor, "short_factor").tolist()
        long = _divide(inv_freq, long_factor, "long_factor").tolist()
        if attention_factor is not None:
            scale = _positive(attention_factor, "RoPE: attention_factor")
        elif ratio <= 1.0:
            scale = 1.0
        elif original == 1:
            raise ConfigError("RoPE: original_max_position_embeddings 1 has no logarithm to divide by; give more")
        else:
            scale = math.sqrt(1.0 + math.log(ratio) / math.log(original))
        return cls(short, scale, LongerList(original, tuple(long)))

    @classmethod
    def dynamic(cls, width: int, theta: float, *, factor: float, original_max_position_embeddings: float) -> Self:
        """Return the frequencies of theta up to the original length; beyond it the base grows with the length.

        The base for n positions is theta * (factor * n / original - (factor - 1)) ** (width / (width - 2)), as in
        transformers' `modeling_rope_utils`.
        """
        original = _count(original_max_position_embeddings, "RoPE: original_max_position_embeddings", 1)
        ratio = _positive(factor, "RoPE: factor")
        inv_freq = _base_frequencies(width, theta).tolist()
        if width == 2:
            raise ConfigError("RoPE: a growing base needs a width of 4 or more, got 2; use another kind")
        if ratio < 1.0:
            raise ConfigError(f"RoPE: factor must be at least 1 for a base that grows, got {ratio}; correct it")
        return cls(inv_freq, 1.0, StretchedBase(original, float(theta), ratio))

    @classmethod
    def from_parameters(cls, width: int, params: object) -> Self:
        """Make the variant that resolved checkpoint parameters describe.

        Args:
            width: features that turn.
            params: anything with a `kind` ("banded", "default", "dynamic", "linear", "longrope" or "yarn"), a `theta`,
                and whichever of the other arguments of that kind's constructor it has; a missing attribute and None
                are the same.
                `frequency_divisors`, if given, divide the frequencies of the kinds "default" and "linear".

        Raises ConfigError for any other kind, and for a parameter that the kind needs and `params` lacks.
        """
        kind = getattr(params, "kind", None)
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ConfigError(f"RoPE kind {kind!r} is not implemented; use one of {', '.join(sorted(_KINDS))}")
        divisors = getattr(params, "frequency_divisors", None)
        if divisors is not None and kind not in ("default", "linear"):
            raise ConfigError(
                f"RoPE kind {kind!r} computes its own frequencies and takes no frequency_divisors; leave them out"
            )
        made = _KINDS[kind](_Parameters(kind, params), width)
        if divisors is None:
            return cls(made.inv_freq, made.scale, made.longer)
        return cls(_divide(np.array(made.inv_freq), divisors).tolist(), made.scale)


class _Parameters:
    """Attribute access that names the kind and the parameter when one is missing."""

    def __init__(self, kind: str, source: object) -> None:
        self._kind = kind
        self._source = source

    def need(self, name: str) -> float:
        value: float = self._need(name)
        return value

    def need_list(self, name: str) -> Sequence[float]:
        value: Sequence[float] = self._need(name)
        return value

    def _need(self, name: str) -> Any:
        value = getattr(self._source, name, None)
        if value is None:
            raise ConfigError(
                f"RoPE kind {self._kind!r} needs {name}, which the checkpoint's config does not give; add it"
            )
        return value

    def given(self, *names: str) -> dict[str, float]:
        found = {name: getattr(self._source, name, None) for name in names}
        return {name: value for name, value in found.items() if value is not None}


def _make_default(params: _Parameters, width: int) -> RopeVariant:
    return RopeVariant.default(width, params.need("theta"))


def _make_linear(params: _Parameters, width: int) -> RopeVariant:
    return RopeVariant.linear(width, params.need("theta"), params.need("factor"))


def _make_banded(params: _Parameters, width: int) -> RopeVariant:
    return RopeVariant.banded(
        width,
        params.need("theta"),
        factor=params.need("factor"),
        low_freq_factor=params.need("low_freq_factor"),
        high_freq_factor=params.need("high_freq_factor"),
        original_max_position_embeddings=params.need("original_max_position_embeddings"),
    )


def _make_yarn(params: _Parameters, width: int) -> RopeVariant:
    optional = params.given("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    return RopeVariant.yarn(
        width,
        params.need("theta"),
        factor=params.need("factor"),
        original_max_position_embeddings=params.need("original_max_position_embeddings"),
        truncate=bool(params.given("truncate").get("truncate", True)),
        **optional,
    )


def _make_dynamic(params: _Parameters, width: int) -> RopeVariant:
    return RopeVariant.dynamic(
        width,
        params.need("theta"),
        factor=params.need("factor"),
        original_max_position_embeddings=params.need("original_max_position_embeddings"),
    )


def _make_longrope(params: _Parameters, width: int) -> RopeVariant:
    return RopeVariant.longrope(
        width,
        params.need("theta"),
        short_factor=params.need_list("short_factor"),
        long_factor=params.need_list("long_factor"),
        factor=params.need("factor"),
        original_max_position_embeddings=params.need("original_max_position_embeddings"),
        **params.given("attention_factor"),
    )


_KINDS: Mapping[str, Callable[[_Parameters, int], RopeVariant]] = {
    "banded": _make_banded,
    "default": _make_default,
    "dynamic": _make_dynamic,
    "linear": _make_linear,
    "longrope": _make_longrope,
    "yarn": _make_yarn,
}


def _frequencies(inv_freq: Sequence[float], what: str) -> tuple[float, ...]:
    checked = tuple(_finite(f, f"RoPE: {what}[{i}]") for i, f in enumerate(inv_freq))
    if not checked:
        raise ConfigError(f"RoPE: {what} is empty, a variant turns at least one pair of features; give one a pair")
    for i, f in enumerate(checked):
        if f < 0.0:
            raise ConfigError(f"RoPE: {what}[{i}] must not be negative, got {f!r}; 0 leaves a pair unturned")
    return checked


def _base_frequencies(width: int, theta: float) -> _F64:
    width = _count(width, "RoPE: width", 2)
    if width % 2:
        raise ConfigError(f"RoPE: width must be even, features turn in pairs, got {width}; correct it")
    base = _positive(theta, "RoPE: theta")
    frequencies: _F64 = np.power(base, -np.arange(0, width, 2, dtype=np.float64) / width)
    return frequencies


def _divide(inv_freq: _F64, divisors: Sequence[float], what: str = "frequency_divisors") -> _F64:
    if len(divisors) != len(inv_freq):
        raise ConfigError(
            f"RoPE: {what.replace('_', ' ')} must be one per rotated pair, {len(inv_freq)} for width "
            f"{2 * len(inv_freq)}, got {len(divisors)}; correct the list"
        )
    quotients: _F64 = inv_freq / np.array([_positive(d, f"RoPE: {what}[{i}]") for i, d in enumerate(divisors)])
    return quotients


@dataclass(frozen=True, init=False)
class RopePlan:
    """Which rotation each layer uses.

    Args:
        variants: at least one `RopeVariant`; their widths may differ.
        per_layer: for each layer, the index of its variant. Layers that do not rotate have an index too, unused.

    Raises ConfigError for no variants and for an index that names none.
    """

    variants: tuple[RopeVariant, ...]
    per_layer: tuple[int, ...]

    def __init__(self, variants: Sequence[RopeVariant], per_layer: Sequence[int]) -> None:
        if len(variants) == 0:
            raise ConfigError("RopePlan: variants is empty, a plan has at least one; pass [RopeVariant.default(...)]")
        for index, variant in enumerate(variants):
            if not isinstance(variant, RopeVariant):
                raise ConfigError(
                    f"RopePlan: variant {index} must be a RopeVariant, got {variant!r}; "
                    "make it with RopeVariant.default(...)"
                )
        object.__setattr__(self, "variants", tuple(variants))
        object.__setattr__(self, "per_layer", _assignment(per_layer, len(variants), "RopePlan"))

    @classmethod
    def single(cls, variant_or_theta: RopeVariant | float, n_layers: int, width: int | None = None) -> Self:
        """Return the plan in which every layer rotates alike: by a variant, or by a theta and a width."""
        layers = _count(n_layers, "RopePlan: n_layers", 0)
        if isinstance(variant_or_theta, RopeVariant):
            if width is not None and width != variant_or_theta.width:
                raise ConfigError(
                    f"RopePlan: width {width} contradicts a variant of width {variant_or_theta.width}; leave one out"
                )
            return cls([variant_or_theta], [0] * layers)
        if width is None:
            raise ConfigError(
                f"RopePlan: theta {variant_or_theta!r} needs a width, the number of rotated features; pass width="
            )
        return cls([RopeVariant.default(width, variant_or_theta)], [0] * layers)

    @classmethod
    def per_layer_base(
        cls,
        n_layers: int,
        base_when_true: float,
        base_when_false: float,
        uses_first: Callable[[int], bool],
        *,
        width: int,
    ) -> Self:
        """Return `per_layer_variant` of two unscaled variants that differ in theta alone."""
        first = RopeVariant.default(width, base_when_true)
        second = RopeVariant.default(width, base_when_false)
        return cls.per_layer_variant(n_layers, first, second, uses_first)

    @classmethod
    def per_layer_variant(
        cls,
        n_layers: int,
        variant_when_true: RopeVariant,
        variant_when_false: RopeVariant,
        uses_first: Callable[[int], bool],
    ) -> Self:
        """Let `uses_first(layer_idx)` choose between two variants.

        One variant when the two are equal in frequencies and scale (then two would only look like two) or when all
        layers agree; otherwise both, the one for True first.
        """
        layers = _count(n_layers, "RopePlan: n_layers", 0)
        if variant_when_true == variant_when_false:
            return cls.single(variant_when_true, layers)
        first = [bool(uses_first(layer)) for layer in range(layers)]
        if first and all(first):
            return cls.single(variant_when_true, layers)
        if first and not any(first):
            return cls.single(variant_when_false, layers)
        return cls([variant_when_true, variant_when_false], [0 if uses else 1 for uses in first])

    @property
    def n_variants(self) -> int:
        """Number of distinct tables, the leading extent of cos and sin."""
        return len(self.variants)

    @property
    def n_layers(self) -> int:
        """Number of layers that the plan assigns."""
        return len(self.per_layer)

    @cached_property
    def width(self) -> int:
        """Width of the tables: that of the widest variant."""
        return max(variant.width for variant in self.variants)

    def variant_for_layer(self, layer_idx: int) -> int:
        """Return the index of this layer's tables on the variant axis."""
        return self.per_layer[_layer_index(layer_idx, self.n_layers, "RopePlan")]

    def structure(self) -> Component:
        """Return what a plan bakes: variant count, assignment and widths; never a frequency or a scale."""
        return (self.n_variants, self.per_layer, tuple(variant.width for variant in self.variants))

    def mix_into(self, hasher: ShapeKeyHasher) -> None:
        """Mix `structure()` into a key."""
        mix_component(hasher, self.structure())

    @cached_property
    def depends_on_length(self) -> bool:
        """Whether some variant turns long sequences by other frequencies than short ones."""
        return any(variant.longer is not None for variant in self.variants)

    def regime(self, length: int) -> tuple[int, ...] | None:
        """Which frequencies a sequence of `length` positions turns by, None where the length does not matter.

        Rows that were computed under different regimes do not belong into one sequence.
        """
        return tuple(variant.regime(length) for variant in self.variants) if self.depends_on_length else None

    @cached_property
    def _last(self) -> list[tuple[tuple[int, ...] | None, tuple[_F64, _F64]]]:
        """The arrays of the last regime, at most one. Not a field, so equality, hash and repr leave it alone."""
        return []

    def _halves(self, regime: tuple[int, ...] | None) -> tuple[_F64, _F64]:
        """The frequencies of every variant, [V, 1, width/2] filled up with zeros, and the scales, [V, 1, 1]."""
        held = self._last[0] if self._last else None
        if held is not None and held[0] == regime:
            return held[1]
        frequencies = np.zeros((self.n_variants, 1, self.width // 2))
        for index, variant in enumerate(self.variants):
            chosen = variant.frequencies(0 if regime is None else regime[index])
            frequencies[index, 0, : len(chosen)] = chosen
        scales = np.array([variant.scale for variant in self.variants])[:, None, None]
        frequencies.flags.writeable = False
        scales.flags.writeable = False
        self._last[:] = [(regime, (frequencies, scales))]
        return frequencies, scales


def build_rope_tables(plan: RopePlan, start: int, seq: int, length: int | None = None) -> tuple[_F32, _F32]:
    """Build cos and sin for positions start .. start + seq - 1, float32 [V, seq, plan.width] each.

    length: positions of the sequence these are part of, which decides the frequencies of a variant that depends on it;
    start + seq without it.

    Half-split layout: in a variant of width R, columns i and i + R/2 hold the value of frequency i. Angles, cos, sin
    and the product with the scale are float64, and the cast comes last: float32 angles lose digits at high positions.
    Columns beyond a variant's own width are 0 in both tables, so a layer must cut the tables to its own width; one that
    does not zeroes features, which shows, where cos 1 would leave a wrong rotation unseen.

    Raises DecodeError for a step without tokens or a negative position.
    """
    _step_range(start, seq)
    frequencies, scales = plan._halves(plan.regime(start + seq if length is None else length))
    angles = np.arange(start, start + seq, dtype=np.float64)[:, None] * frequencies  # [V, T, R/2]
    cos_half, sin_half = np.cos(angles) * scales, np.sin(angles) * scales
    cos_VTR = np.zeros((plan.n_variants, seq, plan.width), dtype=np.float32)
    sin_VTR = np.zeros_like(cos_VTR)
    for table, half in ((cos_VTR, cos_half), (sin_VTR, sin_half)):
        for index, variant in enumerate(plan.variants):
            pairs = len(variant.inv_freq)
            table[index, :, :pairs] = table[index, :, pairs : 2 * pairs] = half[index, :, :pairs]
    return cos_VTR, sin_VTR

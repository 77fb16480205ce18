"""What a model keeps between steps: state specs, and the cache that holds the state.

The cache owns storage, how much of it is filled, the token ids that filled it, and the id of the
allocation. It does not know what a plan is; a session attaches the buffers and compares the id.

Shape letters: B batch (1 today), G kv heads, S positions (max_seq_len), K head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fuel_core.decode_shape import Component, KvAllocId
from fuel_core.errors import CacheStateError, CapacityError, GeometryError

__all__ = ["KeyValue", "KvCache", "LayerStateSpec", "Slots", "StateSlot", "kv_dims"]

SlotKind = Literal["positional", "rolling"]


@dataclass(frozen=True, slots=True)
class StateSlot:
    """One named buffer of a layer's state.

    ``positional``: one row a position, buffer ``[B, S, *shape]``; truncation and prefix copy are exact.
    ``rolling``: only the latest value, buffer ``[B, *shape]`` (a ring, a convolution window); it cannot be
    rewound to an earlier position.
    """

    name: str
    shape: tuple[int, ...]
    kind: SlotKind = "positional"

    def __post_init__(self) -> None:
        if self.kind not in ("positional", "rolling"):
            raise GeometryError(
                f"state slot {self.name!r}: kind must be 'positional' or 'rolling', found {self.kind!r}; choose one"
            )
        if any(n < 1 for n in self.shape):
            raise GeometryError(
                f"state slot {self.name!r}: every size must be at least 1, found {self.shape}; correct it"
            )

    def buffer_shape(self, batch: int, max_seq_len: int) -> tuple[int, ...]:
        """Shape of the buffer for ``batch`` rows and ``max_seq_len`` positions."""
        return (batch, max_seq_len, *self.shape) if self.kind == "positional" else (batch, *self.shape)

    @property
    def seq_axis(self) -> int | None:
        """The axis that counts positions, None for a rolling slot."""
        return 1 if self.kind == "positional" else None


@dataclass(frozen=True, slots=True)
class _HeadMajorSlot(StateSlot):
    """K or V: heads before positions, so that one head's keys are contiguous. Buffer ``[B, G, S, K]``."""

    def buffer_shape(self, batch: int, max_seq_len: int) -> tuple[int, ...]:
        n_kv_heads, head_dim = self.shape
        return (batch, n_kv_heads, max_seq_len, head_dim)

    @property
    def seq_axis(self) -> int | None:
        return 2


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A layer that keeps keys and values: slots ``k`` and ``v``, each ``[B, n_kv_heads, S, head_dim]``."""

    n_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.n_kv_heads < 1 or self.head_dim < 1:
            raise GeometryError(f"KeyValue: n_kv_heads and head_dim must be at least 1, found {self}; correct it")

    @property
    def slots(self) -> tuple[StateSlot, ...]:
        shape = (self.n_kv_heads, self.head_dim)
        return (_HeadMajorSlot("k", shape), _HeadMajorSlot("v", shape))


@dataclass(frozen=True, slots=True)
class Slots:
    """A layer that keeps named slots (latent caches, convolution windows)."""

    slots: tuple[StateSlot, ...]

    def __post_init__(self) -> None:
        names = [slot.name for slot in self.slots]
        if not names or len(set(names)) != len(names):
            raise GeometryError(f"Slots: one or more slots with different names expected, found {names}; rename")


LayerStateSpec = KeyValue | Slots


def kv_dims(specs: Sequence[LayerStateSpec]) -> tuple[int | None, int | None]:
    """(n_kv_heads, head_dim) where every layer keeps K and V of one geometry, else None for what differs."""
    kv = [spec for spec in specs if isinstance(spec, KeyValue)]
    if not specs or len(kv) != len(specs):
        return None, None
    heads, dims = {spec.n_kv_heads for spec in kv}, {spec.head_dim for spec in kv}
    return (heads.pop() if len(heads) == 1 else None, dims.pop() if len(dims) == 1 else None)


def specs_component(specs: Sequence[LayerStateSpec]) -> Component:
    """The state geometry as a shape-key component (no sizes that depend on capacity)."""
    return tuple(tuple((slot.name, slot.kind, slot.shape) for slot in spec.slots) for spec in specs)


class KvCache:
    """State of one sequence for every layer, with capacity for ``max_seq_len`` positions.

    ``alloc_id`` names the *allocation*: constructing, ``clear`` and ``set_layer`` mint a new one,
    ``truncate_to`` keeps it, because a rewound cache is still the storage a held plan is attached to.
    Copying (``copy`` or ``deepcopy``) clones the storage and mints. Not safe for two threads at once.
    """

    def __init__(
        self,
        specs: Iterable[LayerStateSpec],
        *,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.specs: tuple[LayerStateSpec, ...] = tuple(specs)
        if not self.specs:
            raise GeometryError(
                "KvCache: at least one layer state spec expected, found none; pass model.layer_state_specs()"
            )
        if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or not 1 <= max_seq_len < 2**31:
            raise CapacityError(
                f"KvCache: max_seq_len must be an integer of 1 to {2**31 - 1}, found {max_seq_len!r:.80}; give one"
            )
        wrong = [spec for spec in self.specs if not isinstance(spec, KeyValue | Slots)]
        if wrong:
            raise GeometryError(
                f"KvCache: layer state specs (KeyValue or Slots) are expected, found {wrong[0]!r}; "
                "pass model.layer_state_specs()"
            )
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise GeometryError(
                f"KvCache: a floating-point torch dtype is expected, found {dtype!r}; use torch.float32"
            )
        self.max_seq_len = max_seq_len
        self.dtype = dtype
        # Resolved once: "cuda" and "cuda:0" are one place, and tensors only ever report the latter.
        try:
            self.device = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError, TypeError) as error:
            raise GeometryError(f"KvCache: device {device!r} cannot be used here; use device='cpu'") from error
        self._alloc_id = KvAllocId.next()
        self._layers: list[dict[str, Tensor]] | None = None
        self._cached_len = 0
        self._token_ids: list[int] = []
        self._steps = 0
        self._version_base = [0] * len(self.specs)
        self._torn = False
        self._in_step = False
        self._written = 0
        # From which position on, what computed the rows: only ever compared, by whoever reuses a prefix.
        self._filled_by: list[tuple[int, object]] = []
        # Which RoPE frequencies the rows were turned by, where those depend on the length of the sequence.
        self._regime: object = None

    @classmethod
    def with_capacity(
        cls,
        specs: Iterable[LayerStateSpec],
        *,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KvCache:
        """Allocate zero-filled storage for ``max_seq_len`` positions.

        Raises GeometryError or CapacityError for specs, sizes or dtypes that make no cache.
        """
        cache = cls(specs, max_seq_len=max_seq_len, dtype=dtype, device=device)
        cache.ensure_storage()
        return cache

    # -- identity ---------------------------------------------------------------------------------

    @property
    def alloc_id(self) -> KvAllocId:
        """The never-recycled id of this allocation."""
        return self._alloc_id

    def __copy__(self) -> KvCache:
        return self._clone()

    def __deepcopy__(self, memo: dict[int, object]) -> KvCache:
        clone = self._clone()
        memo[id(self)] = clone
        return clone

    def _clone(self) -> KvCache:
        other = KvCache(self.specs, max_seq_len=self.max_seq_len, dtype=self.dtype, device=self.device)
        if self._layers is not None:
            with torch.inference_mode(False):  # as in ensure_storage
                other._layers = [{name: t.clone() for name, t in layer.items()} for layer in self._layers]
        other._cached_len, other._token_ids = self._cached_len, list(self._token_ids)
        other._torn, other._written = self._torn, self._written
        other._filled_by = list(self._filled_by)
        other._regime = self._regime
        return other

    # -- contents ---------------------------------------------------------------------------------

    @property
    def n_layers(self) -> int:
        return len(self.specs)

    @property
    def cached_len(self) -> int:
        """How many positions are filled."""
        return self._cached_len

    @property
    def token_ids(self) -> list[int]:
        """The ids that filled the cache, oldest first (a copy; its length is ``cached_len``)."""
        return list(self._token_ids)

    def common_prefix(self, token_ids: Sequence[int]) -> int:
        """How many leading ids the cache holds already."""
        n = 0
        for mine, theirs in zip(self._token_ids, token_ids, strict=False):
            if mine != theirs:
                break
            n += 1
        return n

    def reusable_prefix(self, token_ids: Sequence[int], filled_by: object) -> int:
        """How many leading ids the cache holds as ``filled_by`` (a model's ``content_version()``) computed them.

        Rows that another model computed, or this one before its weights, config or plans changed, do not count.
        """
        mine = self.common_prefix(token_ids)
        return min([mine, *(start for start, by in self._filled_by if by != filled_by)])

    def turned_by(self, regime: object) -> bool:
        """Whether the cached rows were turned by the RoPE frequencies of ``regime`` (``RopePlan.regime``).

        True where there are no rows, or where frequencies do not depend on the length (``regime`` None).
        """
        return regime is None or self._cached_len == 0 or self._regime == regime

    @property
    def has_storage(self) -> bool:
        return self._layers is not None

    def ensure_storage(self) -> None:
        """Allocate the buffers if ``clear`` (or construction without capacity) left none."""
        if self._layers is not None:
            return
        # Tensors made inside a caller's inference_mode could never be written outside it.
        with torch.inference_mode(False):
            try:
                self._layers = [
                    {
                        slot.name: torch.zeros(
                            slot.buffer_shape(1, self.max_seq_len), dtype=self.dtype, device=self.device
                        )
                        for slot in spec.slots
                    }
                    for spec in self.specs
                ]
            except (RuntimeError, MemoryError) as error:
                raise CapacityError(
                    f"KvCache: {self.nbytes} bytes for {self.max_seq_len} positions could not be allocated on "
                    f"{self.device}; use a smaller max_seq_len"
                ) from error
        self._written = 0

    def layer(self, layer_idx: int) -> Mapping[str, Tensor]:
        """The buffers of one layer by slot name. Raises CacheStateError when there is no storage."""
        if self._layers is None:
            raise CacheStateError(
                f"KvCache layer {layer_idx}: no storage after clear(); run a step, or call ensure_storage()"
            )
        return self._layers[layer_idx]

    def set_layer(self, layer_idx: int, buffers: Mapping[str, Tensor]) -> None:
        """Replace one layer's buffers (they are used as they are, not copied) and mint a new alloc id.

        Rows from ``cached_len`` on are stale: a step may overwrite them. Raises GeometryError when names, shapes, dtype
        or device differ from the layer's spec, and for tensors of inference mode, which no step could write.
        """
        if not 0 <= layer_idx < self.n_layers:
            raise GeometryError(
                f"KvCache.set_layer: layer 0..{self.n_layers - 1} expected, found {layer_idx}; name one of them"
            )
        spec = self.specs[layer_idx]
        if set(buffers) != {slot.name for slot in spec.slots}:
            raise GeometryError(
                f"KvCache.set_layer: layer {layer_idx} keeps slots {[s.name for s in spec.slots]}, "
                f"found {sorted(buffers)}; pass a buffer for each"
            )
        for slot in spec.slots:
            tensor, want = buffers[slot.name], slot.buffer_shape(1, self.max_seq_len)
            fits = tuple(tensor.shape) == want and tensor.dtype == self.dtype and tensor.device == self.device
            if not fits or not tensor.is_contiguous():
                raise GeometryError(
                    f"KvCache.set_layer: layer {layer_idx} slot {slot.name!r} must be contiguous {list(want)} "
                    f"{self.dtype} on {self.device}, found {list(tensor.shape)} {tensor.dtype} on {tensor.device}, "
                    f"strides {list(tensor.stride())}; call contiguous() or allocate it so"
                )
            if tensor.is_inference():
                raise GeometryError(
                    f"KvCache.set_layer: layer {layer_idx} slot {slot.name!r} was made inside torch.inference_mode and "
                    "cannot be written outside it; make it outside, or clone it there"
                )
        if len({buffers[slot.name].data_ptr() for slot in spec.slots}) != len(spec.slots):
            raise GeometryError(f"KvCache.set_layer: layer {layer_idx} slots share one buffer; give each its own")
        self.ensure_storage()
        assert self._layers is not None
        self._layers[layer_idx] = {slot.name: buffers[slot.name] for slot in spec.slots}
        self._version_base[layer_idx] = self._steps
        self._filled_by = [(0, object())]  # nobody may take their rows for a prefix of its own
        self._written = self.max_seq_len  # what they hold beyond cached_len is anyone's guess
        self._alloc_id = KvAllocId.next()

    def version(self, layer_idx: int) -> int:
        """Steps completed on this layer's buffers since they were allocated or set."""
        return self._steps - self._version_base[layer_idx]

    @property
    def nbytes(self) -> int:
        """Bytes that the storage takes, allocated or not."""
        item = torch.empty(0, dtype=self.dtype).element_size()
        shapes = (slot.buffer_shape(1, self.max_seq_len) for spec in self.specs for slot in spec.slots)
        return item * sum(math.prod(shape) for shape in shapes)

    # -- changes ----------------------------------------------------------------------------------

    def truncate_to(self, n: int) -> None:
        """Forget every position from ``n`` on. Touches no storage and keeps the alloc id.

        Raises CacheStateError when ``n`` is negative or above ``cached_len``, and when a layer keeps rolling
        state, which cannot be rewound (``n == cached_len`` is always allowed; ``n == 0`` resets it).
        """
        if type(n) is not int or not 0 <= n <= self._cached_len:
            raise CacheStateError(
                f"KvCache.truncate_to: an integer in 0..cached_len ({self._cached_len}) expected, found {n!r}; "
                "only rewinding is possible"
            )
        if n == 0:
            self._reset_rolling()
        elif self.has_rolling_state and n != self._cached_len:
            raise CacheStateError(
                f"KvCache.truncate_to: rolling state cannot be rewound from {self._cached_len} to {n}; "
                "truncate to 0 or clear() and run the kept ids again"
            )
        self._cached_len = n
        del self._token_ids[n:]
        self._filled_by = [fill for fill in self._filled_by if fill[0] < n]

    def clear(self) -> None:
        """Release the storage and mint a new alloc id; the next step allocates anew."""
        self._layers = None
        self._cached_len = 0
        self._token_ids.clear()
        self._filled_by.clear()
        self._version_base = [self._steps] * self.n_layers
        self._torn = False
        self._written = 0
        self._alloc_id = KvAllocId.next()

    def copy_prefix_from(self, other: KvCache, n: int) -> None:
        """Take over the first ``n`` positions of ``other`` (any capacity). Requires equal specs and dtype.

        Raises GeometryError where the caches differ, CapacityError when ``n`` does not fit,
        CacheStateError when ``other`` holds fewer positions or keeps rolling state that is torn or not exactly at
        ``n``.
        """
        if self.specs != other.specs or self.dtype != other.dtype:
            found = "other specs" if self.specs != other.specs else f"{self.dtype} and {other.dtype}"
            raise GeometryError(
                f"KvCache.copy_prefix_from: caches of equal specs and dtype expected, found {found}; make both alike"
            )
        if type(n) is not int:
            raise CacheStateError(f"KvCache.copy_prefix_from: an integer of at least 0 expected, found {n!r}; give one")
        if n > self.max_seq_len:
            raise CapacityError(
                f"KvCache.copy_prefix_from: capacity {self.max_seq_len}, needed {n}; allocate a larger cache"
            )
        if not 0 <= n <= other._cached_len or (other.has_rolling_state and n not in (0, other._cached_len)):
            raise CacheStateError(
                f"KvCache.copy_prefix_from: the source holds {other._cached_len} positions, asked for {n}; "
                "ask for as many as it holds"
            )
        if n and other._torn:
            raise CacheStateError(
                "KvCache.copy_prefix_from: a failed step left the source's rolling state torn; "
                "clear() the source and run its ids again"
            )
        self.ensure_storage()
        if n:
            self._torn = False
            for spec, mine, theirs in zip(self.specs, self._layers or [], other._layers or [], strict=True):
                for slot in spec.slots:
                    axis = slot.seq_axis
                    if axis is None:
                        mine[slot.name].copy_(theirs[slot.name])
                    else:
                        mine[slot.name].narrow(axis, 0, n).copy_(theirs[slot.name].narrow(axis, 0, n))
        elif self.has_rolling_state:
            self._reset_rolling()
        self._cached_len, self._token_ids = n, other._token_ids[:n]
        self._filled_by = [fill for fill in other._filled_by if fill[0] < n]
        self._regime = other._regime
        self._written = max(self._written, n)

    # -- what a step does ---------------------------------------------------------------------------

    @property
    def has_rolling_state(self) -> bool:
        return any(slot.kind == "rolling" for spec in self.specs for slot in spec.slots)

    def _reset_rolling(self) -> None:
        if self._layers is not None:
            for spec, layer in zip(self.specs, self._layers, strict=True):
                for slot in spec.slots:
                    if slot.kind == "rolling":
                        layer[slot.name].zero_()
        self._torn = False

    def check_room(self, n_tokens: int, where: str) -> None:
        """Refuse a step of ``n_tokens`` that this cache cannot hold, before anything is touched."""
        if n_tokens < 1:
            raise CacheStateError(f"{where}: at least one token id expected, found none; pass one")
        need = self._cached_len + n_tokens
        if need > self.max_seq_len:
            raise CapacityError(
                f"{where}: the KV cache has capacity {self.max_seq_len} and holds {self._cached_len}; {n_tokens} more "
                f"need {need}. Allocate a larger cache (max_seq_len), or truncate_to() first"
            )
        if self._torn:
            raise CacheStateError(
                f"{where}: an earlier step failed half-way and left rolling state torn; truncate_to(0) or clear() first"
            )

    def begin_step(self, n_tokens: int, *, scrub: bool) -> None:
        """Allocate if needed. ``scrub``: zero rows beyond cached_len that earlier steps wrote.

        Where attention covers the whole capacity under a mask, a masked row still meets a product with
        probability zero, and 0 x NaN is NaN: rows left by a failed step must not hold one.
        """
        self.ensure_storage()
        assert self._layers is not None
        stale = self._written - self._cached_len
        if scrub and stale > 0:
            for spec, layer in zip(self.specs, self._layers, strict=True):
                for slot in spec.slots:
                    if slot.seq_axis is not None:
                        layer[slot.name].narrow(slot.seq_axis, self._cached_len, stale).zero_()
            self._written = self._cached_len
        self._written = max(self._written, self._cached_len + n_tokens)
        self._in_step = True

    def advance(self, token_ids: Sequence[int], filled_by: object = None, regime: object = None) -> None:
        """Record a completed step, what computed it, and by which frequencies its rows were turned.

        The only place where the filled length grows.
        """
        self._regime = regime
        if not self._filled_by or self._filled_by[-1][1] != filled_by:
            self._filled_by.append((self._cached_len, filled_by))
        self._cached_len += len(token_ids)
        self._token_ids.extend(token_ids)
        self._steps += 1
        self._in_step = False

    def take_back(self, token_ids: Sequence[int]) -> None:
        """Hold ``token_ids`` again after computing them anew failed part of the way.

        Some rows are of the one kind and some of the other: whoever reads them next computes all of them first.
        """
        if len(token_ids) == self._cached_len:
            return
        self._filled_by = [(0, object())]
        self._regime = object()
        self._torn = self._torn or self.has_rolling_state
        self._cached_len, self._token_ids = len(token_ids), list(token_ids)

    def abandon_step(self) -> None:
        """Record a failed step: positional rows beyond cached_len are hidden anyway, rolling state is torn.

        A step that was refused before it began touched nothing and leaves nothing torn.
        """
        self._torn = self._torn or (self._in_step and self.has_rolling_state)
        self._in_step = False

    def __repr__(self) -> str:
        return (
            f"KvCache(layers={self.n_layers}, cached_len={self._cached_len}, max_seq_len={self.max_seq_len}, "
            f"dtype={self.dtype}, device={self.device}, alloc_id={self._alloc_id.get()})"
        )

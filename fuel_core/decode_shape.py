"""Who a held plan belongs to: never-recycled ids, and the key that says what was baked.

Knows nothing about models, tensors or caches: it counts, encodes and compares.

A plan bakes some things (op structure, weights, KV geometry) and is handed others anew on every token (token ids, RoPE
tables, mask, write offset). The key covers the baked things and only those. Forgetting one lets a plan answer for a
model it was not built for, at full speed and without an error; adding a bound one rebuilds plans for nothing, which no
comparison of outputs can notice. Tests of a component therefore come in pairs: differing invalidates, equal keeps.

Identity is a counter, never an address: `id()` and data pointers are handed out again once their owner is gone, and a
plan may well outlive the model that it was built for.

The hash is FNV-1a, 64 bit (http://www.isthe.com/chongo/tech/comp/fnv/). It is a quick way to say "different"; equality
of two keys also compares everything that was hashed, so a collision cannot serve a wrong plan.

Errors are TypeError and ValueError: a refusal here is a mistake in the calling code, not in a user's files.
"""

import dataclasses
import enum
import itertools
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Self, TypeAlias, final

__all__ = [
    "Component",
    "Difference",
    "KvAllocId",
    "ModelInstanceId",
    "ShapeKey",
    "ShapeKeyHasher",
    "canonical",
    "explain",
    "fnv1a_64",
    "mix_component",
]

Component: TypeAlias = bool | int | float | str | tuple["Component", ...] | None
"""What a key may be made of: plain immutable values whose bytes are the same in every process."""

_PLAIN = (bool, int, float, str)

FNV1A_64_BASIS = 0xCBF29CE484222325
FNV1A_64_PRIME = 0x100000001B3
_U64_MAX = 2**64 - 1


def fnv1a_64(data: bytes, basis: int = FNV1A_64_BASIS) -> int:
    """Fold `data` into `basis` by FNV-1a (xor, then multiply modulo 2**64); returns an unsigned 64-bit int."""
    value = basis
    for byte in data:
        value = ((value ^ byte) * FNV1A_64_PRIME) & _U64_MAX
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Ids


class _CountedId:
    """A number drawn once from a counter of its own class and never drawn again in this process."""

    __slots__ = ("_number",)

    # Overwritten by each concrete class: two classes sharing a counter would still be right, but their numbers would
    # look related in logs.
    _counter: ClassVar[Iterator[int]]
    _lock: ClassVar[threading.Lock]

    _number: int

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError(f"{type(self).__name__} cannot be made from a value; call {type(self).__name__}.next()")

    @classmethod
    def next(cls) -> Self:
        """Mint the next id of this class; safe to call from any thread."""
        with cls._lock:
            number = next(cls._counter)
        minted = object.__new__(cls)
        object.__setattr__(minted, "_number", number)
        return minted

    def get(self) -> int:
        """Return the number: at least 1, so that a field left at zero is never mistaken for an id."""
        return self._number

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._number == other._number

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._number))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._number})"

    # Whatever is copied together with its id owns other storage than the original, so the copy must not answer to the
    # original's plans. Two references to one id inside one deep copy stay one id: the copy memo sees to that.
    def __copy__(self) -> Self:
        return type(self).next()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self).next()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).next, ()


@final
class ModelInstanceId(_CountedId):
    """Names one constructed model; mint it with `ModelInstanceId.next()`.

    It stands for the weights: whatever shares them may share the id, and anything that owns other weights needs
    another. Immutable and hashable. Copying, deep-copying or unpickling one mints a new one.
    """

    __slots__ = ()
    _counter = itertools.count(1)
    _lock = threading.Lock()


@final
class KvAllocId(_CountedId):
    """Names one KV allocation, the set of buffers a session is attached to; mint it with `KvAllocId.next()`.

    It stands for the buffers, not for the conversation in them: replaced storage gets a new id, rewinding
    (`truncate_to`) keeps it. Immutable and hashable. Copying, deep-copying or unpickling one mints a new one.
    """

    __slots__ = ()
    _counter = itertools.count(1)
    _lock = threading.Lock()


# ---------------------------------------------------------------------------------------------------------------------
# Hashing


class ShapeKeyHasher:
    """FNV-1a 64 over what identifies a baked step; every mixer returns the hasher.

    Deliberately absent: any way to mix a tensor, a pointer or an `id()`. A hasher belongs to the thread that made it.
    """

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = FNV1A_64_BASIS

    def _mix_bytes(self, data: bytes) -> Self:
        self._value = fnv1a_64(data, self._value)
        return self

    def mix_str(self, text: str) -> Self:
        """Mix the UTF-8 bytes, then their count as 8 little-endian bytes, so ("ab", "c") is not ("a", "bc")."""
        if not isinstance(text, str):
            raise TypeError(f"mix_str takes a str, got {type(text).__name__}; numbers go through mix_u64 or mix_f64")
        encoded = _utf8(text)
        return self._mix_bytes(encoded + len(encoded).to_bytes(8, "little"))

    def mix_u64(self, number: int) -> Self:
        """Mix an int of 0..2**64-1 as 8 little-endian bytes; ValueError outside that range."""
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"mix_u64 takes an int, got {type(number).__name__}; a flag goes through mix_present")
        if not 0 <= number <= _U64_MAX:
            raise ValueError(f"mix_u64 takes 0..2**64-1, got {number}; use mix_component for any other int")
        return self._mix_bytes(number.to_bytes(8, "little"))

    def mix_f64(self, number: float) -> Self:
        """Mix the IEEE-754 bit pattern, little-endian. +0.0 and -0.0 differ on purpose: no comparison to get wrong."""
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"mix_f64 takes a float, got {type(number).__name__}; a flag goes through mix_present")
        return self._mix_bytes(struct.pack("<d", number))

    def mix_instance(self, instance: ModelInstanceId) -> Self:
        """Mix which constructed model this is: the one component that separates equal configs with other weights."""
        if type(instance) is not ModelInstanceId:
            raise TypeError(f"mix_instance takes a ModelInstanceId, got {type(instance).__name__}; mint one per model")
        return self.mix_str("instance").mix_u64(instance.get())

    def mix_present(self, present: bool) -> Self:
        """Mix whether something optional is there. Call it in both cases: skipping the mix is how absence gets lost."""
        if not isinstance(present, bool):
            raise TypeError(f"mix_present takes a bool, got {type(present).__name__}; write `x is not None`")
        return self.mix_str("some" if present else "none")

    def finish(self) -> int:
        """Return the hash so far, an unsigned 64-bit int; mixing may go on afterwards."""
        return self._value


def mix_component(hasher: ShapeKeyHasher, value: Component) -> ShapeKeyHasher:
    """Mix any component with its type, so that 1, True, 1.0, "1", (1,) and None all differ; returns the hasher.

    Raises TypeError for anything that is not a `Component`.
    """
    encoded = bytearray()
    _encode(value, encoded)
    return hasher._mix_bytes(bytes(encoded))


def _utf8(text: str) -> bytes:
    # A lone surrogate is a legal str; passing it keeps the encoding one to one without refusing odd names.
    return text.encode("utf-8", "surrogatepass")


def _encode(value: object, out: bytearray) -> None:
    """Append a prefix-free encoding of a component: equal bytes mean equal values of equal types.

    Types are compared exactly. An int or str subclass may compare and print as it likes, so it has to be made plain
    first (`canonical` does that for enums and numpy scalars).
    """
    kind = type(value)
    if value is None:
        out += b"n"
    elif kind is bool:
        out += b"b1" if value else b"b0"
    elif kind is int:
        assert isinstance(value, int)
        magnitude = abs(value)
        size = (magnitude.bit_length() + 7) // 8
        out += b"i-" if value < 0 else b"i+"
        out += size.to_bytes(8, "little")
        out += magnitude.to_bytes(size, "little")
    elif kind is float:
        out += b"f"
        out += struct.pack("<d", value)
    elif kind is str:
        assert isinstance(value, str)
        encoded = _utf8(value)
        out += b"s"
        out += len(encoded).to_bytes(8, "little")
        out += encoded
    elif kind is tuple:
        assert isinstance(value, tuple)
        out += b"t"
        out += len(value).to_bytes(8, "little")
        for item in value:
            _encode(item, out)
    else:
        raise TypeError(
            f"a key component is None, bool, int, float, str or a tuple of these, got {kind.__module__}."
            f"{kind.__qualname__}; pass it through canonical(), or mix a number or name that stands for it"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Turning values into components


def canonical(value: object) -> Component:
    """Turn a config-like value into a `Component`; equal values give equal components in every process.

    Frozen dataclasses become (class name, (field, value), ...) over the fields that take part in comparison; a field
    declared `compare=False` says that it does not change what the object is. Mappings become pairs sorted by key, sets
    their sorted members, sequences tuples in order, enums (class name, member name), numpy scalars Python numbers.

    Raises TypeError naming the place and the type for everything else: tensors, arrays, modules, bytes, functions and
    dataclasses that can still change. There is no fallback to `repr` or `id`: both differ where nothing did, or worse,
    agree where something did.
    """
    return _canonical(value, "value")


def _canonical(value: object, where: str) -> Component:
    if isinstance(value, enum.Enum):
        # Before the plain types: an IntEnum is an int, and its number may be shared with another enum's.
        return (type(value).__qualname__, value.name if value.name is not None else _plain(value.value, where))
    if value is None or type(value) in _PLAIN:
        return _plain(value, where)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not type(value).__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise TypeError(
                f"{where} is a {type(value).__qualname__}, a dataclass that can change after its key was taken; "
                "declare it frozen=True"
            )
        return (
            type(value).__qualname__,
            *(
                (f.name, _canonical(getattr(value, f.name), f"{where}.{f.name}"))
                for f in dataclasses.fields(value)
                if f.compare
            ),
        )
    if isinstance(value, Mapping):
        pairs = [(_canonical(k, f"a key of {where}"), _canonical(v, f"{where}[{k!r}]")) for k, v in value.items()]
        return ("mapping", *sorted(pairs, key=lambda pair: _sort_key(pair[0])))
    if isinstance(value, Set):
        members = [_canonical(member, f"a member of {where}") for member in value]
        return ("set", *sorted(members, key=_sort_key))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview)):
        return tuple(_canonical(item, f"{where}[{i}]") for i, item in enumerate(value))
    if any(base.__module__ == "numpy" and base.__name__ == "generic" for base in type(value).__mro__):
        number = value.item()  # type: ignore[attr-defined]
        return _plain(number if type(number) in _PLAIN else value, where)
    return _plain(value, where)


def _plain(value: object, where: str) -> Component:
    kind = type(value)
    if value is None or (isinstance(value, _PLAIN) and kind in _PLAIN):
        return value
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which has no value to put into a key; "
        "keep it out of the config, or put a number or name that stands for it there"
    )


def _sort_key(component: Component) -> tuple[str, bytes]:
    # Text first by its own order, so that printed keys read alphabetically; then whatever else there is, by its bytes.
    encoded = bytearray()
    _encode(component, encoded)
    return (component if type(component) is str else "", bytes(encoded))


# ---------------------------------------------------------------------------------------------------------------------
# The key


@dataclass(frozen=True, eq=False)
class ShapeKey:
    """Everything baked that a config decides: named components, kept beside their 64-bit hash.

    Args:
        components: (name, component) pairs in an order of the caller's choosing, which is part of the key. Names must
            be unique (ValueError) and non-empty; values must be components (TypeError).
    """

    components: tuple[tuple[str, Component], ...]
    value: int = field(init=False)
    # What was hashed. `==` on the components would take 1 for True and 0.0 for -0.0, and a NaN for something else.
    _encoded: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        components = tuple((name, component) for name, component in self.components)
        encoded = bytearray()
        seen = set()
        for name, component in components:
            if type(name) is not str or not name:
                raise TypeError(f"a component is named by a non-empty str, got {name!r}")
            if name in seen:
                raise ValueError(f"component {name!r} is given twice; a key has one value per name")
            seen.add(name)
            try:
                _encode(name, encoded)
                _encode(component, encoded)
            except TypeError as error:
                raise TypeError(f"component {name!r}: {error}") from None
        object.__setattr__(self, "components", components)
        object.__setattr__(self, "_encoded", bytes(encoded))
        object.__setattr__(self, "value", fnv1a_64(self._encoded))

    @classmethod
    def of(cls, components: Mapping[str, Component]) -> Self:
        """Make a key of a mapping's items, in the mapping's order."""
        return cls(tuple(components.items()))

    def get(self, name: str, default: Component = None) -> Component:
        """Return the component called `name`, or `default` if the key has none of that name."""
        return next((component for known, component in self.components if known == name), default)

    def without(self, *names: str) -> Self:
        """Return the key less these components; ValueError for a name that it does not have."""
        known = [name for name, _ in self.components]
        for name in names:
            if name not in known:
                raise ValueError(f"no component is called {name!r}; this key has {', '.join(known) or 'none'}")
        return type(self)(tuple(pair for pair in self.components if pair[0] not in names))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShapeKey):
            return NotImplemented
        return self.value == other.value and self._encoded == other._encoded

    def __hash__(self) -> int:
        return self.value

    def __str__(self) -> str:
        return f"0x{self.value:016x}"


@dataclass(frozen=True)
class Difference:
    """One component in which two keys differ; `was` or `now` is the string "absent" where a side lacks it."""

    component: str
    was: Component
    now: Component

    def __str__(self) -> str:
        was, now = str(self.was), str(self.now)
        if was == now:
            was, now = repr(self.was), repr(self.now)
        return f"{self.component} {was} -> {now}"


def explain(was: ShapeKey, now: ShapeKey) -> tuple[Difference, ...]:
    """List the components in which two keys differ: in the order of `was`, then what only `now` has.

    Empty exactly when the keys are equal. Keys that differ in nothing but order get one difference, "component order".
    """
    if was == now:
        return ()
    before, after = dict(was.components), dict(now.components)
    differences = []
    for name in dict.fromkeys((*before, *after)):
        if name in before and name in after and _same(before[name], after[name]):
            continue
        differences.append(Difference(name, before.get(name, "absent"), after.get(name, "absent")))
    return tuple(differences) or (Difference("component order", tuple(before), tuple(after)),)


def _same(left: Component, right: Component) -> bool:
    encoded_left, encoded_right = bytearray(), bytearray()
    _encode(left, encoded_left)
    _encode(right, encoded_right)
    return encoded_left == encoded_right

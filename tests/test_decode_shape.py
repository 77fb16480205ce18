"""Ids, hasher and key. What belongs into a key is tested in pairs: a difference is seen, and equality is kept."""

import ast
import copy
import dataclasses
import enum
import math
import pickle
import struct
import subprocess
import sys
import threading
from collections import OrderedDict, namedtuple
from types import MappingProxyType

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from fuel_core import decode_shape
from fuel_core.decode_shape import (
    Component,
    Difference,
    KvAllocId,
    ModelInstanceId,
    ShapeKey,
    ShapeKeyHasher,
    canonical,
    explain,
    fnv1a_64,
    mix_component,
)

ID_CLASSES = [ModelInstanceId, KvAllocId]

components = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=8,
)


def hash_of(value: Component) -> int:
    return mix_component(ShapeKeyHasher(), value).finish()


# --- FNV-1a ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # Published vectors of FNV-1a 64. The empty one alone could not tell FNV-1a from FNV-1.
        (b"", 0xCBF29CE484222325),
        (b"a", 0xAF63DC4C8601EC8C),
        (b"b", 0xAF63DF4C8601F1A5),
        (b"foobar", 0x85944171F73967E8),
        (b"chongo was here!\n", 0x46810940EFF5F915),
    ],
)
def test_fnv1a_64_matches_the_published_vectors(data, expected):
    assert fnv1a_64(data) == expected


def test_fnv1a_64_continues_from_a_basis():
    assert fnv1a_64(b"bar", fnv1a_64(b"foo")) == fnv1a_64(b"foobar")


# --- The hasher ------------------------------------------------------------------------------------------------------


def test_hasher_mixes_exactly_the_documented_bytes():
    for number in (0, 1, 0x0123456789ABCDEF, 2**64 - 1):
        assert ShapeKeyHasher().mix_u64(number).finish() == fnv1a_64(number.to_bytes(8, "little"))
    # Two bytes in UTF-8: the length that follows counts bytes, not characters.
    assert ShapeKeyHasher().mix_str("\u00e9").finish() == fnv1a_64(b"\xc3\xa9" + b"\x02" + bytes(7))
    assert ShapeKeyHasher().mix_f64(1.5).finish() == fnv1a_64(struct.pack("<d", 1.5))
    assert ShapeKeyHasher().mix_present(True).finish() == ShapeKeyHasher().mix_str("some").finish()
    assert ShapeKeyHasher().mix_present(False).finish() == ShapeKeyHasher().mix_str("none").finish()
    instance = ModelInstanceId.next()
    by_hand = ShapeKeyHasher().mix_str("instance").mix_u64(instance.get())
    assert ShapeKeyHasher().mix_instance(instance).finish() == by_hand.finish()


def test_hasher_without_mixes_is_the_basis():
    assert ShapeKeyHasher().finish() == fnv1a_64(b"")


def test_hasher_mixers_return_the_hasher():
    hasher = ShapeKeyHasher()
    assert hasher.mix_str("x") is hasher
    assert hasher.mix_u64(1) is hasher
    assert hasher.mix_f64(1.0) is hasher
    assert hasher.mix_instance(ModelInstanceId.next()) is hasher
    assert hasher.mix_present(True) is hasher
    assert mix_component(hasher, 1) is hasher


def test_hasher_tells_families_of_one_geometry_apart_and_keeps_equal_ones():
    def key(family):
        return ShapeKeyHasher().mix_str(family).mix_u64(32).finish()

    assert key("one") != key("other")
    assert key("one") == key("one")


def test_hasher_tells_where_one_string_ends():
    assert ShapeKeyHasher().mix_str("ab").mix_str("c").finish() != ShapeKeyHasher().mix_str("a").mix_str("bc").finish()
    assert ShapeKeyHasher().mix_str("ab").mix_str("c").finish() == ShapeKeyHasher().mix_str("ab").mix_str("c").finish()


def test_hasher_tells_an_absent_hook_from_a_present_one():
    def key(hook):
        return ShapeKeyHasher().mix_str("family").mix_present(hook is not None).finish()

    assert key(None) != key(0)
    assert key(0) == key(1)
    assert key(None) == key(None)
    assert key(None) != ShapeKeyHasher().mix_str("family").finish(), "skipping the mix is not the same as absence"


def test_hasher_tells_model_instances_apart_and_knows_its_own_again():
    first, second = ModelInstanceId.next(), ModelInstanceId.next()

    def key(instance):
        return ShapeKeyHasher().mix_str("family").mix_instance(instance).finish()

    assert key(first) != key(second)
    assert key(first) == key(first)


def test_hasher_keeps_the_two_zeros_apart():
    assert ShapeKeyHasher().mix_f64(0.0).finish() != ShapeKeyHasher().mix_f64(-0.0).finish()
    assert ShapeKeyHasher().mix_f64(math.nan).finish() == ShapeKeyHasher().mix_f64(math.nan).finish()


@pytest.mark.parametrize("number", [-1, 2**64])
def test_hasher_refuses_integers_that_do_not_fit(number):
    with pytest.raises(ValueError, match="mix_component"):
        ShapeKeyHasher().mix_u64(number)


@pytest.mark.parametrize(
    ("mixer", "value"),
    [
        ("mix_u64", True),
        ("mix_u64", 1.0),
        ("mix_u64", "1"),
        ("mix_f64", True),
        ("mix_f64", "1"),
        ("mix_str", 1),
        ("mix_str", b"a"),
        ("mix_present", 1),
        ("mix_present", None),
        ("mix_instance", 1),
        ("mix_instance", KvAllocId.next()),
    ],
)
def test_hasher_refuses_other_types(mixer, value):
    with pytest.raises(TypeError, match=f"{mixer} takes"):
        getattr(ShapeKeyHasher(), mixer)(value)


def test_hasher_offers_no_way_to_mix_an_object_or_an_address():
    offered = {name for name in dir(ShapeKeyHasher) if not name.startswith("_")}
    assert offered == {"mix_str", "mix_u64", "mix_f64", "mix_instance", "mix_present", "finish"}


# --- Components ------------------------------------------------------------------------------------------------------

LOOK_ALIKES = [1, True, 1.0, "1", (1,), None, 0, False, 0.0, -0.0, "", (), ((),), "None", -1, -1.0, (None,), "n", 256]


def test_mix_component_tells_look_alikes_apart_and_repeats_itself():
    hashes = [hash_of(value) for value in LOOK_ALIKES]
    assert len(set(hashes)) == len(LOOK_ALIKES)
    assert hashes == [hash_of(value) for value in LOOK_ALIKES]


def test_mix_component_takes_text_that_utf_8_cannot_hold():
    lone = ["\ud800", "\udc00", "\ud800\udc00", "\U00010000", "?", ""]
    assert len({hash_of(text) for text in lone}) == len(lone)


def test_mix_component_takes_integers_of_any_size_and_sign():
    numbers = [sign * 2**bits + step for sign in (1, -1) for bits in (7, 8, 63, 64, 200) for step in (-1, 0, 1)]
    assert len({hash_of(number) for number in numbers}) == len(set(numbers))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((("a", "b"), "c"), (("a",), "b", "c")),
        (("ab", "c"), ("a", "bc")),
        (((1, 2), 3), (1, (2, 3))),
        (((), (())), ((()), ((),))),
        ((1, 2), (2, 1)),
        ((None, 1), (1, None)),
    ],
)
def test_mix_component_sees_how_values_are_nested(one, other):
    assert hash_of(one) != hash_of(other)


def same_component(one, other):
    """Equality with types and float bits, written without the encoding that it judges."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_component, one, other))
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return one == other


@settings(max_examples=300, deadline=None)
@given(components, components)
@example(("", "s"), ("s", ""))
@example(0.0, -0.0)
@example((1,), (True,))
@example(math.nan, math.nan)
def test_keys_are_equal_exactly_when_types_and_values_are(one, other):
    equal = same_component(one, other)
    assert (ShapeKey.of({"x": one}) == ShapeKey.of({"x": other})) is equal
    assert (hash_of(one) == hash_of(other)) is equal
    assert (explain(ShapeKey.of({"x": one}), ShapeKey.of({"x": other})) == ()) is equal


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Size(enum.IntEnum):
    ONE = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Word(str):
    __slots__ = ()


@pytest.mark.parametrize("value", [object(), [1], {"a": 1}, {1}, b"a", Colour.RED, Size.ONE, Word("w"), np.float64(1)])
def test_mix_component_refuses_anything_else_and_says_what_to_do(value):
    with pytest.raises(TypeError, match=r"canonical\(\)") as caught:
        mix_component(ShapeKeyHasher(), value)
    assert type(value).__name__ in str(caught.value)
    with pytest.raises(TypeError, match="canonical"):
        mix_component(ShapeKeyHasher(), ("nested", value))


def test_mix_component_leaves_the_hasher_alone_when_it_refuses():
    hasher = ShapeKeyHasher().mix_str("family")
    before = hasher.finish()
    with pytest.raises(TypeError):
        mix_component(hasher, (1, 2, object()))
    assert hasher.finish() == before


# --- canonical -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rope:
    theta: float
    factor: float | None = None


@dataclasses.dataclass(frozen=True)
class OtherRope:
    theta: float
    factor: float | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    hidden_size: int
    rope: Rope
    layer_types: list = dataclasses.field(default_factory=list)
    sources: dict = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass
class Mutable:
    a: int = 1


def test_canonical_spells_out_a_frozen_dataclass():
    assert canonical(Config(8, Rope(1e4), ["full", "window"])) == (
        "Config",
        ("hidden_size", 8),
        ("rope", ("Rope", ("theta", 1e4), ("factor", None))),
        ("layer_types", ("full", "window")),
    )


@pytest.mark.parametrize(
    "changed",
    [
        Config(9, Rope(1e4), ["full"]),
        Config(8, Rope(1e5), ["full"]),
        Config(8, Rope(1e4, 1.0), ["full"]),
        Config(8, Rope(1e4), ["window"]),
        Config(8, OtherRope(1e4), ["full"]),
        Config(8.0, Rope(1e4), ["full"]),
    ],
)
def test_canonical_sees_every_compared_field(changed):
    assert hash_of(canonical(changed)) != hash_of(canonical(Config(8, Rope(1e4), ["full"])))


def test_canonical_keeps_equal_configs_equal_wherever_their_values_came_from():
    one = Config(8, Rope(1e4), ["full"], sources={"hidden_size": "config.json"})
    other = Config(8, Rope(1e4), ["full"], sources={"hidden_size": "family default"})
    assert canonical(one) == canonical(other)
    assert hash_of(canonical(one)) == hash_of(canonical(other))


def test_canonical_sorts_mappings_and_sets_but_not_sequences():
    assert canonical({"b": 1, "a": [2]}) == canonical(OrderedDict(a=(2,), b=1)) == ("mapping", ("a", (2,)), ("b", 1))
    assert canonical(MappingProxyType({10: "x", 2: "y"})) == canonical({2: "y", 10: "x"})
    assert canonical({"b": 1}) != canonical({"b": 2})
    assert canonical({3, 1, 2}) == canonical(frozenset([2, 3, 1]))
    # 0 and 8 share a slot of a small set, so the one put in first comes out first; words come out in any order.
    assert list({0, 8}) != list({8, 0})
    assert canonical({0, 8}) == canonical({8, 0})
    words = ["cello", "flute", "harp", "horn", "lute", "oboe", "tuba", "viola"]
    assert canonical(set(reversed(words))) == ("set", *words)
    assert canonical({1, 2}) != canonical({1, 3})
    assert canonical([1, 2]) != canonical([2, 1])
    assert canonical(range(3)) == (0, 1, 2)
    assert canonical(namedtuple("Point", "x y")(1, 2)) == (1, 2)
    assert len({canonical(empty) for empty in ([], {}, set())}) == 3


def test_canonical_takes_mixed_keys_in_any_order():
    mixed = {1: "a", "1": "b", None: "c", (1,): "d", 1.5: "e"}
    backwards = dict(reversed(list(mixed.items())))
    assert canonical(mixed) == canonical(backwards)


def test_canonical_names_enums_rather_than_numbering_them():
    assert canonical(Colour.RED) == ("Colour", "RED")
    assert canonical(Size.ONE) == ("Size", "ONE") != canonical(1)
    assert canonical(Colour.RED) != canonical(Colour.BLUE)
    assert canonical(Flags.A | Flags.B) != canonical(Flags.A)


@pytest.mark.parametrize(
    ("scalar", "expected"),
    [
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (np.float64(0.5), 0.5),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
    ],
)
def test_canonical_takes_numpy_scalars_for_their_values(scalar, expected):
    result = canonical(scalar)
    assert type(result) is type(expected)
    assert result == expected
    assert canonical([scalar]) == (expected,)


def unsuitable_values():
    import torch

    return [
        torch.zeros(1),
        torch.nn.Linear(1, 1),
        torch.nn.ModuleList(),
        torch.float32,
        torch.device("cpu"),
        np.zeros(1),
        np.zeros(()),
        np.complex64(1),
        np.datetime64("2020-01-01"),
        np.longdouble(1),
        object(),
        b"bytes",
        bytearray(b"bytes"),
        memoryview(b"bytes"),
        1j,
        len,
        lambda: None,
        int,
        Config,
        Word("w"),
        iter([1]),
        ModelInstanceId.next(),
        KvAllocId.next(),
        Mutable(),
    ]


@pytest.mark.parametrize("value", unsuitable_values(), ids=lambda value: type(value).__qualname__)
def test_canonical_refuses_what_has_no_value_and_names_the_type(value):
    name = type(value).__qualname__.split(".")[-1]
    with pytest.raises(TypeError, match=name):
        canonical(value)
    with pytest.raises(TypeError, match=rf"value\.layer_types\[0\]\['w'\] .*{name}"):
        canonical(Config(8, Rope(1.0), [{"w": value}]))


# --- The key ---------------------------------------------------------------------------------------------------------


def test_shape_key_keeps_names_values_and_order():
    key = ShapeKey.of({"family": "f", "num_layers": 2, "plan": (1, (0, 0))})
    assert key.components == (("family", "f"), ("num_layers", 2), ("plan", (1, (0, 0))))
    assert key.get("num_layers") == 2
    assert key.get("missing") is None
    assert key.get("missing", "x") == "x"
    assert key == ShapeKey((("family", "f"), ("num_layers", 2), ("plan", (1, (0, 0)))))


def test_shape_key_is_known_by_a_64_bit_hash():
    key = ShapeKey.of({"family": "f", "num_layers": 2})
    assert 0 <= key.value < 2**64
    assert str(key) == f"0x{key.value:016x}"
    assert hash(key) == hash(ShapeKey.of({"family": "f", "num_layers": 2}))
    assert len(str(ShapeKey(()))) == 18
    # Written out, because recordings are named by keys: the encoding must not drift between releases unnoticed.
    encoded = b"".join(
        [
            *(b"s", (6).to_bytes(8, "little"), b"family", b"s", (1).to_bytes(8, "little"), b"f"),
            *(b"s", (10).to_bytes(8, "little"), b"num_layers", b"i+", (1).to_bytes(8, "little"), b"\x02"),
        ]
    )
    assert key.value == fnv1a_64(encoded)


@pytest.mark.parametrize(
    "other",
    [
        {"family": "g", "num_layers": 2},
        {"family": "f", "num_layers": 3},
        {"family": "f", "num_layers": 2.0},
        {"family": "f"},
        {"family": "f", "num_layers": 2, "more": None},
        {"family": "f", "n_layers": 2},
        {"num_layers": 2, "family": "f"},
    ],
)
def test_shape_key_sees_every_difference(other):
    key = ShapeKey.of({"family": "f", "num_layers": 2})
    assert ShapeKey.of(other) != key
    assert ShapeKey.of(other).value != key.value
    assert explain(key, ShapeKey.of(other))


def test_shape_key_kept_equal_is_found_in_a_dict():
    held = {ShapeKey.of({"family": "f", "num_layers": 2}): "plan"}
    assert held[ShapeKey.of({"family": "f", "num_layers": 2})] == "plan"
    assert ShapeKey.of({"family": "f", "num_layers": 3}) not in held


def test_shape_key_compares_components_even_if_hashes_collide():
    one, other = ShapeKey.of({"x": 1}), ShapeKey.of({"x": True})
    object.__setattr__(other, "value", one.value)
    assert hash(one) == hash(other)
    assert one != other
    assert one.__eq__(1) is NotImplemented


def test_shape_key_copies_and_pickles_to_an_equal_key():
    key = ShapeKey.of({"x": (1, None, "a"), "y": math.nan})
    for twin in (copy.copy(key), copy.deepcopy(key), pickle.loads(pickle.dumps(key))):
        assert twin == key
        assert hash(twin) == hash(key)


def test_shape_key_refuses_bad_components_by_name():
    with pytest.raises(ValueError, match="'x' is given twice"):
        ShapeKey((("x", 1), ("x", 1)))
    with pytest.raises(TypeError, match=r"component 'x': .*list"):
        ShapeKey.of({"x": [1]})
    with pytest.raises(TypeError, match="non-empty str"):
        ShapeKey.of({"": 1})
    with pytest.raises(TypeError, match="non-empty str"):
        ShapeKey.of({1: 1})


def test_shape_key_is_frozen():
    key = ShapeKey.of({"x": 1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        key.value = 1


def test_shape_key_without_forgets_only_the_named():
    one = ShapeKey.of({"family": "f", "instance": 1, "epoch": 0})
    other = ShapeKey.of({"family": "f", "instance": 2, "epoch": 3})
    assert one != other
    assert one.without("instance", "epoch") == other.without("epoch", "instance") == ShapeKey.of({"family": "f"})
    assert one.without("instance") != other.without("instance")
    assert one.without() == one
    with pytest.raises(ValueError, match=r"'instances'.*family, instance, epoch"):
        one.without("instances")


def test_explain_names_what_changed_vanished_and_came():
    was = ShapeKey.of({"family": "f", "num_key_value_heads": 8, "bias": True})
    now = ShapeKey.of({"num_key_value_heads": 4, "family": "f", "softcap": 50.0})
    assert explain(was, now) == (
        Difference("num_key_value_heads", 8, 4),
        Difference("bias", True, "absent"),
        Difference("softcap", "absent", 50.0),
    )
    assert [str(difference) for difference in explain(was, now)] == [
        "num_key_value_heads 8 -> 4",
        "bias True -> absent",
        "softcap absent -> 50.0",
    ]
    assert explain(was, was) == ()


def test_explain_finds_something_exactly_when_keys_differ():
    assert explain(ShapeKey.of({"x": 1}), ShapeKey.of({"x": True})) == (Difference("x", 1, True),)
    assert explain(ShapeKey.of({"x": 0.0}), ShapeKey.of({"x": -0.0}))
    assert explain(ShapeKey.of({"x": math.nan}), ShapeKey.of({"x": float("nan")})) == ()
    assert explain(ShapeKey.of({"x": None}), ShapeKey(())) == (Difference("x", None, "absent"),)
    assert explain(ShapeKey.of({"x": "absent"}), ShapeKey(())) == (Difference("x", "absent", "absent"),)
    (order,) = explain(ShapeKey.of({"x": 1, "y": 2}), ShapeKey.of({"y": 2, "x": 1}))
    assert order == Difference("component order", ("x", "y"), ("y", "x"))


def test_difference_shows_types_when_values_print_alike():
    assert str(Difference("x", 1, "1")) == "x 1 -> '1'"


# --- Ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", ID_CLASSES)
def test_ids_count_up_from_one_and_never_come_back(cls):
    first = cls.next()
    number = first.get()
    assert number >= 1
    del first
    assert cls.next().get() > number, "the number of a dropped id was handed out again"


@pytest.mark.parametrize("cls", ID_CLASSES)
def test_ids_start_at_one_in_a_fresh_process(cls):
    code = f"import fuel_core.decode_shape as d; print(d.{cls.__name__}.next().get())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"


@pytest.mark.parametrize("cls", ID_CLASSES)
def test_ids_equal_themselves_and_nothing_else(cls):
    one, other = cls.next(), cls.next()
    same = one
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != one.get()
    assert len({one, same, other}) == 2
    assert repr(one) == f"{cls.__name__}({one.get()})"


def test_ids_of_the_two_classes_never_compare_equal():
    instance, alloc = ModelInstanceId.next(), KvAllocId.next()
    for _ in range(100_000):
        if instance.get() < alloc.get():
            instance = ModelInstanceId.next()
        elif instance.get() > alloc.get():
            alloc = KvAllocId.next()
    assert instance.get() == alloc.get(), "the two have to carry one number, or there is nothing to tell apart"
    assert instance != alloc
    assert len({instance, alloc}) == 2


@pytest.mark.parametrize("cls", ID_CLASSES)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_ids_that_travel_are_new_ids(cls, copied):
    original = cls.next()
    travelled = copied(original)
    assert type(travelled) is cls
    assert travelled != original
    assert travelled.get() > original.get()
    assert copied(original) != travelled


@pytest.mark.parametrize("cls", ID_CLASSES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_ids_pickle_under_every_protocol(cls, protocol):
    original = cls.next()
    assert pickle.loads(pickle.dumps(original, protocol)).get() > original.get()


@pytest.mark.parametrize("cls", ID_CLASSES)
def test_ids_shared_inside_one_deep_copy_stay_shared(cls):
    original = cls.next()
    left, right = copy.deepcopy([original, original])
    assert left == right != original


@pytest.mark.parametrize("cls", ID_CLASSES)
def test_ids_cannot_be_made_up_or_changed(cls):
    for arguments in ((), (7,)):
        with pytest.raises(TypeError, match=rf"{cls.__name__}\.next\(\)"):
            cls(*arguments)
    minted = cls.next()
    number = minted.get()
    for name in ("_number", "other"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(minted, name, 7)
    with pytest.raises(AttributeError, match="immutable"):
        del minted._number
    assert minted.get() == number
    assert not hasattr(minted, "__dict__")


@pytest.mark.parametrize("cls", ID_CLASSES)
def test_ids_minted_by_many_threads_are_all_different(cls):
    threads, each = 8, 1000
    together = threading.Barrier(threads)
    minted: list[list] = [[] for _ in range(threads)]

    def mint(into):
        together.wait()
        for _ in range(each):
            into.append(cls.next())

    workers = [threading.Thread(target=mint, args=(into,)) for into in minted]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    numbers = [identity.get() for into in minted for identity in into]
    assert len(numbers) == len(set(numbers)) == threads * each
    for into in minted:
        assert [identity.get() for identity in into] == sorted(identity.get() for identity in into)


def test_module_imports_nothing_of_ours_and_only_the_standard_library():
    with open(decode_shape.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    } | {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names

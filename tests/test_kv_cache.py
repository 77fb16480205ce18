"""What the cache promises: geometry, the alloc id, exact rewinding, and what a failed step leaves behind."""

import copy

import pytest
import torch
from toy_backbone import latent_reference, latent_toy, new_cache, reference, toy

from fuel_core.errors import CacheStateError, CapacityError, GeometryError
from fuel_core.kv_cache import KeyValue, KvCache, Slots, StateSlot, kv_dims, specs_component
from fuel_core.persistent_decode import InferenceContext, forward_decode_step, forward_with_kv_context

KV = [KeyValue(2, 6), KeyValue(3, 4)]
NAMED = [Slots((StateSlot("latent", (5,)), StateSlot("recent", (2, 7), kind="rolling")))]


def cache_of(specs=KV, capacity=9, dtype=torch.float32):
    return KvCache.with_capacity(specs, max_seq_len=capacity, dtype=dtype)


def filled(specs=KV, ids=(4, 5, 6), capacity=9):
    """A cache whose rows and ids are as after one step over ``ids``, every row holding its position + 1."""
    cache = cache_of(specs, capacity)
    cache.begin_step(len(ids), scrub=False)
    for layer, spec in enumerate(cache.specs):
        for slot in spec.slots:
            buffer = cache.layer(layer)[slot.name]
            if slot.seq_axis is None:
                buffer.fill_(len(ids))
            else:
                for i in range(len(ids)):
                    buffer.select(slot.seq_axis, i).fill_(i + 1)
    cache.advance(list(ids))
    return cache


# --- Specs and storage -----------------------------------------------------------------------------------------------


def test_specs_give_each_slot_its_buffer():
    cache = cache_of()
    assert {n: tuple(t.shape) for n, t in cache.layer(0).items()} == {"k": (1, 2, 9, 6), "v": (1, 2, 9, 6)}
    assert {n: tuple(t.shape) for n, t in cache.layer(1).items()} == {"k": (1, 3, 9, 4), "v": (1, 3, 9, 4)}
    named = cache_of(NAMED, dtype=torch.bfloat16)
    assert {n: tuple(t.shape) for n, t in named.layer(0).items()} == {"latent": (1, 9, 5), "recent": (1, 2, 7)}
    assert {t.dtype for t in named.layer(0).values()} == {torch.bfloat16}
    assert all(not t.any() for layer in range(2) for t in cache.layer(layer).values()), "storage starts at zero"


@pytest.mark.parametrize(("specs", "dtype"), [(KV, torch.float32), (KV, torch.bfloat16), (NAMED, torch.float16)])
def test_nbytes_is_what_the_storage_takes(specs, dtype):
    cache = cache_of(specs, dtype=dtype)
    held = sum(t.nbytes for layer in range(cache.n_layers) for t in cache.layer(layer).values())
    assert cache.nbytes == held > 0
    cache.clear()
    assert cache.nbytes == held, "the figure is what the storage takes, allocated or not"


def test_kv_dims_are_given_only_where_all_layers_agree():
    assert kv_dims([KeyValue(2, 6)] * 3) == (2, 6)
    assert kv_dims(KV) == (None, None)
    assert kv_dims([KeyValue(2, 6), KeyValue(2, 8)]) == (2, None)
    assert kv_dims([KeyValue(2, 6), KeyValue(3, 6)]) == (None, 6)
    assert kv_dims([KeyValue(2, 6), *NAMED]) == (None, None)
    assert kv_dims([]) == (None, None)


def test_specs_component_sees_geometry_and_not_capacity():
    assert specs_component(KV) == specs_component([KeyValue(2, 6), KeyValue(3, 4)])
    others = [
        [KeyValue(2, 6), KeyValue(4, 3)],
        KV[:1],
        [Slots((StateSlot("k", (2, 6)),)), KV[1]],
        [Slots((StateSlot("latent", (5,)), StateSlot("recent", (2, 7))))],
        NAMED,
    ]
    assert len({specs_component(KV), *map(specs_component, others)}) == 6


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: cache_of([]), GeometryError, "at least one layer"),
        (lambda: cache_of(capacity=0), CapacityError, "an integer of 1 to 2147483647"),
        (lambda: cache_of(capacity=True), CapacityError, "True"),
        (lambda: cache_of(capacity=2.0), CapacityError, "2.0"),
        (lambda: cache_of(dtype=torch.int8), GeometryError, "floating-point"),
        (lambda: KeyValue(0, 4), GeometryError, "at least 1"),
        (lambda: KeyValue(4, 0), GeometryError, "at least 1"),
        (lambda: Slots(()), GeometryError, "one or more"),
        (lambda: Slots((StateSlot("a", (1,)), StateSlot("a", (2,)))), GeometryError, "different names"),
        (lambda: StateSlot("a", (0,)), GeometryError, "at least 1"),
        (lambda: StateSlot("a", (1,), kind="ring"), GeometryError, "'ring'"),
    ],
)
def test_a_cache_that_makes_no_sense_is_refused(make, error, says):
    with pytest.raises(error, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_storage_can_be_written_after_it_was_allocated_or_copied_inside_inference_mode():
    with torch.inference_mode():
        cache = cache_of()
        twin = copy.deepcopy(cache)
    for made in (cache, twin):
        made.layer(0)["k"].fill_(1.0)  # raises for a tensor of inference mode
        assert not made.layer(0)["k"].is_inference()


# --- The alloc id ----------------------------------------------------------------------------------------------------


def test_alloc_id_follows_the_storage_and_not_the_conversation():
    cache = filled()
    first = cache.alloc_id
    assert cache.alloc_id == first, "asking twice is no change"
    assert cache_of().alloc_id != first, "another allocation"

    cache.truncate_to(1)
    cache.truncate_to(1)
    cache.truncate_to(0)
    assert cache.alloc_id == first, "rewinding keeps the storage"
    cache.copy_prefix_from(filled(), 2)
    assert cache.alloc_id == first, "rows were copied into the same storage"

    cache.clear()
    cleared = cache.alloc_id
    assert cleared != first
    cache.ensure_storage()
    cache.ensure_storage()
    assert cache.alloc_id == cleared, "the id was minted for the storage that comes"

    cache.set_layer(1, {name: torch.zeros_like(t) for name, t in cache.layer(1).items()})
    assert cache.alloc_id not in (first, cleared)


def test_a_refused_change_keeps_the_alloc_id():
    cache = filled()
    first = cache.alloc_id
    with pytest.raises(CacheStateError):
        cache.truncate_to(4)
    with pytest.raises(GeometryError):
        cache.set_layer(0, {"k": torch.zeros(1)})
    assert cache.alloc_id == first


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_own_their_storage_and_their_id(copied):
    cache = filled()
    twin = copied(cache)
    assert twin.alloc_id != cache.alloc_id
    assert (twin.cached_len, twin.token_ids) == (3, [4, 5, 6])
    assert torch.equal(twin.layer(1)["v"], cache.layer(1)["v"])
    assert twin.layer(1)["v"].data_ptr() != cache.layer(1)["v"].data_ptr()
    twin.layer(1)["v"].fill_(-1.0)
    twin.truncate_to(1)
    assert cache.layer(1)["v"].max() == 3.0
    assert cache.token_ids == [4, 5, 6]


def test_one_cache_referred_to_twice_is_one_cache_after_a_deep_copy():
    cache = filled()
    one, two = copy.deepcopy([cache, cache])
    assert one is two


# --- Contents --------------------------------------------------------------------------------------------------------


def test_token_ids_are_a_copy_as_long_as_the_filled_part():
    cache = filled()
    cache.token_ids.append(99)
    assert cache.token_ids == [4, 5, 6]
    cache.truncate_to(2)
    assert cache.token_ids == [4, 5]
    assert cache.cached_len == 2
    cache.clear()
    assert cache.token_ids == []


@pytest.mark.parametrize(
    ("ids", "n"), [([], 0), ([4], 1), ([4, 5, 6], 3), ([4, 5, 6, 7], 3), ([4, 9, 6], 1), ([5, 5, 6], 0)]
)
def test_common_prefix_counts_leading_ids_only(ids, n):
    assert filled().common_prefix(ids) == n


@pytest.mark.parametrize("n", [-1, 4, 100])
def test_truncate_to_outside_the_filled_part_is_an_error_that_changes_nothing(n):
    cache = filled()
    with pytest.raises(CacheStateError, match=rf"cached_len \(3\).*found {n}"):
        cache.truncate_to(n)
    assert cache.token_ids == [4, 5, 6]


def test_truncate_to_touches_no_storage():
    cache = filled()
    before = [t.clone() for layer in range(2) for t in cache.layer(layer).values()]
    cache.truncate_to(1)
    assert all(map(torch.equal, before, [t for layer in range(2) for t in cache.layer(layer).values()]))


def test_clear_releases_storage_and_the_next_step_allocates():
    model = toy(num_hidden_layers=1)
    cache, ctx = new_cache(model), InferenceContext()
    forward_with_kv_context(model, [1, 2], cache, ctx)
    cache.clear()
    assert not cache.has_storage
    with pytest.raises(CacheStateError, match="ensure_storage"):
        cache.layer(0)
    logits = forward_with_kv_context(model, [3], cache, ctx)
    assert cache.has_storage
    torch.testing.assert_close(logits.double(), reference(model, [3])[-1], rtol=0, atol=1e-5)


def test_versions_count_steps_on_the_layers_own_buffers():
    cache = filled()
    cache.begin_step(1, scrub=False)
    cache.advance([7])
    assert [cache.version(0), cache.version(1)] == [2, 2]
    cache.set_layer(1, {name: torch.zeros_like(t) for name, t in cache.layer(1).items()})
    cache.begin_step(1, scrub=False)
    cache.advance([7])
    assert [cache.version(0), cache.version(1)] == [3, 1]
    cache.truncate_to(2)
    assert cache.version(0) == 3
    cache.clear()
    assert [cache.version(0), cache.version(1)] == [0, 0]


# --- set_layer -------------------------------------------------------------------------------------------------------


def buffers(shape=(1, 2, 9, 6), dtype=torch.float32, names=("k", "v")):
    return {name: torch.ones(shape, dtype=dtype) for name in names}


def test_set_layer_takes_the_buffers_as_they_are():
    cache, given = cache_of(), buffers()
    cache.set_layer(0, given)
    assert cache.layer(0)["k"] is given["k"]
    assert not cache.layer(1)["k"].any(), "the other layer is untouched"


def test_set_layer_on_a_cleared_cache_allocates_the_rest():
    cache = cache_of()
    cache.clear()
    cache.set_layer(0, buffers())
    assert cache.layer(1)["k"].shape == (1, 3, 9, 4)


@pytest.mark.parametrize(
    ("layer", "given", "says"),
    [
        (2, buffers(), "0..1"),
        (-1, buffers(), "0..1"),
        (0, buffers(names=("k",)), "keeps slots"),
        (0, buffers(names=("k", "v", "w")), "keeps slots"),
        (0, buffers(shape=(1, 2, 8, 6)), "must be contiguous"),
        (0, buffers(dtype=torch.bfloat16), "bfloat16"),
        (0, {n: t.transpose(1, 2) for n, t in buffers((1, 9, 2, 6)).items()}, "strides"),
        (0, {n: torch.ones(1, 2, 9, 6, device="meta") for n in "kv"}, "meta"),
    ],
)
def test_set_layer_refuses_what_does_not_fit_the_spec(layer, given, says):
    cache = cache_of()
    before = cache.layer(0)["k"]
    with pytest.raises(GeometryError, match=says):
        cache.set_layer(layer, given)
    assert cache.layer(0)["k"] is before


def test_set_layer_refuses_tensors_that_a_step_could_never_write():
    with torch.inference_mode():
        given = buffers()
    with pytest.raises(GeometryError, match="inference_mode"):
        cache_of().set_layer(0, given)


@pytest.mark.parametrize("offset_path", ["device", "symbol"])
def test_rows_beyond_the_filled_part_of_given_buffers_cannot_reach_an_output(offset_path):
    """Uninitialised memory may hold NaN, and where attention covers the capacity a masked row still meets a product."""
    model = toy(num_hidden_layers=2)
    cache, ctx = new_cache(model), InferenceContext(offset_path=offset_path)
    cache.set_layer(0, {name: torch.full_like(t, torch.nan) for name, t in cache.layer(0).items()})
    ids = [3, 1, 4]
    for i in ids:
        logits = forward_decode_step(model, [i], cache, ctx)
    torch.testing.assert_close(logits.double(), reference(model, ids)[-1], rtol=0, atol=1e-5)


# --- copy_prefix_from ------------------------------------------------------------------------------------------------


def test_copy_prefix_takes_rows_and_ids_across_capacities():
    source = filled(ids=(4, 5, 6), capacity=9)
    target = cache_of(capacity=5)
    target.copy_prefix_from(source, 2)
    assert target.token_ids == [4, 5]
    for name in "kv":
        assert torch.equal(target.layer(0)[name][:, :, :2], source.layer(0)[name][:, :, :2])
        assert not target.layer(0)[name][:, :, 2:].any(), "row 2 was not asked for"
    source.layer(0)["k"].fill_(-1.0)
    assert target.layer(0)["k"].max() == 2.0, "the rows are copies"


def test_copy_prefix_continues_as_the_whole_sequence_would():
    model = toy()
    source, target, ctx = new_cache(model, 16), new_cache(model, 24), InferenceContext()
    forward_with_kv_context(model, [3, 1, 4, 1, 5], source, ctx)
    target.copy_prefix_from(source, 3)
    logits = forward_decode_step(model, [9], target, ctx)
    torch.testing.assert_close(logits.double(), reference(model, [3, 1, 4, 9])[-1], rtol=0, atol=1e-5)


def test_copy_prefix_of_nothing_empties_the_target():
    target = filled()
    target.copy_prefix_from(filled(), 0)
    assert (target.cached_len, target.token_ids) == (0, [])


@pytest.mark.parametrize(
    ("target", "n", "error", "says"),
    [
        (cache_of(KV[:1]), 1, GeometryError, "equal specs"),
        (cache_of(dtype=torch.bfloat16), 1, GeometryError, "dtype"),
        (cache_of(capacity=2), 3, CapacityError, "capacity 2, needed 3"),
        (cache_of(), 4, CacheStateError, "holds 3 positions, asked for 4"),
        (cache_of(), -1, CacheStateError, "asked for -1"),
    ],
)
def test_copy_prefix_refuses_what_it_cannot_do_exactly(target, n, error, says):
    with pytest.raises(error, match=says):
        target.copy_prefix_from(filled(), n)
    assert target.cached_len == 0


def test_copy_prefix_of_rolling_state_is_exact_at_its_own_position_only():
    source = filled(NAMED)
    with pytest.raises(CacheStateError, match="asked for 2"):
        cache_of(NAMED).copy_prefix_from(source, 2)
    target = cache_of(NAMED, capacity=12)
    target.copy_prefix_from(source, 3)
    assert torch.equal(target.layer(0)["recent"], source.layer(0)["recent"])
    target.copy_prefix_from(source, 0)
    assert not target.layer(0)["recent"].any(), "a sequence that starts anew starts from zero"


def test_copy_prefix_neither_takes_over_torn_state_nor_keeps_its_own():
    torn = filled(NAMED)
    torn.begin_step(1, scrub=False)
    torn.abandon_step()
    with pytest.raises(CacheStateError, match="torn"):
        cache_of(NAMED).copy_prefix_from(torn, 3)
    torn.copy_prefix_from(filled(NAMED), 3)
    torn.check_room(1, "test")  # healed: all of its state is another cache's, whole


# --- Rolling state ---------------------------------------------------------------------------------------------------


def test_rolling_state_cannot_be_rewound_but_can_be_reset():
    cache = filled(NAMED)
    with pytest.raises(CacheStateError, match="cannot be rewound from 3 to 2"):
        cache.truncate_to(2)
    assert (cache.cached_len, cache.token_ids) == (3, [4, 5, 6])
    cache.truncate_to(3)
    assert cache.layer(0)["recent"].any()
    cache.truncate_to(0)
    assert not cache.layer(0)["recent"].any()


def test_positional_state_rewinds_exactly_where_rolling_state_would_refuse():
    cache = filled()
    cache.truncate_to(2)
    assert cache.cached_len == 2


class Failing:
    """Makes one module of a model raise when it is called, after the layers before it have written their state."""

    def __init__(self, monkeypatch, module):
        self.monkeypatch, self.module = monkeypatch, module

    def __enter__(self):
        def fail(*_):
            raise RuntimeError("out of memory, say")

        self.monkeypatch.setattr(self.module, "forward", fail)

    def __exit__(self, *_):
        self.monkeypatch.undo()


@pytest.mark.parametrize("before", [[], [3, 1, 4]])
@pytest.mark.parametrize("heal", ["truncate", "clear"])
def test_a_failed_step_tears_rolling_state_until_it_is_reset(monkeypatch, before, heal):
    model = latent_toy(rolling=True)
    cache, ctx = new_cache(model), InferenceContext()
    if before:
        forward_with_kv_context(model, before, cache, ctx)
    with Failing(monkeypatch, model.layers[1].norm), pytest.raises(RuntimeError, match="out of memory"):
        forward_with_kv_context(model, [5, 6], cache, ctx)
    assert cache.token_ids == before
    for ids in ([5], [5, 6]):
        with pytest.raises(CacheStateError, match=r"latent-toy::.*torn"):
            forward_decode_step(model, ids, cache, ctx)
    if heal == "truncate":
        cache.truncate_to(0)
    else:
        cache.clear()
    logits = forward_with_kv_context(model, [5, 6], cache, ctx)
    torch.testing.assert_close(logits.double(), latent_reference(model, [5, 6])[-1], rtol=1e-5, atol=1e-5)


def test_a_refused_step_tears_nothing():
    model = latent_toy(rolling=True)
    cache, ctx = new_cache(model, max_seq_len=4), InferenceContext()
    forward_with_kv_context(model, [3, 1, 4], cache, ctx)
    with pytest.raises(CapacityError):
        forward_with_kv_context(model, [5, 6], cache, ctx)
    logits = forward_with_kv_context(model, [5], cache, ctx)
    torch.testing.assert_close(logits.double(), latent_reference(model, [3, 1, 4, 5])[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset_path", ["device", "symbol"])
def test_a_failed_step_leaves_positional_state_usable(monkeypatch, offset_path):
    """The failed step wrote NaN into rows beyond the filled part; the mask alone would not hide a NaN."""
    model = toy()
    cache, ctx = new_cache(model), InferenceContext(offset_path=offset_path)
    forward_with_kv_context(model, [3, 1], cache, ctx)
    for layer in range(3):
        for t in cache.layer(layer).values():
            t[:, :, 4:].fill_(0.0)
    with Failing(monkeypatch, model.norm), pytest.raises(RuntimeError, match="out of memory"):
        forward_with_kv_context(model, [5, 6, 7], cache, ctx)
    for layer in range(3):
        for t in cache.layer(layer).values():
            t[:, :, 2:5].fill_(torch.nan)
    for i in (4, 1):
        logits = forward_decode_step(model, [i], cache, ctx)
    torch.testing.assert_close(logits.double(), reference(model, [3, 1, 4, 1])[-1], rtol=0, atol=1e-5)


# --- What a step asks of it ------------------------------------------------------------------------------------------


def test_check_room_counts_to_the_last_slot():
    cache = filled(capacity=4)
    cache.check_room(1, "here")
    with pytest.raises(CapacityError, match=r"here: .*capacity 4 and holds 3; 2 more need 5"):
        cache.check_room(2, "here")
    with pytest.raises(CacheStateError, match="here: at least one token"):
        cache.check_room(0, "here")


def test_only_advance_moves_the_filled_length():
    cache = filled()
    cache.begin_step(2, scrub=True)
    assert cache.cached_len == 3
    cache.abandon_step()
    assert cache.cached_len == 3
    cache.begin_step(2, scrub=True)
    cache.advance([7, 8])
    assert cache.token_ids == [4, 5, 6, 7, 8]


def test_repr_names_what_a_reader_looks_for():
    cache = filled()
    for word in ("cached_len=3", "max_seq_len=9", "torch.float32", "cpu", f"alloc_id={cache.alloc_id.get()}"):
        assert word in repr(cache)

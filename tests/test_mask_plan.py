"""Mask plans and the bytes made from them, against a formula written out key by key."""

import dataclasses
import pickle

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings

from fuel_core.decode_shape import ShapeKeyHasher
from fuel_core.errors import CapacityError, ConfigError, DecodeError
from fuel_core.mask_and_rope import MaskPlan, build_decode_mask_variants

HIDDEN = -np.inf


def mask_by_hand(window, cached_len, seq, max_seq_len):
    """One mask, [seq, max_seq_len], from the published rule 0 <= i - j <= W - 1 with nothing vectorised."""
    mask = np.empty((seq, max_seq_len), dtype=np.float32)
    for row in range(seq):
        for key in range(max_seq_len):
            distance = cached_len + row - key
            visible = distance >= 0 and (window is None or distance <= window - 1)
            mask[row, key] = 0.0 if visible else HIDDEN
    return mask


def visible_keys(plan, cached_len, seq, max_seq_len, variant=0, row=0):
    mask = build_decode_mask_variants(plan, cached_len, seq, max_seq_len)
    return np.flatnonzero(mask[variant, 0, row] == 0).tolist()


def key_of(plan):
    hasher = ShapeKeyHasher()
    plan.mix_into(hasher)
    return hasher.finish()


steps = st.tuples(st.integers(0, 30), st.integers(1, 6), st.integers(0, 8)).map(
    lambda s: (s[0], s[1], s[0] + s[1] + s[2])  # cached_len, seq, max_seq_len with some unwritten tail
)
windows = st.integers(1, 45)


# --- Bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cached_len", "seq", "cap", "n_layers"), [(0, 1, 8, 2), (3, 1, 8, 4), (0, 5, 8, 1), (2, 3, 16, 3)]
)
def test_dense_plan_is_one_variant_with_the_plain_causal_bytes(cached_len, seq, cap, n_layers):
    plan = MaskPlan.dense(n_layers)
    assert plan.n_variants == 1
    mask = build_decode_mask_variants(plan, cached_len, seq, cap)
    assert mask.dtype == np.float32
    assert mask.shape == (1, 1, seq, cap)
    assert mask.tobytes() == mask_by_hand(None, cached_len, seq, cap).tobytes()


@pytest.mark.parametrize(
    ("cached_len", "seq", "cap", "window", "expected"),
    [
        (3, 1, 6, 2, [[2, 3]]),
        (1, 2, 5, 2, [[0, 1], [1, 2]]),
        (3, 1, 6, None, [[0, 1, 2, 3]]),
        (0, 3, 4, 1, [[0], [1], [2]]),
    ],
)
def test_mask_shows_the_worked_examples(cached_len, seq, cap, window, expected):
    plan = MaskPlan([window], [0])
    assert [visible_keys(plan, cached_len, seq, cap, row=row) for row in range(seq)] == expected


def test_window_counts_the_current_token():
    # W = 4 over ten ids: the last query sees the ids at distance 3 and nearer, not the one at distance 4.
    plan = MaskPlan([4], [0])
    assert visible_keys(plan, 0, 10, 10, row=9) == [6, 7, 8, 9]
    assert visible_keys(plan, 9, 1, 10) == [6, 7, 8, 9]


def test_causal_frontier_of_a_later_chunk_is_aligned_at_its_end():
    # Eight ids as 5 + 3: row i of the second chunk sees the five before it too.
    assert [visible_keys(MaskPlan.dense(1), 5, 3, 8, row=row) for row in range(3)] == [
        list(range(6)),
        list(range(7)),
        list(range(8)),
    ]


def test_variants_stack_on_the_leading_axis_in_plan_order():
    plan = MaskPlan([None, 2, 3], [0, 1, 1, 2])
    mask = build_decode_mask_variants(plan, 3, 2, 8)
    assert mask.shape == (3, 1, 2, 8)
    assert mask.size == 3 * 2 * 8
    for variant, window in enumerate((None, 2, 3)):
        assert mask[variant, 0].tobytes() == mask_by_hand(window, 3, 2, 8).tobytes()
    # The three really differ here, so an exchanged order could not pass.
    assert len({mask[variant].tobytes() for variant in range(3)}) == 3


@settings(max_examples=150, deadline=None)
@given(steps, st.lists(st.none() | windows, min_size=1, max_size=4))
def test_mask_equals_the_rule_written_out(step, variants):
    mask = build_decode_mask_variants(MaskPlan(variants, [0]), *step)
    assert mask.tobytes() == np.stack([mask_by_hand(window, *step) for window in variants]).tobytes()


@settings(max_examples=100, deadline=None)
@given(steps, st.integers(0, 50))
def test_window_of_the_capacity_or_more_is_dense(step, more):
    dense = build_decode_mask_variants(MaskPlan.dense(1), *step)
    assert build_decode_mask_variants(MaskPlan([step[2] + more], [0]), *step).tobytes() == dense.tobytes()


@settings(max_examples=100, deadline=None)
@given(steps, windows)
def test_window_shorter_than_the_context_is_not_dense(step, window):
    # The control of the test above: there the two coincide because nothing is left to hide.
    cached_len, seq, _ = step
    assume(window < cached_len + seq)
    dense = build_decode_mask_variants(MaskPlan.dense(1), *step)
    assert build_decode_mask_variants(MaskPlan([window], [0]), *step).tobytes() != dense.tobytes()


def test_enormous_window_is_dense():
    assert visible_keys(MaskPlan([10**30], [0]), 3, 1, 6) == [0, 1, 2, 3]


@settings(max_examples=100, deadline=None)
@given(steps, st.none() | windows)
def test_decode_row_equals_the_prefill_row_at_its_position(step, window):
    cached_len, seq, cap = step
    plan = MaskPlan([window], [0])
    prefill = build_decode_mask_variants(plan, 0, cached_len + seq, cap)
    chunk = build_decode_mask_variants(plan, cached_len, seq, cap)
    assert chunk.tobytes() == prefill[:, :, cached_len:].tobytes()
    for row in range(seq):
        decode = build_decode_mask_variants(plan, cached_len + row, 1, cap)
        assert decode.tobytes() == prefill[:, :, cached_len + row].tobytes()


@settings(max_examples=100, deadline=None)
@given(steps, windows)
def test_rows_see_themselves_and_exactly_the_window(step, window):
    cached_len, seq, _ = step
    visible = build_decode_mask_variants(MaskPlan([window, None], [0]), *step) == 0
    for row in range(seq):
        position = cached_len + row
        assert visible[0, 0, row].sum() == min(window, position + 1)
        assert visible[1, 0, row].sum() == position + 1
        assert visible[:, 0, row, position].all()
        assert not visible[:, 0, row, position + 1 :].any(), "the future and the unwritten tail stay hidden"


@settings(max_examples=100, deadline=None)
@given(steps, st.lists(st.none() | windows, min_size=1, max_size=4))
def test_window_starts_are_the_first_keys_that_the_mask_shows(step, variants):
    plan = MaskPlan(variants, [0])
    visible = build_decode_mask_variants(plan, *step) == 0
    starts = plan.window_starts(step[0])
    assert starts == tuple(int(np.argmax(visible[variant, 0, 0])) for variant in range(plan.n_variants))
    assert all(type(start) is int for start in starts)
    # No later row of the step looks back further: the span from the start on holds every visible key.
    for variant, start in enumerate(starts):
        assert not visible[variant, 0, :, :start].any()


def test_mask_refuses_a_step_past_the_capacity_and_names_both_numbers():
    plan = MaskPlan.dense(1)
    assert build_decode_mask_variants(plan, 6, 2, 8).shape == (1, 1, 2, 8)
    with pytest.raises(CapacityError, match=r"9 positions \(7 cached \+ 2 new\).* 8;"):
        build_decode_mask_variants(plan, 7, 2, 8)


@pytest.mark.parametrize(("cached_len", "seq"), [(0, 0), (-1, 1), (3, -1)])
def test_mask_refuses_a_step_without_tokens_or_before_the_start(cached_len, seq):
    with pytest.raises(DecodeError, match="at least one token"):
        build_decode_mask_variants(MaskPlan.dense(1), cached_len, seq, 8)


# --- Construction ----------------------------------------------------------------------------------------------------


def test_split_window_of_no_layer_is_the_dense_plan():
    assert MaskPlan.split_window(4, 0, 8) == MaskPlan.dense(4)
    assert MaskPlan.split_window(4, 0, 8).n_variants == 1


@pytest.mark.parametrize("split", [4, 9])
def test_split_window_of_every_layer_is_one_windowed_variant(split):
    cached_len, cap, window = 10, 12, 8
    assert cached_len > window, "the window has to hide something, or dense would pass for it"
    plan = MaskPlan.split_window(4, split, window)
    assert plan.n_variants == 1
    assert [plan.variant_for_layer(layer) for layer in range(4)] == [0, 0, 0, 0]
    assert [plan.window_for_layer(layer) for layer in range(4)] == [window] * 4
    mask = build_decode_mask_variants(plan, cached_len, 1, cap)
    assert mask.tobytes() == mask_by_hand(window, cached_len, 1, cap).tobytes()
    assert mask.tobytes() != build_decode_mask_variants(MaskPlan.dense(4), cached_len, 1, cap).tobytes()


def test_split_window_in_between_windows_the_first_layers():
    plan = MaskPlan.split_window(4, 1, 8)
    assert plan == MaskPlan([8, None], [0, 1, 1, 1])
    assert plan.n_variants == 2
    assert plan.n_layers == 4
    assert [plan.window_for_layer(layer) for layer in range(4)] == [8, None, None, None]


def test_split_window_of_a_model_without_layers():
    assert MaskPlan.split_window(0, 0, 8) == MaskPlan.dense(0)
    assert MaskPlan.split_window(0, 3, 8) == MaskPlan([8], [])


def test_per_layer_window_follows_the_predicate():
    plan = MaskPlan.per_layer_window(7, 5, lambda layer: (layer + 1) % 6 > 0)
    assert plan == MaskPlan([5, None], [0, 0, 0, 0, 0, 1, 0])
    assert plan.window_for_layer(4) == 5
    assert plan.window_for_layer(5) is None


def test_per_layer_window_collapses_when_layers_agree():
    assert MaskPlan.per_layer_window(3, 5, lambda layer: True) == MaskPlan([5], [0, 0, 0])
    assert MaskPlan.per_layer_window(3, 5, lambda layer: False) == MaskPlan.dense(3)


def test_per_layer_window_of_no_layers_keeps_both_variants():
    for answer in (True, False):
        assert MaskPlan.per_layer_window(0, 5, lambda layer, answer=answer: answer) == MaskPlan([5, None], [])


def test_per_layer_window_takes_any_truth_value():
    assert MaskPlan.per_layer_window(3, 5, lambda layer: np.bool_(layer == 1)) == MaskPlan([5, None], [1, 0, 1])
    assert MaskPlan.per_layer_window(3, 5, lambda layer: layer) == MaskPlan([5, None], [1, 0, 0])


def test_plan_refuses_a_layer_with_an_undefined_variant_and_names_both():
    with pytest.raises(ConfigError, match=r"layer 1 selects variant 1.* defines 1"):
        MaskPlan([None], [0, 1])
    with pytest.raises(ConfigError, match=r"layer 0 .*at least 0, got -1"):
        MaskPlan([None, 4], [-1])


def test_plan_refuses_no_variants():
    with pytest.raises(ConfigError, match="at least one variant"):
        MaskPlan([], [])
    with pytest.raises(ConfigError, match="at least one variant"):
        MaskPlan([], [0])


@pytest.mark.parametrize("window", [0, -1, True, False, 2.0, "4", np.bool_(True)])
def test_plan_refuses_a_window_that_is_no_count_and_names_the_variant(window):
    with pytest.raises(ConfigError, match="variant 1"):
        MaskPlan([None, window], [0, 1])
    for make in (
        lambda: MaskPlan.split_window(2, 0, window),
        lambda: MaskPlan.split_window(2, 1, window),
        lambda: MaskPlan.split_window(2, 2, window),
        lambda: MaskPlan.per_layer_window(2, window, lambda layer: False),
        lambda: MaskPlan.per_layer_window(2, window, lambda layer: True),
    ):
        with pytest.raises(ConfigError, match="window"):
            make()


@pytest.mark.parametrize("index", [True, 0.0, "0", None])
def test_plan_refuses_a_layer_variant_that_is_no_index(index):
    with pytest.raises(ConfigError, match="layer 1"):
        MaskPlan([None, 4], [0, index])


@pytest.mark.parametrize("n_layers", [-1, True, 2.0])
def test_plan_refuses_a_layer_count_that_is_none(n_layers):
    with pytest.raises(ConfigError, match="n_layers"):
        MaskPlan.dense(n_layers)
    with pytest.raises(ConfigError, match="n_layers"):
        MaskPlan.per_layer_window(n_layers, 4, lambda layer: True)
    with pytest.raises(ConfigError, match="n_layers"):
        MaskPlan.split_window(n_layers, 1, 4)
    with pytest.raises(ConfigError, match="split"):
        MaskPlan.split_window(4, n_layers, 4)


@pytest.mark.parametrize("layer", [-1, 3])
def test_plan_refuses_to_answer_for_a_layer_it_does_not_have(layer):
    plan = MaskPlan.split_window(3, 1, 4)
    with pytest.raises(ConfigError, match=f"no layer {layer}.* 3 layers"):
        plan.variant_for_layer(layer)
    with pytest.raises(ConfigError, match=f"no layer {layer}.* 3 layers"):
        plan.window_for_layer(layer)


def test_plan_is_a_frozen_value():
    plan = MaskPlan([np.int64(4), None], [np.int64(0), 1])
    assert plan.windows == (4, None)
    assert plan.per_layer == (0, 1)
    assert type(plan.windows[0]) is int
    assert type(plan.per_layer[0]) is int
    twin = MaskPlan((4, None), (0, 1))
    assert plan == twin == pickle.loads(pickle.dumps(plan))
    assert hash(plan) == hash(twin)
    assert plan != MaskPlan([5, None], [0, 1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.windows = (1,)


def test_plan_keeps_no_reference_to_the_lists_it_was_given():
    windows, per_layer = [4, None], [0, 1]
    plan = MaskPlan(windows, per_layer)
    windows[0], per_layer[0] = 9, 1
    assert plan == MaskPlan([4, None], [0, 1])


# --- What is baked ---------------------------------------------------------------------------------------------------


def test_structure_leaves_widths_out():
    assert key_of(MaskPlan([4, None], [0, 1])) == key_of(MaskPlan([400, None], [0, 1]))
    assert MaskPlan([4, None], [0, 1]).structure() == MaskPlan([400, None], [0, 1]).structure()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(MaskPlan([4, None], [1, 0]), id="assignment"),
        pytest.param(MaskPlan([4, None], [0, 1, 1]), id="layers"),
        pytest.param(MaskPlan([4, None, None], [0, 1]), id="variants"),
        pytest.param(MaskPlan([None, 4], [0, 1]), id="which variant has a window"),
        pytest.param(MaskPlan([4, 5], [0, 1]), id="whether a variant has a window"),
    ],
)
def test_structure_sees_everything_else(other):
    plan = MaskPlan([4, None], [0, 1])
    assert key_of(other) != key_of(plan)
    assert other.structure() != plan.structure()
    assert key_of(MaskPlan([4, None], [0, 1])) == key_of(plan)


def test_structure_tells_dense_from_windowed_with_one_variant_each():
    assert key_of(MaskPlan.dense(2)) != key_of(MaskPlan.split_window(2, 2, 4))
    assert key_of(MaskPlan.split_window(2, 2, 4)) == key_of(MaskPlan.split_window(2, 2, 5))

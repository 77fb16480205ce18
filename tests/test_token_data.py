"""One step's bound data: the same bytes for a build and a rebind, in buffers that stay where they are."""

import numpy as np
import pytest
import torch
from toy_backbone import new_cache, toy

from fuel_core.errors import CapacityError
from fuel_core.mask_and_rope import MaskPlan, RopePlan, RopeVariant, build_decode_mask_variants
from fuel_core.persistent_decode import InferenceContext, forward_decode_step
from fuel_core.token_data import StepSymbols, compute_decode_token_host, upload_decode_token_data

MASKS = MaskPlan([4, None, 1], [0, 1, 2, 0])
ROPES = RopePlan([RopeVariant.default(12, 100.0), RopeVariant([0.5, 0.25], scale=1.5)], [0, 1, 0, 0])
CAPACITY = 13


def step(position, seq=1, *, columns=CAPACITY, into=None, device_offset=True, dtype=torch.float32):
    ids = [(7 * position + n) % 50 for n in range(seq)]
    host = compute_decode_token_host(MASKS, ROPES, ids, position, mask_columns=columns)
    data = upload_decode_token_data(
        host,
        rope_plan=ROPES,
        n_mask_variants=MASKS.n_variants,
        dtype=dtype,
        device=torch.device("cpu"),
        device_offset=device_offset,
        mask_columns=CAPACITY,
        into=into,
    )
    return host, data


def tensors(data):
    found = {"token_ids": data.token_ids, "cos": data.cos, "sin": data.sin, "mask": data.mask}
    return found if data.offset is None else {**found, "offset": data.offset}


# --- Host and device -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq", [1, 5])
def test_every_part_has_its_documented_shape_and_dtype(seq):
    host, data = step(3, seq, dtype=torch.bfloat16)
    assert {n: (tuple(t.shape), t.dtype) for n, t in tensors(data).items()} == {
        "token_ids": ((1, seq), torch.int64),
        "cos": ((2, 1, 1, seq, 12), torch.float32),
        "sin": ((2, 1, 1, seq, 12), torch.float32),
        "mask": ((3, 1, 1, seq, CAPACITY), torch.bfloat16),
        "offset": ((1,), torch.int64),
    }
    assert host.symbols == data.symbols == StepSymbols(3, 3 + seq, (0, 0, 3))
    assert data.token_ids.tolist() == [[(21 + n) % 50 for n in range(seq)]]
    assert data.offset.tolist() == [3]
    assert step(3, seq, device_offset=False)[1].offset is None


def test_rope_views_are_cut_to_each_variants_width():
    _, data = step(3, 2)
    widths = [(cos.shape, sin.shape) for cos, sin in data.rope_views()]
    assert widths == [((1, 1, 2, 12),) * 2, ((1, 1, 2, 4),) * 2]
    cos, sin = data.rope_views()[1]
    angle = np.outer([3, 4], [0.5, 0.25, 0.5, 0.25])
    torch.testing.assert_close(cos[0, 0].double(), torch.from_numpy(1.5 * np.cos(angle)), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[0, 0].double(), torch.from_numpy(1.5 * np.sin(angle)), rtol=0, atol=1e-6)


def test_masks_are_zero_or_minus_infinity_in_the_activation_dtype():
    _, data = step(6, 2, dtype=torch.bfloat16)
    windowed, dense, own = data.mask_views()
    assert set(torch.cat((windowed, dense, own)).flatten().tolist()) == {0.0, -torch.inf}
    assert [(m[0, 0, 0] == 0).nonzero().flatten().tolist() for m in (windowed, dense, own)] == [
        [3, 4, 5, 6],
        list(range(7)),
        [6],
    ]


def test_views_follow_every_later_upload():
    _, data = step(0)
    masks, ropes = data.mask_views(), data.rope_views()
    step(9, into=data)
    _, fresh = step(9)
    assert all(map(torch.equal, masks, fresh.mask_views()))
    assert all(torch.equal(a[n], b[n]) for a, b in zip(ropes, fresh.rope_views(), strict=True) for n in (0, 1))


@pytest.mark.parametrize("position", [0, 1, 4, 11, 12])
@pytest.mark.parametrize("device_offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rebind_writes_the_bytes_of_a_build_into_the_same_buffers(position, device_offset, dtype):
    _, held = step(7, device_offset=device_offset, dtype=dtype)
    where = {n: t.data_ptr() for n, t in tensors(held).items()}
    _, returned = step(position, into=held, device_offset=device_offset, dtype=dtype)
    _, fresh = step(position, device_offset=device_offset, dtype=dtype)
    assert returned is held
    assert {n: t.data_ptr() for n, t in tensors(held).items()} == where
    assert held.symbols == fresh.symbols
    for name, tensor in tensors(fresh).items():
        assert torch.equal(tensors(held)[name], tensor), name


def test_a_mask_that_nothing_reads_is_not_computed_and_not_written():
    host, data = step(6)
    assert host.mask is not None
    before = data.mask.clone()
    host, _ = step(2, columns=None, into=data)
    assert host.mask is None
    assert torch.equal(data.mask, before)
    assert data.token_ids.tolist() == [[14]], "the rest is"
    _, fresh = step(2, columns=None)
    assert fresh.mask.shape[-1] == CAPACITY, "its buffer has the width asked for all the same"


def test_a_step_beyond_the_mask_is_refused():
    with pytest.raises(CapacityError, match="needs 14 positions"):
        step(12, 2)


# --- One source for masks and starts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [MASKS, MaskPlan.dense(2), MaskPlan([1], [0]), MaskPlan([20], [0])])
def test_window_starts_and_masks_come_from_the_same_entry(plan):
    """The first visible key of a step's first row, read off the bytes, is the start that the symbol path binds."""
    for position in range(CAPACITY):
        for seq in range(1, CAPACITY - position + 1):
            host = compute_decode_token_host(plan, ROPES, [1] * seq, position, mask_columns=CAPACITY)
            first_seen = [int(np.flatnonzero(variant[0, 0] == 0)[0]) for variant in host.mask]
            assert host.symbols.window_starts == tuple(first_seen)
            last_seen = [int(np.flatnonzero(variant[0, -1] == 0)[-1]) for variant in host.mask]
            assert set(last_seen) == {host.symbols.attended_len - 1}


# --- The one implementation on the model -----------------------------------------------------------------------------


@pytest.mark.parametrize("offset_path", ["device", "symbol"])
def test_a_held_plan_is_rewritten_in_place_to_what_a_build_there_would_bind(offset_path):
    config = {"window": 3, "windowed_layers": (1,), "rope_thetas": (100.0, 900.0)}
    model, ctx = toy(**config), InferenceContext(offset_path=offset_path)
    cache = new_cache(model, 16)
    forward_decode_step(model, [3], cache, ctx)
    bound = ctx.sessions[0].bound
    where = {n: t.data_ptr() for n, t in tensors(bound).items()}
    for i in (1, 4, 1, 5):
        forward_decode_step(model, [i], cache, ctx)
    assert {n: t.data_ptr() for n, t in tensors(bound).items()} == where
    other = new_cache(model, 16)
    forward_decode_step(model, [3, 1, 4, 1], other, InferenceContext(offset_path=offset_path))
    built_ctx = InferenceContext(offset_path=offset_path)
    forward_decode_step(model, [5], other, built_ctx)
    built = built_ctx.sessions[0].bound
    assert bound.symbols == built.symbols == StepSymbols(4, 5, (2, 0))
    for name, tensor in tensors(built).items():
        if name != "mask" or offset_path == "device":
            assert torch.equal(tensors(bound)[name], tensor), name
    if offset_path == "device":
        expected = build_decode_mask_variants(model.mask_plan, 4, 1, 16)
        assert torch.equal(bound.mask[:, 0], torch.from_numpy(expected))


@pytest.mark.parametrize(("offset_path", "uploads"), [("device", [16] * 3), ("symbol", [16, None, None])])
def test_a_plan_that_reads_no_mask_is_not_sent_one(monkeypatch, offset_path, uploads):
    from fuel_core import backbone

    asked = []
    compute = backbone.compute_decode_token_host

    def watched(*args, mask_columns, **more):
        asked.append(mask_columns)
        return compute(*args, mask_columns=mask_columns, **more)

    monkeypatch.setattr(backbone, "compute_decode_token_host", watched)
    model, ctx = toy(), InferenceContext(offset_path=offset_path, plan="recorded")
    cache = new_cache(model, 16)
    for i in (3, 1, 4):
        forward_decode_step(model, [i], cache, ctx)
    assert asked == uploads

"""The shared math against formulas written another way: complex numbers, float64, one head at a time.

Shape letters: B batch, H query heads, G kv heads, T tokens of this step, S positions of the buffer, K head_dim.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn
from toy_backbone import ToyBackbone, new_cache, toy

from fuel_core import layers
from fuel_core.errors import GeometryError, RecordingError, WeightsError
from fuel_core.kv_cache import KeyValue, Slots, StateSlot
from fuel_core.layers import attention
from fuel_core.layers.weight_formats import canonical_format
from fuel_core.mask_and_rope import MaskPlan, RopePlan, build_decode_mask_variants, build_rope_tables
from fuel_core.persistent_decode import InferenceContext, forward_decode_step, forward_with_kv_context
from fuel_core.token_data import DecodeLayerInputs


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- Rotation --------------------------------------------------------------------------------------------------------


def tables(width, start, seq, theta=100.0):
    cos, sin = build_rope_tables(RopePlan.single(theta, 1, width), start, seq)
    return torch.from_numpy(cos)[:, None], torch.from_numpy(sin)[:, None]  # [1, 1, T, R]


def turned(x, width, start, interleaved, theta=100.0):
    """x ``[B, H, T, K]`` turned by complex numbers in float64, one feature pair at a time."""
    x = x.double().numpy()
    out = x.copy()
    half = width // 2
    for t in range(x.shape[2]):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            z = (x[:, :, t, a] + 1j * x[:, :, t, b]) * np.exp(1j * (start + t) * theta ** (-2 * i / width))
            out[:, :, t, a], out[:, :, t, b] = z.real, z.imag
    return torch.from_numpy(out)


@pytest.mark.parametrize("width", [4, 12, 20])
@pytest.mark.parametrize(("rotate", "interleaved"), [(layers.rotate, False), (layers.rotate_interleaved, True)])
def test_rotation_is_a_complex_product_of_the_rotated_features(width, rotate, interleaved):
    x = random(2, 3, 5, 20)
    found = rotate(x, *tables(width, 7, 5))
    torch.testing.assert_close(found.double(), turned(x, width, 7, interleaved), rtol=0, atol=2e-6)
    assert torch.equal(found[..., width:], x[..., width:]), "features beyond the width pass through"
    assert (found.double() - turned(x, width, 7, not interleaved)).abs().max() > 0.1, "the fixture tells the two apart"


@pytest.mark.parametrize("rotate", [layers.rotate, layers.rotate_interleaved])
@pytest.mark.parametrize("width", [12, 20])
def test_rotation_computes_in_float32_and_answers_in_the_dtype_it_was_given(rotate, width):
    x = random(1, 2, 3, 20, dtype=torch.bfloat16)
    cos, sin = tables(width, 900, 3)
    found = rotate(x, cos, sin)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, rotate(x.float(), cos, sin).bfloat16())
    assert not torch.equal(found, rotate(x, cos.bfloat16(), sin.bfloat16())), "the fixture sees tables in bfloat16"


# --- Normalisation ---------------------------------------------------------------------------------------------------


def test_rms_norm_is_the_formula():
    x, weight = random(2, 3, 96), random(96, seed=1)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(layers.rms_norm(x, None, 0.1).double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(layers.rms_norm(x, weight, 0.1).double(), expected * weight, rtol=0, atol=5e-6)


def test_rms_norm_rounds_to_bfloat16_before_the_gain():
    x, weight = random(4, 96, dtype=torch.bfloat16), random(96, seed=1, dtype=torch.bfloat16)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    found = layers.rms_norm(x, weight, 1e-5)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (exact.bfloat16().double() * weight.double()).bfloat16())
    assert not torch.equal(found, (exact * weight.double()).bfloat16()), "the fixture sees rounding at the end only"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_variances_are_computed_in_float32(dtype):
    """In the activation dtype 300 squared overflows (float16), and so does a sum of squares' precision (bfloat16)."""
    x = (random(2, 96) * 30 + 300).to(dtype)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(layers.rms_norm(x, None, 1e-5).double(), expected, rtol=4e-3, atol=0)
    norm = layers.LayerNorm(96, 1e-5).to(dtype)
    norm.weight.fill_(1.0)
    norm.bias.fill_(0.0)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x).double(), expected, rtol=4e-3, atol=4e-3)


def test_rms_norm_of_float32_under_a_bfloat16_gain_stays_float32():
    x, weight = random(4, 96), random(96, seed=1, dtype=torch.bfloat16)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    found = layers.rms_norm(x, weight, 1e-5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact * weight.double(), rtol=0, atol=5e-6)


def test_rms_norm_module_uses_its_own_gain_and_eps():
    norm = layers.RMSNorm(96, 0.5)
    norm.weight.copy_(random(96, seed=1))
    x = random(2, 96)
    assert torch.equal(norm(x), layers.rms_norm(x, norm.weight, 0.5))
    assert not torch.equal(norm(x), layers.rms_norm(x, norm.weight, 1e-5))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_is_the_formula(dtype, biased):
    norm = layers.LayerNorm(96, 1e-3, bias=biased).to(dtype)
    assert sorted(norm.state_dict()) == (["bias", "weight"] if biased else ["weight"])
    norm.weight.copy_(random(96, seed=1))
    if biased:
        norm.bias.copy_(random(96, seed=2))
    x = (random(2, 3, 96) + 0.7).to(dtype)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    exact = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    exact = exact + norm.bias.double() if biased else exact
    found = norm(x)
    assert found.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=5e-6)
    else:  # gain and bias are applied before the one rounding
        assert (found == exact.bfloat16()).double().mean() > 0.99


# --- Products --------------------------------------------------------------------------------------------------------


def filled(module, seed=0):
    for n, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=seed + n).to(parameter.dtype)
    return module


@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_a_product_with_the_transposed_weight(bias):
    module = filled(layers.Linear(20, 7, bias=bias))
    x = random(2, 3, 20, seed=5)
    expected = torch.einsum("btd,ed->bte", x.double(), module.weight.double())
    expected = expected + module.bias.double() if bias else expected
    torch.testing.assert_close(module(x).double(), expected, rtol=0, atol=1e-5)
    assert (module.bias is None) is not bias


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
def test_linear_multiplies_in_the_weights_dtype_and_answers_in_that_of_its_input(weights, activations):
    module = filled(layers.Linear(20, 7, bias=True)).to(weights)
    x = random(2, 3, 20, seed=5, dtype=activations)
    found = layers.linear(x, module)
    assert found.dtype == activations
    expected = x.to(weights).double() @ module.weight.double().T + module.bias.double()
    eps = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=max(eps[weights], eps[activations]))
    assert module.weight_format.dtype == weights


def test_linear_may_mix_a_bias_of_another_dtype():
    module = filled(layers.Linear(20, 7, bias=True))
    module.weight.data = module.weight.data.bfloat16()
    found = module(random(1, 1, 20))
    assert found.dtype == torch.float32
    assert found.isfinite().all()


def test_project_gives_each_product_its_own_answer():
    x = random(1, 2, 20)
    modules = [filled(layers.Linear(20, n), seed=n) for n in (6, 3, 5)]
    for module, y in zip(modules, layers.project(x, *modules), strict=True):
        assert torch.equal(y, module(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embedding_rows_come_out_in_float32(dtype):
    module = filled(layers.Embedding(9, 4)).to(dtype)
    rows = module(torch.tensor([[8, 0, 8]]))
    assert (rows.shape, rows.dtype) == ((1, 3, 4), torch.float32)
    assert torch.equal(rows[0], module.weight.float()[[8, 0, 8]])


def test_swiglu_gates_with_silu():
    gate, up = filled(layers.Linear(12, 30), 1), filled(layers.Linear(12, 30), 2)
    down = filled(layers.Linear(30, 12), 3)
    x = random(1, 2, 12).double()
    g, u = x @ gate.weight.double().T, x @ up.weight.double().T
    expected = (g / (1 + torch.exp(-g)) * u) @ down.weight.double().T
    found = layers.swiglu(x.float(), gate, up, down)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    swapped = layers.swiglu(x.float(), up, gate, down)
    assert (swapped.double() - expected).abs().max() > 0.1


@pytest.mark.parametrize(("word", "name"), [("float32", "f32"), ("f32", "f32"), ("bfloat16", "bf16"), ("f16", "f16")])
def test_two_spellings_of_a_weight_format_are_one(word, name):
    assert canonical_format(word) == name


def test_a_weight_format_that_does_not_exist_is_refused():
    with pytest.raises(WeightsError, match=r"one of f32, bf16, f16.* expected, found 'f8'"):
        canonical_format("f8")
    with pytest.raises(WeightsError, match=r"found torch\.float64"):
        layers.Linear(2, 2).to(torch.float64)(random(1, 2))


# --- State and attention ---------------------------------------------------------------------------------------------

G, K, S = 2, 6, 11


def inputs_of(starts, seq, *, path, spec=None, window=None, state=None, dtype=torch.float32):
    """Inputs of one layer for len(starts) batch rows that stand at those positions; all of them one on "symbol"."""
    spec = spec or KeyValue(G, K)
    batch = len(starts)
    plan = MaskPlan([window], [0])
    masks = [torch.from_numpy(build_decode_mask_variants(plan, start, seq, S))[0] for start in starts]  # [1, T, S]
    if state is None:
        state = {
            slot.name: random(*slot.buffer_shape(batch, S), seed=11 + n, dtype=dtype)
            for n, slot in enumerate(spec.slots)
        }
    assert path == "device" or len(set(starts)) == 1
    return DecodeLayerInputs(
        h=torch.zeros(batch, seq, 3, dtype=dtype),
        cos=torch.zeros(batch, 1, seq, 2),
        sin=torch.zeros(batch, 1, seq, 2),
        mask=torch.stack(masks).to(dtype),
        offset=torch.tensor(starts) if path == "device" else None,
        cached_len=starts[0],
        attended_len=starts[0] + seq,
        window_start=plan.window_starts(starts[0])[0],
        state=state,
        state_spec=spec,
        layer_idx=4,
    )


def attended(q, state, start, scale, window=None, softcap=None, kv_head=None):
    """``[T, H * K]`` of one batch row in float64, head by head and query by query."""
    n_heads, seq, _ = q.shape
    kv_head = kv_head or (lambda h: h // (n_heads // G))
    rows = []
    for t in range(seq):
        seen = [j for j in range(start + t + 1) if window is None or start + t - j < window]
        heads = []
        for h in range(n_heads):
            keys, values = (state[n][kv_head(h)][seen].double() for n in "kv")
            scores = keys @ q[h, t].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            heads.append(torch.softmax(scores, 0) @ values)
        rows.append(torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("path", ["device", "symbol"])
@pytest.mark.parametrize("n_heads", [2, 4, 6])
@pytest.mark.parametrize("seq", [1, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_softmax_over_what_each_query_sees(path, n_heads, seq, window):
    inputs = inputs_of([5], seq, path=path, window=window)
    q = random(1, n_heads, seq, K, seed=3)
    found = layers.attend(inputs, q, 0.4)
    state = {n: t[0] for n, t in inputs.state.items()}
    assert found.shape == (1, seq, n_heads * K)
    torch.testing.assert_close(found[0].double(), attended(q[0], state, 5, 0.4, window), rtol=0, atol=2e-6)
    # Heads of a group are neighbours; the other reading of "grouped" gives another answer wherever there is a group.
    other = attended(q[0], state, 5, 0.4, window, kv_head=lambda h: h % G)
    assert ((found[0].double() - other).abs().max() > 0.1) == (n_heads > G)
    assert (found[0].double() - attended(q[0], state, 5, 0.5, window)).abs().max() > 1e-3, "the scale is used"


@pytest.mark.parametrize("path", ["device", "symbol"])
@pytest.mark.parametrize(
    ("score", "cap", "capped"), [(100.0, 50.0, 48.2014), (45.0, 30.0, 27.1544), (-100.0, 4.0, -4.0)]
)
def test_soft_capping_gives_the_published_numbers(path, score, cap, capped):
    """Two keys, one of that score and one of score 0: the log of their odds is the capped score, however large."""
    inputs = inputs_of([1], 1, path=path)
    for name in "kv":
        inputs.state[name].zero_()
    inputs.state["k"][0, :, 0, 0] = 1.0
    inputs.state["v"][0, :, 1, 0] = 1.0  # the output is the weight of the key whose score is 0
    q = torch.zeros(1, G, 1, K)
    q[..., 0] = 2 * score
    weight = float(layers.attend(inputs, q, 0.5, softcap=cap)[0, 0, 0])
    assert math.log1p(-weight) - math.log(weight) == pytest.approx(capped, abs=1e-4)


@pytest.mark.parametrize("path", ["device", "symbol"])
@pytest.mark.parametrize("seq", [1, 3])
def test_soft_capping_changes_scores_that_pass_the_cap(path, seq):
    inputs = inputs_of([5], seq, path=path)
    q = random(1, 4, seq, K, seed=3) * 30
    found = layers.attend(inputs, q, 1.0, softcap=5.0)[0].double()
    state = {n: t[0] for n, t in inputs.state.items()}
    torch.testing.assert_close(found, attended(q[0], state, 5, 1.0, softcap=5.0), rtol=0, atol=1e-5)
    assert (found - attended(q[0], state, 5, 1.0)).abs().max() > 0.1


@pytest.mark.parametrize(("path", "starts"), [("device", [2, 7]), ("device", [0, 8]), ("symbol", [5, 5])])
@pytest.mark.parametrize("seq", [1, 3])
@pytest.mark.parametrize("spec", [KeyValue(G, K), Slots((StateSlot("k", (G, K)), StateSlot("v", (3,))))])
def test_a_batch_of_two_is_two_of_one(path, starts, seq, spec):
    both = inputs_of(starts, seq, path=path, spec=spec)
    q = random(2, 4, seq, K, seed=3)
    written = {}
    for slot in spec.slots:
        shape = list(slot.buffer_shape(2, S))
        shape[slot.seq_axis] = seq
        written[slot.name] = random(*shape, seed=21 + len(written))
    singles = [
        inputs_of([start], seq, path=path, spec=spec, state={n: t[b : b + 1].clone() for n, t in both.state.items()})
        for b, start in enumerate(starts)
    ]
    for name, rows in written.items():
        layers.write_state(both, name, rows)
        for b, one in enumerate(singles):
            layers.write_state(one, name, rows[b : b + 1])
            assert torch.equal(both.state[name][b], one.state[name][0])
    if isinstance(spec, KeyValue):
        found = layers.attend(both, q, 0.4)
        for b, one in enumerate(singles):
            torch.testing.assert_close(found[b : b + 1], layers.attend(one, q[b : b + 1], 0.4), rtol=0, atol=1e-6)


@pytest.mark.parametrize("path", ["device", "symbol"])
@pytest.mark.parametrize("start", [0, 4, 8])
@pytest.mark.parametrize("name", ["k", "latent"])
def test_rows_are_written_at_their_positions_and_nowhere_else(path, start, name):
    spec = KeyValue(G, K) if name == "k" else Slots((StateSlot("latent", (4,)),))
    inputs = inputs_of([start], 3, path=path, spec=spec)
    before = inputs.state[name].clone()
    axis = inputs.slot(name).seq_axis
    rows = random(*before.narrow(axis, 0, 3).shape, seed=31)
    layers.write_state(inputs, name, rows)
    assert torch.equal(inputs.state[name].narrow(axis, start, 3), rows)
    kept = [i for i in range(S) if not start <= i < start + 3]
    index = torch.tensor(kept)
    assert torch.equal(inputs.state[name].index_select(axis, index), before.index_select(axis, index))


def test_rows_are_cast_to_the_caches_dtype():
    inputs = inputs_of([2], 1, path="symbol", dtype=torch.bfloat16)
    rows = random(1, G, 1, K)
    layers.write_state(inputs, "k", rows)
    assert torch.equal(inputs.state["k"][:, :, 2:3], rows.bfloat16())
    assert layers.attend(inputs, random(1, 4, 1, K), 0.4).dtype == torch.bfloat16


def test_a_rolling_slot_is_read_and_written_whole():
    spec = Slots((StateSlot("recent", (2, 5), kind="rolling"),))
    inputs = inputs_of([2], 3, path="symbol", spec=spec)
    rows = random(1, 2, 5, seed=8)
    layers.write_state(inputs, "recent", rows)
    assert torch.equal(layers.read_state(inputs, "recent"), rows)


@pytest.mark.parametrize("path", ["device", "symbol"])
@pytest.mark.parametrize("shape", [(1, G, 2, K), (1, G + 1, 1, K), (1, G, 1, K + 1), (2, G, 1, K), (G, 1, K)])
def test_rows_of_another_shape_are_refused_before_anything_is_written(path, shape):
    inputs = inputs_of([2], 1, path=path)
    before = inputs.state["k"].clone()
    with pytest.raises(GeometryError, match=r"layer 4: rows of slot 'k': expected shape \[1, 2, 1, 6\], found"):
        layers.write_state(inputs, "k", torch.zeros(shape))
    assert torch.equal(inputs.state["k"], before)


def test_a_slot_that_the_layer_does_not_keep_is_refused():
    inputs = inputs_of([2], 1, path="symbol")
    with pytest.raises(GeometryError, match=r"layer 4 keeps \['k', 'v'\], found 'latent'"):
        layers.write_state(inputs, "latent", torch.zeros(1))
    with pytest.raises(GeometryError, match="found 'latent'"):
        layers.read_state(inputs, "latent")


def test_query_heads_that_do_not_divide_are_refused():
    with pytest.raises(GeometryError, match="layer 4: 5 query heads are not a multiple of 2"):
        layers.attend(inputs_of([2], 1, path="symbol"), random(1, 5, 1, K), 1.0)


def test_only_live_rows_are_read_on_the_symbol_path():
    single, several = inputs_of([7], 1, path="symbol", window=3), inputs_of([7], 2, path="symbol", window=3)
    assert torch.equal(layers.read_state(single, "k"), single.state["k"][:, :, 5:8])
    assert layers.live_mask(single) is None, "one query sees all that was read"
    assert torch.equal(layers.read_state(several, "k"), several.state["k"][:, :, 5:9])
    assert torch.equal(layers.live_mask(several), several.mask[..., 5:9])
    device = inputs_of([7], 1, path="device", window=3)
    assert layers.read_state(device, "k") is device.state["k"]
    assert layers.live_mask(device) is device.mask


@pytest.mark.parametrize("path", ["device", "symbol"])
@pytest.mark.parametrize("window", [None, 40])
def test_long_prompts_in_query_blocks_are_the_prompt_in_one(monkeypatch, path, window):
    """300 tokens are two whole blocks of 128 and a part of one."""
    model = toy(num_hidden_layers=1, window=window)
    ids = [(7 * n + n // 5) % 67 for n in range(300)]
    ctx = InferenceContext(offset_path=path)
    blocks = []
    rows = attention._attend_rows
    monkeypatch.setattr(attention, "_attend_rows", lambda q, *rest: blocks.append(q.shape[2]) or rows(q, *rest))
    found = forward_with_kv_context(model, ids, new_cache(model, 320), ctx, all_positions=True)
    assert blocks == [128, 128, 44]
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 1000)
    whole = forward_with_kv_context(model, ids, new_cache(model, 320), ctx, all_positions=True)
    assert blocks[3:] == [300]
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)


# --- What a layer may not read ---------------------------------------------------------------------------------------


LOOKS = {
    "compares": lambda i: i.window_start == 0,
    "differs": lambda i: i.cached_len != 0,
    "branches": lambda i: bool(i.cached_len),
    "orders": lambda i: i.attended_len > 4,
    "converts": lambda i: int(i.cached_len),
    "floats": lambda i: float(i.cached_len),
    "divides": lambda i: i.attended_len / 2,
    "negates": lambda i: -i.attended_len,
    "adds": lambda i: 1 + i.cached_len,
    "slices": lambda i: i.mask[..., : i.attended_len],
    "fills": lambda i: torch.full((2,), i.cached_len),
    "narrows": lambda i: i.mask.narrow(3, i.window_start, 1),
    "hashes": lambda i: {i.cached_len: 1},
}


def looking(look):
    class Looking(ToyBackbone):
        def decode_apply_layer(self, layer_idx, inputs):
            look(inputs)
            return super().decode_apply_layer(layer_idx, inputs)

    model = Looking(toy().config)
    model.load_state_dict(toy().state_dict())
    return model


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("plan", ["auto", "off"])
def test_integers_cannot_be_read_on_the_device_path(look, plan):
    """Fresh steps refuse as well: a family that reads one would be right until its first held plan."""
    model, ctx = looking(look), InferenceContext(offset_path="device", plan=plan)
    # Handed to torch it is refused by its type, whose name says where it may not be read.
    with pytest.raises((GeometryError, RecordingError, TypeError), match=r"device-offset path|_UnreadableOnDevicePath"):
        forward_decode_step(model, [3], new_cache(model), ctx)


@pytest.mark.parametrize("name", ["compares", "differs", "branches", "orders", "floats"])
def test_looking_at_a_bound_integer_is_refused_when_it_is_recorded_on_the_symbol_path(name):
    model, cache, ctx = looking(LOOKS[name]), new_cache(toy()), InferenceContext()
    with pytest.raises(RecordingError, match=r"toy::layer 0: .*plan='off'"):
        forward_decode_step(model, [3], cache, ctx)
    assert cache.cached_len == 0
    forward_decode_step(model, [3], cache, InferenceContext(plan="off"))


def test_arithmetic_with_bound_integers_is_followed():
    def look(inputs):
        inputs.h.add_(0.0 * (inputs.attended_len - inputs.cached_len - 1))

    model, cache, ctx = looking(look), new_cache(toy()), InferenceContext()
    for i in (3, 1):
        found = forward_decode_step(model, [i], cache, ctx)
    other = new_cache(toy())
    expected = forward_with_kv_context(toy(), [3, 1], other, ctx)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert isinstance(model, nn.Module)

"""A model with a build body of its own that shares only the rebind driver, as a family off the shared path would.

Parallel block, LayerNorm with biases, GELU, partial rotary, symbol path. What is wrong with the shared build body must
not reach it; what is wrong with the shared driver must.
"""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toy_backbone import _rotated, _visible, fill, new_cache, reference, toy

from fuel_core import backbone, layers, token_data
from fuel_core.backbone import DecodeDims, PersistentDecodeModel
from fuel_core.errors import CapacityError
from fuel_core.kv_cache import KeyValue
from fuel_core.mask_and_rope import MaskPlan, RopePlan
from fuel_core.persistent_decode import (
    DecodeSession,
    Disposition,
    InferenceContext,
    SessionSlot,
    build,
    driver,
    forward_decode_step,
    rebind_and_realize_prebuilt,
    refresh_decode_session,
)
from fuel_core.persistent_decode.build import session_key
from fuel_core.plan_backends import HIDDEN, HeldPlan, Segment, SegmentBinding, record_program
from fuel_core.token_data import DecodeLayerInputs


@dataclass(frozen=True)
class ParallelConfig:
    vocab_size: int = 53
    hidden_size: int = 60
    intermediate_size: int = 130
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    head_dim: int = 14
    rotary_dim: int = 8
    rope_theta: float = 1000.0
    window: int | None = None


class ParallelLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        width = c.num_attention_heads * c.head_dim
        self.norm = layers.LayerNorm(c.hidden_size, 1e-5)
        self.qkv_proj = layers.Linear(c.hidden_size, 3 * width, bias=True)
        self.dense = layers.Linear(width, c.hidden_size, bias=True)
        self.fc1 = layers.Linear(c.hidden_size, c.intermediate_size, bias=True)
        self.fc2 = layers.Linear(c.intermediate_size, c.hidden_size, bias=True)


class ParallelModel(PersistentDecodeModel):
    """``h + attention(norm(h)) + mlp(norm(h))``, built by ``build_own_plan`` and by nothing of the core."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = layers.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(ParallelLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = layers.LayerNorm(config.hidden_size, 1e-5)
        self.lm_head = layers.Linear(config.hidden_size, config.vocab_size, bias=True)

    def decode_config(self):
        return self.config

    def decode_family(self):
        return "parallel-toy"

    def layer_state_specs(self):
        return [KeyValue(self.config.num_attention_heads, self.config.head_dim)] * self.config.num_hidden_layers

    def decode_dims(self):
        c = self.config
        return DecodeDims.of(
            self.layer_state_specs(), hidden=c.hidden_size, vocab=c.vocab_size, rope_width=c.rotary_dim
        )

    def decode_mask_plan(self):
        n, window = self.config.num_hidden_layers, self.config.window
        return MaskPlan.dense(n) if window is None else MaskPlan.split_window(n, 2, window)

    def decode_rope_plan(self):
        return RopePlan.single(self.config.rope_theta, self.config.num_hidden_layers, self.config.rotary_dim)

    def block(self, index, tensors, symbols):
        c, layer, h = self.config, self.layers[index], tensors[HIDDEN]
        spec = KeyValue(c.num_attention_heads, c.head_dim)
        inputs = DecodeLayerInputs(
            h=h,
            cos=tensors["cos"],
            sin=tensors["sin"],
            mask=tensors["mask"],
            offset=None,
            state={"k": tensors["state.k"], "v": tensors["state.v"]},
            state_spec=spec,
            layer_idx=index,
            **symbols,
        )
        x = layer.norm(h)
        q, k, v = layer.qkv_proj(x).unflatten(-1, (3, -1, c.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        layers.write_state(inputs, "k", layers.rotate(k, inputs.cos, inputs.sin))
        layers.write_state(inputs, "v", v)
        q = layers.rotate(q, inputs.cos, inputs.sin)
        attention = layer.dense(layers.attend(inputs, q, c.head_dim**-0.5))
        return h + attention + layer.fc2(F.gelu(layer.fc1(x), approximate="tanh"))


def build_own_plan(model, token_id, cache, ctx):
    """Record the model's own segments and attach them to the cache; runs nothing."""
    data = model.build_decode_token_data([token_id], cache, device_offset=False, mask_columns=cache.max_seq_len)
    (cos, sin), masks = data.rope_views()[0], data.mask_views()
    dtype = cache.dtype
    embed = Segment("embed", ("token_ids",), (), lambda t, _: model.embed_tokens(t["token_ids"]).to(dtype), {})
    names = (HIDDEN, "cos", "sin", "mask", "state.k", "state.v")
    integers = ("cached_len", "attended_len", "window_start")
    segments, bindings = [embed], [SegmentBinding({"token_ids": data.token_ids})]
    for i in range(model.config.num_hidden_layers):
        variant = model.mask_plan.variant_for_layer(i)

        def call(tensors, symbols, i=i):
            return model.block(i, tensors, symbols)

        segments.append(Segment(f"block {i}", names, integers, call, {"mask": 3, "state.k": 2, "state.v": 2}))
        state = {f"state.{name}": buffer for name, buffer in cache.layer(i).items()}
        bindings.append(SegmentBinding({"cos": cos, "sin": sin, "mask": masks[variant], **state}, variant))
    segments.append(Segment("head", (HIDDEN,), (), lambda t, _: model.lm_head(model.final_norm(t[HIDDEN])).float(), {}))
    bindings.append(SegmentBinding({}))
    examples, owned = [b.tensors for b in bindings], [*model.parameters(), *model.buffers()]
    plan = HeldPlan(record_program(segments, examples, owned, model.decode_family()), segments, bindings)
    return DecodeSession(session_key(model, cache, ctx), plan, data, cache)


def own_step(model, token_id, cache, ctx, slot):
    """A decode step of this model: its own build when nothing is held, the shared driver for every run."""
    with torch.no_grad():
        disposition = refresh_decode_session(slot, session_key(model, cache, ctx), cache, ctx)
        if slot.session is None:
            slot.session = build_own_plan(model, token_id, cache, ctx)
        return rebind_and_realize_prebuilt(model, [token_id], cache, ctx, slot.session)[0, -1], disposition


def parallel_reference(model, ids):
    """Logits ``[T, V]`` float64 of the whole sequence."""
    c, t = model.config, len(ids)

    def norm(x, module):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight.double() + module.bias.double()

    def linear(x, module):
        return x @ module.weight.double().T + module.bias.double()

    h = model.embed_tokens.weight.double()[list(ids)]
    for i, layer in enumerate(model.layers):
        x = norm(h, layer.norm)
        q, k, v = linear(x, layer.qkv_proj).view(t, 3, c.num_attention_heads, c.head_dim).unbind(1)
        q, k = (_rotated(y, c.rope_theta, c.rotary_dim, False) for y in (q, k))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(c.head_dim)
        scores = scores.masked_fill(~_visible(t, c.window if i < 2 else None), -math.inf)
        out = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v).reshape(t, -1)
        y = linear(x, layer.fc1)
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        h = h + linear(out, layer.dense) + linear(y, layer.fc2)
    return linear(norm(h, model.final_norm), model.lm_head)


def parallel(seed=0, **config):
    model = ParallelModel(ParallelConfig(**config))
    fill(model, seed)
    return model


IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
TOLERANCE = 1e-5  # of the largest logit. Genuine: 1.8e-7. Sabotaged, see below: above 0.1.


def largest_error(model, ids=IDS, cache=None, ctx=None, slot=None):
    """Largest relative error over ``ids``, decoded from an empty cache."""
    ctx, slot, cache = ctx or InferenceContext(), slot or SessionSlot(), cache or new_cache(model, 20)
    expected, worst = parallel_reference(model, ids), 0.0
    for n, i in enumerate(ids):
        logits, _ = own_step(model, i, cache, ctx, slot)
        worst = max(worst, float((logits.double() - expected[n]).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("window", [None, 4])
def test_a_model_with_its_own_build_decodes_through_the_shared_driver(window):
    model, slot, ctx = parallel(window=window), SessionSlot(), InferenceContext()
    cache = new_cache(model, len(IDS))
    assert largest_error(model, IDS, cache, ctx, slot) < TOLERANCE
    session = slot.session
    assert cache.token_ids == IDS
    assert [cache.version(i) for i in range(3)] == [len(IDS)] * 3
    assert {"cached_len", "attended_len", "window_start"} <= session.reads
    assert "mask" not in session.reads, "the symbol path reads the live prefix"
    with pytest.raises(CapacityError, match=r"parallel-toy::forward_with_kv_context_persistent: .*capacity 14"):
        own_step(model, 1, cache, ctx, slot)
    assert cache.token_ids == IDS
    cache.truncate_to(0)
    assert largest_error(model, IDS, cache, ctx, slot) < TOLERANCE
    assert slot.session is session


def test_its_window_is_one_that_the_tolerance_sees():
    model = parallel(window=4)
    dense = parallel()
    dense.load_state_dict(model.state_dict())
    expected = parallel_reference(model, IDS)
    assert float((parallel_reference(dense, IDS) - expected).abs().max() / expected.abs().max()) > 0.1


def test_its_session_is_refreshed_and_repointed_like_any_other():
    model, slot, ctx = parallel(), SessionSlot(), InferenceContext()
    one, other = new_cache(model, 20), new_cache(model, 20)
    seen = [own_step(model, i, cache, ctx, slot)[1] for i, cache in ((3, one), (1, one), (3, other), (1, one))]
    assert seen == [Disposition.ABSENT, Disposition.KEPT, Disposition.REBOUND, Disposition.REBOUND]
    logits, _ = own_step(model, 1, other, ctx, slot)
    expected = parallel_reference(model, [3, 1])
    assert (logits - expected[-1]).abs().max() < TOLERANCE * expected.abs().max()
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight, requires_grad=False)
    assert own_step(model, 4, other, ctx, slot)[1] is Disposition.DROPPED
    twin = parallel()
    assert own_step(twin, 4, new_cache(twin, 20), ctx, slot)[1] is Disposition.DROPPED


# --- What reaches whom -----------------------------------------------------------------------------------------------


def shared_error():
    """Largest error of a toy on the shared path over three steps, relative to its largest logit."""
    model, ctx = toy(), InferenceContext()
    cache, expected = new_cache(model), reference(toy(), [3, 1, 4])
    worst = 0.0
    for n, i in enumerate((3, 1, 4)):
        logits = forward_decode_step(model, [i], cache, ctx)
        worst = max(worst, float((logits.double() - expected[n]).abs().max() / expected.abs().max()))
    return worst


def swapped(function):
    """Swap cos and sin in what the shared build body binds."""

    def sabotaged(model, segments, data, cache):
        bindings = function(model, segments, data, cache)
        for binding in bindings:
            if "cos" in binding.tensors:
                binding.tensors["cos"], binding.tensors["sin"] = binding.tensors["sin"], binding.tensors["cos"]
        return bindings

    return sabotaged


def test_a_fault_in_the_shared_build_body_does_not_reach_it(monkeypatch):
    monkeypatch.setattr(build, "bind_segments", swapped(build.bind_segments))
    assert shared_error() > 0.1
    assert largest_error(parallel()) < TOLERANCE


@pytest.mark.parametrize("name", ["build_decode_graph", "decode_segments", "bind_segments", "run_segments", "_program"])
def test_it_calls_nothing_of_the_shared_build_body(monkeypatch, name):
    def gone(*_, **__):
        raise AssertionError(f"{name} is the shared path's")

    monkeypatch.setattr(build, name, gone)
    assert largest_error(parallel()) < TOLERANCE


def test_a_fault_in_the_shared_driver_reaches_both(monkeypatch):
    """Without the cache advance every step overwrites position 0."""

    class Forgetful:
        def __init__(self, cache):
            self.cache = cache

        def __getattr__(self, name):
            return getattr(self.cache, name)

        def advance(self, token_ids, filled_by=None, regime=None):
            pass

    run = driver.rebind_and_realize_prebuilt

    def sabotaged(model, token_ids, cache, ctx, session, *more):
        return run(model, token_ids, Forgetful(cache), ctx, session, *more)

    monkeypatch.setattr("fuel_core.persistent_decode.entry.rebind_and_realize_prebuilt", sabotaged)
    monkeypatch.setitem(globals(), "rebind_and_realize_prebuilt", sabotaged)
    assert shared_error() > 0.1
    assert largest_error(parallel()) > 0.1


def test_a_fault_in_the_shared_token_data_reaches_both(monkeypatch):
    compute = token_data.compute_decode_token_host

    def late(*args, **more):
        host = compute(*args, **more)
        cos, sin = host.rope_sin.copy(), host.rope_cos.copy()
        return type(host)(host.token_ids, cos, sin, host.mask, host.symbols)

    monkeypatch.setattr(backbone, "compute_decode_token_host", late)
    assert shared_error() > 0.1
    assert largest_error(parallel()) > 0.1

"""What a recording holds: every position's step, nothing that grew, and no layer that it cannot follow."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_backbone import (
    LatentBackbone,
    ToyBackbone,
    ToyConfig,
    fill,
    latent_reference,
    latent_toy,
    new_cache,
    reference,
    toy,
)

from fuel_core import layers
from fuel_core.backbone import DecodeBackbone, DecodeLayerInputs
from fuel_core.errors import DecodeError, RecordingError
from fuel_core.persistent_decode import InferenceContext, Reason, forward_decode_step
from fuel_core.plan_backends import Recording, recording, recordings_made

# As in test_footguns: genuine 2e-5 at logits of about 5.
TOLERANCE = 2e-4
VIEWS = ("slice", "select", "view", "narrow", "reshape", "expand", "index", "unsqueeze", "squeeze")

TOYS: dict[str, Callable[[], DecodeBackbone]] = {
    "plain": toy,
    "windowed": lambda: toy(window=4, windowed_layers=(0, 2)),
    "two bases": lambda: toy(rope_thetas=(1e4, 1e6)),
    "interleaved partial": lambda: toy(interleaved=True, rotary_dim=12),
    "partial": lambda: toy(rotary_dim=12),
    "latent": latent_toy,
    "rolling": lambda: latent_toy(rolling=True, window=4),
    "scaled": lambda: toy(embed_scale=9.798),
    "softcap": lambda: toy(softcap=20.0),
    "everything": lambda: toy(
        window=4, windowed_layers=(0, 2), rope_thetas=(1e4, 1e6), rotary_dim=12, embed_scale=9.798, softcap=20.0
    ),
    "one head": lambda: toy(num_attention_heads=1, num_key_value_heads=1),
}


@pytest.fixture(params=["symbol", "device"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget every shared recording of the process, for this test; call it to forget again."""

    def forget() -> None:
        monkeypatch.setattr(recording, "_shared", recording._Shared())

    forget()
    return forget


def hold(
    model: DecodeBackbone, path: str, prompt: list[int] | None = None, capacity: int = 32, token: int = 1
) -> tuple[Any, InferenceContext]:
    """Build a plan; returns the held session and its context."""
    cache, ctx = new_cache(model, capacity), InferenceContext("cpu", offset_path=path)
    if prompt:
        forward_decode_step(model, prompt, cache, ctx)
    forward_decode_step(model, [token], cache, ctx)
    return ctx.sessions[0], ctx


def recordings(session: Any) -> list[Recording]:
    return [segment.recording for segment in session.plan.program.segments]


def oracle(model: DecodeBackbone, ids: list[int]) -> Tensor:
    found = latent_reference(model, ids) if isinstance(model, LatentBackbone) else reference(model, ids)  # type: ignore[arg-type]
    return found[-1]


# -- the same recording wherever it is taken -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["windowed", "interleaved partial", "rolling", "everything"])
def test_a_recording_taken_elsewhere_is_the_same(
    name: str, path: str, nothing_recorded: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At another live position, length and token, and at other synthetic ones: no argument may have changed."""
    model = TOYS[name]()
    first, _ = hold(model, path)
    nothing_recorded()
    model._programs.clear()
    monkeypatch.setattr(recording, "_RECORD_AT", {"cached_len": 17, "attended_len": 18, "window_start": 5})
    monkeypatch.setattr(recording, "_RECORD_CAPACITY", 40)
    second, _ = hold(model, path, prompt=list(range(10, 30)), capacity=21, token=60)
    assert all(a is not b for a, b in zip(recordings(first), recordings(second), strict=True)), "really taken again"
    for a, b in zip(recordings(first), recordings(second), strict=True):
        assert str(a.graph_module.graph) == str(b.graph_module.graph)
        assert (a.fingerprint, a.ops, a.reads) == (b.fingerprint, b.ops, b.reads)


@pytest.mark.parametrize("name", TOYS)
def test_a_recording_serves_every_position_from_one_to_the_last(name: str, path: str) -> None:
    model = TOYS[name]()
    cache, ctx = new_cache(model, 12), InferenceContext("cpu", offset_path=path)
    for i in range(12):
        logits = forward_decode_step(model, [(7 * i) % 67], cache, ctx)
        expected = oracle(model, cache.token_ids)
        assert (logits - expected).abs().max() < TOLERANCE * max(1.0, expected.abs().max().item() / 5)
    assert (ctx.stats.plans_built, ctx.stats.rebinds) == (1, 11)


# -- nothing extra ---------------------------------------------------------------------------------------------------

# The toy's down projection is 136 wide, and the kernels want a multiple of 16.
PRODUCT = {"torch": "aten.linear.default", "native": "fuel.product.default"}
HEADS = ["aten.view.default", "aten.transpose.int"]
ROTATE = [
    "aten.chunk.default", "getitem", "getitem", "aten.mul.Tensor", "aten.neg.default", "aten.cat.default",
    "aten.mul.Tensor", "aten.add.Tensor",
]  # fmt: skip
WRITE = {
    "symbol": ["aten.narrow.default", "aten.copy_.default"],
    "device": [
        "aten.unsqueeze.default", "aten.arange.default", "aten.add.Tensor", "aten.flatten.using_ints",
        "aten.index_copy_.default",
    ],
}  # fmt: skip
READ = {"symbol": ["sub", "aten.narrow.default", "aten.narrow.default"], "device": []}
MASKED = {"symbol": [], "device": ["aten.add.Tensor"]}


# One query on the symbol path needs no mask; then a kernel does the whole of attention.
ATTEND = ["fuel.attend_one.default", "aten.view.default"]


def attend_ops(path: str, kernels: str) -> list[str]:
    if kernels == "native" and path == "symbol":
        return ATTEND
    return [
        "aten.reshape.default", "aten.transpose.int", "aten.matmul.default", "aten.mul.Tensor", *MASKED[path],
        "aten.softmax.int", "aten.matmul.default", "aten.view.default", "aten.transpose.int", "aten.reshape.default",
    ]  # fmt: skip


def layer_ops(path: str, kernels: str) -> tuple[str, ...]:
    product, linear = PRODUCT[kernels], PRODUCT["torch"]
    if kernels == "native":  # the products of one input are one op
        split = ["aten.split_with_sizes.default", "getitem", "getitem"]
        qkv = ["fuel.product3.default", *split, "getitem", *["aten.add.Tensor"] * 3]
        gate_up = ["fuel.product2.default", *split]
    else:
        qkv, gate_up = [linear] * 3, [linear] * 2
    return (
        "aten.rms_norm.default", *qkv, *HEADS * 3, *ROTATE, *WRITE[path], *WRITE[path], *ROTATE, *READ[path],
        *attend_ops(path, kernels), product, "aten.add.Tensor",
        "aten.rms_norm.default", *gate_up, "aten.silu.default", "aten.mul.Tensor", linear, "aten.add.Tensor",
    )  # fmt: skip


def test_the_plain_step_is_exactly_these_ops(path: str, kernels: str) -> None:
    session, _ = hold(toy(head_dim=24, rotary_dim=24), path)
    embed, *each, head = recordings(session)
    assert embed.ops == ("aten.embedding.default",)
    for layer in each:
        assert layer.ops == layer_ops(path, kernels)
    assert head.ops == ("aten.rms_norm.default", PRODUCT[kernels])
    assert session.ops == (*embed.ops, *layer_ops(path, kernels) * 3, *head.ops)


def test_a_scale_is_one_op_and_none_is_no_op(path: str) -> None:
    plain, _ = hold(toy(), path)
    scaled, _ = hold(toy(embed_scale=9.798), path)
    assert recordings(plain)[0].ops == ("aten.embedding.default",)
    assert recordings(scaled)[0].ops == ("aten.embedding.default", "aten.mul.Tensor")
    assert recordings(plain)[1:] == recordings(scaled)[1:]


def test_a_softcap_is_three_ops_where_asked_for(path: str, kernels: str) -> None:
    plain, _ = hold(toy(head_dim=24, rotary_dim=24), path)
    capped, _ = hold(toy(head_dim=24, rotary_dim=24, softcap=20.0), path)
    more = list(recordings(capped)[1].ops)
    for op in recordings(plain)[1].ops:
        more.remove(op)
    inside = kernels == "native" and path == "symbol"
    assert sorted(more) == ([] if inside else ["aten.div.Tensor", "aten.mul.Tensor", "aten.tanh.default"])


@pytest.mark.parametrize("name", [n for n in TOYS if n != "interleaved partial"])
def test_mask_and_tables_are_read_by_arithmetic_alone(name: str, path: str) -> None:
    for layer in recordings(hold(TOYS[name](), path)[0])[1:-1]:
        for table in ("cos", "sin", "mask"):
            users = layer.users_of(table)
            assert not [op for op in users if any(view in op for view in VIEWS)]
            assert bool(users) == (table != "mask" or path == "device")


def test_interleaved_rotation_reads_half_a_table_whatever_the_plan(path: str) -> None:
    one, _ = hold(toy(interleaved=True, rotary_dim=12), path)
    two, _ = hold(toy(interleaved=True, rotary_dim=12, rope_thetas=(1e4, 1e6)), path)
    assert recordings(one) == recordings(two)
    assert recordings(one)[1].users_of("cos") == ("aten.slice.Tensor",) * 2


@pytest.mark.parametrize(
    "changes", [{"window": 4}, {"window": 4, "windowed_layers": (1,)}, {"rope_thetas": (1e4, 9.0)}]
)
def test_windows_and_bases_add_nothing_to_a_layer(changes: dict[str, Any], path: str) -> None:
    """Windowed and dense layers, and layers of either base, are one recording."""
    plain, varied = hold(toy(), path)[0], hold(toy(**changes), path)[0]
    assert recordings(plain) == recordings(varied)


# -- what is read ------------------------------------------------------------------------------------------------------


def test_reads_names_the_bound_inputs_of_the_path() -> None:
    always = {"token_ids", "cos", "sin", "h", "state.k", "state.v"}
    symbol, device = hold(toy(), "symbol")[0], hold(toy(), "device")[0]
    assert symbol.reads == always | {"cached_len", "attended_len", "window_start"}
    assert device.reads == always | {"mask", "offset"}


@pytest.mark.parametrize(
    ("at", "name"),
    [(p, n) for p in ("symbol", "device") for n in ("token_ids", "cos", "sin", "mask", "offset", "lengths")],
)
def test_what_is_said_to_be_read_decides_the_logits_and_what_is_not_does_not(at: str, name: str) -> None:
    session, ctx = hold(toy(window=3), at, prompt=[1, 2, 3, 4, 5])
    bound = session.bound

    def run() -> Tensor:
        return session.plan.run(bound.symbols).clone()

    first = run()
    assert torch.equal(first, run())
    if name == "lengths":
        bound.symbols = type(bound.symbols)(4, 5, tuple(1 for _ in bound.symbols.window_starts))
    else:
        tensor = getattr(bound, name)
        if tensor is None:
            assert name not in session.reads
            return
        # 4: another token, and a position inside the window that another token's row stands in.
        tensor.fill_(4) if not tensor.is_floating_point() else tensor.copy_(torch.randn(tensor.shape))
    reads = "cached_len" if name == "lengths" else name
    assert torch.equal(first, run()) == (reads not in session.reads)
    assert ctx.stats.plans_built == 1


# -- what is shared --------------------------------------------------------------------------------------------------


def test_layers_of_one_structure_and_instances_share_one_recording(path: str, nothing_recorded: object) -> None:
    first, ctx = hold(toy(seed=1), path)
    embed, *each, head = recordings(first)
    assert len({id(r) for r in each}) == 1
    assert ctx.stats.recordings == recordings_made() == 3
    second, ctx = hold(toy(seed=2), path)
    assert [id(r) for r in recordings(second)] == [id(r) for r in (embed, *each, head)]
    assert (ctx.stats.recordings, recordings_made()) == (0, 3)
    assert second.plan is not first.plan
    deeper, ctx = hold(toy(seed=2, num_hidden_layers=5), path)
    assert {id(r) for r in recordings(deeper)} == {id(r) for r in recordings(first)}
    assert ctx.stats.recordings == 0


def test_each_instance_keeps_its_own_weights_under_a_shared_recording(path: str) -> None:
    for seed in (1, 2):
        model = toy(seed=seed)
        session, _ = hold(model, path)
        held = {id(w) for segment in session.plan.program.segments for w in segment.weights}
        assert held == {id(p) for p in model.parameters()}


@pytest.mark.parametrize(
    "changes",
    [{"softcap": 20.0}, {"rms_norm_eps": 1e-6}, {"head_dim": 22, "rotary_dim": 22}, {"attention_bias": False}],
)
def test_structures_that_differ_do_not_share(changes: dict[str, Any], path: str) -> None:
    one, other = hold(toy(), path)[0], hold(toy(**changes), path)[0]
    assert recordings(one)[1] is not recordings(other)[1]


# -- layers that a recording cannot follow ---------------------------------------------------------------------------


class Variant(ToyBackbone):
    """The toy with one thing done to each layer's output."""

    def __init__(self, change: Callable[[Variant, Tensor, DecodeLayerInputs], Tensor]) -> None:
        super().__init__(ToyConfig(num_hidden_layers=2))
        fill(self)
        self.change = change
        self.register_buffer("table", torch.linspace(0.5, 1.5, 300), persistent=False)

    def decode_apply_layer(self, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
        return self.change(self, super().decode_apply_layer(layer_idx, inputs), inputs)


LOOSE = torch.linspace(0.5, 1.5, 96)
LOOSE_SCALAR = torch.tensor(0.5)

REFUSED: dict[str, Callable[[Variant, Tensor, DecodeLayerInputs], Tensor]] = {
    "branch": lambda m, h, i: h * 2 if i.cached_len > 3 else h,
    "branch on a sum": lambda m, h, i: h * 2 if i.attended_len - i.window_start >= 7 else h,
    "branch on half": lambda m, h, i: h * 2 if 0.5 * i.cached_len > 2 else h,
    "branch through index": lambda m, h, i: h * 2 if len(range(i.cached_len)) > 3 else h,
    "branch on a log": lambda m, h, i: h * 2 if math.log(i.attended_len) > 1 else h,
    "branch on a live shape": lambda m, h, i: h * 2 if layers.read_state(i, "k").shape[2] > 3 else h,
    "min of a live shape": lambda m, h, i: h * min(layers.read_state(i, "k").shape[2], 3),
    "capacity": lambda m, h, i: h * 2 if i.state["k"].shape[2] > 100 else h,
    "int": lambda m, h, i: h * int(i.cached_len),
    "float": lambda m, h, i: h * float(i.cached_len),
    "tensor of a length": lambda m, h, i: h * torch.tensor(i.cached_len),
    "list index": lambda m, h, i: h * ([0.5, 0.7] * 200)[i.cached_len],
    "a table row by index": lambda m, h, i: h * m.table[i.cached_len],
    "truth": lambda m, h, i: h * 2 if i.window_start else h,
    "branch on a value": lambda m, h, i: h * 2 if bool((h.sum() > 0).item()) else h,
    "loose tensor": lambda m, h, i: h * LOOSE,
    "small loose tensor": lambda m, h, i: h * LOOSE_SCALAR,
    "a counter of its own": lambda m, h, i: h * next(m.counter),
}  # fmt: skip

FOLLOWED: dict[str, Callable[[Variant, Tensor, DecodeLayerInputs], Tensor]] = {
    "arithmetic": lambda m, h, i: h * (i.attended_len - i.window_start),
    "length first": lambda m, h, i: i.attended_len * h,
    "half a length": lambda m, h, i: h * (0.5 * i.attended_len),
    "a table slice": lambda m, h, i: h * m.table[: i.attended_len].sum(),
    "a narrowed table": lambda m, h, i: h * m.table.narrow(0, i.cached_len, 1),
    "arange over a length": lambda m, h, i: h + torch.arange(i.attended_len).sum() * 0.01,
    "full of a length": lambda m, h, i: h + torch.full((1,), i.attended_len) * 0.01,
    "the mean over what lives": lambda m, h, i: h + layers.read_state(i, "k").mean(),
    "division by a live shape": lambda m, h, i: h / layers.read_state(i, "k").shape[2],
    "a literal": lambda m, h, i: h * torch.tensor(0.5) + torch.tensor([0.25] * 64).sum(),
    "infinities": lambda m, h, i: torch.where(h > 0, h, float("-inf")).clamp(min=-3.0),
    "a step of several": lambda m, h, i: h * (1.0 if i.seq_len > 1 else 1),
    "routing": lambda m, h, i: h * m.table.select(0, h.argmax().item() % 300),
    "a data-dependent gather": lambda m, h, i: h * m.table[(h[0, -1].argmax() % 300).view(1)],
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_layer_that_a_plan_cannot_follow_is_refused_and_runs_without_one(what: str) -> None:
    """Also where a layer that differs only by what is refused was recorded before and could lend its recording."""
    hold(Variant(lambda m, h, i: h), "symbol")
    hold(Variant(lambda m, h, i: h * 2), "symbol")
    model = Variant(REFUSED[what])
    model.counter = iter(range(1, 10_000))
    cache, ctx = new_cache(model), InferenceContext("cpu")
    if what not in ("tensor of a length",):
        forward_decode_step(model, [1, 2], cache, ctx)
    before = cache.token_ids
    with pytest.raises(RecordingError, match=r"toy::layer 0.*") as refusal:
        forward_decode_step(model, [3], cache, ctx)
    assert "\n" not in str(refusal.value)
    assert cache.token_ids == before
    assert not ctx.sessions
    forward_decode_step(model, [3], cache, InferenceContext("cpu", plan="off"))


@pytest.mark.parametrize("what", FOLLOWED)
def test_a_layer_that_a_plan_can_follow_is_followed(what: str) -> None:
    hold(Variant(lambda m, h, i: h), "symbol")
    model = Variant(FOLLOWED[what])
    held, off = InferenceContext("cpu"), InferenceContext("cpu", plan="off")
    caches = [new_cache(model) for _ in range(2)]
    for ids in ([1], [2], [3, 4, 5], *([i] for i in range(6, 26))):
        found, expected = (forward_decode_step(model, ids, c, x) for c, x in zip(caches, (held, off), strict=True))
        assert torch.isfinite(expected).all()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert (held.stats.plans_built, held.stats.rebinds) == (1, 21)


def test_layers_that_route_differently_share_a_recording(nothing_recorded: object) -> None:
    session, ctx = hold(Variant(FOLLOWED["routing"]), "symbol")
    assert len({id(r) for r in recordings(session)[1:-1]}) == 1
    assert ctx.stats.recordings == 3


def test_integers_are_refused_on_the_device_offset_path() -> None:
    for change in ("branch", "int", "float"):
        model = Variant(REFUSED[change])
        ctx, cache = InferenceContext("cpu", offset_path="device"), new_cache(model)
        for ids in ([1, 2], [1]):
            with pytest.raises(DecodeError):
                forward_decode_step(model, ids, cache, ctx)
    model = Variant(FOLLOWED["arithmetic"])
    with pytest.raises(DecodeError, match="device-offset"):
        forward_decode_step(model, [1], new_cache(model), InferenceContext("cpu", offset_path="device"))


# -- a plan that is no longer what was built -------------------------------------------------------------------------


def test_a_rewritten_recording_costs_one_fresh_token_and_a_rebuild(path: str, nothing_recorded: object) -> None:
    model = toy()
    cache, ctx = new_cache(model), InferenceContext("cpu", offset_path=path)
    for i in range(3):
        forward_decode_step(model, [i], cache, ctx)

    def negate(graph: torch.fx.Graph) -> None:
        output = next(iter(reversed(graph.nodes)))
        with graph.inserting_before(output):
            output.args = (graph.call_function(torch.ops.aten.neg.default, output.args),)

    rewritten = recordings(ctx.sessions[0])[-1]
    before = rewritten.fingerprint
    rewritten.rewrite(negate)
    assert rewritten.fingerprint != before
    seen = []
    for i in range(4, 8):
        logits = forward_decode_step(model, [i], cache, ctx)
        assert (logits - reference(model, cache.token_ids)[-1]).abs().max() < TOLERANCE
        seen.append((ctx.stats.fresh_steps, ctx.stats.plans_built, ctx.stats.rebinds))
    assert seen == [(1, 1, 2), (1, 2, 2), (1, 2, 3), (1, 2, 4)]
    assert ctx.stats.replans == {Reason.TOPOLOGY_CHANGED.value: 1}
    assert any(event.reason is Reason.TOPOLOGY_CHANGED for event in ctx.plan_events)


# -- memory ------------------------------------------------------------------------------------------------------------


def live() -> tuple[int, int]:
    """Tensors that are alive, and the bytes of their distinct storages."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and type(o) in (Tensor, nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu"}
    return len(tensors), sum(storages.values())


def test_two_hundred_steps_leave_nothing_behind(path: str) -> None:
    model = toy(window=5, windowed_layers=(1,))
    cache, ctx = new_cache(model, 256), InferenceContext("cpu", offset_path=path)
    for i in range(5):
        forward_decode_step(model, [i], cache, ctx)
    before, made, events = live(), recordings_made(), len(ctx.plan_events)
    objects = len(gc.get_objects())
    for i in range(200):
        forward_decode_step(model, [i % 67], cache, ctx)
    assert live() == before
    assert len(gc.get_objects()) - objects < 50
    assert (recordings_made(), len(ctx.plan_events), len(ctx.sessions)) == (made, events, 1)


def test_a_model_that_is_gone_takes_its_weights_along(path: str) -> None:
    hold(toy(), path)
    before = live()
    for seed in range(3):
        hold(toy(seed=seed), path)
    assert live() == before

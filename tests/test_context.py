"""The context: what it remembers of every decision, how many plans it holds, and what it refuses."""

import threading
from functools import partial

import pytest
import torch
from toy_backbone import latent_toy, new_cache, reference, toy

from fuel_core.decode_shape import Difference
from fuel_core.errors import BackendUnavailableError, CapacityError, DecodeError, GeometryError
from fuel_core.persistent_decode import (
    Disposition,
    InferenceContext,
    PlanEvent,
    Reason,
    SessionSlot,
    forward_decode_step,
    forward_with_kv_context,
    forward_with_kv_context_persistent,
)


def decode(model, cache, ctx, ids):
    for i in ids:
        logits = forward_decode_step(model, [i], cache, ctx)
    return logits.double()


def told(ctx):
    return [(event.disposition.name, event.reason.value, event.step, event.count) for event in ctx.plan_events]


# --- Events ----------------------------------------------------------------------------------------------------------


def test_one_generation_reads_as_prompt_build_and_one_run_of_rebinds():
    model, ctx = toy(), InferenceContext()
    cache = new_cache(model)
    forward_decode_step(model, [3, 1, 4], cache, ctx)
    decode(model, cache, ctx, [1, 5, 9, 2])
    assert [str(event) for event in ctx.plan_events] == [
        "step 1 ABSENT (multi_token)",
        "step 2 ABSENT (first_step)",
        "steps 3..5 KEPT (unchanged)",
    ]


def test_an_event_says_which_component_differed_in_one_line():
    event = PlanEvent(7, Disposition.DROPPED, Reason.CAPACITY, "max_seq_len", 32, 64)
    assert str(event) == "step 7 DROPPED (capacity): max_seq_len 32 -> 64"
    assert str(PlanEvent(7, Disposition.KEPT, Reason.UNCHANGED, count=3)) == "steps 7..9 KEPT (unchanged)"


def test_equal_decisions_are_one_event_only_where_the_steps_are_consecutive():
    model, ctx = toy(), InferenceContext()
    cache = new_cache(model)
    decode(model, cache, ctx, [3, 1])
    forward_with_kv_context(model, [4], cache, ctx)  # step 3: fresh, and nothing to decide
    decode(model, cache, ctx, [1, 5])
    assert told(ctx) == [
        ("ABSENT", "first_step", 1, 1),
        ("KEPT", "unchanged", 2, 1),
        ("KEPT", "unchanged", 4, 2),
    ]


def test_decisions_that_differ_in_any_part_are_events_of_their_own():
    ctx = InferenceContext()
    for step, (reason, difference) in enumerate(
        [
            (Reason.UNCHANGED, None),
            (Reason.STRUCTURE, None),
            (Reason.STRUCTURE, Difference("a", 1, 2)),
            (Reason.STRUCTURE, Difference("b", 1, 2)),
            (Reason.STRUCTURE, Difference("b", 3, 2)),
            (Reason.STRUCTURE, Difference("b", 3, 4)),
        ]
    ):
        ctx.step = step
        ctx.record(Disposition.KEPT, reason, difference)
    ctx.step += 1
    ctx.record(Disposition.DROPPED, Reason.STRUCTURE, Difference("b", 3, 4))
    assert len(ctx.plan_events) == 7
    ctx.step += 1
    ctx.record(Disposition.DROPPED, Reason.STRUCTURE, Difference("b", 3, 4))
    assert len(ctx.plan_events) == 7


def test_the_last_64_events_are_kept():
    ctx = InferenceContext()
    for step in range(1, 101):
        ctx.step = step
        ctx.record(Disposition.ABSENT, Reason.STRUCTURE, Difference("x", step, 0))
    assert len(ctx.plan_events) == 64
    assert (ctx.plan_events[0].step, ctx.plan_events[-1].step) == (37, 100)


@pytest.mark.parametrize("how", ["environment", "attribute"])
def test_decisions_are_printed_to_stderr_when_asked_for(capsys, monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv("FUEL_LOG", "other,plan")
    model, ctx = toy(), InferenceContext()
    if how == "attribute":
        ctx.explain_plan = True
    decode(model, new_cache(model), ctx, [3, 1, 4])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["fuel plan: step 1 ABSENT (first_step)", "fuel plan: step 2 KEPT (unchanged)"]


@pytest.mark.parametrize("value", [None, "", "plans", "other"])
def test_decisions_are_not_printed_unless_asked_for(capsys, monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("FUEL_LOG", value)
    model, ctx = toy(), InferenceContext()
    decode(model, new_cache(model), ctx, [3, 1])
    assert capsys.readouterr() == ("", "")


# --- Counters --------------------------------------------------------------------------------------------------------


def test_counters_add_up_over_a_mixed_conversation():
    """rebinds = decode steps - plans built - fresh single-token steps; every forward call is counted once."""
    model, ctx = toy(), InferenceContext()
    cache = new_cache(model, 64)
    calls = 0
    for chunk in ([3, 1, 4], [1], [5], [9, 2], [6], [5], [3], [5, 8, 9], [7]):
        forward_decode_step(model, chunk, cache, ctx)
        calls += 1
    forward_with_kv_context(model, [9], cache, ctx)
    calls += 1
    decode(model, new_cache(model), ctx, [3, 1])
    calls += 2
    stats, fresh_single, several = ctx.stats, 1, 3
    assert (stats.decode_steps, stats.plans_built, stats.rebinds) == (9, 2, 6)
    assert stats.rebinds == stats.decode_steps - stats.plans_built - fresh_single
    assert stats.fresh_steps == several + fresh_single
    assert calls == stats.fresh_steps + stats.plans_built + stats.rebinds == ctx.step
    assert stats.prompt_tokens == 8
    assert stats.replans == {"capacity": 1}


def test_a_context_without_plans_counts_fresh_steps_only():
    model, ctx = toy(), InferenceContext(plan="off")
    decode(model, new_cache(model), ctx, [3, 1, 4])
    assert (ctx.stats.fresh_steps, ctx.stats.plans_built, ctx.stats.rebinds) == (3, 0, 0)
    assert told(ctx) == [("ABSENT", "plan_off", 1, 3)]
    assert ctx.sessions == ()
    assert ctx.stats.plan_backend == "off"


def test_recordings_are_counted_only_where_one_was_taken():
    """hidden_size 100 is this test's own: recordings are shared by the whole process."""
    ctx = InferenceContext()
    model = toy(hidden_size=100)
    decode(model, new_cache(model), ctx, [3, 1])
    assert ctx.stats.recordings == 3, "embedding, one layer for all three, head"
    twin = toy(seed=1, hidden_size=100)
    decode(twin, new_cache(twin), ctx, [3, 1])
    assert (ctx.stats.recordings, ctx.stats.plans_built) == (3, 2)


def test_published_counters_are_ready_for_json_and_a_copy_stands_still():
    model, ctx = toy(), InferenceContext()
    before = ctx.stats.copy()
    decode(model, new_cache(model), ctx, [3, 1, 4])
    decode(model, new_cache(model, 48), ctx, [3])
    assert (before.plans_built, before.replans) == (0, {})
    published = ctx.stats.as_dict()
    assert published["plans_built"] == 2
    assert published["rebinds"] == 2
    assert published["replans"] == {"capacity": 1}
    assert published["replans"] is not ctx.stats.replans
    assert published["plan_backend"] == "recorded"
    assert published["decode_ms_per_token"] == pytest.approx(ctx.stats.decode_ms / 4, abs=1e-3)
    assert InferenceContext().stats.decode_ms_per_token == 0.0


# --- Held sessions ---------------------------------------------------------------------------------------------------


def test_alternating_models_build_once_each():
    models = [toy(seed=0), toy(seed=1), latent_toy()]
    caches = [new_cache(m) for m in models]
    ctx = InferenceContext()
    for i in (3, 1, 4, 1):
        for model, cache in zip(models, caches, strict=True):
            forward_decode_step(model, [i], cache, ctx)
    assert (ctx.stats.plans_built, ctx.stats.rebinds) == (3, 9)


def test_alternating_caches_of_different_capacity_build_once_each():
    model, ctx = toy(), InferenceContext()
    small, large = new_cache(model, 16), new_cache(model, 40)
    for i in (3, 1, 4):
        forward_decode_step(model, [i], small, ctx)
        forward_decode_step(model, [i], large, ctx)
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.rebound_kv) == (2, 4, 0)


@pytest.mark.parametrize("offset_path", ["device", "symbol"])
def test_alternating_caches_of_one_geometry_share_a_plan_and_not_their_contents(offset_path):
    model, ctx = toy(), InferenceContext(offset_path=offset_path)
    one, two = new_cache(model), new_cache(model)
    ids = {one: [3, 1, 4, 1], two: [9, 2, 6, 5]}
    for n in range(4):
        for cache in (one, two):
            logits = decode(model, cache, ctx, [ids[cache][n]])
            torch.testing.assert_close(logits, reference(model, ids[cache][: n + 1])[-1], rtol=0, atol=1e-5)
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.rebound_kv) == (1, 7, 7)


def test_the_plan_used_longest_ago_is_evicted_and_said_to_be():
    ctx = InferenceContext(max_sessions=2)
    models = [toy(seed=n) for n in range(3)]
    caches = [new_cache(m) for m in models]
    for n in (0, 1, 0, 2):
        forward_decode_step(models[n], [3], caches[n], ctx)
    assert len(ctx.sessions) == 2
    event = ctx.plan_events[-1]
    assert (event.disposition, event.reason, event.step) == (Disposition.DROPPED, Reason.EVICTED, 4)
    held = [session.key.shape_key.get("instance") for session in ctx.sessions]
    assert held == [models[2].instance_id.get(), models[0].instance_id.get()], "most recently used first"
    built = ctx.stats.plans_built
    decode(models[0], caches[0], ctx, [1])
    assert ctx.stats.plans_built == built
    decode(models[1], caches[1], ctx, [1])
    assert ctx.stats.plans_built == built + 1


def test_dropping_sessions_builds_anew_and_says_so_for_each():
    models, ctx = [toy(seed=0), toy(seed=1)], InferenceContext()
    caches = [new_cache(m) for m in models]
    for model, cache in zip(models, caches, strict=True):
        decode(model, cache, ctx, [3])
    ctx.drop_sessions()
    assert ctx.sessions == ()
    assert [e.reason for e in ctx.plan_events].count(Reason.ON_REQUEST) == 2
    assert all(event.count == 1 for event in ctx.plan_events), "two plans dropped in one step are no run of steps"
    decode(models[0], caches[0], ctx, [1])
    assert ctx.stats.plans_built == 3


# --- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"offset_path": "sideways"}, "offset_path: one of auto, device, symbol expected, found 'sideways'"),
        ({"offset_path": ""}, "found ''"),
        ({"plan": "fast"}, "plan: one of auto, off, recorded, compiled, cuda_graph expected, found 'fast'"),
        ({"device": "abacus"}, "device 'abacus' cannot be used here"),
        ({"max_sessions": 0}, "max_sessions: at least 1 expected, found 0"),
    ],
)
def test_words_that_mean_nothing_are_refused_in_one_line(arguments, says):
    with pytest.raises(BackendUnavailableError, match=says) as caught:
        InferenceContext(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device on this machine")
def test_a_device_that_is_not_there_is_refused_in_one_line():
    with pytest.raises(BackendUnavailableError, match=r"device 'cuda' cannot be used here.*use device='cpu'") as caught:
        InferenceContext("cuda")
    assert "\n" not in str(caught.value)


def test_auto_is_the_symbol_path_on_a_cpu_and_the_device_path_elsewhere():
    assert InferenceContext("cpu").offset_path == "symbol"
    assert InferenceContext("meta").offset_path == "device"
    assert InferenceContext("cpu", offset_path="device").offset_path == "device"
    assert InferenceContext("cpu").backend == "recorded"


def remembered(ctx):
    stats = ctx.stats.as_dict()
    return ctx.step, told(ctx), len(ctx.sessions), {k: v for k, v in stats.items() if not k.endswith("token")}


@pytest.mark.parametrize(
    ("ids", "cache", "error"),
    [
        ([], None, DecodeError),
        ([67], None, DecodeError),
        ([True], None, DecodeError),
        ([1] * 31, None, CapacityError),
        ([1], {"num_key_value_heads": 1}, GeometryError),
        ([1, 2], {"num_key_value_heads": 1}, GeometryError),
    ],
)
def test_a_refused_step_leaves_the_context_as_it_was(ids, cache, error):
    model, ctx = toy(), InferenceContext()
    held = new_cache(model)
    decode(model, held, ctx, [3, 1])
    before = remembered(ctx)
    target = held if cache is None else new_cache(toy(**cache))
    with pytest.raises(error):
        forward_decode_step(model, ids, target, ctx)
    assert remembered(ctx) == before
    decode(model, held, ctx, [4])
    assert ctx.stats.plans_built == 1
    assert str(ctx.plan_events[-1]) == "steps 2..3 KEPT (unchanged)"


@pytest.mark.parametrize("slotted", [True, False])
def test_a_build_that_fails_is_not_told_as_one(monkeypatch, slotted):
    ctx, slot = InferenceContext(), SessionSlot()
    model, failing = toy(), toy(seed=1)
    decode(model, new_cache(model), ctx, [3])
    before = remembered(ctx)

    def fail(*_):
        raise RuntimeError("out of memory, say")

    cache = new_cache(failing)
    monkeypatch.setattr(failing.norm, "forward", fail)
    forward = partial(forward_with_kv_context_persistent, slot=slot) if slotted else forward_decode_step
    with pytest.raises(RuntimeError, match="out of memory"):
        forward(failing, [3], cache, ctx)
    assert remembered(ctx) == before
    assert cache.cached_len == 0
    assert slot.session is None


# --- Threads and modes -----------------------------------------------------------------------------------------------


def in_threads(n, work):
    errors = []

    def guarded(i):
        try:
            work(i)
        except BaseException as error:  # a thread's error must reach the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_threads_of_one_context_wait_for_each_others_steps(monkeypatch):
    model, ctx = toy(), InferenceContext()
    inside, most = [0], [0]
    original = model.norm.forward

    def watched(x):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.002)  # long enough for another thread to come in, were it let
        inside[0] -= 1
        return original(x)

    monkeypatch.setattr(model.norm, "forward", watched)

    def work(i):
        cache = new_cache(model)
        ids = [i, 2 * i + 1, 5]
        for n in range(3):
            logits = forward_with_kv_context(model, [ids[n]], cache, ctx)
        torch.testing.assert_close(logits.double(), reference(model, ids)[-1], rtol=0, atol=1e-5)

    in_threads(6, work)
    assert most == [1]
    assert ctx.step == ctx.stats.fresh_steps == 18


@pytest.mark.parametrize("shared", [True, False], ids=["one context", "a context each"])
def test_eight_threads_decode_as_if_alone(shared):
    model, one = toy(), InferenceContext()
    contexts = [one if shared else InferenceContext() for _ in range(8)]

    def work(i):
        cache = new_cache(model)
        ids = [i, 3 * i + 1, 60 - i, 5]
        for n in range(4):
            logits = decode(model, cache, contexts[i], [ids[n]])
            torch.testing.assert_close(logits, reference(model, ids[: n + 1])[-1], rtol=0, atol=1e-5)

    in_threads(8, work)
    assert one.stats.plans_built == (1 if shared else 0)
    assert all(ctx.stats.plans_built == 1 for ctx in contexts)
    assert sum(ctx.stats.rebinds for ctx in set(contexts)) == (31 if shared else 24)


def test_the_callers_autograd_and_inference_modes_do_not_leak_in():
    model = toy()
    for p in model.parameters():
        p.requires_grad_(True)
    ctx, cache = InferenceContext(), new_cache(model)
    with torch.inference_mode():
        forward_decode_step(model, [3], cache, ctx)
        logits = forward_decode_step(model, [1], cache, ctx)
    assert not logits.is_inference()
    with torch.enable_grad():
        logits = decode(model, cache, ctx, [4])
    assert not logits.requires_grad
    torch.testing.assert_close(logits, reference(model, [3, 1, 4])[-1].detach(), rtol=0, atol=1e-5)
    assert ctx.stats.plans_built == 1


def test_repr_says_where_and_how_and_how_much_is_held():
    text = repr(InferenceContext("cpu", offset_path="device"))
    for word in ("cpu", "'device'", "'recorded'", "held=0"):
        assert word in text

"""Which backend serves a step, when code is made, and what becomes of code that cannot be used. Nothing is compiled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fake_code import FakeBuilds
from toy_backbone import ToyBackbone, new_cache, toy
from toy_llm import make

from fuel_core.code_cache import CodeCache
from fuel_core.errors import BackendUnavailableError, PlanError
from fuel_core.generation import Generation
from fuel_core.kv_cache import KvCache
from fuel_core.persistent_decode import (
    InferenceContext,
    Reason,
    SessionSlot,
    compile_step,
    forward_decode_step,
    forward_with_kv_context_persistent,
)
from fuel_core.plan_backends import build_job, compiled, recording

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeBuilds:
    """Fresh recordings, an empty cache folder, and builds that a test finishes by hand."""
    monkeypatch.setattr(recording, "_shared", recording._Shared())
    monkeypatch.setenv("FUEL_CACHE", str(tmp_path / "fuel"))
    monkeypatch.setenv("FUEL_COMPILE", "1")
    return FakeBuilds(monkeypatch)


def run(
    model: ToyBackbone, ctx: InferenceContext, n: int = 10, cache: KvCache | None = None, keep: str | None = None
) -> list[torch.Tensor]:
    cache = cache or new_cache(model, 256)
    return [forward_decode_step(model, [i % 67], cache, ctx, keep_backend=keep) for i in range(n)]


def generate(model: ToyBackbone, ctx: InferenceContext, n: int = 10, cache: KvCache | None = None) -> list[int]:
    generation = Generation(model, IDS[:4], cache or new_cache(model, 256), ctx, max_new_tokens=n)
    return [token.token_id for token in generation]


def told(ctx: InferenceContext) -> list[tuple[str, str]]:
    return [(event.disposition.name, event.reason.value) for event in ctx.plan_events]


def have_code(fake: FakeBuilds, model: ToyBackbone) -> None:
    """Leave code for the model on disk, in the way another process would."""
    compile_step(model, torch.float32)
    fake.jobs.clear()
    fake.code.loaded.clear()
    fake.loads = 0


# -- who builds ------------------------------------------------------------------------------------------------------


def test_compiled_builds_what_is_missing_and_waits(fake: FakeBuilds) -> None:
    ctx = InferenceContext(plan="compiled")
    run(toy(), ctx)
    assert fake.background == [False]
    assert len(fake.jobs[0].keys) == 1, "three layers, one recording"
    assert (ctx.stats.plan_backend, ctx.stats.plans_built, ctx.stats.rebinds) == ("compiled", 1, 9)
    assert told(ctx) == [("ABSENT", "first_step"), ("KEPT", "unchanged")]
    run(toy(seed=2, window=3), ctx)
    assert len(fake.jobs) == 1


def test_auto_uses_code_that_is_there_from_its_first_step(fake: FakeBuilds) -> None:
    have_code(fake, toy())
    ctx = InferenceContext()
    run(toy(), ctx)
    assert (ctx.stats.plan_backend, ctx.stats.handovers, fake.loads) == ("compiled", 0, 1)
    assert fake.jobs == []


def test_recorded_and_off_look_at_no_code(fake: FakeBuilds) -> None:
    have_code(fake, toy())
    for plan in ("recorded", "off"):
        ctx = InferenceContext(plan=plan, compile_after=0)
        run(toy(), ctx)
        assert ctx.stats.plan_backend == plan
    assert (fake.loads, fake.jobs) == (0, [])


@pytest.mark.parametrize("after", [0, 5, 64])
def test_auto_builds_in_the_background_after_enough_steps(after: int, fake: FakeBuilds) -> None:
    model, ctx = toy(), InferenceContext(compile_after=after)
    cache = new_cache(model, 256)
    run(model, ctx, max(after, 1), cache)
    assert len(fake.jobs) == 0, "the build of the plan is no rebind"
    run(model, ctx, 1, cache)
    assert (len(fake.jobs), fake.background) == (1, [True])
    run(model, ctx, 100, cache)
    assert len(fake.jobs) == 1
    assert ctx.stats.plan_backend == "recorded"


def test_64_rebinds_is_what_a_context_waits_for(fake: FakeBuilds) -> None:
    assert InferenceContext().compile_after == 64
    llm = make()
    assert llm.context.compile_after == 64
    llm = make()
    llm.compile_after = 0
    assert llm.context.compile_after == 0


def test_rebinds_count_for_the_structure_not_the_model(fake: FakeBuilds) -> None:
    for seed in range(3):
        assert fake.jobs == []
        run(toy(seed=seed), InferenceContext(compile_after=6), 3)
    assert len(fake.jobs) == 1


@pytest.mark.parametrize("word", ["0", "off", "no", "FALSE"])
def test_no_build_starts_by_itself_where_the_setting_says_no(
    word: str, fake: FakeBuilds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUEL_COMPILE", word)
    run(toy(), InferenceContext(compile_after=0))
    assert fake.jobs == []
    run(toy(), InferenceContext(plan="compiled"))
    assert fake.background == [False], "asked for in words"


def test_one_build_at_a_time(fake: FakeBuilds) -> None:
    models = [toy(), toy(softcap=20.0), toy(rms_norm_eps=1e-6)]
    ctx = InferenceContext(compile_after=0)
    for model in models:
        run(model, ctx)
    assert len(fake.jobs) == 1
    for n in (1, 2, 3):
        fake.jobs[-1].finish()
        ctx.refresh_backend()
        assert len(fake.jobs) == min(n + 1, 3)
    for model in models:
        run(model, ctx)
    assert ctx.stats.handovers == 3


# -- hand-over -------------------------------------------------------------------------------------------------------


def test_a_generation_stays_where_it_began_and_the_next_one_moves(fake: FakeBuilds) -> None:
    model, ctx = toy(), InferenceContext(compile_after=2)
    cache = new_cache(model, 256)
    generation = Generation(model, IDS[:4], cache, ctx, max_new_tokens=20)
    first = []
    while (token := generation.step()) is not None:
        first.append(token.token_id)
        if len(first) == 8:
            fake.jobs[0].finish()
            ctx.refresh_backend()  # as another generation on this context would
    assert ctx.stats.plan_backend == "recorded"
    assert (ctx.stats.handovers, ctx.stats.plans_built) == (0, 1)
    cache.truncate_to(0)
    assert generate(model, ctx, 20, cache) == first
    assert ctx.stats.plan_backend == "compiled"
    assert (ctx.stats.handovers, ctx.stats.plans_built) == (1, 2)
    assert ctx.stats.replans == {"handover": 1}
    assert told(ctx)[-3:] == [("DROPPED", "handover"), ("ABSENT", "handover"), ("KEPT", "unchanged")]
    event = next(event for event in ctx.plan_events if event.reason is Reason.HANDOVER)
    assert (event.component, event.was, event.now) == ("backend", "recorded", "compiled")
    generate(model, ctx, 5, cache)
    assert ctx.stats.handovers == 1


def test_a_loop_of_ones_own_moves_only_when_it_says_so(fake: FakeBuilds) -> None:
    model, ctx = toy(), InferenceContext(compile_after=2)
    cache = new_cache(model, 256)
    run(model, ctx, 5, cache)
    fake.jobs[0].finish()
    run(model, ctx, 100, cache)
    assert ctx.stats.plan_backend == "recorded"
    ctx.refresh_backend()
    run(model, ctx, 5, cache)
    assert (ctx.stats.plan_backend, ctx.stats.handovers) == ("compiled", 1)


def test_a_reply_through_the_facade_is_handed_over_between_requests(fake: FakeBuilds) -> None:
    llm = make(max_seq_len=64)
    llm.plan, llm.compile_after = "auto", 3
    replies = [llm.generate("ab", max_new_tokens=12, ignore_eos=True)]
    fake.jobs[0].finish()
    replies.append(llm.generate("ab", max_new_tokens=12, ignore_eos=True))
    assert [reply.stats.plan_backend for reply in replies] == ["recorded", "compiled"]
    assert [reply.stats.handovers for reply in replies] == [0, 1]
    assert replies[0].token_ids == replies[1].token_ids


def test_several_replies_to_one_prompt_run_on_one_backend(fake: FakeBuilds) -> None:
    llm = make(max_seq_len=64)
    llm.plan, llm.compile_after = "auto", 0
    replies = llm.generate("ab", max_new_tokens=6, n=3, temperature=1.0, seed=1, ignore_eos=True)
    assert [reply.stats.plan_backend for reply in replies] == ["recorded"] * 3


def test_a_slot_of_ones_own_is_handed_over_as_well(fake: FakeBuilds) -> None:
    model, ctx, slot = toy(), InferenceContext(compile_after=1), SessionSlot()
    cache = new_cache(model, 256)
    for _ in range(4):
        forward_with_kv_context_persistent(model, [1], cache, ctx, slot)
    fake.jobs[0].finish()
    ctx.refresh_backend()
    for _ in range(3):
        forward_with_kv_context_persistent(model, [1], cache, ctx, slot)
    assert (ctx.stats.plan_backend, ctx.stats.handovers) == ("compiled", 1)
    assert ctx.stats.replans == {"handover": 1}


def test_backend_is_a_component_of_the_key(fake: FakeBuilds) -> None:
    """Both halves: a step on another backend is not served by this plan, one on the same is."""
    model = toy()
    have_code(fake, model)
    ctx, cache = InferenceContext(), new_cache(model, 64)
    run(model, ctx, 3, cache)
    assert (ctx.stats.plans_built, ctx.stats.rebinds) == (1, 2)
    run(model, ctx, 3, cache, keep="recorded")
    assert (ctx.stats.plans_built, ctx.stats.rebinds) == (2, 4)
    assert [session.key.backend for session in ctx.sessions] == ["recorded", "compiled"]
    run(model, ctx, 3, cache)
    run(model, ctx, 3, cache, keep="recorded")
    assert (ctx.stats.plans_built, ctx.stats.rebinds) == (2, 10), "both are still held"


# -- code that cannot be used ----------------------------------------------------------------------------------------


def stays_recorded(ctx: InferenceContext, caplog: pytest.LogCaptureFixture, says: str) -> None:
    """One warning, an event where code was asked for, and steps that run as recorded."""
    assert ctx.stats.plan_backend == "recorded"
    assert ctx.stats.rebinds > 0
    lines = [r.getMessage() for r in caplog.records if r.name == "fuel.code"]
    assert len(lines) == 1, lines
    assert says in lines[0]
    assert "\n" not in lines[0]
    if ctx.plan == "compiled" or "refused" in lines[0]:
        assert ("ABSENT", "no_code") in told(ctx)


@pytest.mark.parametrize("plan", ["auto", "compiled"])
def test_code_that_computes_something_else_is_refused(
    plan: str, fake: FakeBuilds, caplog: pytest.LogCaptureFixture
) -> None:
    """The bound is 5e-5; genuine is 2e-6."""
    model = toy()
    have_code(fake, model)
    fake.change = lambda h: h * (1 + 2e-4)
    ctx = InferenceContext(plan=plan)
    run(model, ctx)
    stays_recorded(ctx, caplog, "differs from the recording")
    run(model, InferenceContext(plan=plan))
    assert fake.loads == 1
    fake.change = lambda h: h * (1 + 1e-5)
    fake.code.refused.clear()
    ctx = InferenceContext(plan=plan)
    run(model, ctx)
    assert ctx.stats.plan_backend == "compiled"


def test_a_refusal_on_disk_is_remembered_and_tried_again_when_asked(
    fake: FakeBuilds, caplog: pytest.LogCaptureFixture
) -> None:
    model = toy()
    have_code(fake, model)
    key = fake.code.key(program_of(model).compilable[0].recording)
    cache = CodeCache.of_this_user()
    cache.remove(key)
    cache.store(key, {}, {"refused": "unsupported here"})
    ctx = InferenceContext(plan="compiled")
    run(model, ctx)
    stays_recorded(ctx, caplog, "unsupported here")
    assert fake.jobs == []
    assert [each.status for each in compile_step(model, torch.float32, again=True)] == ["built"]


def program_of(model: ToyBackbone) -> recording.StepProgram:
    program: recording.StepProgram = next(iter(model._programs.values()))
    return program


def test_no_compiler_is_one_warning(
    fake: FakeBuilds, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "compiler", lambda: None)
    for plan in ("auto", "compiled", "compiled"):
        ctx = InferenceContext(plan=plan, compile_after=0)
        run(toy(), ctx)
        assert ctx.stats.plan_backend == "recorded"
    lines = [r.getMessage() for r in caplog.records if r.name == "fuel.code"]
    assert len(lines) == 2, "one for each way of asking"
    assert all("no C++ compiler" in line for line in lines)


@pytest.mark.parametrize("plan", ["auto", "compiled"])
def test_a_build_that_fails_is_one_warning(plan: str, fake: FakeBuilds, caplog: pytest.LogCaptureFixture) -> None:
    fake.fail = "no space left on device"
    model, ctx = toy(), InferenceContext(plan=plan, compile_after=0)
    run(model, ctx)
    for job in fake.jobs:
        job.finish("no space left on device")
    ctx.refresh_backend()
    run(model, ctx)
    stays_recorded(ctx, caplog, "no space left on device")
    assert len(fake.jobs) == 1


@pytest.mark.parametrize("plan", ["auto", "compiled"])
def test_a_cache_folder_of_somebody_else_is_not_used(
    plan: str, fake: FakeBuilds, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model = toy()
    have_code(fake, model)
    (tmp_path / "fuel").chmod(0o777)
    ctx = InferenceContext(plan=plan)
    run(model, ctx)
    assert ctx.stats.plan_backend == "recorded"
    assert fake.loads == 0
    assert "only you can write to" in caplog.text


def test_code_that_fails_in_a_step_is_lost_and_the_steps_go_on_recorded(fake: FakeBuilds) -> None:
    model, ctx = toy(), InferenceContext(plan="compiled")
    cache = new_cache(model, 64)
    expected = run(model, InferenceContext(plan="recorded"), 8)
    run(model, ctx, 3, cache)

    def fails(h: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("illegal\ninstruction")

    fake.change = fails
    with pytest.raises(PlanError, match="illegal instruction"):
        forward_decode_step(model, [3], cache, ctx)
    assert cache.cached_len == 3
    for n in range(3, 8):
        assert torch.allclose(forward_decode_step(model, [n], cache, ctx), expected[n], atol=1e-4)
    assert ctx.stats.plan_backend == "recorded"
    assert ctx.stats.replans == {"topology_changed": 1}
    assert ctx.stats.fresh_steps == 1


def test_a_recording_rewritten_under_code_is_noticed(fake: FakeBuilds) -> None:
    model, ctx = toy(), InferenceContext(plan="compiled")
    cache = new_cache(model, 64)
    run(model, ctx, 3, cache)
    program_of(model).compilable[0].recording.rewrite(lambda graph: graph.create_node("get_attr", "x") and None)
    run(model, ctx, 3, cache)
    assert ctx.stats.replans == {"topology_changed": 1}
    assert ctx.stats.plan_backend == "compiled"


def test_tensors_that_code_was_not_made_for_are_refused_at_attach(fake: FakeBuilds) -> None:
    model = toy()
    have_code(fake, model)
    ctx = InferenceContext(plan="compiled")
    run(model, ctx, 2)
    plan = ctx.sessions[0].plan
    layer, binding = plan.program.segments[1], plan._bindings[1]
    code = next(iter(plan._codes.values()))  # type: ignore[attr-defined]
    state, weight = binding.tensors["state.k"], layer.weights[1]
    assert code.refusal(layer.recording, binding.tensors, layer.weights) is None
    wrong = [
        {"state.k": state.to(torch.bfloat16)},
        {"state.k": state[:, :, :, :10]},
        {"state.k": state.transpose(2, 3).contiguous().transpose(2, 3)},
        {"cos": binding.tensors["cos"].to(torch.float64)},
    ]
    for change in wrong:
        assert code.refusal(layer.recording, {**binding.tensors, **change}, layer.weights)
    room = torch.zeros(weight.numel() * 4 + 8, dtype=torch.uint8)
    odd = torch.frombuffer(bytearray(weight.numel() * 4 + 8), dtype=torch.uint8)[1:-7]
    for other in (weight.T.contiguous().T, weight[:-1], weight.double(), room[: weight.numel()].view(weight.shape)):
        assert code.refusal(layer.recording, binding.tensors, [layer.weights[0], other, *layer.weights[2:]])
    assert odd.data_ptr() % 4
    assert code.refusal(layer.recording, {**binding.tensors, "state.k": state[..., :, 1:, :]}, layer.weights), (
        "not dense"
    )


def test_code_is_not_attached_where_weights_have_other_strides(fake: FakeBuilds) -> None:
    """The probe sees strides, so this is another recording, with code of its own."""
    model = toy()
    have_code(fake, model)
    layer = model.layers[0]
    layer.q_proj.weight = torch.nn.Parameter(layer.q_proj.weight.T.contiguous().T, requires_grad=False)
    ctx = InferenceContext()
    run(model, ctx)
    assert ctx.stats.plan_backend == "recorded"


def test_the_device_offset_path_stays_recorded_and_says_so(fake: FakeBuilds, caplog: pytest.LogCaptureFixture) -> None:
    ctx = InferenceContext(plan="compiled", offset_path="device")
    run(toy(), ctx)
    stays_recorded(ctx, caplog, "device-offset path")
    assert fake.jobs == []


def test_compiled_is_for_a_cpu() -> None:
    from fuel_core.plan_backends import resolve_backend

    with pytest.raises(BackendUnavailableError, match="runs on a CPU"):
        resolve_backend("compiled", torch.device("cuda"))
    assert resolve_backend("compiled", torch.device("cpu")) == "compiled"


def test_a_step_that_fails_leaves_the_choice_as_it_was(fake: FakeBuilds, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ctx = toy(), InferenceContext(compile_after=1)
    cache = new_cache(model, 64)
    run(model, ctx, 4, cache)
    fake.jobs[0].finish()
    ctx.refresh_backend()
    with monkeypatch.context() as broken:
        broken.setattr("fuel_core.persistent_decode.build.CompiledPlan.run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward_decode_step(model, [1], cache, ctx)
    assert (ctx.stats.handovers, len(ctx.sessions), ctx.sessions[0].key.backend) == (0, 1, "recorded")
    run(model, ctx, 2, cache)
    assert (ctx.stats.handovers, ctx.stats.plan_backend) == (1, "compiled")


# -- recordings from disk --------------------------------------------------------------------------------------------


def test_a_stored_recording_spares_the_trace_and_is_checked_like_a_new_one(
    fake: FakeBuilds, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_code(fake, toy())
    monkeypatch.setattr(recording, "_shared", recording._Shared())
    ctx = InferenceContext()
    run(toy(seed=3), ctx)
    assert (ctx.stats.recordings, ctx.stats.plan_backend) == (0, "compiled")
    checked = []
    verify = recording._verify
    monkeypatch.setattr(recording, "_shared", recording._Shared())
    monkeypatch.setattr(recording, "_verify", lambda *a: (checked.append(a[0].name), verify(*a)))
    run(toy(seed=4), InferenceContext())
    assert checked == ["embed", "layer 0", "head"]


class OtherToy(ToyBackbone):
    """Another class: its source might look at lengths where the toy's does not."""


def test_recordings_are_found_again_by_the_same_source_and_config_only(
    fake: FakeBuilds, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_code(fake, toy())
    other = OtherToy(toy().config)
    other.load_state_dict(toy().state_dict())
    for model in (other, toy(vocab_size=68)):
        monkeypatch.setattr(recording, "_shared", recording._Shared())
        ctx = InferenceContext()
        run(model, ctx, 3)
        assert ctx.stats.recordings == 3
        assert ctx.stats.plan_backend == "compiled", "code is shared by what it does"


# -- the child process -----------------------------------------------------------------------------------------------

PARENT = """
import sys
from pathlib import Path
from fuel_core.plan_backends import build_job
from fuel_core.code_cache import CodeCache
job = build_job.start(CodeCache(Path(sys.argv[1])), [{"key": "k"}], background=True)
print(job.process.pid)
"""


def test_a_background_build_is_polite_and_does_not_hold_up_who_started_it(tmp_path: Path) -> None:
    cache = CodeCache(tmp_path / "fuel")
    with cache.lock("k"):  # the child waits here
        done = subprocess.run(
            [sys.executable, "-c", PARENT, str(cache.root)], capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")
        child = int(done.stdout)
        deadline = time.monotonic() + 60
        while os.getpriority(os.PRIO_PROCESS, child) != 19 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert os.getpriority(os.PRIO_PROCESS, child) == 19
        assert os.getsid(child) == child != os.getsid(0)
        os.kill(child, signal.SIGKILL)
    assert [key for key, _, _ in cache.entries()] == [], "nothing half made"


def test_what_a_failed_build_says_last_is_why(tmp_path: Path) -> None:
    (tmp_path / "fuel").write_text("in the way")
    job = build_job.start(CodeCache(tmp_path / "fuel"), [], background=False)
    job.wait()
    why = job.failure()
    assert why is not None
    assert "expected a folder, found a file" in why
    assert job.failure() == why


def test_a_build_that_is_ended_says_so_and_removes_what_it_built_in(tmp_path: Path) -> None:
    cache = CodeCache(tmp_path / "fuel")
    with cache.lock("key"):  # it waits for its turn
        job = build_job.start(cache, [{"key": "key"}], background=True)
        deadline = time.monotonic() + 60
        while not list(cache.root.glob("v1/.build-*")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        job.process.terminate()
        job.process.wait(timeout=60)
    assert job.failure() == "ended by SIGTERM"
    assert not list(cache.root.glob("v1/.build-*"))
    assert cache.entries() == []

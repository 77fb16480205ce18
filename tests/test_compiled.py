"""The compiled backend, on code that a compiler really made: two libraries serve this whole file.

What does not need real code is in test_compiled_choice.py.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from toy_backbone import ToyBackbone, latent_reference, latent_toy, new_cache, reference, toy

from fuel_core.backbone import DecodeBackbone
from fuel_core.code_cache import CodeCache
from fuel_core.generation import Generation
from fuel_core.persistent_decode import InferenceContext, Reason, forward_decode_step, forward_with_kv_context
from fuel_core.plan_backends import LIBRARY, CompiledPlan, build_job, lowering
from fuel_core.plan_backends.recording import Recording

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 58, 9, 61, 9, 3, 2, 33]

# Against the float64 reference, relative; as in test_toy_parity: genuine 5.2e-6, sabotaged 6.2e-2.
TOLERANCE = 2e-5


@pytest.fixture(scope="session")
def code_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for everything that is really compiled, shared by the workers of a parallel run.

    TEST_CODE_FOLDER names one to keep from run to run.
    """
    if kept := os.environ.get("TEST_CODE_FOLDER"):
        return Path(kept)
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    return base / "compiled-code"


@pytest.fixture
def builds(code_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Use the shared folder; counts the parts of every build that is started."""
    monkeypatch.setenv("FUEL_CACHE", str(code_folder))
    started: list[int] = []
    start = build_job.start

    def counted(cache: CodeCache, parts: list[dict[str, object]], *, background: bool) -> build_job.Job:
        started.append(len(parts))
        return start(cache, parts, background=background)

    monkeypatch.setattr(build_job, "start", counted)
    return started


def windowed(**changes: object) -> ToyBackbone:
    return toy(window=4, windowed_layers=(0, 2), rope_thetas=(1e4, 1e2), **changes)


def compiled_context() -> InferenceContext:
    return InferenceContext("cpu", plan="compiled")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def plan_of(ctx: InferenceContext) -> CompiledPlan:
    plan = ctx.sessions[0].plan
    assert isinstance(plan, CompiledPlan)
    return plan


# -- right -----------------------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[Callable[[], DecodeBackbone], Callable[..., torch.Tensor]]] = {
    "windowed": (windowed, reference),
    "dense": (toy, reference),
    "one position of window": (lambda: toy(window=1), reference),
    "latent, rolling": (lambda: latent_toy(rolling=True, window=4), latent_reference),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prompt", [0, 5])
@pytest.mark.parametrize("capacity", [17, 64])
def test_every_step_gives_the_references_logits(name: str, prompt: int, capacity: int, builds: list[int]) -> None:
    """From position 0 and behind a prompt, into the last slot of the cache and far from it."""
    make, oracle = MODELS[name]
    model = make()
    expected = oracle(model, IDS)
    cache, ctx = new_cache(model, capacity), compiled_context()
    fresh, off = new_cache(model, capacity), InferenceContext("cpu", plan="off")
    if prompt:
        forward_decode_step(model, IDS[:prompt], cache, ctx)
        forward_decode_step(model, IDS[:prompt], fresh, off)
    for n, i in enumerate(IDS[prompt:], prompt):
        logits = forward_decode_step(model, [i], cache, ctx)
        assert relative(logits, expected[n]) < TOLERANCE
        assert relative(logits, forward_with_kv_context(model, [i], fresh, off)) < TOLERANCE
    steps = len(IDS) - prompt
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.replans) == (1, steps - 1, {})
    assert ctx.stats.plan_backend == "compiled"
    assert plan_of(ctx).backend == "compiled"


def test_windowed_and_dense_layers_models_and_capacities_share_one_library(builds: list[int]) -> None:
    ctx = compiled_context()
    for make in (toy, windowed, lambda: toy(window=1), lambda: toy(num_hidden_layers=5, window=3)):
        for capacity in (7, 256):
            model = make()
            cache = new_cache(model, capacity)
            for i in IDS[:7]:
                logits = forward_decode_step(model, [i], cache, ctx)
            assert relative(logits, reference(model, IDS[:7])[-1]) < TOLERANCE
            assert {code.key for code in plan_of(ctx)._distinct} == {code.key for code in plan_of(ctx)._codes.values()}
            assert len(plan_of(ctx)._distinct) == 1
    assert sum(builds) <= 1, "one, unless an earlier test has made it"


def test_two_hundred_tokens_build_once_compile_nothing_and_keep_nothing(builds: list[int]) -> None:
    model = windowed()
    cache, ctx = new_cache(model, 256), compiled_context()

    def bytes_alive() -> tuple[int, int]:
        gc.collect()
        # Not isinstance: it asks each object for its class, and some of torch's answer with a warning.
        # Those of tracing have no memory, and wait to be collected.
        kinds = (torch.Tensor, torch.nn.Parameter)
        tensors = [t for t in gc.get_objects() if type(t) in kinds and not t.is_meta]
        # By storage: a carrier has as many elements as there are positions, and memory for one.
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return len(tensors), sum(storages.values())

    before: tuple[int, int] | None = None
    for n in range(200):
        forward_decode_step(model, [n % 67], cache, ctx)
        if n == 20:
            before, so_far = bytes_alive(), len(builds)
    assert bytes_alive() == before
    assert len(builds) == so_far
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.replans) == (1, 199, {})


def test_logits_belong_to_the_caller(builds: list[int]) -> None:
    model = windowed()
    cache, ctx = new_cache(model), compiled_context()
    kept = [forward_decode_step(model, [i], cache, ctx) for i in IDS]
    copies = [logits.clone() for logits in kept]
    for logits in kept:
        logits.add_(1.0)
    expected = reference(model, IDS)
    assert max(relative(logits, row) for logits, row in zip(copies, expected, strict=True)) < TOLERANCE
    cache.truncate_to(3)
    again = forward_decode_step(model, [IDS[3]], cache, ctx)
    assert relative(again, expected[3]) < TOLERANCE


# -- held like any other plan ----------------------------------------------------------------------------------------


def test_models_and_caches_take_turns(builds: list[int]) -> None:
    a, b = windowed(seed=1), windowed(seed=2)
    ctx = compiled_context()
    caches = [new_cache(a), new_cache(b)]
    expected = [reference(a, IDS), reference(b, IDS)]
    for n, i in enumerate(IDS):
        for model, cache, rows in zip((a, b), caches, expected, strict=True):
            assert relative(forward_decode_step(model, [i], cache, ctx), rows[n]) < TOLERANCE
    assert (ctx.stats.plans_built, ctx.stats.replans) == (2, {"instance": 1})


def test_another_allocation_is_attached_and_a_larger_one_builds_no_code(builds: list[int]) -> None:
    model = windowed()
    ctx, expected = compiled_context(), reference(model, IDS)
    first, second, larger = new_cache(model, 32), new_cache(model, 32), new_cache(model, 64)
    for cache in (first, second, larger, first):
        cache.truncate_to(0)
        for n, i in enumerate(IDS[:4]):
            assert relative(forward_decode_step(model, [i], cache, ctx), expected[n]) < TOLERANCE
    assert (ctx.stats.rebound_kv, ctx.stats.plans_built) == (2, 2)
    assert ctx.stats.replans == {"capacity": 1}
    assert [event.reason for event in ctx.plan_events].count(Reason.ALLOCATION) == 2
    assert builds == []


def test_a_weight_that_was_moved_is_noticed(builds: list[int]) -> None:
    model = windowed()
    cache, ctx = new_cache(model), compiled_context()
    for i in IDS[:3]:
        forward_decode_step(model, [i], cache, ctx)
    layer = model.layers[1]
    layer.q_proj.weight = torch.nn.Parameter(layer.q_proj.weight * 1.5, requires_grad=False)
    cache.truncate_to(0)
    for n, i in enumerate(IDS[:3]):
        logits = forward_decode_step(model, [i], cache, ctx)
        assert relative(logits, reference(model, IDS[: n + 1])[-1]) < TOLERANCE
    assert ctx.stats.replans == {"weights_epoch": 1}
    assert ctx.stats.plan_backend == "compiled"


@pytest.mark.parametrize("past", [4, 8])
def test_mapped_weights_are_aligned_to_four_or_eight_bytes_only(past: int, builds: list[int]) -> None:
    model = windowed()
    expected = reference(model, IDS)
    for parameter in model.parameters():
        room = torch.zeros(parameter.numel() * 4 + 128, dtype=torch.uint8)
        start = -room.data_ptr() % 64 + past
        there = room[start : start + parameter.numel() * 4].view(torch.float32).view(parameter.shape)
        parameter.data = there.copy_(parameter.data)
        assert parameter.data_ptr() % 64 == past
    cache, ctx = new_cache(model), compiled_context()
    for n, i in enumerate(IDS):
        assert relative(forward_decode_step(model, [i], cache, ctx), expected[n]) < TOLERANCE
    assert ctx.stats.plan_backend == "compiled"


def test_a_generation_gives_the_same_tokens_as_recorded(builds: list[int]) -> None:
    model = windowed()
    tokens = []
    for plan in ("recorded", "compiled"):
        ctx = InferenceContext("cpu", plan=plan)
        tokens.append([t.token_id for t in Generation(model, IDS[:5], new_cache(model, 64), ctx, max_new_tokens=40)])
        assert ctx.stats.plan_backend == plan
    assert tokens[0] == tokens[1]


def test_ops_and_fingerprints_are_the_recordings(builds: list[int]) -> None:
    model = windowed()
    sessions = []
    for plan in ("recorded", "compiled"):
        ctx = InferenceContext("cpu", plan=plan)
        forward_decode_step(model, [1], new_cache(model), ctx)
        sessions.append(ctx.sessions[0])
    assert sessions[0].ops == sessions[1].ops
    assert sessions[0].plan.fingerprints == sessions[1].plan.fingerprints
    assert sessions[0].reads == sessions[1].reads


# -- other processes -------------------------------------------------------------------------------------------------

WARM = """
import sys
sys.path.insert(0, sys.argv[1])
from toy_backbone import toy, new_cache
from fuel_core.persistent_decode import InferenceContext, forward_decode_step
model = toy(window=4, windowed_layers=(0, 2), rope_thetas=(1e4, 1e2))
ctx, cache = InferenceContext("cpu", plan=sys.argv[2]), new_cache(model)
for i in (1, 2, 3):
    forward_decode_step(model, [i], cache, ctx)
heavy = [m for m in ("torch._dynamo", "torch._inductor", "sympy") if m in sys.modules]
print(ctx.stats.plan_backend, ctx.stats.recordings, ctx.stats.handovers, heavy)
"""


@pytest.mark.parametrize("plan", ["compiled", "auto"])
def test_a_process_that_finds_code_traces_nothing_and_loads_no_compiler(plan: str, builds: list[int]) -> None:
    model = windowed()
    forward_decode_step(model, [1], new_cache(model), compiled_context())
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", WARM, here, plan], capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    assert done.stdout == "compiled 0 0 []\n"


# -- the bound -------------------------------------------------------------------------------------------------------


def sabotaged(recording: Recording, change: Callable[[dict[str, int]], None]) -> lowering.Run:
    """The recording as code, with its lengths changed on the way in."""
    signature = lowering.Signature.of(recording)

    def run(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        n, m = len(signature.tensors), len(signature.symbols)
        named = dict(zip(signature.tensors, arguments[:n], strict=True))
        lengths = {s: a.shape[0] for s, a in zip(signature.symbols, arguments[n : n + m], strict=True)}
        change(lengths)
        integers = [lengths[name] for name in recording.symbols]
        return [recording.run(*(named.get(name) for name in recording.tensors), *integers, *arguments[n + m :])]

    return run


def start_later(lengths: dict[str, int]) -> None:
    lengths["window_start"] = min(lengths["window_start"] + 1, lengths["attended_len"] - 1)


def read_less(lengths: dict[str, int]) -> None:
    lengths["attended_len"] = max(lengths["attended_len"] - 1, lengths["window_start"] + 1)


def write_before(lengths: dict[str, int]) -> None:
    lengths["cached_len"] = max(lengths["cached_len"] - 1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", [start_later, read_less, write_before])
@pytest.mark.parametrize("make", [toy, lambda: latent_toy(rolling=True)])
def test_the_bound_sees_a_length_that_is_off_by_one(
    make: Callable[[], DecodeBackbone], change: Callable[[dict[str, int]], None], dtype: torch.dtype
) -> None:
    """Least of these: 0.34 (a later start, toy)."""
    model = make()
    ctx = InferenceContext("cpu", plan="recorded")
    forward_decode_step(model, [1], new_cache(model, dtype=dtype), ctx)
    recording = ctx.sessions[0].plan.program.compilable[0].recording
    assert lowering.worst_error(sabotaged(recording, lambda lengths: None), recording) == 0.0
    bound = lowering.BOUNDS[str(dtype).removeprefix("torch.")]
    for cases in (lowering.CASES, lowering.SPOT_CHECKS):
        assert lowering.worst_error(sabotaged(recording, change), recording, None, cases) > 5 * bound


def test_what_was_made_is_well_within_the_bound(builds: list[int], code_folder: Path) -> None:
    """float32: 4e-7 and 6e-7; the bound is 5e-5."""
    for make, _ in MODELS.values():
        model = make()
        ctx = compiled_context()
        forward_decode_step(model, [1], new_cache(model), ctx)
        for code in plan_of(ctx)._distinct:
            entry = CodeCache(code_folder).find(code.key)
            assert entry is not None
            assert 0 < entry.about["error"] < entry.about["bound"] / 10


def test_real_code_that_was_damaged_is_made_again_not_loaded(builds: list[int], code_folder: Path) -> None:
    """A library of zeros would be loaded without a word, or kill the process."""
    model = windowed()
    ctx = compiled_context()
    forward_decode_step(model, [1], new_cache(model), ctx)
    code = plan_of(ctx)._distinct[0]
    entry = CodeCache(code_folder).find(code.key)
    assert entry is not None
    copy = CodeCache(code_folder.parent / "damaged")
    files = {
        str(f.relative_to(entry.folder)): f.read_bytes() for f in entry.folder.rglob("*.*") if f.name != "entry.json"
    }
    copy.store(code.key, files, entry.about)
    library = next((copy.root / "v1" / code.key).rglob("*.so"))
    data = library.read_bytes()
    library.write_bytes(data[:1000] + bytes(200_000) + data[201_000:])
    assert copy.find(code.key) is None
    assert not copy.has(code.key)
    assert LIBRARY.loaded[code.key] is code, "what is loaded stays"

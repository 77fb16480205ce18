"""What users do to a model between two steps, and what they must find: right values or one clear line, never plausible
wrong values. Each test states the value that is wished for; most compare with a float64 reference."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy_backbone import ToyBackbone, fill, latent_reference, latent_toy, new_cache, reference, toy

from fuel_core.errors import CacheStateError, CapacityError, DecodeError, GeometryError, RecordingError
from fuel_core.kv_cache import KvCache
from fuel_core.persistent_decode import (
    DecodeSession,
    InferenceContext,
    SessionSlot,
    forward_decode_step,
    forward_with_kv_context,
    forward_with_kv_context_persistent,
)

# Genuine error against float64 is up to 2e-5 on logits of about 5; the mildest defect here moves them by 1e-2.
TOLERANCE = 2e-4
PROMPT = [3, 1, 4, 1, 5, 9]


@pytest.fixture(params=["symbol", "device"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model() -> ToyBackbone:
    return toy(seed=1, window=4, windowed_layers=(1,), rope_thetas=(1e4, 50.0))


class Run:
    """A model, a cache and a context; every step is checked."""

    def __init__(self, model: ToyBackbone, path: str, prompt: list[int] | None = None, **cache: Any) -> None:
        self.model, self.ctx, self.cache = model, InferenceContext("cpu", offset_path=path), new_cache(model, **cache)
        if prompt is None:
            prompt = PROMPT
        if prompt:
            self.step(*prompt)

    def step(self, *ids: int) -> Tensor:
        logits = forward_decode_step(self.model, list(ids), self.cache, self.ctx)
        expected = reference(self.model, self.cache.token_ids)[-1]
        assert (logits - expected).abs().max() < TOLERANCE
        return logits

    def steps(self, n: int) -> None:
        for i in range(n):
            self.step(10 + i)

    @property
    def plans(self) -> tuple[int, int]:
        return self.ctx.stats.plans_built, self.ctx.stats.rebinds


class FailAtOp(TorchDispatchMode):
    def __init__(self, n: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left, self.error = n, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error("injected")
        return func(*args, **(kwargs or {}))


# -- the caller's torch modes and defaults -------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default_float64": lambda: default_dtype(torch.float64),
    "default_bfloat16": lambda: default_dtype(torch.bfloat16),
    "default_meta": lambda: default_device("meta"),
    "device_meta": lambda: torch.device("meta"),
    "two_threads": lambda: threads(2),
    "deterministic": deterministic,
}


@pytest.mark.parametrize("when", ["from the first step", "while a plan is held", "alternately"])
@pytest.mark.parametrize("mode", MODES)
def test_a_callers_torch_mode_changes_nothing(mode: str, when: str, model: ToyBackbone, path: str) -> None:
    plain = Run(model, path, prompt=[])
    under = Run(model, path, prompt=[])
    # Built under the mode and alone: a recording that an earlier test took outside it must not stand in.
    model.config = dataclasses.replace(model.config, embed_scale=1.0 + (len(mode) + len(when)) / 64)
    for n, ids in enumerate([PROMPT, [7], [8], [9], [11]]):
        with ExitStack() as stack:
            if when == "from the first step" or (n > 2 if when == "while a plan is held" else n % 2 == 1):
                stack.enter_context(MODES[mode]())
            logits = forward_decode_step(model, ids, under.cache, under.ctx)
        expected = forward_decode_step(model, ids, plain.cache, plain.ctx)
        # Sums are split differently over two threads.
        assert torch.equal(logits, expected) if mode != "two_threads" else torch.allclose(logits, expected, 0, 2e-5)
        assert logits.dtype == torch.float32
        assert not logits.requires_grad
        assert not logits.is_inference(), "the caller may edit the logits in place"
        assert (logits - reference(model, under.cache.token_ids)[-1]).abs().max() < TOLERANCE
    assert under.plans == (1, 3)


def test_a_cache_made_under_inference_mode_is_written_outside_it(model: ToyBackbone, path: str) -> None:
    with torch.inference_mode():
        run = Run(model, path)
        run.steps(1)
        run.cache.clear()
        run.step(*PROMPT)
    run.steps(3)


def test_a_model_filled_under_inference_mode_decodes(path: str) -> None:
    with torch.inference_mode():
        run = Run(toy(seed=3), path)
    run.steps(3)


def test_weights_that_require_grad_leave_no_graph_behind(model: ToyBackbone, path: str) -> None:
    model.requires_grad_(True)
    run = Run(model, path)
    for i in range(3):
        assert run.step(i).grad_fn is None
    assert all(not t.requires_grad for i in range(3) for t in run.cache.layer(i).values())


# -- what is done to the model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_a_copy_is_a_model_of_its_own(copied: str, model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    run.steps(2)
    twin = copy.deepcopy(model) if copied == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert twin.instance_id != model.instance_id
    twin.layers[0].v_proj.weight.mul_(-1.0)
    theirs = Run(twin, path)
    theirs.ctx = run.ctx
    theirs.steps(3)
    run.steps(3)
    assert run.plans == (2, 6), "one plan each, and neither was lost to the other"
    assert run.ctx.stats.recordings <= 3


def test_a_copied_cache_goes_its_own_way(model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    run.steps(2)
    other = Run(model, path, prompt=[])
    other.cache, other.ctx = copy.deepcopy(run.cache), run.ctx
    for _ in range(3):
        run.step(7)
        other.step(8)
    assert run.ctx.stats.plans_built == 1


def test_to_bfloat16_and_back_is_followed(model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    run.steps(2)
    model.to(torch.bfloat16)
    low = forward_decode_step(model, [1], run.cache, run.ctx)
    rough = reference(model, run.cache.token_ids)[-1]
    assert (low - rough).abs().max() < 0.3  # genuine 0.07; with the float32 plan's weights a type error
    run.cache.truncate_to(0)
    model.to(torch.float32)
    run.step(*PROMPT)
    run.steps(3)
    assert run.ctx.stats.replans["weights_epoch"] == 2


def test_a_weight_edited_in_place_is_followed_without_a_rebuild(model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    run.steps(2)
    model.lm_head.weight[5].zero_()
    assert run.step(1)[5] == 0
    model.layers[2].down_proj.weight.data.mul_(-1)
    run.step(2)
    assert run.plans == (1, 3)


@pytest.mark.parametrize("how", ["parameter", "data", "assign", "module", "tied", "bias", "norm"])
def test_replaced_weights_are_followed(how: str, model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    run.steps(2)
    layer, before = model.layers[2], [p.data for p in model.parameters()]
    if how == "parameter":
        layer.o_proj.weight = nn.Parameter(layer.o_proj.weight * -1, requires_grad=False)
    elif how == "data":
        layer.o_proj.weight.data = layer.o_proj.weight.data * -1
    elif how == "assign":
        model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()}, assign=True)
    elif how == "module":
        new = toy(seed=9, window=4, windowed_layers=(1,), rope_thetas=(1e4, 50.0))
        model.layers[2] = new.layers[2]
    elif how == "tied":
        model.lm_head.weight = model.embed_tokens.weight
    elif how == "bias":
        model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 67), requires_grad=False)
    else:
        model.norm.weight = nn.Parameter(torch.full((96,), 0.5), requires_grad=False)
    # Only the last layer and the head were touched (or the history is run again): what is cached stays right.
    run.cache.truncate_to(0)
    run.step(*PROMPT)
    run.steps(3)
    assert run.ctx.stats.replans == {"weights_epoch": 1}
    assert before


def test_a_model_that_was_never_loaded_is_refused(path: str) -> None:
    with torch.device("meta"):
        model = ToyBackbone(toy().config)
    cache, ctx = new_cache(model), InferenceContext("cpu", offset_path=path)
    for ids in ([1], [1, 2]):
        with pytest.raises(DecodeError, match="meta"):
            forward_decode_step(model, ids, cache, ctx)
        assert cache.cached_len == 0


# -- what is done with the logits ------------------------------------------------------------------------------------


def test_returned_logits_are_the_callers_own(model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    kept = [run.step(10 + i) for i in range(2)]
    values = [logits.clone() for logits in kept]
    more = [forward_with_kv_context(model, [1, 2], run.cache, run.ctx, all_positions=True)]
    values += [m.clone() for m in more]
    run.steps(3)
    assert all(torch.equal(a, b) for a, b in zip([*kept, *more], values, strict=True))
    kept[1].fill_(float("nan"))
    run.steps(2)


# -- token ids ---------------------------------------------------------------------------------------------------------

BAD_IDS: dict[str, Any] = {
    "int32": torch.tensor([1], dtype=torch.int32),
    "float": torch.tensor([1.0]),
    "bool tensor": torch.tensor([True]),
    "two-dimensional": torch.tensor([[1]]),
    "zero-dimensional": torch.tensor(1),
    "bool": [True],
    "float in a list": [1.0],
    "numpy scalar": [np.float32(1)],
    "text": "a",
    "text in a list": ["1"],
    "negative": [-1],
    "one past the end": [67],
    "huge": [2**70],
    "negative in a tensor": torch.tensor([-1]),
    "none in a list": [None],
    "an int": 5,
    "none": None,
    "nothing": [],
    "nothing in a tensor": torch.tensor([], dtype=torch.int64),
    "nested": [[1]],
    "tensors in a list": [torch.tensor(1)],
    "bad after good": [1, 2, 67],
}


@pytest.mark.parametrize("bad", BAD_IDS)
def test_ids_that_are_no_token_ids_are_refused_in_one_line(bad: str, model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    run.steps(2)
    calls: list[Callable[[Any], object]] = [
        lambda ids: forward_decode_step(model, ids, run.cache, run.ctx),
        lambda ids: forward_with_kv_context(model, ids, run.cache, run.ctx),
        lambda ids: forward_with_kv_context_persistent(model, ids, run.cache, run.ctx, SessionSlot()),
    ]
    before = (run.cache.token_ids, run.cache.alloc_id, run.ctx.stats.copy(), run.ctx.step)
    for call in calls:
        with pytest.raises(DecodeError) as refusal:
            call(BAD_IDS[bad])
        assert "\n" not in str(refusal.value)
    assert (run.cache.token_ids, run.cache.alloc_id, run.ctx.stats, run.ctx.step) == before
    run.steps(2)
    assert run.plans == (1, 3)


def test_ids_of_every_good_form_give_the_same(model: ToyBackbone, path: str) -> None:
    found = []
    for form in (list, tuple, torch.tensor, lambda ids: torch.tensor(ids * 2)[::2] if len(ids) == 1 else ids):
        run = Run(model, path)
        for i in range(3):
            found.append(forward_decode_step(model, form([i]), run.cache, run.ctx))  # type: ignore[operator]
    assert all(torch.equal(found[i % 3], found[i]) for i in range(len(found)))


def test_a_token_tensor_that_is_changed_later_is_not_read_again(model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    ids = torch.tensor([7])
    forward_decode_step(model, ids, run.cache, run.ctx)
    ids.fill_(8)
    run.steps(1)
    assert run.cache.token_ids[-2] == 7


# -- edges of the cache --------------------------------------------------------------------------------------------


def test_a_prompt_of_one_token_at_position_zero_plans_for_every_position(model: ToyBackbone, path: str) -> None:
    run = Run(model, path, prompt=[])
    run.steps(12)
    assert run.plans == (1, 11)


def test_a_plan_built_in_the_last_slot_serves_the_first(model: ToyBackbone, path: str) -> None:
    run = Run(model, path, max_seq_len=len(PROMPT) + 1)
    run.step(7)
    run.cache.truncate_to(0)
    run.steps(len(PROMPT) + 1)
    assert run.plans == (1, len(PROMPT) + 1)


def test_a_cache_of_one_position_works(model: ToyBackbone, path: str) -> None:
    run = Run(model, path, prompt=[], max_seq_len=1)
    for _ in range(3):
        run.step(7)
        run.cache.truncate_to(0)
    assert run.plans == (1, 2)


def test_a_prompt_may_fill_the_cache(model: ToyBackbone, path: str) -> None:
    run = Run(model, path, max_seq_len=len(PROMPT))
    with pytest.raises(CapacityError):
        run.step(7)
    run.cache.truncate_to(len(PROMPT) - 1)
    run.step(7)


@pytest.mark.parametrize("ids", [[7], [7, 8]])
def test_a_full_cache_is_refused_unchanged_and_truncating_helps(ids: list[int], model: ToyBackbone, path: str) -> None:
    run = Run(model, path, max_seq_len=9)
    run.steps(3)
    assert run.plans == (1, 2), "the refusal must come on the rebind path"
    buffers = [{n: t.clone() for n, t in run.cache.layer(i).items()} for i in range(3)]
    before = (run.cache.token_ids, run.cache.alloc_id, run.ctx.stats.copy(), len(run.ctx.plan_events))
    with pytest.raises(CapacityError, match="9"):
        forward_decode_step(model, ids, run.cache, run.ctx)
    assert (run.cache.token_ids, run.cache.alloc_id, run.ctx.stats, len(run.ctx.plan_events)) == before
    assert all(torch.equal(t, run.cache.layer(i)[n]) for i, held in enumerate(buffers) for n, t in held.items())
    run.cache.truncate_to(5)
    run.steps(2)
    assert run.plans == (1, 4)


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 10_000])
def test_windows_of_every_size_agree_with_the_reference(window: int, path: str) -> None:
    run = Run(toy(seed=2, window=window, windowed_layers=(0, 2)), path, prompt=[5])
    run.steps(4)
    run.step(*range(20, 30))
    run.steps(10)
    assert run.plans == (1, 14)


def test_a_window_change_to_wider_than_the_cache_and_back_keeps_the_plan(model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    for window in (10_000, 1, 5):
        model.reconfigure(window=window)
        run.cache.truncate_to(0)
        run.step(*PROMPT)
        run.steps(3)
    assert run.plans == (1, 8)


# -- caches and contexts that do not fit ---


def test_a_cache_on_another_device_is_refused(model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    run.steps(2)
    elsewhere = new_cache(model, device="meta")
    for ids in ([1], [1, 2]):
        with pytest.raises(GeometryError, match="meta"):
            forward_decode_step(model, ids, elsewhere, run.ctx)
    assert elsewhere.cached_len == 0
    run.steps(2)
    assert run.plans == (1, 3)


def test_a_cache_of_another_geometry_is_refused_on_the_rebind_path_too(model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    run.steps(2)
    for changes in ({"num_key_value_heads": 4}, {"head_dim": 24, "rotary_dim": 24}, {"num_hidden_layers": 2}):
        with pytest.raises(GeometryError):
            forward_decode_step(model, [1], new_cache(toy(**changes)), run.ctx)
    run.steps(2)
    assert run.plans == (1, 3)


def test_two_contexts_alternate_on_one_cache(model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    first, second = run.ctx, InferenceContext("cpu", offset_path="device" if path == "symbol" else "symbol")
    for i in range(6):
        run.ctx = (first, second)[i % 2]
        run.step(i)
    assert [(c.stats.plans_built, c.stats.rebinds) for c in (first, second)] == [(1, 2), (1, 2)]


def test_eight_threads_share_a_context(model: ToyBackbone, path: str) -> None:
    ctx, n = InferenceContext("cpu", offset_path=path), 6
    caches, failures = [new_cache(model) for _ in range(8)], []

    def work(t: int) -> None:
        try:
            forward_decode_step(model, [t, t + 1], caches[t], ctx)
            for i in range(n):
                logits = forward_decode_step(model, [(t * 7 + i) % 67], caches[t], ctx)
                expected = reference(model, caches[t].token_ids)[-1]
                assert (logits - expected).abs().max() < TOLERANCE
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.fresh_steps) == (1, 8 * n - 1, 8)


def test_eight_threads_with_their_own_contexts_share_a_model(path: str) -> None:
    """The first steps race to record one structure, and to take the model's key."""
    model, failures = toy(seed=4, embed_scale=1.5), []
    start = threading.Barrier(8)

    def work(t: int) -> None:
        try:
            ctx, cache = InferenceContext("cpu", offset_path=path), new_cache(model)
            start.wait()
            for i in range(3):
                logits = forward_decode_step(model, [(t * 7 + i) % 67], cache, ctx)
                assert (logits - reference(model, cache.token_ids)[-1]).abs().max() < TOLERANCE
            assert (ctx.stats.plans_built, ctx.stats.rebinds) == (1, 2)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


# -- failures in the middle of a step ---


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("stage", ["prompt", "build", "rebind"])
def test_a_step_that_fails_in_a_layer_leaves_everything_as_it_was(
    stage: str, error: type[BaseException], model: ToyBackbone, path: str
) -> None:
    if stage == "build":  # recorded before, so that the failure comes in the run and not in the recording
        Run(copy.deepcopy(model), path).steps(1)
    run = Run(model, path)
    if stage == "rebind":
        run.steps(2)
    before = (run.cache.token_ids, run.cache.alloc_id, run.ctx.stats.copy(), run.ctx.sessions, run.ctx.step)
    ids = [7, 8] if stage == "prompt" else [7]
    for after in (0, 3, 12, 40, 70):
        with FailAtOp(after, error), pytest.raises((error, RecordingError)):
            forward_decode_step(model, ids, run.cache, run.ctx)
        assert (run.cache.token_ids, run.cache.alloc_id, run.ctx.stats, run.ctx.sessions, run.ctx.step) == before
    run.step(*ids)
    run.steps(2)
    built, rebinds = {"prompt": (1, 1), "build": (1, 2), "rebind": (1, 4)}[stage]
    assert run.plans == (built, rebinds)


def test_a_failed_build_is_no_replan(model: ToyBackbone, path: str) -> None:
    run = Run(toy(seed=8), path)
    run.steps(1)
    other = Run(model, path)
    other.ctx = run.ctx
    with FailAtOp(0, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        forward_decode_step(model, [1], other.cache, run.ctx)
    assert run.ctx.stats.replans == {}
    other.steps(1)
    assert run.ctx.stats.replans == {"instance": 1}


def test_rows_that_a_failed_step_left_do_not_poison_later_ones(model: ToyBackbone, path: str) -> None:
    """Under a mask a stale row still meets a product with probability zero, and 0 x NaN is NaN."""
    run = Run(model, path)
    run.steps(3)
    head = model.layers[2].v_proj.weight
    kept = head.clone()
    head.fill_(float("nan"))
    forward_decode_step(model, [1, 2, 3], run.cache, run.ctx)
    with FailAtOp(60, RuntimeError), pytest.raises(RuntimeError):
        forward_decode_step(model, [1], run.cache, run.ctx)
    head.copy_(kept)
    run.cache.truncate_to(len(PROMPT) + 1)
    run.steps(2)
    assert torch.isfinite(run.step(7)).all()
    run.step(1, 2, 3)


def test_rows_that_the_caller_left_in_new_buffers_do_not_poison(model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    run.steps(2)
    for layer in range(3):
        buffers = {name: t.clone() for name, t in run.cache.layer(layer).items()}
        for t in buffers.values():
            t[:, :, run.cache.cached_len :] = float("nan")
        run.cache.set_layer(layer, buffers)
    run.steps(3)
    run.step(1, 2)
    assert run.ctx.stats.rebound_kv == 1


def test_torn_rolling_state_is_refused_until_it_is_reset(path: str) -> None:
    model = latent_toy(seed=5, rolling=True)
    cache, ctx = new_cache(model), InferenceContext("cpu", offset_path=path)

    def step(*ids: int) -> None:
        logits = forward_decode_step(model, list(ids), cache, ctx)
        expected = latent_reference(model, cache.token_ids)[-1]  # up to 50
        assert (logits - expected).abs().max() < 10 * TOLERANCE

    step(*PROMPT)
    step(7)
    step(8)
    with FailAtOp(30, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        forward_decode_step(model, [9], cache, ctx)
    with pytest.raises(CacheStateError, match="torn"):
        forward_decode_step(model, [9], cache, ctx)
    cache.truncate_to(0)
    step(*PROMPT)
    step(7)
    assert ctx.stats.plans_built == 1


def test_an_error_in_a_layer_of_the_users_reaches_the_user_as_it_is(model: ToyBackbone, path: str) -> None:
    class Mine(Exception):
        pass

    run = Run(model, path)
    original = model.decode_apply_layer

    def raising(layer_idx: int, inputs: Any) -> Tensor:
        if layer_idx == 1:
            raise Mine("from layer 1")
        return original(layer_idx, inputs)

    model.decode_apply_layer = raising  # type: ignore[method-assign]
    for ids in ([1, 2], [1]):
        with pytest.raises(Mine):
            forward_decode_step(model, ids, run.cache, run.ctx)
    del model.decode_apply_layer
    run.steps(3)
    assert run.plans == (1, 2)


def test_a_session_of_a_deleted_cache_serves_the_next_one(model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    run.steps(2)
    for _ in range(3):
        address = run.cache.layer(0)["k"].data_ptr()
        run.cache = None  # type: ignore[assignment]
        run.cache = new_cache(model)
        run.step(*PROMPT)
        run.steps(2)
    assert address
    assert run.plans == (1, 7)
    assert run.ctx.stats.rebound_kv == 3


def test_a_held_session_does_not_keep_a_deleted_caches_buffers(model: ToyBackbone) -> None:
    import weakref

    run, other = Run(model, "symbol"), Run(toy(seed=6), "symbol")
    run.steps(2)
    gone = weakref.ref(run.cache.layer(0)["k"])
    run.cache = None  # type: ignore[assignment]
    other.ctx = run.ctx
    other.steps(1)
    assert gone() is None
    assert all(isinstance(session, DecodeSession) for session in run.ctx.sessions)


def test_a_state_dict_round_trip_in_place_keeps_the_plan(model: ToyBackbone, path: str) -> None:
    run = Run(model, path)
    run.steps(2)
    fill(model, seed=1)  # swaps every parameter's data
    assert model.weights_epoch() == 1
    run.steps(1)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    run.steps(2)
    assert run.plans == (2, 3)
    assert KvCache is type(run.cache)

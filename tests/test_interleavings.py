"""Any order of steps, truncations, swaps, live changes and failures: right logits, and exactly the plans they need.

A state machine drives contexts, caches and models at random. After every step the logits are compared with an
independent run, and the counters with ``Predicted``, a model of the reuse rules written from their description. A
test of outputs alone cannot see a plan that was rebuilt for nothing, a test of counters cannot see a wrong one.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy_backbone import ToyBackbone, ToyConfig, fill, reference

from fuel_core import layers
from fuel_core.errors import CapacityError, GeometryError, RecordingError
from fuel_core.kv_cache import KvCache
from fuel_core.mask_and_rope import MaskPlan, RopePlan, RopeVariant
from fuel_core.persistent_decode import InferenceContext, forward_decode_step, forward_with_kv_context

# Logits are about 5. Against the float64 reference the path errs by up to 2e-5 (float32); against a fresh run on the
# same kernels by 0 (1e-5 when a product takes another route under a dispatch mode). The mildest sabotage below, one
# stale weight row, moves them by 1e-2.
TOLERANCE = 2e-4
BASE = ToyConfig(
    vocab_size=31, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=10, rotary_dim=10, window=3, windowed_layers=(1,), rope_thetas=(100.0, 9000.0),
)  # fmt: skip
OTHER = dataclasses.replace(BASE, num_key_value_heads=4, window=None, softcap=9.0)


@dataclasses.dataclass(frozen=True)
class Live:
    """The bound settings of a model: what a live change may alter."""

    window: int | None
    windowed_layers: tuple[int, ...]
    thetas: tuple[float, ...]

    def structure(self) -> tuple[object, ...]:
        """What of it is baked: which layers have a window, and which rotate otherwise than layer 0."""
        windowed = [self.window is not None and i in self.windowed_layers for i in range(2)]
        return (*windowed, self.thetas[0] != self.thetas[-1])


class Model:
    """A backbone and what a test knows about it."""

    count = 0

    def __init__(self, config: ToyConfig) -> None:
        Model.count += 1
        self.uid, self.seed = Model.count, Model.count
        self.backbone = ToyBackbone(config)
        fill(self.backbone, self.seed)
        self.kind = config.num_key_value_heads
        self.config_live = Live(config.window, config.windowed_layers or (), config.rope_thetas)
        self.mask_override: tuple[int | None, tuple[int, ...]] | None = None
        self.rope_override: tuple[float, ...] | None = None
        self.epoch = 0  # storage swapped
        self.content = 0  # values changed, in place or not
        self.kept_alive: list[Any] = []

    @property
    def live(self) -> Live:
        live = self.config_live
        if self.mask_override is not None:
            live = dataclasses.replace(live, window=self.mask_override[0], windowed_layers=self.mask_override[1])
        return live if self.rope_override is None else dataclasses.replace(live, thetas=self.rope_override)

    def reference(self, ids: list[int]) -> Tensor:
        live, backbone = self.live, self.backbone
        config = dataclasses.replace(
            backbone.config, window=live.window, windowed_layers=live.windowed_layers, rope_thetas=live.thetas
        )
        parts = SimpleNamespace(
            config=config, embed_tokens=backbone.embed_tokens, layers=backbone.layers, norm=backbone.norm,
            lm_head=backbone.lm_head,
        )  # fmt: skip
        return reference(parts, ids)  # type: ignore[arg-type]


class Cache:
    """A cache, and beside it a shadow that only fresh steps ever touch."""

    count = 0

    def __init__(self, specs: Any, kind: int, capacity: int, dtype: torch.dtype) -> None:
        Cache.count += 1
        self.uid, self.kind, self.allocation = Cache.count, kind, 0
        make = lambda: KvCache.with_capacity(specs, max_seq_len=capacity, dtype=dtype)  # noqa: E731
        self.real, self.shadow, self.fresh_shadow = make(), make(), make
        self.ids: list[int] = []
        self.under: list[object] = []  # for each id, what it ran under


@dataclasses.dataclass
class Predicted:
    """The rules of reuse for one context, from their description and not from the code that follows them."""

    limit: int
    built: int = 0
    rebinds: int = 0
    repointed: int = 0
    fresh: int = 0
    replans: int = 0
    held: list[list[Any]] = dataclasses.field(default_factory=list)  # [what was baked, allocation], newest first

    @staticmethod
    def baked(model: Model, cache: Cache) -> tuple[Any, ...]:
        return (model.uid, model.epoch, model.live.structure(), cache.real.max_seq_len, cache.real.dtype)

    def many_tokens(self) -> None:
        self.fresh += 1

    def one_token(self, model: Model, cache: Cache) -> set[str]:
        """Count a completed step; returns the reasons it may give for a replan (empty: it must not replan)."""
        baked, allocation = self.baked(model, cache), (cache.uid, cache.allocation)
        others = list(self.held)
        self.forget_moved(model)
        for entry in self.held:
            if entry[0] == baked:
                self.repointed += entry[1] != allocation
                self.rebinds += 1
                entry[1] = allocation
                self.touch(entry)
                return set()
        self.held.insert(0, [baked, allocation])
        del self.held[self.limit :]
        self.built += 1
        self.replans += bool(others)
        return {self.why(entry[0], baked) for entry in others}

    def forget_moved(self, model: Model) -> None:
        self.held = [e for e in self.held if e[0][0] != model.uid or e[0][1] == model.epoch]

    def touch(self, entry: list[Any]) -> None:
        self.held.remove(entry)
        self.held.insert(0, entry)

    @staticmethod
    def why(was: tuple[Any, ...], now: tuple[Any, ...]) -> str:
        names = ("instance", "weights_epoch", "structure", "capacity", "cache_dtype")
        name = next(name for name, a, b in zip(names, was, now, strict=True) if a != b)
        if name == "structure":
            return "mask_structure" if was[2][:2] != now[2][:2] else "rope_structure"
        return name


class Stop(BaseException):
    """Raised in the middle of a step, past every ``except Exception``."""


class FailAtOp(TorchDispatchMode):
    """Let ``n`` ops of a step happen, then raise."""

    def __init__(self, n: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left, self.error = n, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error("injected")
        return func(*args, **(kwargs or {}))


any_token = st.integers(0, BASE.vocab_size - 1)
prompt = st.one_of(st.just([]), st.lists(any_token, min_size=4, max_size=6))
# Half of the time what was used last is used again: what follows a change matters more than how many there are.
pick = st.integers(0, 9)
LAST = 5


class Interleavings(RuleBasedStateMachine):
    offset_path = "symbol"

    @initialize(prompts=st.lists(prompt, min_size=3, max_size=3))
    def start(self, prompts: list[list[int]]) -> None:
        Model.count = Cache.count = 0  # weights depend on the example alone
        self.models = [Model(BASE), Model(BASE), Model(OTHER)]
        self.contexts = [
            (InferenceContext("cpu", offset_path=self.offset_path), Predicted(4)),
            (InferenceContext("cpu", offset_path=self.offset_path, max_sessions=1), Predicted(1)),
        ]
        self.off = InferenceContext("cpu", offset_path=self.offset_path, plan="off")
        self.caches: list[Cache] = []
        self.last: tuple[Cache, Model, bool] | None = None
        self.returned: deque[tuple[Tensor, Tensor]] = deque(maxlen=6)
        for kind, capacity in ((2, 12), (2, 12), (4, 12)):
            self.new_cache(kind, capacity, torch.float32)
        for cache, model, ids in zip(self.caches, self.models, prompts, strict=True):
            self.feed(cache, model, ids)

    def new_cache(self, kind: int, capacity: int, dtype: torch.dtype) -> None:
        specs = next(m for m in self.models if m.kind == kind).backbone.layer_state_specs()
        self.caches.append(Cache(specs, kind, capacity, dtype))

    def cache(self, c: int) -> Cache:
        if c >= LAST and self.last is not None and self.last[0] in self.caches:
            return self.last[0]
        return self.caches[c % len(self.caches)]

    def model(self, m: int) -> int:
        if m >= LAST and self.last is not None and self.last[1] in self.models:
            return self.models.index(self.last[1])
        return m % 3

    def choose(self, c: int, m: int) -> tuple[Cache, Model]:
        cache, model = self.cache(c), self.models[self.model(m)]
        if model.kind == cache.kind:
            return cache, model
        fitting = [model for model in self.models if model.kind == cache.kind]
        return cache, fitting[m % len(fitting)]

    def context(self, small: bool) -> tuple[InferenceContext, Predicted]:
        return self.contexts[small]

    # -- steps ------------------------------------------------------------------------------------------

    def step(self, cache: Cache, model: Model, ids: list[int], small: bool, fail_at: FailAtOp | None = None) -> None:
        ctx, predicted = self.context(small)
        if len(cache.ids) + len(ids) > cache.real.max_seq_len:
            with pytest.raises(CapacityError):
                forward_decode_step(model.backbone, ids, cache.real, ctx)
            return
        before = dict(ctx.stats.replans)
        if fail_at is not None:
            try:
                with fail_at:
                    logits = forward_decode_step(model.backbone, ids, cache.real, ctx)
            except (Stop, RuntimeError, RecordingError):
                self.failed(cache, model, ctx, predicted, len(ids) == 1)
                return
        else:
            logits = forward_decode_step(model.backbone, ids, cache.real, ctx)
        reasons = set()
        if len(ids) > 1:
            predicted.many_tokens()
        else:
            reasons = predicted.one_token(model, cache)
        given = {r for r, n in ctx.stats.replans.items() if n != before.get(r, 0)}
        assert len(given) == bool(reasons), f"replanned for {given}, expected one of {reasons}"
        assert given <= reasons
        self.last = (cache, model, small)
        cache.ids += ids
        cache.under += [(model.uid, model.content, model.live)] * len(ids)
        self.check_logits(cache, model, ids, logits)

    def failed(self, cache: Cache, model: Model, ctx: InferenceContext, predicted: Predicted, single: bool) -> None:
        """A step that failed half-way: nothing is counted, but for a re-pointing that was complete before."""
        if not single:
            return
        repointed = ctx.stats.rebound_kv - predicted.repointed
        baked = predicted.baked(model, cache)
        predicted.forget_moved(model)
        for entry in predicted.held:
            if entry[0] == baked:
                assert repointed == 0 or entry[1] != (cache.uid, cache.allocation)
                if repointed:
                    entry[1] = (cache.uid, cache.allocation)
                predicted.repointed += repointed
                predicted.touch(entry)
                break

    def check_logits(self, cache: Cache, model: Model, ids: list[int], logits: Tensor) -> None:
        shadow = forward_with_kv_context(model.backbone, ids, cache.shadow, self.off)
        self.returned.append((logits, logits.clone()))
        assert logits.dtype == torch.float32
        assert logits.shape == (model.backbone.config.vocab_size,)
        assert (logits - shadow).abs().max() < TOLERANCE
        if cache.real.dtype == torch.float32 and len(set(cache.under)) == 1:
            assert (logits - model.reference(cache.ids)[-1]).abs().max() < TOLERANCE

    def feed(self, cache: Cache, model: Model, ids: list[int]) -> None:
        """Rows beyond the window, so that the next steps can show whether it is there."""
        if ids:
            self.step(cache, model, ids, False)

    @rule(c=pick, m=pick, token=any_token, small=st.booleans(), repeat=st.integers(1, 4))
    def single(self, c: int, m: int, token: int, small: bool, repeat: int) -> None:
        cache, model = self.choose(c, m)
        for i in range(repeat):
            self.step(cache, model, [(token + i) % BASE.vocab_size], small)

    @rule(token=any_token, repeat=st.integers(1, 4))
    def again(self, token: int, repeat: int) -> None:
        for i in range(repeat):
            if self.last is not None and self.last[0] in self.caches and self.last[1] in self.models:
                self.step(self.last[0], self.last[1], [(token + i) % BASE.vocab_size], self.last[2])

    @rule(token=any_token, small=st.booleans())
    def alternate(self, token: int, small: bool) -> None:
        for cache in self.caches[:3]:
            self.step(cache, self.choose(self.caches.index(cache), token)[1], [token], small)

    @rule(c=pick, m=pick, ids=st.lists(any_token, min_size=2, max_size=5), small=st.booleans())
    def chunk(self, c: int, m: int, ids: list[int], small: bool) -> None:
        self.step(*self.choose(c, m), ids, small)

    @rule(c=pick, m=pick, ids=st.lists(any_token, min_size=1, max_size=2), small=st.booleans(),
          after=st.integers(0, 90), error=st.sampled_from([Stop, RuntimeError]))  # fmt: skip
    def interrupted(self, c: int, m: int, ids: list[int], small: bool, after: int, error: type[BaseException]) -> None:
        self.step(*self.choose(c, m), ids, small, FailAtOp(after, error))

    @rule(token=any_token, small=st.booleans())
    def wrong_geometry(self, token: int, small: bool) -> None:
        cache = self.caches[0]
        model = next(model for model in self.models if model.kind != cache.kind)
        if len(cache.ids) < cache.real.max_seq_len:
            with pytest.raises(GeometryError):
                forward_decode_step(model.backbone, [token], cache.real, self.context(small)[0])

    # -- caches -----------------------------------------------------------------------------------------

    @rule(c=pick, keep=st.integers(0, 11))
    def truncate(self, c: int, keep: int) -> None:
        cache = self.cache(c)
        n = min(keep, len(cache.ids))
        cache.real.truncate_to(n)
        old, cache.shadow = cache.shadow, cache.fresh_shadow()
        cache.shadow.copy_prefix_from(old, n)
        del cache.ids[n:], cache.under[n:]

    @rule(c=pick, m=pick, ids=prompt)
    def clear(self, c: int, m: int, ids: list[int]) -> None:
        cache = self.cache(c)
        cache.real.clear()
        cache.shadow = cache.fresh_shadow()
        cache.ids, cache.under = [], []
        cache.allocation += 1
        self.feed(*self.choose(self.caches.index(cache), m), ids)

    @rule(c=pick, layer=st.integers(0, 1), dirty=st.booleans())
    def set_layer(self, c: int, layer: int, dirty: bool) -> None:
        cache = self.cache(c)
        cache.real.ensure_storage()
        buffers = {name: t.clone() for name, t in cache.real.layer(layer).items()}
        if dirty:  # rows that no step has written are the caller's leftovers
            for t in buffers.values():
                t[:, :, len(cache.ids) :] = float("nan")
        cache.real.set_layer(layer, buffers)
        cache.allocation += 1

    @precondition(lambda self: len(self.caches) < 6)
    @rule(kind=st.sampled_from([2, 4]), capacity=st.sampled_from([7, 12]), bf16=st.booleans())
    def another_cache(self, kind: int, capacity: int, bf16: bool) -> None:
        self.new_cache(kind, capacity, torch.bfloat16 if bf16 else torch.float32)

    @rule(c=pick, m=pick, ids=prompt)
    def replace_cache(self, c: int, m: int, ids: list[int]) -> None:
        """The old buffers are freed first, so that the new ones are likely to get their addresses."""
        old = self.cache(c)
        self.caches.remove(old)
        self.last = None
        kind, capacity, dtype = old.kind, old.real.max_seq_len, old.real.dtype
        del old
        gc.collect(0)
        self.new_cache(kind, capacity, dtype)
        self.caches.insert(0, self.caches.pop())
        self.feed(*self.choose(0, m), ids)

    # -- models -----------------------------------------------------------------------------------------

    @rule(m=pick)
    def replace_model(self, m: int) -> None:
        m, self.last = self.model(m), None
        config = self.models[m].backbone.config
        self.models[m] = None  # type: ignore[call-overload]
        gc.collect(0)
        self.models[m] = Model(config)

    @rule(m=pick)
    def copy_model(self, m: int) -> None:
        m = self.model(m)
        old, Model.count = self.models[m], Model.count + 1
        new = copy.copy(old)
        new.uid, new.epoch, new.kept_alive = Model.count, 0, []
        new.backbone = copy.deepcopy(old.backbone)
        self.models[m] = new

    @rule(m=pick, window=st.sampled_from([None, 1, 2, 4, 40]), which=st.sampled_from([(0,), (1,), (0, 1)]))
    def assign_mask(self, m: int, window: int | None, which: tuple[int, ...]) -> None:
        model = self.models[self.model(m)]
        plan = MaskPlan.dense(2) if window is None else MaskPlan.per_layer_window(2, window, lambda i: i in which)
        model.backbone.mask_plan = plan
        model.mask_override = (window, which)

    @rule(m=pick, thetas=st.sampled_from([(100.0,), (50.0, 50.0), (100.0, 9000.0), (7.0, 300.0)]))
    def assign_rope(self, m: int, thetas: tuple[float, ...]) -> None:
        model = self.models[self.model(m)]
        first, last = RopeVariant.default(10, thetas[0]), RopeVariant.default(10, thetas[-1])
        model.backbone.rope_plan = RopePlan.per_layer_variant(2, last, first, lambda i: i % 2 == 1)
        model.rope_override = thetas

    @rule(m=pick, window=st.sampled_from([None, 2, 5]), thetas=st.sampled_from([(20.0,), (20.0, 700.0)]),
          what=st.sampled_from(["window", "thetas", "both"]))  # fmt: skip
    def reconfigure(self, m: int, window: int | None, thetas: tuple[float, ...], what: str) -> None:
        """Takes the place of assigned plans as well."""
        model = self.models[self.model(m)]
        if model.backbone.config.windowed_layers is None:
            window = None
        changes: dict[str, Any] = {"window": window} if what != "thetas" else {}
        changes |= {"rope_thetas": thetas} if what != "window" else {}
        model.backbone.reconfigure(**changes)
        config = model.backbone.config
        model.config_live = Live(config.window, config.windowed_layers or (), config.rope_thetas)
        model.mask_override = model.rope_override = None

    @rule(m=pick, layer=st.integers(0, 1))
    def edit_weight_in_place(self, m: int, layer: int) -> None:
        model = self.models[self.model(m)]
        model.backbone.layers[layer].v_proj.weight.mul_(-0.9)
        model.content += 1

    @rule(
        m=pick,
        layer=st.integers(0, 1),
        how=st.sampled_from(["parameter", "data", "to", "assign", "module"]),
    )
    def move_weights(self, m: int, layer: int, how: str) -> None:
        model = self.models[self.model(m)]
        backbone, chosen = model.backbone, model.backbone.layers[layer]
        # Kept alive: storage freed here could be handed out again, and then nothing would have moved.
        model.kept_alive += [p.data for p in backbone.parameters()]
        if how == "parameter":
            chosen.o_proj.weight = nn.Parameter(-chosen.o_proj.weight.detach(), requires_grad=False)
        elif how == "data":
            chosen.k_proj.weight.data = chosen.k_proj.weight.data * 0.8
        elif how == "to":
            backbone.to(torch.bfloat16)
            model.kept_alive += [p.data for p in backbone.parameters()]
            backbone.to(torch.float32)
        elif how == "assign":
            state = {name: t * 0.97 for name, t in backbone.state_dict().items()}
            backbone.load_state_dict(state, assign=True)
        else:
            new = layers.Linear(40, 48)
            new.weight.data = -chosen.down_proj.weight.detach()
            chosen.down_proj = new
        model.epoch += 1
        model.content += 1

    # -- after every rule -------------------------------------------------------------------------------

    @invariant()
    def counters_are_the_predicted_ones(self) -> None:
        for ctx, predicted in getattr(self, "contexts", ()):
            found = ctx.stats
            assert (found.plans_built, found.rebinds, found.rebound_kv, found.fresh_steps) == (
                predicted.built, predicted.rebinds, predicted.repointed, predicted.fresh,
            )  # fmt: skip
            assert sum(found.replans.values()) == predicted.replans
            assert len(ctx.sessions) <= predicted.limit

    @invariant()
    def returned_logits_stay_as_they_were(self) -> None:
        assert all(torch.equal(logits, copied) for logits, copied in getattr(self, "returned", ()))

    @invariant()
    def caches_hold_what_was_fed(self) -> None:
        for cache in getattr(self, "caches", ()):
            assert cache.real.token_ids == cache.ids
            assert cache.real.cached_len == len(cache.ids)


class OnDeviceOffset(Interleavings):
    offset_path = "device"


def run(machine: type[Interleavings], examples: int, steps: int, **more: Any) -> None:
    # Not shrunk: a failing run would take minutes. Add Phase.shrink to look into one.
    options = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate), **more,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=options)


@pytest.mark.parametrize("machine", [Interleavings, OnDeviceOffset])
def test_interleavings_keep_logits_right_and_plans_counted(machine: type[Interleavings]) -> None:
    run(machine, examples=40, steps=35, derandomize=True)

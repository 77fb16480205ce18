"""Do dims, plans, state specs and weights say the same thing, and does the family say it in the core's words?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from fuel_core.backbone import DecodeBackbone
from fuel_core.checkpoint import RawConfig, load_weights, open_checkpoint
from fuel_core.checkpoint.weights import LoadReport
from fuel_core.decode_shape import canonical
from fuel_core.errors import DecodeError, FuelError, WeightsError
from fuel_core.kv_cache import KeyValue, KvCache, Slots
from fuel_core.persistent_decode import InferenceContext, forward_decode_step, forward_with_kv_context
from fuel_core.testing.hostile import complaints
from fuel_core.testing.oracles import write_checkpoint
from fuel_core.testing.registry import check, require, skip
from fuel_core.testing.structure import projection_biases
from fuel_core.testing.workspace import PATHS, Case, Workspace


@check(per_config=False)
def family_record(workspace: Workspace) -> None:
    """A declared model_type that the family does not list, so that no checkpoint of it would ever find the family."""
    family = workspace.family
    for name, config in workspace.declaration.configs.items():
        word = config.get("model_type")
        require(
            word in family.model_types,
            f"{name}: model_type {word!r} is not among those that the family serves: {', '.join(family.model_types)}",
        )


@check()
def config_is_frozen(case: Case) -> None:
    """A spec that can change under a held plan, differs from one reading to the next, or holds what no key can take."""
    spec = case.spec
    frozen = dataclasses.is_dataclass(spec) and getattr(type(spec), "__dataclass_params__").frozen  # noqa: B009
    case.require(frozen, f"resolve_config must give a frozen dataclass, found {type(spec).__name__}")
    case.require(case.family.resolve_config(case.raw) == spec, "the same config resolves to two different specs")
    hash(spec)
    config = case.shared.decode_config()
    names = {field.name for field in dataclasses.fields(config)}
    bound = case.shared.decode_bound_fields()
    case.require(bound <= names, f"decode_bound_fields names no field of the spec: {sorted(bound - names)}")
    for field in dataclasses.fields(config):
        if field.compare:
            canonical(getattr(config, field.name))


_ROPE_BLOCK, _ROPE_OLD, _BASE = "rope_parameters", "rope_scaling", "rope_theta"


def respelled(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """A config.json in the other of its two spellings; None where it says nothing that has two."""
    made = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    if "dtype" in config:
        made["torch_dtype"] = config["dtype"]
    elif "torch_dtype" in config:
        made["dtype"] = config["torch_dtype"]
    block = config.get(_ROPE_BLOCK)
    if isinstance(block, Mapping) and all(not isinstance(value, Mapping) for value in block.values()):
        rest = {k: v for k, v in block.items() if k != _BASE}
        kind = rest.pop("rope_type", "default")
        del made[_ROPE_BLOCK]
        if _BASE in block:
            made[_BASE] = block[_BASE]
        if kind == "default":
            made |= rest
        else:
            made[_ROPE_OLD] = {"type": kind, **{k: v for k, v in rest.items() if k != "type"}}
    elif block is None and _BASE in config:
        scaling = dict(config.get(_ROPE_OLD) or {})
        kind = scaling.pop("type", None) or scaling.pop("rope_type", "default")
        made.pop(_ROPE_OLD, None)
        del made[_BASE]
        made[_ROPE_BLOCK] = {"rope_type": kind, _BASE: config[_BASE], **scaling}
    return None if made == dict(config) else made


@check()
def config_spellings_agree(case: Case) -> None:
    """A value that one published spelling loses: as declared, as the oracle wrote it, or in the other of the two."""
    raw, asked = dict(case.raw), dict(case.declaration.configs[case.name])
    other = respelled(raw)
    # A reference library renames what it reads: only the declared config still has the names that releases have.
    if asked != raw:
        try:
            declared = case.family.resolve_config(RawConfig.from_config(asked))
        except FuelError as error:
            case.require(False, f"the config is refused as it is declared, and read as the oracle wrote it: {error}")
        differ = _differences(declared, case.spec)
        case.require(not differ, f"the config as declared and as the oracle wrote it differ in {differ}")
    elif other is None:
        skip("the config has nothing that is spelt in two ways")
    if other is not None:
        differ = _differences(case.family.resolve_config(RawConfig.from_config(other)), case.spec)
        case.require(not differ, f"the config in its other spelling and as it is written differ in {differ}")


def _differences(one: Any, other: Any) -> str:
    """The compared fields that differ, each with both values; empty where there are none."""
    return ", ".join(f"{name} ({a!r} and {b!r})" for name, a, b in _pairs(one, other))


def _pairs(one: Any, other: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    if type(one) is not type(other):
        yield f"{prefix}class", type(one).__name__, type(other).__name__
        return
    for field in dataclasses.fields(other):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if not field.compare or a == b:
            continue
        if dataclasses.is_dataclass(a) and dataclasses.is_dataclass(b):
            yield from _pairs(a, b, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, a, b


@check()
def hostile_configs_are_refused(case: Case) -> None:
    """A value that a key cannot have (another type, infinite, huge, zero) that ends in a crash, not in our error."""
    found = list(islice(complaints(case.family, case.raw), 3))
    case.require(not found, "; ".join(found))


@check()
def build_allocates_nothing(case: Case) -> None:
    """A build that makes tensors of its own: memory and time before a byte of the checkpoint is read."""
    backbone = case.build()
    case.require(isinstance(backbone, DecodeBackbone), f"build must give a DecodeBackbone, found {type(backbone)}")
    real = [n for n, t in (*backbone.named_parameters(), *backbone.named_buffers()) if not t.is_meta]
    case.require(not real, f"build allocates {', '.join(real[:5])}; leave tensors to torch.device('meta')")


@check()
def dims_agree(case: Case) -> None:
    """Dims, state specs, plans and modules that disagree about layers, widths or the vocabulary."""
    model = case.shared
    dims, specs = model.decode_dims(), model.layer_state_specs()
    layers = len(specs)
    case.require(dims.n_layers == layers, f"dims say {dims.n_layers} layers, the state specs {layers}")
    for name, plan in (("mask", model.decode_mask_plan()), ("rope", model.decode_rope_plan())):
        case.require(
            plan.n_layers == layers, f"the {name} plan covers {plan.n_layers} layers, the state specs {layers}"
        )
    for index, spec in enumerate(specs):
        case.require(isinstance(spec, KeyValue | Slots), f"layer {index} keeps {spec!r}, a KeyValue or Slots expected")
        if isinstance(spec, KeyValue):
            width = model.decode_rope_plan().variants[model.decode_rope_plan().variant_for_layer(index)].width
            case.require(width <= spec.head_dim, f"layer {index} rotates {width} features of {spec.head_dim}")
    width = model.decode_rope_plan().width
    case.require(dims.rope_width == width, f"dims say rope_width {dims.rope_width}, the rope plan {width}")
    rows = model.decode_token_embedding()(torch.tensor([[0, 1]]))
    case.require(
        list(rows.shape) == [1, 2, dims.hidden], f"dims say hidden {dims.hidden}, the embedding {list(rows.shape)}"
    )
    h = torch.zeros(1, 1, dims.hidden)
    out = model.decode_final_norm_and_head(h)
    case.require(
        list(out.shape) == [1, 1, dims.vocab], f"dims say vocab {dims.vocab}, the head gives {list(out.shape)}"
    )
    declared = getattr(case.spec, "num_hidden_layers", layers)
    case.require(declared == layers, f"the config has {declared} layers, the state specs {layers}")


def _load(case: Case, folder: Any) -> tuple[DecodeBackbone, LoadReport]:
    backbone = case.build()
    with open_checkpoint(folder) as checkpoint:
        report = load_weights(backbone, checkpoint, case.family)
    return backbone, report


def _tensors(case: Case) -> dict[str, torch.Tensor]:
    with open_checkpoint(case.folder) as checkpoint:
        return {name: checkpoint.tensor(name).clone() for name in checkpoint.tensor_names()}


@check()
def tensors_are_used_once(case: Case) -> None:
    """A tensor of the checkpoint that is skipped, a missing one that goes unnoticed, one more that nobody misses."""
    _, report = _load(case, case.folder)
    surprising = sorted(set(report.skipped) - set(case.declaration.skipped_tensors))
    case.require(not surprising, f"tensors are left out of the model: {', '.join(surprising[:5])}")
    tensors = _tensors(case)
    config = dict(case.raw)
    tied = {taker for taker, _ in case.build().tied_weights()}
    trials: list[tuple[str, dict[str, torch.Tensor]]] = [
        ("one too many", {**tensors, "fuel.extra.weight": torch.zeros(3)})
    ]
    for name in tensors:
        if name not in tied and name not in report.skipped:
            trials.append((f"without {name}", {k: v for k, v in tensors.items() if k != name}))
    # The first, the last and one of every few between: each is a folder to write.
    for number, (what, changed) in enumerate([trials[0], *trials[1 :: max(1, len(trials) // 4)]]):
        folder = case.workspace.folder / f"{case.name}-tensors-{number}"
        folder.mkdir(exist_ok=True)
        write_checkpoint(folder, config, changed)
        try:
            _load(case, folder)
        except WeightsError:
            continue
        case.require(False, f"a checkpoint {what} loads without an error")


@check()
def every_weight_reaches_the_logits(case: Case) -> None:
    """A bias, a gain or a matrix that is loaded and then forgotten in the arithmetic."""
    model = case.model()
    ids = case.ids(6)

    def logits() -> tuple[torch.Tensor, KvCache]:
        cache = case.cache(model, len(ids))
        ctx = InferenceContext("cpu", plan="off")
        return forward_with_kv_context(model, ids, cache, ctx, all_positions=True), cache

    before, kept_cache = logits()
    silent = []
    for name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            # No multiple and no constant: attention ignores what all keys share, a norm what all features do.
            noise = torch.linspace(-1.0, 1.0, kept.numel()).view(kept.shape)
            parameter.add_((noise * 3.0).to(parameter.dtype)).mul_(1.5)
            after, cache = logits()
            if torch.equal(after, before) and not _only_keys_moved_alike(model, kept_cache, cache):
                silent.append(name)
            parameter.copy_(kept)
    case.require(not silent, f"{len(silent)} weights change nothing when they are changed: {', '.join(silent[:5])}")
    case.require(torch.equal(logits()[0], before), "the same ids give other logits the second time")


def _only_keys_moved_alike(model: DecodeBackbone, one: KvCache, other: KvCache) -> bool:
    """Without rotation, softmax does not see a bias that all keys share; its arithmetic may even be exact."""
    moved = False
    for index, spec in enumerate(model.layer_state_specs()):
        for slot in spec.slots:
            change = other.layer(index)[slot.name] - one.layer(index)[slot.name]
            if not change.any():
                continue
            if not isinstance(spec, KeyValue) or slot.name != "k" or slot.seq_axis is None:
                return False
            rows = change.movedim(slot.seq_axis, 0)[: one.cached_len]
            if not torch.allclose(rows, rows[:1].expand_as(rows), atol=1e-5):
                return False
            moved = True
    return moved


@check()
def steps_write_their_own_rows(case: Case) -> None:
    """A step that leaves one of its state rows unwritten, or writes over rows of earlier positions."""
    model, ids = case.shared, case.ids(case.prompt + 2)
    for path in PATHS:
        run = case.run(model, ids[: case.prompt], [case.prompt], path=path, capacity=case.prompt + 4)
        for token in ids[case.prompt :]:
            at = run.cache.cached_len
            before = [{n: t.clone() for n, t in run.cache.layer(i).items()} for i in range(run.cache.n_layers)]
            forward_decode_step(model, [token], run.cache, run.ctx)
            for index, was in enumerate(before):
                for slot in model.layer_state_specs()[index].slots:
                    now, axis = run.cache.layer(index)[slot.name], slot.seq_axis
                    if axis is None:
                        continue
                    moved = (now != was[slot.name]).movedim(axis, 0).flatten(1).any(1)
                    case.require(
                        not moved[:at].any(), f"layer {index} rewrites {slot.name!r} of earlier positions ({path})"
                    )
                    case.require(moved[at], f"layer {index} does not write {slot.name!r} at its position ({path})")


@check()
def errors_carry_the_family(case: Case) -> None:
    """A refusal that does not say whose model it is about."""
    model = case.shared
    family = model.decode_family()
    case.require(isinstance(family, str) and family.strip(), f"decode_family must give a name, found {family!r}")
    case.require(model.decode_family() == case.build().decode_family(), "decode_family is not the same for two models")
    ids = case.ids(4)
    spec = KeyValue(7, 6)
    wrong = KvCache.with_capacity([spec], max_seq_len=8, dtype=torch.float32)
    attempts = {
        "a full cache": (ids, case.cache(model, 2)),
        "an id beyond the vocabulary": ([case.vocab], case.cache(model, 8)),
        "a cache of another model": (ids, wrong),
        "no ids": ([], case.cache(model, 8)),
    }
    for what, (given, cache) in attempts.items():
        try:
            forward_decode_step(model, given, cache, InferenceContext("cpu"))
        except DecodeError as error:
            case.require(family in str(error), f"the error for {what} does not name {family!r}: {error}")
        else:
            case.require(False, f"{what} is not refused")


def observed(model: DecodeBackbone, spec: Any) -> set[str]:
    """The capabilities that one built model shows."""
    mask, rope, dims = model.mask_plan, model.rope_plan, model.decode_dims()
    found = set()
    specs = model.layer_state_specs()
    if any(window is not None for window in mask.windows):
        found.add("window")
    if mask.n_variants > 1:
        found.add("window_variants")
    if rope.n_variants > 1:
        found.add("rope_variants")
    if dims.embed_scale is not None:
        found.add("embed_scale")
    if any(isinstance(spec, Slots) for spec in specs):
        found.add("named_slots")
    if dims.head_dim is not None and dims.rope_width < dims.head_dim:
        found.add("partial_rotary")
    if model.tied_weights():
        found.add("tied_head")
    if projection_biases(model):
        found.add("bias")
    heads, groups = getattr(spec, "num_attention_heads", None), getattr(spec, "num_key_value_heads", None)
    if heads is not None and groups is not None:
        found.add("grouped_heads" if groups < heads else "full_heads")
    return found


@check(per_config=False)
def capabilities_are_true(workspace: Workspace) -> None:
    """A capability that is claimed and shown by no config, or shown and not claimed: its checks would never run."""
    shown: set[str] = set()
    for case in workspace.cases:
        shown |= observed(case.shared, case.spec)
        if "rope" not in shown and "rope" in _bound_reads(case):
            shown.add("rope")
    claimed = set(workspace.declaration.capabilities)
    require(claimed <= shown, f"no config shows {', '.join(sorted(claimed - shown))}, which the family claims")
    require(shown <= claimed, f"configs show {', '.join(sorted(shown - claimed))}, which the family does not claim")


def _bound_reads(case: Case) -> set[str]:
    run = case.run(case.shared, case.ids(1))
    return {"rope"} if {"cos", "sin"} & set(run.ctx.sessions[0].reads) else set()


@check(per_config=False)
def fixtures_can_see(workspace: Workspace) -> None:
    """Configs in which a defect would not show: a window that never bites, equal bases, sizes that coincide."""
    claimed = workspace.declaration.capabilities
    apart = False
    for case in workspace.cases:
        model, dims = case.shared, case.shared.decode_dims()
        widest = case.window or 0
        require(widest <= 24, f"{case.name}: a window of {widest} is too wide for a short run; take 24 or less")
        for parameter in (p for n, p in model.named_parameters() if p.dim() == 1):
            require(float(parameter.std()) > 0.05, f"{case.name}: a vector of the checkpoint is constant")
        require(
            dims.rope_width >= 4, f"{case.name}: rope_width {dims.rope_width} has too few frequencies; take 4 or more"
        )
        power = dims.hidden & (dims.hidden - 1) == 0
        require(not power, f"{case.name}: hidden {dims.hidden} is a power of two, which hides wrong strides; take 96")
        heads, head_dim = getattr(case.spec, "num_attention_heads", None), dims.head_dim
        apart |= heads is None or head_dim is None or heads * head_dim != dims.hidden
        rope = model.rope_plan
        require(
            len(set(rope.variants)) == rope.n_variants,
            f"{case.name}: two rotations of the plan are equal; vary the base",
        )
        require(dims.n_layers >= 2, f"{case.name}: one layer cannot show what differs between layers; take 2 or more")
    require(
        apart,
        "in every config the queries are as wide as the hidden state; give one another head_dim, or, where the "
        "architecture has none but hidden / heads, list the check in expected_failures (docs/recipes.md)",
    )
    if "grouped_heads" in claimed:
        groups = [c.spec for c in workspace.cases if c.spec.num_key_value_heads < c.spec.num_attention_heads]
        require(
            any(s.num_key_value_heads > 1 for s in groups), "no config has several kv heads with several queries each"
        )

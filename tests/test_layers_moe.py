"""Mixture of experts: the formula, what a step reads, formats, plans on both offset paths, and loading."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from toy_backbone import ToyConfig, new_cache
from toy_moe import N_CHOSEN, N_EXPERTS, MoeToy, every_expert, moe_reference, moe_toy, pack_experts

from fuel_core import layers
from fuel_core.backbone import DecodeLayerInputs
from fuel_core.checkpoint import load_weights, open_checkpoint
from fuel_core.checkpoint.weights import planned_formats
from fuel_core.errors import ConfigError, WeightsError
from fuel_core.families import Family
from fuel_core.kv_cache import KeyValue
from fuel_core.persistent_decode import InferenceContext, forward_decode_step

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
PATHS = [(plan, offset) for plan in ("off", "recorded") for offset in ("symbol", "device")]
BOUNDS = {"f32": 1e-4, "bf16": 5e-2, "int8": 8e-2, "int4": 8e-2}
"""Genuine, logits up to 5: f32 7e-6; packed ones against the numbers they store bf16 1.3e-2, int8 2.1e-2, int4 1.5e-2.
Without renormalised weights 0.6; the next best expert in place of the last chosen 0.9.
"""


def run(model: MoeToy, plan: str, offset_path: str, prompt: int = 4) -> tuple[float, InferenceContext]:
    """Largest difference to the reference at any step, and the context that ran it."""
    expected = moe_reference(model, IDS)
    ctx, cache = InferenceContext("cpu", plan=plan, offset_path=offset_path), new_cache(model)
    rows = [(prompt - 1, forward_decode_step(model, IDS[:prompt], cache, ctx))]
    rows += [(i, forward_decode_step(model, [IDS[i]], cache, ctx)) for i in range(prompt, len(IDS))]
    return max(float((row - expected[i]).abs().max()) for i, row in rows), ctx


@pytest.mark.parametrize(("plan", "offset_path"), PATHS)
@pytest.mark.parametrize("word", BOUNDS)
def test_every_step_equals_the_formula_on_the_stored_numbers(word: str, plan: str, offset_path: str) -> None:
    for renormalize in (True, False):
        model = moe_toy(renormalize=renormalize)
        if word != "f32":
            pack_experts(model, word)
        error, ctx = run(model, plan, offset_path)
        assert error < BOUNDS[word]
        if plan == "recorded":
            assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.replans) == (1, len(IDS) - 5, {})


def test_the_bounds_see_other_weights_and_other_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = moe_toy(), moe_toy(renormalize=False)
    difference = (moe_reference(model, IDS) - moe_reference(plain, IDS)).abs().max()
    assert float(difference) > 2 * max(BOUNDS.values())
    original = layers.Router.forward

    def next_best(self: layers.Router, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = original(self, x)
        return weights, (chosen + 1) % N_EXPERTS

    monkeypatch.setattr(layers.Router, "forward", next_best)
    assert run(model, "recorded", "symbol")[0] > 2 * max(BOUNDS.values())


def test_a_held_plan_follows_the_routing_from_token_to_token() -> None:
    """The probe sees expert 0 alone; were that baked, every later token would go there."""
    model, seen = moe_toy(), set[tuple[int, ...]]()
    original = layers.Router.forward

    def watched(self: layers.Router, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = original(self, x)
        seen.update(tuple(row) for row in chosen.reshape(-1, N_CHOSEN).tolist())
        return weights, chosen

    layers.Router.forward = watched  # type: ignore[method-assign]
    try:
        run(model, "off", "symbol")
    finally:
        layers.Router.forward = original  # type: ignore[method-assign]
    assert len(seen) > 5
    assert run(model, "recorded", "symbol")[0] < BOUNDS["f32"]


# -- what is read ----------------------------------------------------------------------------------------------------


class _Products(TorchDispatchMode):
    """Rows of every product of an activation with a matrix of the given height, and how often anything is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def layer_inputs(x: Tensor, *, device_offset: bool) -> DecodeLayerInputs:
    """What `layers.moe` looks at, for a step of x's length."""
    return DecodeLayerInputs(
        h=x,
        cos=x,
        sin=x,
        mask=x,
        offset=torch.zeros(x.shape[0], dtype=torch.int64) if device_offset else None,
        cached_len=0,
        attended_len=x.shape[1],
        window_start=0,
        state={},
        state_spec=KeyValue(1, 2),
        layer_idx=0,
    )


def moe_of(model: MoeToy, x: Tensor, *, device_offset: bool) -> Tensor:
    layer = model.layers[0]
    return layers.moe(layer_inputs(x, device_offset=device_offset), x, layer.router, layer.experts)


def random_rows(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 96, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("device_offset", [False, True])
def test_experts_that_are_not_chosen_are_never_read(device_offset: bool) -> None:
    """Not even multiplied by zero: NaN in the weights of every other expert stays where it is."""
    model, x = moe_toy(), random_rows(1, 1)
    layer = model.layers[0]
    expected = moe_of(model, x, device_offset=device_offset)
    _, chosen = layer.router(x)
    others = [e for e in range(N_EXPERTS) if e not in chosen.flatten().tolist()]
    assert len(others) == N_EXPERTS - N_CHOSEN
    for stack in (layer.experts.gate_proj, layer.experts.up_proj, layer.experts.down_proj):
        stack.weight.data[others] = float("nan")
    assert torch.equal(moe_of(model, x, device_offset=device_offset), expected)


def test_the_symbol_path_copies_no_weight_and_the_device_path_reads_no_value_back() -> None:
    model, x = moe_toy(), random_rows(1, 1)
    with _Products() as symbol:
        moe_of(model, x, device_offset=False)
    assert symbol.names.count("aten._local_scalar_dense.default") == N_CHOSEN
    assert not [name for name in symbol.names if "index" in name or "gather" in name or "copy" in name]
    with _Products() as device:
        moe_of(model, x, device_offset=True)
    assert "aten._local_scalar_dense.default" not in device.names
    assert device.names.count("aten.index_select.default") == 3 * N_CHOSEN


def test_a_prompt_multiplies_each_expert_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, rows = moe_toy(), random_rows(1, 40), list[int]()
    original = layers.Experts.swiglu

    def counted(self: layers.Experts, x: Tensor, pick: Any) -> Tensor:
        rows.append(x.shape[0])
        return original(self, x, pick)

    monkeypatch.setattr(layers.Experts, "swiglu", counted)
    layer = model.layers[0]
    out = moe_of(model, x, device_offset=False)
    assert len(rows) <= N_EXPERTS
    assert sum(rows) == 40 * N_CHOSEN
    # Genuine 3e-6 at outputs up to 10.
    assert torch.allclose(out[0].double(), every_expert(x[0], layer.router, layer.experts), atol=1e-4)


@pytest.mark.parametrize("length", [1, 5])
def test_two_rows_of_a_batch_are_two_of_one(length: int) -> None:
    model, x = moe_toy(), random_rows(2, length)
    both = moe_of(model, x, device_offset=True)
    one_by_one = torch.cat([moe_of(model, x[i : i + 1], device_offset=True) for i in range(2)])
    assert torch.allclose(both, one_by_one, atol=1e-5)


# -- the router ------------------------------------------------------------------------------------------------------


def test_weights_are_a_softmax_over_all_experts_of_which_the_largest_stay() -> None:
    router = layers.Router(4, 3, 2, renormalize=False)
    router.weight.data = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0]])
    x = torch.tensor([[[1.0, 3.0, 2.0, 0.0]]])
    weights, chosen = router(x)
    # softmax(1, 3, 2) = 0.0900, 0.6652, 0.2447
    assert chosen.tolist() == [[[1, 2]]]
    assert torch.allclose(weights, torch.tensor([[[0.66524, 0.24473]]]), atol=1e-5)
    router.renormalize = True
    assert torch.allclose(router(x)[0], torch.tensor([[[0.73106, 0.26894]]]), atol=1e-5)


@pytest.mark.parametrize("n_chosen", [0, 4])
def test_router_refuses_to_choose_none_or_more_than_there_are(n_chosen: int) -> None:
    with pytest.raises(ConfigError, match=f"1 to 3 expected, found {n_chosen}"):
        layers.Router(4, 3, n_chosen, renormalize=True)


# -- identity --------------------------------------------------------------------------------------------------------


def test_formats_of_experts_key_plans_apart() -> None:
    keys = set()
    for word in ("f32", "int8", "int4"):
        model = moe_toy()
        pack_experts(model, word)
        keys.add(str(model.structure_key()))
    assert len(keys) == 3


def test_replaced_experts_are_followed() -> None:
    model, ctx = moe_toy(), InferenceContext("cpu", plan="recorded")
    cache = new_cache(model)
    before = [forward_decode_step(model, [i], cache, ctx) for i in IDS[:6]][-1]
    for layer in (0, 2):
        stack = model.layers[layer].experts.down_proj
        stack.weight = torch.nn.Parameter(stack.weight.data * 2, requires_grad=False)
    cache.truncate_to(0)
    after = [forward_decode_step(model, [i], cache, ctx) for i in IDS[:6]][-1]
    assert ctx.stats.replans == {"weights_epoch": 1}
    assert float((after - moe_reference(model, IDS[:6])[-1]).abs().max()) < BOUNDS["f32"]
    assert float((after - before).abs().max()) > 1000 * BOUNDS["f32"]


# -- loading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Config(ToyConfig):
    max_position_embeddings: int = 64
    dtype: str = "float32"


FAMILY = Family(
    name="toy",
    model_types=("toy",),
    gguf_architectures=(),
    resolve_config=lambda raw: _Config(),
    build=MoeToy,
)


def _stacked(model: MoeToy) -> dict[str, Tensor]:
    return {name: p.data for name, p in model.named_parameters()}


def _one_by_one(model: MoeToy) -> dict[str, Tensor]:
    found = {}
    for name, tensor in _stacked(model).items():
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            found |= {f"{before}.experts.{e}.{after}": tensor[e].clone() for e in range(N_EXPERTS)}
        else:
            found[name] = tensor
    return found


def _fused(model: MoeToy) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in _stacked(model).items() if ".experts." not in name}
    for i in model.SPARSE:
        experts = model.layers[i].experts
        both = torch.cat((experts.gate_proj.weight.data, experts.up_proj.weight.data), dim=1)
        found[f"layers.{i}.experts.gate_up_proj"] = both
        found[f"layers.{i}.experts.down_proj"] = experts.down_proj.weight.data
    return found


SPELLINGS = {"stacked": _stacked, "one by one": _one_by_one, "fused": _fused}


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "torch_dtype": "float32"}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def load(folder: Path, weights: str = "auto") -> tuple[MoeToy, Any]:
    with open_checkpoint(folder) as checkpoint:
        with torch.device("meta"):
            model = MoeToy(_Config())
        report = load_weights(model, checkpoint, FAMILY, weights=weights)
    return model, report


@pytest.mark.parametrize("word", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_loads_the_same_experts_in_every_format(spelling: str, word: str, tmp_path: Path) -> None:
    model = moe_toy()
    loaded, report = load(write(tmp_path, SPELLINGS[spelling](model)), word)
    if word == "f32":
        assert all(torch.equal(p, dict(loaded.named_parameters())[name]) for name, p in model.named_parameters())
    stack = "layers.0.experts.gate_proj.weight"
    assert report.formats[stack] == word
    assert (loaded.layers[0].router.weight.dtype == torch.float32) == (word != "bf16")
    expected = moe_toy()
    pack_experts(expected, word)
    for name, parameter in expected.named_parameters():
        if ".experts." in name:
            assert torch.equal(dict(loaded.named_parameters())[name], parameter), name


def test_stacks_stay_in_the_file_mapping_where_they_are_stored_so(tmp_path: Path) -> None:
    _, stacked = load(write(tmp_path / "stacked", _stacked(moe_toy())))
    _, apart = load(write(tmp_path / "apart", _one_by_one(moe_toy())))
    experts = 2 * 3 * N_EXPERTS * 96 * 64 * 4
    assert stacked.mapped_bytes - apart.mapped_bytes == experts
    assert apart.parameter_bytes == stacked.parameter_bytes


@pytest.mark.parametrize(("drop", "add"), [(3, None), (None, N_EXPERTS)])
def test_a_missing_or_surplus_expert_is_named(drop: int | None, add: int | None, tmp_path: Path) -> None:
    tensors = _one_by_one(moe_toy())
    if drop is not None:
        del tensors[f"layers.2.experts.{drop}.up_proj.weight"]
    if add is not None:
        tensors[f"layers.2.experts.{add}.up_proj.weight"] = torch.zeros(64, 96)
    word, number = ("missing", drop) if add is None else ("too many", add)
    with pytest.raises(WeightsError, match=rf"each of 6 experts.*{word}: layers\.2\.experts\.{number}\.up_proj"):
        load(write(tmp_path, tensors))


def test_experts_of_two_shapes_are_refused(tmp_path: Path) -> None:
    tensors = _one_by_one(moe_toy())
    tensors["layers.2.experts.1.up_proj.weight"] = torch.zeros(65, 96)
    with pytest.raises(WeightsError, match=r"experts of one shape.*experts\.1\.up_proj"):
        load(write(tmp_path, tensors))


def test_a_wrongly_shaped_stack_is_refused(tmp_path: Path) -> None:
    tensors = _stacked(moe_toy())
    tensors["layers.0.experts.up_proj.weight"] = torch.zeros(N_EXPERTS, 96, 64)
    with pytest.raises(WeightsError, match=r"wrong shapes: layers\.0\.experts\.up_proj\.weight \[6, 96, 64\]"):
        load(write(tmp_path, tensors))


def test_what_would_be_stored_can_be_asked_before_loading(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, _one_by_one(moe_toy()))) as checkpoint:
        with torch.device("meta"):
            model = MoeToy(_Config())
        planned = {plan.parameter: plan for plan in planned_formats(model, checkpoint, FAMILY, "int4")}
    plan = planned["layers.0.experts.down_proj.weight"]
    assert (plan.info.shape, plan.choice.format) == ((N_EXPERTS, 96, 64), "int4")
    sources = plan.source()
    assert isinstance(sources, list)
    assert [source.shape for source in sources] == [(96, 64)] * N_EXPERTS

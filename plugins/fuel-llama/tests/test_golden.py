"""Frozen numbers: what a step of this family says, and how many ops it takes to say it.

A refactor of the shared path that changes either shows here, also where D1 and D2 change together and where a
tolerance against another library would still hold. The weights come from a counter (see tiny_llama), not from a
generator that a release of torch may change.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from fuel_core import InferenceContext, forward_decode_step, forward_with_kv_context
from tiny_llama import PATHS, ROPES, load, new_cache, reference_logits, reference_model, save
from torch import Tensor

from fuel_llama.llama import LlamaBackbone

TOLERANCE = 1e-6
IDS = [11, 42, 7, 63, 20, 5]
"""Three ids of a prompt and three decode steps."""
COLUMNS = slice(0, 66, 6)

GOLDEN_UNIT = 1e-7
GOLDEN = """
358200 945998 -578380 -70334 689181 246167 -1252305 -374624 1179429 -783971 -8335
-1767789 269041 -638267 1195280 -510470 689669 238338 256723 564181 745148 -580960
-2045304 2591783 482046 -282122 636774 2057053 1038252 819518 1514184 1001767 -1985629
-1670678 2670559 -439743 -21837 -442825 280677 160732 598557 1105043 298714 -614023
1021497 2664062 -1442101 1343091 -1051848 2012612 -1344093 2415284 135312 -1264914 -607378
-463102 1854953 711003 -462023 -258196 -379985 1783960 612996 195055 776489 -1148919
"""
"""One line a row of logits, in units of 1e-7."""

# What one step does, in the order it does it. Entries are aten ops without their overload; `getitem` takes one of the
# halves that `chunk` made, `sub` is integer arithmetic on two bound symbols.
ROTATE = ["chunk", "getitem", "getitem", "mul", "neg", "cat", "mul", "add"]
PROJECT = ["linear", "linear", "linear", "view", "transpose", "view", "transpose", "view", "transpose"]
WRITE = {
    "symbol": ["narrow", "copy_", "narrow", "copy_"],
    "device": [
        "unsqueeze",
        "arange",
        "add",
        "flatten",
        "index_copy_",
        "unsqueeze",
        "arange",
        "add",
        "flatten",
        "index_copy_",
    ],
}
READ = {"symbol": ["sub", "narrow", "narrow"], "device": []}
ATTEND = {
    "symbol": ["reshape", "transpose", "matmul", "mul", "softmax", "matmul", "view", "transpose", "reshape"],
    "device": [
        "reshape",
        "transpose",
        "matmul",
        "mul",
        "add",
        "softmax",
        "matmul",
        "view",
        "transpose",
        "reshape",
    ],  # add: the mask
}
OUTPUT = ["linear", "add"]
FEED_FORWARD = ["rms_norm", "linear", "linear", "silu", "mul", "linear", "add"]

EMBED_OPS = ["embedding"]
LAYER_OPS = {
    path: [
        "rms_norm",
        *PROJECT,
        *ROTATE,
        *WRITE[path],
        *ROTATE,
        *READ[path],
        *ATTEND[path],
        "linear",
        "add",
        *FEED_FORWARD,
    ]
    for path in ("symbol", "device")
}
HEAD_OPS = ["rms_norm", "linear"]
OPS_PER_LAYER = {"symbol": 51, "device": 55}


def golden_logits() -> Tensor:
    """float32 ``[6, 11]``."""
    return torch.tensor([[int(word) * GOLDEN_UNIT for word in line.split()] for line in GOLDEN.strip().splitlines()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"head_dim": 16, "attention_bias": True, "mlp_bias": True}
    reference = reference_model(seed=7, **changes)
    with torch.no_grad():
        # Logits below 0.5: float32 sums in another order, on another machine, stay within the tolerance.
        reference.lm_head.weight.mul_(0.2)
    folder = save(reference, tmp_path_factory.mktemp("golden"))
    torch.save(reference_logits(reference, IDS), folder / "reference.pt")
    return folder


@pytest.fixture(scope="module")
def backbone(folder: Path) -> LlamaBackbone:
    return load(folder)


@pytest.mark.parametrize(("plan", "offset_path"), PATHS)
def test_logits_are_the_frozen_ones(backbone: LlamaBackbone, plan: str, offset_path: str) -> None:
    cache, ctx = new_cache(backbone, 8), InferenceContext("cpu", plan=plan, offset_path=offset_path)
    rows = list(forward_with_kv_context(backbone, IDS[:3], cache, ctx, all_positions=True))
    rows += [forward_decode_step(backbone, [token_id], cache, ctx) for token_id in IDS[3:]]
    found = torch.stack(rows)[:, COLUMNS]
    golden = golden_logits()
    assert golden.shape == (6, 11)
    assert (found - golden).abs().max() < TOLERANCE
    assert (ctx.stats.plans_built, ctx.stats.rebinds) == ((1, 2) if plan == "recorded" else (0, 0))


def test_frozen_logits_are_those_of_transformers(folder: Path) -> None:
    reference = torch.load(folder / "reference.pt", weights_only=True)[:, COLUMNS]
    assert (reference - golden_logits()).abs().max() < TOLERANCE
    assert 0.1 < reference.abs().max() < 0.5


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels of the core's own: which products they take depends on the machine."""
    monkeypatch.setattr("fuel_core.native.ops._state", (False, 0))


def _ops(backbone: LlamaBackbone, offset_path: str) -> list[str]:
    backbone._programs.clear()  # taken anew, on what is there now
    ctx = InferenceContext("cpu", plan="recorded", offset_path=offset_path)
    forward_decode_step(backbone, [1], new_cache(backbone, 8), ctx)
    (session,) = ctx.sessions
    return [op.removeprefix("aten.").split(".")[0] for op in session.ops]


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("offset_path", ["symbol", "device"])
def test_held_plan_has_not_grown(backbone: LlamaBackbone, offset_path: str) -> None:
    n_layers = backbone.config.num_hidden_layers
    ops = _ops(backbone, offset_path)
    assert len(ops) == 3 + OPS_PER_LAYER[offset_path] * n_layers
    assert ops == [*EMBED_OPS, *LAYER_OPS[offset_path] * n_layers, *HEAD_OPS]


@pytest.mark.parametrize("offset_path", ["symbol", "device"])
def test_kernels_take_every_product_and_the_attention_of_one_query(backbone: LlamaBackbone, offset_path: str) -> None:
    native = pytest.importorskip("fuel_core.native")
    if not native.is_active():
        pytest.skip(f"no kernels: {native.status()}")
    backbone._programs.clear()
    ctx = InferenceContext("cpu", plan="recorded", offset_path=offset_path)
    forward_decode_step(backbone, [1], new_cache(backbone, 8), ctx)
    ops, n = Counter(ctx.sessions[0].ops), backbone.config.num_hidden_layers
    assert (ops["fuel.product3.default"], ops["fuel.product2.default"]) == (n, n), "q k v, and gate up"
    assert ops["fuel.product.default"] == n + 1, "o and head"
    assert ops["fuel.attend_one.default"] == (n if offset_path == "symbol" else 0)
    assert ops["aten.linear.default"] == n, "down: its input is no multiple of 16 here"


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("offset_path", ["symbol", "device"])
def test_plain_checkpoint_takes_the_same_ops_as_one_with_every_bias(
    backbone: LlamaBackbone, tmp_path: Path, offset_path: str
) -> None:
    """Biases are arguments of the products they belong to, and RoPE scaling is bound: neither is an op."""
    plain = load(save(reference_model(head_dim=16, rope_parameters=ROPES["llama3"]), tmp_path))
    assert _ops(plain, offset_path) == _ops(backbone, offset_path)

"""What names code and stored recordings: everything that would make them others, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_recording import TOYS
from toy_backbone import new_cache, toy

from fuel_core.persistent_decode import InferenceContext, forward_decode_step
from fuel_core.plan_backends import build_job, code_key, rewrites
from fuel_core.plan_backends.graph_text import UnwritableGraph, read_graph, write_graph
from fuel_core.plan_backends.recording import Layout, Recording, TensorLayout


def recordings_of(name: str, path: str = "symbol") -> list[Recording]:
    model = TOYS[name]()
    ctx = InferenceContext("cpu", plan="recorded", offset_path=path)
    forward_decode_step(model, [1], new_cache(model), ctx)
    distinct = {id(s.recording): s.recording for s in ctx.sessions[0].plan.program.segments}
    return list(distinct.values())


# -- the environment -------------------------------------------------------------------------------------------------


def key(layout: Layout | None = None, fingerprint: str = "f", **changes: str) -> str:
    layout = layout or LAYOUT
    return code_key.code_key(fingerprint, layout, {**code_key.environment(), **changes})


LAYOUT = Layout(
    (TensorLayout("h", (1, 1, 8), "float32", "cpu"), TensorLayout("state.k", (1, 2, 0, 4), "float32", "cpu", None, 2)),
    (TensorLayout("weight_0", (8, 8), "float32", "cpu", (8, 1)),),
)


def test_equal_things_have_one_key() -> None:
    assert key() == key()
    assert key() == code_key.code_key("f", LAYOUT, dict(reversed(code_key.environment().items())))


@pytest.mark.parametrize(
    "part", ["torch", "core", "recorder", "cpu", "compiler", "libc", "system", "options", "rewrites"]
)
def test_every_part_of_the_environment_is_in_the_key(part: str) -> None:
    found = code_key.environment()
    assert sorted(found) == sorted(
        ["torch", "core", "recorder", "cpu", "compiler", "libc", "system", "options", "rewrites"]
    )
    assert found[part]
    assert key(**{part: found[part] + "x"}) != key()


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (8, 9)},
        {"dtype": "bfloat16"},
        {"stride": (1, 8)},
        {"device": "cuda:0"},
    ],
)
def test_what_a_weight_looks_like_is_in_the_key(change: dict[str, Any]) -> None:
    assert key(replace(LAYOUT, weights=(replace(LAYOUT.weights[0], **change),))) != key()


@pytest.mark.parametrize("change", [{"shape": (1, 2, 0, 5)}, {"dtype": "float16"}, {"capacity_axis": 1}])
def test_what_the_state_looks_like_is_in_the_key(change: dict[str, Any]) -> None:
    assert key(replace(LAYOUT, tensors=(LAYOUT.tensors[0], replace(LAYOUT.tensors[1], **change)))) != key()


def test_what_is_computed_is_in_the_key_and_capacity_and_weights_are_not() -> None:
    plain, capped = recordings_of("plain")[1], recordings_of("softcap")[1]
    assert key(plain.layout, plain.fingerprint) != key(capped.layout, capped.fingerprint)
    models = [toy(seed=1), toy(seed=2)]
    found = set()
    for model, capacity in zip(models, (7, 256), strict=True):
        ctx = InferenceContext("cpu", plan="recorded")
        forward_decode_step(model, [1], new_cache(model, capacity), ctx)
        recording = ctx.sessions[0].plan.program.compilable[0].recording
        found.add(key(recording.layout, recording.fingerprint))
    assert len(found) == 1


def test_the_key_knows_options_and_rewrites(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    assert code_key.INDUCTOR_OPTIONS["cpp.threads"] == 1, "else the machine's number is written into the code"
    with monkeypatch.context() as changed:
        changed.setitem(code_key.INDUCTOR_OPTIONS, "cpp.simdlen", 1)
        assert key() != before
    some = rewrites.Rewrite("faster", 1, lambda graph: None)
    keys = {before}
    for listed in ((some,), (replace(some, version=2),), (some, replace(some, name="more"))):
        monkeypatch.setattr(code_key, "REWRITES", listed)
        keys.add(key())
    assert len(keys) == 4


def test_the_compiler_is_the_one_that_a_build_would_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    named = tmp_path / "mycc"
    named.write_text("#!/bin/sh\necho 99.1\n")
    named.chmod(0o755)
    before = key()
    monkeypatch.setenv("CXX", str(named))
    assert code_key.compiler() == str(named)
    assert "99.1" in code_key.environment()["compiler"]
    assert key() != before
    for missing in ("no-such-compiler", ""):
        monkeypatch.setenv("CXX", missing)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert code_key.compiler() is None
    assert code_key.environment()["compiler"] == "none"


# -- stored recordings ------------------------------------------------------------------------------------------------


def test_a_stored_recording_is_named_by_source_config_and_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy()
    structure = model.structure_key().components
    identity = code_key.shelf_identity(model, structure)
    assert identity == code_key.shelf_identity(toy(seed=1), toy(seed=1).structure_key().components)
    assert identity != code_key.shelf_identity(model, toy(softcap=3.0).structure_key().components)
    monkeypatch.setattr(code_key, "_hash_of", lambda file, changed: "edited")
    assert identity != code_key.shelf_identity(model, structure)
    assert code_key.shelf_key("a", ("op",)) == code_key.shelf_key("a", ("op",))
    assert len({code_key.shelf_key(a, p) for a in "ab" for p in (("op",), ("other",))}) == 4


@pytest.mark.parametrize("path", ["symbol", "device"])
@pytest.mark.parametrize("name", TOYS)
def test_every_recording_survives_being_written(name: str, path: str) -> None:
    for recording in recordings_of(name, path):
        written = json.loads(json.dumps(write_graph(recording.graph_module)))
        again = Recording(
            read_graph(written), recording.tensors, recording.symbols, recording.n_weights, recording.layout
        )
        assert (again.fingerprint, again.ops, again.reads) == (recording.fingerprint, recording.ops, recording.reads)
        assert again.used_weights == recording.used_weights
        part = json.loads(json.dumps(build_job.part("k", recording)))
        sent = build_job.read_recording(part)
        assert (sent.fingerprint, sent.layout) == (recording.fingerprint, recording.layout)


def graph_of(function: Any, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function)(*inputs)


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), 1e-300, -0.0, 0.1])
def test_numbers_keep_their_bits(number: float) -> None:
    x = torch.ones(3)
    module = graph_of(lambda x: torch.full_like(x, number), x)
    again = read_graph(json.loads(json.dumps(write_graph(module))))
    assert torch.equal(again(x), module(x))
    assert str(again.graph) == str(module.graph)


def test_small_tensors_of_the_layer_travel_along() -> None:
    literal = torch.tensor([0.5, float("nan"), -2.0], dtype=torch.bfloat16)
    module = graph_of(lambda x: x * literal.to(torch.float32) + torch.tensor(3), torch.ones(3))
    again = read_graph(json.loads(json.dumps(write_graph(module))))
    assert torch.allclose(again(torch.ones(3)), module(torch.ones(3)), equal_nan=True)


def test_what_has_no_written_form_is_refused() -> None:
    module = graph_of(lambda x: x + 1, torch.ones(2))
    node = next(node for node in module.graph.nodes if node.op == "call_function")
    node.target = len
    with pytest.raises(UnwritableGraph, match="call of"):
        write_graph(module)


@pytest.mark.parametrize(
    "edit",
    [
        {"target": "os.system"},
        {"target": "aten::no_such_op.default"},
        {"target": "eval"},
        {"op": "call_method"},
        {"op": "call_module"},
        {"args": ["tuple", ["pickle", "x"]]},
        {"args": ["tuple", ["torch", "load"]]},
        {"args": ["tuple", ["node", "nobody"]]},
        {"name": "not a name"},
    ],
)
def test_reading_makes_nothing_but_what_writing_knows(edit: dict[str, Any]) -> None:
    written = write_graph(graph_of(lambda x: x + 1, torch.ones(2)))
    entry = next(node for node in written["nodes"] if node["op"] == "call_function")
    entry.update(edit)
    with pytest.raises(UnwritableGraph):
        read_graph(written)

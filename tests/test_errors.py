"""Every class of the error tree, met as a user or an author meets it: one line with expected, found and next step."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_site import Site
from safetensors.torch import load_file, save_file
from toy_backbone import ToyBackbone
from toy_backbone import toy as toy_model
from toy_family import install_toy_family, write_toy_checkpoint

import fuel_core as fuel
from fuel_core import cli, errors
from fuel_core.persistent_decode import rebind_and_realize_prebuilt
from fuel_core.testing import Conformance
from fuel_core.testing import toy as kit
from fuel_core.testing.scaffold import names_of

ROOT = Path(__file__).resolve().parent.parent

BASES = {errors.FuelError, errors.FamilyError}
"""Classes to catch by, which nothing raises as they are."""


@dataclass(frozen=True)
class Ground:
    """Where a case plays: a checkpoint that works until something is done to it, and a place for plugins."""

    folder: Path
    site: Site
    monkeypatch: pytest.MonkeyPatch

    def config(self, **changes: Any) -> None:
        path = self.folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def weights(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        path = self.folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file(tensors, path)

    def load(self, **options: Any) -> fuel.LanguageModel:
        return fuel.load(self.folder, plan="recorded", **options)


@pytest.fixture
def ground(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    install_toy_family(site)
    return Ground(write_toy_checkpoint(tmp_path / "toy"), site, monkeypatch)


def _cache(model: fuel.DecodeBackbone, positions: int = 8) -> fuel.KvCache:
    return fuel.KvCache.with_capacity(
        model.layer_state_specs(), max_seq_len=positions, dtype=torch.float32, device="cpu"
    )


def _held() -> tuple[ToyBackbone, fuel.KvCache, fuel.InferenceContext]:
    """A model whose step is held, two positions in."""
    model, context = toy_model(), fuel.InferenceContext(plan="recorded")
    cache = _cache(model)
    for token_id in (3, 1):
        fuel.forward_decode_step(model, [token_id], cache, context)
    return model, cache, context


# -- what is done to meet each class -------------------------------------------------------------------------------


def no_memory_to_map(ground: Ground) -> None:
    usual = Path.open

    def refuse(self: Path, *args: Any, **options: Any) -> Any:
        if self.name == "model.safetensors":
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(self))
        return usual(self, *args, **options)

    ground.monkeypatch.setattr(Path, "open", refuse)
    ground.load()


def a_path_that_is_not_there(ground: Ground) -> None:
    fuel.load(ground.folder / "nowhere")


def a_file_that_was_cut(ground: Ground) -> None:
    path = ground.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    ground.load()


def a_folder_of_pickles(ground: Ground) -> None:
    (ground.folder / "model.safetensors").rename(ground.folder / "pytorch_model.bin")
    ground.load()


def a_layer_too_many(ground: Ground) -> None:
    ground.config(num_hidden_layers=4)
    ground.load()


def a_tensor_that_is_gone(ground: Ground) -> None:
    ground.weights(lambda tensors: tensors.pop("lm_head.weight"))
    ground.load()


def a_model_type_of_nobody(ground: Ground) -> None:
    ground.config(model_type="okapi")
    ground.load()


def a_model_type_of_two(ground: Ground) -> None:
    ground.site.install("acme-toy", family="toy", module="acme_toy")
    ground.load()


def a_plugin_that_does_not_import(ground: Ground) -> None:
    ground.site.install("fuel-okapi", family="okapi", source="import no_such_module_here\n")
    ground.config(model_type="okapi")
    ground.load()


def a_text_without_a_tokenizer(ground: Ground) -> None:
    (ground.folder / "tokenizer.json").unlink()
    ground.load().generate("w1")


def a_chat_without_a_template(ground: Ground) -> None:
    ground.load().chat("w1")


def an_id_beyond_the_vocabulary(ground: Ground) -> None:
    model = toy_model()
    fuel.forward_decode_step(model, [67], _cache(model), fuel.InferenceContext())


def a_cache_that_is_full(ground: Ground) -> None:
    model = toy_model()
    fuel.forward_decode_step(model, [1] * 9, _cache(model), fuel.InferenceContext())


def a_cache_of_another_model(ground: Ground) -> None:
    cache = _cache(toy_model(num_key_value_heads=4))
    fuel.forward_decode_step(toy_model(), [1], cache, fuel.InferenceContext())


def a_rewind_to_the_future(ground: Ground) -> None:
    _cache(toy_model()).truncate_to(3)


def a_rebind_without_a_session(ground: Ground) -> None:
    model, cache, context = _held()
    rebind_and_realize_prebuilt(model, [4], cache, context, None)


def a_layer_that_branches_on_a_length(ground: Ground) -> None:
    class Branching(ToyBackbone):
        def decode_apply_layer(self, layer_idx: int, inputs: fuel.DecodeLayerInputs) -> torch.Tensor:
            if inputs.cached_len > 3:
                inputs.h.add_(1.0)
            return super().decode_apply_layer(layer_idx, inputs)

    model = Branching(toy_model().config)
    model.load_state_dict(toy_model().state_dict())
    fuel.forward_decode_step(model, [1], _cache(model), fuel.InferenceContext(plan="recorded"))


def a_plan_that_was_rewritten(ground: Ground) -> None:
    class RecordedForItself(ToyBackbone):
        """No other test's model has this head, so that rewriting it is nobody else's business."""

        def decode_final_norm_and_head(self, h: torch.Tensor) -> torch.Tensor:
            return super().decode_final_norm_and_head(h) * 0.875

    model = RecordedForItself(toy_model().config)
    model.load_state_dict(toy_model().state_dict())
    cache, context = _cache(model), fuel.InferenceContext(plan="recorded")
    for token_id in (3, 1):
        fuel.forward_decode_step(model, [token_id], cache, context)
    session = context.sessions[0]
    session.plan.program.segments[-1].recording.rewrite(_negate_output)
    rebind_and_realize_prebuilt(model, [4], cache, context, session)


def _negate_output(graph: torch.fx.Graph) -> None:
    out = next(node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(out):
        out.args = (graph.call_function(torch.ops.aten.neg.default, (out.args[0],)),)


def a_conversation_that_was_not_saved(ground: Ground) -> None:
    write_toy_checkpoint(ground.folder, template=True)
    fuel.Conversation(ground.load()).load(ground.folder / "nothing.json")


def a_plan_backend_of_another_release(ground: Ground) -> None:
    fuel.load(ground.folder, plan="cuda_graph")


def a_capability_that_is_misspelt(ground: Ground) -> None:
    replace(kit.CONFORMANCE, capabilities={"ropes"})


def a_new_family_that_no_module_can_be_called(_: Ground) -> None:
    names_of("my zebra")


def a_declaration_without_configs(ground: Ground) -> None:
    Conformance(family=kit.FAMILY, configs={}, capabilities=set(), oracle=kit.CONFORMANCE.oracle)


def a_negative_temperature(ground: Ground) -> None:
    ground.load().generate("w1", temperature=-1.0)


def a_weight_that_is_nan(ground: Ground) -> None:
    ground.weights(lambda tensors: tensors["lm_head.weight"].fill_(float("nan")))
    ground.load().generate("w1")


@dataclass(frozen=True)
class Case:
    """`command`: the same met through the command, of which MODEL is the ground's folder; None where it cannot be."""

    raises: type[errors.FuelError]
    when: Callable[[Ground], None]
    expected: str
    found: str
    next_step: str
    command: tuple[str, ...] | None = None


GENERATE = ("generate", "MODEL", "w1", "-n", "2")

CASES = [
    Case(
        errors.CheckpointError, no_memory_to_map, "expected memory to map", "found none left", "use a smaller", GENERATE
    ),
    Case(
        errors.CheckpointNotFoundError,
        a_path_that_is_not_there,
        "expected a Hugging Face folder, a .gguf file or a Hub id",
        "found nothing at that path",
        "check it",
        ("generate", "MODEL/nowhere/else", "w1"),
    ),
    Case(
        errors.CheckpointCorruptError,
        a_file_that_was_cut,
        r"model.safetensors: expected \w+",
        "found",
        "[Dd]ownload the file again",
        GENERATE,
    ),
    Case(
        errors.UnsupportedCheckpointError,
        a_folder_of_pickles,
        "expected safetensors files",
        "found only pytorch_model.bin",
        "convert them",
        GENERATE,
    ),
    Case(
        errors.ConfigError,
        a_layer_too_many,
        "expected num_hidden_layers to be the number of layers that the weights hold, 3",
        "found 4",
        "correct the config",
        GENERATE,
    ),
    Case(
        errors.WeightsError,
        a_tensor_that_is_gone,
        "expected one tensor for every parameter",
        "found .*lm_head.weight",
        "Check that the family fits",
        GENERATE,
    ),
    Case(
        errors.FamilyNotFoundError,
        a_model_type_of_nobody,
        r"installed: .*toy \(fuel-toy 1.0\)",
        "model_type 'okapi'",
        "separate packages: see docs/families.md",
        GENERATE,
    ),
    Case(
        errors.FamilyConflictError,
        a_model_type_of_two,
        "'toy' is claimed by",
        "acme-toy 1.0 and by fuel-toy 1.0",
        "choose one with load",
        GENERATE,
    ),
    Case(
        errors.FamilyBrokenError,
        a_plugin_that_does_not_import,
        "fuel-okapi 1.0 should serve model_type 'okapi'",
        "ModuleNotFoundError: No module named 'no_such_module_here'",
        "`fuel families --load` shows",
        GENERATE,
    ),
    Case(
        errors.TokenizerError,
        a_text_without_a_tokenizer,
        "expected tokenizer.json",
        "found none",
        "add the file, or in Python pass token ids",
        GENERATE,
    ),
    Case(
        errors.ChatTemplateError,
        a_chat_without_a_template,
        "chat template",
        "no chat template found",
        "use generate",
        ("chat", "MODEL", "w1"),
    ),
    Case(
        errors.DecodeError,
        an_id_beyond_the_vocabulary,
        r"must lie in 0\.\.66",
        "found 67",
        "another model's tokenizer",
    ),
    Case(
        errors.CapacityError,
        a_cache_that_is_full,
        "has capacity 8 and holds 0",
        "9 more need 9",
        "Allocate a larger cache",
    ),
    Case(
        errors.GeometryError,
        a_cache_of_another_model,
        r"layer 0 keeps KeyValue\(n_kv_heads=2",
        r"the KV cache holds KeyValue\(n_kv_heads=4",
        "allocate the cache from",
    ),
    Case(
        errors.CacheStateError,
        a_rewind_to_the_future,
        r"an integer in 0\.\.cached_len \(0\) expected",
        "found 3",
        "only rewinding",
    ),
    Case(
        errors.PlanError,
        a_rebind_without_a_session,
        "a held session is expected",
        "found none",
        "run a build step first",
    ),
    Case(
        errors.RecordingError,
        a_layer_that_branches_on_a_length,
        "which a held plan cannot follow",
        "toy::layer 0: compares or branches on a bound integer",
        "use layers.read_state",
    ),
    Case(
        errors.TopologyChanged,
        a_plan_that_was_rewritten,
        "the op list it was built with expected",
        "found another",
        "build again",
    ),
    Case(
        errors.ConversationError,
        a_conversation_that_was_not_saved,
        "expected a saved conversation",
        "found no such file",
        "check the name",
    ),
    Case(
        errors.BackendUnavailableError,
        a_plan_backend_of_another_release,
        "one of off, recorded, compiled",
        "plan backend 'cuda_graph' is not in this release",
        "use plan='auto'",
        ("generate", "MODEL", "w1", "--plan", "cuda_graph"),
    ),
    Case(
        errors.ConformanceError,
        a_capability_that_is_misspelt,
        "words of bias, embed_scale, .* expected",
        "found 'ropes'",
        "correct or leave out",
        ("check", "no-such-family"),
    ),
    Case(
        errors.ConformanceError,
        a_declaration_without_configs,
        "at least one tiny config expected",
        "found none",
        "see docs/conformance.md",
    ),
    Case(
        errors.NewFamilyError,
        a_new_family_that_no_module_can_be_called,
        "a name of up to 24 letters .* expected",
        "found 'my zebra'",
        "use 'my-zebra'",
        ("new-family", "my zebra"),
    ),
    Case(
        errors.GenerationError,
        a_negative_temperature,
        "a finite number of at least 0 expected",
        "found -1.0",
        "give one",
        (*GENERATE, "--temperature", "-1"),
    ),
    Case(
        errors.NonFiniteLogitsError,
        a_weight_that_is_nan,
        "finite logits expected",
        "found 67 of 67 NaN or infinite",
        "check the weights",
        GENERATE,
    ),
]

each_case = pytest.mark.parametrize("case", CASES, ids=[f"{c.raises.__name__}-{c.when.__name__}" for c in CASES])


def _met(case: Case, ground: Ground) -> errors.FuelError:
    with pytest.raises(case.raises) as refusal:
        case.when(ground)
    return refusal.value


def test_every_class_of_the_tree_has_a_case() -> None:
    tree = {getattr(errors, name) for name in errors.__all__}
    assert {case.raises for case in CASES} == tree - BASES


def test_the_drawing_of_the_tree_is_the_tree() -> None:
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:[│├└─ ]{4})*)(\w+) +\S", line)
        if match:
            drawn.append((len(match[1]) // 4, match[2]))
    assert sorted(name for _, name in drawn) == sorted(errors.__all__)
    above: list[str] = []
    for depth, name in drawn:
        above[depth:] = [name]
        if depth:
            assert getattr(errors, name).__bases__ == (getattr(errors, above[depth - 1]),)


@each_case
def test_error_says_what_was_expected_what_was_found_and_what_to_do(case: Case, ground: Ground) -> None:
    error = _met(case, ground)
    message = str(error)
    assert type(error) is case.raises
    assert isinstance(error, fuel.FuelError)
    assert "\n" not in message
    assert len(message) < 500
    for part in (case.expected, case.found, case.next_step):
        assert re.search(part, message), f"{part!r} is not in {message!r}"


@each_case
@pytest.mark.parametrize("json_asked", [False, True])
def test_any_error_is_one_line_of_the_command_and_exit_code_2(
    case: Case, json_asked: bool, ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    error = _met(case, ground)
    ground.monkeypatch.undo()  # what the case did to the machine; the class alone matters from here on
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fuel_core.llm.load", _raiser(error))
        assert cli.main([*GENERATE, *(["--json"] if json_asked else [])]) == 2
    assert capsys.readouterr() == ("", f"fuel: {error}\n")


def _raiser(error: Exception) -> Callable[..., Any]:
    def load(*_: Any, **__: Any) -> Any:
        raise error

    return load


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.command], ids=[c.raises.__name__ for c in CASES if c.command]
)
@pytest.mark.parametrize("json_asked", [False, True])
def test_the_command_meets_the_same_error(
    case: Case, json_asked: bool, ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    _met(case, ground)  # leaves the ground as the error found it
    capsys.readouterr()
    assert case.command is not None
    arguments = [word.replace("MODEL", str(ground.folder)) for word in case.command]
    assert cli.main([*arguments, *(["--json"] if json_asked else [])]) == 2
    out, err = capsys.readouterr()
    assert out == "", "--json or not, what went wrong is no result"
    assert re.fullmatch(r"fuel: .+\n", err)
    if case.raises is not errors.ConformanceError:  # there the command meets another of the kind
        assert re.search(case.next_step, err)


def test_a_fault_of_ours_is_exit_code_1(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    ground.monkeypatch.setattr("fuel_core.llm.load", _raiser(RuntimeError("two\nlines")))
    assert cli.main([*GENERATE, "--json"]) == 1
    assert capsys.readouterr() == ("", "fuel: internal error, RuntimeError: two lines (FUEL_DEBUG=1 shows where)\n")


# -- every raise of the source ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Raise:
    place: str
    raises: str
    message: str
    """As it is written, with `{}` for what is filled in."""


# What stands in these messages was put together elsewhere, and says there what to do next.
COMPOSED = {
    "{}",  # CacheUnusable, whose messages are below; and what a checkpoint without a tokenizer says
    "{}: tensor {}: {}",
    "{} should serve {} {}, but {}{}",
    "{} handles {} {}, but cannot serve it: {}",
}

_KINDS = {*errors.__all__, "CacheUnusable"}


def _raises() -> Iterator[Raise]:
    for path in [*ROOT.glob("fuel_core/**/*.py"), *ROOT.glob("plugins/*/fuel_*/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise | ast.Return) and isinstance(call := _value(node), ast.Call) and call.args:
                name = ast.unparse(call.func).removeprefix("errors.")
                if name in _KINDS:
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield Raise(place, name, _template(call.args[0]))


def _value(node: ast.Raise | ast.Return) -> ast.expr | None:
    return node.exc if isinstance(node, ast.Raise) else node.value


def _template(message: ast.expr) -> str:
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in message.values)
    if isinstance(message, ast.BinOp):
        return _template(message.left) + _template(message.right)
    return "{}"


def test_every_message_in_the_source_ends_in_a_next_step() -> None:
    """The part that is forgotten most: after a semicolon, or as a sentence of its own."""
    raised = list(_raises())
    assert len(raised) > 300
    without = [one for one in raised if one.message not in COMPOSED and not re.search(r"; \S|[.?] [A-Z]", one.message)]
    assert without == []


def test_nothing_raises_a_class_that_is_only_there_to_be_caught() -> None:
    raised = {one.raises for one in _raises()}
    names = {base.__name__ for base in BASES}
    assert not raised & names
    assert {*errors.__all__} - names - raised == set(), "a class that nothing raises is no use to anyone"

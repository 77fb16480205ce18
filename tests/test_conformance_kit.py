"""The machinery of the kit: a declaration that is wrong is refused, a check that goes missing is noticed."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fuel_core import RawConfig, cli
from fuel_core.errors import ConfigError, ConformanceError
from fuel_core.plan_backends.compiled import builds_allowed
from fuel_core.testing import CAPABILITIES, Conformance, golden_oracle, reference_oracle, registry, runner, toy
from fuel_core.testing.checks.contract import respelled
from fuel_core.testing.checks.correctness import FORMAT_BOUNDS
from fuel_core.testing.checks.hygiene import private_imports
from fuel_core.testing.checks.identity import variants
from fuel_core.testing.locate import declaration_of
from fuel_core.testing.mutations import sabotage
from fuel_core.testing.oracles import record_golden, tiny_weights
from fuel_core.testing.registry import MANIFEST, Check, checks, require
from fuel_core.testing.runner import Unit, run_checks, run_unit, units
from fuel_core.testing.structure import projection_biases
from fuel_core.testing.toy import CONFORMANCE
from fuel_core.testing.workspace import Workspace

ROOT = Path(__file__).resolve().parent.parent
TOY = "fuel_core.testing.toy:CONFORMANCE"


def declared(**changes: Any) -> Conformance:
    return dataclasses.replace(CONFORMANCE, **changes)


# -- declarations -----------------------------------------------------------------------------------------------------


def test_a_misspelt_capability_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConformanceError, match=r"words of .*window_variants expected, found 'windows'"):
        declared(capabilities={"windows"})


def test_a_capability_given_as_one_word_is_refused() -> None:
    with pytest.raises(ConformanceError, match="a set of words expected"):
        declared(capabilities="window")


def test_no_configs_are_refused() -> None:
    with pytest.raises(ConformanceError, match="at least one tiny config"):
        declared(configs={})


def test_an_expected_failure_needs_a_reason_and_a_check_that_exists() -> None:
    with pytest.raises(ConformanceError, match="needs a reason"):
        declared(expected_failures={"contract.dims_agree": " "})
    for name in ("contract.dims_agre", "contract.dims_agree[nowhere]"):
        with pytest.raises(ConformanceError, match="is no check of the kit"):
            units(declared(expected_failures={name: "because"}))


def test_a_family_that_is_nowhere_is_refused() -> None:
    for name in ("fuel_core.testing.toy:NOBODY", "fuel_nowhere:FAMILY", "fuel_core.testing.toy:BASE"):
        with pytest.raises(ConformanceError, match="family:"):
            Workspace(declared(family=name))


# -- the register -----------------------------------------------------------------------------------------------------


def test_every_check_says_what_it_catches_in_one_paragraph() -> None:
    for one in checks():
        assert 20 < len(one.catches) < 200, one.name
        assert one.needs <= set(CAPABILITIES)
        assert one.group in ("required", "optional")


def test_a_deleted_check_is_an_error_and_so_is_one_that_nobody_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {one.name: one for one in checks()}
    monkeypatch.setattr(registry, "_checks", {n: c for n, c in whole.items() if n != "correctness.held_steps"})
    with pytest.raises(ConformanceError, match=r"not whole: missing \['correctness.held_steps'\]"):
        checks()
    extra = dataclasses.replace(whole["correctness.held_steps"], name="correctness.new")
    monkeypatch.setattr(registry, "_checks", {**whole, "correctness.new": extra})
    with pytest.raises(ConformanceError, match=r"not in the manifest \['correctness.new'\]"):
        checks()


def test_the_docs_list_every_check_with_what_it_catches() -> None:
    text = (ROOT / "docs" / "conformance.md").read_text()
    for one in checks():
        assert f"| `{one.name}` | {one.catches} |" in text
    documented = [
        line.split("`")[1] for line in text.splitlines() if line.startswith("| `") and "." in line.split("`")[1]
    ]
    assert documented == [one.name for one in checks()]
    for word, meaning in CAPABILITIES.items():
        assert f"| `{word}` | {meaning} |" in text


def test_topics_are_files() -> None:
    folder = ROOT / "fuel_core" / "testing" / "checks"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == set(MANIFEST)


# -- running ----------------------------------------------------------------------------------------------------------


def made_check(function: Any, needs: frozenset[str] = frozenset()) -> Unit:
    return Unit(Check("made.up", "nothing", "required", needs, True, function), "plain")


def test_outcomes_are_strict_about_expected_failures() -> None:
    def bad(case: Any) -> None:
        require(False, "as it is")

    def good(case: Any) -> None:
        require(True, "never said")

    plain, expected = Workspace(CONFORMANCE), Workspace(CONFORMANCE)
    object.__setattr__(expected, "declaration", declared(expected_failures={"made.up": "known"}))
    assert [run_unit(made_check(f), plain).outcome for f in (bad, good)] == ["failed", "passed"]
    xfailed, xpassed = (run_unit(made_check(f), expected) for f in (bad, good))
    assert (xfailed.outcome, xfailed.detail, xfailed.is_bad) == ("xfailed", "known", False)
    assert (xpassed.outcome, xpassed.is_bad) == ("xpassed", True)
    assert run_unit(made_check(bad, frozenset({"named_slots"})), plain).outcome == "skipped"


def test_a_check_that_reaches_for_the_network_fails() -> None:
    def reaches(case: Any) -> None:
        with socket.socket() as made:
            made.connect(("127.0.0.1", 9))

    result = run_unit(made_check(reaches), Workspace(CONFORMANCE))
    assert (result.outcome, "reached for the network" in result.detail) == ("failed", True)


def test_an_error_of_the_family_fails_the_check_with_its_text() -> None:
    def raises(case: Any) -> None:
        raise ValueError("two\nlines")

    result = run_unit(made_check(raises), Workspace(CONFORMANCE))
    assert (result.outcome, result.detail) == ("failed", "plain: ValueError: two lines")


def test_a_format_without_a_bound_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuel_core.layers.weight_formats import FORMATS

    monkeypatch.setitem(FORMATS, "int3", FORMATS["f32"])
    (result,) = (
        r
        for r in run_checks(
            declared(configs={"plain": CONFORMANCE.configs["plain"]}), only=["correctness.weight_formats"]
        )
    )
    assert "weight format 'int3' has no bound" in result.detail


def test_every_format_of_this_release_has_a_bound() -> None:
    from fuel_core.layers.weight_formats import FORMATS

    assert set(FORMATS) <= set(FORMAT_BOUNDS)


def test_other_spelling_of_a_config_is_the_other_one_and_back() -> None:
    new = dict(CONFORMANCE.configs["partial"])
    old = respelled(new)
    assert old is not None
    assert (old["rope_theta"], old["rope_scaling"]["type"], old["torch_dtype"]) == (10000.0, "yarn", "float32")
    assert "rope_parameters" not in old
    again = respelled(old)
    assert again == new
    assert respelled({"hidden_size": 96}) is None


def test_a_spelling_that_the_oracle_renames_is_tested_as_it_is_declared() -> None:
    from fuel_core.testing.negative_controls import CONTROLS

    ignored = next(c for c in CONTROLS if c.name == "declared-spelling").declaration(whole=False)
    only = ["contract.config_spellings_agree"]
    (found,) = run_checks(ignored, only=only)
    assert (found.outcome, found.detail) == (
        "failed",
        "plain: the config as declared and as the oracle wrote it differ in rms_norm_eps (1e-06 and 0.001)",
    )

    def both(raw: RawConfig) -> Any:
        old = raw.get("layer_norm_epsilon")
        return toy.resolve_config(raw if old is None else raw.with_values({"rms_norm_eps": old}, "layer_norm_epsilon"))

    right = dataclasses.replace(ignored, family=dataclasses.replace(toy.FAMILY, resolve_config=both))
    assert [r.outcome for r in run_checks(right, only=only)] == ["passed"]

    def none(raw: RawConfig) -> Any:
        if "layer_norm_epsilon" in raw:
            raise ConfigError("layer_norm_epsilon: expected no such key, found one; leave it out")
        return toy.resolve_config(raw)

    refused = dataclasses.replace(ignored, family=dataclasses.replace(toy.FAMILY, resolve_config=none))
    (found,) = run_checks(refused, only=only)
    assert found.detail.startswith("plain: the config is refused as it is declared, and read as the oracle wrote it")


def test_weights_are_a_function_of_name_shape_and_seed() -> None:
    shapes = {"model.norm.weight": (96,), "model.layers.0.q_proj.bias": (80,), "lm_head.weight": (67, 96)}
    one, same, other = tiny_weights(shapes, 0), tiny_weights(shapes, 0), tiny_weights(shapes, 1)
    for name in shapes:
        assert torch.equal(one[name], same[name])
        assert not torch.equal(one[name], other[name])
    # Known answers: the raw stream of Philox is the same under every version.
    assert one["lm_head.weight"][0, :3].tolist() == pytest.approx(KNOWN, abs=1e-7)
    assert (one["model.norm.weight"] - 1.0).abs().max() > 0.2
    assert one["model.layers.0.q_proj.bias"].abs().max() > 0.2


KNOWN = [-0.07803033, -0.069309, 0.02902707]


# -- the other oracles ------------------------------------------------------------------------------------------------


def test_a_golden_file_answers_what_it_was_asked_and_nothing_else(tmp_path: Path) -> None:
    path, only = tmp_path / "toy.safetensors", ["correctness.fresh_steps", "correctness.held_steps"]
    small = declared(configs={"windowed": CONFORMANCE.configs["windowed"]})
    assert record_golden(small, path, only=only) == 1
    golden = dataclasses.replace(small, oracle=golden_oracle(path))
    assert [r.outcome for r in run_checks(golden, only=only)] == ["passed", "passed"]
    with pytest.raises(ConformanceError, match="holds no logits of 'windowed'"):
        run_checks(golden, only=["correctness.windows_crossed_twice"])
    other = dataclasses.replace(golden, configs={"windowed": {**small.configs["windowed"], "sliding_window": 6}})
    with pytest.raises(ConformanceError, match="holds no config 'windowed' as it is declared now"):
        run_checks(other, only=only)
    with pytest.raises(ConformanceError, match="no such file"):
        run_checks(dataclasses.replace(small, oracle=golden_oracle(tmp_path / "none")), only=only)


def test_a_failing_family_writes_no_golden_file(tmp_path: Path) -> None:
    from fuel_core.testing.negative_controls import CONTROLS

    wrong = next(c for c in CONTROLS if c.name == "scale-of-hidden").declaration(whole=False)
    with pytest.raises(ConformanceError, match="every check must pass first"):
        record_golden(wrong, tmp_path / "wrong.safetensors", only=["correctness.fresh_steps"])
    assert not (tmp_path / "wrong.safetensors").exists()


# -- sabotage ---------------------------------------------------------------------------------------------------------


def test_sabotage_catches_what_touches_the_family_and_says_what_does_not() -> None:
    names = ["rotate-swapped", "interleaved-swapped", "window-wider", "logits-in-a-buffer", "weight:lm_head.weight"]
    found = {outcome.name: outcome for outcome in sabotage(Workspace(CONFORMANCE), only=names)}
    assert {name: found[name].outcome for name in names} == {
        **dict.fromkeys(names, "caught"),
        "interleaved-swapped": "does not apply",
    }
    assert found["window-wider"].by == "correctness.windows_crossed_twice[windowed]"


@pytest.mark.parametrize("own", [False, True])
def test_a_bias_is_one_whatever_its_module_is_called(own: bool) -> None:
    """The toy without biases of its own, and a head that adds one: no name ends in "proj"."""
    from fuel_core import layers

    class OwnLinear(nn.Module):
        def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
            self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    class Biased(toy.ToyBackbone):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.lm_head = (OwnLinear if own else layers.Linear)(config.hidden_size, config.vocab_size, bias=True)

    def reference(c: Any, weights: Any, ids: Any) -> torch.Tensor:
        return toy.reference(c, weights, ids) + weights["lm_head.bias"].double()

    plain = {**CONFORMANCE.configs["plain"], "attention_bias": False}
    made = declared(
        family=dataclasses.replace(toy.FAMILY, build=Biased),
        configs={"plain": plain},
        oracle=reference_oracle(reference),
        capabilities={"rope", "grouped_heads", "bias"},
    )
    found = run_checks(made, only=["contract.capabilities_are_true", "correctness.fresh_steps"])
    assert [r.outcome for r in found] == ["passed", "passed"], found
    (outcome,) = sabotage(Workspace(made), only=["bias-dropped"])
    assert (outcome.outcome, outcome.by) == ("caught", "correctness.fresh_steps[plain]")


def test_norms_and_embeddings_have_no_projections_bias() -> None:
    from fuel_core import layers

    model = nn.ModuleDict({"norm_proj": layers.LayerNorm(8, 1e-5), "embed_proj": nn.Embedding(4, 8)})
    model["embed_proj"].register_parameter("bias", nn.Parameter(torch.zeros(8)))
    assert projection_biases(model) == []
    model["dense"] = layers.Linear(8, 8, bias=True)
    model["o"] = layers.Linear(8, 8)
    assert [name for name, _ in projection_biases(model)] == ["dense.bias"]


def test_a_key_bias_without_rotation_is_told_by_what_it_does() -> None:
    """Softmax does not see what all keys share: it is no forgotten weight, whatever the module is called."""
    from fuel_core import layers

    class Attention(toy.ToyAttention):
        def __init__(self, c: Any) -> None:
            super().__init__(c)
            self.keys = self.k_proj
            del self.k_proj

        def heads(self, x: torch.Tensor) -> Any:
            rows = (p(x).view(*x.shape[:2], -1, self.head_dim) for p in (self.q_proj, self.keys, self.v_proj))
            return tuple(row.transpose(1, 2) for row in rows)

        def forward(self, x: torch.Tensor, inputs: Any) -> torch.Tensor:
            q, k, v = self.heads(x)
            layers.write_state(inputs, "k", k)
            layers.write_state(inputs, "v", v)
            return self.o_proj(layers.attend(inputs, q * 0.0, self.head_dim**-0.5))

    class Layer(toy.ToyLayer):
        def __init__(self, c: Any, layer_idx: int) -> None:
            super().__init__(c, layer_idx)
            self.self_attn = Attention(c)

    class Model(toy.ToyModel):
        layer_class = Layer

    class Backbone(toy.ToyBackbone):
        model_class = Model

    plain = {"plain": CONFORMANCE.configs["plain"]}
    made = declared(family=dataclasses.replace(toy.FAMILY, build=Backbone), configs=plain)
    (found,) = run_checks(made, only=["contract.every_weight_reaches_the_logits"])
    # Scores that are all zero see neither queries nor the key's matrix; the key's bias is not among them.
    assert "9 weights change nothing" in found.detail, found.detail
    assert "keys.bias" not in found.detail


@pytest.mark.parametrize("own", [False, True])
def test_sabotage_of_the_epsilon_reaches_a_norm_of_the_familys_own(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuel_core import layers

    class OwnNorm(layers.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return layers.rms_norm(x, self.weight, self.eps)

    if own:
        monkeypatch.setattr(toy, "layers", SimpleNamespace(**{**vars(layers), "RMSNorm": OwnNorm}))
    configs = {"plain": {**CONFORMANCE.configs["plain"], "rms_norm_eps": 1e-3}}
    (outcome,) = sabotage(Workspace(declared(configs=configs)), only=["norm-eps"])
    assert (outcome.outcome, outcome.by) == ("caught", "correctness.fresh_steps[plain]")


@pytest.mark.parametrize("own", [False, True])
def test_sabotage_of_the_epsilon_reaches_a_layer_norm(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuel_core import layers

    class OwnNorm(layers.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(toy.ToyConfig):
        layer_norm_epsilon: float

    def resolve(raw: RawConfig) -> Any:
        spec = toy.resolve_config(raw)
        values = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)} | {"rms_norm_eps": None}
        return Config(**values, layer_norm_epsilon=raw["layer_norm_epsilon"])

    class Backbone(toy.ToyBackbone):
        def __init__(self, config: Any) -> None:
            super().__init__(dataclasses.replace(config, rms_norm_eps=1e-6))
            self.config = config
            self.model.norm = (OwnNorm if own else layers.LayerNorm)(config.hidden_size, config.layer_norm_epsilon)

    def reference(c: Any, weights: Any, ids: Any) -> torch.Tensor:
        def norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
            if gain is not final:
                return plain(x, gain, 1e-6)
            return nn.functional.layer_norm(x, x.shape[-1:], gain, bias, c.layer_norm_epsilon)

        weights = {name: tensor.double() for name, tensor in weights.items()}
        final, bias = weights["model.norm.weight"], weights["model.norm.bias"]
        plain = toy._norm
        with monkeypatch.context() as patched:
            patched.setattr(toy, "_norm", norm)
            return toy.reference(c, weights, ids)

    config = {**CONFORMANCE.configs["plain"], "layer_norm_epsilon": 1e-2}
    family = dataclasses.replace(toy.FAMILY, resolve_config=resolve, build=Backbone)
    made = declared(family=family, configs={"plain": config}, oracle=reference_oracle(reference))
    assert [r.outcome for r in run_checks(made, only=["correctness.fresh_steps"])] == ["passed"]
    (outcome,) = sabotage(Workspace(made), only=["norm-eps"])
    assert (outcome.outcome, outcome.by) == ("caught", "correctness.fresh_steps[plain]")


def test_sabotage_leaves_the_process_as_it_was() -> None:
    from fuel_core import layers

    before = (layers.rotate, layers.RMSNorm.forward, toy.ToyBackbone.decode_mask_plan)
    sabotage(Workspace(CONFORMANCE), only=["rotate-swapped", "norm-eps", "window-wider"])
    assert (layers.rotate, layers.RMSNorm.forward, toy.ToyBackbone.decode_mask_plan) == before


def test_sabotage_that_no_check_sees_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuel_core.testing import mutations

    harmless = mutations.Mutation("harmless", "nothing", "contract.dims_agree", lambda case: True, built=lambda m: None)
    monkeypatch.setattr(mutations, "mutations", lambda workspace: [harmless])
    monkeypatch.setattr(mutations, "units", lambda declaration, only: units(declaration, only=["contract.dims_agree"]))
    (outcome,) = sabotage(Workspace(CONFORMANCE))
    assert outcome.outcome == "survived"


# -- values of a field ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capped(toy.ToyConfig):
    """The toy whose soft cap is a word."""

    cap: str = "none"


def _capped(raw: RawConfig) -> Any:
    spec = toy.resolve_config(raw)
    values = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    cap = raw.get("cap", "none")
    return Capped(**{**values, "cap": cap, "attn_logit_softcapping": {"none": None, "soft": 2.5}[cap]})


class CappedBackbone(toy.ToyBackbone):
    """Reads the word, as a family reads the name of its activation."""

    bound: frozenset[str] = frozenset()

    def __init__(self, config: Any) -> None:
        super().__init__(dataclasses.replace(config, attn_logit_softcapping={"none": None, "soft": 2.5}[config.cap]))
        self.config = config

    def decode_config(self) -> Any:
        return dataclasses.replace(self.config, attn_logit_softcapping=None)

    def decode_bound_fields(self) -> frozenset[str]:
        return frozenset({"rope"}) | self.bound


def capped(bound: frozenset[str] = frozenset()) -> Conformance:
    backbone = type("CappedBackbone", (CappedBackbone,), {"bound": bound})
    plain = CONFORMANCE.configs["plain"]
    return declared(
        family=dataclasses.replace(toy.FAMILY, resolve_config=_capped, build=backbone),
        configs={"plain": plain, "soft": {**plain, "cap": "soft"}},
        capabilities={"rope", "grouped_heads", "bias"},
    )


def test_a_word_takes_its_other_values_from_the_other_configs() -> None:
    workspace = Workspace(capped())
    base, others = variants(workspace.case("plain"))
    (other,) = (one for one in others if one.field == "cap")
    assert other.log != base.log
    (outcome,) = sabotage(workspace, only=["key:cap"])
    assert (outcome.outcome, outcome.by) == ("caught", "identity.fields_that_decide_ops_are_keyed[plain]")


def test_a_word_that_is_wrongly_listed_as_bound_is_found_out() -> None:
    wrong = capped(frozenset({"cap"}))
    (shown,) = run_checks(wrong, only=["identity.bound_fields_are_shown"])
    assert shown.outcome == "passed", shown.detail
    found = run_checks(wrong, only=["identity.bound_fields_are_followed", "identity.fields_that_decide_ops_are_keyed"])
    assert {r.outcome for r in found} == {"failed"}
    assert any("cap changes the ops of a step and not the shape key" in r.detail for r in found)


def test_a_bound_word_that_no_other_config_has_is_not_shown() -> None:
    wrong = capped(frozenset({"cap"}))
    alone = dataclasses.replace(wrong, configs={"plain": wrong.configs["plain"]})
    (shown,) = run_checks(alone, only=["identity.bound_fields_are_shown"])
    assert "no config shows cap" in shown.detail


def test_queries_as_wide_as_the_hidden_state_say_what_to_do_where_they_can_be_nothing_else() -> None:
    configs = {"plain": {**CONFORMANCE.configs["plain"], "head_dim": 24}}
    (found,) = run_checks(declared(configs=configs), only=["contract.fixtures_can_see"])
    assert "give one another head_dim" in found.detail
    assert "expected_failures" in found.detail
    assert "docs/recipes.md" in found.detail


# -- hygiene ----------------------------------------------------------------------------------------------------------


def test_private_imports_are_named(tmp_path: Path) -> None:
    path = tmp_path / "family.py"
    path.write_text("from fuel_core import layers\nfrom fuel_core.kv_cache import KvCache\nimport fuel_core.llm\n")
    assert private_imports([path]) == [
        "family.py imports KvCache from fuel_core.kv_cache",
        "family.py imports all from fuel_core.llm",
    ]


# -- fuel check -------------------------------------------------------------------------------------------------------


def test_check_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", TOY, "--only", "contract.dims_agree", "--only", "hygiene", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["family"], report["passed"], report["failed"], report["skipped"]) == ("toy", 4, 0, 2)
    assert report["checks"][0]["name"] == "contract.dims_agree[plain]"
    assert "sabotage" not in report


def test_check_of_a_file_shows_a_failure_and_exits_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "from fuel_core.testing.negative_controls import CONTROLS\n"
        "conformance = next(c for c in CONTROLS if c.name == 'hidden-misreported').declaration()\n"
    )
    assert cli.main(["check", str(file), "--only", "contract.dims_agree", "--sabotage"]) == 2
    shown = capsys.readouterr()
    assert "contract.dims_agree  3 failed" in shown.out
    assert "dims say hidden 136" in shown.err
    assert shown.err.count("contract.dims_agree catches: Dims, state specs") == 1
    assert "--sabotage was left out" in shown.err
    assert "3 of 3 checks failed" in shown.err


def test_failures_of_one_cause_say_where_to_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "from fuel_core.testing.negative_controls import CONTROLS\n"
        "conformance = next(c for c in CONTROLS if c.name == 'bias-forgotten').declaration()\n"
    )
    only = ["contract.dims_agree", "contract.every_weight_reaches_the_logits", "correctness.fresh_steps"]
    assert cli.main(["check", str(file), *(word for name in only for word in ("--only", name))]) == 2
    told = capsys.readouterr().err
    assert "checks failed; begin with contract.every_weight_reaches_the_logits, the others may follow" in told


def test_check_shows_survivors_and_exits_with_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fuel_core.testing import mutations

    survivor = mutations.Outcome("harmless", "nothing", "survived", "", "on plain")
    monkeypatch.setattr(mutations, "sabotage", lambda workspace, report: [survivor])
    assert cli.main(["check", TOY, "--only", "contract.family_record", "--sabotage", "--json"]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["sabotage"][0]["outcome"] == "survived"
    assert "1 defects survived: harmless" in shown.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["zebra"], "a family with a declaration expected"),
        (["no/such/file.py"], "found no file"),
        (["fuel_core.testing.toy:BASE"], "expected to be a Conformance"),
        ([TOY, "--only", "zonk"], "no check or topic is called zonk"),
    ],
)
def test_check_refuses_in_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")


def test_checks_start_no_builds_of_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would outlive the command, and fill the user's cache with models of a moment."""
    monkeypatch.setenv("FUEL_COMPILE", "1")
    seen: list[bool] = []
    first = checks()[0]
    monkeypatch.setattr(
        runner, "checks", lambda: [dataclasses.replace(first, run=lambda _: seen.append(builds_allowed()))]
    )
    run_checks(CONFORMANCE)
    assert seen
    assert not any(seen)
    assert builds_allowed()


def test_a_family_that_is_not_installed_says_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "My-Zebra"]) == 2
    said = capsys.readouterr().err
    assert "found 'My-Zebra'; install its package (pip install -e ./fuel-my-zebra)" in said
    assert "or give the declaration's file or module:NAME" in said
    assert cli.main(["check", "no such; thing"]) == 2
    assert "install its package, or give" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["my_zebra", "my-zebra", "fuel-my-zebra", "My-Zebra"])
def test_a_family_is_found_under_every_name_that_new_family_takes(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib_metadata

    point = importlib_metadata.EntryPoint("my_zebra", TOY, "fuel_core.conformance")
    monkeypatch.setattr(importlib_metadata, "entry_points", lambda group: [point])
    assert declaration_of(asked) is CONFORMANCE


def test_check_closes_with_what_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "contract.dims_agree", "--only", "hygiene"]
    assert cli.main(["check", TOY, *only]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "toy: 4 checks passed, 2 skipped"
    file = tmp_path / "known.py"
    file.write_text(
        "import dataclasses\nfrom fuel_core.testing.negative_controls import CONTROLS\n"
        "wrong = next(c for c in CONTROLS if c.name == 'hidden-misreported').declaration()\n"
        "conformance = dataclasses.replace(wrong, expected_failures={'contract.dims_agree': 'as it is'})\n"
    )
    assert cli.main(["check", str(file), "--only", "contract.dims_agree", "--only", "contract.family_record"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "toy: 1 check passed, 3 expected failures"


def test_check_closes_with_what_was_caught(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fuel_core.testing import mutations

    found = [
        mutations.Outcome("one", "a", "caught", "contract.dims_agree[plain]", ""),
        mutations.Outcome("two", "b", "does not apply", "", "no config has it"),
    ]
    monkeypatch.setattr(mutations, "sabotage", lambda workspace, report: found)
    assert cli.main(["check", TOY, "--only", "contract.family_record", "--sabotage"]) == 0
    closing = capsys.readouterr().out.splitlines()[-1]
    assert closing == "toy: 1 check passed; 1 defect caught, 1 does not apply"


@pytest.mark.parametrize("found", [None, 5, "zebra"])
def test_what_is_no_declaration_is_refused(found: Any) -> None:
    with pytest.raises(ConformanceError, match=rf"a Conformance expected, found {found!r}; pass the declaration"):
        run_checks(found)


def test_a_file_with_two_declarations_and_no_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "two.py"
    file.write_text(
        "import dataclasses\nfrom fuel_core.testing.toy import CONFORMANCE as one\n"
        "two = dataclasses.replace(one, tolerance=1e-4)\n"
    )
    with pytest.raises(ConformanceError, match=r"one Conformance expected.*found 2"):
        declaration_of(str(file))


# -- pytest -----------------------------------------------------------------------------------------------------------


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "fuel_core.testing.plugin", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


AUTHOR = """
import dataclasses
from fuel_core.testing.structure import projection_biases
from fuel_core.testing.toy import CONFORMANCE

conformance = dataclasses.replace(CONFORMANCE, configs={"plain": CONFORMANCE.configs["plain"]}, expected_failures={
    "contract.capabilities_are_true": "one config cannot show them all",
    "contract.dims_agree[plain]": "it passes: strict",
})
"""


def test_pytest_collects_named_checks_with_strict_expected_failures(tmp_path: Path) -> None:
    (tmp_path / "test_author.py").write_text(AUTHOR)
    done = run_pytest(tmp_path, "-v", "-k", "contract or wheel", "-rs")
    assert "conformance::contract::family_record PASSED" in done.stdout
    assert "conformance::contract::errors_carry_the_family[plain] PASSED" in done.stdout
    assert "contract::capabilities_are_true XFAIL" in done.stdout
    assert "contract::dims_agree[plain] FAILED" in done.stdout
    assert "hygiene::wheel_installs_and_passes SKIPPED" in done.stdout
    assert "optional: run with --fuel-optional" in done.stdout
    assert done.returncode == 1
    listed = run_pytest(tmp_path, "--collect-only", "-q", "-k", "dims_agree").stdout.splitlines()
    assert listed[0] == "test_author.py::conformance::contract.dims_agree[plain]"
    assert len([line for line in listed if "::" in line]) == 1


def test_pytest_shows_a_failure_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "test_author.py").write_text(
        "from fuel_core.testing.negative_controls import CONTROLS\n"
        "conformance = next(c for c in CONTROLS if c.name == 'hidden-misreported').declaration()\n"
    )
    done = run_pytest(tmp_path, "-k", "dims_agree and plain")
    assert "plain: dims say hidden 136, the embedding [1, 2, 96]" in done.stdout
    assert "It catches: Dims, state specs" in done.stdout
    assert "Traceback" not in done.stdout


def test_starting_pytest_with_the_plugin_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(
        "import sys\n\n\ndef test_light():\n    assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    done = run_pytest(tmp_path, "-q")
    assert "1 passed" in done.stdout, done.stdout


def test_the_plugin_is_published_under_the_name_of_its_module() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\n"fuel_core.testing.plugin" = "fuel_core.testing.plugin"' in text

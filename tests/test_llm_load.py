"""load(): from a folder on disk to a model that answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plugin_site import Site
from toy_backbone import reference, toy
from toy_family import TOY_FAMILY, install_toy_family, write_toy_checkpoint

from fuel_core import llm as facade
from fuel_core.errors import (
    BackendUnavailableError,
    CheckpointNotFoundError,
    ConfigError,
    FamilyNotFoundError,
    TokenizerError,
)
from fuel_core.generation import PREFILL_CHUNK
from fuel_core.llm import load


@pytest.fixture
def folder(site: Site, tmp_path: Path) -> Path:
    install_toy_family(site)
    return write_toy_checkpoint(tmp_path / "toy", template=True)


def test_load_gives_a_model_that_continues_like_the_reference(folder: Path) -> None:
    llm = load(folder, plan="recorded")
    done = llm.generate("w3 w14 w15 w9", max_new_tokens=6)
    assert done.usage.prompt_tokens == 4, "nothing in this folder asks for BOS"
    ids = [3, 14, 15, 9]
    model = toy(window=5, windowed_layers=(0, 2))
    for token_id in done.token_ids:
        assert token_id == int(reference(model, ids)[-1].argmax())
        ids.append(token_id)
    assert (done.stats.plans_built, done.stats.rebinds) == (1, len(done.token_ids) - 2)


def test_load_leaves_nothing_to_train_and_nothing_on_meta(folder: Path) -> None:
    llm = load(folder)
    assert not llm.backbone.training
    assert all(p.device.type == "cpu" and not p.requires_grad for p in llm.backbone.parameters())
    assert llm.checkpoint is not None
    assert llm.checkpoint.path == folder
    assert llm.config is llm.backbone.config
    assert "toy" in repr(llm)


def test_load_reads_stop_ids_and_template(folder: Path) -> None:
    llm = load(folder)
    assert llm.stop_token_ids == {65}
    assert llm.tokenizer.bos_token_id == 64
    assert llm.chat("w5", max_new_tokens=2).usage.prompt_tokens == 3


def test_load_takes_a_family_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUEL_FAMILIES", "")
    llm = load(write_toy_checkpoint(tmp_path / "toy"), family=TOY_FAMILY, plan="recorded")
    assert llm.generate([1, 2, 3], 4).stats.plans_built == 1
    other = replace(TOY_FAMILY, name="other", model_types=("zebra", "okapi"))
    with pytest.raises(FamilyNotFoundError, match=r"other serves model_type zebra, okapi, .* states 'toy'; give"):
        load(tmp_path / "toy", family=other)


@pytest.mark.parametrize("word", ["float32", "f32", "F32", torch.float32])
def test_load_dtype_words_for_one_dtype_are_one(folder: Path, word: str | torch.dtype) -> None:
    assert load(folder, dtype=word).dtype == torch.float32


def test_load_dtype_is_the_cache_s(folder: Path) -> None:
    assert load(folder).dtype == torch.float32, "auto: the checkpoint's"
    assert load(folder, weights="bf16").dtype == torch.bfloat16, "auto: what the weights were loaded in"
    llm = load(folder, dtype="bf16", plan="recorded")
    stream = llm.stream([1, 2], max_new_tokens=2)
    assert stream._generation.cache.dtype == torch.bfloat16
    list(stream)


def test_load_compressed_weights_decode_in_float32_on_a_cpu(folder: Path) -> None:
    backbone = load(folder).backbone
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert facade.activation_dtype("auto", backbone, "bfloat16", device=cpu) == torch.bfloat16
    backbone.lm_head.packed_format = "int8"  # type: ignore[union-attr]
    assert facade.activation_dtype("auto", backbone, "bfloat16", device=cpu) == torch.float32
    assert facade.activation_dtype("bf16", backbone, "bfloat16", device=cpu) == torch.bfloat16
    assert facade.activation_dtype("auto", backbone, "bfloat16", device=cuda) == torch.float32, "config says float32"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "banana"}, "dtype: auto, float32.*found 'banana'"),
        ({"dtype": torch.int8}, "dtype: auto"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"max_seq_len": True}, "max_seq_len"),
        ({"max_seq_len": 10**20}, "max_seq_len: .* at most 2147483647 expected, found 1000"),
        ({"max_seq_len": "x"}, "max_seq_len: .* found 'x'"),
        ({"max_seq_len": 1.5}, "max_seq_len: .* found 1.5"),
        ({"threads": 0}, "threads"),
        ({"threads": "2"}, "threads: .* found '2'"),
        ({"threads": 1.5}, "threads: .* found 1.5"),
        ({"family": 3}, "family: .* found 3"),
        ({"dtype": 3}, "dtype: .* found 3"),
        ({"dtype": ["f32"]}, "dtype: .* found "),
    ],
)
def test_load_refuses_settings_before_reading_anything(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("/nowhere", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("option", "word"), [("device", "nowhere"), ("device", 3.5), ("plan", "nope")])
def test_load_refuses_a_device_or_plan_that_does_not_exist(option: str, word: object) -> None:
    with pytest.raises(BackendUnavailableError, match=str(word)):
        load("/nowhere", **{option: word})  # type: ignore[arg-type]


def test_load_sets_the_number_of_threads(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        load(folder, threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_load_max_seq_len_fixes_the_cache(folder: Path) -> None:
    llm = load(folder, max_seq_len=16, plan="recorded")
    assert llm.position_limit == 16
    assert llm.generate([1] * 10, max_new_tokens=100).usage.total_tokens <= 17
    assert load(folder).position_limit == 128, "else the model's own limit"


def test_load_of_nothing_and_of_an_unserved_model_name_the_trouble(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        load(tmp_path / "absent")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "other"}))
    with pytest.raises(FamilyNotFoundError, match="other"):
        load(folder)


def test_load_without_a_tokenizer_takes_ids(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    llm = load(folder, plan="recorded")
    assert llm.generate([1, 2, 3], max_new_tokens=3).usage.prompt_tokens == 3
    with pytest.raises(TokenizerError, match=r"expected tokenizer\.json, found none"):
        llm.generate("w1")


def test_load_with_a_broken_tokenizer_says_so(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="does not load"):
        load(folder)


def test_load_takes_the_size_of_a_prompt_chunk(folder: Path) -> None:
    assert load(folder).prefill_chunk == PREFILL_CHUNK
    llm = load(folder, prefill_chunk=4)
    assert llm.prefill_chunk == 4
    seen: list[int] = []
    llm.generate([1, 2, 3, 4, 5, 6, 7, 8, 9], 1, on_progress=lambda done, total: seen.append(done))
    assert seen == [4, 9]  # the last takes one more, rather than run it alone
    for wrong in (0, -1, 1.5, True, "4"):
        with pytest.raises(ConfigError, match="prefill_chunk: a whole number of at least 1"):
            load(folder, prefill_chunk=wrong)  # type: ignore[arg-type]

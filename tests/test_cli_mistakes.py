"""The likeliest mistakes of a new user: each ends in one line with what was expected, what was found and what next."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from plugin_site import Site
from safetensors.torch import load_file, save_file
from toy_family import TURNS, install_toy_family, write_toy_checkpoint

from fuel_core import cli

LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.fixture
def toy(site: Site, tmp_path: Path) -> Path:
    """A checkpoint that works until something is done to it."""
    install_toy_family(site)
    return write_toy_checkpoint(tmp_path / "toy", template=TURNS)


def _refused(
    capsys: pytest.CaptureFixture[str], model: Path | str, *, prompt: str = "w1", verb: str = "generate"
) -> str:
    """The one line that a command ends in."""
    arguments = [verb, str(model)] if verb == "inspect" else [verb, str(model), prompt, "-n", "2"]
    code = cli.main(arguments)
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("fuel: ")
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 500
    return captured.err


def _says(line: str, *, expected: str, found: str, next_step: str) -> None:
    for part in (expected, found, next_step):
        assert re.search(part, line), f"{part!r} is not in {line!r}"


def test_number_of_layers_that_the_weights_do_not_hold(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before a module is built for each of them: a thousand million take hours."""
    text = (toy / "config.json").read_text()
    for count in (2, 4, 10**9):
        (toy / "config.json").write_text(json.dumps({**json.loads(text), "num_hidden_layers": count}))
        for verb in ("generate", "inspect"):
            _says(
                _refused(capsys, toy, verb=verb),
                expected="expected num_hidden_layers .* the weights hold, 3,",
                found=f"found {count} .*config.json",
                next_step="correct the config",
            )
    (toy / "model.safetensors").unlink()
    _says(
        _refused(capsys, toy, verb="inspect"),
        expected="expected num_hidden_layers of at most 10000",
        found="found 1000000000",
        next_step="correct the config",
    )


# -- the folder --------------------------------------------------------------------------------------


def test_folder_above_the_checkpoint_is_told_where_it_lies(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = _refused(capsys, toy.parent)
    _says(line, expected="expected config.json or a .gguf file", found="found .*toy", next_step=f"name {toy}")


def test_folder_of_something_else_lists_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("x")
    line = _refused(capsys, tmp_path)
    _says(
        line,
        expected="expected config.json or a .gguf file",
        found="found notes.txt",
        next_step="name the folder that holds config.json",
    )
    (tmp_path / "empty").mkdir()
    assert "found an empty folder" in _refused(capsys, tmp_path / "empty")


def test_path_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = _refused(capsys, tmp_path / "gone")
    _says(line, expected="expected a Hugging Face folder", found="found nothing at that path", next_step="check it")


def test_hub_id_that_was_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    line = _refused(capsys, "acme/zebra-1b")
    _says(line, expected="expected a folder", found="found no such path", next_step="hf download acme/zebra-1b")


def test_cache_root_folder_names_the_models_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repo = tmp_path / "models--acme--zebra-1b"
    snapshot = repo / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    line = _refused(capsys, tmp_path)
    _says(line, expected="expected a checkpoint", found="found a Hub cache with 1 model;", next_step="acme/zebra-1b")
    line = _refused(capsys, repo)
    _says(line, expected="expected a checkpoint", found="outer folder", next_step=f"name {snapshot}")


def test_lora_folder_names_the_model_it_belongs_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "acme/zebra-1b"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    line = _refused(capsys, tmp_path)
    _says(
        line,
        expected="expected a whole model",
        found="found a LoRA adapter for 'acme/zebra-1b'",
        next_step="merge it into that model first",
    )


def test_several_gguf_files_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("zebra-q4.gguf", "zebra-q8.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    line = _refused(capsys, tmp_path)
    _says(
        line,
        expected="expected one .gguf file",
        found="found 2 .zebra-q4.gguf, zebra-q8.gguf.",
        next_step="name the file you mean",
    )


# -- the files ---------------------------------------------------------------------------------------


def test_missing_shard_is_named(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(toy / "model.safetensors")
    names, shards = sorted(tensors), ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for number, shard in enumerate(shards):
        save_file({name: tensors[name] for name in names[number::2]}, toy / shard)
    weight_map = {name: shards[position % 2] for position, name in enumerate(names)}
    (toy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (toy / "model.safetensors").unlink()
    assert cli.main(["generate", str(toy), "w1", "-n", "2"]) == 0
    capsys.readouterr()
    (toy / shards[1]).unlink()
    line = _refused(capsys, toy)
    _says(
        line,
        expected="expected every shard on disk",
        found="found 1 missing: model-00002-of-00002.safetensors",
        next_step="incomplete download. Download the folder again",
    )


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_git_lfs_pointer_in_place_of_a_file(name: str, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / name).write_text(LFS_POINTER)
    line = _refused(capsys, toy)
    _says(line, expected=f"{name}: expected the file itself", found="a git-lfs pointer", next_step="`git lfs pull`")


def test_git_lfs_pointer_in_place_of_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "zebra.gguf"
    file.write_text(LFS_POINTER)
    for model in (file, tmp_path):
        line = _refused(capsys, model)
        _says(line, expected="expected the file itself", found="a git-lfs pointer", next_step="`git lfs pull`")


def test_folder_without_a_tokenizer(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / "tokenizer.json").unlink()
    for verb in ("generate", "chat"):
        line = _refused(capsys, toy, verb=verb)
        _says(line, expected="expected tokenizer.json", found="found none", next_step="add the file")
    (toy / "tokenizer.model").write_bytes(b"\x0a\x0e")
    line = _refused(capsys, toy)
    _says(line, expected="expected tokenizer.json", found="found tokenizer.model", next_step="convert")


# -- the family --------------------------------------------------------------------------------------


def test_missing_family_names_the_model_type_and_what_is_installed(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((toy / "config.json").read_text())
    architectures = {"architectures": ["ZebraForCausalLM"]}
    (toy / "config.json").write_text(json.dumps(config | architectures | {"model_type": "zebra"}))
    for verb in ("generate", "chat", "inspect"):
        line = _refused(capsys, toy, verb=verb)
        _says(line, expected="No installed family handles", found="model_type 'zebra'", next_step="separate packages")
        assert "fuel-toy 1.0" in line


def test_encoder_is_told_that_it_does_not_generate(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for architecture in ("BertForMaskedLM", "BertModel", "BertForSequenceClassification"):
        (toy / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": [architecture]}))
        line = _refused(capsys, toy)
        _says(
            line,
            expected="expected a decoder language model",
            found=f"found model_type 'bert' with {architecture}",
            next_step="choose a checkpoint that generates text",
        )


def test_model_type_that_is_absent_is_asked_for(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / "config.json").write_text("{}")
    line = _refused(capsys, toy)
    _says(line, expected="model_type", found="states no", next_step="download its config.json again")
    assert "toy (fuel-toy 1.0)" in line


# -- the request -------------------------------------------------------------------------------------


def test_prompt_longer_than_the_context_names_both_numbers(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb, tokens in (("generate", 200), ("chat", 203)):
        line = _refused(capsys, toy, verb=verb, prompt="w1 " * 200)
        _says(
            line,
            expected="the limit is 128 positions",
            found=f"prompt has {tokens} tokens",
            next_step="shorten the prompt",
        )


@pytest.mark.parametrize("device", ["nowhere", "cuda", "cuda:7", "mps", "cpu:0:0", ""])
def test_device_that_is_not_here(device: str, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    kind = torch.accelerator.current_accelerator()
    if kind is not None and device.startswith(kind.type):
        pytest.skip(f"{device} may be here")
    for verb in (["generate", str(toy), "w1"], ["chat", str(toy), "w1"], ["bench", str(toy)]):
        assert cli.main([*verb, "--device", device]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert len(line) < 300
        _says(line, expected="expected cpu", found=f"device {device!r} cannot be used", next_step="use device='cpu'")
        assert ("built with CUDA" in line) == (device.startswith("cuda") and torch.version.cuda is None)


def test_device_without_memory(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(toy), "w1", "--device", "meta"]) == 2
    line = capsys.readouterr().err
    _says(line, expected="one that computes expected", found="found 'meta'", next_step="use device='cpu'")


def test_folder_nobody_may_read(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (toy / "config.json").chmod(0)
    _says(
        _refused(capsys, toy), expected="expected a readable", found="found no permission", next_step="change its mode"
    )

"""Hugging Face folders: what is found, what is refused, and that tensors come straight from the file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from checkpoint_writers import TINY, safetensors_bytes, tensors_for, toy, write_folder
from safetensors.torch import save_file

from fuel_core.checkpoint import open_checkpoint
from fuel_core.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    UnsupportedCheckpointError,
)


def test_folder_with_one_file_gives_names_shapes_and_numbers(tmp_path: Path) -> None:
    tensors = tensors_for(toy(), torch.bfloat16)
    ck = open_checkpoint(write_folder(tmp_path, tensors=tensors))
    assert ck.format == "huggingface"
    assert ck.model_type == "toy"
    assert ck.gguf_architecture is None
    assert ck.has_weights
    assert ck.tensor_names() == sorted(tensors)
    for name, tensor in tensors.items():
        assert ck.tensor_info(name) == (tuple(tensor.shape), "bfloat16")
        assert torch.equal(ck.tensor(name), tensor)


def test_tensor_is_the_file_mapping_and_not_a_copy(tmp_path: Path) -> None:
    ck = open_checkpoint(write_folder(tmp_path, tensors={"a": torch.arange(4096.0), "b": torch.arange(8.0)}))
    one, other = ck.tensor("a"), ck.tensor("a")
    assert one.data_ptr() == other.data_ptr()
    ck.close()
    assert torch.equal(one, torch.arange(4096.0))


def test_writing_to_a_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    write_folder(tmp_path, tensors={"a": torch.zeros(16)})
    before = (tmp_path / "model.safetensors").read_bytes()
    open_checkpoint(tmp_path).tensor("a").fill_(7.0)
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("index", [True, False])
def test_shards_together_give_every_tensor(tmp_path: Path, index: bool) -> None:
    tensors = tensors_for(toy())
    ck = open_checkpoint(write_folder(tmp_path, tensors=tensors, shards=3, index=index))
    assert ck.tensor_names() == sorted(tensors)
    assert all(torch.equal(ck.tensor(n), t) for n, t in tensors.items())


@pytest.mark.parametrize("index", [True, False])
def test_missing_shard_is_listed_before_anything_is_read(tmp_path: Path, index: bool) -> None:
    write_folder(tmp_path, tensors=tensors_for(toy()), shards=2, index=index)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"model-00002-of-00002.safetensors.*incomplete download\?"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../m.safetensors",
        "/abs/x.safetensors",
        "a/../../b.safetensors",
        "C:\\x.safetensors",
        "sub/m.safetensors",
        "..",
        "",
        3,
        None,
        "model.bin",
        "m.safetensors\0",
    ],
)
def test_index_may_only_name_plain_files(tmp_path: Path, name: object) -> None:
    outside = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(1)}, outside)
    folder = write_folder(tmp_path / "model", files={"model.safetensors.index.json": {"weight_map": {"a": name}}})
    with pytest.raises(CheckpointCorruptError, match="plain file name for tensor 'a'"):
        open_checkpoint(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}, [1]])
def test_index_without_a_map_is_corrupt(tmp_path: Path, index: object) -> None:
    with pytest.raises(CheckpointCorruptError):
        open_checkpoint(write_folder(tmp_path, files={"model.safetensors.index.json": index}))


def test_index_promising_a_tensor_that_no_shard_has_is_corrupt(tmp_path: Path) -> None:
    write_folder(tmp_path, tensors={"a": torch.zeros(1), "b": torch.zeros(1)}, shards=2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointCorruptError, match="found 1 in none: ghost"):
        open_checkpoint(tmp_path)


def test_tensor_stored_twice_is_refused_with_both_files(tmp_path: Path) -> None:
    write_folder(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(
        CheckpointCorruptError, match=r"00002-of-00002.*'a' in model-00001-of-00002.safetensors as well"
    ):
        open_checkpoint(tmp_path)


def test_several_loose_files_are_not_guessed_at(tmp_path: Path) -> None:
    write_folder(tmp_path)
    for name in ("one", "two"):
        save_file({name: torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UnsupportedCheckpointError, match=r"one.safetensors, two.safetensors"):
        open_checkpoint(tmp_path)


_F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "content",
    [
        safetensors_bytes({"a": _F32}, b"\0" * 4, length=1 << 63),
        safetensors_bytes({"a": _F32}, b"\0" * 4, length=200),
        safetensors_bytes({"a": {**_F32, "data_offsets": [4, 0]}}, b"\0" * 4),
        safetensors_bytes({"a": {**_F32, "data_offsets": [0, 400]}}, b"\0" * 4),
        safetensors_bytes({"a": {**_F32, "shape": [1000, 1000]}}, b"\0" * 4),
        safetensors_bytes({"a": {**_F32, "shape": [1 << 62, 8]}}, b"\0" * 4),
        safetensors_bytes({"a": {**_F32, "dtype": "F99"}}, b"\0" * 4),
        safetensors_bytes({"a": _F32, "b": _F32}, b"\0" * 4),
        safetensors_bytes(b"{not json", b"\0" * 4),
        safetensors_bytes({"a": _F32}),
        b"",
        b"\0\0\0",
    ],
    ids=[
        "length 2^63",
        "length past the end",
        "offsets reversed",
        "offset past the end",
        "shape larger than its bytes",
        "shape that overflows",
        "unknown dtype",
        "two tensors sharing bytes",
        "no json",
        "no data",
        "empty file",
        "three bytes",
    ],
)
def test_lying_safetensors_header_is_corrupt(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CheckpointCorruptError, match=r"model\.safetensors") as error:
        open_checkpoint(write_folder(tmp_path, files={"model.safetensors": content}))
    assert "\n" not in str(error.value)


def test_header_length_over_the_limit_is_refused_even_if_the_file_has_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    with (folder / "model.safetensors").open("wb") as f:
        f.write((200_000_000).to_bytes(8, "little"))
        f.truncate(200_000_100)  # sparse: the bytes are never written
    with pytest.raises(CheckpointCorruptError, match="header of at most 100000000 bytes, found 200000000"):
        open_checkpoint(folder)


# -- pickle -------------------------------------------------------------------------------------------------------


class _Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_pickle_is_refused_and_never_read(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    folder = write_folder(tmp_path / "model", files={"pytorch_model.bin": pickle.dumps(_Marker(marker))})
    with pytest.raises(UnsupportedCheckpointError, match=r"only pytorch_model.bin.*pickle"):
        open_checkpoint(folder)
    assert not marker.exists()


def test_pickles_beside_safetensors_or_left_by_training_do_not_matter(tmp_path: Path) -> None:
    both = write_folder(tmp_path / "both", tensors={"a": torch.zeros(1)}, files={"pytorch_model.bin": b"x"})
    assert open_checkpoint(both).tensor_names() == ["a"]
    training = write_folder(tmp_path / "training", files={"training_args.bin": b"x", "optimizer.pt": b"x"})
    assert not open_checkpoint(training).has_weights


# -- which folder is meant ----------------------------------------------------------------------------------------


def test_folder_with_only_a_config_opens_without_weights(tmp_path: Path) -> None:
    ck = open_checkpoint(write_folder(tmp_path))
    assert not ck.has_weights
    assert ck.tensor_names() == []
    assert ck.raw["hidden_size"] == 96


def test_path_that_is_not_there_names_the_download_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointNotFoundError, match="hf download acme/model-1b"):
        open_checkpoint("acme/model-1b")
    with pytest.raises(CheckpointNotFoundError, match="hf download acme/model-1b --revision v2"):
        open_checkpoint("acme/model-1b@v2")
    for path in ("/no/such/folder/at/all", "model.gguf", "./acme/model-1b"):
        with pytest.raises(CheckpointNotFoundError, match="nothing at that path") as error:
            open_checkpoint(path)
        assert "hf download" not in str(error.value)


def _cached(cache: Path, repo: str = "acme/model-1b", commit: str = "abc123", ref: str = "main") -> Path:
    outer = cache / f"models--{repo.replace('/', '--')}"
    (outer / "refs").mkdir(parents=True, exist_ok=True)
    (outer / "refs" / ref).write_text(commit)
    return write_folder(outer / "snapshots" / commit)


@pytest.mark.parametrize(
    ("variable", "below"), [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")]
)
def test_hub_id_is_found_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    snapshot = _cached(tmp_path / below)
    assert open_checkpoint("acme/model-1b").path == snapshot
    with pytest.raises(CheckpointNotFoundError, match="revision 'v2'"):
        open_checkpoint("acme/model-1b@v2")
    other = _cached(tmp_path / below, commit="def456", ref="v2")
    assert open_checkpoint("acme/model-1b@v2").path == other
    assert open_checkpoint("acme/model-1b").path == snapshot


def test_folder_that_exists_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    _cached(tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "acme" / "model-1b")
    assert open_checkpoint("acme/model-1b").path == Path("acme/model-1b")


def test_reference_that_leaves_the_cache_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = _cached(tmp_path / "cache")
    write_folder(tmp_path / "outside")
    (snapshot.parents[1] / "refs" / "main").write_text("../../../outside")
    with pytest.raises(CheckpointNotFoundError, match="revision 'main'"):
        open_checkpoint("acme/model-1b")


def test_outer_folders_of_the_cache_say_what_to_name(tmp_path: Path) -> None:
    snapshot = _cached(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"outer folder.*acme/model-1b") as error:
        open_checkpoint(snapshot.parents[1])
    assert str(snapshot) in str(error.value)
    with pytest.raises(CheckpointNotFoundError, match=r"a Hub cache with 1 model;.*acme/model-1b"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("path", ["", " ", Path(), None, 123, b"folder", True])
def test_what_is_no_path_is_not_taken_for_the_folder_one_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: object
) -> None:
    monkeypatch.chdir(write_folder(tmp_path))
    if isinstance(path, Path):
        assert open_checkpoint(path).model_type == "toy", "a path that was made on purpose: '.' means here"
        return
    with pytest.raises(CheckpointNotFoundError, match=r"expected .* found ") as caught:
        open_checkpoint(path)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_folder_without_a_config_lists_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="an empty folder"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointNotFoundError, match=r"config.json or a .gguf file, found notes.txt"):
        open_checkpoint(tmp_path)


def test_adapter_is_refused_with_the_model_it_belongs_to(tmp_path: Path) -> None:
    files = {"adapter_config.json": {"base_model_name_or_path": "acme/base"}}
    save_file({"lora_A": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UnsupportedCheckpointError, match=r"LoRA adapter for 'acme/base'.*merge"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.gguf"])
def test_lfs_pointer_is_recognised(tmp_path: Path, name: str) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    folder = write_folder(tmp_path, files={name: pointer})
    with pytest.raises(CheckpointNotFoundError, match=r"git-lfs pointer.*git lfs pull"):
        open_checkpoint(folder)


def test_file_of_a_folder_names_the_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, tensors={"a": torch.zeros(1)})
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(UnsupportedCheckpointError, match="name its folder"):
            open_checkpoint(tmp_path / name)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UnsupportedCheckpointError, match="another kind of file"):
        open_checkpoint(tmp_path / "notes.txt")


@pytest.mark.parametrize("text", ["{", "[1]", "nan", '{"a": ' * 20_000, '{"a": ' + "9" * 5000 + "}"])
def test_config_that_is_no_json_object_is_corrupt(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointCorruptError, match=r"config\.json") as error:
        open_checkpoint(write_folder(tmp_path, files={"config.json": text}))
    assert "\n" not in str(error.value)


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    config = {**TINY, "auto_map": {"AutoConfig": "evil.Config"}}
    marker = tmp_path / "ran"
    folder = write_folder(tmp_path / "m", config, files={"evil.py": f"open({str(marker)!r}, 'w')"})
    assert open_checkpoint(folder).model_type == "toy"
    assert not marker.exists()


def test_every_refusal_is_a_checkpoint_error() -> None:
    for kind in (CheckpointCorruptError, CheckpointNotFoundError, UnsupportedCheckpointError):
        assert issubclass(kind, CheckpointError)

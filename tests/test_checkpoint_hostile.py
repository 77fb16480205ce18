"""Folders as the world leaves them: quantised without saying so, half downloaded, linked, unreadable, changing."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_writers import TINY, resolve, safetensors_bytes, tensors_for, toy, write_folder, write_gguf
from safetensors.torch import save_file

from fuel_core.checkpoint import load_weights, open_checkpoint
from fuel_core.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    UnsupportedCheckpointError,
)

UP = "model.layers.0.mlp.up_proj"


# -- quantised, and nothing says so -------------------------------------------------------------------------------

_U32 = torch.uint32
_QUANTISED: dict[str, tuple[str, dict[str, torch.Tensor]]] = {
    "fp8, block scales": ("fp8", {"weight": torch.zeros(8, 8), "weight_scale_inv": torch.ones(1, 1)}),
    "fp8, tensor scale": (
        "fp8",
        {"weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "weight_scale": torch.ones(1)},
    ),
    "fp8, no scale": ("fp8", {"weight": torch.zeros(8, 8).to(torch.float8_e5m2)}),
    "fp8, scale first by name": ("fp8", {"weight": torch.zeros(8, 8), "scale_weight": torch.ones(1)}),
    "int8": ("int8", {"weight": torch.zeros(8, 8, dtype=torch.int8), "weight_scale": torch.ones(8)}),
    "awq": (
        "awq",
        {
            "qweight": torch.zeros(8, 1, dtype=torch.int32),
            "qzeros": torch.zeros(1, 1, dtype=torch.int32),
            "scales": torch.ones(1, 8),
        },
    ),
    "gptq": (
        "gptq",
        {
            "qweight": torch.zeros(1, 8, dtype=torch.int32),
            "qzeros": torch.zeros(1, 1, dtype=torch.int32),
            "scales": torch.ones(1, 8),
            "g_idx": torch.zeros(8, dtype=torch.int32),
        },
    ),
    "bitsandbytes, 4 bits": (
        "bitsandbytes",
        {"weight": torch.zeros(32, 1, dtype=torch.uint8), "weight.absmax": torch.ones(1)},
    ),
    "bitsandbytes, state": (
        "bitsandbytes",
        {"weight": torch.zeros(8, 8), "weight.quant_state.bitsandbytes__nf4": torch.ones(4)},
    ),
    "bitsandbytes, 8 bits": ("bitsandbytes", {"weight": torch.zeros(8, 8, dtype=torch.int8), "SCB": torch.ones(8)}),
    "mlx": (
        "mlx",
        {"weight": torch.zeros(8, 1, dtype=_U32), "scales": torch.ones(8, 1), "biases": torch.ones(8, 1)},
    ),
    "mlx, no biases": ("mlx", {"weight": torch.zeros(8, 1, dtype=_U32), "scales": torch.ones(8, 1)}),
    "compressed-tensors": (
        "compressed-tensors",
        {"weight_packed": torch.zeros(8, 1, dtype=torch.int32), "weight_scale": torch.ones(8, 1)},
    ),
    "hqq": ("hqq", {"W_q": torch.zeros(8, 4, dtype=torch.uint8)}),
    "nvfp4": (
        "nvfp4",
        {
            "weight": torch.zeros(8, 4, dtype=torch.uint8),
            "weight_scale": torch.ones(8, 1).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.ones(1),
            "input_scale": torch.ones(1),
        },
    ),
    "bitnet": ("bitnet", {"weight": torch.zeros(2, 8, dtype=torch.uint8), "weight_scale": torch.ones(1)}),
    "eetq": ("eetq", {"weight": torch.zeros(8, 8, dtype=torch.int8), "weight_scales": torch.ones(8)}),
    "quanto": ("quanto", {"weight._data": torch.zeros(8, 8, dtype=torch.int8), "weight._scale": torch.ones(8, 1)}),
    "vptq": (
        "vptq",
        {"centroids.weight": torch.zeros(1, 16), "indices": torch.zeros(1, 8, 2, dtype=torch.int16)},
    ),
    "aqlm": ("aqlm", {"codes": torch.zeros(8, 1, 1, dtype=torch.int8), "codebooks": torch.ones(1, 8, 1, 8)}),
    "mxfp4": (
        "mxfp4",
        {"up_blocks": torch.zeros(8, 4, dtype=torch.uint8), "up_scales": torch.zeros(8, 1, dtype=torch.uint8)},
    ),
}


@pytest.mark.parametrize("kind", list(_QUANTISED))
def test_quantised_weights_are_refused_by_name_though_nothing_declares_them(tmp_path: Path, kind: str) -> None:
    method, parts = _QUANTISED[kind]
    tensors = {n: t for n, t in tensors_for(toy()).items() if not n.startswith(UP)}
    folder = write_folder(tmp_path, tensors=tensors | {f"{UP}.{leaf}": t for leaf, t in parts.items()})
    ck = open_checkpoint(folder)
    for refuse in (lambda: resolve(ck.raw), lambda: load_weights(toy(), ck)):
        with pytest.raises(UnsupportedCheckpointError, match=rf"quantised with '{method}' \(tensors: {UP}\."):
            refuse()


def test_plain_tensors_with_a_word_of_a_scheme_in_their_names_are_not_taken_for_quantised(tmp_path: Path) -> None:
    words = ("scales", "biases", "a.scales", "a.qweight_norm", "a.weight", "b.weight_scale", "scale.weight", "x_scales")
    ck = open_checkpoint(write_folder(tmp_path, tensors={word: torch.zeros(1) for word in words}))
    assert ck.raw.quantization is None


# -- safetensors headers ------------------------------------------------------------------------------------------

_A = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
_B = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}


def _twice(one: object, other: object, name: str = "a") -> bytes:
    return f'{{"a": {json.dumps(one)}, "{name}": {json.dumps(other)}}}'.encode()


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (_twice(_A, _A), 4),
        (_twice(_A, _B), 8),
        (_twice({**_A, "dtype": "I32"}, _A), 4),
        (_twice(_A, _A, "\\u0061"), 4),
        ({"a": _A, "b": {**_B, "data_offsets": [8, 12]}}, 12),
        ({"a": {**_A, "data_offsets": [4, 8]}}, 8),
        ({"a": _A}, 8),
        ({"a": _A, "b": {**_B, "data_offsets": [2, 6]}}, 6),
        ({"a": {**_A, "shape": [-1]}}, 4),
        ({"a": {**_A, "shape": [1.0]}}, 4),
        ({"a": {**_A, "shape": [1 << 64]}}, 4),
        ({"a": {**_A, "shape": [1 << 32, 1 << 32]}}, 4),
        ({"a": {**_A, "data_offsets": [0, 1 << 64]}}, 4),
        ({"a": {**_A, "data_offsets": [-4, 0]}}, 4),
        ({"a": {**_A, "data_offsets": [0]}}, 4),
        ({"a": {**_A, "data_offsets": [0, 3]}}, 3),
        ({"a": {**_A, "dtype": "f32"}}, 4),
        ({"a": {**_A, "dtype": None}}, 4),
        ({"a": {"shape": [1], "data_offsets": [0, 4]}}, 4),
        ({"a": []}, 4),
        ({"__metadata__": {"a": 1}, "a": _A}, 4),
        ([], 0),
        (b'{"a": ' * 100_000, 0),
        (b"\xff\xfe", 0),
        (b"", 0),
    ],
)
def test_lying_header_is_corrupt_in_one_line(tmp_path: Path, header: object, size: int) -> None:
    content = safetensors_bytes(header, bytes(size))
    with pytest.raises(CheckpointCorruptError, match=r"model\.safetensors") as error:
        open_checkpoint(write_folder(tmp_path, files={"model.safetensors": content}))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_name_twice_is_named(tmp_path: Path) -> None:
    content = safetensors_bytes(_twice(_A, _A), bytes(4))
    with pytest.raises(CheckpointCorruptError, match="expected every name once, found 'a' twice"):
        open_checkpoint(write_folder(tmp_path, files={"model.safetensors": content}))


def test_tensor_that_is_called_like_a_field_of_the_header_is_no_second_entry(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tensors={"data_offsets": torch.zeros(1), "a": torch.ones(1)})
    assert open_checkpoint(folder).tensor_names() == ["a", "data_offsets"]


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1])
def test_shard_cut_anywhere_is_corrupt_and_named(tmp_path: Path, keep: int) -> None:
    write_folder(tmp_path, tensors=tensors_for(toy()), shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointCorruptError, match=r"00002-of-00002\.safetensors"):
        open_checkpoint(tmp_path)


def test_names_that_do_not_print_stay_in_one_line(tmp_path: Path) -> None:
    tensors = tensors_for(toy()) | {"a\nb\x1b[31m": torch.zeros(1), "n" * 5000: torch.zeros(1)}
    with pytest.raises(Exception, match="2 unused tensors") as error:
        load_weights(toy(), open_checkpoint(write_folder(tmp_path, tensors=tensors)))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_foreign_stored_type_is_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = tensors_for(toy())
    tensors[f"{UP}.weight"] = torch.zeros(160, 96, dtype=dtype)
    with pytest.raises(UnsupportedCheckpointError, match=rf"{UP}\.weight' is stored as [CU]\d\d: expected one of"):
        load_weights(toy(), open_checkpoint(write_folder(tmp_path, tensors=tensors)))


# -- JSON ---------------------------------------------------------------------------------------------------------


def test_key_with_two_values_is_refused_with_both(tmp_path: Path) -> None:
    text = json.dumps(TINY)[:-1] + ', "hidden_size": 64}'
    with pytest.raises(CheckpointCorruptError, match=r"every key once, found 'hidden_size' as 96 and as 64"):
        open_checkpoint(write_folder(tmp_path, files={"config.json": text}))
    same = json.dumps(TINY)[:-1] + ', "hidden_size": 96}'
    assert open_checkpoint(write_folder(tmp_path, files={"config.json": same})).raw["hidden_size"] == 96


def test_tensor_in_two_files_of_an_index_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, tensors=tensors_for(toy()), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text().replace('"weight_map": {', '"weight_map": {"lm_head.weight": "other.safetensors", ')
    index.write_text(text)
    with pytest.raises(CheckpointCorruptError, match=r"'lm_head\.weight' as 'other\.safetensors' and as 'model-0000"):
        open_checkpoint(tmp_path)


def test_json_longer_than_any_config_is_refused_unread(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with (tmp_path / "config.json").open("wb") as f:
        f.truncate(1 << 40)  # sparse
    with pytest.raises(CheckpointCorruptError, match="bytes of JSON, found 1099511627776"):
        open_checkpoint(tmp_path)


# -- names that lead elsewhere, and links that should ---------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../m.safetensors",
        "../../m.safetensors",
        "./m.safetensors",
        "a/../../m.safetensors",
        "/abs/m.safetensors",
        "//host/m.safetensors",
        "C:\\m.safetensors",
        "C:m.safetensors",
        "..\\m.safetensors",
        "file:m.safetensors",
        "~/m.safetensors",
        "m.safetensors/",
        "m.safetensors/../../m.safetensors",
        "m.safetensors\x00.json",
        "pytorch_model.bin",
        "x" * 100_000,
        ["m.safetensors"],
        {"m": 1},
        True,
        10**400,
    ],
)
def test_index_names_files_of_its_own_folder_alone(tmp_path: Path, name: object) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "m.safetensors")
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    assert not isinstance(error.value, CheckpointNotFoundError)


def test_snapshot_of_links_into_the_blobs_opens(tmp_path: Path) -> None:
    real = write_folder(tmp_path / "real", tensors=tensors_for(toy()), shards=2)
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(real.iterdir())):
        file.rename(blobs / f"{i:064d}")
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / f"{i:064d}")
    ck = open_checkpoint(snapshot)
    assert ck.tensor_names() == sorted(tensors_for(toy()))
    load_weights(toy(), ck)
    (tmp_path / "alias").symlink_to(snapshot)
    assert open_checkpoint(tmp_path / "alias").has_weights
    # A download of a later revision that goes on does not concern this one.
    (blobs / "abc.incomplete").write_bytes(b"")
    assert open_checkpoint(snapshot).has_weights


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model-00002-of-00002.safetensors", "only.safetensors", "config.json", "m.gguf"]
)
@pytest.mark.parametrize("index", [True, False])
def test_link_to_nothing_is_named(tmp_path: Path, name: str, index: bool) -> None:
    write_folder(tmp_path, tensors=tensors_for(toy()) if name.startswith("model-") else None, shards=2, index=index)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(CheckpointNotFoundError, match=name.replace(".", r"\.")):
        open_checkpoint(tmp_path)


def test_links_in_a_circle_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(CheckpointNotFoundError, match="a link to nothing"):
        open_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "m.gguf"])
def test_folder_in_the_place_of_a_file_is_no_crash(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with suppress(CheckpointError):
        assert not open_checkpoint(folder).has_weights


@pytest.mark.parametrize(
    "name", ["x" * 300, "y" * 5000, "a/" * 3000, "\0", "a\0b", "\ud800", "\n", "*", "[", "~nobody0"]
)
def test_path_that_no_file_can_have_is_not_found(tmp_path: Path, name: str) -> None:
    for path in (name, f"{tmp_path}/{name}"):
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path)
        assert "\n" not in str(error.value)


# -- pickles ------------------------------------------------------------------------------------------------------


class _Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "PYTORCH_MODEL.BIN",
        "consolidated.00.pth",
        "model.pt",
        "last.ckpt",
        "model.pkl",
        "model.pickle",
    ],
)
@pytest.mark.parametrize("form", ["pickle", "zip"])
def test_folder_of_pickles_is_refused_and_none_is_read(tmp_path: Path, name: str, form: str) -> None:
    marker, folder = tmp_path / "ran", write_folder(tmp_path / "model")
    payload = pickle.dumps(_Marker(marker))
    if form == "pickle":
        (folder / name).write_bytes(payload)
    else:
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("archive/data.pkl", payload)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UnsupportedCheckpointError, match=r"expected safetensors files, found only .*run code"):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError):
        open_checkpoint(folder / name)
    assert not marker.exists()
    pickle.loads(payload)
    assert marker.exists()  # so the marker can appear


def test_pickle_under_a_name_of_another_format_is_not_unpickled(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for name in ("model.safetensors", "m.gguf", "config.json", "model.safetensors.index.json"):
        folder = write_folder(tmp_path / name, files={name: pickle.dumps(_Marker(marker))})
        with pytest.raises(CheckpointError):
            open_checkpoint(folder)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["tf_model.h5", "flax_model.msgpack", "model.onnx"])
def test_weights_of_another_framework_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=f"found only {name}"):
        open_checkpoint(write_folder(tmp_path, files={name: b"x"}))


# -- unfinished and stray files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.incomplete",
        "model.safetensors.part",
        "model.safetensors.aria2",
        "model.safetensors.crdownload",
        ".cache/huggingface/download/xyz.incomplete",
    ],
)
@pytest.mark.parametrize("config", [True, False])
def test_unfinished_download_is_named(tmp_path: Path, name: str, config: bool) -> None:
    write_folder(tmp_path, files={name: b"x"})
    if not config:
        (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"an unfinished download \(.*let it finish"):
        open_checkpoint(tmp_path)


def test_unfinished_download_into_the_hub_cache_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "snapshots" / "c0ffee", files={"../../blobs/abc.incomplete": b"x"})
    with pytest.raises(CheckpointNotFoundError, match=r"an unfinished download \(abc\.incomplete\)"):
        open_checkpoint(folder)


def test_unfinished_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf.part").write_bytes(b"GGUF")
    with pytest.raises(CheckpointNotFoundError, match=r"an unfinished download \(m\.gguf\.part\)"):
        open_checkpoint(tmp_path)


def test_pointer_in_the_place_of_one_shard_is_recognised(tmp_path: Path) -> None:
    write_folder(tmp_path, tensors=tensors_for(toy()), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid x\n")
    with pytest.raises(CheckpointNotFoundError, match=r"00002-of-00003.*git-lfs pointer"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "stray",
    [
        "consolidated.safetensors",
        "model-00001-of-00009.safetensors",
        "extra.safetensors",
        "model-00001-of-00002.safetensors.bak",
        "original/model.safetensors",
        "._model-00001-of-00002.safetensors",
    ],
)
def test_stray_file_beside_an_index_is_not_read(tmp_path: Path, stray: str) -> None:
    folder = write_folder(tmp_path, tensors=tensors_for(toy()), shards=2, files={stray: b"not weights"})
    ck = open_checkpoint(folder)
    assert ck.tensor_names() == sorted(tensors_for(toy()))
    load_weights(toy(), ck)


# -- what the system refuses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (errno.EACCES, CheckpointNotFoundError, "no permission to read"),
        (errno.EPERM, CheckpointNotFoundError, "no permission to read"),
        (errno.ENOENT, CheckpointNotFoundError, "is gone"),
        (errno.EIO, CheckpointCorruptError, "Input/output error"),
        (errno.ESTALE, CheckpointCorruptError, "Stale file handle"),
        (errno.EMFILE, CheckpointCorruptError, "Too many open files"),
        (errno.ENOMEM, CheckpointError, "expected memory to map"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "m.gguf"])
def test_what_the_system_says_is_one_line_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, kind: type[CheckpointError], said: str
) -> None:
    folder = write_folder(tmp_path, files={name: b"x"} if name != "config.json" else None)
    usual = Path.open

    def refuse(self: Path, *args: Any, **options: Any) -> Any:
        if self.name == name:
            raise OSError(code, os.strerror(code), str(self))
        return usual(self, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(kind, match=said) as error:
        open_checkpoint(folder / name if name == "m.gguf" else folder)
    assert str(folder / name) in str(error.value)
    assert "\n" not in str(error.value)


def test_tokenizer_file_without_permission_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ck = open_checkpoint(write_folder(tmp_path, files={"tokenizer.json": b"{}"}))
    usual = Path.read_bytes

    def refuse(self: Path) -> bytes:
        if self.name == "tokenizer.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return usual(self)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointNotFoundError, match=r"no permission to read .*tokenizer\.json"):
        ck.tokenizer_files()


# -- files that change while they are open ------------------------------------------------------------------------


def _vanish(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def _rewrite(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"\1\1\1\1")
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [(_vanish, "is gone"), (_cut, "it changed"), (_replace, "another one"), (_rewrite, "it changed")],
)
def test_file_that_changed_between_header_and_tensors_is_refused(
    tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    """Names and shapes were checked in a file that is no longer there."""
    module = toy()
    ck = open_checkpoint(write_folder(tmp_path, tensors=tensors_for(module)))
    change(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        load_weights(module, ck)
    assert all(p.is_meta for p in module.parameters())


@pytest.mark.parametrize("change", [_vanish, _replace])
def test_file_that_is_open_may_go(tmp_path: Path, change: Callable[[Path], None]) -> None:
    tensors = tensors_for(toy())
    ck = open_checkpoint(write_folder(tmp_path, tensors=tensors))
    first = ck.tensor("lm_head.weight")
    change(tmp_path / "model.safetensors")
    assert torch.equal(ck.tensor("model.norm.weight"), tensors["model.norm.weight"])
    assert torch.equal(first, tensors["lm_head.weight"])


@pytest.mark.parametrize("change", [_vanish, _replace])
def test_gguf_file_that_is_open_may_go(tmp_path: Path, change: Callable[[Path], None]) -> None:
    tensors = tensors_for(toy())
    path = write_gguf(tmp_path / "m.gguf", tensors)
    ck = open_checkpoint(path)
    change(path)
    assert torch.equal(ck.tensor("lm_head.weight"), tensors["lm_head.weight"])


_CUT_WHILE_OPEN = """
import os, sys
from fuel_core.checkpoint import open_checkpoint
from fuel_core.errors import CheckpointCorruptError
folder, file, name = sys.argv[1:]
ck = open_checkpoint(folder)
ck.tensor(name)
os.truncate(file, 8192)
for read in (ck.tensor, ck.rows):
    try:
        read(name).sum() if read == ck.tensor else read(name).rows(0, 40)
    except CheckpointCorruptError as error:
        print(error)
"""


@pytest.mark.parametrize("form", ["safetensors", "gguf", "quantised"])
def test_file_that_is_cut_while_open_does_not_end_the_process(tmp_path: Path, form: str) -> None:
    """Reading mapped bytes that are gone is a bus error; a process of its own shows it."""
    import gguf

    if form == "safetensors":
        folder = write_folder(tmp_path, tensors=tensors_for(toy()))
        file = folder / "model.safetensors"
    else:
        stored = gguf.GGMLQuantizationType.Q8_0 if form == "quantised" else gguf.GGMLQuantizationType.F32
        file = folder = write_gguf(tmp_path / "m.gguf", tensors_for(toy()), stored=stored)
    script = [sys.executable, "-c", _CUT_WHILE_OPEN, str(folder), str(file), "model.norm.weight"]
    script[-1] = "lm_head.weight"
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(file.name in line and "open the checkpoint again" in line for line in lines)


# -- small files that broke other readers --------------------------------------------------------------------------


def test_config_without_a_model_type_says_so(tmp_path: Path) -> None:
    raw = open_checkpoint(write_folder(tmp_path, {k: v for k, v in TINY.items() if k != "model_type"})).raw
    with pytest.raises(ConfigError, match="'model_type'"):
        resolve(raw)

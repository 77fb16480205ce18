"""Split GGUF models: any file opens the set, the set is one model, and what contradicts itself is named."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoint_writers import (
    TINY,
    gguf_bytes,
    gguf_entry,
    gguf_pair,
    resolve,
    tensors_for,
    toy,
    write_folder,
    write_gguf,
)

from fuel_core.checkpoint import load_weights, open_checkpoint
from fuel_core.checkpoint.gguf_file import GgufCheckpoint
from fuel_core.checkpoint.gguf_header import parse_header
from fuel_core.errors import CheckpointCorruptError, CheckpointNotFoundError

Q = gguf.GGMLQuantizationType
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def split_model(folder: Path, tensors: dict[str, torch.Tensor], per_file: int = 8, **options: Any) -> list[Path]:
    """The files of a split model, in order, as the gguf package writes them."""
    folder.mkdir(exist_ok=True)
    small_first = options.pop("small_first", False)
    split = {"split_max_tensors": per_file, "small_first_shard": small_first}
    write_gguf(folder / "m.gguf", tensors, split=split, **options)
    return sorted(folder.glob("m-*.gguf"))


@pytest.mark.parametrize("stored", [Q.F32, Q.Q8_0], ids=["plain", "quantised"])
@pytest.mark.parametrize("small_first", [False, True], ids=["tensors-first", "metadata-first"])
def test_any_file_opens_the_whole_set(tmp_path: Path, small_first: bool, stored: Q) -> None:
    tensors = tensors_for(toy())
    whole = open_checkpoint(write_gguf(tmp_path / "whole.gguf", tensors, stored=stored))
    files = split_model(tmp_path / "set", tensors, small_first=small_first, stored=stored)
    assert len(files) > 2
    assert bool(parse_header(files[0].read_bytes(), "first").tensors) is not small_first
    for place in (*files, tmp_path / "set"):
        ck = open_checkpoint(place)
        assert isinstance(ck, GgufCheckpoint)
        assert ck.files == tuple(files)
        assert ck.tensor_names() == whole.tensor_names() == sorted(tensors)
        assert resolve(ck.raw) == resolve(whole.raw)
        for name in tensors:
            assert ck.tensor_info(name) == whole.tensor_info(name)
            assert torch.equal(ck.tensor(name), whole.tensor(name)), name


def test_set_loads_like_the_file_it_was_split_from(tmp_path: Path) -> None:
    tensors = tensors_for(toy())
    one, other = toy(), toy()
    load_weights(one, open_checkpoint(write_gguf(tmp_path / "whole.gguf", tensors, stored=Q.Q8_0)))
    load_weights(other, open_checkpoint(split_model(tmp_path / "set", tensors, stored=Q.Q8_0)[1]))
    for (name, p), (_, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("tied", [False, True])
def test_tie_is_decided_on_all_files(tmp_path: Path, tied: bool) -> None:
    """The head is in the last file, so the first alone would look tied."""
    tensors = tensors_for(toy())
    head = tensors.pop(HEAD)
    if not tied:
        tensors[HEAD] = head
    files = split_model(tmp_path / "set", tensors)
    last = parse_header(files[-1].read_bytes(), "last").tensors
    assert ("output.weight" in last) is not tied
    assert resolve(open_checkpoint(files[0]).raw).tie_word_embeddings is tied


def test_biases_are_looked_for_in_all_files(tmp_path: Path) -> None:
    files = split_model(tmp_path / "set", tensors_for(toy(bias=True)), per_file=1)
    assert open_checkpoint(files[0]).raw["attention_bias"] is True


@pytest.mark.parametrize("gone", [0, 1, -1])
def test_missing_file_is_named_whichever_was_asked_for(tmp_path: Path, gone: int) -> None:
    files = split_model(tmp_path / "set", tensors_for(toy()))
    lost = files.pop(gone)
    lost.unlink()
    for place in (*files, tmp_path / "set"):
        with pytest.raises(CheckpointNotFoundError, match=rf"1 missing: {lost.name}; incomplete download\?"):
            open_checkpoint(place)


def test_file_with_a_link_to_nothing_is_missing(tmp_path: Path) -> None:
    files = split_model(tmp_path / "set", tensors_for(toy()))
    files[1].unlink()
    files[1].symlink_to(tmp_path / "blob")
    with pytest.raises(CheckpointNotFoundError, match=rf"1 missing: {files[1].name}"):
        open_checkpoint(files[0])


def test_set_of_links_as_the_hub_cache_has_it_opens(tmp_path: Path) -> None:
    files = split_model(tmp_path / "set", tensors_for(toy()))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for i, file in enumerate(files):
        file.rename(tmp_path / f"blob{i}")
        (snapshot / file.name).symlink_to(f"../blob{i}")
    assert len(open_checkpoint(snapshot).tensor_names()) == len(tensors_for(toy()))


def test_part_under_another_name_says_which_name_it_needs(tmp_path: Path) -> None:
    files = split_model(tmp_path / "set", tensors_for(toy()))
    lone = files[1].rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointNotFoundError, match=rf"-00001-of-{len(files):05d}\.gguf.*part 1 .*of {len(files)}"):
        open_checkpoint(lone)


def test_two_parts_with_their_names_exchanged_are_refused(tmp_path: Path) -> None:
    files = split_model(tmp_path / "set", tensors_for(toy()))
    spare = files[1].rename(tmp_path / "spare")
    files[2].rename(files[1])
    spare.rename(files[2])
    with pytest.raises(CheckpointCorruptError, match=r"expected part 1 .*found split\.no 2"):
        open_checkpoint(files[0])


def test_part_of_another_model_is_refused(tmp_path: Path) -> None:
    files = split_model(tmp_path / "set", tensors_for(toy()))
    others = split_model(tmp_path / "other", tensors_for(toy(bias=True)), per_file=1)
    files[1].write_bytes(others[1].read_bytes())
    with pytest.raises(CheckpointCorruptError, match=rf"found split\.no 1 of split\.count {len(others)}"):
        open_checkpoint(files[0])
    files[1].write_bytes(write_gguf(tmp_path / "whole.gguf", tensors_for(toy())).read_bytes())
    with pytest.raises(CheckpointCorruptError, match=r"found split\.no None"):
        open_checkpoint(files[0])


def _part(number: object, count: object, name: str, promised: int | None = None) -> bytes:
    """One part with one tensor; numbers are stored in 16 bits as published."""
    pairs = [
        gguf_pair(key, 2, struct.pack("<H", value))
        for key, value in (("split.no", number), ("split.count", count))
        if isinstance(value, int)
    ]
    if promised is not None:
        pairs.append(gguf_pair("split.tensors.count", 5, struct.pack("<i", promised)))
    return gguf_bytes(tuple(pairs), entries=(gguf_entry(name, (8,)),), data=bytes(32))


def _pair(folder: Path, first: bytes, second: bytes) -> Path:
    for i, content in enumerate((first, second), 1):
        (folder / f"m-0000{i}-of-00002.gguf").write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (_part(0, 2, "a"), _part(1, 2, "a"), "every tensor once, found 'a' in m-00001-of-00002.gguf as well"),
        (_part(0, 2, "a", promised=3), _part(1, 2, "b"), r"the 3 tensors of split\.tensors\.count.*found 2"),
        (_part(0, 2, "a", promised=-1), _part(1, 2, "b"), r"the -1 tensors"),
        (_part(0, 2, "a"), _part(0, 2, "b"), r"expected part 1 .*found split\.no 0"),
        (_part(1, 2, "a"), _part(1, 2, "b"), r"expected part 0 .*found split\.no 1"),
        (_part(0, 3, "a"), _part(1, 2, "b"), r"of 2 as its name says, found split\.no 0 of split\.count 3"),
        (_part(0, 2, "a"), _part(1, 65535, "b"), r"split\.count 65535"),
        (_part(None, 2, "a"), _part(1, 2, "b"), r"split\.no None"),
        (_part(0, None, "a"), _part(1, 2, "b"), r"split\.count None"),
        (_part(0, 2, "a"), _part(1, 2, "b")[:-1], r"00002-of-00002.*inside the"),
        (_part(0, 2, "a"), b"", r"00002-of-00002.*an empty one"),
        (_part(0, 2, "a"), b"version https://git-lfs.github.com/spec/v1\n", r"00002-of-00002.*git-lfs"),
    ],
)
def test_contradiction_between_the_parts_is_named(tmp_path: Path, first: bytes, second: bytes, expected: str) -> None:
    folder = _pair(tmp_path, first, second)
    with pytest.raises((CheckpointCorruptError, CheckpointNotFoundError), match=expected) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)
    assert _pair(tmp_path, _part(0, 2, "a", promised=2), _part(1, 2, "b")) == folder
    assert open_checkpoint(folder).tensor_names() == ["a", "b"]


@pytest.mark.parametrize("name", ["m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-00001-of-99999.gguf"])
def test_impossible_number_in_a_name_is_refused_without_listing_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(_part(0, 2, "a"))
    with pytest.raises(CheckpointCorruptError, match="expected a part from 1 to its total"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("pairs", [(), (0, 1), (0, 0)])
def test_only_file_of_a_set_of_one_is_a_plain_file(tmp_path: Path, pairs: tuple[int, ...]) -> None:
    for name in ("m.gguf", "m-00001-of-00001.gguf"):
        content = _part(*pairs, "a") if pairs else _part(None, None, "a")
        (tmp_path / name).write_bytes(content)
        assert open_checkpoint(tmp_path / name).tensor_names() == ["a"]


def test_folder_with_a_set_and_another_file_asks(tmp_path: Path) -> None:
    files = split_model(tmp_path / "set", tensors_for(toy()))
    write_folder(tmp_path / "set")  # a config beside it changes nothing
    assert open_checkpoint(tmp_path / "set").path == files[0]
    write_gguf(tmp_path / "set" / "other.gguf")
    with pytest.raises(CheckpointNotFoundError, match=r"expected one \.gguf file.*name the file you mean"):
        open_checkpoint(tmp_path / "set")


# -- alignment ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [8, 16, 64, 1024])
def test_alignment_of_one_file_is_followed(tmp_path: Path, alignment: int) -> None:
    tensors = tensors_for(toy())
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, alignment=alignment))
    assert all(torch.equal(ck.tensor(n), t) for n, t in tensors.items())


@pytest.mark.parametrize("alignment", [8, 16, 64, 1024])
def test_alignment_declared_in_the_first_file_alone_is_followed_where_the_others_use_it(
    tmp_path: Path, alignment: int
) -> None:
    tensors = tensors_for(toy())
    files = split_model(tmp_path / "set", tensors, per_file=2, alignment=alignment)
    headers = [parse_header(f.read_bytes(), f.name, alignment_of_set=alignment) for f in files]
    declared = ["general.alignment" in h.metadata for h in headers]
    assert declared == [True] + [False] * (len(files) - 1)
    ck = open_checkpoint(files[0])
    assert all(torch.equal(ck.tensor(n), t) for n, t in tensors.items())


def test_file_that_uses_the_default_beside_a_first_one_that_does_not_is_read_by_its_size() -> None:
    entries = (gguf_entry("t", (8,)), gguf_entry("u", (8,), offset=1024))
    data = b"\1" * 32 + bytes(992) + b"\2" * 32
    for written in (32, 1024):
        content = gguf_bytes(entries=entries, data=data, alignment=written)
        header = parse_header(content, "m.gguf", alignment_of_set=1024)
        for name, byte in (("t", 1), ("u", 2)):
            at = header.tensors[name].offset
            assert set(content[at : at + 32]) == {byte}
    with pytest.raises(CheckpointCorruptError, match=r"a size that tells 32 from 1024, found neither"):
        parse_header(gguf_bytes(entries=entries, data=data + bytes(128)), "m.gguf", alignment_of_set=1024)


def test_toy_has_enough_tensors_to_be_split() -> None:
    assert len(tensors_for(toy())) > 16
    assert TINY["num_hidden_layers"] == 2

"""What a checkpoint hands to the text package: files, templates, special and stop ids, GGUF vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_writers import TINY, write_folder, write_gguf
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from fuel_core.checkpoint import TokenizerSource, open_checkpoint, published
from fuel_core.errors import CheckpointCorruptError, TokenizerError, UnsupportedCheckpointError


def source(folder: Path, config: dict[str, Any] | None = None, **files: object) -> TokenizerSource:
    named = {k.replace("__", "/").replace("_json", ".json").replace("_jinja", ".jinja"): v for k, v in files.items()}
    return open_checkpoint(write_folder(folder, {**TINY, **(config or {})}, files=named)).tokenizer_files()


# -- folders ------------------------------------------------------------------------------------------------------


def test_empty_folder_gives_empty_fields(tmp_path: Path) -> None:
    found = source(tmp_path)
    assert found.format == "huggingface"
    assert found.origin == str(tmp_path)
    assert found.tokenizer_json is None
    assert found.chat_template is None
    assert found.chat_templates == {}
    assert found.published_stop_ids == frozenset()
    assert found.gguf is None


def test_tokenizer_json_is_handed_over_as_bytes(tmp_path: Path) -> None:
    assert source(tmp_path, tokenizer_json=b'{"x": 1}\n').tokenizer_json == b'{"x": 1}\n'


def test_special_tokens_map_fills_what_the_tokenizer_config_lacks(tmp_path: Path) -> None:
    found = source(
        tmp_path,
        tokenizer_config_json={"eos_token": "</s>", "bos_token": {"content": "<s>", "lstrip": False}},
        special_tokens_map_json={"eos_token": "other", "pad_token": "<pad>"},
    )
    assert found.special_tokens == {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}


@pytest.mark.parametrize(
    ("config", "generation", "stops", "eos"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": [7, 9]}, {7, 9}, 7),
        ({"eos_token_id": [1, 106]}, None, {1, 106}, 1),
        ({"eos_token_id": [128001, 128008, 128009]}, {"eos_token_id": None}, {128001, 128008, 128009}, 128001),
        ({}, {"eos_token_id": 5}, {5}, 5),
        ({"text_config": {"eos_token_id": 3}, "eos_token_id": 4}, None, {3, 4}, 4),
        ({"eos_token_id": -1}, None, set(), None),
    ],
)
def test_stop_ids_are_the_union_of_every_place(
    tmp_path: Path, config: dict[str, Any], generation: object, stops: set[int], eos: int | None
) -> None:
    files = {} if generation is None else {"generation_config_json": generation}
    found = source(tmp_path, config, **files)
    assert found.published_stop_ids == stops
    assert found.special_ids.get("eos") == eos


def test_stop_ids_of_another_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="token ids as integers, found '</s>'"):
        source(tmp_path, {"eos_token_id": "</s>"})


def test_generation_keys_of_the_config_act_only_without_a_generation_config(tmp_path: Path) -> None:
    config = {"do_sample": False, "temperature": 0.7, "top_k": 50, "hidden_act": "silu"}
    found = source(tmp_path / "a", config).generation_config
    assert found == {"do_sample": False, "temperature": 0.7, "top_k": 50}
    found = source(tmp_path / "b", config, generation_config_json={"top_p": 0.9}).generation_config
    assert found == {"top_p": 0.9}


def test_template_comes_from_the_tokenizer_config_in_every_form(tmp_path: Path) -> None:
    assert source(tmp_path / "a", tokenizer_config_json={"chat_template": "one"}).chat_template == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "one"}]
    found = source(tmp_path / "b", tokenizer_config_json={"chat_template": named})
    assert found.chat_templates == {"tool_use": "two", "default": "one"}
    assert found.chat_template == "one"
    found = source(tmp_path / "c", tokenizer_config_json={"chat_template": {"default": "one"}})
    assert found.chat_template == "one"
    assert source(tmp_path / "d", tokenizer_config_json={"chat_template": 3}).chat_template is None


def test_template_file_wins(tmp_path: Path) -> None:
    published_one = {"chat_template": [{"name": "default", "template": "old"}, {"name": "rag", "template": "r"}]}
    found = source(
        tmp_path / "a",
        tokenizer_config_json=published_one,
        chat_template_jinja="new\n",
        additional_chat_templates__tool_use_jinja="tools",
    )
    assert found.chat_templates == {"default": "new\n", "rag": "r", "tool_use": "tools"}
    assert found.chat_template == "new\n"
    older = source(tmp_path / "b", chat_template_json={"chat_template": "json"}, tokenizer_config_json=published_one)
    assert older.chat_template == "json"


def test_only_template_is_the_template_whatever_its_name(tmp_path: Path) -> None:
    found = source(tmp_path, tokenizer_config_json={"chat_template": [{"name": "rag", "template": "r"}]})
    assert found.chat_template == "r"


@pytest.mark.parametrize("name", ["tokenizer_config_json", "generation_config_json", "special_tokens_map_json"])
def test_broken_side_file_is_corrupt(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointCorruptError, match=r"\.json"):
        source(tmp_path, **{name: "{"})


# -- GGUF ---------------------------------------------------------------------------------------------------------

_TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "<|im_end|>", "ab"]


def gguf_source(folder: Path, **changes: Any) -> TokenizerSource:
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": _TOKENS,
        "token_type": [2, 3, 3, 1, 1, 3, 1],
        "merges": ["a b"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    metadata = {f"tokenizer.ggml.{k}": v for k, v in keys.items() if v is not ...}
    return open_checkpoint(write_gguf(folder / "m.gguf", metadata=metadata)).tokenizer_files()


def test_vocabulary_is_handed_over_as_stored(tmp_path: Path) -> None:
    found = gguf_source(tmp_path)
    vocabulary = found.gguf
    assert vocabulary is not None
    assert found.format == "gguf"
    assert vocabulary.tokens == tuple(_TOKENS)
    assert vocabulary.token_types == (2, 3, 3, 1, 1, 3, 1)
    assert vocabulary.merges == ("a b",)
    assert (vocabulary.model_kind, vocabulary.kind, vocabulary.pre_tokenizer) == ("gpt2", "bpe", "smollm")
    assert found.special_ids == {"bos": 1, "eos": 2}


def test_scored_vocabulary_has_scores(tmp_path: Path) -> None:
    vocabulary = gguf_source(tmp_path, model="llama", pre=..., merges=..., scores=[-float(i) for i in range(7)]).gguf
    assert vocabulary is not None
    assert (vocabulary.kind, vocabulary.scores[3], vocabulary.add_space_prefix) == ("spm", -3.0, True)


def test_stop_ids_hold_end_of_sequence_turn_and_message(tmp_path: Path) -> None:
    found = gguf_source(tmp_path, eot_token_id=5, eom_token_id=6)
    assert found.published_stop_ids == {2, 5, 6}
    assert found.stop_ids["tokenizer.ggml.eot_token_id"] == (5,)
    assert gguf_source(tmp_path, eos_token_id=...).published_stop_ids == frozenset()


@pytest.mark.parametrize(
    ("changes", "add_bos"),
    [
        ({"model": "llama", "pre": ...}, True),
        ({"model": "llama", "pre": ..., "add_bos_token": False}, False),
        ({"pre": "qwen2", "bos_token_id": ...}, False),
        ({"pre": ...}, False),
        ({"pre": "qwen2", "add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "unheard-of"}, False),
    ],
)
def test_beginning_is_added_as_the_file_says_else_by_kind(
    tmp_path: Path, changes: dict[str, Any], add_bos: bool
) -> None:
    found = gguf_source(tmp_path, **changes)
    assert found.gguf is not None
    assert found.gguf.add_bos is add_bos
    assert found.gguf.add_eos is False
    assert ("bos" in found.special_ids) is (changes.get("bos_token_id") is not ...)


def test_end_and_prefix_flags_are_read(tmp_path: Path) -> None:
    vocabulary = gguf_source(tmp_path, add_eos_token=True, add_space_prefix=False).gguf
    assert vocabulary is not None
    assert (vocabulary.add_eos, vocabulary.add_space_prefix) == (True, False)


def test_templates_of_a_gguf_file_are_read_with_their_names(tmp_path: Path) -> None:
    keys = {"tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two"}
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata=keys)).tokenizer_files()
    assert found.chat_templates == {"default": "one", "tool_use": "two"}
    assert found.gguf is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"token_type": [1]}, "token_type"),
        ({"scores": [0.0]}, "scores"),
        ({"token_type": ["x"] * 7}, "token_type"),
        ({"merges": [1, 2]}, "merges"),
        ({"tokens": ...}, "tokens"),
        ({"tokens": [1, 2]}, "tokens"),
        ({"model": ...}, "model"),
        ({"eos_token_id": 7}, "eos_token_id"),
        ({"eot_token_id": 2**32 - 1}, "eot_token_id"),
    ],
)
def test_contradictory_vocabulary_is_corrupt(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointCorruptError, match=key):
        gguf_source(tmp_path, **changes)


def test_padding_id_outside_the_vocabulary_is_dropped(tmp_path: Path) -> None:
    assert "pad" not in gguf_source(tmp_path, padding_token_id=7).special_ids


def test_unknown_vocabulary_model_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"'rwkv': expected one of gpt2, llama"):
        gguf_source(tmp_path, model="rwkv")


# -- published names ----------------------------------------------------------------------------------------------


def _cut(name: str | None, text: str) -> list[str]:
    rule = published.pre_tokenizer(name)
    steps = [Split(Regex(s), "isolated") for s in rule.splits]
    pieces = Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)]).pre_tokenize_str(text)
    return [text[a:b] for _, (a, b) in pieces]


_TEXT = "I'LL say 12345 hello  World!!\n\n  it's a<=b"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", "I|'|LL| say| 12345| hello| | World|!!|\n\n | it|'s| a|<=|b"),
        ("smollm", "I|'|LL| say| |1|2|3|4|5| hello| | World|!!|\n\n | it|'s| a|<=|b"),
        ("llama-bpe", "I|'LL| say| |123|45| hello| | World|!!\n\n| | it|'s| a|<=|b"),
        ("qwen2", "I|'LL| say| |1|2|3|4|5| hello| | World|!!\n\n| | it|'s| a|<=|b"),
        ("tekken", "I|'LL| say| |1|2|3|4|5| hello| | World|!!\n\n| | it|'s| a|<=|b"),
        ("gpt-4o", "I'LL| say| |123|45| hello| | World|!!\n\n| | it's| a|<=|b"),
        (None, "I|'|LL| say| |123|45| hello| | World|!!|\n\n | it|'|s| a|<=|b"),
    ],
)
def test_pre_tokenizer_rule_cuts_as_published(name: str | None, expected: str) -> None:
    assert _cut(name, _TEXT) == expected.split("|")


def test_rule_of_words_is_the_byte_level_regex_of_the_tokenizers_library() -> None:
    library = ByteLevel(add_prefix_space=False, use_regex=True).pre_tokenize_str(_TEXT)
    assert _cut("gpt-2", _TEXT) == [_TEXT[a:b] for _, (a, b) in library]


def test_every_rule_compiles_and_loses_no_character() -> None:
    for name in published.table("pre_tokenizers").values():
        for word in name["names"]:
            assert "".join(_cut(word, _TEXT)) == _TEXT


def test_unknown_pre_tokenizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"'unheard-of': expected one of .*gpt-2, .*llama-bpe, .*qwen2, .*smollm"):
        published.pre_tokenizer("unheard-of")


def test_whole_pieces_skip_merging_only_where_published() -> None:
    assert published.pre_tokenizer("llama-bpe").ignore_merges
    assert published.pre_tokenizer("tekken").ignore_merges
    assert not published.pre_tokenizer("qwen2").ignore_merges
    assert not published.pre_tokenizer("smollm").ignore_merges

"""Pieces joined are the one-shot decode, whatever the ids, whatever the decoder."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_alphabet, byte_level_gguf, byte_level_json, folder_source, gguf_source, spm_json
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from fuel_core.text import IncrementalDetokenizer, Tokenizer, load_tokenizer
from fuel_core.text.detokenizer import _BYTE_OF_CHAR


def with_decoder(decoder: decoders.Decoder | None) -> Tokenizer:
    backend = Backend.from_str(spm_json().decode())
    tree = json.loads(backend.to_str())
    tree["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())
    return load_tokenizer(folder_source(json.dumps(tree).encode()))


TOKENIZERS = {
    "byte-level": load_tokenizer(folder_source(byte_level_json())),
    "byte-level from GGUF": load_tokenizer(gguf_source(byte_level_gguf())),
    "scored pieces": load_tokenizer(folder_source(spm_json())),
    "metaspace": load_tokenizer(folder_source(spm_json(metaspace=True))),
    "metaspace decoder": with_decoder(decoders.Metaspace("▁", "always", False)),
    "metaspace decoder, no prefix": with_decoder(decoders.Metaspace("▁", "never", False)),
    "no decoder": with_decoder(None),
    "strip each": with_decoder(decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])),
    "strip two": with_decoder(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
        )
    ),
    "fused, then replaced": with_decoder(
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")])
    ),
    "window": with_decoder(
        decoders.Sequence([decoders.Replace("▁", "  "), decoders.Fuse(), decoders.Replace("bc", "X")])
    ),
}


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "window"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_detokenizer_pieces_join_to_one_shot_decode_for_any_ids(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    # A little beyond the vocabulary: models pad theirs.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=40))
    skip = data.draw(st.booleans())
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_detokenizer_never_shows_half_a_character_of_valid_text(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    seen = ""
    for piece in stream(tokenizer, ids, skip=False):
        seen += piece
        assert text.startswith(seen)
    assert seen == text


def test_detokenizer_holds_an_emoji_until_its_last_token() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("👩")
    assert len(ids) == 4
    assert stream(tokenizer, ids) == ["", "", "", "👩", ""]


def test_detokenizer_renders_an_unfinished_character_only_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("👩")[:3]
    assert stream(tokenizer, ids) == ["", "", "", "\ufffd"]


def test_detokenizer_treats_the_space_in_front_once_per_sequence() -> None:
    tokenizer = TOKENIZERS["scored pieces"]
    ids = tokenizer.encode("hi hi hi", add_special_tokens=False)
    assert len(ids) == 3
    assert stream(tokenizer, ids) == ["hi", " hi", " hi", ""]


def test_detokenizer_keeps_the_space_between_prompt_and_continuation() -> None:
    tokenizer = TOKENIZERS["scored pieces"]
    prompt, more = tokenizer.encode("hi"), tokenizer.encode("hi", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, context=prompt)
    assert detokenizer.push(more[0]) == " hi"


def test_detokenizer_context_finishes_a_character_begun_in_the_prompt() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("é")
    detokenizer = IncrementalDetokenizer(tokenizer, context=[*tokenizer.encode("x" * 40), ids[0]])
    assert detokenizer.push(ids[1]) == "é"


def test_detokenizer_flush_starts_a_new_sequence() -> None:
    tokenizer = TOKENIZERS["scored pieces"]
    ids = tokenizer.encode("hi", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    first = detokenizer.push(ids[0]) + detokenizer.flush()
    assert (first, detokenizer.push(ids[0])) == ("hi", "hi")


def test_detokenizer_closes_a_run_of_bytes_as_one_decision() -> None:
    tokenizer = TOKENIZERS["scored pieces"]
    euro, stray, word = [tokenizer.token_id(f"<0x{b:02X}>") for b in "€".encode()], 0xFF + 3, tokenizer.token_id("a")
    assert None not in euro
    assert stream(tokenizer, [*euro, word]) == ["", "", "", "€a", ""]
    assert stream(tokenizer, [*euro, stray, word]) == ["", "", "", "", "\ufffd" * 4 + "a", ""]


def test_detokenizer_skips_special_tokens_and_ids_without_a_token() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    special = next(iter(tokenizer.special_ids))
    assert stream(tokenizer, [special, 10**6, 2**40, *tokenizer.encode("hello")]) == ["", "", "", "hello", ""]
    assert "".join(stream(tokenizer, [special], skip=False)) == tokenizer.token(special)


def test_detokenizer_window_serves_a_decoder_without_a_stage() -> None:
    tokenizer = TOKENIZERS["window"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer._window is not None, "this decoder has no stage, so it must be served by the window"
    ids = [tokenizer.token_id(piece) for piece in ("▁a", "b", "a", "▁h", "i")]
    assert "".join(stream(tokenizer, [i for i in ids if i is not None])) == "  aba  hi"


def test_detokenizer_cost_per_token_does_not_grow_with_the_text() -> None:
    """Counts what is held, since time is no measure: after any number of tokens, no more than one character."""
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("hello world 👩")
    for _ in range(200):
        for token_id in ids:
            detokenizer.push(token_id)
    (stage,) = detokenizer._stages
    pending, _ = stage._utf8.getstate()  # type: ignore[attr-defined]
    assert len(pending) <= 3


def test_detokenizer_byte_alphabet_is_the_library_s() -> None:
    backend = Backend(models.BPE(vocab={}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    assert sorted(_BYTE_OF_CHAR) == byte_alphabet()
    assert sorted(_BYTE_OF_CHAR.values()) == list(range(256))
    for char, byte in _BYTE_OF_CHAR.items():
        assert decoders.ByteLevel().decode([char]) == bytes([byte]).decode("utf-8", "replace")

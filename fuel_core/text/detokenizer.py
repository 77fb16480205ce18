"""Token ids to text, one id at a time: the pieces joined are the one-shot decode, for every sequence.

The `tokenizers` library decodes whole sequences only. Decoding a growing text again and again costs the square of its
length, and decoding a window of it is wrong wherever the window's edge falls inside a character. So each decoder that
published tokenizers use is restated here as a small stage that remembers only what the next token can still change:
the bytes of an unfinished character, the leading space that is dropped once, a run of byte tokens not yet closed. Cost
per token does not depend on how much text came before. A decoder that has no stage falls back to a window (see
`_Window`), which is exact wherever its decoder acts on neighbouring tokens only.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from fuel_core.errors import TokenizerError

__all__ = ["IncrementalDetokenizer"]

_REPLACEMENT = "\ufffd"


class _Vocabulary(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def decoder_spec(self) -> Mapping[str, Any] | None: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token(self, token_id: int) -> str | None: ...

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """Turns ids into text as they arrive.

    For every sequence of ids, `"".join(push(i) for i in ids) + flush()` equals
    `tokenizer.decode(ids, skip_special_tokens)`; U+FFFD appears only where the one-shot decode has it, never for a
    character whose remaining bytes are still to come. `push` may return "" while text is held back.

    `context` are ids that came before (a prompt): they set the state, so that a tokenizer which drops the space in
    front of a sequence drops it in front of the prompt and keeps the one between prompt and continuation. Only its
    tail is read.
    """

    # An unfinished character has at most 3 bytes and a dropped prefix is one character: 16 ids always suffice.
    _CONTEXT_IDS = 16

    def __init__(
        self, tokenizer: _Vocabulary, *, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._skip_special_tokens = skip_special_tokens
        stages = _stages(tokenizer.decoder_spec)
        self._stages: list[_Stage] = stages or []
        self._window = None if stages is not None else _Window(tokenizer, skip_special_tokens)
        for token_id in context[-self._CONTEXT_IDS :]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Text that is certain once `token_id` is known. Special tokens and ids without a token add nothing."""
        if token_id in self._skip:
            return ""
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        if self._window is not None:
            return self._window.push(token_id)
        tokens = [token]
        for stage in self._stages:
            tokens = stage.push(tokens)
            if not tokens:
                return ""
        return "".join(tokens)

    def flush(self) -> str:
        """Text still held back, as the one-shot decode renders it at the end. The next `push` starts a sequence."""
        if self._window is not None:
            text = self._window.flush()
            self._window = _Window(self._tokenizer, self._skip_special_tokens)
            return text
        tokens: list[str] = []
        for stage in self._stages:
            tokens = stage.push(tokens) + stage.flush()
        self._stages = _stages(self._tokenizer.decoder_spec) or []
        return "".join(tokens)


class _Stage:
    """One decoder, fed with the tokens that became certain. Returns those that it makes certain."""

    def push(self, tokens: list[str]) -> list[str]:
        raise NotImplementedError

    def flush(self) -> list[str]:
        return []


class _Joined(_Stage):
    """No decoder at all: tokens are joined by single spaces."""

    def __init__(self) -> None:
        self._first = True

    def push(self, tokens: list[str]) -> list[str]:
        out = []
        for token in tokens:
            out.append(token if self._first else " " + token)
            self._first = False
        return out


class _Replace(_Stage):
    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def push(self, tokens: list[str]) -> list[str]:
        return [token.replace(self._old, self._new) for token in tokens]


class _ByteFallback(_Stage):
    """Tokens of the form <0xE2> are bytes. A run of them is one decision: text if all of it is UTF-8, else one U+FFFD
    a byte, so a run stays back until another token closes it.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, tokens: list[str]) -> list[str]:
        out: list[str] = []
        for token in tokens:
            byte = _byte_of(token)
            if byte is None:
                out += self.flush()
                out.append(token)
            else:
                self._run.append(byte)
        return out

    def flush(self) -> list[str]:
        if not self._run:
            return []
        run, self._run = bytes(self._run), bytearray()
        try:
            return [run.decode("utf-8")]
        except UnicodeDecodeError:
            return [_REPLACEMENT] * len(run)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of(token: str) -> int | None:
    match = _BYTE_TOKEN.fullmatch(token)
    return None if match is None else int(match[1], 16)


class _StripEach(_Stage):
    """Drops up to `start` leading `content` characters of every token."""

    def __init__(self, content: str, start: int) -> None:
        self._content, self._start = content, start

    def push(self, tokens: list[str]) -> list[str]:
        return [part for token in tokens for part in _StripHead(self._content, self._start).push([token])]


class _StripHead(_Stage):
    """Drops up to `start` leading `content` characters of the whole text, which arrives in pieces."""

    def __init__(self, content: str, start: int) -> None:
        self._content, self._left = content, start

    def push(self, tokens: list[str]) -> list[str]:
        if not self._left:
            return tokens
        text = "".join(tokens)
        cut = 0
        while self._left and cut < len(text) and text[cut] == self._content:
            cut += 1
            self._left -= 1
        if cut < len(text):
            self._left = 0
        return [text[cut:]]


class _ByteLevel(_Stage):
    """Every character of a token stands for a byte; a token with a character outside that alphabet is literal text."""

    def __init__(self) -> None:
        # Replaces maximal ill-formed parts by one U+FFFD each, as the library's lossy conversion does.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: list[str]) -> list[str]:
        return [self._utf8.decode(b"".join(_token_bytes(token) for token in tokens))]

    def flush(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


def _byte_alphabet() -> dict[str, int]:
    """Printable stand-in -> byte: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + n): byte for n, byte in enumerate(rest)})
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


class _Metaspace(_Stage):
    """A marker character stands for a space; in the first token it stands for nothing unless no prefix is added."""

    def __init__(self, replacement: str, drops_first: bool) -> None:
        self._replacement, self._drop = replacement, drops_first

    def push(self, tokens: list[str]) -> list[str]:
        out = []
        for token in tokens:
            out.append(token.replace(self._replacement, "" if self._drop else " "))
            self._drop = False
        return out


class _Window:
    """Decodes a window of ids with the library and emits what the newest id added.

    The window starts at the last id whose text was emitted whole. Exact for decoders that act on neighbouring tokens;
    no published decoder-only checkpoint that needs more is known.
    """

    def __init__(self, tokenizer: _Vocabulary, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._emitted = 0  # how many ids of the window are in emitted text

    def _pending(self) -> str:
        known = self._tokenizer.decode(self._ids[: self._emitted], self._skip)
        return self._tokenizer.decode(self._ids, self._skip)[len(known) :]

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._pending()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._ids = self._ids[self._emitted :]
        self._emitted = len(self._ids)
        return text

    def flush(self) -> str:
        return self._pending()


def _stages(spec: Mapping[str, Any] | None) -> list[_Stage] | None:
    """Stages that do what the decoder `spec` (as in tokenizer.json) does, or None where one has no stage."""
    if spec is None:
        return [_Joined()]
    stages: list[_Stage] = []
    whole = False  # from here on, what passes is one text in pieces, not tokens
    for part in _flatten(spec):
        kind = part.get("type")
        stage: _Stage | None = None
        if kind == "Fuse":
            whole = True
            continue
        if kind == "ByteLevel" and not whole:
            stage, whole = _ByteLevel(), True
        elif kind == "ByteFallback" and not whole:
            stage = _ByteFallback()
        elif kind == "Metaspace" and not whole:
            scheme = part.get("prepend_scheme", "always")
            stage = _Metaspace(str(part.get("replacement", "\u2581")), drops_first=scheme != "never")
        elif kind == "Replace":
            old = part.get("pattern", {}).get("String")
            # Over pieces of one text, only a single character can never straddle two of them.
            if isinstance(old, str) and old and (len(old) == 1 or not whole):
                stage = _Replace(old, str(part.get("content", "")))
        elif kind == "Strip" and part.get("stop", 0) == 0:
            # Characters dropped at the end have no stage: published decoders drop none.
            content, start = str(part["content"]), int(part["start"])
            stage = _StripHead(content, start) if whole else _StripEach(content, start)
        if stage is None:
            return None
        stages.append(stage)
    return stages


def _flatten(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if spec.get("type") == "Sequence":
        return [leaf for part in spec.get("decoders", ()) for leaf in _flatten(part)]
    return [spec]


def decoder_spec_of(state: bytes) -> Mapping[str, Any]:
    """The decoder of a `tokenizers` object as the mapping that tokenizer.json holds.

    Raises TokenizerError when it is not one.
    """
    spec = json.loads(state)
    if not isinstance(spec, dict):
        raise TokenizerError(
            f"tokenizer: its decoder must be a JSON object, found {type(spec).__name__}; download tokenizer.json again"
        )
    return spec

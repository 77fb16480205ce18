"""A checkpoint's tokenizer: text to ids, ids to text, and the ids that end a reply.

Built from `tokenizer.json` or from the vocabulary of a GGUF file (`gguf_vocabulary`); both become an object of the
`tokenizers` library. What is ours is everything that library does not know: whether a sequence begins with BOS, which
ids stop, and that what a user wrote is never read as a special token.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from fuel_core.checkpoint.published import turn_end_tokens
from fuel_core.checkpoint.tokenizer_source import TokenizerSource
from fuel_core.errors import ChatTemplateError, TokenizerError
from fuel_core.text.chat_template import ChatTemplate, Message, check_messages
from fuel_core.text.detokenizer import decoder_spec_of
from fuel_core.text.gguf_vocabulary import raise_as_ours, tokenizer_from_gguf

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(source: TokenizerSource) -> Tokenizer:
    """Build the tokenizer that a checkpoint describes.

    Raises TokenizerError when there is none, or when what there is cannot be used.
    """
    if source.tokenizer_json is not None:
        try:
            backend = tokenizers.Tokenizer.from_buffer(source.tokenizer_json)
        except BaseException as error:
            raise_as_ours(
                error, f"{source.origin}: tokenizer.json does not load", "download it again, or pass token ids"
            )
    elif source.gguf is not None:
        backend = tokenizer_from_gguf(source.gguf, origin=source.origin)
    else:
        raise TokenizerError(
            f"{source.origin}: tokenizer.json expected, found none; save it beside the weights, or pass token ids"
        )
    return Tokenizer(backend, source)


class Tokenizer:
    """Text to token ids and back. Safe to share between threads.

    - `bos_token_id`: the id that begins a sequence, None where the checkpoint has none.
    - `eos_token_ids`: every end-of-sequence id published as a number, and the tokenizer's `eos_token`.
    - `stop_token_ids`: those, and the token that ends a turn in the chat template: a reply ends at any of them.
    - `special_ids`: ids that carry structure, not text; `decode` leaves them out.
    - `chat_template`: the compiled template, None without one (or `chat_template_error` says why it is unusable).
    """

    def __init__(self, backend: tokenizers.Tokenizer, source: TokenizerSource) -> None:
        # A tokenizer.json may ask for truncation to a training length; a prompt is never cut silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._source = source
        self._lock = threading.Lock()
        self._plain_backends: dict[bool, tokenizers.Tokenizer] = {}
        _add_published_tokens(backend, source.tokenizer_config)

        self.bos_token_id = self._bos_id()
        eos = self._role_id("eos")
        self.eos_token_ids = source.published_stop_ids | (frozenset() if eos is None else {eos})
        self.chat_template: ChatTemplate | None = None
        self.chat_template_error: str | None = None
        if source.chat_template is not None:
            try:
                self.chat_template = ChatTemplate(
                    source.chat_template, special_tokens=self._special_token_texts(), origin=source.origin
                )
            except ChatTemplateError as error:
                # Completion works without a template; chat says why it does not.
                self.chat_template_error = str(error)
        self.stop_token_ids = self.eos_token_ids | self._turn_end_ids()
        self._mark_special(self.stop_token_ids)
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        self._strips = {token.content: (token.lstrip, token.rstrip) for token in added.values() if token.special}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._prefix, self._suffix = self._affixes()

    # -- facts -------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a token, added ones included. The model's vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def adds_bos(self) -> bool:
        """Whether `encode` begins a sequence with BOS: only where the checkpoint says so."""
        return self.bos_token_id is not None and self._prefix[:1] == [self.bos_token_id]

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """What the checkpoint publishes about generation: `generation_config.json`, or such keys in `config.json`."""
        return self._source.generation_config

    @cached_property
    def decoder_spec(self) -> Mapping[str, Any] | None:
        """The decoder as `tokenizer.json` spells it, None without one."""
        decoder = self._backend.decoder
        return None if decoder is None else decoder_spec_of(decoder.__getstate__())

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of `token_id` as stored (not as text), None for an id without one."""
        if not 0 <= token_id < 2**32:
            return None
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, None where there is no such entry."""
        return self._backend.token_to_id(token)

    # -- text to ids and back ----------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written out in `text` become their ids.

        `add_special_tokens` adds what the checkpoint puts around a sequence; BOS is not added to a text that begins
        with it. Raises TokenizerError for what is not text (lone surrogates included).
        """
        ids = _encode(self._backend, text)
        if not add_special_tokens:
            return ids
        prefix = [] if self._prefix and ids[: len(self._prefix)] == self._prefix else self._prefix
        return prefix + ids + self._suffix

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Ids beyond the vocabulary decode to nothing; ill-formed bytes to U+FFFD."""
        skipped: frozenset[int] = self.special_ids if skip_special_tokens else frozenset()
        known = [int(i) for i in token_ids if 0 <= i < 2**32 and i not in skipped]
        try:
            return self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise_as_ours(error, "decode: this tokenizer cannot decode the ids", "use the token ids")

    def encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        """Ids of a conversation: the rendered chat template, with nothing added in front of it.

        Special tokens of the template become ids. A special token written out in a message stays text: nothing a user
        writes closes a turn. Before rendering, each such literal is replaced by one private-use character, which
        passes through whatever the template does with its messages (trimming, splitting, JSON), and is put back in the
        parts that are encoded without special tokens.

        Raises ChatTemplateError without a usable template, or when the template refuses the messages.
        """
        if self.chat_template is None:
            reason = self.chat_template_error or f"{self._source.origin}: no chat template found"
            raise ChatTemplateError(f"{reason}; use generate with a text, or a checkpoint that has one")
        check_messages(messages)
        guard = _ContentGuard(self._special, messages, template_kwargs)
        text = self.chat_template.render(guard.messages, add_generation_prompt, **guard.kwargs)
        if not guard.found:
            ids = _encode(self._backend, text)
            # A tokenizer that normalizes text first can find special tokens that were not written as such.
            if sum(i in self.special_ids for i in ids) == sum(1 for _ in guard.pattern.finditer(text)):
                return ids
        return self._encode_template(text, guard)

    def _encode_template(self, text: str, guard: _ContentGuard) -> list[int]:
        """Encode the template's own special tokens as ids, and everything between them as plain text."""
        ids: list[int] = []
        for gap, special in guard.split(text, self._strips):
            plain = guard.restore(gap)
            if plain:
                ids += self._encode_plain(plain, first=not ids)
            if special is not None:
                ids.append(self._special[special])
        return ids

    def _encode_plain(self, text: str, *, first: bool) -> list[int]:
        """Ids of `text` in which special tokens are ordinary text."""
        ids = _encode(self._plain_backend(first), text)
        if not self.special_ids.intersection(ids):
            return ids
        # The vocabulary itself holds the literal as an ordinary piece: only characters are left to encode.
        return [i for char in text for i in _encode(self._plain_backend(False), char) if i not in self.special_ids]

    def _plain_backend(self, first: bool) -> tokenizers.Tokenizer:
        """A copy that does not look for special tokens, made when a message first contains one.

        A copy rather than a switch thrown on the shared one, which other threads are encoding with.
        """
        with self._lock:
            if first not in self._plain_backends:
                spec = self._backend.to_str()
                if not first and '"prepend_scheme":"first"' in spec.replace(" ", ""):
                    tree = json.loads(spec)
                    tree["pre_tokenizer"] = _without_first_prefix(tree.get("pre_tokenizer"))
                    spec = json.dumps(tree)
                plain = tokenizers.Tokenizer.from_str(spec)
                plain.encode_special_tokens = True
                self._plain_backends[first] = plain
            return self._plain_backends[first]

    # -- what the checkpoint says ------------------------------------------------------------------

    def _role_id(self, role: str) -> int | None:
        """Id of a role's token: by its text where the tokenizer names one, else by a published number."""
        token = self._source.special_tokens.get(role)
        if token is not None:
            try:
                return self._backend.token_to_id(token)
            except UnicodeEncodeError:  # half a character, which JSON can write and no vocabulary holds
                return None
        # config.json repeats ids that its tokenizer does not use; only a tokenizer without a config is taught by it.
        if self._source.format == "gguf" or not self._source.tokenizer_config:
            token_id = self._source.special_ids.get(role)
            if token_id is not None and self.token(token_id) is not None:
                return token_id
        return None

    def _bos_id(self) -> int | None:
        return self._role_id("bos")

    def _special_token_texts(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, ... for the chat template."""
        texts = {f"{role}_token": text for role, text in self._source.special_tokens.items()}
        for role in ("bos", "eos", "pad", "unk"):
            token_id = self._role_id(role)
            if f"{role}_token" not in texts and token_id is not None:
                texts[f"{role}_token"] = self.token(token_id) or ""
        return texts

    def _turn_end_ids(self) -> frozenset[int]:
        """The token that follows the assistant's words when the template renders a finished turn.

        A GGUF file whose template does not show one (or that has none) may still hold a published turn end.
        """
        added = self._backend.get_added_tokens_decoder()
        ends = {
            token.content: token_id
            for token_id, token in added.items()
            # Some published tokenizers leave the turn end unmarked; its form gives it away. Words stay words.
            if token.special or re.fullmatch(r"[<\[].+[>\]]", token.content)
        }
        rest = self._after_reply()
        found = max((content for content in ends if content and rest.startswith(content)), key=len, default=None)
        if found is not None:
            return frozenset({ends[found]})
        if self._source.gguf is None:
            return frozenset()
        known = {token.content: token_id for token_id, token in added.items() if token.special}
        return frozenset(known[content] for content in turn_end_tokens() if content in known)

    def _after_reply(self) -> str:
        """What the template writes after the assistant's words, "" where it cannot be told."""
        words = "words of the assistant"
        if self.chat_template is None:
            return ""
        plain: list[Message] = [
            {"role": "user", "content": "words of the user"},
            {"role": "assistant", "content": words},
        ]
        in_parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in plain]
        for turn in (plain, in_parts):
            try:
                text = self.chat_template.render(turn, add_generation_prompt=False)
            except ChatTemplateError:
                continue
            _, found, rest = text.rpartition(words)
            # A template that takes parts writes a plain text out letter by letter, or a list as Python spells it.
            if found and not rest.startswith(("'", '"')):
                return rest.lstrip()
        return ""

    def _mark_special(self, token_ids: Iterable[int]) -> None:
        """Make added tokens that end a reply special, where the checkpoint forgot to."""
        added = self._backend.get_added_tokens_decoder()
        forgotten = [
            tokenizers.AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=True,
            )
            for token_id in sorted(token_ids)
            if (token := added.get(token_id)) is not None and not token.special
        ]
        if forgotten:
            self._backend.add_special_tokens(forgotten)

    def _affixes(self) -> tuple[list[int], list[int]]:
        """Ids that go in front of and behind a sequence."""
        config, gguf = self._source.tokenizer_config, self._source.gguf
        eos = self._role_id("eos")
        if gguf is not None and self._source.tokenizer_json is None:
            adds_bos, adds_eos = gguf.add_bos, gguf.add_eos
        elif self._backend.post_processor is None:
            # tokenizer.json is silent, so the flags decide; where it is not, it wins (as in the reference).
            adds_bos, adds_eos = bool(config.get("add_bos_token", False)), bool(config.get("add_eos_token", False))
        else:
            return self._probe_affixes()
        return (
            [self.bos_token_id] if adds_bos and self.bos_token_id is not None else [],
            [eos] if adds_eos and eos is not None else [],
        )

    def _probe_affixes(self) -> tuple[list[int], list[int]]:
        """What the post-processor of `tokenizer.json` puts around a text, found by asking it."""
        for probe in ("a", "0", "."):
            bare = self._backend.encode(probe, add_special_tokens=False).ids
            full = self._backend.encode(probe, add_special_tokens=True).ids
            if bare:
                for start in range(len(full) - len(bare) + 1):
                    if full[start : start + len(bare)] == bare:
                        return full[:start], full[start + len(bare) :]
        return self._backend.encode("", add_special_tokens=True).ids, []


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    if not isinstance(text, str):
        raise TokenizerError(f"encode: a text is expected, found {type(text).__name__}; pass token ids to generate")
    try:
        return list(backend.encode(text, add_special_tokens=False).ids)
    except TypeError as error:
        raise TokenizerError(
            "encode: valid Unicode text expected, found a lone surrogate; decode the input with errors='replace'"
        ) from error
    except BaseException as error:
        raise_as_ours(error, "encode: this tokenizer cannot encode the text", "pass token ids")


def _add_published_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add tokens that `tokenizer_config.json` lists and `tokenizer.json` lacks, where their ids come out as listed."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return
    entries = [(int(key), value) for key, value in listed.items() if str(key).isdigit() and isinstance(value, Mapping)]
    for token_id, value in sorted(entries, key=lambda entry: entry[0]):
        content = value.get("content")
        if not isinstance(content, str) or not content or backend.token_to_id(content) is not None:
            continue
        if token_id == backend.get_vocab_size(with_added_tokens=True):
            flags = {name: bool(value.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            backend.add_tokens([tokenizers.AddedToken(content, special=bool(value.get("special", False)), **flags)])


def _without_first_prefix(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            k: "never" if (k, v) == ("prepend_scheme", "first") else _without_first_prefix(v) for k, v in node.items()
        }
    if isinstance(node, list):
        return [_without_first_prefix(v) for v in node]
    return node


class _ContentGuard:
    """Messages in which literals of special tokens are replaced by private-use characters.

    A message that ends or begins with a part of a literal gets a character that stands for nothing at that end, so
    that two messages (or a message and the template) cannot be put together to a special token.
    """

    def __init__(self, literals: Iterable[str], messages: Sequence[Message], kwargs: Mapping[str, Any]) -> None:
        words = sorted((w for w in literals if w), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, words)) or r"(?!)")
        self._heads = {w[:n] for w in words for n in range(1, len(w))}
        self._tails = {w[n:] for w in words for n in range(1, len(w))}
        self._longest = max((len(w) for w in words), default=0)
        used = {char for text in _texts([list(messages), dict(kwargs)]) for char in text if char >= "\U000f0000"}
        self._free = (char for char in map(chr, range(0xF0000, 0xFFFFE)) if char not in used)
        self._literal_of: dict[str, str] = {}
        self._char_of: dict[str, str] = {}
        self.messages: list[Message] = [self._guarded(message) for message in messages]
        self.kwargs: dict[str, Any] = {name: self._guarded(value) for name, value in kwargs.items()}

    @property
    def found(self) -> bool:
        """Whether anything was replaced."""
        return bool(self._char_of)

    def _char(self, literal: str) -> str:
        if literal not in self._char_of:
            char = next(self._free)
            self._char_of[literal], self._literal_of[char] = char, literal
        return self._char_of[literal]

    def _guarded(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._guarded_text(value)
        if isinstance(value, Mapping):
            return {key: self._guarded(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(item) for item in value]
        return value

    def _guarded_text(self, text: str) -> str:
        text = self.pattern.sub(lambda match: self._char(match.group()), text)
        ends = range(1, min(self._longest, len(text) + 1))
        if any(text[-n:] in self._heads for n in ends):
            text += self._char("")
        if any(text[:n] in self._tails for n in ends):
            text = self._char("") + text
        return text

    def restore(self, text: str) -> str:
        """The text with the literals back in place."""
        return "".join(self._literal_of.get(char, char) for char in text) if self.found else text

    def split(self, text: str, strips: Mapping[str, tuple[bool, bool]]) -> Iterator[tuple[str, str | None]]:
        """(text before, special token) for every special token of the template; the rest comes with None.

        `strips`: whether a token swallows the whitespace to its left and to its right.
        """
        start, strip_left = 0, False
        for match in self.pattern.finditer(text):
            gap = text[start : match.start()]
            left, right = strips.get(match.group(), (False, False))
            gap = gap.lstrip() if strip_left else gap
            yield (gap.rstrip() if left else gap), match.group()
            start, strip_left = match.end(), right
        rest = text[start:]
        yield (rest.lstrip() if strip_left else rest), None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)

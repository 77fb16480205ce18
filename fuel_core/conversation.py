"""A conversation with a model: its turns, kept in one cache, and short enough for the model's context.

Puts nothing between a message and its reply but the chat template. How a reply is computed is the business of `llm`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, Unpack

from fuel_core.errors import ConversationError
from fuel_core.text import IncrementalDetokenizer

if TYPE_CHECKING:
    from fuel_core.llm import Completion, LanguageModel, RequestOptions, TextPiece, TextStream, Usage
    from fuel_core.text import Tokenizer

__all__ = ["Conversation", "Reply"]

_VERSION = 1


class Turn(NamedTuple):
    """A message and the reply to it."""

    user: str
    assistant: str


class Conversation:
    """Turns of a user and a model. Each reply computes the new tokens of its turn; the others are in the cache.

        talk = Conversation(llm, system="Answer in one sentence.")
        print(talk.send("What is a plan?").text)
        for piece in talk.stream("And a rebind?"):
            print(piece.text, end="")

    - The model's own ids stand in the prompts that follow, where their text stands there: encoding that text again can
      give others, and everything after them would have to be computed again. Where a template writes an earlier reply
      differently (trimmed, without its reasoning), the prompt is the template's, and is computed from there on.
    - Where prompt and reply would pass `llm.position_limit`, whole turns are dropped, oldest first; the system message
      stays. Kept free for a reply are `max_new_tokens` positions, but a quarter of the limit at most. When turns have
      to go, twice that is made free, so that the turns after this one need not go through it again.
    - A reply that is ended early (closed, interrupted) stays as far as it came. A turn that failed before its first
      token leaves the conversation as it was.

    Uses the calling thread's cache, as every request does: the cache follows what the thread does in between, at the
    cost of computing again. Not for two threads at once.

    Raises ChatTemplateError where the checkpoint has no usable chat template, or it refuses the system message.
    """

    def __init__(
        self, llm: LanguageModel, system: str | None = None, *, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._llm = llm
        self._template_kwargs = dict(template_kwargs or {})
        self._system: str | None = None
        self._turns: list[Turn] = []
        self._held: list[int] = []
        self._open: Reply | None = None
        self._encode_probe(system, [])
        self._system = system

    @property
    def llm(self) -> LanguageModel:
        """The model that replies."""
        return self._llm

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Finished turns, oldest first; those that were dropped are gone."""
        return tuple(self._turns)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system message, if there is one, and the turns, as a chat template takes them (a copy)."""
        return _messages(self._system, self._turns)

    @property
    def positions(self) -> int:
        """Tokens of the last prompt and its reply: how much of `llm.position_limit` the conversation takes."""
        return len(self._held)

    @property
    def system(self) -> str | None:
        """The system message; None leaves it to the template.

        Setting it keeps the turns. Raises ChatTemplateError when the template refuses it; nothing changes then.
        """
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._settle()
        self._encode_probe(text, self._turns)
        self._system = text

    def reset(self) -> None:
        """Forget every turn. The system message stays."""
        self._settle()
        self._turns, self._held = [], []

    # -- a turn ----------------------------------------------------------------------------------------------

    def send(self, text: str, max_new_tokens: int | None = 512, **options: Unpack[RequestOptions]) -> Completion:
        """The reply to `text`. Keywords and errors as in `LanguageModel.chat`."""
        with self.stream(text, max_new_tokens, **options) as reply:
            for _ in reply:
                pass
        assert reply.completion is not None, "a reply that was read to its end is complete"
        return reply.completion

    def stream(self, text: str, max_new_tokens: int | None = 512, **options: Unpack[RequestOptions]) -> Reply:
        """As `send`, piece by piece. The turn is part of the conversation as soon as the reply ends, however it ends.

        A reply that is still open is closed first. Raises CapacityError when the message does not fit even alone.
        """
        self._settle()
        dropped, ids = self._fit(text, max_new_tokens)
        ids = _keep_generated(self._llm.tokenizer, self._held, ids)
        stream = self._llm.stream_reply(ids, max_new_tokens, **options)
        self._open = Reply(self, stream, text, ids, dropped)
        return self._open

    def _fit(self, text: str, max_new_tokens: int | None) -> tuple[int, list[int]]:
        """How many of the oldest turns have to go for this message, and the prompt without them."""
        ids = self._encode(self._system, self._turns, text)
        limit = self._llm.position_limit
        if limit is None:
            return 0, ids
        free = max(1, limit // 4 if max_new_tokens is None else min(max_new_tokens, limit // 4))
        if len(ids) + free <= limit:
            return 0, ids
        shorter = [ids, *(self._encode(self._system, self._turns[n:], text) for n in range(1, len(self._turns) + 1))]
        for wanted in (2 * free, free, 1):
            for dropped, candidate in enumerate(shorter):
                if len(candidate) + wanted <= limit:
                    return dropped, candidate
        return len(self._turns), shorter[-1]

    def _encode(self, system: str | None, turns: Sequence[Turn], text: str) -> list[int]:
        messages = [*_messages(system, turns), {"role": "user", "content": text}]
        return self._llm.tokenizer.encode_chat(messages, **self._template_kwargs)

    def _encode_probe(self, system: str | None, turns: Sequence[Turn]) -> None:
        """Raise ChatTemplateError unless a next turn could be rendered."""
        self._encode(system, turns, "a message")

    def _settle(self) -> None:
        """End the reply that is still open, so that the turns are what they will stay."""
        if self._open is not None:
            self._open.close()

    def _add(self, reply: Reply) -> None:
        """Take a reply that ended into the conversation. One without a token is a turn that never was."""
        if self._open is reply:
            self._open = None
        if reply.token_ids:
            self._turns = [*self._turns[reply.dropped :], Turn(reply.message, reply.text)]
            self._held = reply.prompt_ids + reply.token_ids

    # -- files -----------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the messages as JSON. The file is written aside and renamed: there is no half of one.

        Raises ConversationError when it cannot be written.
        """
        self._settle()
        text = json.dumps({"fuel_conversation": _VERSION, "messages": self.messages}, ensure_ascii=False, indent=1)
        try:
            # A link stays a link: the file it names is the one that is replaced.
            target = Path(path).expanduser().resolve()
            aside = target.with_name(f".{target.name}.{os.getpid()}.part")
            if target.is_dir():
                raise IsADirectoryError(None, "a folder", str(target))
            try:
                with aside.open("w", encoding="utf-8") as file:
                    file.write(text + "\n")
                    file.flush()
                    # A name must not lead to a file whose content never reached the disk.
                    os.fsync(file.fileno())
                with suppress(FileNotFoundError):
                    aside.chmod(stat.S_IMODE(target.stat().st_mode))
                os.replace(aside, target)
            finally:
                with suppress(OSError):
                    aside.unlink(missing_ok=True)
        except (OSError, ValueError, RuntimeError) as error:
            found = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConversationError(
                f"{path}: expected a place for a conversation, found {found[:1].lower() + found[1:]}; name another file"
            ) from error

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace system message and turns by those of a file that `save` wrote.

        Raises ConversationError for a file that is none, and ChatTemplateError when the template refuses what it holds;
        the conversation is unchanged then.
        """
        system, turns = _read(Path(path))
        self._settle()
        self._encode_probe(system, turns)
        # What is held stays: it is compared with every prompt, and a file of this session shares its beginning.
        self._system, self._turns = system, turns


class Reply(Iterator["TextPiece"]):
    """A reply as it is generated, and the turn it becomes: iterate for pieces.

    - `message`: what it replies to; `prompt_ids` the whole prompt.
    - `text`, `token_ids`: the reply so far.
    - `dropped`: how many of the oldest turns had to go to make room.
    - `finish_reason`: None while it goes on, then "stop", "length" or "interrupted" (closed early, or an exception).
    - `completion`: set once the last piece is out.
    """

    def __init__(
        self, conversation: Conversation, stream: TextStream, message: str, prompt_ids: list[int], dropped: int
    ) -> None:
        self.message, self.prompt_ids, self.dropped = message, prompt_ids, dropped
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: Literal["stop", "length", "interrupted"] | None = None
        self._conversation, self._stream = conversation, stream

    @property
    def completion(self) -> Completion | None:
        return self._stream.completion

    @property
    def usage(self) -> Usage:
        """Token counts so far; `cached_tokens` is known once the first piece is out."""
        return self._stream.usage

    def __next__(self) -> TextPiece:
        if self.finish_reason is not None:
            raise StopIteration
        try:
            piece = next(self._stream)
            self.token_ids.append(piece.token_id)
            self.text += piece.text
        except BaseException:
            self.close()
            raise
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason
            self._conversation._add(self)
        return piece

    def close(self) -> None:
        """End the reply here; what came so far stays in the conversation. Idempotent."""
        if self.finish_reason is None:
            self.finish_reason = "interrupted"
            self._stream.close()
            self._conversation._add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _messages(system: str | None, turns: Sequence[Turn]) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
    return messages


def _keep_generated(tokenizer: Tokenizer, held: Sequence[int], fresh: list[int]) -> list[int]:
    """`fresh` beginning with `held`, where what it begins with spells the same; `fresh` as it is, where not.

    `held` are the ids of the last prompt and its reply, `fresh` those of the prompt that follows.
    """
    shared = 0
    while shared < min(len(held), len(fresh)) and held[shared] == fresh[shared]:
        shared += 1
    if shared == len(held):
        return fresh
    wanted = _Spelling(tokenizer, held[:shared])
    for token_id in held[shared:]:
        wanted.push(token_id)
    wanted.flush()
    so_far = _Spelling(tokenizer, held[:shared])
    for end in range(shared + 1, len(fresh) + 1):
        so_far.push(fresh[end - 1])
        if not wanted.text.startswith(so_far.text):
            break
        if so_far.text == wanted.text:
            whole = _Spelling(tokenizer, held[:shared])
            for token_id in fresh[shared:end]:
                whole.push(token_id)
            whole.flush()
            if whole.text == wanted.text:
                return [*held, *fresh[end:]]
    return fresh


class _Spelling:
    """What ids spell, special ones as themselves: a message that spells out a special token is not one."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self.text = ""
        self._special = tokenizer.special_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer, context=context)

    def push(self, token_id: int) -> None:
        # A special token ends a text: a character left unfinished before it stays unfinished.
        self.text += (
            f"{self._detokenizer.flush()}\0{token_id}\0"
            if token_id in self._special
            else self._detokenizer.push(token_id)
        )

    def flush(self) -> None:
        self.text += self._detokenizer.flush()


def _read(path: Path) -> tuple[str | None, list[Turn]]:
    """System message and turns of a saved conversation."""
    try:
        path = path.expanduser()
        if not path.exists():
            raise ConversationError(f"{path}: expected a saved conversation, found no such file; check the name")
        if not path.is_file():
            raise ConversationError(f"{path}: expected a saved conversation, found no regular file; name the file")
        found: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConversationError(
            f"{path}: expected a readable file, found {(error.strerror or str(error)).lower()}; check its mode"
        ) from error
    except (ValueError, RuntimeError) as error:  # RecursionError is one
        raise ConversationError(
            f"{path}: expected a saved conversation in JSON, found {' '.join(str(error).split())}; "
            "only files that /save (or Conversation.save) wrote can be loaded"
        ) from error
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list):
        raise _unlike(path, f"an object with a list of 'messages' expected, found {_kind(found)}")
    if found.get("fuel_conversation", _VERSION) != _VERSION:
        raise _unlike(path, f"version {_VERSION} expected, found {found['fuel_conversation']!r:.40}")
    has_system = bool(messages) and isinstance(messages[0], dict) and messages[0].get("role") == "system"
    texts: list[str] = []
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, dict) else None
        expected = "system" if has_system and number == 1 else ("user", "assistant")[(number - 1 - has_system) % 2]
        if role != expected:
            raise _unlike(path, f"message {number}: role {expected!r} expected, found {role!r:.40}")
        content = message.get("content")
        if not isinstance(content, str):
            raise _unlike(path, f"message {number}: a text as 'content' expected, found {_kind(content)}")
        texts.append(content)
    system = texts.pop(0) if has_system else None
    if len(texts) % 2:
        raise _unlike(path, "a reply to the last message expected, found none")
    return system, [Turn(*texts[i : i + 2]) for i in range(0, len(texts), 2)]


def _unlike(path: Path, what: str) -> ConversationError:
    return ConversationError(f"{path}: {what}; only files that /save (or Conversation.save) wrote can be loaded")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number")

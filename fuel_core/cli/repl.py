"""`fuel chat` without a message: a conversation, at a terminal or through a pipe.

Replies go to stdout and everything else to stderr, so that what a pipe delivers is replies. Prompts, history and Ctrl-C
that ends a reply are for terminals only.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from fuel_core.cli.output import note, print_json
from fuel_core.cli.reply import as_json, explain, per_second, plan_text, show_progress
from fuel_core.conversation import Conversation, Reply
from fuel_core.errors import FuelError, GenerationError

if TYPE_CHECKING:
    from fuel_core.llm import LanguageModel, RequestOptions

__all__ = ["COMMANDS", "converse"]

COMMANDS = {
    "/reset": "/reset         forget the turns; the system message stays",
    "/system": '/system TEXT   set the system message; without TEXT show it, with "" remove it',
    "/save": "/save FILE     write the conversation to FILE",
    "/load": "/load FILE     go on with the conversation in FILE",
    "/stats": "/stats         tokens, context and plan so far",
    "/help": "/help          this list",
    "/exit": "/exit          leave, as Ctrl-D does",
}
_INPUT_HELP = (
    'A line that ends in \\ goes on in the next one; """ begins and ends a message of several lines.',
    "Ctrl-C ends a reply. A message that begins with a slash is written with two.",
)
_QUOTES = '"""'


def converse(
    llm: LanguageModel,
    *,
    system: str | None,
    max_new_tokens: int,
    options: RequestOptions,
    json: bool,
    explain_plan: bool,
) -> None:
    """Hold a conversation until the input ends: one message a line, or more lines where they say so.

    With `json`, one object is printed when it ends, and no reply before it. What is refused (a command, a message that
    does not fit) costs one line on stderr and changes nothing; through a pipe it also makes the exit code 2.

    Raises ChatTemplateError before the first message where the checkpoint cannot chat.
    """
    session = _Session(llm, Conversation(llm, system), max_new_tokens, options, json)
    if options.get("logprobs") is not None:
        note("--logprobs: not reported in a conversation; give a PROMPT and --json")
    session.run()
    if json:
        print_json(session.report(explain_plan))
    if explain_plan:
        explain(llm.context)
    if session.refused and not session.terminal:
        raise typer.Exit(2)


class _Session:
    def __init__(
        self, llm: LanguageModel, talk: Conversation, max_new_tokens: int, options: RequestOptions, json: bool
    ) -> None:
        self.llm, self.talk = llm, talk
        self.max_new_tokens, self.options, self.json = max_new_tokens, options, json
        self.terminal = sys.stdin.isatty()
        self.refused = 0
        self.replies: list[dict[str, Any]] = []
        self.tokens: Counter[str] = Counter()

    def run(self) -> None:
        """Read and answer until the input ends."""
        read = _Reader(terminal=self.terminal, stdout=not self.json)
        if self.terminal:
            note("/help lists the commands, Ctrl-D leaves.")
        while True:
            try:
                message = read.message()
                if message is None:
                    break
                command = message.startswith("/") and not message.startswith("//") and not read.quoted
                if command:
                    if not self.command(message):
                        break
                elif message.strip():
                    self.turn(message if read.quoted or not message.startswith("//") else message[1:])
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                note("\n(Ctrl-D leaves)")
            except FuelError as error:
                self.refuse(str(error))

    def refuse(self, line: str) -> None:
        self.refused += 1
        note(f"fuel: {' '.join(line.split())}")

    # -- a turn ----------------------------------------------------------------------------------------------

    def turn(self, message: str) -> None:
        """Ask, and print the reply as it comes."""
        options: RequestOptions = {**self.options, "on_progress": show_progress()}
        # At a terminal somebody reads along; with --json stdout is the report's.
        out = sys.stdout if not self.json else sys.stderr if self.terminal else None
        arrivals: list[float] = []
        with self.talk.stream(message, self.max_new_tokens, **options) as reply:
            if reply.dropped:
                turns = "turn was" if reply.dropped == 1 else f"{reply.dropped} turns were"
                note(f"fuel: the context of {self.llm.position_limit} tokens is full: the oldest {turns} dropped")
            try:
                with _ctrl_c() if self.terminal else nullcontext(_Wish()) as wish:
                    for piece in reply:
                        arrivals.append(time.perf_counter())
                        if out is not None:
                            out.write(piece.text)
                            out.flush()
                        if wish.to_stop:
                            break
                        wish.can_wait = True
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
            finally:
                reply.close()
                if reply.token_ids:
                    self.count(reply, arrivals)
                    if out is not None:
                        out.write("\n")
                        out.flush()
        if self.terminal and reply.finish_reason == "interrupted":
            note("(interrupted; the reply stays as far as it came)" if reply.token_ids else "(taken back)")
        elif self.terminal and reply.finish_reason == "length":
            short = len(reply.token_ids) < self.max_new_tokens
            note("(the context is full)" if short else f"(--max-new-tokens {self.max_new_tokens} reached)")

    def count(self, reply: Reply, arrivals: list[float]) -> None:
        usage = {**asdict(reply.usage), "total_tokens": reply.usage.total_tokens}
        self.tokens.update(usage)
        done = reply.completion
        if done is not None:
            told = as_json(self.llm, done, per_second(arrivals), explain_plan=False)
        else:
            told = {"text": reply.text, "token_ids": reply.token_ids, "finish_reason": reply.finish_reason}
            told |= {"usage": usage, "tokens_per_second": per_second(arrivals)}
        self.replies.append({"message": reply.message, "dropped_turns": reply.dropped, **told})

    def report(self, explain_plan: bool) -> dict[str, Any]:
        """What `--json` prints: every turn that was asked, the conversation at the end, and sums."""
        told: dict[str, Any] = {
            "turns": self.replies,
            "messages": self.talk.messages,
            "refused": self.refused,
            "usage": {name: self.tokens[name] for name in _USAGE},
            "stats": self.llm.stats.as_dict(),
        }
        if explain_plan:
            told["plan_events"] = [str(event) for event in self.llm.context.plan_events]
        return told

    # -- commands --------------------------------------------------------------------------------------------

    def command(self, line: str) -> bool:
        """Obey a command; False when it ends the session."""
        name, _, argument = line.partition(" ")
        name, argument = name.strip(), argument.strip()
        if name not in COMMANDS:
            self.refuse(f"{name}: one of {', '.join(COMMANDS)} expected, found another command; /help explains them")
        elif name in ("/save", "/load") and not argument:
            self.refuse(f"{name}: a file expected, found none; write {name} FILE")
        elif name not in ("/save", "/load", "/system") and argument:
            self.refuse(f"{name}: nothing expected after it, found {argument!r}; write {name} alone")
        elif name == "/exit":
            return False
        else:
            obey: dict[str, Callable[[str], None]] = {
                "/reset": self.reset,
                "/system": self.system,
                "/save": self.save,
                "/load": self.load,
                "/stats": self.stats,
                "/help": self.help,
            }
            obey[name](argument)
        return True

    def reset(self, _: str) -> None:
        self.talk.reset()
        note("The conversation is empty.")

    def system(self, text: str) -> None:
        if text:
            self.talk.system = None if text == '""' else text
        note("No system message." if self.talk.system is None else f"System message: {self.talk.system}")

    def save(self, file: str) -> None:
        self.talk.save(file)
        note(f"Saved {_turns(self.talk)} to {file}.")

    def load(self, file: str) -> None:
        self.talk.load(file)
        note(f"Loaded {_turns(self.talk)} from {file}.")

    def stats(self, _: str) -> None:
        asked, limit = self.tokens["prompt_tokens"], self.llm.position_limit
        note(
            f"{_turns(self.talk)}, {self.talk.positions} of {'any number of' if limit is None else limit} positions; "
            f"prompts of {asked} tokens, {self.tokens['cached_tokens']} of them from the cache; "
            f"{self.tokens['completion_tokens']} tokens generated"
        )
        if self.replies and self.replies[-1]["tokens_per_second"] is not None:
            note(f"last reply: {self.replies[-1]['tokens_per_second']:.1f} tokens/s")
        note(plan_text(self.llm.stats))

    def help(self, _: str) -> None:
        for line in (*COMMANDS.values(), *_INPUT_HELP):
            note(line)


_USAGE = ("prompt_tokens", "completion_tokens", "cached_tokens", "total_tokens")


def _turns(talk: Conversation) -> str:
    count = len(talk.turns)
    return "1 turn" if count == 1 else f"{count} turns"


class _Reader:
    """Messages out of lines. `quoted` says whether the last one stood in triple quotes, so that it is no command."""

    def __init__(self, *, terminal: bool, stdout: bool) -> None:
        self.quoted = False
        self._terminal = terminal
        # input() writes its prompt to stdout.
        self._editing = terminal and stdout and sys.stdout.isatty()
        if self._editing:
            with suppress(ImportError):
                import readline  # noqa: F401  (its import gives input() editing and the session's history)

    def message(self) -> str | None:
        """The next message, None at the end of the input. Raises GenerationError where it ends inside quotes."""
        line = self._line("> ")
        self.quoted = line is not None and line.lstrip().startswith(_QUOTES)
        if line is None:
            return None
        if self.quoted:
            return self._until_quotes(line.lstrip()[len(_QUOTES) :])
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            more = self._line(". ")
            if more is None:
                break
            lines.append(more)
        return "\n".join(lines)

    def _until_quotes(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(_QUOTES):
            more = self._line(". ")
            if more is None:
                raise GenerationError(
                    f"input: {_QUOTES} expected at the end of the message, found the end of the input; nothing was sent"
                )
            lines.append(more)
        lines[-1] = lines[-1].rstrip()[: -len(_QUOTES)]
        # Quotes on lines of their own are no part of the text.
        if len(lines) > 1 and not lines[0].strip():
            del lines[0]
        if len(lines) > 1 and not lines[-1].strip():
            del lines[-1]
        return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        """The next line without its end, None at the end of the input."""
        if self._editing:
            try:
                return input(prompt)
            except EOFError:
                print(file=sys.stderr)
                return None
        if self._terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        # Bytes, where there are any: one line that is no text must not cost the others.
        raw = getattr(sys.stdin, "buffer", None)
        line = sys.stdin.readline() if raw is None else _utf8(raw.readline())
        return line.removesuffix("\n").removesuffix("\r") if line else None


def _utf8(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise GenerationError(
            f"stdin: UTF-8 text expected, found byte 0x{line[error.start]:02x}; convert the line"
        ) from None


class _Wish:
    """What Ctrl-C asks of the reply that is running."""

    to_stop = False
    can_wait = False
    """Whether a token has come: before that, there is nothing between two tokens to wait for."""


@contextmanager
def _ctrl_c() -> Iterator[_Wish]:
    """Within, Ctrl-C asks for an end between two tokens. Before the first token, and a second time, it interrupts."""
    wish = _Wish()

    def handle(number: int, frame: FrameType | None) -> None:
        if wish.to_stop or not wish.can_wait:
            raise KeyboardInterrupt
        wish.to_stop = True

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread, which is the only one that Ctrl-C reaches
        yield wish
        return
    try:
        yield wish
    finally:
        signal.signal(signal.SIGINT, before)

"""Renders the chat template of a checkpoint. The template is untrusted text: it runs in a sandbox, for so many steps.

Knows strings only; which of the tokens in a rendered text are special is the tokenizer's business.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fuel_core.errors import ChatTemplateError

__all__ = ["ChatTemplate", "Message"]

Message = Mapping[str, Any]

_MOST_STEPS: Final = 500_000
"""Turns of loops and calls of one rendering: ten thousand messages are no tenth of it."""
_MOST_ITEMS: Final = 16 << 20
"""Characters or items of one value that an operator makes."""
_MOST_BITS: Final = 4096


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; rendering passes its body through."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads a class attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML and sorts keys; templates were written for plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_steps: ContextVar[list[int]] = ContextVar("steps of the rendering that is going on")


def _step() -> None:
    taken = _steps.get(None)
    if taken is not None:
        taken[0] += 1
        if taken[0] > _MOST_STEPS:
            raise jinja2.exceptions.SecurityError(f"more than {_MOST_STEPS} steps")


@jinja2.pass_context  # which also keeps it from being worked out when the template is compiled
def _counted(context: object, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _step()
        yield item


@jinja2.pass_context
def _joined(context: object, parts: Sequence[Any]) -> str:
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > _MOST_ITEMS:
        raise jinja2.exceptions.SecurityError("a value too large, made with ~")
    return "".join(texts)


def _filtered(node: Any, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Bounds(jinja2.visitor.NodeTransformer):
    """Puts what counts and what measures into a template's tree."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "counted")
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(jinja2.nodes.List(node.nodes, lineno=node.lineno), "joined")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on what a template may compute: a file's text must not hold up who loads it.

    Loops, calls and operators are bounded. What single filters make of large numbers is not.
    """

    # Those that make much of little; none of them is worked out when the template is compiled.
    intercepted_binops = frozenset({"**", "*", "+", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree: jinja2.nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        return tree

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _step()
        # Widths and counts, of str.center for one.
        if any(isinstance(value, int) and abs(value) > _MOST_ITEMS for value in (*args, *kwargs.values())):
            raise jinja2.exceptions.SecurityError("a number too large, given to a function")
        return super().call(*args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if _too_large(operator, left, right):
            raise jinja2.exceptions.SecurityError(f"a value too large, made with {operator}")
        return super().call_binop(context, operator, left, right)


def _too_large(operator: str, left: Any, right: Any) -> bool:
    """Whether the result would be larger than any conversation needs."""
    if operator == "%":
        return isinstance(left, str) and re.search(r"\d{5}|\*", left) is not None
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            return left.bit_length() * abs(right) > _MOST_BITS
        return left.bit_length() + right.bit_length() > _MOST_BITS
    lengths = [len(value) for value in (left, right) if isinstance(value, str | bytes | list | tuple)]
    if operator == "+":
        return sum(lengths) > _MOST_ITEMS
    times = [value for value in (left, right) if isinstance(value, int)]
    return operator == "*" and bool(lengths) and bool(times) and lengths[0] * times[0] > _MOST_ITEMS


def _environment() -> ImmutableSandboxedEnvironment:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    env.filters["counted"] = _counted
    env.filters["joined"] = _joined
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate:
    """A compiled chat template (Jinja, in `ImmutableSandboxedEnvironment`).

    `special_tokens` (for example `{"bos_token": "<s>"}`) are available to the template by these names.

    Raises ChatTemplateError when `source` is not a valid template.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None, origin: str = "") -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._where = f"{origin}: " if origin else ""
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise ChatTemplateError(
                f"{self._where}chat template does not parse: {_one_line(error)}; use generate instead of chat"
            ) from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The conversation as the text the model was trained on.

        `messages` are mappings with `role` and `content`. `add_generation_prompt` appends the start of the assistant's
        turn. `kwargs` (`tools=`, `enable_thinking=`, ...) are passed to the template.

        Raises ChatTemplateError when messages are malformed, when the template refuses them, or when it does anything
        that the sandbox forbids.
        """
        check_messages(messages)
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        before = _steps.set([0])
        try:
            return self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt, **variables
            )
        except jinja2.exceptions.SecurityError as error:
            raise ChatTemplateError(
                f"{self._where}chat template refused: it uses what the sandbox forbids ({_one_line(error)}); "
                "do not use this checkpoint's template"
            ) from error
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"{self._where}chat template refused the messages: {_one_line(error)}; "
                f"found roles {[str(m.get('role')) for m in messages]}; send others, or use generate"
            ) from error
        except Exception as error:
            # A template can raise anything its expressions can: TypeError, ZeroDivisionError, RecursionError ...
            raise ChatTemplateError(
                f"{self._where}chat template failed: {type(error).__name__}: {_one_line(error)}; "
                f"found roles {[str(m.get('role')) for m in messages]}; send others, or use generate"
            ) from error
        finally:
            _steps.reset(before)


def check_messages(messages: Sequence[Message]) -> None:
    """Raise ChatTemplateError unless `messages` is a non-empty sequence of mappings that each name a role."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        found = "an empty list" if isinstance(messages, Sequence) and not messages else type(messages).__name__
        raise ChatTemplateError(
            f"chat messages must be a list of at least one {{'role': ..., 'content': ...}}, found {found}; pass one"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatTemplateError(
                f"chat message {index} must be a mapping with a 'role' text and a 'content', found {message!r:.80}; "
                "correct it"
            )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:200] or type(error).__name__

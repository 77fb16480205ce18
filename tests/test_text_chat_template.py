"""Templates are untrusted text in a sandbox; what they may do, what they may not, and how they refuse."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest

from fuel_core.errors import ChatTemplateError
from fuel_core.text import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = USER, **kwargs: Any) -> str:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>"}, origin="folder").render(messages, **kwargs)


def test_template_blocks_are_trimmed_as_templates_expect() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert render(source) == "hi\n"


def test_template_sees_special_tokens_and_keywords() -> None:
    assert render("{{ bos_token }}{{ enable_thinking }}{{ tools is none }}", enable_thinking=False) == "<s>FalseTrue"


def test_template_knows_whether_to_open_the_assistant_s_turn() -> None:
    source = "{% if add_generation_prompt %}A{% endif %}"
    assert render(source) == "A"
    assert render(source, add_generation_prompt=False) == ""


def test_template_tojson_is_plain_json() -> None:
    message = [{"role": "user", "content": "<é & 'b'>", "a": 1}]
    assert render("{{ messages[0] | tojson }}", message) == '{"role": "user", "content": "<é & \'b\'>", "a": 1}'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": [\n  2\n ]\n}'


def test_template_can_ask_the_date_and_leave_loops() -> None:
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


def test_template_generation_tag_passes_its_body_through() -> None:
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"


def test_template_refusal_carries_its_own_words() -> None:
    with pytest.raises(ChatTemplateError, match=r"folder: chat template refused the messages: Only user roles!; found"):
        render("{{ raise_exception('Only user\\n roles!') }}")


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{{ messages[7].content.x.y }}"])
def test_template_that_fails_is_one_line(source: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        render(source)
    assert "\n" not in str(caught.value)


def test_template_that_does_not_parse_is_one_line() -> None:
    with pytest.raises(ChatTemplateError, match="folder: chat template does not parse") as caught:
        ChatTemplate("{% if %}\n{{", origin="folder")
    assert "\n" not in str(caught.value)


# What a template could reach the interpreter through, if it ran outside a sandbox. Each renders something without one.
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') | attr('__mro__') }}",
    "{{ messages.__class__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ namespace.__init__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
    "{% set x = messages.append(1) %}{{ messages | length }}",
    "{% set x = messages[0].update(role='x') %}{{ messages[0].role }}",
    "{{ range(10000000) | list | length }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_template_cannot_leave_the_sandbox(source: str) -> None:
    with contextlib.suppress(ChatTemplateError):
        text = render(source)
        # jinja2 renders some forbidden attributes as nothing instead of raising; nothing may have been reached.
        assert not re.search(r"class|function|module|object|uid=|[1-9]", text), text


def test_template_escapes_in_the_list_work_outside_a_sandbox() -> None:
    """The list above would prove nothing if the templates were harmless in themselves."""
    import jinja2

    reached = 0
    for source in ESCAPES[:4]:
        reached += bool(re.search("class", jinja2.Environment().from_string(source).render(messages=USER)))
    assert reached == 4


def test_template_does_not_change_the_messages_it_is_given() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ChatTemplateError):
        render("{% set x = messages.append(1) %}", messages)
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("messages", ["hi", [], {"role": "user"}, [5], [{"content": "x"}], [{"role": 3}], None])
def test_template_refuses_what_are_no_messages(messages: Any) -> None:
    with pytest.raises(ChatTemplateError, match="chat message"):
        render("x", messages)


# Each would take minutes, or more memory than there is; some of it while the template is compiled.
ENDLESS = [
    "{{ 10 ** (10 ** 10) }}",
    "{{ 2 ** -10000000000 }}",
    "{{ 'x' * 10000000000 }}",
    "{{ 10000000000 * [1] }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10000000000, 1) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) if i < 0 %}{% endfor %}" * 10,
    "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{{ 'x'.center(10000000000) }}{{ 'x'.zfill(width=10000000000) }}",
    "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% for i in [[1]] recursive %}{{ loop(i) }}{% endfor %}{% for a in 'ab' recursive %}{{ loop('ab') }}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_template_that_would_not_end_is_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError) as error:
        render(source)
    assert "\n" not in str(error.value)


def test_template_of_a_long_conversation_is_within_its_steps() -> None:
    messages = [{"role": "user", "content": "word " * 50}] * 10_000
    source = "{% for m in messages %}{{ m.role + ': ' + m['content'] | trim }}{{ loop.index0 % 2 }}{% endfor %}"
    assert len(render(source, messages)) > 2_500_000


def test_texts_are_joined_as_they_are() -> None:
    assert render("{{ 'a' ~ 1 ~ none ~ nowhere ~ [1] ~ messages[0].role ~ ('b' ~ 2.5) }}") == "a1None[1]userb2.5"


def test_loops_know_their_length_and_their_neighbours() -> None:
    """As they do without a count: `loop` looks ahead, and at the whole."""
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}"
        "{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{% else %}none{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for x in [] %}{% else %}none{% endfor %}"
        "{% for x in nowhere %}{% else %}none{% endfor %}"
    )
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert render(source, messages) == "1/2TrueFalse2FalseTrue2/2FalseTrue1TrueFalsea1nonenone"

"""A chat template that somebody else wrote: bounded in time, in memory and in what it can reach."""

import time

import pytest

from lm.common.errors import UserError
from lm.data.chat_template import encode_chat_prompt
from lm.data.dialogs import Message
from lm.data.jinja_template import GENERATION_MARKS, render, render_foreign
from lm.tokenizer.chat_settings import ChatSettings
from tests.helpers.tokenizers import bytes_tokenizer

_MAX_CPU_SECONDS = 2  # of the templates' process: a multiple of its own limit

ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "{{ 'x' * 1000000000 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'x'.center(1000000000) }}",
    "{% set t = namespace(x='xx') %}{% for a in range(60) %}{% set t.x = t.x ~ t.x %}{% endfor %}{{ t.x }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'ab' | replace('a', 'a' * 9000000) | replace('a', 'b' * 9000000) }}",
]
REACHING = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ messages.append({}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ open('/etc/passwd') }}",
]


@pytest.mark.slow
@pytest.mark.parametrize("source", ENDLESS, ids=range(len(ENDLESS)))
def test_an_endless_template_ends(source: str) -> None:
    """By its process's limit of CPU time, not by a clock: the machine may be busy."""
    started = time.process_time()
    with pytest.raises(UserError, match="The chat template"):
        render_foreign(source, {"messages": []})
    assert time.process_time() - started < _MAX_CPU_SECONDS
    assert render_foreign("{{ 1 + 1 }}", {}) == "2", "the next one is rendered"


@pytest.mark.parametrize("source", REACHING, ids=range(len(REACHING)))
def test_a_template_reaches_nothing_outside(source: str) -> None:
    """It is refused, or what it asks for is not there."""
    try:
        text = render_foreign(source, {"messages": []})
    except UserError as error:
        assert "The chat template" in str(error)
    else:
        assert text == ""


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ ", "{% for m in messages %}", "{{ messages | nofilter }}", "{{ 1 / 0 }}"]
)
def test_a_damaged_template_is_a_user_error(source: str) -> None:
    for function in (render, render_foreign):
        with pytest.raises(UserError, match="The chat template"):
            function(source, {"messages": []})


def test_messages_cannot_mark_answers() -> None:
    tokenizer = bytes_tokenizer(["<|end|>"])
    tokenizer.chat = ChatSettings({"default": "{{ messages[0].content }}<|end|>"}, {}, (256,))
    for mark in GENERATION_MARKS:
        with pytest.raises(UserError, match="are no characters; remove them"):
            encode_chat_prompt(tokenizer, [Message(role="user", content=f"a{mark}b")])


def test_a_message_with_all_marks_is_refused() -> None:
    tokenizer = bytes_tokenizer(["<|end|>"])
    tokenizer.chat = ChatSettings({"default": "{{ messages[0].content }}<|end|>"}, {}, (256,))
    text = "".join(map(chr, range(0xFDD0, 0xFDDE)))
    with pytest.raises(UserError, match="are no characters; remove them"):
        encode_chat_prompt(tokenizer, [Message(role="user", content=text)])
    ids = encode_chat_prompt(tokenizer, [Message(role="user", content=text[1:] + "<|end|>")])
    assert ids.count(256) == 1 and tokenizer.decode(ids) == text[1:] + "<|end|><|end|>"

"""The parser of answers against one that reads the whole text in the plainest way, wherever the text is cut."""

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.inference.answer_parser import AnswerMarks, AnswerParser, AnswerPart
from tests.helpers.examples import examples

TOOLS = frozenset({"f", "gé"})
HERMES = AnswerMarks(True, TOOLS, ("<tool_call>",), "</tool_call>")
MISTRAL = AnswerMarks(False, TOOLS, ("[TOOL_CALLS]",))
LLAMA = AnswerMarks(False, TOOLS, ("<|python_tag|>",), has_bare_calls=True)
GENERIC = AnswerMarks(True, TOOLS, has_bare_calls=True)
PLAIN, THINKING = AnswerMarks(), AnswerMarks(True)
ALL_MARKS = {
    "hermes": HERMES,
    "mistral": MISTRAL,
    "llama": LLAMA,
    "generic": GENERIC,
    "plain": PLAIN,
    "think": THINKING,
}

FRAGMENTS = [
    *(
        "<think>",
        "</think>",
        "<think",
        "</th",
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "</tool",
        "[TOOL_CALLS]",
        "[TOOL",
    ),
    *("<|python_tag|>", " ", "\n", " \n\n", ";", "; ", "a", "Hi é", "[", "]", ", ", "{", "}", '"', "{}", "[]", "\\"),
    *('{"name": "f", "arguments": {}}', '{"name":"f","parameters":{"a":[1,{"b":"}</tool_call>"}],"c":"\\"{"}}'),
    *('{"arguments": {"x": -1.5e3}, "id": 3, "name": "g\\u00e9"}', '{"name": "other", "arguments": {}}'),
    *('{"name": "f", "arguments": "{}"}', '{"name": "f"}', '{"name": "f", "arguments": {"a": ', '{"name": "f", "name"'),
    *('[{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}, "parameters": {}}', '{"name": "f", "argum'),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=9).map("".join)


def read_calls(text: str, tools: frozenset[str]) -> tuple[list[tuple[str, Any]], int] | None:
    """Return the calls of the JSON value at the start of a text, and where it ends; None if it has none."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    def read_object(pairs: list[tuple[str, Any]]) -> Any:
        keys = [key for key, _ in pairs if key in ("name", "arguments", "parameters")]
        if "name" in keys and len(keys) == len({"name" if key == "name" else "arguments" for key in keys}) == 2:
            return tuple(pairs)  # may be a call
        return dict(pairs)

    start = len(text) - len(text.lstrip(" \t\n\r"))
    try:
        value, end = json.JSONDecoder(object_pairs_hook=read_object, parse_constant=refuse).raw_decode(text, start)
    except ValueError:
        return None
    calls = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, tuple):
            return None
        members = dict(item)
        arguments = members.get("arguments", members.get("parameters"))
        if members["name"] not in tools or not isinstance(arguments, (dict, tuple)):
            return None
        calls.append((members["name"], dict(arguments)))
    return (calls, end) if calls else None


def parse_plainly(marks: AnswerMarks, text: str, is_in_reasoning: bool) -> list[tuple[str, Any]]:
    """Return what the whole text holds, in order: reasoning, content, and calls with their arguments."""
    found: list[tuple[str, Any]] = []
    if not is_in_reasoning and marks.has_reasoning and (begin := re.match(r"[ \t\n\r]*<think>", text)):
        is_in_reasoning, text = True, text[begin.end() :]
    if is_in_reasoning:
        reasoning, _, text = text.partition("</think>")
        found.append(("reasoning", reasoning.strip("\n")))
        text = text.lstrip("\n")
    content, place = "", 0
    is_bare = marks.has_bare_calls  # until there is content
    separator = ""
    while place < len(text):
        rest = text[place:]
        begins = [f"[ \\t\\n\\r]*{re.escape(mark)}" for mark in marks.call_begins]
        if is_bare and not content:
            begins.append(f"[ \\t\\n\\r]*{separator}[ \\t\\n\\r]*(?=[{{\\[])")
        ends = [match.end() for begin in begins if (match := re.match(begin, rest))]
        for end in ends:
            if read := read_calls(rest[end:], marks.tools):
                found += [("content", content), *[("call", call) for call in read[0]]]
                content, is_bare, separator = "", marks.has_bare_calls, ";?"
                after = rest[end + read[1] :].lstrip(" \t\n\r")
                if after.startswith(marks.call_end):
                    after = after.removeprefix(marks.call_end).lstrip(" \t\n\r")
                elif marks.call_end.startswith(after):
                    after = ""
                place = len(text) - len(after)
                break
        else:
            content, place = content + text[place], place + 1
    return [part for part in [*found, ("content", content)] if part[1]]


def parse(marks: AnswerMarks, pieces: Sequence[str], **options: bool) -> list[AnswerPart]:
    """Return the parts of an answer; pieces of one kind that follow each other are joined."""
    parser = AnswerParser(marks, **options)
    parts = [part for piece in pieces for part in parser.add(piece)] + parser.finish()
    assert all(part.text for part in parts)
    joined: list[AnswerPart] = []
    for kind, group in groupby(parts, key=lambda part: part.kind):
        pieces_of = [part.text for part in group]
        joined += [AnswerPart(kind, text) for text in (pieces_of if kind == "name" else ["".join(pieces_of)])]
    return joined


def as_found(parts: Sequence[AnswerPart]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for part in parts:
        if part.kind == "arguments":
            found[-1] = ("call", (found[-1][1], json.loads(part.text)))
        else:
            found.append(("call" if part.kind == "name" else part.kind, part.text))
    return found


@pytest.mark.parametrize("name", ALL_MARKS)
@given(texts, st.booleans())
@examples(150)
def test_the_parts_are_those_of_the_plain_parser(name: str, text: str, is_in_reasoning: bool) -> None:
    marks = ALL_MARKS[name]
    is_in_reasoning = is_in_reasoning and marks.has_reasoning
    parts = parse(marks, [text], is_in_reasoning=is_in_reasoning)
    assert as_found(parts) == parse_plainly(marks, text, is_in_reasoning)


@pytest.mark.parametrize("name", ALL_MARKS)
@given(texts, st.booleans(), st.data())
@examples(150)
def test_the_cuts_of_a_stream_change_nothing(name: str, text: str, streams: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for is_in_reasoning in (False, ALL_MARKS[name].has_reasoning):
        options = {"is_in_reasoning": is_in_reasoning, "streams_arguments": streams}
        whole = parse(ALL_MARKS[name], [text], **options)
        assert whole == parse(ALL_MARKS[name], pieces, **options) == parse(ALL_MARKS[name], list(text), **options)


@pytest.mark.parametrize("marks", [HERMES, MISTRAL, LLAMA])
def test_content_is_held_back_only_while_it_can_begin_a_call(marks: AnswerMarks) -> None:
    parser, mark = AnswerParser(marks), marks.call_begins[0]
    assert parser.add("Hello") == [AnswerPart("content", "Hello")]
    assert parser.add(" \n" + mark[:3]) == []
    assert parser.add("?") == [AnswerPart("content", f" \n{mark[:3]}?")]
    assert parser.add(f'{mark}{{"name": "f", "arguments": {{"a": ') == []
    late = parser.add("x")
    assert "".join(part.text for part in late) == f'{mark}{{"name": "f", "arguments": {{"a": x'
    assert {part.kind for part in late} == {"content"}


def test_certain_calls_are_given_while_they_are_written() -> None:
    parser = AnswerParser(HERMES, streams_arguments=True)
    pieces = ['<tool_call>\n{"na', 'me": "f", "argu', 'ments": {"a', '": 1', "}}\n</tool", "_call>"]
    expected = [[], [("name", "f")], [("arguments", '{"a')], [("arguments", '": 1')], [("arguments", "}")], []]
    assert [parser.add(piece) for piece in pieces] == expected
    assert parser.finish() == []


def test_a_cut_call_that_is_certain_keeps_what_there_is_of_it() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "b'
    assert parse(HERMES, [text], streams_arguments=True) == [("name", "f"), ("arguments", '{"a": "b')]
    assert parse(HERMES, [text]) == [("content", text)]


def test_a_long_run_of_white_space_is_read_in_no_time() -> None:
    text = "a" + "\n" * 20_000 + "b"
    assert parse(HERMES, [*text]) == [("content", text)]

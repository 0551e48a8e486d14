"""Divides the text of an answer, while it is written, into reasoning, content and calls of tools.

    <think>The user asks for the weather.</think>I look it up.
    <tool_call>{"name": "weather", "arguments": {"place": "Rome"}}</tool_call>

Text is held back only while it can still be the begin of something else. Text that looks like a call and is none
stays content.
"""

from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lm.inference.call_reader import CallReader
from lm.inference.json_scanner import WHITE_SPACE

REASONING_BEGIN, REASONING_END = "<think>", "</think>"


class AnswerPart(NamedTuple):
    """A piece of an answer."""

    kind: Literal["content", "reasoning", "name", "arguments"]
    """``name``: a call begins. ``arguments``: a piece of those of the last call."""
    text: str


@dataclass(frozen=True)
class AnswerMarks:
    """What an answer of a model can hold besides content."""

    has_reasoning: bool = False
    """Whether ``<think>`` at its start begins reasoning."""
    tools: frozenset[str] = frozenset()
    """The names of the tools that it may call."""
    call_begins: tuple[str, ...] = ()
    """Texts before a call."""
    call_end: str = ""
    """The text after a call. It may be missing."""
    has_bare_calls: bool = False
    """Whether a call may also stand at the start or after another call, after nothing but ``;``."""


class AnswerParser:
    """Parses one answer. The parts are the same wherever the text is cut, but for the cuts within a part.

    With ``is_in_reasoning``, the text begins within reasoning. With ``streams_arguments``, calls are given while they
    are written: for answers whose form is certain. White space around calls, and line breaks around reasoning, are left
    out.
    """

    def __init__(self, marks: AnswerMarks, *, is_in_reasoning: bool = False, streams_arguments: bool = False) -> None:
        self._marks, self._streams_arguments = marks, streams_arguments
        self._place: Literal["start", "reasoning", "content", "call", "after call"] = "start"
        if is_in_reasoning:
            self._place = "reasoning"
        elif not marks.has_reasoning:
            self._place = "content"
        self._text = ""  # that is held back
        self._skipped = "\n" if is_in_reasoning else ""  # characters that are left out at the begin of the text
        self._can_be_bare = marks.has_bare_calls  # a call may begin here without a mark
        self._separator = ""  # that may stand before it
        self._reader = CallReader(marks.tools)
        self._begin = 0  # where the mark of a call begins in the text
        self._position = 0  # up to which the call is read
        self._num_named = 0  # calls of the reader that are given

    def add(self, piece: str) -> list[AnswerPart]:
        """Append a piece of the answer, and return the parts that are certain now."""
        self._text += piece
        return [*self._parse(is_end=False)]

    def finish(self) -> list[AnswerPart]:
        """Return the rest, after the last piece."""
        return [*self._parse(is_end=True)]

    def _parse(self, is_end: bool) -> Iterator[AnswerPart]:
        goes_on = True
        while goes_on:
            if self._skipped:
                self._text = self._text.lstrip(self._skipped)
                self._skipped = "" if self._text else self._skipped
            match self._place:
                case "start":
                    goes_on = self._parse_start(is_end)
                case "reasoning":
                    goes_on = yield from self._parse_reasoning(is_end)
                case "content":
                    goes_on = yield from self._parse_content(is_end)
                case "call":
                    goes_on = yield from self._parse_call(is_end)
                case "after call":
                    goes_on = self._parse_call_end(is_end)

    def _parse_start(self, is_end: bool) -> bool:
        text = self._text.lstrip(WHITE_SPACE)
        if text.startswith(REASONING_BEGIN):
            self._text, self._skipped, self._place = text[len(REASONING_BEGIN) :], "\n", "reasoning"
        elif REASONING_BEGIN.startswith(text) and not is_end:
            return False
        else:
            self._place = "content"
        return True

    def _parse_reasoning(self, is_end: bool) -> Generator[AnswerPart, None, bool]:
        before, mark, after = self._text.partition(REASONING_END)
        if mark:
            yield from _part("reasoning", before.rstrip("\n"))
            self._text, self._skipped, self._place = after, "\n", "content"
            return True
        end = len(before) if is_end else _find_partial(before, (REASONING_END,))
        certain = before[:end].rstrip("\n")
        yield from _part("reasoning", certain)
        self._text = "" if is_end else before[len(certain) :]
        return False

    def _parse_content(self, is_end: bool) -> Generator[AnswerPart, None, bool]:
        text, marks = self._text, self._marks.call_begins
        if self._can_be_bare:
            rest = text.lstrip(WHITE_SPACE)
            if self._separator:
                rest = rest.removeprefix(self._separator).lstrip(WHITE_SPACE)
            if rest[:1] in ("{", "["):
                self._begin_call(len(text) - len(rest), len(text) - len(rest))
                return True
            if not (rest or is_end):
                return False
        if found := [(begin, mark) for mark in marks if (begin := text.find(mark)) >= 0]:
            begin, mark = min(found, key=lambda place: (place[0], -len(place[1])))
            content = text[:begin].rstrip(WHITE_SPACE)
            yield from self._give_content(content)
            self._text = text[len(content) :]
            self._begin_call(begin - len(content), begin - len(content) + len(mark))
            return True
        end = len(text)
        if marks and not is_end:
            end = len(text[: _find_partial(text, marks)].rstrip(WHITE_SPACE))
        yield from self._give_content(text[:end])
        self._text = text[end:]
        return False

    def _give_content(self, text: str) -> Iterator[AnswerPart]:
        self._can_be_bare = self._can_be_bare and not text
        yield from _part("content", text)

    def _begin_call(self, begin: int, position: int) -> None:
        self._place, self._begin, self._position, self._num_named = "call", begin, position, 0
        self._reader = CallReader(self._marks.tools)

    def _parse_call(self, is_end: bool) -> Generator[AnswerPart, None, bool]:
        reader, text, is_call = self._reader, self._text, True
        while is_call and not reader.is_complete and self._position < len(text):
            is_call = reader.feed(text[self._position])
            self._position += 1
        is_complete = is_call and reader.is_complete
        if is_complete or self._streams_arguments:
            yield from self._give_calls()
        if is_complete:
            self._text, self._skipped, self._place = text[self._position :], WHITE_SPACE, "after call"
            return True
        if is_call and not is_end:
            return False
        self._place = "content"
        if self._num_named:  # it cannot be taken back
            self._text = text[self._position - (not is_call) :]
            return True
        yield from self._give_content(text[: self._begin + 1])
        self._text = text[self._begin + 1 :]
        return True

    def _give_calls(self) -> Iterator[AnswerPart]:
        for number, call in enumerate(self._reader.calls):
            if call.name is None:
                return
            if number >= self._num_named:
                self._num_named += 1
                yield AnswerPart("name", call.name)
            yield from _part("arguments", call.take_arguments())

    def _parse_call_end(self, is_end: bool) -> bool:
        end = self._marks.call_end
        if end and end.startswith(self._text):
            if self._text != end and not is_end:
                return False
            self._text = ""
        self._text, self._skipped, self._place = self._text.removeprefix(end), WHITE_SPACE, "content"
        self._can_be_bare, self._separator = self._marks.has_bare_calls, ";"
        return True


def _part(kind: Literal["content", "reasoning", "arguments"], text: str) -> Iterator[AnswerPart]:
    if text:
        yield AnswerPart(kind, text)


def _find_partial(text: str, marks: Collection[str]) -> int:
    """Return where the longest end of ``text`` begins that is the begin of a mark; its length if there is none."""
    first = max(0, len(text) - max(map(len, marks)) + 1)
    starts = range(first, len(text))
    return next((start for start in starts if any(mark.startswith(text[start:]) for mark in marks)), len(text))

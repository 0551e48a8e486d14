"""Chat data: dialogs and preference pairs, read from files with any of four kinds of rows.

``{"messages": [{"role", "content"}, …]}``, ``{"prompt", "response"}``, ``{"prompt", "chosen", "rejected"}``, and
``{"question", "answer"}`` as in GSM8K (Cobbe et al. 2021). Rows of the first two kinds may also have a ``question``,
and messages of the assistant a ``weight``.
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal, NotRequired, TypedDict

from lm.text.rows import DamagedRows, Row, read_rows

_MAX_TEXT_CHARACTERS = 1_000_000
_ANSWER_MARK = "####"
_REFUSED_FIELDS = ("tools", "functions", "tool_calls", "function_call", "reasoning_content")


class Message(TypedDict):
    """One message of a dialog."""

    role: Literal["system", "user", "assistant"]
    content: str
    weight: NotRequired[int]
    """0: an answer that is not learned. Without it, answers are learned."""


@dataclass(frozen=True)
class Dialog:
    """Messages to learn from; the last is the assistant's."""

    messages: tuple[Message, ...]
    question: str | None = None
    """The last message of the user before it was put into a template, if it was."""


@dataclass(frozen=True)
class PreferencePair:
    """A prompt that ends with a message of the user, and two answers to it, the better one first."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str


def read_dialogs(url: str, damaged: DamagedRows) -> Iterator[Dialog | PreferencePair]:
    """Yield the rows of a file; see :func:`lm.text.rows.read_rows`.

    A row is damaged if it is of none of the four kinds, its roles are out of order (see :func:`find_role_problem`), a
    message is blank or has over a million characters, or the two answers of a pair are equal. A blank system message is
    dropped. A row is damaged as well if it has tool calls or reasoning, a weight that is neither 0 nor 1, or if all of
    its answers have the weight 0.
    """
    return read_rows(url, damaged, parse_row)


def parse_row(row: Row) -> Dialog | PreferencePair:
    """Return the dialog or the pair of a row. Raises ValueError with the reason if the row is damaged."""
    refuse_fields(row)
    match row:
        case {"messages": [*messages]}:
            return Dialog(_check_messages(messages), _question(row))
        case {"prompt": str(prompt), "response": str(response)}:
            return Dialog(_exchange(prompt, response), _question(row))
        case {"prompt": str(prompt), "chosen": str(chosen), "rejected": str(rejected)}:
            user_message, _ = _exchange(prompt, chosen)
            _exchange(prompt, rejected)
            if chosen == rejected:
                raise ValueError("chosen and rejected are equal")
            return PreferencePair((user_message,), chosen, rejected)
        case {"question": str(question), "answer": str(answer)}:
            return Dialog(_exchange(question, answer))
    raise ValueError(
        "it needs messages, or the texts prompt and response, or prompt, chosen and rejected, or question and answer"
    )


def final_answer(answer: str) -> str:
    """Return the text after the last ``####`` of a GSM8K answer, without commas. Raises ValueError without one."""
    _, mark, final = answer.rpartition(_ANSWER_MARK)
    if not mark or not final.strip():
        raise ValueError(f"the answer has no {_ANSWER_MARK} before its final answer")
    return final.strip().replace(",", "")


def find_role_problem(messages: Sequence[Any], last_role: Literal["user", "assistant"]) -> str | None:
    """Return the first problem of a dialog's form, or None.

    Each message must be an object with a role and a text. The roles must be system (optional), user, assistant, user
    and so on, up to a message of ``last_role``.
    """
    for index, message in enumerate(messages):
        if not (isinstance(message, Mapping) and isinstance(message.get("content"), str)):
            return f"message {index} has no content; it must be an object with a role and a text"
    first = 1 if messages and messages[0].get("role") == "system" else 0
    for index, (message, role) in enumerate(zip(messages[first:], cycle(("user", "assistant")), strict=False), first):
        if message.get("role") != role:
            return (
                f"message {index} has the role {reprlib.repr(message.get('role'))}, not {role!r}; the roles must be "
                "system (optional), user, assistant, user and so on"
            )
    if len(messages) == first or messages[-1]["role"] != last_role:
        return f"message {len(messages)}, from the {last_role}, is missing"
    return None


def check_text(name: str, text: str) -> None:
    """Raise ValueError if a text is blank or has over a million characters. ``name`` is the text's, for the message."""
    if len(text) > _MAX_TEXT_CHARACTERS:
        raise ValueError(f"{name} has {len(text):,} characters, more than {_MAX_TEXT_CHARACTERS:,}")
    if not text.strip():
        raise ValueError(f"{name} is blank")


def _question(row: Row) -> str | None:
    question = row.get("question")
    return question if isinstance(question, str) else None


def _exchange(question: str, answer: str) -> tuple[Message, ...]:
    return _check_messages([Message(role="user", content=question), Message(role="assistant", content=answer)])


def refuse_fields(row: Row) -> None:
    """Raise ValueError if a row has tools, tool calls or reasoning: they would be lost without a word."""
    parts: list[tuple[str, Any, tuple[str, ...]]] = [("the row", row, _REFUSED_FIELDS)]
    match row:
        case {"messages": [*messages]}:
            names = (*_REFUSED_FIELDS, "reasoning", "thinking")  # of a row, these may be other columns
            parts += ((f"message {index}", part, names) for index, part in enumerate(messages))
    for name, part, fields in parts:
        for field in fields:
            if isinstance(part, Mapping) and part.get(field):
                raise ValueError(f"{name} has {field}, which textmill cannot use yet")


def read_message(message: Mapping[str, Any], index: int) -> Message:
    """Return a message of a row without other fields. Raises ValueError for a weight that is neither 0 nor 1."""
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise ValueError(f"message {index} has the weight {reprlib.repr(weight)}; it must be 0 or 1")
    read = Message(role=message["role"], content=message["content"])
    return Message(**read, weight=0) if weight == 0 and read["role"] == "assistant" else read


def _check_messages(messages: Sequence[Any]) -> tuple[Message, ...]:
    if problem := find_role_problem(messages, "assistant"):
        raise ValueError(problem)
    first = 1 if messages[0]["role"] == "system" and not messages[0]["content"].strip() else 0  # it says nothing
    for index, message in enumerate(messages[first:], first):
        check_text(f"message {index}", message["content"])
    read = tuple(read_message(message, index) for index, message in enumerate(messages[first:], first))
    if all(message.get("weight") == 0 for message in read if message["role"] == "assistant"):
        raise ValueError("all answers have the weight 0, so there is nothing to learn")
    return read

"""Chat data: messages, dialogs and preference pairs, and the rules that make them valid."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict, cast

from lm.text.rows import Row

_MAX_TEXT_CHARACTERS = 1_000_000
_ANSWER_MARK = "####"
_TOOL_FIELDS = ("tool_calls", "reasoning_content")
_REFUSED_FIELDS = ("tools", "functions", "function_call", *_TOOL_FIELDS)
_FIELDS = {"assistant": _TOOL_FIELDS, "tool": ("tool_call_id", "name")}  # that a message keeps
_NEXT_ROLES = {"user": ("assistant",), "assistant": ("user",), "tool": ("tool", "assistant")}
_CANNOT_RENDER = "which textmill's own chat template cannot render; remove it, or leave the row out"


class Message(TypedDict):
    """One message of a dialog."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    weight: NotRequired[int]
    """0: an answer that is not learned. Without it, answers are learned."""
    tool_calls: NotRequired[list[dict[str, Any]]]
    """Of the assistant, as OpenAI's API has them: ``{"type": "function", "function": {"name", "arguments"}}``, the
    arguments as an object, and an ``id`` if the row has one."""
    tool_call_id: NotRequired[str]
    """Of a tool: the call that it answers."""
    name: NotRequired[str]
    """Of a tool: its name."""
    reasoning_content: NotRequired[str]
    """Of the assistant: what it thinks before its answer."""


@dataclass(frozen=True)
class Dialog:
    """Messages to learn from; the last is the assistant's."""

    messages: tuple[Message, ...]
    question: str | None = None
    """The last message of the user before it was put into a template, if it was."""
    tools: tuple[dict[str, Any], ...] = ()
    """The functions that the assistant may call, as OpenAI's API has them."""

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the last answer."""
        return self.messages[:-1]


@dataclass(frozen=True)
class PreferencePair:
    """A prompt that ends with a message of the user, and two answers to it, the better one first."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str


def final_answer(answer: str) -> str:
    """Return the text after the last ``####`` of a GSM8K answer, without commas. Raises ValueError without one."""
    _, mark, final = answer.rpartition(_ANSWER_MARK)
    if not mark or not final.strip():
        raise ValueError(f"the answer has no {_ANSWER_MARK} before its final answer")
    return final.strip().replace(",", "")


def find_role_problem(
    messages: Sequence[Any], last_role: Literal["user", "assistant"], has_tools: bool = False
) -> str | None:
    """Return the first problem of a dialog's form, or None.

    Each message must be an object with a role and a text. The roles must be system (optional), user, assistant, user
    and so on, up to a message of ``last_role``. With ``has_tools``, messages of tools follow an assistant's
    ``tool_calls``; without it, tool calls and reasoning are a problem, because they would be lost.
    """
    for index, message in enumerate(messages):
        if not (isinstance(message, Mapping) and isinstance(message.get("content"), str)):
            return f"message {index} has no content; it must be an object with a role and a text"
        if field := next((field for field in _TOOL_FIELDS if not has_tools and message.get(field)), None):
            return f"message {index} has {field}, {_CANNOT_RENDER}"
    first = 1 if messages and messages[0].get("role") == "system" else 0
    roles: tuple[str, ...] = ("user",)
    for index, message in enumerate(messages[first:], first):
        role = message.get("role")
        if role not in roles:
            after_calls = ", and tool after an assistant's tool_calls" if has_tools else ""
            return (
                f"message {index} has the role {reprlib.repr(role)}, not {roles[-1]!r}; the roles must be system "
                f"(optional), user, assistant, user and so on{after_calls}"
            )
        roles = ("tool",) if message.get("tool_calls") else _NEXT_ROLES[role]
    if len(messages) == first or messages[-1]["role"] != last_role:
        return f"message {len(messages)}, from the {last_role}, is missing"
    return None


def check_text(name: str, text: str) -> None:
    """Raise ValueError if a text is blank or has over a million characters. ``name`` is the text's, for the message."""
    if len(text) > _MAX_TEXT_CHARACTERS:
        raise ValueError(f"{name} has {len(text):,} characters, more than {_MAX_TEXT_CHARACTERS:,}")
    if not text.strip():
        raise ValueError(f"{name} is blank")


def refuse_fields(row: Row, has_tools: bool = False) -> None:
    """Raise ValueError if a row has tools, tool calls or reasoning: they would be lost without a word.

    With ``has_tools``, it may have them, but not in fields that are not read.
    """
    names = tuple(name for name in _REFUSED_FIELDS if not (has_tools and name == "tools"))
    parts: list[tuple[str, Any, tuple[str, ...]]] = [("the row", row, names)]
    match row:
        case {"messages": [*messages]} | {"conversations": [*messages]}:
            # Of a row, the last two may be other columns.
            names = ("functions", "function_call") if has_tools else (*_REFUSED_FIELDS, "reasoning", "thinking")
            parts += ((f"message {index}", part, names) for index, part in enumerate(messages))
    reason = "which is not read; write it as tools, and in messages as tool_calls" if has_tools else _CANNOT_RENDER
    for name, part, fields in parts:
        for field in fields:
            if isinstance(part, Mapping) and part.get(field):
                raise ValueError(f"{name} has {field}, {reason}")


def read_message(message: Mapping[str, Any], index: int) -> Message:
    """Return a message of a row without unknown fields. Raises ValueError for a weight that is neither 0 nor 1."""
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise ValueError(f"message {index} has the weight {reprlib.repr(weight)}; it must be 0 or 1")
    read = {name: message[name] for name in ("role", "content")}
    read |= {name: message[name] for name in _FIELDS.get(message["role"], ()) if message.get(name)}
    if weight == 0 and message["role"] == "assistant":
        read["weight"] = 0
    return cast(Message, read)


def check_messages(messages: Sequence[Any], has_tools: bool = False) -> tuple[Message, ...]:
    """Return the messages of a dialog that ends with the assistant, without a blank system message.

    Raises ValueError with the reason if a message cannot be learned or read: the roles are out of order (see
    :func:`find_role_problem`), a text is blank or has over a million characters, a weight is neither 0 nor 1, or all
    answers have the weight 0.
    """
    if problem := find_role_problem(messages, "assistant", has_tools):
        raise ValueError(problem)
    first = 1 if messages[0]["role"] == "system" and not messages[0]["content"].strip() else 0  # it says nothing
    for index, message in enumerate(messages[first:], first):
        if message["content"] or not (message["role"] == "tool" or message.get("tool_calls")):
            check_text(f"message {index}", message["content"])
    read = tuple(read_message(message, index) for index, message in enumerate(messages[first:], first))
    if all(message.get("weight") == 0 for message in read if message["role"] == "assistant"):
        raise ValueError("all answers have the weight 0, so there is nothing to learn")
    return read

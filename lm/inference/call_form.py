"""The form in which the chat template of a model writes calls of tools, found by rendering a call.

Hermes and Qwen write ``<tool_call>{"name": …, "arguments": …}</tool_call>`` for each, Llama 3 a bare
``{"name": …, "parameters": …}``, and Mistral ``[TOOL_CALLS][…]`` with a list.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm.common.errors import UserError
from lm.data.dialogs import Message
from lm.data.jinja_template import ChatTemplate
from lm.inference.answer_parser import REASONING_BEGIN, REASONING_END, AnswerMarks
from lm.inference.call_reader import ARGUMENT_KEYS

NO_TOOLS = (
    "The model's chat template has no place for tools. Leave them out, or use a model that was trained with tools."
)
UNREADABLE_CALLS = (
    "The model's chat template writes the calls of tools in a form that textmill does not read; it reads JSON objects "
    "with a name and arguments. Leave the tools out."
)
_KNOWN_MARKS = ("<|tool_call|>", "<|tool_calls|>", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
_QUESTION = Message(role="user", content="?")
_CONTENT = "☃☃"  # that no template writes itself
_NAME, _ARGUMENTS = "probe_name", {"probe_key": "probe value"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls. All texts are those of its template, with their white space."""

    begin: str
    """Before the first call."""
    separator: str | None
    """Between two calls; None: the model can write one only."""
    end: str
    """After the last call."""
    before_name: str = '{"name": '
    before_arguments: str = ', "arguments": '
    after_arguments: str = "}"
    has_text_arguments: bool = False
    """Whether the template takes the arguments of calls as JSON text, not as objects."""
    writes_calls: bool = True
    """Whether the template writes the calls of a message. If not, they belong into its content."""
    other_marks: tuple[str, ...] = ()
    """Texts that may stand before a call too."""

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of calls, each with ``name`` and ``arguments``."""
        texts = [
            f"{self.before_name}{self.write_name(call['name'])}{_dump(call['arguments'])}{self.after_arguments}"
            for call in calls
        ]
        return self.begin + (self.separator or "").join(texts) + self.end

    def write_name(self, name: str) -> str:
        """Return the text of a call from its name to its arguments."""
        return _dump(name) + self.before_arguments

    @property
    def mark(self) -> str:
        """The text that begins calls, without white space and the bracket of a list. Empty: a call is a bare object."""
        return self.begin.strip().removesuffix("[").strip()

    def marks(self, has_reasoning: bool, tools: Iterable[str]) -> AnswerMarks:
        """Return what to look for in an answer."""
        begins = tuple(filter(None, (self.mark, *self.other_marks)))
        end = self.end.strip().removeprefix("]").strip()
        return AnswerMarks(has_reasoning, frozenset(tools), begins, end, has_bare_calls=not self.mark)


def find_call_form(template: ChatTemplate) -> CallForm:
    """Return the form of a template. Raises UserError if it has no place for tools, or if its form is another one."""
    if template.is_own:
        raise UserError(NO_TOOLS)
    without, shown = (_render(template, [_QUESTION], **tools) for tools in ({}, {"tools": [_TOOL]}))
    if without == shown or _NAME not in (shown or ""):
        raise UserError(NO_TOOLS)
    is_written = False
    for has_text_arguments in (False, True):
        arguments = _dump(_ARGUMENTS) if has_text_arguments else _ARGUMENTS
        one, two = (_render(template, _call_dialog(arguments, count), tools=[_TOOL]) for count in (1, 2))
        content = _render(template, [_QUESTION, Message(role="assistant", content=_CONTENT)], tools=[_TOOL])
        if one is None or content is None:
            continue
        start = content.rfind(_CONTENT)
        ending = content[start + len(_CONTENT) :]
        is_written = is_written or one.count(_NAME) > content.count(_NAME)
        if start < 0 or one[:start] != content[:start] or not one.endswith(ending):
            continue
        answers = [text[start : len(text) - len(ending)] for text in (one, two) if text and text.endswith(ending)]
        if form := _read_form(answers, has_text_arguments):
            return form
    if is_written:
        raise UserError(UNREADABLE_CALLS)
    sources = "".join(template.sources.values())
    mark = next((mark for mark in _KNOWN_MARKS if mark in sources), "")
    return CallForm(f"{mark}[", ", ", "]", writes_calls=False)


def has_reasoning(template: ChatTemplate) -> bool:
    """Return whether the answers of a model can begin with reasoning."""
    return any(mark in source for source in template.sources.values() for mark in (REASONING_BEGIN, REASONING_END))


def _call_dialog(arguments: Any, count: int) -> list[Message]:
    calls = [
        {"id": f"probe000{number}", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        for number in range(count)
    ]
    return [_QUESTION, Message(role="assistant", content="", tool_calls=calls)]


def _render(template: ChatTemplate, messages: Sequence[Message], **variables: Any) -> str | None:
    try:
        return template.write(messages, variables)
    except UserError:
        return None


def _read_form(answers: Sequence[str], has_text_arguments: bool) -> CallForm | None:
    """Return the form of an answer with one call, and maybe of another answer with two."""
    if (call := _find_call(answers[0], 0)) is None:
        return None
    first, last = call
    begin, text, end = answers[0][:first], answers[0][first:last], answers[0][last:]
    separator = None
    if len(answers) > 1 and (calls := _find_calls(answers[1])) and len(calls) == 2:
        separator = answers[1][calls[0][1] : calls[1][0]]
    name = text.index(json.dumps(_NAME))
    key = next(key for key in ARGUMENT_KEYS if f'"{key}"' in text)
    place = text.index("{", text.index(f'"{key}"'))
    if name > place:
        return None
    before_name, between = text[:name], text[name + len(json.dumps(_NAME)) : place]
    # Other members, such as the id, are left out: the arguments are the last one.
    other_marks = tuple(mark for mark in ("<|python_tag|>",) if not begin.strip())
    return CallForm(begin, separator, end, before_name, between, "}", has_text_arguments, True, other_marks)


def _find_calls(text: str) -> list[tuple[int, int]]:
    calls: list[tuple[int, int]] = []
    while call := _find_call(text, calls[-1][1] if calls else 0):
        calls.append(call)
    return calls


def _find_call(text: str, start: int) -> tuple[int, int] | None:
    """Return where the first JSON object with the probe's call begins and ends."""
    decoder, begin = json.JSONDecoder(), text.find("{", start)
    while begin >= 0:
        try:
            value, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            value, end = None, begin
        if _is_call(value):
            return begin, end
        begin = text.find("{", begin + 1)
    return None


def _is_call(value: Any) -> bool:
    if not (isinstance(value, Mapping) and value.get("name") == _NAME):
        return False
    return any(value.get(key) == _ARGUMENTS for key in ARGUMENT_KEYS)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

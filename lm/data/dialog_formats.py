"""The forms of rows that fine-tuning data has, such as Alpaca's and ShareGPT's: a row as a dialog or a preference pair.

:data:`FORMS` is the table of them. The first whose fields a row has is its form. Sources: Taori et al. 2023 (Alpaca),
FastChat (ShareGPT), Conover et al. 2023 (Dolly), Cobbe et al. 2021 (questions and answers), OpenAI's fine-tuning API.
"""

import logging
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

from lm.data.dialog_messages import read_json_text, read_messages, read_text, read_tools
from lm.data.dialogs import Dialog, Message, PreferencePair, check_messages, refuse_fields
from lm.text.rows import DamagedRows, Row, read_rows

log = logging.getLogger(__name__)

Example = Dialog | PreferencePair
Messages = list[dict[str, Any]]


class Form(NamedTuple):
    """A form of rows."""

    name: str
    fields: tuple[str, ...]
    """The fields that are read."""
    required: tuple[str, ...]
    """Those that make a row one of this form, if none of them is empty."""
    read: Callable[[Row, bool], Example]
    """Returns the example of a row, which may have tools or not. Raises ValueError with the reason if it is damaged."""


def read_dialogs(url: str, damaged: DamagedRows, has_tools: bool = False) -> Iterator[Example]:
    """Yield the rows of a file, see :func:`lm.text.rows.read_rows`, and log at the end their forms.

    See :meth:`RowParser.parse` for the rows that are damaged.
    """
    parser = RowParser(has_tools)
    yield from read_rows(url, damaged, parser.parse)
    log.info("%s: %s", url.rsplit("/", 1)[-1], parser.describe())


class RowParser:
    """Reads the rows of a file, and counts their forms."""

    def __init__(self, has_tools: bool = False) -> None:
        self._has_tools = has_tools
        self._counts: Counter[Form] = Counter()
        self._fields: dict[Form, dict[str, None]] = {}  # known ones that the rows of a form have

    def parse(self, row: Row) -> Example:
        """Return the dialog or the pair of a row.

        Raises ValueError with the reason if it is of no form, or as :func:`lm.data.dialogs.check_messages` does, or if
        the two answers of a pair are equal. Unless ``has_tools``, a row is damaged as well if it has tools, tool calls
        or reasoning.
        """
        there = tuple(name for name in _KNOWN_FIELDS if _is_there(row, name))
        form = _find_form(there)
        if form is None:
            raise ValueError(self._explain_no_form(row))
        has_tools = self._has_tools and "tools" in form.fields
        refuse_fields(row, has_tools)
        example = form.read({name: row[name] for name in there if name in form.fields}, has_tools)
        self._counts[form] += 1
        self._fields.setdefault(form, {}).update(dict.fromkeys(there))
        return example

    def describe(self) -> str:
        """Return the forms of the rows that were read, with their fields."""
        forms = []
        for form, count in self._counts.items():
            fields = ", ".join(name for name in form.fields if name in self._fields[form])
            forms.append(f"{form.name} ({fields})" + (f": {count:,}" if len(self._counts) > 1 else ""))
        names = (name for form, there in self._fields.items() for name in there if name not in form.fields)
        unused = ", ".join(dict.fromkeys(names))
        return "; ".join(forms) + (f"; not used: {unused}" if unused else "")

    def _explain_no_form(self, row: Row) -> str:
        if self._counts:  # the row is one of a file of them
            form = max(self._counts, key=self._counts.__getitem__)
            missing = [name for name in form.required if not _is_there(row, name)]
            return f"it has no usable {' and no '.join(missing)}; {form.name} have {', '.join(form.required)}"
        there = reprlib.repr([name for name in row if _is_there(row, name)]).strip("[]")
        common = " | ".join(", ".join(form.required) for form in FORMS if form.name in _COMMON_FORMS)
        return f"its fields with a value are {there or 'none'}; it needs those of a form, such as {common}"


@cache
def _find_form(fields: tuple[str, ...]) -> Form | None:
    """Return the first form whose required fields are there."""
    return next((form for form in FORMS if {*form.required} <= {*fields}), None)


def read_question(row: Row) -> str:
    """Return the question of a row, without an answer: its prompt, question, problem, or instruction with its input.

    It is a text, or the only message of a dialog. Raises ValueError with the reason if there is none, or a system
    message or an earlier turn, for which a problem has no room.
    """
    for asked in (("prompt",), ("question",), ("problem",), ("instruction", "input")):
        if _is_there(row, asked[0]):
            messages = _ask(asked, row)
            if [message["role"] for message in messages] != ["user"]:
                raise ValueError(f"{asked[0]} must be a text or one message of the user, to be a problem")
            return str(messages[0]["content"])
    raise ValueError("no prompt, question, problem or instruction")


def _is_there(row: Row, name: str) -> bool:
    value = row.get(name)
    if name == "tools":
        return bool(value)
    if name in ("messages", "conversations"):
        return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))
    return value is not None


def _read_dialog(field: str, row: Row, has_tools: bool) -> Dialog:
    return _make_dialog(read_messages(row[field], field), row, has_tools, row.get("question"))


def _read_exchange(asked: tuple[str, ...], answer: str, row: Row, has_tools: bool) -> Dialog:
    """Return the dialog of a question, in one field or in several, and its answer."""
    if str(row.get("label")).lower() in ("true", "false", "1", "0"):
        raise ValueError("it has a label, as rows for KTO; keep the rows whose label is true, and remove the field")
    messages = [*_read_history(row), *_ask(asked, row), *_as_messages(row[answer], answer, "assistant")]
    return _make_dialog(messages, row, has_tools, None if "question" in asked else row.get("question"))


def _make_dialog(messages: Messages, row: Row, has_tools: bool, question: Any) -> Dialog:
    read = check_messages(_with_system(messages, row), has_tools)
    return Dialog(read, question if isinstance(question, str) else None, read_tools(row.get("tools")))


def _read_pair(asked: tuple[str, ...], row: Row, has_tools: bool) -> PreferencePair:
    return _make_pair([*_read_history(row), *_ask(asked, row)], row, _PAIR)


def _read_sharegpt_pair(row: Row, has_tools: bool) -> PreferencePair:
    return _make_pair(read_messages(row["conversations"], "conversations"), row, _PAIR)


def _read_openai_pair(row: Row, has_tools: bool) -> PreferencePair:
    match row["input"]:
        case {"messages": messages} as asked:
            refuse_fields(asked)
            return _make_pair(read_messages(messages, "input"), row, ("preferred_output", "non_preferred_output"))
    raise ValueError(f"input must be an object with messages, not {reprlib.repr(row['input'])}")


def _make_pair(prompt: Messages, row: Row, answers: tuple[str, str]) -> PreferencePair:
    """Return a pair of answers to ``prompt``. An answer is a text or a message, or a dialog that ends with it."""
    prompt = _with_system(prompt, row)
    chosen, rejected = (check_messages(_complete(prompt, row[name], name)) for name in answers)
    if chosen[:-1] != rejected[:-1]:
        raise ValueError(f"the messages before the last of {' and '.join(answers)} differ; a pair has one prompt")
    if chosen[-1]["content"] == rejected[-1]["content"]:
        raise ValueError(f"{' and '.join(answers)} are equal")
    messages = (Message(role=message["role"], content=message["content"]) for message in chosen[:-1])
    return PreferencePair(tuple(messages), chosen[-1]["content"], rejected[-1]["content"])


def _complete(prompt: Messages, answer: Any, field: str) -> Messages:
    """Return the dialog of a prompt and an answer, which may begin with the prompt itself."""
    if isinstance(answer, str) and not prompt:
        raise ValueError(f"{field} is a text, so the row needs a prompt; or {field} is a list of messages")
    messages = _as_messages(answer, field, "assistant")
    if not messages or messages[0]["role"] == "assistant":
        return [*prompt, *messages]
    texts = [message["content"] for message in messages[:-1]]
    if lost := next((message["content"] for message in prompt if message["content"] not in texts), None):
        raise ValueError(f"{field} is a whole dialog, without the prompt {reprlib.repr(lost)}")
    return messages


def _ask(fields: tuple[str, ...], row: Row) -> Messages:
    """Return the messages of the fields of a question, whose texts are put together as one message."""
    values = [row[name] for name in fields if _is_there(row, name)]
    if len(values) == 1:
        return _as_messages(values[0], fields[0], "user")
    texts = [read_text(row[name], name) for name in fields if _is_there(row, name)]
    return [{"role": "user", "content": "\n\n".join(text for text in texts if text.strip())}] if texts else []


def _as_messages(value: Any, field: str, role: str) -> Messages:
    """Return messages as they are, and a text as one message."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, dict) and not first.keys().isdisjoint({"role", "from"}):
        return read_messages(value, field)
    return [{"role": role, "content": read_text(value, field)}]


def _with_system(messages: Messages, row: Row) -> Messages:
    """Return the messages with a row's own system message before them."""
    field = "system" if _is_there(row, "system") else "system_prompt"
    if not _is_there(row, field) or not (text := read_text(row[field], field)).strip():
        return messages
    if messages and messages[0]["role"] == "system" and messages[0]["content"].strip():
        raise ValueError(f"it has the field {field} and a system message; leave one of them out")
    return [{"role": "system", "content": text}, *messages]


def _read_history(row: Row) -> Messages:
    """Return the messages of earlier turns, which Alpaca's rows may have: a list of questions with their answers."""
    messages: Messages = []
    turns = read_json_text(row.get("history"), "history") or []
    if not isinstance(turns, list):
        raise ValueError(f"history must be a list of questions with their answers, not {reprlib.repr(turns)}")
    for index, turn in enumerate(turns):
        match turn:
            case [str(asked), str(answered)]:
                messages += ({"role": "user", "content": asked}, {"role": "assistant", "content": answered})
            case _:
                raise ValueError(f"history {index} is {reprlib.repr(turn)}, not a list of a question and its answer")
    return messages


def _form(name: str, fields: str, read: Callable[[Row, bool], Example]) -> Form:
    """Return a form. Fields that a row may lack have a ``?``."""
    names = fields.split()
    return Form(
        name,
        tuple(name.removesuffix("?") for name in names),
        tuple(name for name in names if not name.endswith("?")),
        read,
    )


def _exchange(name: str, fields: str, asked: str, answer: str) -> Form:
    return _form(name, fields, partial(_read_exchange, tuple(asked.split()), answer))


def _pair(name: str, fields: str, asked: str) -> Form:
    return _form(name, f"{fields} chosen rejected", partial(_read_pair, tuple(asked.split())))


_PAIR = ("chosen", "rejected")
_SYSTEM = "system? system_prompt?"

FORMS = (
    # textmill's own come first, so that a row of them is read as ever, whatever else it has.
    _form("rows of messages", "messages tools? question?", partial(_read_dialog, "messages")),
    _exchange("prompt-response rows", "prompt response tools? question?", "prompt", "response"),
    _pair("preference rows", "prompt", "prompt"),
    _exchange("question-answer rows", "question answer tools?", "question", "answer"),
    # Preferences come before dialogs: the fields of a dialog are also those of a prompt.
    _form("ShareGPT preference rows", f"conversations chosen rejected {_SYSTEM}", _read_sharegpt_pair),
    _pair("Alpaca preference rows", f"{_SYSTEM} history? instruction input?", "instruction input"),
    _pair("preference rows", f"{_SYSTEM} question", "question"),
    _form("OpenAI preference rows", "input preferred_output non_preferred_output", _read_openai_pair),
    _pair("preference rows", _SYSTEM, ""),
    _form("ShareGPT rows", f"{_SYSTEM} conversations tools?", partial(_read_dialog, "conversations")),
    _exchange("prompt-completion rows", f"{_SYSTEM} prompt completion label? tools?", "prompt", "completion"),
    _exchange("Alpaca rows", f"{_SYSTEM} history? instruction input? output tools?", "instruction input", "output"),
    _exchange("Dolly rows", "instruction context? response", "instruction context", "response"),
    _exchange("question-response rows", f"{_SYSTEM} question response tools?", "question", "response"),
)

_COMMON_FORMS = ("rows of messages", "prompt-response rows", "preference rows", "ShareGPT rows", "Alpaca rows")
_KNOWN_FIELDS = tuple(dict.fromkeys(name for form in FORMS for name in form.fields))

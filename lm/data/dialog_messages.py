"""Messages as people write them: roles of ShareGPT, content in parts, and the calls and answers of tools."""

import reprlib
from collections.abc import Mapping
from typing import Any

from lm.files.json import parse_json

_ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "ipython"), "tool"),
    "developer": "system",
}
_CALL_EXAMPLE = '{"name": "add", "arguments": {"a": 1}}'


def read_messages(value: Any, field: str) -> list[dict[str, Any]]:
    """Return the messages of a field: a list, an object as the only message, or the JSON text of one.

    Each has ``role`` and ``content``, or ``from`` and ``value`` as in ShareGPT. The content is a text, or a list of
    parts ``{"type": "text", "text"}``, whose texts are joined. Their roles may be in any order. Other fields stay, but
    ``tool_calls`` are checked, and ``reasoning`` or ``thinking`` is called ``reasoning_content``.

    Raises ValueError, which names the message, for another form.
    """
    value = read_json_text(value, field)
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list):
        raise ValueError(f"{field} must be a list of messages, not {reprlib.repr(value)}")
    return [_read_message(message, f"message {index}") for index, message in enumerate(messages)]


def read_text(value: Any, name: str) -> str:
    """Return a text, or the joined texts of parts. Raises ValueError for other content, such as a picture."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a text, not {reprlib.repr(value)}")
    texts = []
    for part in value:
        match part:
            case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
                texts.append(text)
            case {"type": str(kind)} if kind != "text":
                raise ValueError(
                    f"{name} has a part of the type {reprlib.repr(kind)}; textmill reads parts of the type 'text' only"
                )
            case _:
                raise ValueError(f'{name} has the part {reprlib.repr(part)}, not {{"type": "text", "text": …}}')
    return "".join(texts)


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Return the functions that an assistant may call, from a list or its JSON text, each as OpenAI's API has it.

    A function may be there without ``{"type": "function", "function": …}`` around it. Raises ValueError for another
    form.
    """
    value = read_json_text(value, "tools")
    if not value:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"tools must be a list of functions, not {reprlib.repr(value)}")
    tools = []
    for index, tool in enumerate(value):
        match tool:
            case {"function": {"name": str()} as function} | ({"name": str()} as function):
                tools.append({"type": "function", "function": _without_none(function)})
            case _:
                raise ValueError(f"tool {index} has no name; it must be an object with a name and its parameters")
    return tuple(tools)


def read_json_text(value: Any, field: str) -> Any:
    """Return the value of a JSON text, as a cell of a table is, or any other value as it is."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(f"{field} is a text, but {error}") from None


def _read_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} has no content; it must be an object with a role and a text")
    fields = {field: value for field, value in message.items() if value is not None}
    role = fields.pop("from", None) if "role" not in fields else fields["role"]
    content = fields.pop("value", None) if "content" not in fields else fields["content"]
    for field in ("reasoning", "thinking"):
        if isinstance(fields.get(field), str):
            fields.setdefault("reasoning_content", fields.pop(field))
    if role == "function_call":  # ShareGPT's: the content is a call, or a list of calls
        fields["tool_calls"], content = read_json_text(content, name), ""
    if fields.get("tool_calls"):
        calls = fields["tool_calls"]
        calls = calls if isinstance(calls, list) else [calls]
        fields["tool_calls"] = [_read_call(call, f"{name}, tool call {index}") for index, call in enumerate(calls)]
        content = "" if content is None else content
    if content is None:
        raise ValueError(f"{name} has no content; it must be an object with a role and a text")
    known = _ROLES.get(role, role) if isinstance(role, str) else role
    return {**fields, "role": known, "content": read_text(content, name)}


def _read_call(call: Any, name: str) -> dict[str, Any]:
    """Return a call as OpenAI's API has it, but with the arguments as an object."""
    match call:
        case {"function": {"name": str(function)} as inner} | ({"name": str(function)} as inner):
            arguments = inner.get("arguments", inner.get("parameters"))
        case _:
            raise ValueError(f"{name} has no name; it must be as {_CALL_EXAMPLE}")
    arguments = read_json_text(arguments, f"{name}, arguments") or {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{name}: the arguments must be an object, not {reprlib.repr(arguments)}")
    called = {"type": "function", "function": {"name": function, "arguments": _without_none(arguments)}}
    return {"id": call["id"], **called} if isinstance(call.get("id"), str) else called


def _without_none(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without the fields that are None, which Parquet adds to each row of a column."""
    return {name: inner for name, inner in value.items() if inner is not None}

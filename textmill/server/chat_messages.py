"""The messages of a chat request: their fields, and the dialog that the chat template of the model gets.

Source: https://platform.openai.com/docs/api-reference/chat; ``reasoning_content`` is that of vLLM and DeepSeek.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from lm.data.dialogs import Message
from lm.files.json import parse_json
from textmill.server.fields import FailFastList, StrictModel, Unsupported


class TextPart(StrictModel):
    """A part of the content of a message."""

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if self.type != "text":
            raise PydanticCustomError(
                "unsupported", "A part of type {type} is not supported; send text", {"type": repr(self.type[:40])}
            )
        if self.text is None:
            raise PydanticCustomError("missing", "The part has no text")
        return self


_Content = Annotated[
    Annotated[str, Tag("str")] | Annotated[FailFastList[TextPart], Tag("list[part]")],
    Discriminator(lambda value: "list[part]" if isinstance(value, list) else "str"),  # errors of one form only
]


class CalledFunction(StrictModel):
    """A call of a tool."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str = ""

    def parse(self) -> dict[str, Any]:
        """Return the arguments. Raise ValueError if their text is not the JSON of an object."""
        value = parse_json(self.arguments) if self.arguments.strip() else {}
        if not isinstance(value, Mapping):
            raise ValueError("is no object")
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be encoded
        return dict(value)

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        try:
            self.parse()
        except ValueError:
            raise PydanticCustomError("json", "The arguments must be the JSON text of an object") from None
        return self


class _ToolCall(StrictModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(StrictModel):
    """A message of a dialog. ``name`` counts in those of tools only."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    reasoning_content: str | None = None
    tool_calls: FailFastList[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: Unsupported = None
    audio: Unsupported = None
    prefix: Unsupported = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        is_empty_answer = self.role == "assistant" and (self.tool_calls or "content" in self.model_fields_set)
        if self.content is None and not is_empty_answer:  # clients send it as null
            raise PydanticCustomError("missing", "The message has no content")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("misplaced", "Only a message of the assistant has tool_calls")
        return self

    def to_message(self) -> Message:
        """Return the message as a chat template takes it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text or "" for part in content)
        message = Message(role="system" if self.role == "developer" else self.role, content=text)
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    **({} if call.id is None else {"id": call.id}),
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.parse()},
                }
                for call in self.tool_calls
            ]
        if self.role == "assistant" and self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.role == "tool" and self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.role == "tool" and self.name is not None:
            message["name"] = self.name
        return message

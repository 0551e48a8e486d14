"""Requests of Anthropic's Messages API, as translations to a chat.

Source: https://docs.anthropic.com/en/api/messages.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from textmill.server.api_form import make_chat
from textmill.server.fields import FailFastList, StrictModel, Unsupported
from textmill.server.requests import ChatRequest

FIELD_NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config"}


class _TextBlock(StrictModel):
    type: Literal["text"]
    text: str


_Texts = Annotated[
    Annotated[str, Tag("str")] | Annotated[FailFastList[_TextBlock], Tag("list[block]")],
    Discriminator(lambda value: "list[block]" if isinstance(value, list) else "str"),
]


class _ThinkingBlock(StrictModel):
    type: Literal["thinking"]
    thinking: str


class _ToolUseBlock(StrictModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResultBlock(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts | None = None


_BLOCKS = ("text", "thinking", "tool_use", "tool_result")


def _find_block_type(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return f"{kind}[]" if kind in _BLOCKS else "text[]"


_Block = Annotated[
    Annotated[_TextBlock, Tag("text[]")]
    | Annotated[_ThinkingBlock, Tag("thinking[]")]
    | Annotated[_ToolUseBlock, Tag("tool_use[]")]
    | Annotated[_ToolResultBlock, Tag("tool_result[]")],
    Discriminator(_find_block_type),
]


class _Message(StrictModel):
    role: Literal["user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("str")] | Annotated[FailFastList[_Block], Tag("list[block]")],
        Discriminator(lambda value: "list[block]" if isinstance(value, list) else "str"),
    ]


class _Tool(StrictModel):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class _ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_object: dict[str, Any] = Field(alias="schema")


class _OutputConfig(StrictModel):
    format: _OutputFormat | None = None


class CountTokensRequest(StrictModel):
    """The body of ``POST /v1/messages/count_tokens``."""

    model: str | None = None
    messages: Annotated[FailFastList[_Message], Field(min_length=1)]
    system: _Texts | None = None
    tools: FailFastList[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    output_config: _OutputConfig | None = None
    mcp_servers: Unsupported = None
    container: Unsupported = None

    def to_chat(self, **fields: Any) -> ChatRequest:
        """Return the chat, with further fields. Raise ApiError if it is invalid."""
        output_format = self.output_config and self.output_config.format
        schema = output_format and {"type": "json_schema", "json_schema": {"schema": output_format.schema_object}}
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in self.tools or []
        ]
        choice: Any = None
        if self.tool_choice:
            named = {"type": "function", "function": {"name": self.tool_choice.name or ""}}
            choices = {"auto": "auto", "any": "required", "none": "none", "tool": named}
            choice = choices[self.tool_choice.type]
            if self.tool_choice.disable_parallel_tool_use:
                fields["parallel_tool_calls"] = False
        messages = self._translate_messages()
        if messages[-1]["role"] == "assistant":
            fields["continue_final_message"] = True
        return make_chat(
            {"messages": messages, "tools": tools, "tool_choice": choice, "response_format": schema, **fields}
        )

    def _translate_messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _join(self.system)})
        for message in self.messages:
            blocks = message.content
            blocks = [_TextBlock(type="text", text=blocks)] if isinstance(blocks, str) else blocks
            if message.role == "assistant":
                messages.append(_translate_answer(blocks))
            else:
                messages += _translate_question(blocks)
        return messages


class MessagesRequest(CountTokensRequest):
    """The body of ``POST /v1/messages``."""

    max_tokens: int = Field(ge=1)
    stop_sequences: FailFastList[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    def translate(self) -> ChatRequest:
        """Return the chat. Raise ApiError if it is invalid."""
        names = ("temperature", "top_p", "top_k", "stream")
        fields = {name: getattr(self, name) for name in names}
        return self.to_chat(max_completion_tokens=self.max_tokens, stop=self.stop_sequences, **fields)


def _join(texts: str | Sequence[_TextBlock]) -> str:
    return texts if isinstance(texts, str) else "\n".join(block.text for block in texts)


def _translate_answer(blocks: Sequence[Any]) -> dict[str, Any]:
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in blocks
        if isinstance(block, _ToolUseBlock)
    ]
    thoughts = [block.thinking for block in blocks if isinstance(block, _ThinkingBlock)]
    return {
        "role": "assistant",
        "content": _join([block for block in blocks if isinstance(block, _TextBlock)]),
        "reasoning_content": "\n".join(thoughts) or None,
        "tool_calls": calls,
    }


def _translate_question(blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages of a user's blocks: one for each result of a tool, and one for texts beside each other."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, _ToolResultBlock):
            content = _join(block.content or "")
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, _TextBlock) and messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n{block.text}"
        elif isinstance(block, _TextBlock):
            messages.append({"role": "user", "content": block.text})
    return messages or [{"role": "user", "content": ""}]

"""``POST /v1/responses``: OpenAI's newer API, as a translation of a chat. The server stores no responses.

Source: https://platform.openai.com/docs/api-reference/responses.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from textmill.server.answer_items import AnswerItem, AnswerItems, ItemEvent
from textmill.server.api_form import ApiForm, Chunks, make_chat
from textmill.server.chat_messages import CalledFunction
from textmill.server.fields import FailFastList, StrictModel, Unsupported, refuse_unless
from textmill.server.requests import ApiError, ChatRequest


class _InputText(StrictModel):
    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: str


_Texts = Annotated[
    Annotated[str, Tag("str")] | Annotated[FailFastList[_InputText], Tag("list[part]")],
    Discriminator(lambda value: "list[part]" if isinstance(value, list) else "str"),
]


class _MessageItem(StrictModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Texts


class _CallItem(CalledFunction):
    type: Literal["function_call"]
    call_id: str


class _OutputItem(StrictModel):
    type: Literal["function_call_output"]
    call_id: str
    output: _Texts


class _ReasoningItem(StrictModel):
    type: Literal["reasoning"]
    content: FailFastList[_InputText] | None = None


_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _find_item_type(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return f"{kind}[]" if kind in _ITEMS else "message[]"


_Item = Annotated[
    Annotated[_MessageItem, Tag("message[]")]
    | Annotated[_CallItem, Tag("function_call[]")]
    | Annotated[_OutputItem, Tag("function_call_output[]")]
    | Annotated[_ReasoningItem, Tag("reasoning[]")],
    Discriminator(_find_item_type),
]
_Input = Annotated[
    Annotated[str, Tag("str")] | Annotated[FailFastList[_Item], Field(min_length=1), Tag("list[item]")],
    Discriminator(lambda value: "list[item]" if isinstance(value, list) else "str"),
]


class _FunctionTool(StrictModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _NamedTool(StrictModel):
    type: Literal["function"]
    name: str


class _TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_object: dict[str, Any] | None = Field(None, alias="schema")


class _TextOptions(StrictModel):
    format: _TextFormat | None = None


class ResponsesRequest(StrictModel):
    """The body of ``POST /v1/responses``."""

    model: str | None = None
    input: _Input
    instructions: str | None = None
    tools: FailFastList[_FunctionTool] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[_NamedTool, Tag("named[]")],
            Discriminator(lambda value: "str" if isinstance(value, str) else "named[]"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: _TextOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None

    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    background: Unsupported = None
    prompt: Unsupported = None
    top_logprobs: Annotated[Any, refuse_unless(0)] = None
    truncation: Annotated[Any, refuse_unless("disabled")] = None
    max_tool_calls: Unsupported = None


def _translate(request: ResponsesRequest) -> ChatRequest:
    """Return the chat of a request. Raise ApiError if it is invalid."""
    text_format, choice = request.text and request.text.format, request.tool_choice
    response_format: dict[str, Any] | None = None
    if text_format:
        response_format = {"type": text_format.type}
        if text_format.type == "json_schema" and text_format.schema_object is not None:
            response_format["json_schema"] = {"name": text_format.name, "schema": text_format.schema_object}
    tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in request.tools or []]
    return make_chat(
        {
            "messages": _translate_items(request),
            "tools": tools,
            "tool_choice": {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, _NamedTool)
            else choice,
            "parallel_tool_calls": request.parallel_tool_calls,
            "response_format": response_format,
            "max_completion_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stream": request.stream,
        }
    )


def _translate_items(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the messages of a chat. Reasoning, text and calls of the assistant that follow each other are one."""
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    reasoning = ""
    items = request.input if not isinstance(request.input, str) else [_MessageItem(role="user", content=request.input)]
    for item in items:
        if isinstance(item, _ReasoningItem):
            reasoning += _join(item.content or [])
        elif isinstance(item, _OutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _join(item.output)})
        elif isinstance(item, _CallItem):
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": None, "reasoning_content": reasoning or None})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
            reasoning = ""
        elif item.role in ("system", "developer") and [message["role"] for message in messages] == ["system"]:
            messages[0]["content"] += f"\n\n{_join(item.content)}"  # templates take one, at the start
        else:
            message: dict[str, Any] = {"role": item.role, "content": _join(item.content)}
            if item.role == "assistant":
                message["reasoning_content"], reasoning = reasoning or None, ""
            messages.append(message)
    return messages


def _join(content: str | list[_InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class _ResponseWriter:
    """Writes a response, whole or as events, from the message or the deltas of a chat."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._items = AnswerItems()
        self._ids: list[str] = []
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None
        self._response = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            **dict.fromkeys(("error", "previous_response_id", "user")),
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}}
            if request.text is None or request.text.format is None
            else request.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": request.tool_choice.model_dump()
            if isinstance(request.tool_choice, _NamedTool)
            else request.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or []],
            "top_p": request.top_p,
            "truncation": "disabled",
        }

    def add(self, body: Mapping[str, Any]) -> Iterator[ItemEvent]:
        """Add the body of a chat or a chunk."""
        self._response["model"] = body["model"]
        self._usage = body.get("usage") or self._usage
        for choice in body["choices"]:
            yield from self._items.add(choice.get("message") or choice.get("delta") or {})
            if reason := choice["finish_reason"]:
                self._finish_reason = reason
                yield from self._items.finish()

    def write(self, status: str = "", error: str | None = None) -> dict[str, Any]:
        """Return the response so far. Its ``status`` is that of its end by default."""
        is_cut = self._finish_reason == "length"
        status = status or ("incomplete" if is_cut else "completed")
        items = self._items.items
        last = {"status": "incomplete"} if is_cut else {}
        output = [self.write_item(item) | (last if item is items[-1] else {}) for item in items]
        return {
            **self._response,
            "status": status,
            "error": error and {"code": "server_error", "message": error},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [] if status == "in_progress" else output,
            "usage": self._write_usage(),
        }

    def write_item(self, item: AnswerItem, status: str = "completed") -> dict[str, Any]:
        """Return an item of the output."""
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[item.kind]
        while len(self._ids) <= item.index:
            self._ids.append(f"{prefix}_{uuid.uuid4().hex}")
        head = {"id": self._ids[item.index], "status": status}
        is_begin = status == "in_progress"
        if item.kind == "call":
            call = {"call_id": item.call["id"], "name": item.call["name"], "arguments": item.text}
            return {**head, "type": "function_call", **call}
        content = [] if is_begin else [self.write_part(item, item.text)]
        if item.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def write_part(self, item: AnswerItem, text: str) -> dict[str, Any]:
        """Return the only part of the content of an item."""
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _write_usage(self) -> dict[str, Any] | None:
        if (usage := self._usage) is None:
            return None
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},  # they are not counted on their own
            "total_tokens": usage["total_tokens"],
        }


_DELTAS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


def _write_item_event(writer: _ResponseWriter, event: ItemEvent) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the types and the fields of the events in a stream for one of an item."""
    item, kind = event.item, _DELTAS[event.item.kind]
    status = "in_progress" if event.kind == "begin" else "completed"
    whole = writer.write_item(item, status)
    place: dict[str, Any] = {"item_id": whole["id"], "output_index": item.index}
    has_part = item.kind != "call"
    if has_part:
        place["content_index"] = 0
    logprobs: dict[str, Any] = {"logprobs": []} if item.kind == "text" else {}
    if event.kind == "begin":
        yield "response.output_item.added", {"output_index": item.index, "item": whole}
        if has_part:
            yield "response.content_part.added", {**place, "part": writer.write_part(item, "")}
    elif event.kind == "text":
        yield f"response.{kind}.delta", {**place, "delta": event.text, **logprobs}
    else:
        done = {"text": item.text} if has_part else {"arguments": item.text, "name": item.call["name"]}
        yield f"response.{kind}.done", {**place, **done, **logprobs}
        if has_part:
            yield "response.content_part.done", {**place, "part": writer.write_part(item, item.text)}
        yield "response.output_item.done", {"output_index": item.index, "item": whole}


async def _write_typed_events(request: ResponsesRequest, chunks: Chunks) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    writer = _ResponseWriter(request)
    is_begun = False
    try:
        async for chunk in chunks:
            item_events = [*writer.add(chunk)]
            if not is_begun:
                is_begun = True
                for name in ("created", "in_progress"):
                    yield f"response.{name}", {"response": writer.write("in_progress")}
            for item_event in item_events:
                for typed in _write_item_event(writer, item_event):
                    yield typed
    except ApiError as error:
        if is_begun:
            yield "response.failed", {"response": writer.write("failed", str(error))}
        else:
            yield "error", {"code": "server_error", "message": str(error), "param": None}
        return
    response = writer.write()
    yield f"response.{response['status']}", {"response": response}


async def _write_events(request: ResponsesRequest, chunks: Chunks) -> AsyncIterator[str]:
    number = 0
    async for name, fields in _write_typed_events(request, chunks):
        event = {"type": name, "sequence_number": number, **fields}
        yield f"event: {name}\ndata: {json.dumps(event)}\n\n"
        number += 1


def _write_whole(request: ResponsesRequest, body: dict[str, Any]) -> dict[str, Any]:
    writer = _ResponseWriter(request)
    for _ in writer.add(body):
        pass
    return writer.write()


RESPONSES = ApiForm(
    ResponsesRequest,
    _translate,
    _write_whole,
    _write_events,
    {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"},
)

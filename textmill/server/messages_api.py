"""``POST /v1/messages`` of Anthropic's API: messages and their events, from those of a chat.

Source: https://docs.anthropic.com/en/api/messages, https://docs.anthropic.com/en/docs/build-with-claude/streaming.
"""

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from lm.files.json import parse_json
from textmill.server.answer_items import AnswerItem, AnswerItems, ItemEvent
from textmill.server.api_form import ApiForm, Chunks
from textmill.server.messages_request import FIELD_NAMES, MessagesRequest
from textmill.server.requests import ApiError

_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}


class _MessageWriter:
    """Writes a message from the message or the deltas of a chat."""

    def __init__(self, request: MessagesRequest) -> None:
        self._request, self._items = request, AnswerItems()
        self._id = f"msg_{uuid.uuid4().hex}"
        self._body: Mapping[str, Any] = {}  # the last one
        self._stop: tuple[str, str | None] | None = None

    def add(self, body: Mapping[str, Any]) -> Iterator[ItemEvent]:
        """Add the body of a chat or a chunk."""
        self._body = body
        for choice in body["choices"]:
            yield from self._items.add(choice.get("message") or choice["delta"])
            if reason := choice["finish_reason"]:
                self._stop = self._find_stop(reason, choice.get("stop_reason"))
                yield from self._items.finish()

    def _find_stop(self, reason: str, stop_text: str | None) -> tuple[str, str | None]:
        if reason == "length":
            is_full = self._body["usage"]["completion_tokens"] >= self._request.max_tokens
            return "max_tokens" if is_full else "model_context_window_exceeded", None
        if reason == "stop" and stop_text in (self._request.stop_sequences or []):
            return "stop_sequence", stop_text
        return _STOP_REASONS[reason], None

    def write(self, is_begin: bool = False) -> dict[str, Any]:
        """Return the message."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._body["model"],
            "content": [] if is_begin else [_write_block(item) for item in self._items.items],
            **({"stop_reason": None, "stop_sequence": None} if is_begin else self.write_stop()),
            "usage": self.write_usage() | ({"output_tokens": 0} if is_begin else {}),
        }

    def write_stop(self) -> dict[str, Any]:
        """Return why the message ended, if it has."""
        reason, text = self._stop or (None, None)
        return {"stop_reason": reason, "stop_sequence": text}

    def write_usage(self) -> dict[str, Any]:
        """Return the tokens so far. Those of the prompt that were in the cache count on their own."""
        usage = self._body["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _write_block(item: AnswerItem) -> dict[str, Any]:
    """Return a block of content. A call that was cut, whose arguments are no JSON, is a text."""
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    if item.kind == "call":
        try:
            return {"type": "tool_use", **item.call, "input": parse_json(item.text)}
        except ValueError:
            pass
    return {"type": "text", "text": item.text}


def _write_event(event: ItemEvent) -> dict[str, Any]:
    """Return the event of a stream for one of an item."""
    index, kind = event.item.index, event.item.kind
    if event.kind == "begin":
        empty = {
            "text": {"type": "text", "text": ""},
            "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
            "call": {"type": "tool_use", **event.item.call, "input": {}},
        }
        return {"type": "content_block_start", "index": index, "content_block": empty[kind]}
    if event.kind == "end":
        return {"type": "content_block_stop", "index": index}
    deltas = {
        "text": {"type": "text_delta", "text": event.text},
        "reasoning": {"type": "thinking_delta", "thinking": event.text},
        "call": {"type": "input_json_delta", "partial_json": event.text},
    }
    return {"type": "content_block_delta", "index": index, "delta": deltas[kind]}


async def _write_typed_events(request: MessagesRequest, chunks: Chunks) -> AsyncIterator[dict[str, Any]]:
    writer, is_begun = _MessageWriter(request), False
    try:
        async for chunk in chunks:
            events = [*writer.add(chunk)]
            if not is_begun:
                is_begun = True
                yield {"type": "message_start", "message": writer.write(is_begin=True)}
            for event in events:
                yield _write_event(event)
    except ApiError as error:
        yield error.anthropic_body
        return
    yield {"type": "message_delta", "delta": writer.write_stop(), "usage": writer.write_usage()}
    yield {"type": "message_stop"}


async def _write_events(request: MessagesRequest, chunks: Chunks) -> AsyncIterator[str]:
    async for event in _write_typed_events(request, chunks):
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def _write_whole(request: MessagesRequest, body: dict[str, Any]) -> dict[str, Any]:
    writer = _MessageWriter(request)
    for _ in writer.add(body):
        pass
    return writer.write()


MESSAGES = ApiForm(
    MessagesRequest, MessagesRequest.translate, _write_whole, _write_events, FIELD_NAMES, cuts_at_context=True
)

"""Fuzz target for requests with tools, in the forms of OpenAI's chats and responses and of Anthropic's messages."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.fuzz.choices import Choices, json_bytes, mutate
from tests.fuzz.interfaces import refuse_constant, send
from tests.helpers.generating import make_model
from tests.helpers.tool_models import NOW, TOOL, tool_tokenizer
from textmill.server.app import build_app

_FUNCTION = TOOL["function"]
_ARGUMENTS = '{"place": "Rome", "days": 2}'
_FORMAT = {"type": "json_schema", "name": "a", "schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": _ARGUMENTS}}
_CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning_content": "c", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "blue"},
    ],
    "tools": [{**TOOL, "function": {**_FUNCTION, "strict": True}}, NOW],
    "parallel_tool_calls": True,
}
_RESPONSES: dict[str, Any] = {
    "instructions": "a",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "c"}]},
        {"type": "function_call", "call_id": "abcdefghi", "name": "weather", "arguments": _ARGUMENTS},
        {"type": "function_call_output", "call_id": "abcdefghi", "output": "blue"},
    ],
    "tools": [{"type": "function", **_FUNCTION, "strict": True}],
    "text": {"format": _FORMAT},
}
_MESSAGES: dict[str, Any] = {
    "system": [{"type": "text", "text": "a"}],
    "messages": [
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "c", "signature": ""},
                {"type": "tool_use", "id": "abcdefghi", "name": "weather", "input": {"place": "Rome", "days": 2}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "abcdefghi", "content": "blue"}]},
    ],
    "tools": [{"name": "weather", "description": "w", "input_schema": _FUNCTION["parameters"]}],
    "stop_sequences": ["x"],
}
_CHOICES: dict[str, list[Any]] = {
    "/v1/chat/completions": ["auto", "required", "none", {"type": "function", "function": {"name": "weather"}}],
    "/v1/responses": ["auto", "required", {"type": "function", "name": "weather"}],
    "/v1/messages": [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "none"}],
    "/v1/messages/count_tokens": [{"type": "auto"}, {"type": "any"}],
}
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**_CHAT, "max_tokens": 30},
    "/v1/responses": {**_RESPONSES, "max_output_tokens": 30},
    "/v1/messages": {**_MESSAGES, "max_tokens": 30},
    "/v1/messages/count_tokens": _MESSAGES,
}


@cache
def _app(family: str) -> Any:
    tokenizer = tool_tokenizer(family)
    return build_app(make_model(tokenizer.size, 2048).eval(), tokenizer, "tiny", 4, 4, prefix_cache_bytes=1 << 16)


def tool_request(choices: Choices, folder: Path) -> None:
    """Send a request body. The response must be a result, or an error in the form of the API."""
    path = choices.pick(list(_BODIES))
    body = {**_BODIES[path], "tool_choice": choices.pick(_CHOICES[path]), "temperature": 1}
    if "count" not in path:
        body["stream"] = bool(choices.below(2))
    if "text" in body and choices.below(2):
        del body["text"]
    family = choices.pick(["qwen3", "qwen", "llama", "mistral", "granite"])
    status, response = send(_app(family), path, json_bytes(mutate(body, choices), choices))
    assert status in (200, 400, 404, 413, 429), (status, response)
    if response.startswith((b"data: ", b"event: ")):
        for event in filter(None, response.split(b"\n\n")):
            data = event.partition(b"data: ")[2]
            if data != b"[DONE]":
                json.loads(data, parse_constant=refuse_constant)
        assert b"server_error" not in response and b"api_error" not in response, response
        return
    content = json.loads(response, parse_constant=refuse_constant)
    if status != 200:
        assert len(content["error"]["message"]) < 700, response
        assert (content.get("type") == "error") == path.startswith("/v1/messages"), response
    elif "choices" in content:
        assert content["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls"), response
